"""Some of the objects of a run, what hangs below them, and the tensors that were met there.

Two of them make a `Snapshot`: model and optimizer, which are large and stay the same objects, and the rest, which is
small and has new tensors at every step (a scaler's), so that those do not have the large part gone through again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from torch import Tensor, nn

from hookline.errors import GuardError
from hookline.guard.containers import Structure
from hookline.guard.tensor_copies import Where
from hookline.guard.tensor_states import Tensors

__all__ = ["Change", "Part"]

_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "all": ("parameter", "buffer", "state"),
    "buffers": ("buffer",),
    "parameters": ("parameter",),
    "nothing": (),
}
"""What is copied; gradients go by themselves."""


class Change(NamedTuple):
    """Something that is not as it was."""

    kind: str
    """"parameter", "gradient" (written), "other gradient" (another object, or none, in its place), "state" (of the
    optimizer or scheduler), "buffer", "structure", "random", "switch"."""
    name: str


class Part:
    """What some objects were when `take` was called last."""

    def __init__(self, roots: Mapping[str, object], where: Where) -> None:
        self._roots = roots
        self._structure: Structure | None = None
        self.tensors = Tensors(where)
        self.kinds: list[str] = []
        """For each tensor what it is: "parameter", "state" (of the optimizer), "buffer" (anything else)."""
        self.names: list[str] = []

    @property
    def structure(self) -> Structure:
        """What hangs together."""
        if self._structure is None:
            raise GuardError("Nothing is saved that could be put back. Next: call save() first.")
        return self._structure

    def take(self, which: str, known: Iterable[int] = (), *, again: bool = False) -> bool:
        """Save; ``which`` of the tensors to copy. Whether everything was gone through, also if not ``again``."""
        self.tensors.begin(which)
        again = again or self._structure is None or not self._structure.refresh()
        if again:
            self._structure = Structure(self._roots, known)
        if not self.tensors.knows(self.structure.tensors):
            self._learn(self.structure)
        wanted = _KINDS[which]
        self.tensors.take(which, tuple(index for index, kind in enumerate(self.kinds) if kind in wanted))
        return again

    def _learn(self, structure: Structure) -> None:
        """Tensors that were not there last time: what they are, and what they are called."""
        places = structure.places
        pairs = zip(structure.tensors, places, strict=True)
        self.kinds = [_kind_of(tensor, structure, parent) for tensor, (parent, _) in pairs]
        self.names = [structure.path(*place) for place in places]
        self.tensors.learn(structure.tensors, self.names)

    def forget(self, *, everything: bool = False) -> None:
        """Let go of a forward pass that a tensor of the model was computed in; what else is known stays."""
        if everything or self.tensors.has_graphs:
            self._structure = None
            self.kinds, self.names = [], []
            self.tensors.learn([], [])

    def changes(self, *, bytewise: bool) -> list[Change]:
        """What is not as it was."""
        changes = [change for number in self.structure.changed() for change in self._in_container(number)]
        changes += [Change("structure", name) for name in self.structure.differences_in_arrays()]
        places, flags = self.tensors.look()
        written = set(places)
        if bytewise:
            written.update(self.tensors.differing())
        written |= self._moving_averages(written)
        changes += [Change(self.kinds[index], self.names[index]) for index in sorted(written)]
        return changes + [Change("structure", f"{self.names[index]}.requires_grad") for index in flags]

    def _moving_averages(self, written: set[int]) -> set[int]:
        """What batch normalization writes without moving a counter, told by the number of batches beside it."""
        places = self.structure.places
        modules = {places[index][0] for index in written if places[index][1] == "num_batches_tracked"}
        return {index for index, (parent, _) in enumerate(places) if parent in modules} if modules else set()

    def _in_container(self, number: int) -> list[Change]:
        container = self.structure.containers[number]
        kind = "structure"
        if container.root in ("optimizer", "scheduler"):
            kind = "state"
        elif container.key == "_parameters":
            kind = "parameter"
        return [Change(kind, name) for name in self.structure.differences(number)]


def _kind_of(tensor: Tensor, structure: Structure, parent: int) -> str:
    if isinstance(tensor, nn.Parameter) or structure.containers[parent].key == "params":
        return "parameter"
    return "state" if structure.containers[parent].root == "optimizer" else "buffer"
