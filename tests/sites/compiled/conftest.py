"""Every test here begins with nothing compiled, and ends with torch's switch for guards on hooks as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """The compiler starts anew and counts from zero."""
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # the compiler and what it keeps: collected twice for each test, they take longer than many tests
    counters.clear()
    torch.manual_seed(0)
    yield
    gc.collect()
    assert torch._dynamo.config.skip_nnmodule_hook_guards
