"""Save a run in memory, tell what has changed since, and put it back.

`Guard`, `ModelDataContext` and the loops (`PreEpochState`) take snapshots. A `Snapshot` joins what `SnapshotPart`,
`TensorStates`, `TensorInternals` and `RandomStates` keep of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hookline.errors import GuardError
from hookline.guard.interrupts import interrupts_deferred
from hookline.guard.loaders import generators_of_dataset, generators_on, samplers_of
from hookline.guard.rng import RandomStates
from hookline.guard.snapshot_part import NOTHING_SAVED, SnapshotPart, StateChange
from hookline.guard.tensor_copies import Where
from hookline.guard.tensor_internals import TensorHooks, TensorInternals
from hookline.guard.tensor_states import TensorStates
from hookline.sites.find import attached
from hookline.sites.hook_at_site import next_order
from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer

__all__ = ["PreEpochState", "Snapshot", "first_names", "roots_of", "unrestored_message"]

_LARGE: Final = ("model", "optimizer")
_grad: Final = attrgetter("grad")
_GRAPH: Final = "written with a graph"
"""Why a tensor cannot be put back: it is a view, or was computed, and has another graph now."""
_OTHER_MEMORY: Final = "its memory was shrunk, and shown to NumPy, so it has other memory now"


@dataclass
class _Root:
    """Give a batch, or generators, an attribute, where a walk can begin; equal to a root of the same."""

    _held: Any


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
        return {"loader": _Root(generators_on(loader))} if hasattr(loader, "__dict__") else {}
    data = _Root(generators_of_dataset(loader.dataset))
    found = {"loader": loader, "loader.dataset": data, **samplers_of(loader)}
    return {name: part for name, part in found.items() if hasattr(part, "__dict__")}


class Snapshot:
    """The state of a run when `take` was last called; later calls use the same memory again."""

    def __init__(self, roots: Mapping[str, object], where: Where = "auto") -> None:
        self.roots = roots
        self._main = SnapshotPart({name: roots.get(name) for name in _LARGE}, where)
        self._rest = SnapshotPart({name: root for name, root in roots.items() if name not in _LARGE}, where)
        self._batch = _Root(None)
        self._data = SnapshotPart({"batch_data": self._batch}, where)
        self._gradients = TensorStates(where)
        self._groups = self._main.tensors, self._rest.tensors, self._data.tensors, self._gradients
        self._parts: list[SnapshotPart] = []
        """Those that have something in them."""
        self._is_saved = False
        self._random: RandomStates | None = None
        self._internals: TensorInternals | None = None
        self._owners: list[int] = []
        """The indices of those tensors that can have a gradient."""
        self._owning: list[Tensor] = []
        """These tensors."""
        self._grads: list[Tensor | None] = []
        """The gradient of each of them, the tensor itself."""
        self._grad_names: list[str] = []
        self._other_grads: list[int] = []
        """The numbers of the owners that `changes` has found with another gradient."""
        self._hooks = TensorHooks([])
        self._order = self._checked_order = 0
        """The order number of hooks when it was taken, and when it last looked for hooks attached since."""

    @property
    def names(self) -> list[str]:
        """The names of all tensors without the gradients."""
        return self._main.names + self._rest.names + self._data.names

    @property
    def nbytes(self) -> int:
        """How many bytes were copied."""
        return sum(group.nbytes for group in self._groups)

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
        return {device: at for group in self._groups for device, at in group.devices.items()}

    # -- saving --------------------------------------------------------------------------------------------------

    @interrupts_deferred()
    def take(self, which: str = "all", *, gradients: bool = True, random: bool = True, batch: Any = None) -> None:
        """Save; copy the tensors that ``which`` names, the ``gradients``, ``random`` streams, and all of ``batch``."""
        self._is_saved = False
        with torch.inference_mode(False), torch.no_grad():  # see `MemoryCopies`
            is_rebuilt = self._main.take(which)
            self._rest.take(which, self._main.containers.seen, rebuild=is_rebuilt)
            self._take_gradients(copied=gradients)
            self._take_batch(batch, which)
        self._hooks = TensorHooks(self._main.parameters)
        generators = self._main.containers.generators + self._rest.containers.generators
        self._random = RandomStates(generators) if random else None
        self._order = self._checked_order = next_order()
        self._take_internals()
        self._is_saved = True

    def _take_internals(self) -> None:
        tensors = [group.tensors for group in self._groups]
        if self._internals is not None and self._internals.is_about(tensors):
            self._internals.note()
        else:
            self._internals = TensorInternals(tensors, self._model)

    def _take_batch(self, batch: Any, which: str) -> None:
        """Copy the tensors of a batch that were not met elsewhere; there is another batch at every step."""
        held, self._batch._held = self._batch._held, batch
        self._parts = [part for part in (self._main, self._rest) if not part.containers.is_empty]
        if batch is not None:
            known = {id(grad) for grad in self._grads} | self._main.containers.seen | self._rest.containers.seen
            self._data.take("nothing" if which == "nothing" else "all", known, rebuild=True)
            self._parts.append(self._data)
        elif held is not None:
            self._data.forget(everything=True)

    def _take_gradients(self, *, copied: bool) -> None:
        tensors, names = self._main.containers.tensors, self._main.names
        self._owners = self._main.with_gradients
        if self._main.tensors.has_graphs:
            self._owners = [index for index in self._owners if tensors[index].is_leaf]
        self._owning = [tensors[index] for index in self._owners]
        self._grads = list(map(_grad, self._owning))
        if all(grad is None for grad in self._grads):  # count(None) would compare each with torch.eq: 58 µs
            if self._gradients.tensors:
                self._gradients.assign([], [])
            self._gradients.take("gradients", ())
            return
        known = set(map(id, tensors))
        named = {
            id(grad): (grad, f"{names[index]}.grad")
            for index, grad in zip(self._owners, self._grads, strict=True)
            if grad is not None and id(grad) not in known
        }
        grads = [grad for grad, _ in named.values()]
        self._gradients.begin("gradients")
        if not self._gradients.is_about(grads):
            self._grad_names = [name for _, name in named.values()]
            self._gradients.assign(grads, self._grad_names)
        self._gradients.take("gradients", tuple(range(len(grads))) if copied else ())

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients as they were, by the name of the parameter; the tensors themselves."""
        pairs = zip(self._owners, self._grads, strict=True)
        return {self._main.names[index]: grad for index, grad in pairs if grad is not None}

    def park_gradients(self) -> None:
        """Take the gradients off the tensors; they come back at `restore`."""
        for owner, grad in zip(self._owning, self._grads, strict=True):
            if grad is not None:
                owner.grad = None

    def _owners_of_other_grads(self) -> list[int]:
        """Return the numbers of the owners whose gradient is another object now."""
        owners = self._owning
        if self._main.tensors.is_as_seen:
            now = list(map(_grad, owners))
        else:
            now = [owner.grad if owner.is_leaf else None for owner in owners]  # torch warns when asked about others
        if all(map(is_, now, self._grads)):
            return []
        return [number for number, (found, grad) in enumerate(zip(now, self._grads, strict=True)) if found is not grad]

    @interrupts_deferred()
    def forget(self) -> None:
        """Let go of what was saved; keep the memory, and what is known about a run that has not changed since."""
        self._is_saved, self._random, self._hooks = False, None, TensorHooks([])
        self._owners, self._owning, self._grads = [], [], []
        if self._gradients.tensors:
            self._gradients.assign([], [])
        self._main.forget()
        self._rest.forget()
        self._parts = []
        if self._batch._held is not None:
            self._batch._held = None
            self._data.forget(everything=True)
        if self._internals is not None:
            self._internals.forget()
            if not self._internals.is_about([group.tensors for group in self._groups]):
                self._internals = None  # it would keep gradients, or a batch

    # -- afterwards ----------------------------------------------------------------------------------------------

    def changes(self, *, bytewise: bool = False, random: bool = True) -> list[StateChange]:
        """Return what is not as it was; ``bytewise``: also numbers that were written behind autograd's back."""
        self._check_saved()
        changes = [change for part in self._parts for change in part.changes(bytewise=bytewise)]
        grads = set(self._gradients.look()[0])
        if bytewise:
            grads.update(self._gradients.differing())
        changes += [StateChange("gradient", self._grad_names[index]) for index in sorted(grads)]
        self._other_grads = self._owners_of_other_grads()
        for number in self._other_grads:
            changes.append(StateChange("other gradient", f"{self._main.names[self._owners[number]]}.grad"))
        if random and self._random is not None:
            changes += [StateChange("random", name) for name in self._random.changed()]
        return list(dict.fromkeys(changes))

    def begin_restore(self) -> None:
        """Start copying back: nothing else depends on the numbers, and a GPU copies while the rest is done."""
        for group in self._groups:
            group.begin_restore()

    def restore(
        self,
        *,
        gradients: bool = True,
        hooks: bool = True,
        versions: bool = True,
        looked: bool = False,
        own_stream: bool = True,
    ) -> dict[str, str]:
        """Put everything back, any number of times; return by name what could not be, and why.

        Args:
            gradients: Put the gradients back too.
            hooks: Take off the hooks of hookline that were attached since. That cannot be undone, so do not where the
                run goes back only for a while.
            versions: Set autograd's counters back too. Not for numbers of long ago: as many steps as were made since
                would reach the counters of now again.
            looked: Nothing has happened since `changes` was called.
            own_stream: Set back also the stream of NumPy that only hooks draw from.
        """
        self._check_saved()
        assert self._internals is not None
        hooked = hooks and self._has_new_hooks()
        if hooked:
            self._remove_new_hooks()
        looked = looked and not hooked
        with torch.inference_mode(False), torch.no_grad():
            is_as_seen = looked and all(group.is_as_seen for group in self._groups)
            swapped = self._internals.changed(everything=not is_as_seen)
            unlike = self._internals.restore(swapped) if swapped else {}
            looked = looked and not swapped
            self._restore_parts(versions=versions, looked=looked, renew_hooks=bool(swapped), hooked=hooked)
            if gradients:
                self._restore_gradients(looked=looked, is_as_seen=is_as_seen and not swapped)
            moved = [tensor for group in self._groups for tensor in group.moved]
            unlike |= self._internals.repair_accumulators(swapped, moved)
            if any(group.has_new_internals for group in self._groups):
                self._internals.refresh()
        if self._random is not None:
            self._random.restore(own=own_stream, looked=looked)
        torch.clear_autocast_cache()  # it holds casts of numbers that may be others now
        names = self.names + self._grad_names if unlike else []
        lost = {names[number]: reason for number, reason in unlike.items()}
        named = [(part.tensors, part.names) for part in self._parts]
        for tensors, names in (*named, (self._gradients, self._grad_names)):
            lost |= dict.fromkeys((names[index] for index in tensors.stuck), _GRAPH)
            lost |= dict.fromkeys((names[index] for index in tensors.replaced), _OTHER_MEMORY)
        for part in self._parts:
            lost |= dict.fromkeys(part.containers.lost, "an array that has less memory than it had")
        return lost

    def restore_or_raise(self, who: str, *, gradients: bool, versions: bool = True) -> None:
        """Put all but hooks back, for a while; raise a `GuardError` of ``who`` did it if something is lost."""
        with interrupts_deferred():
            lost = self.restore(gradients=gradients, hooks=False, versions=versions)
        if lost:
            raise GuardError(unrestored_message(who, lost))

    def _restore_parts(self, *, versions: bool, looked: bool, renew_hooks: bool, hooked: bool) -> None:
        for part in self._parts:
            part.tensors.restore(looked=looked)
        for part in self._parts:
            part.containers.restore(part.containers.changed(looked=looked))
        if hooked:
            self._remove_new_hooks()  # those on modules that were taken out, too: they are back only now
        self._hooks.restore(renew=renew_hooks)
        for part in self._parts:
            (part.tensors.restore_versions if versions else part.tensors.advance_versions)()

    def _check_saved(self) -> None:
        if not self._is_saved:
            raise GuardError(NOTHING_SAVED)

    def _restore_gradients(self, *, looked: bool, is_as_seen: bool) -> None:
        self._gradients.restore(looked=looked)
        for number in self._other_grads if is_as_seen else self._owners_of_other_grads():
            self._owning[number].grad = self._grads[number]
        self._gradients.restore_versions()

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
    if all(reason is _GRAPH for reason in lost.values()):
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
