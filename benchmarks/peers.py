"""Rows about capturing beside other libraries: what the whole idiom adds to a forward, ours against theirs.

Takes what each library offers from ``threads``, hands `Row`s to ``rows``. Attach, forward, read, remove: the output of
one block of a GPT-2 that all of them know. Every library is measured in a process of its own, as some leave torch
changed behind them, and ours beside it in the same process::

    python benchmarks/peers.py nnsight 50    the times of one library over fifty rounds, as JSON

The nearest is captum: 111 calls of Python beside the forward, where ours makes 116. What ours has more are objects: the
context that keeps two threads apart, the counter of forwards and its step, the watch for compiled code, the receipt.

What there is to compare with, and how to install it, is in ``peers.txt``; what is not installed is listed as that.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from measure import Row, interleave, ratios, spread, trial, typical
from subject import Setting
from threads import BLOCK, LENGTH, LIBRARIES, NOTHING, in_child, installed, make_model
from torch import Tensor, nn

import hookline as hl

__all__ = ["peers"]

_KEPT = "transformers"
"""Leaves its hooks in the model after the first call that asks, and attaches nothing at the next: ours stays open too.
Each adds some 20 µs to a forward of 1,500, so whole calls are compared: a ratio of the two differences is noise."""
_PEERS = [name for name in LIBRARIES if not name.startswith("hookline") and name != _KEPT]


def peers(setting: Setting) -> Iterator[Row]:
    """A row per library."""
    for name in _PEERS:
        library = LIBRARIES[name]
        ratio = same = NOTHING
        try:
            missing = [package for package in (library.package, "transformers") if not installed(package)]
            if missing:
                words = f"{missing[0]} is not installed"
            else:
                samples = in_child(name, setting.rounds(50) if library.rounds > 3 else 5, script=__file__)
                ratio = spread(ratios(samples, "ours", "theirs", beyond="bare"))
                same = spread(ratios(samples, "ours again", "ours", beyond="bare"))
                words = _words(samples, library.package)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            words = f"failed: {type(error).__name__}"
        yield Row(
            f"capture of one block, against {library.label}",
            "what `hl.capture(model, name)` adds to a forward, attach to remove",
            "what it adds for the same output",
            f"GPT-2 of transformers: 4 layers, d 16, seq {LENGTH}, batch 1; output of one block",
            ratio,
            same,
            words,
            at_most=1.0 if ratio is not NOTHING and name != "torch" else None,
        )
    yield from _kept_open(setting)


def _kept_open(setting: Setting) -> Iterator[Row]:
    """A capture that stays open over many forwards, beside hooks that stay too."""
    library = LIBRARIES[_KEPT]
    if not installed(library.package):
        return
    samples = in_child(_KEPT, setting.rounds(200), script=__file__)
    yield Row(
        f"capture of one block, kept open, against {library.label}",
        "a forward in an open `hl.capture(model, name)`, and `cache.clear()`",
        "the same forward with the option: its hooks stay in the model",
        f"GPT-2 of transformers: 4 layers, d 16, seq {LENGTH}, batch 1; output of one block",
        spread(ratios(samples, "ours", "theirs")),
        spread(ratios(samples, "ours again", "ours")),
        _words(samples, library.package),
        at_most=1.0,
    )


def _words(samples: dict[str, list[float]], package: str) -> str:
    bare, ours, theirs = (typical(samples, name) * 1e6 for name in ("bare", "ours", "theirs"))
    return (
        f"{ours - bare:.0f} / {theirs - bare:.0f} µs beyond {bare:.0f}; {package} {importlib.metadata.version(package)}"
    )


# -- in the child ----------------------------------------------------------------------------------------------------


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """The times of one library, of ours, and of the bare forward."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tokens = torch.full((1, LENGTH), 1)
    model = make_model()
    theirs, ours = LIBRARIES[name].prepare(model), by_open_capture() if name == _KEPT else by_capture(model)
    calls = {"bare": model, "ours": ours, "ours again": ours, "theirs": theirs}
    inner = 5 if LIBRARIES[name].rounds > 3 else 1
    trials = [trial(label, lambda call=call: call(tokens), inner=inner) for label, call in calls.items()]
    return dict(interleave(trials, rounds))


def by_capture(model: nn.Module) -> Any:
    """What ours offers."""

    def capture(tokens: Tensor) -> Any:
        with hl.capture(model, BLOCK) as cache:
            model(tokens)
        return cache[BLOCK].output

    return capture


def by_open_capture() -> Any:
    """What ours offers to who captures at each forward; on a model of its own, as it stays."""
    model = make_model()
    cache = hl.capture(model, BLOCK)

    def capture(tokens: Tensor) -> Any:
        cache.clear()
        model(tokens)
        return cache[BLOCK].output

    return capture


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
