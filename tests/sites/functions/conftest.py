"""Every test here ends with the process as it began: the stacks of modes, the classes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers_functions import modes, patched_classes


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No mode on a stack that was not there, no class with another ``apply``."""
    before = modes()
    yield
    assert [mode for mode in modes() if mode not in before] == []
    assert patched_classes() == []
