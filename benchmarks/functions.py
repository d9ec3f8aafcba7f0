"""Rows about hooks on functions and operators: what one operation costs more while they are on.

Takes tiny operations, so that nothing hides what is added to them, and hands `Row`s to ``rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from measure import Row, Samples, Spread, interleave, ratios, spread, trial, typical
from subject import Setting
from torch import nn

import hookline as hl

__all__ = ["functions"]

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
