"""Which components a tracker knows, and the options of each.

The base of the trackers here. Takes names and options from builders, hands each tracker the options it counts by.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Container
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from hookline.errors import HooklineWarning, OptionError
from hookline.observe.trackers.values import unit_axis

__all__ = ["LOCK", "BlendOptions", "ComponentTracker", "UnitOptions", "check_fraction"]

LOCK: Final = threading.RLock()
"""Held while a tracker's state changes: two threads may run one model (0.1 µs). One for all, since a lock among the
attributes would keep a tracker from being copied."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnitOptions:
    """How a component's units are found."""

    unit_dim: int | None = None
    """The dimension whose entries are the units; None for the usual one (see `unit_axis`)."""
    extractor: Any = None
    """Which tensor of its output is looked at; kept to notice when somebody wants another."""

    def __post_init__(self) -> None:
        if self.unit_dim is not None and (not isinstance(self.unit_dim, int) or isinstance(self.unit_dim, bool)):
            raise OptionError(f"unit_dim= is the number of a dimension or None, got {self.unit_dim!r}.")


@dataclasses.dataclass(frozen=True, slots=True)
class BlendOptions(UnitOptions):
    """How a component's running mean forgets."""

    beta: float = 0.95
    """The share of what was that stays, at each update."""

    def __post_init__(self) -> None:
        UnitOptions.__post_init__(self)
        if not _is_number(self.beta) or not 0 <= self.beta < 1:
            raise OptionError(f"beta= must be at least 0 and less than 1, got {self.beta!r}.")


OptionsT = TypeVar("OptionsT", bound=UnitOptions)


class ComponentTracker(Generic[OptionsT]):
    """A tracker's components; each keeps the options it was first registered with."""

    def __init__(self, defaults: OptionsT) -> None:
        self._defaults = defaults
        self._known: dict[str, OptionsT] = {}
        self._warned: set[str] = set()

    def has_component(self, component: str) -> bool:
        """Whether the component is registered."""
        return component in self._known

    def forget_component(self, component: str) -> None:
        """Let go of a component, its options and its counts; nothing happens if it is not known."""
        with LOCK:
            self._known.pop(component, None)
            self._drop(component)

    def _drop(self, component: str) -> None:
        raise NotImplementedError

    def _in_order(self, found: Container[str]) -> list[str]:
        """Those components, in the order they were registered."""
        return [component for component in self._known if component in found]

    def _register(self, component: str, **options: Any) -> None:
        """Make a component known; options that are None are left as they are."""
        given = {key: value for key, value in options.items() if value is not None}
        with LOCK:
            known = self._known.get(component)
            wanted = dataclasses.replace(known or self._defaults, **given)
            if known is not None and wanted != known:
                raise _conflict(component, known, wanted, [key for key in given if given[key] != getattr(known, key)])
            self._known[component] = wanted

    def _options(self, component: str) -> OptionsT:
        """The options of a component, which is registered if it was not."""
        return self._known.get(component) or self._known.setdefault(component, self._defaults)

    def _unit_axis(self, component: str, tensor: Tensor, options: OptionsT) -> int | None:
        """The dimension of the units; None, and one warning, if the tensor does not have the one asked for."""
        axis = unit_axis(tensor, options.unit_dim)
        if axis is None and tensor.dim() and component not in self._warned:
            self._warned.add(component)
            warnings.warn(
                f"{type(self).__name__} passes over {component!r}: unit_dim={options.unit_dim}, but its tensor has the "
                f"shape {tuple(tensor.shape)}.",
                HooklineWarning,
                stacklevel=2,
            )
        return axis

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self._known) or 'no component yet'}>"


def check_fraction(name: str, value: Any) -> None:
    """Raise unless the value is a number strictly between 0 and 1."""
    if not _is_number(value) or not 0 < value < 1:
        raise OptionError(f"{name}= must lie between 0 and 1, got {value!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _conflict(component: str, known: Any, wanted: Any, keys: list[str]) -> OptionError:
    has = ", ".join(f"{key}={getattr(known, key)!r}" for key in keys)
    got = ", ".join(f"{key}={getattr(wanted, key)!r}" for key in keys)
    return OptionError(
        f"Component {component!r} is tracked with {has} already, and cannot be with {got} as well; ask for the same, "
        "give it a ComponentContext of its own, or call forget_component() first."
    )
