"""Every test here ends with the process as it began: the stack of function modes, the kernels, the classes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers_functions import modes, overridden_kernels, patched_classes


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No mode on the stack that was not there, no kernel of ours registered, no class with another ``apply``."""
    before, kernels = modes(), overridden_kernels()
    yield
    assert [mode for mode in modes() if mode not in before] == []
    assert overridden_kernels() - kernels == set()
    assert patched_classes() == []
