"""Keep counts and options by component: the protocol `Tracker` and the base classes of the five trackers.

``trackers`` derives from the classes here; the hooks of ``feeders`` call ``update``, and `StatsReporter` and the
analyses read and reset. Numbers stay on the device of the tensors until ``to_metrics`` fetches them at once.
"""

from __future__ import annotations

import dataclasses
import numbers
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from hookline.errors import HooklineWarning, OptionError
from hookline.messages import caller_stacklevel
from hookline.observe.host_values import countable, fetch, outside_inference, unit_axis

__all__ = [
    "LOCK",
    "ComponentTracker",
    "CountingTracker",
    "MeanOptions",
    "Tracker",
    "UnitCount",
    "UnitOptions",
    "as_number",
    "set_plain",
]

LOCK: Final = threading.RLock()
"""Held while a tracker's state changes: two threads may run one model (0.1 µs). One for all, since a lock among the
attributes would keep a tracker from being copied."""


@runtime_checkable
class Tracker(Protocol):
    """Accumulate numbers for named components; ``isinstance`` asks for the three methods.

    Recipe::

        class LargestOutput:
            def __init__(self):
                self.largest = {}

            def update(self, component, tensor):
                self.largest[component] = tensor.detach().max()

            def to_metrics(self):
                return {f"largest/{name}": value.item() for name, value in self.largest.items()}

            def reset(self):
                self.largest.clear()
    """

    def update(self, component: str, tensor: Any, /) -> None:
        """Add the ``tensor`` that one pass gave for ``component``."""

    def to_metrics(self) -> dict[str, float]:
        """Return all numbers since the last reset, by name."""

    def reset(self) -> None:
        """Start at zero; the components stay known, so that attached hooks go on counting."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnitOptions:
    """Say how the units of a component are found."""

    unit_dim: int | None = None
    """The dimension whose entries are the units; None for the usual one (see `unit_axis`)."""

    def __post_init__(self) -> None:
        if self.unit_dim is None:
            return
        if not isinstance(self.unit_dim, numbers.Integral) or isinstance(self.unit_dim, bool):
            raise OptionError(f"unit_dim= is the number of a dimension or None, got {self.unit_dim!r}.")
        set_plain(self, unit_dim=int(self.unit_dim))


@dataclasses.dataclass(frozen=True, slots=True)
class MeanOptions(UnitOptions):
    """Say how fast the running mean of a component forgets."""

    beta: float = 0.95
    """The share of the old mean that stays at each update."""

    def __post_init__(self) -> None:
        UnitOptions.__post_init__(self)
        beta = as_number(self.beta)
        if beta is None or not 0 <= beta < 1:
            raise OptionError(f"beta= must be at least 0 and less than 1, got {self.beta!r}.")
        set_plain(self, beta=beta)


OptionsT = TypeVar("OptionsT", bound=UnitOptions)


class ComponentTracker(Generic[OptionsT]):
    """Keep a state and options for each component; options that were not given are those of the tracker."""

    def __init__(self, defaults: OptionsT) -> None:
        self._defaults = defaults
        self._kept: dict[str, Any] = {}
        """By component: its state, in a form that each tracker chooses."""
        self._known: dict[str, OptionsT] = {}
        self._feeders: dict[str, int] = {}
        """By component: how often its hooks were replaced."""
        self._warned: set[str] = set()
        self._reasons: dict[str, str] = {}
        """By component without a state: why its passes were not counted."""
        self._has_given: set[str] = set()

    def register_component(self, component: str, **options: Any) -> None:
        """Register ``component`` with options of its own; one that is known keeps those that it has.

        Args:
            component: Its name.
            options: ``unit_dim``, ``beta``, ``saturation_threshold``, as the tracker takes them; None leaves one open.
        """
        asked = {key: value for key, value in options.items() if value is not None}
        self._known.setdefault(component, dataclasses.replace(self._defaults, **asked))  # checks and normalises them

    def replace_feeders(self, component: str) -> None:
        """Take nothing more from the hooks that feed ``component``; those made from now on take their place."""
        self._feeders[component] = self.feeder_number(component) + 1

    def feeder_number(self, component: str) -> int:
        """Return the number of the hooks that feed ``component`` now."""
        return self._feeders.get(component, 0)

    def has_component(self, component: str) -> bool:
        """Return whether ``component`` is registered."""
        return component in self._known

    def forget_component(self, component: str) -> None:
        """Drop ``component``, its options and its counts; do nothing if it is not known."""
        with LOCK:
            self._known.pop(component, None)
            self._kept.pop(component, None)

    def forget_counts(self, component: str) -> None:
        """Start ``component`` at zero; its options stay."""
        with LOCK:
            self._kept.pop(component, None)

    def reset(self) -> None:
        """Start at zero; components and their options stay."""
        with LOCK:
            self._kept.clear()

    def counted(self) -> dict[str, Any]:
        """Return the state so far, by component, as plain tensors and numbers."""
        with LOCK:
            return {name: self._to_plain(state) for name, state in self._kept.items()}

    def load_counted(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``counted`` gave."""
        self.reset()
        for name, plain in state.items():
            self._options(name)  # registers it: the model may not have been searched yet
            self._kept[name] = self._from_plain(plain)

    def note_pass(self, component: str, why_not: Callable[[], str]) -> None:
        """Note a pass through ``component``; where nothing was ever counted, keep the reason that ``why_not`` gives."""
        if component in self._has_given:
            return
        if component in self._kept:
            self._has_given.add(component)
            self._reasons.pop(component, None)
        elif component not in self._warned:
            self._reasons[component] = why_not()

    def warn_if_silent(self) -> None:
        """Warn, once for each, of the components that had passes and gave nothing to count."""
        for component, why in list(self._reasons.items()):
            if component not in self._warned:
                self._warned.add(component)
                text = f"Component {component!r} gives {type(self).__name__} nothing: {why}."
                warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())

    def _to_plain(self, state: Any) -> Any:
        """Return the state of a component as `counted` gives it."""
        return state

    def _from_plain(self, plain: Any) -> Any:
        """Return the state of a component from what `_to_plain` gave."""
        return plain

    def _counted_names(self) -> list[str]:
        """Return the components that have a state, in the order they were registered."""
        return [component for component in self._known if component in self._kept]

    def _options(self, component: str) -> OptionsT:
        """Return the options of ``component``, and register it if it was not."""
        return self._known.get(component) or self._known.setdefault(component, self._defaults)

    def _readable(self, component: str, value: Any) -> tuple[Tensor, int, OptionsT] | None:
        """Return the tensor to count, the dimension of its units, and the options; None if it cannot be counted."""
        options, seen = self._options(component), countable(value)
        if seen is None:
            return None
        axis = unit_axis(seen, options.unit_dim)
        if axis is None and seen.dim() and component not in self._warned:
            self._warned.add(component)
            warnings.warn(
                f"{type(self).__name__} passes over {component!r}: unit_dim={options.unit_dim}, but its tensor has the "
                f"shape {tuple(seen.shape)}.",
                HooklineWarning,
                stacklevel=2,
            )
        return None if axis is None or not seen.numel() else (seen, axis, options)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self._known) or 'no component yet'}>"


def as_number(value: Any) -> float | None:
    """Return a real number of any type (NumPy's too) as a float; None for anything else."""
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def set_plain(options: UnitOptions, **values: Any) -> None:
    """Write normalised ``values`` into frozen ``options``, while these are made."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


# -- counting by unit ------------------------------------------------------------------------------------------


class UnitCount(NamedTuple):
    """Hold the counts of one component."""

    component: str
    hits: list[int]
    """By unit: how often it happened."""
    totals: list[int]
    """By unit: in how many samples."""


class _UnitCounts:
    """Count hits of one component; a wider tensor adds units, a narrower one counts for its own units alone."""

    __slots__ = ("hits", "samples")

    def __init__(self) -> None:
        self.hits: dict[torch.device, Tensor] = {}
        """Whole numbers, so that they stay exact past 2^24; one row per device, as a replica counts where it is."""
        self.samples: dict[int, int] = {}
        """How many samples had that many units; shapes are known without asking the device."""

    def add(self, hits: Tensor, samples: int) -> None:
        """Add the counts of one tensor; ``hits`` is kept and may be changed."""
        width = hits.numel()
        self.samples[width] = self.samples.get(width, 0) + samples
        so_far = self.hits.get(hits.device)
        if so_far is None:
            self.hits[hits.device] = hits
        elif so_far.numel() < width:
            hits[: so_far.numel()] += so_far
            self.hits[hits.device] = hits
        else:
            so_far[:width] += hits

    def totals(self) -> list[int]:
        """Return in how many samples each unit was."""
        width = max(self.samples, default=0)
        return [sum(n for wide, n in self.samples.items() if wide > unit) for unit in range(width)]


class CountingTracker(ComponentTracker[OptionsT]):
    """Count, by unit, how often `_is_hit` was true."""

    def update(self, component: str, tensor: Tensor) -> None:
        """Count one tensor; do nothing with one that cannot be counted (see `countable`)."""
        found = self._readable(component, tensor)
        if found is None:
            return
        seen, axis, options = found
        others = [dim for dim in range(seen.dim()) if dim != axis]
        with LOCK, outside_inference():
            is_hit = self._is_hit(seen, options)
            # In 32 bits, where they suffice, a sum on the CPU takes three quarters of the time.
            dtype = torch.int32 if is_hit.numel() < 2**31 else torch.int64
            hits = is_hit.sum(dim=others, dtype=dtype).long() if others else is_hit.long()
            self._kept.setdefault(component, _UnitCounts()).add(hits, seen.numel() // seen.shape[axis])

    def _fractions(self, prefix: str) -> dict[str, float]:
        """Return ``{prefix}/{component}/{unit}``: the share of samples that were hits."""
        return {
            f"{prefix}/{component}/{unit}": hit / total
            for component, hits, totals in self._results()
            for unit, (hit, total) in enumerate(zip(hits, totals, strict=True))
        }

    def _is_hit(self, tensor: Tensor, options: OptionsT) -> Tensor:
        """Return a tensor of bools: true where there is something to count."""
        raise NotImplementedError

    def _to_plain(self, state: _UnitCounts) -> dict[str, Any]:
        samples = {str(width): number for width, number in state.samples.items()}
        return {"hits": list(state.hits.values()), "samples": samples}

    def _from_plain(self, plain: Mapping[str, Any]) -> _UnitCounts:
        counts = _UnitCounts()
        for hits in plain["hits"]:
            counts.add(hits.clone(), 0)  # what was on several devices may be on one by now
        counts.samples = {int(width): number for width, number in plain["samples"].items()}
        return counts

    def _results(self) -> Iterator[UnitCount]:
        """Return the counts of every component, with one transfer for all of them."""
        with LOCK:
            names = self._counted_names()
            rows = [(name, hits) for name in names for hits in self._kept[name].hits.values()]
            found = fetch(hits for _, hits in rows)
            totals: dict[str, list[int]] = {name: self._kept[name].totals() for name in names}
        summed = {name: [0] * len(total) for name, total in totals.items()}
        for (name, _), part in zip(rows, found, strict=True):
            for unit, hits in enumerate(part):
                summed[name][unit] += hits
        return (UnitCount(name, summed[name], totals[name]) for name in totals)
