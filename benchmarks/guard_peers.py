"""The family "guard": let an intervention do as it likes, and have the run as it was; beside copies by hand.

``bench_peers`` runs the `GUARDING` contests, on the GPT-2 of ``guarding``.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial

import torch
from contests import Contest, Work, take_turns
from guarding import MEDIUM, Saved
from measure import Samples
from subject import Setting
from torch import nn

__all__ = ["GUARDING"]

FIRING = "an intervention and back"


def measure(name: str, rounds: int) -> dict[str, Samples | str]:
    """Time one way of saving a run, changing every weight, and having the run back."""
    torch.set_num_threads(1)
    saved = Saved(MEDIUM, Setting(torch.device("cpu")))
    return {FIRING: take_turns({"ours": lambda: guarded(saved), "theirs": WAYS[name](saved)}, rounds, inner=1)}


@torch.no_grad()
def change(model: nn.Module) -> None:
    """Do what an intervention may do: change every weight."""
    torch._foreach_add_(list(model.parameters()), 1.0)


def guarded(saved: Saved) -> None:
    """Ours: what `hl.rollback` does."""
    saved.guard.save(["trains"])
    with saved.guard.protecting("changes", "trains"):
        change(saved.model)
    saved.guard.release()


def on_a_copy(saved: Saved) -> None:
    """Change a copy, and forget it."""
    model, _ = copy.deepcopy((saved.model, saved.optimizer))
    change(model)


def by_state_dicts(saved: Saved) -> None:
    """Deep-copy the state dicts, and load them."""
    model, optimizer = copy.deepcopy((saved.model.state_dict(), saved.optimizer.state_dict()))
    change(saved.model)
    saved.model.load_state_dict(model)
    saved.optimizer.load_state_dict(optimizer)


def through_bytes(saved: Saved) -> None:
    """Save the state dicts as a file in memory, and load them."""
    file = io.BytesIO()
    torch.save((saved.model.state_dict(), saved.optimizer.state_dict()), file)
    change(saved.model)
    file.seek(0)
    model, optimizer = torch.load(file)
    saved.model.load_state_dict(model)
    saved.optimizer.load_state_dict(optimizer)


WAYS: dict[str, Callable[[Saved], Callable[[], None]]] = {
    "copy": lambda saved: partial(on_a_copy, saved),
    "deepcopy": lambda saved: partial(by_state_dicts, saved),
    "save": lambda saved: partial(through_bytes, saved),
}


def _contest(name: str, label: str, words: str, why: str) -> Contest:
    work = Work("save, change every weight, restore and check: weights, optimizer, modes, gradients, random streams",
                words, f"{MEDIUM.name}, AdamW: 163 MB", beyond=False, why=why)  # fmt: skip
    return Contest(label, "torch", partial(measure, name), {FIRING: work}, rounds=25)


_MORE = "ours also keeps gradients, modes, hooks and random streams, and checks them afterwards"
GUARDING: dict[str, Contest] = {
    "copy": _contest(
        "copy", "`deepcopy` of model and optimizer", "one copy, whose weights are changed; nothing is put back",
        "it copies the bytes once, and leaves the random streams moved; ours copies them there and back"),
    "deepcopy": _contest("deepcopy", "`deepcopy` of the state dicts", "copies of both state dicts, loaded back", _MORE),
    "save": _contest("save", "`torch.save` of the state dicts", "both state dicts through a file in memory", _MORE),
}  # fmt: skip
