"""Hold the hooks of a manager: when each is due, how it has fared so far, what is told to all of them.

`HookManager.hooks` is a `ManagedHooks`, whose `Plan` says what is due at each point. The loops start and finish the
hooks by it, users read receipts, errors and costs; the manager reports to it each call of a hook, and enters
`on_device` around each firing. `ReferenceWeights` are for hooks that declare ``needs_reference_weights``.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from hookline.distributed.ranks import rank_names
from hookline.error_policy import ErrorPolicy, error_text, warn_user
from hookline.errors import GuardError, LifecycleError, OptionError, RankError
from hookline.guard.rng import kept_rng
from hookline.lifecycle import checkpoint_file
from hookline.lifecycle.hook import InterventionHook
from hookline.tables import ShownAsTable, Table
from hookline.tree import copied, leaves, map_tensors
from hookline.when import HookPoint, StepSchedule, validate_points

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.hook import TrainingHook, Window
    from hookline.lifecycle.ranks import OneProcess

LOOP_TYPES: Final = ("epoch", "step")
_ALWAYS: Final = (None, None)
"""The window that is open at both ends."""
_NEEDS: Final = ("needs_grads", "needs_prev_step_grads", "needs_pre_epoch_state", "needs_reference_weights")
_NO_LOOP_TYPE: Final = "its loop_points depend on the loop, and loop_type= is not given"

logger = logging.getLogger("hookline.lifecycle.firing")

_CPU: Final = torch.device("cpu")
_NOTHING: Final[AbstractContextManager[None]] = nullcontext()
_CONSEQUENCES: Final = {"warn": "stays on and the run continues", "disable": "is switched off and the run continues"}


# -- the hooks of a point ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PlannedHook:
    """A hook at a point."""

    hook: TrainingHook
    name: str
    point: HookPoint
    intervenes: bool
    """Whether ``intervene`` is called here, rather than ``compute``."""
    window: Window
    """The first and last epoch, or step."""
    schedule: Any
    """The steps at which it is due; None: all."""
    scope: str
    """``"observes"``, or what the intervention declares that it may change."""

    def is_due_at(self, step: int) -> bool:
        """Return whether its schedule has that step."""
        return self.schedule is None or bool(self.schedule.is_active(step))

    def is_open_at(self, number: int | None) -> bool:
        """Return whether its window has that epoch, or step; None is in every window."""
        first, last = self.window
        return number is None or ((first is None or number >= first) and (last is None or number <= last))


class PointHooks:
    """The hooks of one point, in the order they run: those that observe, then those that intervene."""

    __slots__ = ("hooks", "is_pure", "is_scheduled", "is_windowed", "parts", "point", "quiet")

    def __init__(self, hooks: Sequence[PlannedHook]) -> None:
        self.point = hooks[0].point
        self.parts = split_roles(hooks)
        """Those that observe, and those that intervene; each in the order they were given."""
        self.hooks = (*self.parts[0], *self.parts[1])
        self.is_scheduled = any(planned.schedule is not None for planned in hooks)
        self.is_windowed = any(planned.window != _ALWAYS for planned in hooks)
        self.is_pure = is_pure(hooks)
        self.quiet = range(0)
        """Steps at which no hook is due, as far as that is known: most firings cost this one look-up."""

    def due(self, step: int) -> tuple[PlannedHook, ...]:
        """Return the hooks whose schedule has `step`; without a schedule it is all `hooks`, and need not be asked."""
        if step < 0:
            name = next(planned.name for planned in self.hooks if planned.schedule is not None)
            raise LifecycleError(f"Hook {name!r} has a step_schedule: call manager.advance_step() when a step begins.")
        due = tuple([planned for planned in self.hooks if planned.is_due_at(step)])
        if not due:
            self.quiet = range(step, min(_next_due(planned.schedule, step) for planned in self.hooks))
        return due


def split_roles(hooks: Sequence[PlannedHook]) -> tuple[tuple[PlannedHook, ...], tuple[PlannedHook, ...]]:
    """Return those of ``hooks`` that observe, and those that intervene."""
    return tuple(h for h in hooks if not h.intervenes), tuple(h for h in hooks if h.intervenes)


def is_pure(hooks: Iterable[PlannedHook]) -> bool:
    """Return whether all `hooks` observe, and promise to draw no random number."""
    return all(planned.hook.pure and not planned.intervenes for planned in hooks)


def _next_due(schedule: Any, step: int) -> int:
    """Return the first step from `step` on that is due."""
    if type(schedule) is not StepSchedule:
        return step  # a user's own schedule has to be asked at each step
    step = max(step, schedule.warmup)
    length = {"continual": schedule.stride, "stride": 1, "burst": schedule.burst_length}[schedule.mode]
    late = step % schedule.stride
    return step if late < length else step + schedule.stride - late


# -- the plan ---------------------------------------------------------------------------------------------------


class PlanRow(NamedTuple):
    """One hook at one point, as text."""

    point: str
    order: int
    """Its place among the hooks of the point, from 1."""
    hook: str
    does: str
    """``"observes"`` or ``"intervenes (scope)"``."""
    when: str
    """The steps and epochs at which it is due."""
    needs: str
    """What the loop has to provide."""


class Plan(ShownAsTable):
    """The hooks of each point, in order; prints as a table.

    Recipe: ``print(manager.plan)``.
    """

    def __init__(self, hooks: Mapping[str, TrainingHook], loop_type: str | None = None) -> None:
        if loop_type is not None and loop_type not in LOOP_TYPES:
            raise OptionError(f"loop_type= is 'epoch', 'step' or None; got {loop_type!r}.")
        self._hooks = hooks
        self._made_for = self.loop_type = loop_type
        """Which ``loop_points`` hold: ``"epoch"``, ``"step"``; None: ``hook_points`` do."""
        self._excluded: Mapping[str, str] = {}
        self.points: dict[HookPoint, PointHooks] = {}
        """The points that have hooks."""
        self.left_out: dict[str, str] = {}
        """Hooks that never run, each with the reason."""
        self.known: dict[HookPoint | str, PointHooks | None] = {}
        """Every point, by its name as well, for `HookManager.fire`; empty while the loop has to be known first."""

    def make(self, left_out: Mapping[str, str]) -> None:
        """Work out the plan without the hooks `left_out`, each with its reason."""
        hooks, self._excluded, self.left_out = self._hooks, left_out, dict(left_out)
        found: dict[HookPoint, list[PlannedHook]] = {}
        for name, hook in hooks.items():
            windows = {} if name in left_out else _windows(name, hook, self.loop_type)
            for point, window in windows.items():
                found.setdefault(point, []).append(_planned(name, hook, point, window))
            if not windows and name not in left_out:
                nothing = f"its loop_points have nothing for the {self.loop_type} loop"
                self.left_out[name] = _NO_LOOP_TYPE if self.loop_type is None else nothing
        self.points = {point: PointHooks(planned) for point, planned in found.items()}
        self.known.clear()  # in place: the manager has it at hand
        for point in () if self._undecided else HookPoint:
            self.known[point] = self.known[point.name] = self.points.get(point)

    def use_loop(self, loop_type: str) -> None:
        """Take the points that hooks have in that loop; the loops of hookline call it."""
        if self._made_for not in (None, loop_type):
            raise OptionError(f"This manager has loop_type={self._made_for!r}, and the {loop_type} loop was to use it.")
        if loop_type != self.loop_type:
            self.loop_type = loop_type
            self.make(self._excluded)

    def position(self, epoch: int, step: int | None) -> int:
        """Return where metrics belong, and what windows count: the epoch; in the step loop the step."""
        return epoch if self.loop_type != "step" or step is None else step

    def find(self, point: HookPoint | str) -> PointHooks | None:
        """Return the hooks of a point; raise if there is no such point, or the loop has to be known first."""
        found = HookPoint.of(point)
        if self._undecided:
            name = self._undecided[0]
            raise LifecycleError(f"Hook {name!r} has only loop_points, so HookManager(loop_type=) has to be given.")
        return self.known[found]

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """Every hook at every point, in the order of the loop."""
        unit = self.loop_type or "epoch"
        return tuple(
            PlanRow(point.name, order, planned.name, _does(planned), _when(planned, unit), _needs(planned))
            for point in HookPoint
            if point in self.points
            for order, planned in enumerate(self.points[point].hooks, 1)
        )

    @property
    def _undecided(self) -> tuple[str, ...]:
        """Hooks whose points depend on the loop, while it is not known which loop runs."""
        return tuple(name for name, why in self.left_out.items() if why is _NO_LOOP_TYPE)

    def hooks_at(
        self, points: Iterable[HookPoint], number: int | None = None, step: int | None = None
    ) -> Iterator[PlannedHook]:
        """Yield the hooks at these points whose window has `number`, an epoch or step, and whose schedule has `step`;
        None: every window, every schedule.
        """
        for found in [self.points[point] for point in map(HookPoint.of, points) if point in self.points]:
            for planned in found.hooks:
                if planned.is_open_at(number) and (step is None or planned.is_due_at(step)):
                    yield planned

    def needs(self, what: str, *points: HookPoint, epoch: int | None = None, step: int | None = None) -> bool:
        """Return whether a hook at one of these points, or at any, has the attribute ``what``, and ``step`` is due."""
        return any(getattr(planned.hook, what) for planned in self.hooks_at(points or HookPoint, epoch, step))

    def may_fire(self, step: int, *points: HookPoint) -> bool:
        """Return whether a hook may be due at one of these points of ``step``; its window is not looked at."""
        return any(point in self.points and step not in self.points[point].quiet for point in points)

    def will_not_fire(self, points: Iterable[HookPoint | str]) -> tuple[str, ...]:
        """Return a sentence for each hook that never fires if the run has only these points."""
        there = validate_points(points)
        fires = ", ".join(point.name for point in HookPoint if point in there) or "nothing"
        wanted: dict[str, list[HookPoint]] = {}
        for planned in self.hooks_at(self.points):
            wanted.setdefault(planned.name, []).append(planned.point)
        return tuple(
            f"Hook {name!r} will not fire: it waits for {', '.join(p.name for p in its)}, and the run fires {fires}."
            for name, its in wanted.items()
            if not there.intersection(its)
        )

    def _table(self) -> Table:
        rows = [tuple(map(str, row)) for row in self.rows]
        if not (rows or self.left_out):
            return Table(title="no hooks")
        left_out = [f"left out: {name} ({why})" for name, why in self.left_out.items()]
        return Table(("point", "", "hook", "does", "when", "needs"), rows, foot=left_out, rule=False)


def _windows(name: str, hook: TrainingHook, loop_type: str | None) -> dict[HookPoint, Window]:
    """Return the points of a hook in that loop, each with its window; empty if it has none, or they are not known."""
    if loop_type is None or hook.loop_points is None:
        points = validate_points(hook.hook_points or ())
        if not points and not hook.loop_points:
            raise OptionError(f"Hook {name!r} never fires: give it hook_points, such as {{HookPoint.POST_EPOCH}}.")
        return dict.fromkeys(points, _ALWAYS)
    if not isinstance(hook.loop_points, Mapping) or not hook.loop_points.keys() <= set(LOOP_TYPES):
        form = '{"epoch": {HookPoint.POST_EPOCH}, "step": ...}'
        raise OptionError(f"loop_points of hook {name!r} is such as {form}; got {hook.loop_points!r}.")
    declared = hook.loop_points.get(loop_type) or ()
    if not isinstance(declared, Mapping):
        return dict.fromkeys(validate_points(declared), _ALWAYS)
    return {HookPoint.of(point): _checked_window(name, point, window) for point, window in declared.items()}


def _checked_window(name: str, point: Any, window: Any) -> Window:
    ends = _ALWAYS if window is None else tuple(window) if isinstance(window, Sequence) else ()
    is_window = len(ends) == 2 and all(end is None or isinstance(end, int) for end in ends)
    if is_window and (None in ends or ends[0] <= ends[1]):
        return ends[0], ends[1]
    place = f"loop_points of hook {name!r} at {HookPoint.of(point).name}"
    raise OptionError(f"{place}: a window is (first, last), with None for an open end; got {window!r}.")


def _planned(name: str, hook: TrainingHook, point: HookPoint, window: Window) -> PlannedHook:
    scope = "observes"
    if isinstance(hook, InterventionHook):
        is_here = hook.intervention_points is None or point in validate_points(hook.intervention_points)
        scope = hook.scope if is_here else scope
    schedule = hook.step_schedule
    if schedule is not None and not callable(getattr(schedule, "is_active", None)):
        raise OptionError(f"step_schedule of hook {name!r} is a StepSchedule; got {schedule!r}.")
    return PlannedHook(hook, name, point, scope != "observes", window, schedule if point.is_step else None, scope)


# -- in words ---------------------------------------------------------------------------------------------------


def _does(planned: PlannedHook) -> str:
    return f"intervenes ({planned.scope})" if planned.intervenes else planned.scope


def _when(planned: PlannedHook, unit: str) -> str:
    words = [_schedule_text(planned.schedule)] if planned.schedule is not None else []
    first, last = planned.window
    if first is not None:
        words.append(f"from {unit} {first}" if last is None else f"{unit}s {first} to {last}")
    elif last is not None:
        words.append(f"up to {unit} {last}")
    return ", ".join(words) or "always"


def _schedule_text(schedule: Any) -> str:
    if type(schedule) is not StepSchedule:
        return str(schedule)
    words = {
        "continual": "every step",
        "stride": f"every {schedule.stride} steps",
        "burst": f"{schedule.burst_length} of every {schedule.stride} steps",
    }[schedule.mode]
    return f"{words} from {schedule.warmup}" if schedule.warmup else words


def _needs(planned: PlannedHook) -> str:
    needs = [need.removeprefix("needs_").replace("_", " ") for need in _NEEDS if getattr(planned.hook, need)]
    return ", ".join(needs) or "–"


# -- the hooks themselves ----------------------------------------------------------------------------------------


class FiringReceipt(NamedTuple):
    """Say what one hook did in one firing.

    Recipe: ``manager.fire(point, ctx, model_ctx)``; then ``manager.hooks.receipts[0].touched``.
    """

    hook: str
    """Its name."""
    scope: str
    """``"observes"``, or what the intervention declared."""
    seconds: float
    """How long it took, saving and putting back not included."""
    touched: tuple[str, ...] = ()
    """What an intervention is known to have changed."""
    restored: tuple[str, ...] = ()
    """What was put back."""
    saved_bytes: int = 0
    """How much had been copied, for it and the other interventions of the firing."""
    error: str = ""
    """What it raised, if it did."""


class ManagedHooks(dict[str, "TrainingHook"]):
    """All hooks of a manager by name, in the order they were given; random numbers that they draw here do not count.

    Recipe: ``manager.hooks["norms"]``, ``manager.hooks.errors``, ``manager.hooks.costs()``.
    """

    def __init__(
        self, hooks: Mapping[str, TrainingHook], loop_type: str | None = None, on_error: str = "raise", *, offload: bool
    ) -> None:
        super().__init__(hooks)
        # A hook that breaks what it declared may have changed the run: going on would hide it.
        self.policy = ErrorPolicy(on_error, logger, _CONSEQUENCES, always_raise=(GuardError,))
        """What follows when a hook raises."""
        self.plan = Plan(self, loop_type)
        self.fired: Counter[str] = Counter()
        """The number of calls of each hook."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """The time of the calls of each hook."""
        self.receipts: Sequence[FiringReceipt] = ()
        """What each hook did in the last firing: what it touched, what was put back, how long it took."""
        self._excluded: dict[str, str] = {}
        self.offloads = offload
        """Whether tensors of hooks wait on the CPU between firings."""
        # The devices are remembered here, not taken from the model: some points are fired without one.
        self._homes: WeakKeyDictionary[TrainingHook, dict[str, torch.device]] = WeakKeyDictionary()
        self._brought: list[TrainingHook] = []
        self._depth = 0

    # -- how they fare ---------------------------------------------------------------------------------------

    @property
    def errors(self) -> dict[str, int]:
        """The number of errors of each hook."""
        return dict(self.policy.counts)

    def costs(self) -> dict[str, dict[str, float]]:
        """Return ``count``, ``total_ms`` and ``mean_ms`` of each hook's calls, by the clock of the host."""
        spent = {name: (count, 1e3 * self.seconds[name]) for name, count in self.fired.items()}
        return {name: {"count": n, "total_ms": ms, "mean_ms": ms / n} for name, (n, ms) in spent.items()}

    def exclude(self, reasons: dict[str, str]) -> None:
        """Leave out the hooks in `reasons`, and those that are switched off; take in all others."""
        self._excluded = reasons
        self._replan()

    def _replan(self) -> None:
        self.plan.make({**self._excluded, **self.policy.why_disabled()})

    # -- errors ----------------------------------------------------------------------------------------------

    def goes_on_after(self, error: BaseException, planned: PlannedHook, place: str) -> bool:
        """Count the error of a hook at `place`, and keep a warning of it; return whether the firing goes on."""
        name, policy = planned.name, self.policy
        if not policy.handle(name, error):
            note = f"Raised by the hook {name!r} at {place}."
            if isinstance(error, Exception) and note not in getattr(error, "__notes__", ()):
                error.add_note(note)  # the traceback of a class of analyses names neither hook nor step
            return False
        if name in policy.disabled:
            self._replan()
        else:
            undone = "what it did is undone, " if planned.intervenes else ""
            sentence = (
                f"Hook {name!r} raised {error_text(error).rstrip('.')}; {undone}it stays on, and the run continues. "
                "Further failures are counted: in run.json, and as hooks.errors of the manager."
            )
            policy.warn_later(name, sentence)
        return True

    def settle(self, ranks: OneProcess, raised: BaseException | None = None) -> None:
        """Do on every rank what the error policy says about hooks that failed on any rank, once all know of it."""
        policy, failures, ranks.failures = self.policy, ranks.failures, {}
        for hook, texts in failures.items():
            error = RankError(f"Hook {hook!r} raised {texts[min(texts)]} on {rank_names([*texts])}.")
            if policy.on_error == "raise":
                ranks.agreed_error = raised or error
                raise ranks.agreed_error
            if policy.on_error == "disable":
                policy.disabled.add(hook)
            elif ranks.rank not in texts:
                policy.counts[hook] += 1
            policy.warn_later(f"{hook} on other ranks", str(error))
        if failures:
            self._replan()
            policy.warn_pending()

    # -- what is told to all of them -------------------------------------------------------------------------

    def start(self, model: nn.Module, ranks: OneProcess) -> None:
        """Tell every hook that training begins, or goes on; the loops of hookline do.

        What the error policy says of one that raises on any rank is done on all of them: one that cannot be started, as
        the model has no such module, is no reason to lose the others.
        """
        policy = self.policy
        failed: dict[str, Exception] = {}
        ranks.together("starting the hooks", lambda: failed.update(self._start_each(model)))
        for name, error in failed.items():
            text = error_text(error).rstrip(".")
            policy.count(name, error, "in start(model)")  # no traceback: most often the model has no such module
            if policy.on_error == "disable":
                policy.disabled.add(name)
            policy.warn_later(f"start of {name}", f"Hook {name!r} could not be started: {text}; the run continues.")
            ranks.hold(name, f"{text} in start(model)")
        if policy.on_error != "raise" and not ranks.is_single:
            ranks.reduce({}, "hooks that cannot start")
            self.settle(ranks)
        if failed:
            self._replan()
            policy.warn_pending()

    def _start_each(self, model: nn.Module) -> dict[str, Exception]:
        """Call ``start`` of every hook; return the errors that the run goes on after."""
        failed = {}
        with kept_rng():
            for name, hook in self.items():
                try:
                    hook.start(model)
                except Exception as error:
                    error.add_note(f"Raised by the hook {name!r} when training began, in start(model).")
                    if not self.policy.can_continue(error):
                        raise
                    failed[name] = error
        return failed

    def finish(self) -> None:
        """Tell every hook that training is over, the last first, also when another raises; the loops of hookline do."""
        with kept_rng(), ExitStack() as stack:
            for hook in self.values():
                stack.callback(hook.finish)

    def set_run_context(self, context: Mapping[str, Any]) -> None:
        """Call ``set_run_context`` of every hook."""
        with kept_rng():
            for hook in self.values():
                hook.set_run_context(**context)

    def reset(self) -> None:
        """Call ``reset`` of every hook: another run begins."""
        self.receipts = ()
        with kept_rng(), self.on_device(self.values()):
            for hook in self.values():
                hook.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state of every hook, with tensors on the device where a resumed run must find them."""
        with kept_rng(), self.on_device(self.values()):
            return {name: copied(hook.state_dict()) for name, hook in self.items()}

    def load_state_dict(self, states: Mapping[str, Any], disabled: Iterable[str]) -> None:
        """Load the states of hooks that are in `states`, and switch off those that are `disabled`."""
        unknown = [name for name in states if name not in self]
        if unknown:
            warn_user(f"The state of hooks that are not here is passed over: {', '.join(map(repr, unknown))}.")
        with kept_rng(), self.on_device(self.values()):
            for name, hook in self.items():
                if name in states:
                    hook.load_state_dict(copied(states[name]))
        self.policy.disabled = set(disabled) & set(self)
        self._replan()

    # -- tensors that wait on the CPU ------------------------------------------------------------------------

    def on_device(self, hooks: Iterable[TrainingHook]) -> AbstractContextManager[None]:
        """Return a context in which the tensors of `hooks` are where they were; after the outermost, on the CPU."""
        return self._moved(hooks) if self.offloads else _NOTHING

    @contextmanager
    def _moved(self, hooks: Iterable[TrainingHook]) -> Iterator[None]:
        self._depth += 1
        try:
            for hook in hooks:
                self._brought.append(hook)
                homes = self._homes.pop(hook, None)
                if homes is not None:
                    hook.set_state_tensors(_moved_to(homes, hook.get_state_tensors()))
            yield
        finally:
            self._depth -= 1
            while self._brought and not self._depth:
                self._send(self._brought.pop())

    def _send(self, hook: TrainingHook) -> None:
        tensors = hook.get_state_tensors()
        homes = {path: leaf.device for path, leaf in leaves(tensors) if isinstance(leaf, Tensor)}
        if any(home != _CPU for home in homes.values()):
            self._homes[hook] = homes
            hook.set_state_tensors(_moved_to(dict.fromkeys(homes, _CPU), tensors))


def _moved_to(homes: Mapping[str, torch.device], tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the same structure with each tensor on the device that `homes` has for its path."""
    moved: dict[str, Any] = map_tensors(tensors, lambda path, tensor: tensor.to(homes.get(path, tensor.device)))
    return moved


# -- the weights that hooks compare with --------------------------------------------------------------------------

Source = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]] | str | os.PathLike[str] | None


class ReferenceWeights:
    """Look for reference weights once per run.

    A path may have fields for what ``set_run_context`` says: ``"runs/{strategy}/final.pt"``.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.context: dict[str, Any] = {}
        """What ``set_run_context`` said; a path may name it."""
        self._has_warned = False
        self.reset()

    def reset(self) -> None:
        """Look again, and give again: another run begins."""
        self._found: Mapping[str, Tensor] | None = None
        self._has_looked = False
        self._given: WeakSet[TrainingHook] = WeakSet()

    def give(self, hook: TrainingHook) -> None:
        """Give a hook the weights, once, if there are any; warn once of the reason if they cannot be read."""
        if not self._has_looked:
            self._has_looked = True
            try:
                with kept_rng():
                    self._found = self._look()
            except Exception as error:
                if not self._has_warned:
                    text = f"{self._source!r} cannot be read ({error_text(error)})"
                    warn_user(f"Hooks go without reference weights: {text}.")
                self._has_warned = True
        if hook not in self._given:
            if self._found is not None:
                hook.set_reference_weights(self._found)
            self._given.add(hook)

    def _look(self) -> Mapping[str, Tensor] | None:
        source: Any = self._source
        if isinstance(source, str | os.PathLike):
            source = read_weights(os.fspath(source).format(**self.context))
        elif callable(source):
            source = source()
        source = _model_of(source)
        return None if source is None else {name.removeprefix("_orig_mod."): value for name, value in source.items()}


def read_weights(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """Return the weights in a file, or in a checkpoint of a run, on the CPU.

    Recipe::

        reference = read_weights("runs/mod_arithmetic/random/checkpoints/step_00000120.pt")
        hookline.HookManager(["gradient_projection"], reference_weights=reference, sinks=[...])
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if not checkpoint_file.is_checkpoint(path):
        found: Mapping[str, Tensor] = _model_of(torch.load(path, map_location="cpu", weights_only=True))
        return found
    saved = checkpoint_file.read(path, lambda device: torch.device("cpu"))["core"]["model"]["tensors"]
    return {name: each for name, each in saved.items() if isinstance(each, Tensor)}


def _model_of(found: Any) -> Any:
    """Return the weights inside a checkpoint that has other things beside them, or `found` itself."""
    inner = found.get("model") if isinstance(found, Mapping) else None
    return inner if isinstance(inner, Mapping) else found
