"""Rows about compiled models: what an observer costs there, and what it leaves behind.

Takes a compiled GPT-2, hands `Row`s to ``rows``. On a GPU the model is compiled with CUDA graphs, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType

import torch
from measure import Row, Spread, interleave, ratios, spread, trial, typical
from models import GPT, TINY
from subject import Setting, Subject, empty, empty_grad
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hookline as hl

__all__ = ["compiled"]

_BLOCKS = "h.#"
_GRAPHS = 12


def reads(module, args, output):
    """Looks at what it is shown, so that it has to be kept for it."""
    return args is output


def compiled(setting: Setting) -> Iterator[Row]:
    """Forward and step of a compiled model under observers, and after them."""
    modes = ("default", "reduce-overhead") if setting.device.type == "cuda" else ("default",)
    for mode in modes:
        yield from observing(setting, mode)
        yield calling_an_operator(setting, mode)
        yield removed_again(setting, mode)
    yield twelve_cycles(setting)


def compile_anew(setting: Setting, mode: str) -> tuple[Subject, nn.Module]:
    """A compiled model whose code nobody else has compiled: torch keeps compiled versions by the code they are of."""
    torch._dynamo.reset()
    subject = Subject(TINY, setting)
    return subject, compile_own(subject.model, mode)


def compile_own(model: nn.Module, mode: str) -> nn.Module:
    forward = GPT.forward
    own = FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__, None, forward.__closure__)
    model.__class__ = type("GPT", (GPT,), {"forward": own})
    whole: nn.Module = torch.compile(model, mode=mode, fullgraph=True)
    return whole


def observing(setting: Setting, mode: str) -> Iterator[Row]:
    """What one more observer on each block adds, for each block and call."""
    subject, model = compile_anew(setting, mode)
    blocks = len(hl.find(subject.model, _BLOCKS))
    variants: dict[str, tuple[str, float | None, Callable[[], None], Callable[..., object], str]] = {
        "empty observer": ("an empty observer on each block", 15.0, subject.forward, empty, "forward"),
        "observer that reads": ("one that looks at input and output", None, subject.forward, reads, "forward"),
        "gradient observer": ("an empty `backward` observer on each block", None, subject.step, empty_grad, "backward"),
    }
    for name, (words, limit, call, hook, kind) in variants.items():
        run = lambda call=call: call(model)  # noqa: E731

        def hooked(hook: Callable[..., object] = hook, kind: str = kind) -> object:
            return quietly(subject.model, hook, kind)

        trials = [trial("hooked", run, inner=10, hooked=hooked, device=setting.device)]
        trials += [trial(bare, run, inner=10, device=setting.device) for bare in ("bare", "bare again")]
        samples = interleave(trials, setting.rounds(60))
        added = [(a - b) / blocks * 1e6 for a, b in zip(samples["hooked"], samples["bare"], strict=True)]
        yield Row(
            f"compiled ({mode}), {name} (µs a call)",
            f"what {words} of a compiled model adds to each call of a block",
            "1 µs",
            f"{TINY}, compiled",
            spread(added),
            spread(ratios(samples, "bare again", "bare")),
            f"{typical(samples, 'hooked') * 1e6:.0f} / {typical(samples, 'bare') * 1e6:.0f} µs a model",
            at_most=limit,
        )


@torch.library.custom_op("hookline_benchmarks::nothing", mutates_args=())
def do_nothing(x: Tensor) -> None:
    """Stand for a hook that people write as an operator, so that it is called out of compiled code."""


@do_nothing.register_fake
def _(x: Tensor) -> None:
    return None


def calls_the_operator(module: nn.Module, args: object, output: Tensor) -> None:
    """Call it: a hook of torch, which the compiler traces."""
    do_nothing(output)


def calling_an_operator(setting: Setting, mode: str) -> Row:
    """What a call of a hand-written operator that does nothing adds: the floor of an observer in compiled code."""
    subject, model = compile_anew(setting, mode)
    other = Subject(TINY, setting)
    op = torch.ops.hookline_benchmarks.nothing.default
    torch.fx.node.has_side_effect(op)  # otherwise it is dropped
    blocks = [site.module for site in hl.find(other.model, _BLOCKS)]
    for block in blocks:
        block.register_forward_hook(calls_the_operator)
    calling = compile_own(other.model, mode)
    trials = [trial("operator", lambda: other.forward(calling), inner=10, device=setting.device)]
    trials += [
        trial(bare, lambda: subject.forward(model), inner=10, device=setting.device) for bare in ("bare", "bare again")
    ]
    samples = interleave(trials, setting.rounds(60))
    added = [(a - b) / len(blocks) * 1e6 for a, b in zip(samples["operator"], samples["bare"], strict=True)]
    return Row(
        f"compiled ({mode}), a hand-written operator that does nothing (µs a call)",
        "what a `torch.library.custom_op` in a hook of torch on each block adds to each call of a block",
        "1 µs",
        f"{TINY}, compiled",
        spread(added),
        spread(ratios(samples, "bare again", "bare")),
        f"{typical(samples, 'operator') * 1e6:.0f} / {typical(samples, 'bare') * 1e6:.0f} µs a model",
    )


@contextmanager
def quietly(model: nn.Module, hook: Callable[..., object], kind: str) -> Iterator[None]:
    """An observer on each block, which need not fire."""
    handle = hl.attach(model, _BLOCKS, hook, on=kind, observe=True)
    try:
        yield
    finally:
        handle.remove(quiet=True)


def removed_again(setting: Setting, mode: str) -> Row:
    """A compiled model that had observers against one that never had any."""
    # Two that never had any: from one instance to the next, a compiled model differs by some percent where nothing
    # differs, and what is compiled first is the slowest.
    _, first = compile_anew(setting, mode)
    subject = Subject(TINY, setting)
    subject.forward(first)
    model = compile_own(subject.model, mode)
    with quietly(subject.model, empty, "forward"):
        subject.forward(model)
    subject.forward(model)
    untouched = {"never hooked": first, "never hooked again": compile_own(Subject(TINY, setting).model, mode)}
    trials = [trial("had hooks", lambda: subject.forward(model), inner=10, device=setting.device)]
    trials += [
        trial(name, lambda other=other: subject.forward(other), inner=10, device=setting.device)
        for name, other in untouched.items()
    ]
    samples = interleave(trials, setting.rounds(100))
    return Row(
        f"compiled ({mode}), observers removed again",
        "a forward of a compiled model that had observers",
        "one that never had any",
        f"{TINY}, compiled",
        spread(ratios(samples, "had hooks", "never hooked")),
        spread(ratios(samples, "never hooked again", "never hooked")),
        f"{typical(samples, 'had hooks') * 1e6:.0f} / {typical(samples, 'never hooked') * 1e6:.0f} µs",
        like_same=True,
    )


def twelve_cycles(setting: Setting) -> Row:
    """How many graphs twelve times attaching and removing make: one with hooks, one without."""
    subject, model = compile_anew(setting, "default")
    counters.clear()
    for _ in range(_GRAPHS):
        with quietly(subject.model, empty, "forward"):
            subject.forward(model)
        subject.forward(model)
    graphs = float(counters["stats"]["unique_graphs"])
    return Row(
        "compiled, attached and removed twelve times (graphs)",
        "graphs that were compiled",
        "1 graph",
        f"{TINY}, compiled",
        Spread(graphs, graphs, graphs),
        Spread(1.0, 1.0, 1.0),
        f"{graphs:.0f} graphs, {sum(counters['graph_break'].values())} breaks",
        at_most=2.0,
    )
