"""Which hook runs at which point: worked out once, when a manager is made.

Takes hooks with what they declare and the type of loop, hands a `Slot` per point to the manager, and prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import OptionError
from hookline.lifecycle.points import HookPoint, checked_points
from hookline.lifecycle.schedule import StepSchedule
from hookline.tables import ShownAsTable, Table
from hookline.training.point_hooks import ALWAYS, Entry, Slot, as_names, check_names, ordered
from hookline.training.training_hook import InterventionHook

if TYPE_CHECKING:
    from hookline.training.training_hook import TrainingHook, Window

__all__ = ["NEEDS", "Plan", "PlanRow", "make_plan"]

NEEDS: Final = ("needs_grads", "needs_prev_step_grads", "needs_pre_epoch_state", "needs_reference_weights")


WAITS: Final = "its loop_points depend on the loop, and loop_type= is not given"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One hook at one point, in words."""

    point: str
    order: int
    """Its place among the hooks of the point, from 1."""
    hook: str
    does: str
    """``"observes"`` or ``"intervenes (scope)"``."""
    when: str
    """At which steps, in which epochs."""
    needs: str
    """What the loop has to provide."""


@dataclass(frozen=True, slots=True, repr=False)
class Plan(ShownAsTable):
    """What will run when; prints as a table.

    Recipe: ``print(manager.plan())``.
    """

    slots: Mapping[HookPoint, Slot]
    """The hooks of each point that has any, in order."""
    left_out: Mapping[str, str]
    """Hooks that never run, and why."""
    unit: str = "epoch"
    """What windows count."""

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """Every hook at every point, in the order of the loop."""
        return tuple(
            PlanRow(point.name, order, entry.name, _does(entry), _when(entry, self.unit), _needs(entry))
            for point in HookPoint
            if point in self.slots
            for order, entry in enumerate(self.slots[point].entries, 1)
        )

    @property
    def undecided(self) -> tuple[str, ...]:
        """Hooks that cannot be placed before it is known which loop runs."""
        return tuple(name for name, why in self.left_out.items() if why is WAITS)

    def silent_without(self, points: Iterable[HookPoint]) -> dict[str, list[str]]:
        """The hooks that have no point among these, each with the points it has."""
        there = set(points)
        wanted: dict[str, list[HookPoint]] = {}
        for point, slot in self.slots.items():
            for entry in slot.entries:
                wanted.setdefault(entry.name, []).append(point)
        return {name: [p.name for p in its] for name, its in wanted.items() if not there.intersection(its)}

    def _table(self) -> Table:
        rows = [(r.point, str(r.order), r.hook, r.does, r.when, r.needs) for r in self.rows]
        if not (rows or self.left_out):
            return Table(title="no hooks")
        left_out = [f"left out: {name} ({why})" for name, why in self.left_out.items()]
        return Table(("point", "", "hook", "does", "when", "needs"), rows, foot=left_out, rule=False)


def make_plan(
    hooks: Mapping[str, TrainingHook], loop_type: str | None, left_out: Mapping[str, str], known: Iterable[str] = ()
) -> Plan:
    """The hooks by point, in order. ``known`` are names that may be mentioned beside those of the hooks."""
    names = dict.fromkeys([*hooks, *known])
    found: dict[HookPoint, list[Entry]] = {}
    out = dict(left_out)
    for name, hook in hooks.items():
        for option in ("before", "after"):
            check_names(name, option, as_names(getattr(hook, option)), names)
        if name in out:
            continue
        windows = windows_of(name, hook, loop_type)
        if not windows:
            out[name] = WAITS if loop_type is None else f"its loop_points have nothing for the {loop_type} loop"
        for point, window in windows.items():
            found.setdefault(point, []).append(_entry(name, hook, point, window))
    slots = {point: Slot(ordered(entries)) for point, entries in found.items()}
    return Plan(slots, out, "step" if loop_type == "step" else "epoch")


def windows_of(name: str, hook: TrainingHook, loop_type: str | None) -> dict[HookPoint, Window]:
    """The points of a hook in that loop, each with its window; none if it takes no part, or that is not known yet."""
    if loop_type is None or hook.loop_points is None:
        points = checked_points(hook.hook_points or ())
        if not points and not hook.loop_points:
            raise OptionError(f"Hook {name!r} never fires: give it hook_points, such as {{HookPoint.POST_EPOCH}}.")
        return dict.fromkeys(points, ALWAYS)
    if not isinstance(hook.loop_points, Mapping):
        raise OptionError(
            f"loop_points of hook {name!r} says for each loop which points it has, such as "
            f'{{"epoch": {{HookPoint.POST_EPOCH}}}}; got {hook.loop_points!r}.'
        )
    declared = hook.loop_points.get(loop_type) or ()
    if not isinstance(declared, Mapping):
        return dict.fromkeys(checked_points(declared), ALWAYS)
    return {HookPoint.of(point): _checked_window(name, point, window) for point, window in declared.items()}


def _checked_window(name: str, point: Any, window: Any) -> Window:
    if window is None:
        return ALWAYS
    ends = tuple(window) if isinstance(window, Sequence) and not isinstance(window, str) else ()
    if len(ends) != 2 or not all(end is None or isinstance(end, int) for end in ends):
        raise OptionError(
            f"loop_points of hook {name!r} at {HookPoint.of(point).name}: a window is (first, last), with None for an "
            f"open end; got {window!r}."
        )
    first, last = ends
    if first is not None and last is not None and first > last:
        raise OptionError(
            f"loop_points of hook {name!r} at {HookPoint.of(point).name}: the window {window!r} ends before it begins."
        )
    return first, last


def _entry(name: str, hook: TrainingHook, point: HookPoint, window: Window) -> Entry:
    intervenes = isinstance(hook, InterventionHook) and (
        hook.intervention_points is None or point in checked_points(hook.intervention_points)
    )
    schedule = hook.step_schedule
    if schedule is not None and not callable(getattr(schedule, "is_active", None)):
        raise OptionError(
            f'step_schedule of hook {name!r} is a StepSchedule, such as StepSchedule("stride", stride=50); got '
            f"{schedule!r}."
        )
    if not isinstance(hook.priority, int | float):
        raise OptionError(f"priority of hook {name!r} is a number; got {hook.priority!r}.")
    return Entry(hook, name, point, intervenes, window, schedule if point.is_step else None)


def _does(entry: Entry) -> str:
    return f"intervenes ({getattr(entry.hook, 'scope', '')})" if entry.intervenes else "observes"


def _when(entry: Entry, unit: str) -> str:
    words = [_schedule(entry.schedule)] if entry.schedule is not None else []
    first, last = entry.window
    if first is not None:
        words.append(f"from {unit} {first}" if last is None else f"{unit}s {first} to {last}")
    elif last is not None:
        words.append(f"up to {unit} {last}")
    return ", ".join(words) or "always"


def _schedule(schedule: Any) -> str:
    if type(schedule) is not StepSchedule:
        return str(schedule)
    words = {
        "continual": "every step",
        "stride": f"every {schedule.stride} steps",
        "burst": f"{schedule.burst_length} of every {schedule.stride} steps",
    }[schedule.mode]
    return f"{words} from {schedule.warmup}" if schedule.warmup else words


def _needs(entry: Entry) -> str:
    needs = [need.removeprefix("needs_").replace("_", " ") for need in NEEDS if getattr(entry.hook, need)]
    return ", ".join(needs) or "–"
