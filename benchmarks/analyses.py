"""Rows about the built-in analyses: what they add to a run of ``mod_arithmetic``, and a product with the Hessian.

Takes the embedded experiment with its groups of hooks, hands `Row`s to ``rows``. Several runs are alive at once, each
in a thread of its own, and take turns epoch by epoch; a run is timed by the CPU time of its thread, so that neither
the others nor what else the machine does is counted. oneDNN is on, as it is in a user's run.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from measure import Row, Samples, ratios, spread, typical
from subject import Setting

import hookline as hl
from hookline.training.mod_arithmetic import Config, ModArithmetic

__all__ = ["analyses"]

PLAIN, AGAIN = "no hooks", "no hooks again"
MODEL = "mod_arithmetic, 9 steps an epoch"
FIRST = 5
"""Epochs that do not count: allocators and windows warm up."""
SLICE = 10
"""Epochs that are one sample, 90 steps: some hooks look at every thirtieth step only, and are to be counted with it."""


class TakingTurns:
    """A run that stops after every epoch until it is told to go on."""

    def __init__(self, hooks: Sequence[str], epochs: int) -> None:
        self.seconds: list[float] = []
        torch.manual_seed(0)
        self._experiment = ModArithmetic(Config(epochs=epochs))
        self._experiment.on_epoch_end = self._epoch_is_over  # type: ignore[method-assign]
        # With the arguments that `hookline run` would give them.
        config = {name: given for name, given in ModArithmetic.hook_config.items() if name in hooks}
        sinks = [hl.sinks.MemorySink()]
        self._manager = hl.HookManager(hooks, hook_config=config, sinks=sinks, loop_type="epoch") if hooks else None
        self._epochs = epochs
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._since = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def next_epoch(self) -> None:
        """Train for one epoch."""
        self._go.release()
        self._done.acquire()
        if self._epochs == 0:
            raise RuntimeError("a run has ended before its time; what it raised stands above")

    def finish(self) -> None:
        """The last one is over."""
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        self._since = time.thread_time()
        try:
            hl.epoch_loop(self._experiment, epochs=self._epochs, manager=self._manager)
        finally:
            self._epochs = 0
            self._done.release()

    def _epoch_is_over(self, epoch: int, metrics: Any) -> None:
        self.seconds.append(time.thread_time() - self._since)
        self._done.release()
        self._go.acquire()
        self._since = time.thread_time()


def analyses(setting: Setting) -> Iterator[Row]:
    """Groups of hooks, then every hook alone, each beside a run without any."""
    sets, epochs = ModArithmetic.hook_sets, setting.rounds(60) + FIRST
    samples = _take_turns({"observers": sets["observers"]}, 2 * epochs - FIRST)
    yield _row(samples, "observers", "`--with-hooks observers`", at_most=1.25)
    samples = _take_turns({"full": sets["full"]}, max(epochs // 2, FIRST + 4))
    yield _row(samples, "full", "`--with-hooks full`; its `counterfactual` trains each of these epochs thrice more")
    names = [name for name in sets["full"] if name != "counterfactual"]
    for start in range(0, len(names), 4):  # a few at a time: every run has its own memory
        group = names[start : start + 4]
        samples = _take_turns({name: [name] for name in group}, epochs)
        yield from (_row(samples, name, f"the hook `{name}` alone") for name in group)


def _take_turns(groups: Mapping[str, Sequence[str]], epochs: int) -> Samples:
    """The seconds of an epoch of each run, slice by slice, in turns."""
    with _as_users_have_it():
        runs = {name: TakingTurns(hooks, epochs) for name, hooks in {PLAIN: [], **groups, AGAIN: []}.items()}
        order = list(runs.values())
        for epoch in range(epochs):
            for run in order if epoch % 2 else order[::-1]:
                run.next_epoch()
        for run in order:
            run.finish()
    return {name: _slices(run.seconds[FIRST:]) for name, run in runs.items()}


def _slices(seconds: list[float]) -> list[float]:
    """The mean epoch of each slice; what is left over does not count."""
    size = min(SLICE, len(seconds) // 2)
    return [sum(seconds[start : start + size]) / size for start in range(0, len(seconds) - size + 1, size)]


@contextmanager
def _as_users_have_it() -> Iterator[None]:
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    try:
        with warnings.catch_warnings():  # a hook without reference weights says so; that is how it is run here
            warnings.simplefilter("ignore", hl.HooklineWarning)
            yield
    finally:
        torch.backends.mkldnn.enabled = enabled


def _row(samples: Samples, name: str, words: str, at_most: float | None = None) -> Row:
    found, plain = typical(samples, name), typical(samples, PLAIN)
    return Row(
        f"analyses, {name}",
        words,
        "the same run without hooks",
        MODEL,
        spread(ratios(samples, name, PLAIN)),
        spread(ratios(samples, AGAIN, PLAIN)),
        f"{found * 1e3:.1f} ms and {plain * 1e3:.1f} ms an epoch, CPU time",
        at_most=at_most,
    )
