"""Save a run in memory, tell what has changed since, and put it back.

`Guard`, `ModelDataContext` and the loops (`PreEpochState`) take snapshots. A `Snapshot` joins the containers that a
`RunWalk` has found, the `SavedTensors` in them, and the `RandomStates`. What was found of model and optimizer is used
again at the next save, as long as they hold the same objects; the rest is small, and is gone through each time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
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
from hookline.sites.optimizers import unwrap_optimizer

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

    def look(self, *, bytewise: bool) -> _Look:
        """Return what is not as it was."""
        return _Look(self.walk.changed(), self.tensors.look(bytewise=bytewise))

    def changes(self, look: _Look) -> list[StateChange]:
        """Return the names of what was found other."""
        tensors, found = self.tensors, look.tensors
        # Batch normalization writes its averages without a counter, and beside them this number with one.
        written = found.written | (self.walk.beside(found.written, "num_batches_tracked") if found.written else set())
        changes = self.walk.changes(look.containers)
        for index in sorted(written):
            kind = tensors.kinds[index]
            changes.append(StateChange(kind, tensors.name(index), has_copy=kind in tensors.copied))
        return changes + [StateChange("structure", f"{tensors.name(i)}.requires_grad") for i in sorted(found.flags)]


class _Look(NamedTuple):
    """What was found other in a part."""

    containers: list[Any]
    tensors: TensorLook


class Snapshot:
    """The state of a run when `take` was last called; later calls use the same memory again."""

    def __init__(self, roots: Mapping[str, object], where: Where = "auto") -> None:
        self.roots, self.memory = roots, CopyMemory(where)
        self._main: _Part | None = None
        """Of model and optimizer; kept from one save to the next."""
        self._saved: list[_Part] = []
        """That, the part of all other objects, and the gradients; nothing if nothing is saved."""
        self._owners: list[Tensor] = []
        """The tensors that can have a gradient."""
        self._owner_names: Callable[[int], str] = str
        self._grads: list[Tensor | None] = []
        """The gradient of each of them, the tensor itself."""
        self._random: RandomStates | None = None
        self._order = self._checked_order = 0
        """The order number of hooks when it was taken, and when it last looked for hooks attached since."""

    @property
    def _parts(self) -> list[_Part]:
        if not self._saved:
            raise GuardError("Nothing is saved that could be put back. Next: call save() first.")
        return self._saved

    @property
    def nbytes(self) -> int:
        """How many bytes were copied."""
        return sum(part.tensors.nbytes for part in self._saved)

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
    def take(self, which: str = "all", *, gradients: bool = True, random: bool = True, batch: Any = None) -> None:
        """Save; copy the tensors that ``which`` names, the ``gradients``, ``random`` streams, and all of ``batch``."""
        main, copied, self._main, self._saved = self._main, _COPIED[which], None, []
        with torch.inference_mode(False), torch.no_grad():  # what is made in there could not be written elsewhere
            begun = main is not None and main.tensors.begin(copied)  # a GPU goes on
            if main is None or not main.walk.refresh() or not main.tensors.is_in_place():
                main, begun = _Part.of("main", {name: self.roots.get(name) for name in _KEPT}, self.memory), False
            main.tensors.take(copied, begun=begun)
            grads = self._find_gradients(main)
            grads.tensors.take(_GRADIENTS if gradients else frozenset())
            roots = {name: root for name, root in self.roots.items() if name not in _KEPT}
            rest = _Part.of("rest", {**roots, BATCH: batch}, self.memory, main.walk.seen)
            rest.tensors.take(copied)
        self._random = RandomStates(main.walk.generators + rest.walk.generators) if random else None
        self._order = self._checked_order = next_order()
        self._main, self._saved = main, [main, rest, grads]

    def _find_gradients(self, main: _Part) -> _Part:
        """Note which tensors have which gradient, and return those that are no tensors of the run otherwise."""
        owners, name = main.tensors.leaves(), main.walk.name
        self._owners = [main.walk.tensors[index] for index in owners]
        self._owner_names = lambda number: name(owners[number])
        self._grads = list(map(_grad, self._owners))
        numbers: dict[int, int] = {}
        for number, grad in enumerate(self._grads):
            if grad is not None and id(grad) not in main.walk.seen:
                numbers.setdefault(id(grad), number)
        first = list(numbers.values())
        grads: list[Any] = [self._grads[number] for number in first]

        def name_of(index: int) -> str:
            return f"{self._owner_names(first[index])}.grad"

        return _Part(RunWalk({}), SavedTensors(grads, ["gradient"] * len(grads), name_of, self.memory, "gradients"))

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients as they were, by the name of the parameter; the tensors themselves."""
        return {self._owner_names(number): grad for number, grad in enumerate(self._grads) if grad is not None}

    def park_gradients(self) -> None:
        """Take the gradients off the tensors; they come back at `restore`."""
        for owner, grad in zip(self._owners, self._grads, strict=True):
            if grad is not None:
                owner.grad = None

    @interrupts_deferred()
    def forget(self) -> None:
        """Let go of what was saved; keep the memory, and what is known about a run that has not changed since."""
        self._saved, self._owners, self._owner_names, self._grads, self._random = [], [], str, [], None
        if self._main is not None:
            self._main.tensors.forget()
            self._main = None if self._main.tensors.has_graphs else self._main

    # -- afterwards ----------------------------------------------------------------------------------------------

    def begin_restore(self) -> None:
        """Start copying back: nothing else depends on the numbers, and a GPU copies while the rest is done."""
        for part in self._parts:
            part.tensors.begin_restore()

    def look(self, *, bytewise: bool = False) -> list[_Look]:
        """Return what is not as it was in each part; ``bytewise``: also what was written behind autograd's back."""
        return [part.look(bytewise=bytewise) for part in self._parts]

    def changes(self, looks: Sequence[_Look], *, random: bool = True) -> list[StateChange]:
        """Return what was found other, and the gradients and ``random`` streams that are, by name."""
        pairs = zip(self._parts, looks, strict=True)
        changes = [change for part, look in pairs for change in part.changes(look)]
        others = self._owners_of_other_grads()
        changes += [StateChange("other gradient", f"{self._owner_names(number)}.grad") for number in others]
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
        looks: Sequence[_Look] | None = None,
        *,
        gradients: bool = True,
        hooks: bool = True,
        versions: bool = True,
        own_stream: bool = True,
    ) -> dict[str, str]:
        """Put everything back, any number of times; return by name what could not be, and why.

        Args:
            looks: What `look` has found at this very moment.
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
        looks = self.look() if looks is None or hooked else looks
        with torch.inference_mode(False), torch.no_grad():
            pairs = list(zip(self._parts, looks, strict=True))[: None if gradients else -1]
            lost = self._restore_parts(pairs, hooked=hooked)
            for number in self._owners_of_other_grads() if gradients else ():
                self._owners[number].grad = self._grads[number]
            for part, _ in pairs:
                (part.tensors.restore_versions if versions else part.tensors.advance_versions)()
        if self._random is not None:
            self._random.restore(own=own_stream)
        torch.clear_autocast_cache()  # it holds casts of numbers that may be others now
        return lost

    def _restore_parts(self, pairs: Sequence[tuple[_Part, _Look]], *, hooked: bool) -> dict[str, str]:
        """Put back tensors, and the containers they are in; return by name what could not be, and why."""
        tables = [(part.tensors, look.tensors.suspects) for part, look in pairs]
        lost = restore_internals([table for table, _ in tables]) if any(suspects for _, suspects in tables) else {}
        for table, suspects in tables:
            table.restore_attributes(suspects)
            lost |= table.restore_memory(suspects)
        for part, look in pairs:
            lost |= part.walk.restore(look.containers)
        if hooked:
            self._remove_new_hooks()  # those on modules that were taken out, too: they are back only now
        for table, suspects in tables:
            lost |= table.restore_flags(suspects)
        for table, suspects in tables:
            lost |= repair_accumulators(table, suspects, self._model)
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
