"""Rows about statistics on a GPU: a watched training step of GPT-2, eager and compiled.

Takes a GPT-2 from ``models``, hands `Row`s to ``rows``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from measure import Row, Samples, interleave, ratios, spread, trial, typical
from models import GPT, SMALL, TINY, Block, Shape, tokens_for
from subject import Setting
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl

__all__ = ["HUNDRED", "KINDS", "Training", "gpu_compiled", "gpu_eager", "row", "watching"]

BATCHES = (8, 32)
HUNDRED = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.GELU, Block)
"""All of GPT-2 but what only passes on: dropouts, and what holds the parts of a block together."""
KINDS = ("forward", "backward")
_EAGER = {8: 1.25, 32: 1.12}
_COMPILED = {
    (8, None): {"forward": 1.05, "forward + gradient": 1.1},
    (32, None): {"forward": 1.04, "forward + gradient": 1.07},
    (8, "reduce-overhead"): {"forward + gradient": 1.08},
}
"""The targets, by batch and mode."""


class Training:
    """A GPT-2 with all that a step of training takes."""

    def __init__(self, setting: Setting, batch: int, shape: Shape = SMALL) -> None:
        on_gpu = setting.device.type == "cuda"
        self.shape: Shape = replace(shape, batch=batch) if on_gpu else replace(TINY, layers=2)
        self.device = setting.device
        torch.manual_seed(0)
        self.model = GPT(self.shape).to(setting.device)
        self.run: nn.Module = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.tokens, self.targets = (tokens_for(self.shape, setting.device) for _ in range(2))

    def step(self) -> None:
        """Forward, backward, AdamW."""
        with torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext():
            logits = self.run(self.tokens)
            loss = F.cross_entropy(logits.view(-1, self.shape.vocabulary).float(), self.targets.view(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def peak(self, hooked: Callable[[], AbstractContextManager[object]]) -> float:
        """The most memory that a step takes, in GiB."""
        if self.device.type != "cuda":
            return 0.0
        with hooked():
            self.step()
            self.step()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated() / 2**30


# -- a step of training --------------------------------------------------------------------------------------


def gpu_eager(setting: Setting) -> Iterator[Row]:
    """A watched step, against the bare one; beside it what people write by hand."""
    for batch in BATCHES if setting.device.type == "cuda" else BATCHES[:1]:
        yield from _eager_at(setting, Training(setting, batch), _EAGER[batch])
        torch.cuda.empty_cache()


def _eager_at(setting: Setting, training: Training, limit: float) -> Iterator[Row]:
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": nullcontext,
        "bare again": nullcontext,
        "watch": lambda: watching(training),
        "item": lambda: by_hand(training.model),
    }
    trials = [
        trial(name, training.step, inner=3, hooked=hooked, device=setting.device) for name, hooked in ways.items()
    ]
    samples = interleave(trials, setting.rounds(15 if training.shape.batch <= 8 else 8))
    bare = training.peak(nullcontext)
    for name, words, at_most in (
        ("watch", "`hl.watch` on 100 modules, forward and backward, every step", limit),
        ("item", "six numbers by `.item()`", None),
    ):
        whole = f"{name}, GPT-2 small step, batch {training.shape.batch}"
        yield row(whole, words, training, samples, name, (training.peak(ways[name]), bare), at_most)
    yield every_fifty(setting, training)


def every_fifty(setting: Setting, training: Training) -> Row:
    """Fifty steps of which one is watched: the last; the first that is due comes before them."""
    steps = 50 if setting.device.type == "cuda" else 5
    ways = {"watch": lambda: watching(training, every=steps), "bare": nullcontext, "bare again": nullcontext}
    trials = [
        trial(name, training.step, inner=1, batch=steps, hooked=hooked, device=setting.device)
        for name, hooked in ways.items()
    ]
    samples = interleave(trials, 3 if setting.quick or training.shape.batch > 8 else 5)
    name = f"watch every 50 steps, GPT-2 small, batch {training.shape.batch}"
    return row(name, "`hl.watch(every=50)`, fifty steps", training, samples, "watch", (0.0, 0.0), 1.02)


def gpu_compiled(setting: Setting) -> Iterator[Row]:
    """A compiled step with statistics in the graph, against the compiled bare one."""
    for (batch, mode), targets in _COMPILED.items() if setting.device.type == "cuda" else [*_COMPILED.items()][:1]:
        torch._dynamo.reset()
        trainings, watches, peaks = {}, [], {}
        for name in ("bare", *targets):
            training = trainings[name] = Training(setting, batch)
            if name != "bare":
                kinds = KINDS if "gradient" in name else KINDS[:1]
                watches.append(hl.watch(training.model, HUNDRED, on=kinds, optimizer=training.optimizer))
            training.run = compiled_own(training.model, mode)
            start = time.perf_counter()
            training.step()
            print(f"  compiled {name!r} at batch {batch} in {time.perf_counter() - start:.0f} s", flush=True)
            peaks[name] = training.peak(nullcontext)
        trials = [trial(name, each.step, inner=3, device=setting.device) for name, each in trainings.items()]
        trials.append(trial("bare again", trainings["bare"].step, inner=3, device=setting.device))
        samples = interleave(trials, setting.rounds(15 if batch <= 8 else 8))
        in_mode = "" if mode is None else f", `mode={mode!r}`"
        for name, target in targets.items():
            title = f"compiled, {name} statistics, GPT-2 small step, batch {batch}{'' if mode is None else f', {mode}'}"
            yield row(title, f"`hl.watch` of {name}{in_mode}", trainings[name], samples, name,
                      (peaks[name], peaks["bare"]), target)  # fmt: skip
        for watch in watches:
            watch.remove()
        del trainings, trials, training
        torch.cuda.empty_cache()


def compiled_own(model: nn.Module, mode: str | None = None) -> nn.Module:
    """Compiled, with code of its own: torch keeps compiled versions by the code they are of."""
    forward = GPT.forward
    own = FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__, None, forward.__closure__)
    model.__class__ = type("GPT", (GPT,), {"forward": own})
    whole: nn.Module = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
    return whole


def row(
    name: str,
    words: str,
    training: Training,
    samples: Samples,
    of: str,
    peaks: tuple[float, float],
    limit: float | None,
) -> Row:
    """Return the row of one way to watch, with its times and the peaks of memory, in GiB."""
    times = f"{typical(samples, of) * 1e3:.2f} / {typical(samples, 'bare') * 1e3:.2f} ms"
    memory = f"; peak {peaks[0]:.2f} / {peaks[1]:.2f} GiB" if peaks[1] else ""
    return Row(
        name,
        words,
        "the bare step",
        f"{training.shape}, bf16 autocast, fused AdamW",
        spread(ratios(samples, of, "bare")),
        spread(ratios(samples, "bare again", "bare")),
        times + memory,
        at_most=limit,
    )


# -- ways to watch -------------------------------------------------------------------------------------------


@contextmanager
def watching(training: Training, target: Any = HUNDRED, **options: Any) -> Iterator[None]:
    """Outputs and gradients of a hundred modules."""
    watch = hl.watch(training.model, target, on=KINDS, optimizer=training.optimizer, **options)
    try:
        yield
        lost = [reason for reason in watch.report()["silent"].values() if "not counted" in reason]
        assert not lost, lost
    finally:
        watch.remove(quiet=True)


@contextmanager
def by_hand(model: nn.Module) -> Iterator[None]:
    """What people write: numbers of each output and its gradient, by hooks of torch."""

    def look(x: Tensor) -> None:
        x = x.detach().float()
        for found in (x.mean(), x.std(), x.min(), x.max(), x.norm(), (x == 0).float().mean()):
            found.item()

    def forward(module: nn.Module, args: object, output: Tensor) -> None:
        look(output)
        if output.requires_grad:
            output.register_hook(look)

    handles = [module.register_forward_hook(forward) for module in model.modules() if isinstance(module, HUNDRED)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
