"""A run as it was: everything that decides how it goes on.

Takes the objects of a run, joins what `Structure`, `Tensors` and `RandomStates` keep of them. `Guard` and the
checkpoints of `ModelDataContext` are made of snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hookline.errors import GuardError
from hookline.guard.data_check import BatchHolder
from hookline.guard.loaders import generators_of_dataset, generators_on, samplers_of
from hookline.guard.rng import RandomStates
from hookline.guard.run_part import Change, Part
from hookline.guard.tensor_copies import Where
from hookline.guard.tensor_internals import Insides
from hookline.guard.tensor_states import Tensors
from hookline.sites import _torch
from hookline.sites.find import attached
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import next_order
from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer

__all__ = ["GRAPH", "Change", "Snapshot", "roots_of", "unrestored"]

_LARGE: Final = ("model", "optimizer")

GRAPH: Final = "written with a graph"
"""Why a tensor cannot be put back: it is a view, or was computed, and has another graph now."""
_OTHER_MEMORY: Final = "its memory was shrunk, and shown to NumPy, so it has other memory now"


def roots_of(
    model: Any, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, loader: Any = None
) -> dict[str, object]:
    """The objects that a run hangs on, by what they are called in messages; refuses what has no attributes."""
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
    """A loader's samplers. Of other iterables only the generators: what else they have may be the data."""
    if not isinstance(loader, DataLoader):
        return {"loader": _Holder(generators_on(loader))} if hasattr(loader, "__dict__") else {}
    data = _Holder(generators_of_dataset(loader.dataset))
    found = {"loader": loader, "loader.dataset": data, **samplers_of(loader)}
    return {name: part for name, part in found.items() if hasattr(part, "__dict__")}


@dataclass
class _Holder:
    """Generators of something that is not looked at otherwise; equal to another of the same generators."""

    generators: list[Any]


class Snapshot:
    """What a run was when `take` was called last; the memory for it is used again."""

    def __init__(self, roots: Mapping[str, object], where: Where = "auto") -> None:
        self.roots = roots
        self._main = Part({name: roots.get(name) for name in _LARGE}, where)
        self._rest = Part({name: root for name, root in roots.items() if name not in _LARGE}, where)
        self._gradients = Tensors(where)
        self._batch = BatchHolder(None)
        self._data = Part({"batch_data": self._batch}, where)
        self._is_saved = False
        self._random: RandomStates | None = None
        self._insides: Insides | None = None
        self._owners: list[int] = []
        """Of those tensors that can have a gradient, the places; of the gradients, the tensors themselves."""
        self._grads: list[Tensor | None] = []
        self._grad_names: list[str] = []
        self._hooks: list[tuple[Tensor, list[Any]]] = []
        self._order = self._checked = 0
        """When it was taken, and when it was last looked which hooks were attached since."""

    @property
    def names(self) -> list[str]:
        """Of all tensors, gradients not counted."""
        return self._main.names + self._rest.names + self._data.names

    @property
    def _parts(self) -> tuple[Part, ...]:
        return self._main, self._rest, self._data

    @property
    def _groups(self) -> tuple[Tensors, ...]:
        return self._main.tensors, self._rest.tensors, self._data.tensors, self._gradients

    @property
    def nbytes(self) -> int:
        """How much was copied."""
        return sum(group.nbytes for group in self._groups)

    @property
    def has_buckets(self) -> bool:
        """Whether gradients may be views of memory that a backward pass writes, though it finds none on a parameter."""
        model = self.roots["model"]
        assert isinstance(model, nn.Module)
        return any(getattr(module, "gradient_as_bucket_view", False) for module in model.modules())

    @property
    def devices(self) -> dict[torch.device, torch.device]:
        """For each device that has something of the run, where the copies of that are."""
        return {device: at for group in self._groups for device, at in group.devices.items()}

    # -- saving --------------------------------------------------------------------------------------------------

    def take(self, which: str = "all", *, gradients: bool = True, random: bool = True, batch: Any = None) -> None:
        """Save; ``which`` of the tensors to copy, whether the gradients too, whether where random streams stand.

        All of a ``batch`` is copied.
        """
        self._is_saved = False
        with torch.inference_mode(False), torch.no_grad():  # what is made there cannot be written elsewhere
            again = self._main.take(which)
            self._rest.take(which, self._main.structure.seen, again=again)
            self._take_gradients(copied=gradients)
            self._take_batch(batch, which)
        pairs = zip(self._main.structure.tensors, self._main.kinds, strict=True)
        self._hooks = [_hooks_of(tensor) for tensor, kind in pairs if kind == "parameter"]
        generators = self._main.structure.generators + self._rest.structure.generators
        self._random = RandomStates(generators) if random else None
        self._order = self._checked = next_order()
        self._insides = self._insides_now()
        self._is_saved = True

    def _insides_now(self) -> Insides:
        model = self.roots["model"]
        assert isinstance(model, nn.Module)
        tensors = [tensor for group in self._groups for tensor in group.tensors]
        return Insides(tensors, self.names + self._grad_names, model)

    def _take_batch(self, batch: Any, which: str) -> None:
        """Copy what is in a batch and was not met elsewhere; there is another one at every step."""
        is_other = batch is not None or self._batch._held is not None
        self._batch._held = batch
        known: set[int] = set()
        if is_other:
            known = {id(grad) for grad in self._grads} | self._main.structure.seen | self._rest.structure.seen
        self._data.take("nothing" if which == "nothing" else "all", known, again=is_other)

    def _take_gradients(self, *, copied: bool) -> None:
        tensors, names = self._main.structure.tensors, self._main.names
        self._owners = [i for i, kind in enumerate(self._main.kinds) if kind != "state" and tensors[i].is_leaf]
        self._grads = [tensors[index].grad for index in self._owners]
        known = {id(tensor) for tensor in tensors}
        named = {
            id(grad): (grad, f"{names[index]}.grad")
            for index, grad in zip(self._owners, self._grads, strict=True)
            if grad is not None and id(grad) not in known
        }
        grads = [grad for grad, _ in named.values()]
        self._gradients.begin("gradients")
        if not self._gradients.knows(grads):
            self._grad_names = [name for _, name in named.values()]
            self._gradients.learn(grads, self._grad_names)
        self._gradients.take("gradients", tuple(range(len(grads))) if copied else ())

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients as they were, by the name of the parameter; the tensors themselves."""
        pairs = zip(self._owners, self._grads, strict=True)
        return {self._main.names[index]: grad for index, grad in pairs if grad is not None}

    def park_gradients(self) -> None:
        """Take the gradients off the tensors; they come back at `restore`."""
        for owner, grad in self._pairs():
            if grad is not None:
                owner.grad = None

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        tensors = self._main.structure.tensors
        return ((tensors[index], grad) for index, grad in zip(self._owners, self._grads, strict=True))

    def forget(self) -> None:
        """Let go of what was saved, but for the memory, and what is known about a run that has not changed since."""
        self._is_saved, self._random, self._insides = False, None, None
        self._owners, self._grads, self._hooks = [], [], []
        self._gradients.learn([], [])
        self._main.forget()
        self._rest.forget()
        if self._batch._held is not None:
            self._batch._held = None
            self._data.forget(everything=True)

    # -- afterwards ----------------------------------------------------------------------------------------------

    def changes(self, *, bytewise: bool = False, random: bool = True) -> list[Change]:
        """What is not as it was; ``bytewise``: also numbers that were written behind autograd's back."""
        self._check_saved()
        changes = [change for part in self._parts for change in part.changes(bytewise=bytewise)]
        grads = set(self._gradients.look()[0])
        if bytewise:
            grads.update(self._gradients.differing())
        changes += [Change("gradient", self._grad_names[index]) for index in sorted(grads)]
        for index, (owner, grad) in zip(self._owners, self._pairs(), strict=True):
            if _grad_of(owner) is not grad:
                changes.append(Change("other gradient", f"{self._main.names[index]}.grad"))
        if random and self._random is not None:
            changes += [Change("random", name) for name in self._random.changed()]
        return list(dict.fromkeys(changes))

    def begin_restore(self) -> None:
        """Start copying back: nothing else depends on the numbers, and a GPU goes on while the rest is done."""
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
        """Put everything back; may be done any number of times. Return by name what could not be, and why.

        Without ``gradients``, those stay as they are. ``hooks`` of ours that were attached since come off, which cannot
        be undone: not for a snapshot that the run goes back to only for a while. Without ``versions``, counters go on,
        where numbers of long ago come back: as many steps as were made since would bring the counters of now again.
        ``looked``: nothing has happened since `changes` was asked. Without ``own_stream``, the stream of NumPy that
        only hooks draw from goes on.
        """
        self._check_saved()
        assert self._insides is not None
        if hooks:
            self._take_new_hooks_off()
        with torch.inference_mode(False), torch.no_grad():
            swapped = self._insides.changed()
            lost = self._insides.restore(swapped) if swapped else {}
            self._restore_parts(versions=versions, looked=looked and not swapped, rehook=bool(swapped))
            if gradients:
                self._restore_gradients(looked=looked and not swapped)
            moved = [tensor for group in self._groups for tensor in group.moved]
            lost |= self._insides.mend_accumulators(swapped, moved)
        if self._random is not None:
            self._random.restore(own=own_stream)
        # What autocast has cast belongs to numbers that may be others now.
        torch.clear_autocast_cache()
        named = [(part.tensors, part.names) for part in self._parts]
        for tensors, names in (*named, (self._gradients, self._grad_names)):
            lost |= dict.fromkeys((names[index] for index in tensors.stuck), GRAPH)
            lost |= dict.fromkeys((names[index] for index in tensors.replaced), _OTHER_MEMORY)
        for part in self._parts:
            lost |= dict.fromkeys(part.structure.lost, "an array that has less memory than it had")
        return lost

    def _restore_parts(self, *, versions: bool, looked: bool, rehook: bool) -> None:
        parts = self._parts
        for part in parts:
            part.tensors.restore(looked=looked)
        for part in parts:
            part.structure.restore(part.structure.changed())
        for tensor, hooks in self._hooks:
            _restore_hooks(tensor, hooks, anew=rehook)
        for part in parts:
            (part.tensors.restore_versions if versions else part.tensors.move_versions_on)()

    def _check_saved(self) -> None:
        if not self._is_saved:
            raise GuardError("Nothing is saved that could be put back. Next: call save() first.")

    def _restore_gradients(self, *, looked: bool) -> None:
        self._gradients.restore(looked=looked)
        for owner, grad in self._pairs():
            if _grad_of(owner) is not grad:
                owner.grad = grad
        self._gradients.restore_versions()

    def _take_new_hooks_off(self) -> None:
        """Hooks of ours go by their handles, which also clears what we keep about them; also those on no model."""
        before, self._checked = self._checked, next_order()
        if self._checked == before + 1:
            return  # none was attached anywhere
        for where in (None, self.roots["model"], self.roots.get("optimizer")):
            if where is None or isinstance(where, nn.Module | torch.optim.Optimizer):
                for handle in attached(where):
                    _remove_if_since(handle, self._order)


def _remove_if_since(handle: HookHandle, order: int) -> None:
    if handle._attachment.order > order:
        handle.remove(quiet=True)


def _grad_of(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None  # torch warns when it is asked about others


# -- hooks of a parameter -----------------------------------------------------------------------------------------


def _hooks_of(tensor: Tensor) -> tuple[Tensor, list[Any]]:
    hooks = [getattr(tensor, name) for name in _torch.TENSOR_HOOKS]
    return tensor, [None if held is None else (held, tuple(held.items())) for held in hooks]


def _restore_hooks(tensor: Tensor, hooks: Iterable[Any], *, anew: bool) -> None:
    """Put them back; ``anew``: the insides may be others, which do not know the dictionary yet."""
    for name, before in zip(_torch.TENSOR_HOOKS, hooks, strict=True):
        held = getattr(tensor, name)
        if before is None:
            if held:
                held.clear()
        elif anew or held is not before[0] or tuple(held.items()) != before[1]:
            before[0].clear()
            before[0].update(before[1])
            if anew or held is not before[0]:
                setattr(tensor, name, before[0])


# -- what could not be put back ------------------------------------------------------------------------------------


def unrestored(who: str, lost: Mapping[str, str]) -> str:
    """Return the text of the error about what could not be put back, by name, and why."""
    written = [name for name, why in lost.items() if why is GRAPH]
    others = {name: why for name, why in lost.items() if why is not GRAPH}
    if not others:
        return (
            f"{who} has written {', '.join(written)} with a graph, and something still refers to that view, so "
            "the graph stays; all else was put back. Next: write it under torch.no_grad(), or keep nothing computed "
            "from it."
        )
    named = [f"{name} ({why})" for name, why in lost.items()]
    shown = ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
    return (
        f"{who} has changed what cannot be put back: {shown}; all else was. The run cannot go on as if nothing had "
        "happened. Next: do that to a copy."
    )
