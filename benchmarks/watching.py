"""Rows about `watch`: what statistics of every layer add to a training step, beside what people use today.

Takes a GPT-2 of four layers with an optimizer, hands `Row`s to ``rows``. On a GPU, ``gpu_statistics`` has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row, Samples, interleave, ratios, spread, trial, typical
from models import GPT, Shape, tokens_for
from subject import Setting, is_leaf
from torch import Tensor, nn

import hookline as hl

__all__ = ["watching"]

FOUR = Shape("transformer", 4, 256, 4, 1000, 8, 128)
"""What a laptop trains: 3 million parameters, 217 ms a step on one core."""
BOTH = ("forward", "backward")


class Training:
    """A transformer with its optimizer, one step at a time; on a GPU as people train there, in bf16 autocast."""

    def __init__(self, shape: Shape, setting: Setting) -> None:
        torch.manual_seed(0)
        self._on_gpu = setting.device.type == "cuda"
        self.model = GPT(shape).to(setting.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self._on_gpu)
        self.tokens = tokens_for(shape, setting.device)
        self.words = f"{shape}, bf16 autocast, fused AdamW" if self._on_gpu else f"{shape}, AdamW"

    def step(self, model: Callable[..., Any] | None = None) -> None:
        """Forward, backward, optimizer."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self._on_gpu):
            logits = (self.model if model is None else model)(self.tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), self.tokens.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def watched(self, target: Any = is_leaf, **options: Any) -> Callable[[], AbstractContextManager[object]]:
        """A watch on it, to be entered."""
        return lambda: hl.watch(self.model, target, optimizer=self.optimizer, **options)


def watching(setting: Setting) -> Iterator[Row]:
    """Every leaf, every step, by several sets of statistics; now and then; compiled; and by hand, with ``.item()``."""
    training = Training(FOUR, setting)
    hooked = {
        "watch": training.watched(on=BOTH),
        "watch, all four kinds": training.watched(),
        "watch, forward": training.watched(on="forward"),
        "watch, norm and mean": training.watched(on=BOTH, stats=("norm", "mean")),
        "watch every 50": training.watched(every=hl.StepSchedule("stride", stride=50, warmup=1)),
        "empty": lambda: hl.HandleSet(
            [
                hl.attach(training.model, is_leaf, nothing, observe=True),
                hl.attach(training.model, is_leaf, nothing_before, on="backward_pre", observe=True),
            ]
        ),
        "by hand": lambda: by_hand(training.model),
        "bare": nullcontext,
        "bare again": nullcontext,
    }
    trials = [trial(name, training.step, inner=2, hooked=on, device=setting.device) for name, on in hooked.items()]
    samples = interleave(trials, setting.rounds(40))
    leaves = "all leaves but embeddings"
    yield _row(samples, "watch", f"`hl.watch` on {leaves}, forward and gradient, default set", 1.20)
    yield _row(samples, "watch every 50", f"all four kinds on {leaves}, `every=50`, steps that are not due", 1.02)
    yield _row(samples, "watch, all four kinds", f"`hl.watch` on {leaves}, parameters and their gradients too")
    yield _row(samples, "watch, forward", f"`hl.watch` on {leaves}, forward alone")
    yield _row(samples, "watch, norm and mean", f"`hl.watch` on {leaves}, forward and gradient, two statistics")
    yield _row(samples, "empty", f"two empty observers on {leaves}")
    yield _row(
        samples, "by hand", f"torch's hooks on {leaves}, six statistics with `.item()` each, full backward hooks"
    )
    yield depth(setting)
    yield from compiled(setting)


def _row(samples: Samples, name: str, words: str, at_most: float | None = None, model: str = str(FOUR)) -> Row:
    return Row(
        f"{name}, training step",
        words,
        "the same step without hooks",
        f"{model}, AdamW",
        spread(ratios(samples, name, "bare")),
        spread(ratios(samples, "bare again", "bare")),
        f"{typical(samples, name) * 1e3:.1f} / {typical(samples, 'bare') * 1e3:.1f} ms",
        at_most=at_most,
    )


def depth(setting: Setting) -> Row:
    """Four times the layers, four times the cost."""
    shapes = {layers: Shape("transformer", layers, 64, 4, 256, 4, 64) for layers in (4, 16)}
    trials = []
    for layers, shape in shapes.items():
        training = Training(shape, setting)
        hooked = {"watched": training.watched(on=BOTH), "bare": nullcontext, "again": nullcontext}
        trials += [
            trial(f"{name} {layers}", training.step, inner=5, hooked=on, device=setting.device)
            for name, on in hooked.items()
        ]
    samples = interleave(trials, setting.rounds(40))
    cost = {layers: [a - b for a, b in zip(samples[f"watched {layers}"], samples[f"bare {layers}"], strict=True)]
            for layers in shapes}  # fmt: skip
    return Row(
        "watch, four times as deep",
        "what `hl.watch` adds to a step of 16 layers",
        "four times what it adds to one of 4",
        str(shapes[16]),
        spread([deep / (4 * flat) for deep, flat in zip(cost[16], cost[4], strict=True)]),
        spread(ratios(samples, "again 16", "bare 16")),
        f"{typical(samples, 'watched 16') * 1e3:.1f} against {typical(samples, 'bare 16') * 1e3:.1f} ms bare",
        at_most=1.1,
    )


def compiled(setting: Setting) -> Iterator[Row]:
    """Statistics in the graph."""
    torch._dynamo.reset()
    training = Training(FOUR, setting)
    model = torch.compile(training.model, fullgraph=True)
    hooked = {
        "compiled, watch forward": training.watched("*", on="forward"),
        "compiled, watch": training.watched("*", on=BOTH),
        "bare": nullcontext,
        "bare again": nullcontext,
    }
    run = lambda: training.step(model)  # noqa: E731
    trials = [trial(name, run, inner=2, hooked=on, device=setting.device) for name, on in hooked.items()]
    samples = interleave(trials, setting.rounds(30))
    words = "of every module of a compiled model, default set, in the graph"
    yield _row(samples, "compiled, watch forward", f"outputs {words}", model=f"{FOUR}, compiled")
    yield _row(samples, "compiled, watch", f"outputs and gradients {words}", model=f"{FOUR}, compiled")


def nothing(module, args, output): ...
def nothing_before(module, grads): ...


@contextmanager
def by_hand(model: nn.Module, *, fetch: bool = True) -> Iterator[None]:
    """What people write: six statistics of every output and gradient, each fetched at once, or left where it is."""
    kept: dict[str, list[Any]] = {}

    def note(name: str, tensor: Tensor) -> None:
        numbers = tensor.detach().float()
        found = (
            numbers.mean(),
            numbers.std(),
            numbers.norm(),
            numbers.min(),
            numbers.max(),
            (numbers == 0).float().mean(),
        )
        kept[name] = [each.item() for each in found] if fetch else list(found)

    handles = []
    for name, module in model.named_modules():
        if is_leaf(name, module):
            keep = lambda module, args, output, name=name: note(f"{name}/forward", output)  # noqa: E731
            keep_grad = lambda module, gi, go, name=name: go[0] is None or note(f"{name}/backward", go[0])  # noqa: E731
            handles += [
                module.register_forward_hook(keep),
                module.register_full_backward_hook(lambda *args, keep_grad=keep_grad: keep_grad(*args) and None),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
