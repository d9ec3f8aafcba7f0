"""Keep streaming statistics of a model: of what its modules return, of gradients, of parameters.

Users call `watch`, and so does analyses/layers.py. A `StepMonitor` (monitor.py) makes a `Watch` of its own by
`nothing_watched`, and uses private parts of it, which the head of monitor.py lists: change both together. Loops report
a watch as a tracker by `TrackerHook` (lifecycle/hook.py), which calls ``to_metrics``, ``reset``, ``state_dict`` and
``load_state_dict``.

A watch puts hooks on by `WatchSites`, counts `Steps` (both hooks.py), and reads metrics from the `StatsEngine`
(engine.py), in a distributed run by way of `RankStats` (ranks.py). For ``budget=`` a `BudgetedSchedule` says which
steps are due: it compares steps with the hooks and steps without. `Steps` tells it when a step begins, which is when
the one before is over.

A watch must change no bit of a run, and wait for no CUDA device before it is asked. Its ``state_dict`` goes into
checkpoints: keep its keys.

A new kind of ``on=``: the head of hooks.py lists the files that know the names. A new statistic: the head of row.py, or
for one per unit that of engine.py. Both kinds of names stand in the docstring of `watch`. Metrics are named
``"place/kind/statistic"``: `KINDS` of report/metric_series.py reads the kinds out of these names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import nn

from hookline.distributed.ranks import is_distributed
from hookline.error_policy import warn_user
from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.observe.watch.engine import StatsEngine, StatsSnapshot
from hookline.observe.watch.hooks import OptimizerSteps, Passes, Steps, WatchSites, checked_kinds
from hookline.observe.watch.ranks import RankStats, rank_in_words
from hookline.observe.watch.row import FIRES, Layout, table_of
from hookline.phases import During, phase, validate_phases
from hookline.sites.roles import Layers, with_role
from hookline.sites.targets import check_model
from hookline.sites.wrappers import unwrap
from hookline.tables import OFF, ON, ShownAsTable, Table
from hookline.when import StepSchedule

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookline.hook_types import Target
    from hookline.observe.watch.engine import WatchedPlace


def watch(
    model: nn.Module,
    target: Target = "*",
    *,
    on: str | Iterable[str] | None = None,
    stats: str | Sequence[str] | None = None,
    every: StepSchedule | int = 1,
    exclude: Target = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: Any = None,
    during: str | Iterable[str] = "train",
    replicated: Target = None,
    role: str | None = None,
    layer: Layers = None,
    budget: float | None = None,
) -> Watch:
    """Keep streaming statistics of a model.

    Recipe::

        watch = hookline.watch(model, "layers.#", optimizer=optimizer)
        for batch in data:
            train_step(batch)
        print(watch)
        metrics = watch.to_metrics()  # {"layers.0/forward/mean": ..., "layers.0.weight/param_grad/norm": ...}
        watch.reset()

    Numbers are added up where the tensors are; nothing waits for the device, and nothing comes to the host before you
    ask, and then in one transfer. The run stays the run it would have been, bit for bit.

    Args:
        model: The model.
        target: Which modules (as in ``attach``), and with them the parameters below; a glob may name parameters as
            well. All by default.
        on: What to watch: ``"forward"`` the outputs of modules, ``"backward"`` the gradients of these outputs,
            ``"param"`` the parameters as they are when you ask, ``"param_grad"`` their gradients at each step; all
            four by default. Of an output that is no tensor, its main tensor: the first with more than one real number;
            of several gradients, that of the main one among those that came.
        stats: Which statistics: ``mean``, ``std``, ``norm`` (of one tensor, root mean square over firings), ``rms``,
            ``min``, ``max``, ``absmax``, ``zero_fraction``, ``nonfinite`` (firings with NaN or Inf in them) are the
            default. Also ``nan`` and ``inf`` (how many), ``finite_min``, ``finite_max`` (if not asked for, all four
            are there only in reports with NaN or Inf), ``"over:6"`` (share of magnitudes over 6), ``dead_fraction``
            (units that were never anything but zero), ``histogram`` (counts by binary exponent).
        every: How often it looks: every so many steps, or a `StepSchedule`; how often it reports is decided by the loop
            (``loop="step"``). Once an optimizer has stepped, no hook is on in other steps.
        exclude: Modules and parameters to leave out.
        optimizer: Its steps are the steps; left out, those of any optimizer that holds parameters of the model.
            Gradients of parameters are read just before each, when they are final: accumulated, averaged over
            processes, unscaled (just after, for one that is given a closure). Of several, the one that steps most
            makes the steps, and each is read at its own. A step that a scaler skips is none.
        scaler: The ``GradScaler`` in use: gradients are reported as they would be without it.
        during: The phases to count: ``"train"``, ``"eval"``, ``"intervention"``, or several. The loops of hookline
            set the phase. In any other loop, training is a forward that began with the model in training mode and
            gradients on; every other is an evaluation. Until there was training, forwards that are most like it count
            (a served model has no others), and they are forgotten when training begins. The report says what was left
            out; ``{"train", "eval"}`` counts it too; ``with watch.paused():`` leaves out more.
        replicated: Modules whose activations are the same on all ranks of a tensor-parallel group. If it names none,
            ranks compare their numbers when they first exchange them.
        role: In place of a target, the role of the modules in a language model, such as ``"resid"``; see ``attach``.
        budget: What the watch may cost, as a share of the time of steps (0.02): the first ones are timed, with its
            hooks and without, and from then on it looks at fewer of them.

    Before an optimizer has stepped, a step is one forward that counts. Gradients of parameters that no optimizer holds
    are those that are there when you ask. A loop that updates weights without a ``torch.optim.Optimizer`` calls
    ``watch.step()`` after each backward pass: from then on that alone ends a step.
    In a distributed run every rank watches and calls ``to_metrics()``, which gives the statistics of all ranks.
    """
    check_model(model, target)
    target = with_role(target, role, "*", layer=layer)
    kinds = checked_kinds(on)
    if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in ("is_enabled", "scale")):
        raise OptionError(f"scaler= takes a torch.amp.GradScaler, got {type_name(scaler)}.")
    schedule = StepSchedule.of(every)
    limit = None if budget is None else BudgetedSchedule(schedule, budget)
    found = Watch(unwrap(model), Layout.of(stats), schedule, validate_phases(during), scaler, limit, replicated)
    try:
        found._sites.choose(target, exclude, kinds, lenient=on is None)
        found._follow(optimizer)
    except BaseException:
        found.remove(quiet=True)
        raise
    return found


class Watch(ShownAsTable):
    """The statistics of one ``watch``; prints as a table.

    Recipe: ``watch = hookline.watch(model)``; then ``print(watch)``, ``watch.to_metrics()``, ``watch.reset()``; comes
    off by ``watch.remove()``, or at the end of a ``with`` block; what was counted stays.
    """

    name = "watch"

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        schedule: StepSchedule,
        during: frozenset[str],
        scaler: Any,
        budget: BudgetedSchedule | None = None,
        replicated: Target = None,
    ) -> None:
        self.model = model
        """The model that is watched, without its wrappers."""
        self.budget = budget
        """What the watch costs, and how often it looks; None without ``budget=``."""
        self._scaler = scaler
        self._engine = StatsEngine(layout)
        self._steps = Steps(schedule.is_active if budget is None else budget.begin)
        self._passes = Passes(model, During(during, self._forget), self._steps)
        self._sites = WatchSites(model, self._engine, self._passes, scaler)
        self._optimizers: OptimizerSteps | None = None
        """Tells when an optimizer steps; None where steps are counted by hand."""
        self._has_given = False
        """Whether optimizers were given."""
        self._ranks = RankStats(self._engine, model, schedule, replicated)
        self.on_forget: Callable[[], None] = lambda: None
        """Called when what was counted turns out to be no training, and is dropped; `StepMonitor` sets it."""
        self._removed = False

    def to_metrics(self, *, reset: bool = False, local: bool = False) -> dict[str, Any]:
        """Return every statistic since the last reset, by ``"name/kind/statistic"``; one transfer.

        Args:
            reset: Count from zero afterwards.
            local: In a distributed run, return the numbers of this rank alone. Otherwise every rank has to call, and
                receives the numbers of one process that has seen the whole batch; ``nonfinite`` adds up firings of
                ranks.
        """
        snapshot = self._snapshot(reset=reset)
        is_alone = local or not is_distributed()
        return self._engine.to_metrics(snapshot) if is_alone else self._ranks.to_metrics(snapshot)

    def _snapshot(self, *, reset: bool = False) -> StatsSnapshot:
        """Return all numbers of this rank as they are now; with `reset`, count from zero afterwards."""
        with self._engine.lock:
            self._sites.parameters.read(self._sites.scale())
            snapshot = self._engine.snapshot()
            if reset:
                self.reset()
        self._sites.look_closer(snapshot.rows)
        return snapshot

    def reset(self) -> None:
        """Forget what was counted so far, and go on."""
        self._engine.reset()

    @property
    def steps(self) -> int:
        """The number of steps that are over."""
        return self._steps.count

    @property
    def steps_since_look(self) -> int | None:
        """How many steps are over since the last one that it looked at; None before the first."""
        look = self._steps.last_look
        return None if look is None else self._steps.count - 1 - look

    def report(self) -> dict[str, Any]:
        """Return how often each place was looked at, what a step is, what was left out, and why a place is silent.

        In a distributed run these are the counts of this rank; no other is asked.
        """
        places, rows, _ = self._snapshot()
        fired = {place: int(count) for place, count in zip(places, rows[:, FIRES], strict=True)}
        quiet = [place for place, count in fired.items() if place.silent or not count]
        return {
            "step": self._steps.what,
            "steps": self.steps,
            "left_out": self._passes.during.left_out,
            "fired": {place.label: count for place, count in fired.items()},
            "silent": {place.label: self._why_silent(place) for place in quiet} | self._ranks.left_out,
        }

    def _why_silent(self, place: WatchedPlace) -> str:
        """Return why `place` has no numbers, as far as is known."""
        if place.silent or place.unread:
            return place.silent or place.unread
        if self._passes.in_parts and not place.name:
            return "the model's own forward is not called, only parts of it"
        during = self._passes.during
        return "nothing came by" if during.counted or not during.left_out else during.in_words()

    def _table(self) -> Table:
        metrics, places = self._engine.to_metrics(self._snapshot()), self._engine.places.values()
        table = table_of(metrics, {one.label: one.name for one in places})
        if not table.header:
            return table
        told = [self._passes.during.in_words(), "" if self.budget is None else str(self.budget)]
        return replace(table, foot=(*table.foot, *filter(None, told), *rank_in_words()))

    def _state(self) -> str:
        return OFF if self._removed else ON

    # -- going on and coming off -------------------------------------------------------------------------

    def step(self) -> None:
        """End a step; call it after the backward pass, before gradients are set to zero."""
        if self._has_given:
            raise OptionError("The optimizer makes the steps of this watch; call step(), or give optimizer=, not both.")
        if self._steps.what != Steps.BY_HAND:
            if self._scaler is not None and self._sites.parameters.gradients:
                raise OptionError(
                    "watch.step() cannot tell whether the scaler has unscaled the gradients of parameters yet; give "
                    "optimizer= to watch(), or leave 'param_grad' out of on=."
                )
            self._leave_optimizers()
            self._steps.restart(Steps.BY_HAND)
        self._passes.during.note_step()
        counts = self._steps.is_due and self._passes.counts_now()
        self._sites.parameters.read_step(None, counts=counts)
        self._engine.flush()
        self._steps.advance()
        self._switch()

    def _at_step(self, optimizer: Optimizer) -> None:
        """Read the gradients of an optimizer that makes a step, and count the step."""
        self._passes.during.note_step()
        if self._steps.what == Steps.BY_FORWARD:
            self._steps.restart(Steps.BY_OPTIMIZER)
        counts = self._steps.is_due_for(optimizer) and self._passes.counts_now()
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales by itself, later
        self._sites.parameters.read_step(scale, of=optimizer, counts=counts)
        if phase() == "train":
            self._engine.flush()
            self._steps.count_step_of(optimizer)
            self._switch()

    def _follow(self, optimizer: Optimizer | Sequence[Optimizer] | None) -> None:
        """Count the steps of the given optimizers, or of any that holds parameters of the model; put the hooks on."""
        self._has_given = optimizer is not None
        self._optimizers = OptimizerSteps(optimizer, self._at_step, self.model)
        self._steps.restart(Steps.BY_OPTIMIZER if self._has_given else Steps.BY_FORWARD)
        self._switch()

    def _switch(self) -> None:
        """Have the hooks on, if the step that begins is due."""
        if not self._removed:
            self._sites.switch(self._steps.needs_hooks)

    def _leave_optimizers(self) -> None:
        if self._optimizers is not None:
            self._optimizers.remove()
        self._optimizers = None

    def _forget(self) -> None:
        """Drop what was counted: training begins, and it was something else."""
        self._engine.flush()
        for place in list(self._engine.places.values()):
            if place.kind != "param":
                place.empty()
        self._steps.restart(self._steps.what)
        self.on_forget()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know: all that was counted, and the step it is in."""
        steps, during = self._steps.state_dict(), self._passes.during.state_dict()
        read = [place.name for place in self._sites.parameters.at_steps]
        found = {"counted": self._engine.state_dict(), "steps": steps, "during": during, "read_at_steps": read}
        return found if self.budget is None else {**found, "budget": self.budget.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self._engine.load_state_dict(state["counted"])
        if self.budget is not None and "budget" in state:
            self.budget.load_state_dict(state["budget"])
        self._steps.load_state_dict(state["steps"])
        if self._steps.what == Steps.BY_HAND:
            self._leave_optimizers()
        self._passes.during.load_state_dict(state["during"])
        self._sites.parameters.at_steps = {self._engine.place(name, "param_grad") for name in state["read_at_steps"]}
        self._switch()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing for as long as the block lasts: ``with watch.paused(): evaluate()``."""
        self._passes.paused += 1
        try:
            yield
        finally:
            self._passes.paused -= 1

    def remove(self, *, quiet: bool = False) -> None:
        """Take all hooks off; what was counted stays. Warns, unless ``quiet``, if the model ran unseen."""
        if self._removed:
            return
        self._removed = True
        self._leave_optimizers()
        # That one module of many was never called is in the report; that none was is worth a warning.
        excused = self._passes.in_parts or not self._steps.is_due
        seen = excused or any(report.fired for report in self._sites.handles.report())
        self._sites.remove(quiet=quiet or seen)
        self._engine.flush()
        during = self._passes.during
        if during.left_out and not during.counted and not quiet:
            warn_user(f"This watch of {type_name(self.model)} has counted nothing; {during.in_words()}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove(quiet=exc_info[0] is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        # As with handles: a copied or unpickled model carries no hooks, so a watch that it keeps has counted nothing.
        return nothing_watched, (nn.Identity(),)


def nothing_watched(model: nn.Module, stats: Sequence[str] = ("norm",)) -> Watch:
    """Return a watch of nothing: what becomes of a copied one, and where a monitor of steps begins."""
    return Watch(model, Layout.of(stats), StepSchedule(), frozenset({"train"}), None)


# -- a budget --------------------------------------------------------------------------------------------------------

_TIMED: Final = 16
"""How many steps with a look, and how many without, are timed before the interval is set."""
_LONGEST: Final = 1000
"""How many steps may lie between two looks, if the schedule itself has no longer intervals."""


class TimeMark:
    """A moment, on the host, and in the stream of the current CUDA device where one is in use."""

    __slots__ = ("_event", "_seconds")

    def __init__(self) -> None:
        self._seconds = perf_counter()
        self._event: Any = None
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def seconds_until(self, later: TimeMark) -> float | None:
        """Return how long it took until ``later``; None as long as the device has not come so far."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        if not (self._event.query() and later._event.query()):
            return None
        try:
            return float(self._event.elapsed_time(later._event)) / 1e3
        except (RuntimeError, ValueError):  # on two devices
            return later._seconds - self._seconds


class BudgetedSchedule:
    """Say which steps are due: those of a schedule, or as many of them as the budget allows.

    Every second step of the schedule is due until enough were timed; then the interval is set, once. Nothing waits for
    a device.

    Args:
        schedule: The steps to choose from.
        share: What looks may take, as a share of the time of all steps.
    """

    def __init__(self, schedule: StepSchedule, share: float) -> None:
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise OptionError(f"budget= is a share of the time of a step: 0.02 is 2 %; got {share!r}.")
        if is_distributed():
            raise OptionError("budget= is for one process: ranks would decide by their own clocks. Next: give every=.")
        self.share = share
        """The share that was asked for."""
        self.actual: float | None = None
        """The share that looks take, once that is known."""
        self.every = 2
        """It looks at one of so many steps of the schedule."""
        self._schedule = schedule
        self._waited = _LONGEST
        """How many steps of the schedule have begun since the last look."""
        self._marks: list[TimeMark] = []
        """The beginnings of the steps that are timed, until the interval is set."""
        self._begun: list[tuple[bool, bool]] = []
        """For each of them whether it is of the schedule, and whether it is due."""

    def begin(self, step: int) -> bool:
        """Begin `step`, when the one before is over; return whether it is due."""
        is_asked = self._schedule.is_active(step)
        if step == 0:  # also where steps are counted anew
            self._waited, self._marks, self._begun = _LONGEST, [], []
        if self.actual is None:
            self._marks.append(TimeMark())
            self._set_interval()
        is_due = is_asked and self._waited + 1 >= self.every
        self._waited = 0 if is_due else self._waited + is_asked
        if self.actual is None:
            self._begun.append((is_asked, is_due))
        return is_due

    def _set_interval(self) -> None:
        """Set the interval, if the times of enough steps have arrived."""
        if sum(is_due for _, is_due in self._begun) < _TIMED:
            return
        times: dict[bool, list[float]] = {True: [], False: []}
        for (_, is_due), (begin, end) in zip(self._begun, pairwise(self._marks), strict=True):
            if (seconds := begin.seconds_until(end)) is not None:
                times[is_due].append(seconds)
        if min(map(len, times.values())) >= _TIMED:
            bare = max(median(times[False]), 1e-9)
            cost = max(0.0, median(times[True]) - bare)
            rate = sum(is_asked for is_asked, _ in self._begun) / len(self._begun)
            longest = max(1, math.floor(_LONGEST * rate))
            self.every = min(longest, max(1, math.ceil(cost * rate / (self.share * bare))))
            self.actual = cost * rate / self.every / bare

    def __repr__(self) -> str:
        actual = "not known yet" if self.actual is None else f"{self.actual:.2%}"
        return f"budget: asked {self.share:.2%}, actual {actual}; looks at 1 of {self.every} steps of its schedule"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {"every": self.every, "actual": self.actual, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; where the interval was not set, steps are timed anew."""
        self.every, self.actual, self._waited = state["every"], state["actual"], state["waited"]
        self._marks, self._begun = [], []
