"""Rows about traces: what a trace of every module adds to a training step, and how fast it is read.

Takes the transformer of ``watching``, hands `Row`s to ``rows``. ``debug_peers`` has other tools beside it. A sample is
16 steps, in which a GPU's 4,096 fingerprints are written once; a step that is waited for has a row of its own.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from measure import Row, Samples, interleave, ratios, spread, trial, typical
from models import SMALL
from subject import Setting
from watching import FOUR, Training

from hookline.debug.compare.compare import compare
from hookline.debug.compare.trace import trace

__all__ = ["FLOWS", "debug"]

FLOWS = ("output", "output_grad")
STEPS = 16
LARGE = 64 << 20
"""Bytes of each tensor whose reading is timed."""


def debug(setting: Setting) -> Iterator[Row]:
    """Traces of every module; comparing."""
    shape, at_most = (SMALL, 1.25) if setting.device.type == "cuda" else (FOUR, 1.15)
    training = Training(shape, setting)
    with tempfile.TemporaryDirectory() as folder:
        hooked = _hooked(training, Path(folder))
        samples = _measured(training, hooked, setting, STEPS)
        words = "of every module, outputs and gradients"
        yield _row(samples, training, "trace", f"fingerprints {words}, to disk, {STEPS} steps in a row", at_most)
        yield _row(samples, training, "trace, forward", "fingerprints of outputs of every module, to disk")
        yield _row(samples, training, "trace, default kinds", f"fingerprints {words}, and gradients of parameters")
        alone = _measured(training, {"trace, alone": hooked["trace"]}, setting, 1)
        yield _row(alone, training, "trace, alone", f"fingerprints {words}, one step that is waited for")
        yield comparing(setting, Path(folder))


_Hooked = dict[str, Callable[[], AbstractContextManager[object]]]


def _measured(training: Training, hooked: _Hooked, setting: Setting, steps: int) -> Samples:
    around = hooked | {"bare": nullcontext, "bare again": nullcontext}
    trials = [
        trial(name, training.step, inner=1, batch=steps, hooked=on, device=setting.device)
        for name, on in around.items()
    ]
    return interleave(trials, setting.rounds(10 if steps > 1 else 20))


def _hooked(training: Training, folder: Path) -> _Hooked:
    numbers = itertools.count()

    def traced(*kinds: str) -> Callable[[], AbstractContextManager[object]]:
        return lambda: trace(training.model, to=folder / str(next(numbers)), kinds=kinds, step=training.optimizer)

    return {
        "trace": traced(*FLOWS),
        "trace, forward": traced("output"),
        "trace, default kinds": traced(*FLOWS, "param_grad"),
    }


def _row(samples: Samples, training: Training, name: str, words: str, at_most: float | None = None) -> Row:
    return Row(
        f"debug: {name}, training step",
        words,
        "the same step without hooks",
        training.words,
        spread(ratios(samples, name, "bare")),
        spread(ratios(samples, "bare again", "bare")),
        f"{typical(samples, name) * 1e3:.1f} / {typical(samples, 'bare') * 1e3:.1f} ms",
        at_most=at_most,
    )


# -- reading -----------------------------------------------------------------------------------------------------


def comparing(setting: Setting, folder: Path) -> Row:
    """How long it takes to compare the tensors of two traces, beside the time that 1 GB/s would take."""
    names, value = ("read_a", "read_b"), torch.randn(LARGE // 4)
    for name in names:
        model = torch.nn.Identity()
        with trace(model, to=folder / name, kinds="output", tensors=True, budget=None):
            for number in range(4):
                model(value * (1 + 1e-6 * number * (name == "read_b")))
    samples: Samples = {"compare": [], "compare again": [], "1 GB/s": []}
    for _ in range(setting.rounds(20)):
        for name in ("compare", "compare again"):
            start = time.thread_time()
            compare(folder / "read_a", folder / "read_b")
            samples[name].append(time.thread_time() - start)
        samples["1 GB/s"].append(8 * LARGE / 1e9)
    speed = 8 * LARGE / typical(samples, "compare") / 1e9
    return Row("debug: compare tensors", "`compare` of two traces with tensors", "their bytes at 1 GB/s",
               f"four tensors of {LARGE >> 20} MiB in each", spread(ratios(samples, "compare", "1 GB/s")),
               spread(ratios(samples, "compare again", "compare")), f"{speed:.2f} GB/s", at_most=1.0)  # fmt: skip
