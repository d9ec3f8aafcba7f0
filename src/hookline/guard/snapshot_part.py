"""Save some of the objects of a run: their containers, and the tensors in them.

A `Snapshot` has three parts: model and optimizer, which are large and stay the same objects; the rest, which is small
and has new tensors at every step (a scaler's), so that those do not make it walk the large part again; and the batch.
Each part joins a `ContainerTree` and its `TensorStates`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from torch import Tensor, nn

from hookline.errors import GuardError
from hookline.guard.containers import ContainerTree
from hookline.guard.tensor_copies import Where
from hookline.guard.tensor_states import TensorStates

__all__ = ["NOTHING_SAVED", "SnapshotPart", "StateChange"]

NOTHING_SAVED: Final = "Nothing is saved that could be put back. Next: call save() first."
_COPIED_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "all": ("parameter", "buffer", "state"),
    "buffers": ("buffer",),
    "parameters": ("parameter",),
    "nothing": (),
}


class StateChange(NamedTuple):
    """Something of a run that is not as it was."""

    kind: str
    """"parameter", "gradient" (written), "other gradient" (another object, or none, in its place), "state" (of the
    optimizer or scheduler), "buffer", "structure", "random", "switch"."""
    name: str


class SnapshotPart:
    """The state of some objects when `take` was last called."""

    def __init__(self, roots: Mapping[str, object], where: Where) -> None:
        self._roots = roots
        self._containers: ContainerTree | None = None
        self.tensors = TensorStates(where)
        self.kinds: list[str] = []
        """The kind of each tensor: "parameter", "state" (of the optimizer), "buffer" (anything else)."""
        self.names: list[str] = []
        self.with_gradients: list[int] = []
        """The indices of tensors that can have a gradient, unless they were computed: all but the optimizer's."""
        self.parameters: list[Tensor] = []
        self._chosen: dict[str, tuple[int, ...]] = {}
        """The indices of the tensors that are copied, by ``which``."""

    @property
    def containers(self) -> ContainerTree:
        """The containers below the objects; raises if none was taken."""
        if self._containers is None:
            raise GuardError(NOTHING_SAVED)
        return self._containers

    def take(self, which: str, known: Iterable[int] = (), *, rebuild: bool = False) -> bool:
        """Save, and copy the tensors that ``which`` names; return whether all objects were walked.

        They are walked if something has changed or ``rebuild`` says so, except those whose ids are ``known``.
        """
        if not rebuild and self._containers is not None and self._containers.is_empty:
            return False
        self.tensors.begin(which)
        rebuild = rebuild or self._containers is None or not self._containers.refresh()
        if rebuild:
            self._containers = ContainerTree(self._roots, known)
        tree = self.containers
        if not self.tensors.is_about(tree.tensors):
            pairs = zip(tree.tensors, tree.places, strict=True)
            self.kinds = [_kind_of(tensor, tree, parent) for tensor, (parent, _) in pairs]
            self.names = [tree.path(*place) for place in tree.places]
            self.tensors.assign(tree.tensors, self.names)
            self._sort()
        if which not in self._chosen:
            wanted = _COPIED_KINDS[which]
            self._chosen[which] = tuple(index for index, kind in enumerate(self.kinds) if kind in wanted)
        self.tensors.take(which, self._chosen[which])
        return rebuild

    def _sort(self) -> None:
        """Note which tensors are of which kind; they are others than last time."""
        kinds = list(enumerate(self.kinds))
        self.with_gradients = [index for index, kind in kinds if kind != "state"]
        self.parameters = [self.tensors.tensors[index] for index, kind in kinds if kind == "parameter"]
        self._chosen.clear()

    def forget(self, *, everything: bool = False) -> None:
        """Let go of the tensors if one keeps a graph alive, or of ``everything``."""
        if everything or self.tensors.has_graphs:
            self._containers = None
            self.kinds, self.names = [], []
            self.tensors.assign([], [])
            self._sort()

    def changes(self, *, bytewise: bool) -> list[StateChange]:
        """Return what is not as it was."""
        changes = [change for number in self.containers.changed() for change in self._in_container(number)]
        changes += [StateChange("structure", name) for name in self.containers.names_of_changed_arrays()]
        indices, flags = self.tensors.look()
        written = set(indices)
        if bytewise:
            written.update(self.tensors.differing())
        if not written and not flags:
            return changes
        written |= self._moving_averages(written)
        changes += [StateChange(self.kinds[index], self.names[index]) for index in sorted(written)]
        return changes + [StateChange("structure", f"{self.names[index]}.requires_grad") for index in flags]

    def _moving_averages(self, written: set[int]) -> set[int]:
        """Return the buffers that batch normalization writes without a counter: those beside a number of batches."""
        places = self.containers.places
        modules = {places[index][0] for index in written if places[index][1] == "num_batches_tracked"}
        return {index for index, (parent, _) in enumerate(places) if parent in modules} if modules else set()

    def _in_container(self, number: int) -> list[StateChange]:
        container = self.containers.containers[number]
        kind = "structure"
        if container.root in ("optimizer", "scheduler"):
            kind = "state"
        elif container.key == "_parameters":
            kind = "parameter"
        return [StateChange(kind, name) for name in self.containers.names_of_changed_items(number)]


def _kind_of(tensor: Tensor, tree: ContainerTree, parent: int) -> str:
    container = tree.containers[parent]
    if isinstance(tensor, nn.Parameter) or container.key == "params":
        return "parameter"
    return "state" if container.root == "optimizer" else "buffer"
