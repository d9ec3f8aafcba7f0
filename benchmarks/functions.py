"""Rows about hooks on functions and operators: what one operation costs more while they are on.

Takes tiny operations, so that nothing hides what is added to them, and hands `Row`s to ``rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from measure import Row, Samples, Spread, interleave, ratios, spread, trial, typical
from subject import Setting, Subject
from torch import nn

import hookline as hl

__all__ = ["functions", "operators", "profiling"]

_OPS = 100
_CHAIN = f"{_OPS} operations on 4 numbers"


def watch(fn, inputs, outputs): ...
def watch_pre(fn, tensors): ...


@contextmanager
def hooked(target: object, hook: Callable[..., None] = watch, **options: object) -> Iterator[None]:
    """A function hook that need not fire, as a row without a match has none that does."""
    handle = hl.attach_function(target, hook, **options)
    try:
        yield
    finally:
        handle.remove(quiet=True)


class Chain(nn.Module):
    """One operation after the other."""

    def __init__(self, device: torch.device, *, grad: bool = False) -> None:
        super().__init__()
        self.start = torch.ones(4, device=device, requires_grad=grad)

    def forward(self) -> torch.Tensor:
        """A hundred of them."""
        x = self.start
        for _ in range(_OPS):
            x = torch.relu(x)
        return x


def functions(setting: Setting) -> Iterator[Row]:
    """What an operation costs more under function hooks, and what entering and leaving costs."""
    chain = Chain(setting.device)
    variants = {
        "no match": ("a hook on another function", 6.0, lambda: hooked(torch.tanh)),
        "no match, 1,700 functions hooked": (
            'a hook on `"torch.*"` but for this one', 6.0, lambda: hooked("torch.*", exclude="*.relu")
        ),
        "match, forward": ("a `forward` hook on it", 8.0, lambda: hooked(torch.relu)),
        "match, forward, within a model": ("the same with `within=`", 8.0, lambda: hooked(torch.relu, within=chain)),
        "match, forward_pre": ("a `forward_pre` hook", 8.0, lambda: hooked(torch.relu, watch_pre, on="forward_pre")),
    }  # fmt: skip
    yield from added_rows("function hook", variants, chain, setting)
    yield from gradient_rows(setting)
    yield from entering(setting)


def operators(setting: Setting) -> Iterator[Row]:
    """The same for hooks on operators of the dispatcher."""
    chain = Chain(setting.device)
    variants = {
        "no match": ('a hook on `"aten.mm*"`', None, lambda: hooked("aten.mm*")),
        "match, forward": ("a `forward` hook on `aten.relu`", None, lambda: hooked("aten.relu")),
    }
    yield from added_rows("operator hook", variants, chain, setting)


def added_rows(title: str, variants: dict, chain: Chain, setting: Setting) -> Iterator[Row]:
    """A row per variant: microseconds added to each operation."""
    with torch.no_grad():
        samples = chain_samples({name: make for name, (_, _, make) in variants.items()}, chain, setting)
    for name, (words, limit, _) in variants.items():
        yield Row(
            f"{title}, {name} (µs an operation)",
            f"what {words} adds to an operation",
            "1 µs",
            _CHAIN,
            per_operation(samples, name),
            spread(ratios(samples, "bare again", "bare")),
            f"{typical(samples, name) / _OPS * 1e6:.2f}, bare {typical(samples, 'bare') / _OPS * 1e6:.2f} µs",
            at_most=limit,
        )


def chain_samples(variants: dict, chain: nn.Module, setting: Setting) -> Samples:
    trials = [trial(name, chain, inner=10, hooked=make, device=setting.device) for name, make in variants.items()]
    trials += [trial(name, chain, inner=10, device=setting.device) for name in ("bare", "bare again")]
    return interleave(trials, setting.rounds(100))


def per_operation(samples: Samples, name: str) -> Spread:
    return spread([(a - b) / _OPS * 1e6 for a, b in zip(samples[name], samples["bare"], strict=True)])


def gradient_rows(setting: Setting) -> Iterator[Row]:
    """Forward and backward of the chain under gradient hooks on each operation."""
    chain = Chain(setting.device, grad=True)
    seed = torch.ones(4, device=setting.device)

    def step() -> None:
        chain().backward(seed)
        chain.start.grad = None

    variants = {
        "backward_pre": lambda: hooked(torch.relu, watch_pre, on="backward_pre"),
        "backward": lambda: hooked(torch.relu, watch, on="backward"),
    }
    trials = [trial(name, step, inner=5, hooked=make, device=setting.device) for name, make in variants.items()]
    trials += [trial(name, step, inner=5, device=setting.device) for name in ("bare", "bare again")]
    samples = interleave(trials, setting.rounds(60))
    for name in variants:
        yield Row(
            f"function hook, match, {name} (µs an operation)",
            f"what a `{name}` hook that returns nothing adds to forward and backward of an operation",
            "1 µs",
            _CHAIN,
            per_operation(samples, name),
            spread(ratios(samples, "bare again", "bare")),
            f"{typical(samples, name) / _OPS * 1e6:.2f}, bare {typical(samples, 'bare') / _OPS * 1e6:.2f} µs",
        )


class Nothing(nn.Module):
    """A model that does nothing, so that only the way in and out is left."""

    def forward(self) -> None:
        """Nothing."""


def entering(setting: Setting) -> Iterator[Row]:
    """What a forward pays for its model being watched: the scope itself, and the call that goes around it."""
    model = Nothing()
    handle = hl.attach_function(torch.relu, watch, within=model)
    from hookline.sites.modules.module_hooks import hooks_of_module

    scope = hooks_of_module(model).around
    assert scope is not None

    def enter_and_leave() -> None:
        scope.enter()
        scope.leave()

    bare = Nothing()
    trials = [
        trial("scope", enter_and_leave, inner=10, batch=100),
        trial("call", model, inner=10, batch=100),
        trial("bare", bare, inner=10, batch=100),
        trial("bare again", bare, inner=10, batch=100),
    ]
    samples = interleave(trials, setting.rounds(100))
    handle.remove(quiet=True)
    for name, words, limit, beyond in (
        ("scope", "entering and leaving the scope of a model, its step counted", 2.0, 0.0),
        ("call", "what a call of the model takes more, with all that is around it", None, 1.0),
    ):
        values = [(a - beyond * b) * 1e6 for a, b in zip(samples[name], samples["bare"], strict=True)]
        yield Row(
            f"function hook, {'enter and leave' if limit else 'call of the model'} (µs)",
            words,
            "1 µs",
            "a model that does nothing",
            spread(values),
            spread(ratios(samples, "bare again", "bare")),
            f"{typical(samples, name) * 1e6:.2f}, bare call {typical(samples, 'bare') * 1e6:.2f} µs",
            at_most=limit,
        )


def profiling(setting: Setting) -> Iterator[Row]:
    """A step under ``hl.profile``, modules alone and with functions."""
    for shape in setting.shapes:
        subject = Subject(shape, setting)
        variants = {
            "modules": lambda model=subject.model: hl.profile(model),
            "modules and functions": lambda model=subject.model: hl.profile(model, functions="torch.nn.functional.*"),
        }
        trials = [
            trial(name, subject.step, inner=subject.inner, hooked=make, device=setting.device)
            for name, make in variants.items()
        ]
        trials += [
            trial(name, subject.step, inner=subject.inner, device=setting.device) for name in ("bare", "bare again")
        ]
        samples = interleave(trials, setting.rounds(40))
        for name in variants:
            yield Row(
                f"profile, {name}",
                f"a step under `hl.profile`, {name}",
                "a bare step",
                str(shape),
                spread(ratios(samples, name, "bare")),
                spread(ratios(samples, "bare again", "bare")),
                f"{typical(samples, name) * 1e3:.2f} / {typical(samples, 'bare') * 1e3:.2f} ms",
            )
