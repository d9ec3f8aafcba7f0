"""Count calls of functions of ours, in a state that does not depend on the tests that ran before."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import hookline as hl
from hookline.sites import _torch
from hookline.sites.modules import module_hooks

_OURS = str(Path(hl.__file__).parent)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of functions of hookline in this thread."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            calls[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what other tests have left would be taken down in here, which calls ours
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        gc.enable()


@contextmanager
def unaffected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what other tests have done: each kind of hook that was used once is swept with the others."""
    monkeypatch.setattr(module_hooks, "ON_SWEEP", [])
    monkeypatch.setattr(_torch, "compiled_code", list)
    yield
