"""Rows about hooks that fire, or no longer do: whole forwards and steps, ours against torch's.

Takes a `Subject`, hands `Row`s to ``rows``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

from measure import Row, Trial, added, interleave, ratios, spread, trial, typical
from models import TINY
from subject import Setting, Subject, by_torch, empty, empty_grad, empty_pre, is_leaf
from torch import nn

import hookline as hl
from hookline.sites.kinds import MODULE

__all__ = ["backward", "forward", "removed"]


def removed(setting: Setting) -> Iterator[Row]:
    """A model that carried hooks of all kinds, against copies that never did."""
    for shape in setting.shapes:
        subject = Subject(shape, setting)
        num_copies = 8 if shape is TINY else 1  # where in memory a copy lands matters more than anything else
        copies = [[copy.deepcopy(subject.model) for _ in range(3)] for _ in range(num_copies)]
        for touched, *_ in copies:
            touch(touched, subject)
        for what, call in (("forward", subject.forward), ("forward and backward", subject.step)):
            names = "touched", "fresh", "fresh again"
            trials = [
                over_copies(name, call, column, subject.inner, setting)
                for name, column in zip(names, zip(*copies, strict=True), strict=True)
            ]
            samples = interleave(trials, setting.rounds(160 if shape is TINY else 40))
            yield Row(
                f"all hooks removed, {what}",
                "a model that carried hooks of all kinds, all removed",
                "the same model, never touched",
                f"{shape}; {num_copies} copies in turn",
                spread(ratios(samples, "touched", "fresh")),
                spread(ratios(samples, "fresh again", "fresh")),
                f"{typical(samples, 'touched') * 1e3:.3f} / {typical(samples, 'fresh') * 1e3:.3f} ms",
                like_same=True,
            )


def over_copies(
    name: str, call: Callable[[nn.Module], None], models: tuple[nn.Module, ...], inner: int, setting: Setting
) -> Trial:
    """A trial that takes the next of several copies each time."""
    turns = itertools.cycle(
        [trial(name, lambda model=model: call(model), inner=inner, device=setting.device) for model in models]
    )
    return lambda: next(turns)()


def touch(model: nn.Module, subject: Subject) -> None:
    """Put on hooks of every kind, see all of them fire, take them off."""
    with ExitStack() as hooks:
        for kind in MODULE.args:  # but not where inputs are integers: torch's full backward hook warns there
            hooks.enter_context(hl.attach(model, "?*", lambda *args: None, on=kind, exclude=nn.Embedding))
        hooks.enter_context(hl.attach(model, "*", empty, always_call=True))
        hooks.enter_context(hl.attach(model, "*", empty_grad, on="backward", observe=True))
        hooks.enter_context(hl.attach_everywhere(empty_pre, on="forward_pre"))
        subject.step(model)
        model.load_state_dict(model.state_dict())
    hl.assert_no_hooks(model, foreign=True)


def forward(setting: Setting) -> Iterator[Row]:
    """Twelve empty forward hooks, ours against torch's."""
    for shape in setting.shapes:
        yield from forward_of(Subject(shape, setting), setting)


def forward_of(subject: Subject, setting: Setting) -> Iterator[Row]:
    model = subject.model

    def by_hand() -> AbstractContextManager[object]:
        return by_torch(list(model.h), "register_forward_hook", empty)

    hooked = {
        "bare": nullcontext,
        "torch": by_hand,
        "torch again": by_hand,
        "ours": lambda: hl.attach(model, "h.#", empty),
        "observe": lambda: hl.attach(model, "h.#", empty, observe=True),
    }
    trials = [
        trial(name, subject.forward, inner=subject.inner, hooked=on, device=setting.device)
        for name, on in hooked.items()
    ]
    samples = interleave(trials, setting.rounds(400 if subject.shape is TINY else 40))
    for name, asked in (("ours", ""), ("observe", ", observe=True")):
        yield Row(
            f"twelve empty forward hooks{asked}",
            f'forward with `hl.attach(model, "h.#", hook{asked})`',
            "forward with `register_forward_hook` on the same blocks",
            str(subject.shape),
            spread(ratios(samples, name, "torch")),
            spread(ratios(samples, "torch again", "torch")),
            f"{typical(samples, name) * 1e3:.3f} / {typical(samples, 'torch') * 1e3:.3f} ms "
            f"(bare {typical(samples, 'bare') * 1e3:.3f})",
            at_most=1.03,
        )


def backward(setting: Setting) -> Iterator[Row]:
    """Empty gradient observation against an empty full backward hook, both beyond the bare step."""
    for shape in setting.shapes:
        subject = Subject(shape, setting)
        yield from backward_on(subject, "all leaf modules", is_leaf, setting, at_most=0.5)
        if setting.device.type == "cpu":  # beside a step on a GPU, twelve hooks are noise
            yield from backward_on(subject, "the twelve blocks", "h.#", setting, at_most=0.7)


def backward_on(subject: Subject, words: str, target: object, setting: Setting, *, at_most: float) -> Iterator[Row]:
    model = subject.model
    modules = [site.module for site in hl.find(model, target)]

    def by_hand() -> AbstractContextManager[object]:
        return by_torch(modules, "register_full_backward_hook", empty_grad)

    hooked: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": nullcontext,
        "torch": by_hand,
        "torch again": by_hand,
        "a hook that returns nothing": lambda: hl.attach(model, target, empty_grad, on="backward"),
        "observe=True": lambda: hl.attach(
            model, target, lambda module, grad_input, grad_output: None, on="backward", observe=True
        ),
        "a hook that may edit": lambda: hl.attach(
            model, target, lambda module, grad_input, grad_output: grad_input, on="backward"
        ),
    }
    trials = [
        trial(name, subject.step, inner=max(subject.inner // 2, 2), hooked=on, device=setting.device)
        for name, on in hooked.items()
    ]
    samples = interleave(trials, setting.rounds(50 if subject.shape is TINY else 20))
    same = spread(ratios(samples, "torch again", "torch", beyond="bare"))
    num = len(modules)
    ours = 'what `hl.attach(…, on="backward")` adds to a step'
    for name in list(hooked)[3:]:
        yield Row(
            f"empty gradient hook on {words}: {name}",
            ours,
            "what `register_full_backward_hook` adds",
            f"{subject.shape}; {num} modules",
            spread(ratios(samples, name, "torch", beyond="bare")),
            same,
            f"{added(samples, name, 'bare') / num * 1e6:.1f} / {added(samples, 'torch', 'bare') / num * 1e6:.1f} "
            f"µs per module (bare step {typical(samples, 'bare') * 1e3:.2f} ms)",
            at_most=at_most if name in ("a hook that returns nothing", "observe=True") else None,
        )
