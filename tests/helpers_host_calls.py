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
from torch import nn

import hookline as hl
from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
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
    """Forget what other tests have done: where something is compiled, hooks are prepared for that, each kind of hook
    that was used once is swept with the others, and once a hooked model was copied, modules are searched for copies.
    """
    # The first hook of a process begins to watch for compilations, and the last one that goes ends it: three calls that
    # are made or not, as a model of another test is gone or not. This one is here all the time.
    kept = nn.Linear(1, 1)
    handle = hl.attach(kept, "", lambda module, args, output: None)
    monkeypatch.setattr(module_hooks, "ON_SWEEP", [])
    monkeypatch.setattr(module_hooks, "COPIES", set())
    monkeypatch.setattr(_torch, "compiled_code", list)
    monkeypatch.setattr(recompile_guard._WATCH, "compiled", False)
    yield
    handle.remove(quiet=True)
