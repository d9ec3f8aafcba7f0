"""Save a run in memory, tell what has changed since, and put it back.

`Guard`, `ModelDataContext` and the loops (`PreEpochState`) take snapshots. A `Snapshot` joins the containers that a
`RunWalk` has found, the `SavedTensors` in them, and the `RandomStates`. What was found of model and optimizer is used
again at the next save, as long as they hold the same objects; the rest is small, and is gone through each time.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, Final, NamedTuple, Self

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
    SavedTensors,
    TensorLook,
    Where,
    repair_accumulators,
    restore_internals,
)
from hookline.guard.walk import BATCH, RunWalk, StateChange
from hookline.sites.find import attached
from hookline.sites.hook_at_site import next_order
from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer

__all__ = ["PreEpochState", "Snapshot", "first_names", "roots_of", "unrestored_message"]

_KEPT: Final = ("model", "optimizer")
"""The roots that are large and stay the same objects; others have new tensors at every step (a scaler)."""
_COPIED: Final = {
    "all": frozenset({"parameter", "buffer", "state", "batch"}),
    "buffers": frozenset({"buffer", "batch"}),
    "parameters": frozenset({"parameter", "batch"}),
    "nothing": frozenset[str](),
}
_GRADIENTS: Final = frozenset({"gradient"})
_grad: Final = attrgetter("grad")


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
    return {**roots, **_roots_of_loader(loader)}


def _roots_of_loader(loader: Any) -> dict[str, object]:
    """Return a loader and its samplers; of another iterable the generators alone, since the rest may be the data."""
    if not isinstance(loader, DataLoader):
        return {"loader": generators_on(loader)}
    found = {"loader": loader, **samplers_of(loader)}
    named = {name: part for name, part in found.items() if hasattr(part, "__dict__")}
    return named | {"loader.dataset": generators_of_dataset(loader.dataset)}


class _Part(NamedTuple):
    """Some objects of a run, and the tensors found in them."""

    walk: RunWalk
    tensors: SavedTensors

    @classmethod
    def of(cls, group: str, roots: Mapping[str, object], memory: CopyMemory, known: Container[int] = ()) -> _Part:
        """Go through all objects below ``roots`` that are not ``known``."""
        walk = RunWalk(roots, known)
        return cls(walk, SavedTensors(walk.tensors, walk.kinds, walk.name, memory, group))

    def look(self, *, bytewise: bool) -> _PartLook:
        """Return what is not as it was."""
        return _PartLook(self.walk.changed(), self.tensors.look(bytewise=bytewise))

    def changes(self, look: _PartLook) -> list[StateChange]:
        """Return the names of what was found other."""
        found, kinds, name = look.tensors, self.tensors.kinds, self.walk.name
        written = set(found.written)
        for index in found.written:  # batch normalization writes its averages without a counter, beside this number
            written.update(self.walk.neighbours(index, "num_batches_tracked"))
        changes = self.walk.changes(look.containers) + [StateChange(kinds[i], name(i)) for i in sorted(written)]
        return changes + [StateChange("structure", f"{name(index)}.requires_grad") for index in sorted(found.flags)]


class _PartLook(NamedTuple):
    """What was found other in a part."""

    containers: list[Any]
    tensors: TensorLook


class _Look(NamedTuple):
    """What was found other in a run."""

    main: _PartLook
    rest: _PartLook
    gradients: TensorLook
    other_gradients: list[int]
    """The numbers of the owners that have another gradient, or none."""


class Snapshot:
    """The state of a run when `take` was last called; later calls use the same memory again."""

    def __init__(self, roots: Mapping[str, object], where: Where = "auto") -> None:
        self.roots, self.memory = roots, CopyMemory(where)
        self._main: _Part | None = None
        """Of model and optimizer; kept from one save to the next."""
        self._rest: _Part | None = None
        self._gradients: SavedTensors | None = None
        self._owners: list[Tensor] = []
        """The tensors that can have a gradient: leaves, but for those of the optimizer."""
        self._owner_indices: list[int] = []
        self._grads: list[Tensor | None] = []
        """The gradient of each of them, the tensor itself."""
        self._random: RandomStates | None = None
        self._order = self._checked_order = 0
        """The order number of hooks when it was taken, and when it last looked for hooks attached since."""

    @property
    def _parts(self) -> tuple[_Part, _Part]:
        if self._main is None or self._rest is None:
            raise GuardError("Nothing is saved that could be put back. Next: call save() first.")
        return self._main, self._rest

    @property
    def _tables(self) -> tuple[SavedTensors, SavedTensors, SavedTensors]:
        (main, rest), gradients = self._parts, self._gradients
        assert gradients is not None
        return main.tensors, rest.tensors, gradients

    @property
    def names(self) -> set[str]:
        """The names of all tensors without the gradients."""
        return {part.walk.name(index) for part in self._parts for index in range(len(part.walk.tensors))}

    @property
    def nbytes(self) -> int:
        """How many bytes were copied."""
        return sum(table.nbytes for table in self._tables)

    @property
    def _model(self) -> nn.Module:
        model = self.roots["model"]
        assert isinstance(model, nn.Module)
        return model

    @property
    def has_buckets(self) -> bool:
        """Whether gradients may be views of memory that a backward pass writes, though it finds none on a parameter."""
        return any(getattr(module, "gradient_as_bucket_view", False) for module in self._model.modules())

    @property
    def devices(self) -> dict[torch.device, torch.device]:
        """For each device that holds something of the run, the device of its copies."""
        return self.memory.devices

    # -- saving --------------------------------------------------------------------------------------------------

    @interrupts_deferred()
    def take(self, which: str = "all", *, gradients: bool = True, random: bool = True, batch: Any = None) -> None:
        """Save; copy the tensors that ``which`` names, the ``gradients``, ``random`` streams, and all of ``batch``."""
        main, copied = self._main, _COPIED[which]
        self._main = self._rest = None
        with torch.inference_mode(False), torch.no_grad():  # what is made in there could not be written elsewhere
            begun = main is not None and main.tensors.begin(copied)  # a GPU goes on
            if main is None or not main.walk.refresh() or not main.tensors.is_in_place():
                main, begun = _Part.of("main", {name: self.roots.get(name) for name in _KEPT}, self.memory), False
            main.tensors.take(copied, begun=begun)
            self._take_gradients(main, copied=gradients)
            roots = {name: root for name, root in self.roots.items() if name not in _KEPT}
            rest = _Part.of("rest", {**roots, BATCH: batch}, self.memory, main.walk.seen)
            rest.tensors.take(copied)
        self._random = RandomStates(main.walk.generators + rest.walk.generators) if random else None
        self._order = self._checked_order = next_order()
        self._main, self._rest = main, rest

    def _take_gradients(self, main: _Part, *, copied: bool) -> None:
        walk, owners = main.walk, main.tensors.leaves()
        self._owners, self._owner_indices = [walk.tensors[index] for index in owners], owners
        self._grads = list(map(_grad, self._owners))
        found = dict[int, tuple[Tensor, int]]()
        for grad, index in zip(self._grads, owners, strict=True):
            if grad is not None and id(grad) not in walk.seen:
                found.setdefault(id(grad), (grad, index))
        grads, indices = [grad for grad, _ in found.values()], [index for _, index in found.values()]

        def name(number: int) -> str:
            return f"{walk.name(indices[number])}.grad"

        self._gradients = SavedTensors(grads, ["gradient"] * len(grads), name, self.memory, "gradients")
        self._gradients.take(_GRADIENTS if copied else frozenset())

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients as they were, by the name of the parameter; the tensors themselves."""
        walk = self._parts[0].walk
        pairs = zip(self._owner_indices, self._grads, strict=True)
        return {walk.name(index): grad for index, grad in pairs if grad is not None}

    def park_gradients(self) -> None:
        """Take the gradients off the tensors; they come back at `restore`."""
        for owner, grad in zip(self._owners, self._grads, strict=True):
            if grad is not None:
                owner.grad = None

    @interrupts_deferred()
    def forget(self) -> None:
        """Let go of what was saved; keep the memory, and what is known about a run that has not changed since."""
        self._rest = self._gradients = self._random = None
        self._owners, self._grads = [], []
        if self._main is not None:
            self._main.tensors.forget()
            self._main = None if self._main.tensors.has_graphs else self._main

    # -- afterwards ----------------------------------------------------------------------------------------------

    def begin_restore(self) -> None:
        """Start copying back: nothing else depends on the numbers, and a GPU copies while the rest is done."""
        for table in self._tables:
            table.begin_restore()

    def look(self, *, bytewise: bool = False) -> _Look:
        """Return what is not as it was; ``bytewise``: also numbers that were written behind autograd's back."""
        (main, rest), (_, _, gradients) = self._parts, self._tables
        looks = main.look(bytewise=bytewise), rest.look(bytewise=bytewise)
        return _Look(*looks, gradients.look(bytewise=bytewise), self._owners_of_other_grads())

    def changes(self, look: _Look, *, random: bool = True) -> list[StateChange]:
        """Return what a ``look`` has found other, and the ``random`` streams that have moved, by name."""
        (main, rest), (_, _, gradients) = self._parts, self._tables
        changes = main.changes(look.main) + rest.changes(look.rest)
        changes += [StateChange("gradient", gradients.name(index)) for index in sorted(look.gradients.written)]
        others = [self._owner_indices[number] for number in look.other_gradients]
        changes += [StateChange("other gradient", f"{main.walk.name(index)}.grad") for index in others]
        if random and self._random is not None:
            changes += [StateChange("random", name) for name in self._random.changed()]
        return list(dict.fromkeys(changes))

    def _owners_of_other_grads(self) -> list[int]:
        """Return the numbers of the owners whose gradient is another object now."""
        now = [owner.grad if owner.is_leaf else None for owner in self._owners]  # torch warns when asked about others
        if all(map(is_, now, self._grads)):
            return []
        return [number for number, grad in enumerate(self._grads) if now[number] is not grad]

    def restore(
        self,
        look: _Look | None = None,
        *,
        gradients: bool = True,
        hooks: bool = True,
        versions: bool = True,
        own_stream: bool = True,
    ) -> dict[str, str]:
        """Put everything back, any number of times; return by name what could not be, and why.

        Args:
            look: What a look at this very moment has found other.
            gradients: Put the gradients back too.
            hooks: Take off the hooks of hookline that were attached since. That cannot be undone, so do not where the
                run goes back only for a while.
            versions: Set autograd's counters back too. Not for numbers of long ago: as many steps as were made since
                would reach the counters of now again.
            own_stream: Set back also the stream of NumPy that only hooks draw from.
        """
        hooked = hooks and self._has_new_hooks()
        if hooked:
            self._remove_new_hooks()  # while modules that were put in are found
        look = self.look() if look is None or hooked else look
        with torch.inference_mode(False), torch.no_grad():
            lost = self._restore_tensors(look, gradients=gradients, hooked=hooked)
            if gradients:
                for number in self._owners_of_other_grads():
                    self._owners[number].grad = self._grads[number]
            for table in self._tables[: 3 if gradients else 2]:
                (table.restore_versions if versions else table.advance_versions)()
        if self._random is not None:
            self._random.restore(own=own_stream)
        torch.clear_autocast_cache()  # it holds casts of numbers that may be others now
        for part in self._parts:
            lost |= dict.fromkeys(part.walk.lost, "an array that has less memory than it had")
        return lost

    def _restore_tensors(self, look: _Look, *, gradients: bool, hooked: bool) -> dict[str, str]:
        """Put back tensors, and the containers they are in; return by name what could not be, and why."""
        suspects = [look.main.tensors.suspects, look.rest.tensors.suspects, look.gradients.suspects]
        pairs = list(zip(self._tables, suspects, strict=True))[: 3 if gradients else 2]
        lost: dict[str, str] = {}
        if any(suspects):
            tables = [table for table, _ in pairs]
            unlike = restore_internals(tables)
            lost |= {tables[place].name(index): reason for (place, index), reason in unlike.items()}
        for table, others in pairs:
            table.restore_attributes(others)
            lost |= _named(table, table.restore_memory(others))
        for part, found in zip(self._parts, (look.main, look.rest), strict=True):
            part.walk.restore(found.containers)
        if hooked:
            self._remove_new_hooks()  # those on modules that were taken out, too: they are back only now
        for table, others in pairs:
            lost |= _named(table, table.restore_flags(others))
        for table, others in pairs:
            lost |= _named(table, repair_accumulators(table, others, self._model))
        return lost

    def restore_or_raise(self, who: str, *, gradients: bool, versions: bool = True) -> None:
        """Put all but hooks back, for a while; raise a `GuardError` of ``who`` did it if something is lost."""
        with interrupts_deferred():
            lost = self.restore(gradients=gradients, hooks=False, versions=versions)
        if lost:
            raise GuardError(unrestored_message(who, lost))

    def _has_new_hooks(self) -> bool:
        """Return whether a hook of hookline was attached anywhere since this was last asked."""
        before, self._checked_order = self._checked_order, next_order()
        return self._checked_order > before + 1

    def _remove_new_hooks(self) -> None:
        """Remove hooks of hookline attached since, also those on no model; their handles clear all that belongs."""
        for where in (None, self.roots["model"], self.roots.get("optimizer")):
            if where is None or isinstance(where, nn.Module | torch.optim.Optimizer):
                for handle in attached(where):
                    if handle._attachment.order > self._order:
                        handle.remove(quiet=True)


def _named(table: SavedTensors, reasons: Mapping[int, str]) -> dict[str, str]:
    return {table.name(index): reason for index, reason in reasons.items()}


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
        snapshot.take("all", gradients=False)
        return cls(snapshot)

    def restore(self) -> None:
        """Go back to before the epoch; gradients stay as they are."""
        who = "restore_pre_epoch(): something since"
        self._snapshot.restore_or_raise(who, gradients=False, versions=False)

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
