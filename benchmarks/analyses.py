"""Rows about the built-in analyses: what they add to a run of ``mod_arithmetic``, and a product with the Hessian.

Takes the embedded experiment with its groups of hooks, hands `Row`s to ``rows``. Several runs are alive at once, each
in a thread of its own, and take turns epoch by epoch; a run is timed by the CPU time of its thread, so that neither
the others nor what else the machine does is counted. oneDNN is on, as it is in a user's run.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row, Samples, interleave, ratios, spread, trial, typical
from subject import Setting
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hookline as hl
from hookline.training.mod_arithmetic import Config, ModArithmetic

__all__ = ["analyses", "hessian_products"]

PLAIN, AGAIN = "no hooks", "no hooks again"
MODEL = "mod_arithmetic, 9 steps an epoch"
FIRST = 5
"""Epochs that do not count: allocators and windows warm up."""
SLICE = 10
"""Epochs that are one sample, 90 steps: some hooks look at every thirtieth step only, and are to be counted with it."""
OTHERS = ("gradient_noise_scale", "relu_activations", "fisher_information", "gradient_flow", "relu_gradient_flow")
"""Observers that are in no group of the experiment."""


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
    names = [name for name in sets["full"] if name != "counterfactual"] + list(OTHERS)
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


# -- products with the Hessian -------------------------------------------------------------------------------


def hessian_products(setting: Setting) -> Iterator[Row]:
    """``ModelDataContext.hvp`` beside the two backward passes that it is, and beside a peer."""
    torch.manual_seed(0)
    experiment = ModArithmetic(Config())
    model = experiment.model
    pairs, target = (tensor[:256] for tensor in experiment.train_set.tensors)
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    context = hl.ModelDataContext(model, loss_fn=lambda model, b: F.cross_entropy(model(b[0]), b[1]))

    def by_hand() -> tuple[Tensor, ...]:
        parameters = list(model.parameters())
        with sdpa_kernel(SDPBackend.MATH):  # the fused one has no second derivative
            loss = F.cross_entropy(model(pairs), target)
            firsts = torch.autograd.grad(loss, parameters, create_graph=True)
            slope = sum((g * v).sum() for g, v in zip(firsts, vector.values(), strict=True))
            return torch.autograd.grad(slope, parameters)  # type: ignore[arg-type]

    calls: dict[str, Callable[[], object]] = {
        "hvp": lambda: context.hvp(vector, (pairs, target)),
        "by hand": by_hand,
        "by hand again": by_hand,
    }
    peer = _curvlinops(model, pairs, target, vector)
    if peer is not None:
        calls["curvlinops"] = peer
    samples = interleave([trial(name, call, inner=3) for name, call in calls.items()], setting.rounds(40))
    yield _product(samples, "hvp", "`ModelDataContext.hvp`", 1.1)
    if peer is not None:
        yield _product(samples, "curvlinops", "`HessianLinearOperator` of curvlinops, made beforehand")


def _product(samples: Samples, name: str, words: str, at_most: float | None = None) -> Row:
    return Row(
        f"Hessian times vector, {name}",
        words,
        "two backward passes by hand, the forward included",
        "mod_arithmetic, 256 pairs",
        spread(ratios(samples, name, "by hand")),
        spread(ratios(samples, "by hand again", "by hand")),
        f"{typical(samples, name) * 1e3:.2f} ms and {typical(samples, 'by hand') * 1e3:.2f} ms",
        at_most=at_most,
    )


def _curvlinops(model: Any, pairs: Tensor, target: Tensor, vector: Mapping[str, Tensor]) -> Callable[[], object] | None:
    try:
        from curvlinops import HessianLinearOperator
    except ImportError:
        return None
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with sdpa_kernel(SDPBackend.MATH):
        try:
            operator = HessianLinearOperator(model, torch.nn.CrossEntropyLoss(), parameters, [(pairs, target)])
        except (TypeError, AttributeError):  # an earlier version, which takes a list
            parameters = list(parameters.values())  # type: ignore[assignment]
            operator = HessianLinearOperator(model, torch.nn.CrossEntropyLoss(), parameters, [(pairs, target)])
    flat = torch.cat([part.reshape(-1) for part in vector.values()])

    def product() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return operator @ flat

    return product
