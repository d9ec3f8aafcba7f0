"""Save a run in memory, tell what has changed since, and put it back.

`Guard`, `ModelDataContext` and the loops (`PreEpochState`) take snapshots. A `Snapshot` has two `SavedPart`s, of
containers and tensors that a `RunWalk` has found, and the `RandomStates`. The part of model and optimizer is used again
at the next save, as long as they hold the same objects; the rest, with the gradients, is gone through each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hookline.errors import GuardError
from hookline.guard.interrupts import interrupts_deferred
from hookline.guard.loaders import generators_of_dataset, generators_on, samplers_of
from hookline.guard.rng import RandomStates
from hookline.guard.tensors import (
    WRITTEN_WITH_GRAPH,
    CopyMemory,
    Look,
    SavedPart,
    Where,
    restore_internals,
)
from hookline.guard.walk import BATCH, RunWalk, StateChange
from hookline.sites.find import attached
from hookline.sites.hook_at_site import next_order
from hookline.sites.optimizers import unwrap_optimizer

__all__ = ["ALL", "BUFFERS", "NOTHING", "PreEpochState", "Snapshot", "first_names", "roots_of", "unrestored_message"]

ALL: Final = frozenset({"parameter", "buffer", "state", "gradient", "batch"})
"""The kinds of tensors, all of which a snapshot copies."""
BUFFERS: Final = frozenset({"buffer", "batch"})
NOTHING: Final = frozenset[str]()
_KEPT: Final = ("model", "optimizer")
"""The roots that are large and stay the same objects; others have new tensors at every step (a scaler)."""


def roots_of(
    model: Any, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, loader: Any = None
) -> dict[str, object]:
    """Return the objects that hold the state of a run, by their names in messages; refuse one without attributes."""
    if not isinstance(model, nn.Module):
        raise GuardError(f"The guard takes a model, that is a torch.nn.Module; got {type(model).__name__}.")
    # Wrappers that are no optimizers themselves may lie around each other, and the walk enters optimizers alone.
    inner = unwrap_optimizer(optimizer)
    roots = {"model": model, "optimizer": inner, "scheduler": scheduler, "scaler": scaler}
    roots |= {} if inner is optimizer else {"optimizer wrapper": optimizer}
    for name, root in roots.items():
        if root is not None and not hasattr(root, "__dict__"):
            raise GuardError(f"{name}= has no attributes to save: it is {root!r}. Next: pass the object itself.")
    if not isinstance(loader, DataLoader):  # the generators alone, since the rest may be the data
        return {**roots, "loader": None if loader is None else generators_on(loader)}
    found = {"loader": loader, **samplers_of(loader)}
    named = {name: part for name, part in found.items() if hasattr(part, "__dict__")}
    return {**roots, **named, "loader.dataset": generators_of_dataset(loader.dataset)}


class Snapshot:
    """The state of a run when `take` was last called; later calls use the same memory again."""

    def __init__(self, roots: Mapping[str, object], where: Where = "auto") -> None:
        self.roots, self.memory = roots, CopyMemory(where)
        self._main: SavedPart | None = None
        """Of model and optimizer; kept from one save to the next."""
        self._saved: list[SavedPart] = []
        """That, and the part of all other objects and the gradients; nothing if nothing is saved."""
        self._owners: dict[int, Tensor] = {}
        """The tensors that can have a gradient, by their indices in the main part."""
        self._grads: list[Tensor | None] = []
        """The gradient of each of them, the tensor itself."""
        self._random: RandomStates | None = None
        self._order = self._checked_order = 0
        """The order number of hooks when it was taken, and when it last looked for hooks attached since."""

    @property
    def _parts(self) -> list[SavedPart]:
        if not self._saved:
            raise GuardError("Nothing is saved that could be put back. Next: call save() first.")
        return self._saved

    @property
    def nbytes(self) -> int:
        """How many bytes were copied."""
        return sum(part.nbytes for part in self._saved)

    @property
    def _model(self) -> nn.Module:
        model = self.roots["model"]
        assert isinstance(model, nn.Module)
        return model

    @property
    def has_buckets(self) -> bool:
        """Whether gradients may be views of memory that a backward pass writes, though it finds none on a parameter."""
        return any(getattr(module, "gradient_as_bucket_view", False) for module in self._model.modules())

    # -- saving --------------------------------------------------------------------------------------------------

    @interrupts_deferred()
    def take(
        self, copied: frozenset[str] = ALL, *, gradients: bool = True, random: bool = True, batch: Any = None
    ) -> None:
        """Save; copy the tensors of these kinds, and look after ``gradients``, ``random`` streams, and ``batch``."""
        self._saved, self._owners, self._grads = [], {}, []
        with torch.inference_mode(False), torch.no_grad():  # what is made in there could not be written elsewhere
            main = self._copy_main(copied)
            main.note()
            roots = {name: root for name, root in self.roots.items() if name not in _KEPT}
            others = RunWalk({**roots, BATCH: batch}, main.walk.seen)
            if gradients:
                self._find_gradients(main, others)
            rest = SavedPart(others, self.memory, "rest")
            rest.copy(copied)
            rest.note()
        self._random = RandomStates(main.walk.generators + rest.walk.generators) if random else None
        self._order = self._checked_order = next_order()
        self._main, self._saved = main, [main, rest]

    def _copy_main(self, copied: frozenset[str]) -> SavedPart:
        """Copy model and optimizer, and return their part: that of before, if they hold the same objects still."""
        kept, self._main = self._main, None
        if kept is not None and kept.is_in_place():
            kept.copy(copied)  # before anything else: a GPU copies meanwhile
            if kept.walk.refresh():
                return kept
        main = SavedPart(RunWalk({name: self.roots.get(name) for name in _KEPT}), self.memory, "main")
        main.copy(copied)
        return main

    def _find_gradients(self, main: SavedPart, others: RunWalk) -> None:
        """Note which tensors have which gradient, and add those to ``others`` that are not met otherwise."""
        self._owners = {index: main.tensors[index] for index in main.leaves()}
        self._grads = list(map(attrgetter("grad"), self._owners.values()))
        for index, grad in zip(self._owners, self._grads, strict=True):
            if grad is not None and id(grad) not in main.walk.seen and id(grad) not in others.seen:
                others.add_tensor(grad, (main.walk.places[index], "grad"), "gradient")

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients as they were, by the name of the parameter; the tensors themselves."""
        pairs = zip(self._owners, self._grads, strict=True)
        return {self._saved[0].name(index): grad for index, grad in pairs if grad is not None}

    def park_gradients(self) -> None:
        """Take the gradients off the tensors; they come back at `restore`."""
        for owner, grad in zip(self._owners.values(), self._grads, strict=True):
            if grad is not None:
                owner.grad = None

    @interrupts_deferred()
    def forget(self) -> None:
        """Let go of what was saved; keep the memory, and what is known about a run that has not changed since."""
        self._saved, self._owners, self._grads, self._random = [], {}, [], None
        if self._main is not None and self._main.has_graphs:
            self._main = None
        elif self._main is not None:
            self._main.forget()

    # -- afterwards ----------------------------------------------------------------------------------------------

    def changes(self) -> list[StateChange]:
        """Return by name what is not as it was, as far as counters and identities tell."""
        return self._changes([part.look() for part in self._parts])

    def _changes(self, looks: Sequence[Look]) -> list[StateChange]:
        pairs = zip(self._parts, looks, strict=True)
        changes = [change for part, look in pairs for change in part.changes(look)]
        name = self._parts[0].name
        changes += [StateChange("other gradient", f"{name(index)}.grad") for index in self._other_grads()]
        if self._random is not None:
            changes += [StateChange("random", name) for name in self._random.changed()]
        return list(dict.fromkeys(changes))

    def _other_grads(self) -> dict[int, Tensor | None]:
        """Return the gradients that are not on their owners any more, by the owner's index."""
        now = [owner.grad if owner.is_leaf else None for owner in self._owners.values()]  # torch warns about others
        each = zip(self._owners, now, self._grads, strict=True)
        return {index: before for index, grad, before in each if grad is not before}

    @interrupts_deferred()
    def restore(
        self, *, bytewise: bool = False, hooks: bool = True, versions: bool = True
    ) -> tuple[list[StateChange], dict[str, str]]:
        """Put everything back, any number of times; return what was other, and by name what is lost, and why.

        Args:
            bytewise: Find also what was written behind autograd's back.
            hooks: Take off the hooks of hookline that were attached since. That cannot be undone, so do not where the
                run goes back only for a while.
            versions: Set autograd's counters back too. Not for numbers of long ago: as many steps as were made since
                would reach the counters of now again.
        """
        parts = self._parts
        is_hooked = hooks and self._notice_new_hooks()
        if is_hooked:
            self._remove_new_hooks()  # while modules that were put in are found
        with torch.inference_mode(False), torch.no_grad():
            if not bytewise:
                self._copy_back()  # first: nothing else depends on the numbers, and a GPU copies meanwhile
            looks = [part.look(bytewise=bytewise) for part in parts]
            if bytewise:
                self._copy_back()
            changes = self._changes(looks)
            lost = self._restore_parts(looks, is_hooked=is_hooked)
            for index, grad in self._other_grads().items():
                self._owners[index].grad = grad
            for part in parts:
                (part.restore_versions if versions else part.advance_versions)()
        if self._random is not None:
            self._random.restore()
        torch.clear_autocast_cache()  # it holds casts of numbers that may be others now
        return changes, lost

    def _copy_back(self) -> None:
        for part in self._parts:
            part.copy_back()

    def _restore_parts(self, looks: Sequence[Look], *, is_hooked: bool) -> dict[str, str]:
        """Put back tensors, and the containers they are in; return by name what could not be, and why."""
        pairs = list(zip(self._parts, looks, strict=True))
        lost = restore_internals(self._parts) if any(look.suspects for look in looks) else {}
        for part, look in pairs:
            part.restore_attributes(look.suspects)
            lost |= part.restore_memory(look.suspects)
        for part, look in pairs:
            lost |= part.walk.restore(look.containers)
        if is_hooked:
            self._remove_new_hooks()  # those on modules that were taken out, too: they are back only now
        for part, look in pairs:
            lost |= part.restore_flags(look.suspects)
        for part, look in pairs:
            lost |= part.restore_nodes(look.suspects, self._model)
        return lost

    def go_back(self, who: str, *, versions: bool = False) -> None:
        """Put all but hooks back, for a while; raise a `GuardError` of ``who`` did it if something is lost."""
        _, lost = self.restore(hooks=False, versions=versions)
        if lost:
            raise GuardError(unrestored_message(who, lost))

    def _notice_new_hooks(self) -> bool:
        """Return whether a hook of hookline was attached anywhere since this was last called."""
        before, self._checked_order = self._checked_order, next_order()
        return self._checked_order > before + 1

    def _remove_new_hooks(self) -> None:
        """Remove hooks of hookline attached since, also those on no model; their handles clear all that belongs."""
        for where in (None, self.roots["model"], self.roots.get("optimizer")):
            if where is None or isinstance(where, nn.Module | torch.optim.Optimizer):
                for handle in attached(where):
                    if handle._attachment.order > self._order:
                        handle.remove(quiet=True)


class PreEpochState:
    """Keep model, optimizer, scheduler, scaler and random streams as they were before an epoch.

    The loops take one at the beginning of an epoch whose hooks need it, and hand it to `ModelDataContext`.

    Recipe::

        before = PreEpochState.take(model, optimizer)
        train_one_epoch()
        before.restore()  # inside an intervention, which is undone again
        before = PreEpochState.take(model, optimizer, into=before)  # the next epoch, in the same memory
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @classmethod
    def take(
        cls,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        loader: Any = None,
        where: Where = "auto",
        into: PreEpochState | None = None,
    ) -> Self:
        """Save them as they are now; ``into`` an earlier state, whose memory is used again and which is lost."""
        roots = roots_of(model, optimizer, scheduler, scaler, loader)
        is_same = into is not None and into._snapshot.roots == roots
        snapshot = into._snapshot if into is not None and is_same else Snapshot(roots, where)
        snapshot.take(gradients=False)
        return cls(snapshot)

    def restore(self) -> None:
        """Go back to before the epoch; gradients stay as they are."""
        self._snapshot.go_back("restore_pre_epoch(): something since")

    @property
    def saved_bytes(self) -> int:
        """How many bytes were copied."""
        return self._snapshot.nbytes


def first_names(names: Sequence[str]) -> str:
    """Return the first five of ``names`` for a message, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def unrestored_message(who: str, lost: Mapping[str, str]) -> str:
    """Return the text of the error about what could not be put back, by name, and why."""
    if all(reason is WRITTEN_WITH_GRAPH for reason in lost.values()):
        return (
            f"{who} has written {', '.join(lost)} with a graph, and something still refers to that view, so "
            "the graph stays; all else was put back. Next: write it under torch.no_grad(), or keep nothing computed "
            "from it."
        )
    shown = first_names([f"{name} ({reason})" for name, reason in lost.items()])
    return (
        f"{who} has changed what cannot be put back: {shown}; all else was. The run cannot go on as if nothing had "
        "happened. Next: do that to a copy."
    )
