"""The components of a policy by name, as they are at the moment of asking.

A module of a policy may be replaced at any time: by ``torch.compile``, LoRA, quantisation, or an assignment. A
dictionary made once would go on naming the old one, so `PolicyAutoBuilder` hands out one of these, which look names up.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Protocol

from torch import nn

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.sites.wrappers import clean_modules, submodule

__all__ = ["ChildComponents", "Components", "ModelComponents"]


class Components(MutableMapping[str, nn.Module]):
    """What both kinds share: entries that were put in by hand, because no module of the policy can have their name."""

    __slots__ = ("_added",)

    def __init__(self, added: dict[str, nn.Module]) -> None:
        self._added = added

    def _find(self) -> dict[str, nn.Module]:
        """Those that are part of the policy, in order."""
        raise NotImplementedError

    def _put(self, name: str, module: nn.Module) -> bool:
        """Make the module part of the policy under that name; whether that can be."""
        raise NotImplementedError

    def _take_out(self, name: str) -> None:
        raise NotImplementedError

    def __getitem__(self, name: str) -> nn.Module:
        return (self._added | self._find())[name]

    def __setitem__(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise OptionError(f"Component {name!r} has to be an nn.Module, got {type_name(module)}.")
        if self._put(name, module):
            self._added.pop(name, None)
        else:
            self._added[name] = module

    def __delitem__(self, name: str) -> None:
        if name in self._find():
            self._take_out(name)
        else:
            del self._added[name]

    def __iter__(self) -> Iterator[str]:
        found = self._find()
        yield from found
        yield from (name for name in self._added if name not in found)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"


class _Parent(Protocol):
    """What a policy tells of its children."""

    _names: list[str]
    _added: dict[str, nn.Module]

    def _children(self) -> dict[str, nn.Module]: ...
    def _adopt(self, name: str, module: nn.Module) -> None: ...


class ChildComponents(Components):
    """Children of the policy, in the order of their names; other children are no components."""

    __slots__ = ("_policy",)

    def __init__(self, policy: _Parent) -> None:
        super().__init__(policy._added)
        self._policy = policy

    def _find(self) -> dict[str, nn.Module]:
        return self._policy._children()

    def _put(self, name: str, module: nn.Module) -> bool:
        try:
            self._policy._adopt(name, module)
        except OptionError:  # a dotted name, say: hooks can be put on it, but it is no child
            return False
        return True

    def _take_out(self, name: str) -> None:
        delattr(self._policy, name)
        self._policy._names.remove(name)


class ModelComponents(Components):
    """All modules of a model, by their dotted names without wrappers."""

    __slots__ = ("_model",)

    def __init__(self, model: nn.Module, added: dict[str, nn.Module]) -> None:
        super().__init__(added)
        self._model = model

    def _find(self) -> dict[str, nn.Module]:
        return {name: module for name, module in clean_modules(self._model) if name}

    def _put(self, name: str, module: nn.Module) -> bool:
        if name not in self._find():
            return False
        path, _, child = name.rpartition(".")
        setattr(submodule(self._model, path), child, module)
        return True

    def _take_out(self, name: str) -> None:
        raise OptionError(f"{name!r} is a module of the model; take it out of the model itself.")
