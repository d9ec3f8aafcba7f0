"""Rows about the checks of `hookline.debug` that are always on: the check of modules, the flight recorder.

Takes the transformer of ``watching``, hands `Row`s to ``rows``. A sample is as many steps as one snapshot serves, so
that the copy of the run which the check keeps is in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from measure import Row, interleave, ratios, spread, trial, typical
from models import SMALL
from subject import Setting
from watching import FOUR, Training

import hookline as hl
from hookline.debug import FlightRecorder, find_bad_operations

__all__ = ["debug_checks"]

STEPS = 16


def debug_checks(setting: Setting) -> Iterator[Row]:
    """Each alone, against the bare step."""
    on_gpu = setting.device.type == "cuda"
    shape = SMALL if on_gpu else FOUR
    training = Training(shape, setting)
    run = _Steps(training)
    hooked: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "module check": run.checked,
        "flight recorder": run.recorded,
        "bare": nullcontext,
        "bare again": nullcontext,
    }
    trials = [trial(name, run, inner=1, batch=STEPS, hooked=on, device=setting.device) for name, on in hooked.items()]
    samples = interleave(trials, setting.rounds(8 if on_gpu else 20))
    rows = {
        "module check": ("`find_bad_operations` on all modules, forward and gradient, with its copy of the run every "
                         f"{STEPS} steps", 1.15 if on_gpu else 1.10),
        "flight recorder": ("`FlightRecorder` of the blocks, losses and batches of every step", 1.02),
    }  # fmt: skip
    for name, (words, at_most) in rows.items():
        yield Row(
            f"{name}, training step",
            words,
            "the same step without hooks",
            training.words,
            spread(ratios(samples, name, "bare")),
            spread(ratios(samples, "bare again", "bare")),
            f"{typical(samples, name) * 1e3:.1f} / {typical(samples, 'bare') * 1e3:.1f} ms",
            at_most=at_most,
        )


class _Steps:
    """Make a step in the way that is chosen now."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._step: Callable[[], object] = training.step

    def __call__(self) -> None:
        self._step()

    @contextmanager
    def checked(self) -> Iterator[None]:
        """By the check."""
        training = self._training
        step_fn = lambda batch: training.step()  # noqa: E731
        with find_bad_operations(training.model, training.optimizer, step_fn=step_fn, every=STEPS) as check:
            yield from self._by(lambda: check.step(training.tokens))
        assert check.reports == []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """With the recorder."""
        training = self._training
        with tempfile.TemporaryDirectory() as folder:
            recorder = FlightRecorder(to=Path(folder) / "flight.json")
            with hl.follow(training.model, training.optimizer, [recorder]):
                yield from self._by(training.step)
        assert recorder.written == []

    def _by(self, step: Callable[[], object]) -> Iterator[None]:
        before, self._step = self._step, step
        try:
            yield
        finally:
            self._step = before
