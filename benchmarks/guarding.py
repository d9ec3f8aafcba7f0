"""Rows about the guard: what saving a run and putting it back cost, beside copying the same bytes by hand.

Takes a GPT-2 with its optimizer, hands `Row`s to ``rows``. The bytes are the floor: two multi-tensor copies into
buffers that are there already. People deep-copy state dicts instead; that is a row, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import Row, Samples, interleave, ratios, spread, trial, typical
from models import GPT, SMALL, Shape
from subject import Setting
from torch import Tensor

from hookline.guard.guard import Guard, rollback
from hookline.guard.rng import kept_rng

__all__ = ["guarding", "guarding_large"]

MEDIUM = Shape("GPT-2, a quarter as wide", 12, 256, 12, 8000, 1, 64)
"""163 MB of parameters and AdamW state, in 596 tensors: what a laptop saves without trouble."""


class Saved:
    """A GPT-2 with AdamW, one step behind it, and no gradients: as it is between two steps."""

    def __init__(self, shape: Shape, setting: Setting) -> None:
        torch.manual_seed(0)
        self.model = GPT(shape).to(setting.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=setting.device.type == "cuda")
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        state = (value for entries in self.optimizer.state.values() for value in entries.values())
        self.tensors: list[Tensor] = [*self.model.parameters(), *state]
        self.buffers = [torch.empty_like(tensor) for tensor in self.tensors]
        self.guard = Guard(self.model, self.optimizer)

    @property
    def nbytes(self) -> int:
        """How much there is to copy."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @torch.no_grad()
    def by_hand(self) -> None:
        """The bytes there and back."""
        torch._foreach_copy_(self.buffers, self.tensors)
        torch._foreach_copy_(self.tensors, self.buffers)

    def firing(self, scope: str) -> Callable[[], None]:
        """A save, an intervention that does nothing, and all that comes after it."""

        def fire() -> None:
            self.guard.save([scope])
            with self.guard.protecting("nothing", scope):
                pass
            self.guard.release()

        return fire

    def rolled_back(self) -> None:
        """A guard for one block alone, which finds out all about the run and gets its memory anew."""
        with rollback(self.model, self.optimizer):
            pass

    def save(self) -> None:
        """The first half of a firing."""
        self.guard.save()

    def deep_copied(self) -> None:
        """What people write."""
        saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])


def guarding(setting: Setting) -> Iterator[Row]:
    """A laptop's model; and the random streams by themselves."""
    yield from _rows(Saved(MEDIUM, setting), MEDIUM, setting, deep=True)
    yield _streams(setting)


def guarding_large(setting: Setting) -> Iterator[Row]:
    """GPT-2 small with AdamW: 1.96 GB."""
    yield from _rows(Saved(SMALL, setting), SMALL, setting, deep=False)


def _rows(saved: Saved, shape: Shape, setting: Setting, *, deep: bool) -> Iterator[Row]:
    calls: dict[str, Callable[[], Any]] = {
        "guarded": saved.firing("trains"),
        "rollback": saved.rolled_back,
        "reads": saved.firing("reads"),
        "save": saved.save,
        "save again": saved.save,
        "by hand": saved.by_hand,
        "by hand again": saved.by_hand,
        **({"deep copy": saved.deep_copied} if deep else {}),
    }
    trials = [trial(name, call, inner=2, device=setting.device) for name, call in calls.items()]
    samples = interleave(trials, setting.rounds(30))
    size = f"{shape.name}, AdamW: {saved.nbytes / 1e6:,.0f} MB in {len(saved.tensors)} tensors"
    raw = "two multi-tensor copies of the same bytes"
    on_gpu = setting.device.type == "cuda"
    guarded, of_save = (None, None) if deep else (1.1, None) if on_gpu else (1.3, 0.1)
    alone = 1.5 if not on_gpu and not deep else None  # to look at 596 tensors takes 75 ms anywhere
    yield _row(samples, "guarded", "by hand", "save, restore and check everything", raw, size, guarded)
    yield _row(samples, "rollback", "by hand", "`hl.rollback` by itself", raw, size, alone)
    reading = 'an intervention that declares `scope="reads"`'
    yield _row(samples, "reads", "save", reading, "a full save", size, of_save)
    if on_gpu:  # where a save is quick, it is the time of the host that counts, which grows with the number of tensors
        took = spread([seconds * 1e3 for seconds in samples["reads"]])
        again = spread(ratios(samples, "save again", "save"))
        yield Row("guard, reads (ms)", reading, "1 ms", size, took, again, "", at_most=1.0)
    if deep:
        yield _row(samples, "deep copy", "by hand", "`deepcopy` of the state dicts, and loading them", raw, size)


def _row(
    samples: Samples, name: str, base: str, words: str, against: str, model: str, at_most: float | None = None
) -> Row:
    return Row(
        f"guard, {name}",
        words,
        against,
        model,
        spread(ratios(samples, name, base)),
        spread(ratios(samples, f"{base} again", base)),
        f"{typical(samples, name) * 1e3:.2f} / {typical(samples, base) * 1e3:.2f} ms",
        at_most=at_most,
    )


def _streams(setting: Setting) -> Row:
    """Around every firing whose hooks may draw random numbers."""

    def kept() -> None:
        with kept_rng():
            pass

    def read() -> None:
        torch.set_rng_state(torch.get_rng_state())

    calls = {"kept": kept, "torch alone": read, "torch alone again": read}
    trials = [trial(name, call, inner=5, batch=200) for name, call in calls.items()]
    samples = interleave(trials, setting.rounds(30))
    return Row(
        "kept_rng",
        "torch, NumPy and Python, kept",
        "reading and setting torch's own state",
        "no model",
        spread(ratios(samples, "kept", "torch alone")),
        spread(ratios(samples, "torch alone again", "torch alone")),
        f"{typical(samples, 'kept') * 1e6:.1f} / {typical(samples, 'torch alone') * 1e6:.1f} µs",
    )
