"""Which components a tracker knows, and the options of each.

The base of the trackers here. Takes names and options from builders, hands each tracker the options it counts by.
"""

from __future__ import annotations

import dataclasses
import numbers
import threading
import warnings
from collections.abc import Callable, Container
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from hookline.errors import HooklineWarning, OptionError
from hookline.messages import caller_stacklevel
from hookline.observe.host_values import countable, unit_axis

__all__ = ["LOCK", "BlendOptions", "ComponentTracker", "UnitOptions", "as_number", "as_plain"]

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
        if self.unit_dim is None:
            return
        if not isinstance(self.unit_dim, numbers.Integral) or isinstance(self.unit_dim, bool):
            raise OptionError(f"unit_dim= is the number of a dimension or None, got {self.unit_dim!r}.")
        as_plain(self, unit_dim=int(self.unit_dim))


@dataclasses.dataclass(frozen=True, slots=True)
class BlendOptions(UnitOptions):
    """How a component's running mean forgets."""

    beta: float = 0.95
    """The share of what was that stays, at each update."""

    def __post_init__(self) -> None:
        UnitOptions.__post_init__(self)
        beta = as_number(self.beta)
        if beta is None or not 0 <= beta < 1:
            raise OptionError(f"beta= must be at least 0 and less than 1, got {self.beta!r}.")
        as_plain(self, beta=beta)


OptionsT = TypeVar("OptionsT", bound=UnitOptions)


class ComponentTracker(Generic[OptionsT]):
    """A tracker's components; each keeps the options it was given, and the tracker's own where it was given none."""

    def __init__(self, defaults: OptionsT) -> None:
        self._defaults = defaults
        self._known: dict[str, OptionsT] = {}
        self._given: dict[str, dict[str, Any]] = {}
        """By component: the options that somebody asked for."""
        self._warned: set[str] = set()
        self._reasons: dict[str, str] = {}
        """By component that has given nothing yet: why what came by was passed over."""
        self._has_given: set[str] = set()

    def has_component(self, component: str) -> bool:
        """Whether the component is registered."""
        return component in self._known

    def forget_component(self, component: str) -> None:
        """Let go of a component, its options and its counts; nothing happens if it is not known."""
        with LOCK:
            self._known.pop(component, None)
            self._given.pop(component, None)
            self._drop(component)

    def forget_counts(self, component: str) -> None:
        """Start a component at zero; its options stay."""
        with LOCK:
            self._drop(component)

    def note_pass(self, component: str, why_not: Callable[[], str]) -> None:
        """Note that a pass came through a component; if nothing was ever kept of it, `why_not()` says why."""
        if component in self._has_given:
            return
        if self._has_begun(component):
            self._has_given.add(component)
            self._reasons.pop(component, None)
        elif component not in self._warned:
            self._reasons[component] = why_not()

    def warn_if_silent(self) -> None:
        """Warn, once for each, of the components that passes came through and that have given nothing yet."""
        for component, why in list(self._reasons.items()):
            if component not in self._warned:
                self._warned.add(component)
                text = f"Component {component!r} gives {type(self).__name__} nothing: {why}."
                warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())

    def _drop(self, component: str) -> None:
        """Let go of what was kept of a component."""
        raise NotImplementedError

    def _has_begun(self, component: str) -> bool:
        """Whether anything is kept of a component."""
        raise NotImplementedError

    def _in_order(self, found: Container[str]) -> list[str]:
        """Those components, in the order they were registered."""
        return [component for component in self._known if component in found]

    def _register(self, component: str, **options: Any) -> None:
        """Make a component known; options that are None are left as they are, and whoever asks first decides."""
        asked = {key: value for key, value in options.items() if value is not None}
        with LOCK:
            before = self._given.get(component, {})
            known = self._known.get(component, self._defaults)
            wanted = dataclasses.replace(self._defaults, **(before | asked))  # checks and normalises them
            given = {key: getattr(wanted, key) for key in before | asked}
            # What was counted by the tracker's own options cannot be counted anew by others.
            settled = _by_name(known) | before if self._has_begun(component) else before
            changed = [key for key in asked if key in settled and settled[key] != given[key]]
            if changed:
                raise _conflict(component, known, wanted, changed)
            self._known[component], self._given[component] = wanted, given

    def _options(self, component: str) -> OptionsT:
        """The options of a component, which is registered if it was not."""
        return self._known.get(component) or self._known.setdefault(component, self._defaults)

    def _readable(self, component: str, value: Any) -> tuple[Tensor, int, OptionsT] | None:
        """The tensor to take in, the dimension of its units, and the options; None for what is passed over."""
        options, seen = self._options(component), countable(value)
        if seen is None:
            return None
        axis = self._unit_axis(component, seen, options)
        return None if axis is None or not seen.numel() else (seen, axis, options)

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


def as_number(value: Any) -> float | None:
    """A real number of any make (NumPy's too) as a plain one; None for anything else."""
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def as_plain(options: UnitOptions, **values: Any) -> None:
    """Put normalised values into options, which nobody changes afterwards."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def _by_name(options: UnitOptions) -> dict[str, Any]:
    """What was counted by; which tensor of an output that was, somebody else decided."""
    return {
        field.name: getattr(options, field.name) for field in dataclasses.fields(options) if field.name != "extractor"
    }


def _conflict(component: str, known: Any, wanted: Any, keys: list[str]) -> OptionError:
    has = ", ".join(f"{key}={getattr(known, key)!r}" for key in keys)
    got = ", ".join(f"{key}={getattr(wanted, key)!r}" for key in keys)
    return OptionError(
        f"Component {component!r} is tracked with {has} already, and cannot be with {got} as well; ask for the same, "
        "give it a ComponentContext of its own, or call forget_component() first."
    )
