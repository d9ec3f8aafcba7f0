"""What every test starts from."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def compiling_has_been_said() -> None:
    """The warnings that compiled code calls no function hooks come once per process, whichever test compiles first.

    It is tested in processes of its own (tests/sites/functions/test_kernels.py).
    """
    from hookline.sites.functions import kernels, mode

    kernels._Said.compiling = True
    mode._Said.compiled = True
