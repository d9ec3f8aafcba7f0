"""Rows about ``hl.capture``: twelve block outputs kept, against hand-written hooks.

Takes a `Subject`, hands `Row`s to ``rows``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from measure import Row, added, interleave, ratios, spread, trial, typical
from models import TINY
from subject import Setting, Subject
from torch import nn

import hookline as hl

__all__ = ["capturing"]


def capturing(setting: Setting) -> Iterator[Row]:
    """``hl.capture`` of twelve block outputs, while it is on."""
    for shape in setting.shapes:
        subject = Subject(shape, setting)
        yield from while_on(subject, setting)


@contextmanager
def by_hand(model: nn.Module, kept: dict[str, object]) -> Iterator[dict[str, object]]:
    """What people write: a closure per block that stores the output under its name."""
    with ExitStack() as hooks:
        for index, block in enumerate(model.h):
            name = f"h.{index}"
            hook = lambda module, args, output, name=name: kept.__setitem__(name, output)  # noqa: E731
            hooks.enter_context(block.register_forward_hook(hook))
        yield kept


def while_on(subject: Subject, setting: Setting) -> Iterator[Row]:
    """Hooks that stay on; what was kept is let go of before each forward, on both sides."""
    model, box = subject.model, [{}]

    @contextmanager
    def hand() -> Iterator[None]:
        with by_hand(model, {}) as kept:
            box[0] = kept
            yield

    @contextmanager
    def ours() -> Iterator[None]:
        with hl.capture(model, "h.#") as cache:
            box[0] = cache
            yield

    def run() -> None:
        box[0].clear()
        subject.forward()

    hooked = {"bare": nullcontext, "torch": hand, "torch again": hand, "ours": ours}
    trials = [trial(name, run, inner=subject.inner, hooked=on, device=setting.device) for name, on in hooked.items()]
    samples = interleave(trials, setting.rounds(300 if subject.shape is TINY else 40))
    yield Row(
        "capture of 12 block outputs",
        'forward under `hl.capture(model, "h.#")`, which stays on',
        "forward under twelve `register_forward_hook` closures that store into a dict",
        str(subject.shape),
        spread(ratios(samples, "ours", "torch")),
        spread(ratios(samples, "torch again", "torch")),
        f"{typical(samples, 'ours') * 1e3:.3f} / {typical(samples, 'torch') * 1e3:.3f} ms; "
        f"{added(samples, 'ours', 'bare') / 12e-6:.2f} / {added(samples, 'torch', 'bare') / 12e-6:.2f} "
        "µs per hook beyond bare",
        at_most=1.05,
    )
