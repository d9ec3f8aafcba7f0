"""Keep streaming statistics of a model: of what its modules return, of gradients, of parameters.

Users call `watch`. It puts hooks on by `WatchSites`, counts steps by `watch_steps`, and reads metrics from the
`StatsEngine`, in a distributed run by way of `RankStats`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from hookline.distributed.ranks import is_distributed
from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.observe.watch.budgeted_schedule import BudgetedSchedule, budgeted
from hookline.observe.watch.overhead_budget import Budget
from hookline.observe.watch.rank_stats import DeclaredShards, RankStats, same_on_ranks
from hookline.observe.watch.saved_rows import load_rows, saved_rows
from hookline.observe.watch.stat_columns import Layout
from hookline.observe.watch.stats_engine import StatsEngine, StatsSnapshot
from hookline.observe.watch.watch_hooks import WatchSites, checked_kinds
from hookline.observe.watch.watch_steps import CountingRules, ForwardSteps, ManualSteps, OptimizerSteps, Schedule
from hookline.observe.watch.watch_table import watch_table
from hookline.phases import During, validate_phases
from hookline.sites.roles import with_role
from hookline.sites.targets import check_model
from hookline.sites.wrappers import unwrap
from hookline.tables import OFF, ON, ShownAsTable, Table
from hookline.when import StepSchedule

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookline.hook_types import Target

__all__ = ["Watch", "watch"]

_layout_of = functools.cache(Layout.of)


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
    sharded: Target = None,
    role: str | None = None,
    budget: Budget | float | None = None,
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
            four by default. Also ``"param_grad_local"``: gradients of parameters as each backward pass of this rank
            makes them, before they are accumulated, and before ranks reduce them. Of an output that is no tensor, its
            main tensor: the first with more than one real number; of several gradients, that of the main one among
            those that came.
        stats: Which statistics: ``mean``, ``std``, ``norm`` (of one tensor, root mean square over firings), ``rms``,
            ``min``, ``max``, ``absmax``, ``zero_fraction``, ``nonfinite`` (firings with NaN or Inf in them) are the
            default. Also ``nan`` and ``inf`` (how many), ``finite_min``, ``finite_max`` (if not asked for, all four
            are there only in reports with NaN or Inf), ``"over:6"`` (share of magnitudes over 6), ``dead_fraction``
            (units that were never anything but zero), ``histogram`` (counts by binary exponent).
        every: How often it looks: every so many steps, or a `StepSchedule`; how often it reports is decided by the loop
            (``loop="step"``). In other steps no hook is on (in compiled code only with ``optimizer=`` or ``step()``).
        exclude: Modules and parameters to leave out.
        optimizer: Its steps are the steps, and gradients of parameters are read just before each, when they are final:
            accumulated, averaged over processes, unscaled (just after, for one that is given a closure). Several may
            be given; a step is over when the last of them has made its own. One that a scaler skips is none.
        scaler: The ``GradScaler`` in use: gradients are reported as they would be without it.
        during: The phases to count: ``"train"``, ``"eval"``, ``"intervention"``, or several. The loops of hookline
            set the phase. In any other loop, training is a forward that began with the model in training mode and
            gradients on; every other is an evaluation. Until there was training, forwards that are most like it count
            (a served model has no others), and they are forgotten when training begins. The report says what was left
            out; ``{"train", "eval"}`` counts it too; ``with watch.paused():`` leaves out more.
        replicated: Modules whose activations are the same on all ranks of a tensor-parallel group. Where neither this
            nor ``sharded`` names a module, ranks compare their numbers when they first exchange them.
        sharded: Modules of whose activations each rank of a tensor-parallel group has a part.
        role: In place of a target, the role of the modules in a language model, such as ``"resid"``; see ``attach``.
        budget: What the watch may cost, as a share of a step (0.02), or a `Budget`; it looks at fewer steps then.

    Without an optimizer, a step is whatever lies between two calls of ``watch.step()``; if you never call it, one
    outermost forward of the model, and gradients of parameters are read at the end of each backward pass through it.
    Of a model that is not called itself (Lightning calls ``training_step``), a step is one call of its first part.
    In a distributed run every rank watches and calls ``to_metrics()``, which gives the statistics of all ranks.
    """
    check_model(model, target)
    target = target if role is None else with_role(target, role, "*")
    kinds = checked_kinds(on)
    if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in ("is_enabled", "scale")):
        raise OptionError(f"scaler= takes a torch.amp.GradScaler, got {type_name(scaler)}.")
    layout = _layout_of(stats if stats is None or isinstance(stats, str) else tuple(stats))
    schedule = StepSchedule.of(every) if budget is None else budgeted(unwrap(model), every, budget)
    found = Watch(unwrap(model), layout, schedule, validate_phases(during), scaler)
    declared = None if replicated is sharded is None else DeclaredShards.of(found.model, replicated, sharded)
    found._between_ranks = lambda: RankStats(
        found._engine, found.model, same_on_ranks(target, exclude, kinds, layout, every), declared
    )
    try:
        found._begin(target, exclude, kinds, optimizer, lenient=on is None)
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
        self, model: nn.Module, layout: Layout, schedule: Schedule, during: frozenset[str], scaler: Any
    ) -> None:
        self.model = model
        """The model that is watched, wrapped or not, as it was given."""
        self._layout, self._schedule = layout, schedule
        self.budget = schedule if isinstance(schedule, BudgetedSchedule) else None
        """The decisions about the budget, and what the watch costs; None without ``budget=``."""
        self._scaler = scaler
        self._engine = StatsEngine(layout)
        self._rules = CountingRules(model, During(during, self._forget), ManualSteps(schedule))
        self._sites = WatchSites(model, self._engine, self._rules, scaler, self.name)
        self._ranks: RankStats | None = None
        self._between_ranks: Callable[[], RankStats] = lambda: RankStats(self._engine, model)
        """Makes what reduces statistics over ranks; not before it is needed, since most runs have one rank."""
        self.times_forgotten = 0
        """How often what was counted turned out to be no training, and was dropped."""
        self._removed = self._follows_host = False

    def to_metrics(self, *, reset: bool = False, local: bool = False, per_rank: bool = False) -> dict[str, Any]:
        """Return every statistic since the last reset, by ``"name/kind/statistic"``; one transfer.

        Args:
            reset: Count from zero afterwards.
            local: In a distributed run, return the numbers of this rank alone. Otherwise every rank has to call, and
                receives the numbers of one process that has seen the whole batch; ``nonfinite`` adds up firings of
                ranks.
            per_rank: Return also, for each statistic, ``"…/per_rank"`` (a list by rank), and the ranks of its smallest
                and its largest value: ``"…/min_rank"``, ``"…/max_rank"``. NaN counts as the largest. Every rank has to
                call, so it does not go with ``local``.
        """
        if local and per_rank:
            raise OptionError("to_metrics(per_rank=True) asks every rank, and local=True none; give one of them.")
        snapshot = self._snapshot(reset=reset)
        is_alone = local or not is_distributed()
        metrics = self._engine.to_metrics(snapshot) if is_alone else self._over_ranks().to_metrics(snapshot)
        metrics |= {} if self.budget is None else self.budget.to_metrics()
        if per_rank:
            return self._over_ranks().per_rank(metrics, self._engine.to_metrics(snapshot))
        return metrics

    def _snapshot(self, *, reset: bool = False) -> StatsSnapshot:
        """Return all numbers of this rank as they are now; with `reset`, count from zero afterwards."""
        with self._engine.lock:
            if self._sites.parameters is not None:
                self._sites.parameters.read_values()
            snapshot = self._engine.snapshot()
            if reset:
                self.reset()
        self._sites.look_closer(snapshot.rows)
        return snapshot

    def _over_ranks(self) -> RankStats:
        self._ranks = self._ranks or self._between_ranks()
        return self._ranks

    def reset(self) -> None:
        """Forget what was counted so far, and go on."""
        self._engine.reset()

    def update(self, name: str, tensor: Tensor) -> None:
        """Count a tensor of your own under a name: ``watch.update("loss", loss)``."""
        if not isinstance(tensor, Tensor):
            raise OptionError(f"update({name!r}, ...) takes a tensor, got {type(tensor).__name__}.")
        if self._rules.counts_now():
            place = self._engine.place(name, "")
            self._engine.take(place, tensor)
            self._engine.units.take(place, tensor)

    @property
    def steps(self) -> int:
        """The number of steps that are over."""
        return self._rules.steps.count

    @property
    def steps_since_look(self) -> int | None:
        """How many steps are over since the last one that it looked at; None before the first."""
        look = self._rules.steps.last_look
        return None if look is None else self.steps - 1 - look

    @property
    def step_is(self) -> str:
        """The definition of a step, in words."""
        return self._rules.steps.what

    def report(self) -> dict[str, Any]:
        """Return how often each place was looked at, what a step is, what was left out, and why a place is silent.

        In a distributed run these are the counts of this rank; no other is asked.
        """
        read = self._engine.read()
        quiet = {place for place, cells in read.items() if not (cells["fires"] or place.kind == "param")}
        silent = {place.label: self._rules.why_silent(place) for place in read if place.silent or place in quiet}
        return {
            "step": self.step_is,
            "steps": self.steps,
            "left_out": self._rules.during.left_out,
            "fired": {place.label: int(cells["fires"]) for place, cells in read.items()},
            "silent": silent | (self._ranks.left_out if self._ranks is not None else {}),
        }

    def table(self, *, sort: str | None = None, top: int | None = None) -> Table:
        """Return what ``print(watch)`` shows; with ``sort="norm", top=10`` the ten places with the largest norm."""
        return watch_table(self._engine.to_metrics(self._snapshot()), self._engine, self._rules, sort, top)

    def _table(self) -> Table:
        return self.table()

    def _state(self) -> str:
        return OFF if self._removed else ON

    # -- going on and coming off -------------------------------------------------------------------------

    def step(self) -> None:
        """End a step; call it after the backward pass, before gradients are set to zero."""
        steps = self._rules.steps
        if isinstance(steps, OptimizerSteps):
            raise OptionError("The optimizer makes the steps of this watch; call step(), or give optimizer=, not both.")
        if isinstance(steps, ForwardSteps):
            self._count_by_hand()
        self._rules.during.note_step()
        if self._sites.parameters is not None and self._rules.counts_now():
            self._sites.parameters.read_gradients(None)
        self._advance()

    def _count_by_hand(self) -> None:
        """Count steps by the user's calls from now on; what was read at the end of backward passes is read anew."""
        if self._scaler is not None and self._sites.parameters is not None and self._sites.parameters.wants_gradients:
            raise OptionError(
                "watch.step() cannot tell whether the scaler has unscaled the gradients of parameters yet; give "
                "optimizer= to watch(), or leave 'param_grad' out of on=."
            )
        self._rules.steps.remove()
        self._rules.steps = ManualSteps(self._schedule)
        if self._sites.parameters is not None:
            self._sites.parameters.forget_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know: all that was counted, and the step it is in."""
        by_hand = isinstance(self._rules.steps, ManualSteps)
        steps, during = self._rules.steps.state_dict(), self._rules.during.state_dict()
        found = {"counted": saved_rows(self._engine), "by_hand": by_hand, "steps": steps, "during": during}
        return found if self.budget is None else {**found, "budget": self.budget.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        if state["by_hand"] and isinstance(self._rules.steps, ForwardSteps):
            self._count_by_hand()  # or the first step from now on would begin the count anew
        load_rows(self._engine, state["counted"])
        if self.budget is not None and "budget" in state:
            self.budget.load_state_dict(state["budget"])
        self._rules.steps.load_state_dict(state["steps"])
        if "during" in state:
            self._rules.during.load_state_dict(state["during"])
        self._sites.switch(self._rules.needs_hooks())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing for as long as the block lasts: ``with watch.paused(): evaluate()``."""
        self._rules.paused += 1
        try:
            yield
        finally:
            self._rules.paused -= 1

    def remove(self, *, quiet: bool = False) -> None:
        """Take all hooks off; what was counted stays. Warns, unless ``quiet``, if the model ran unseen."""
        if self._removed:
            return
        self._removed = True
        self._rules.steps.remove()
        # That one module of many was never called is in the report; that none was is worth a warning.
        excused = self._rules.counts_parts() or not self._rules.steps.is_due
        seen = excused or any(report.fired for report in self._sites.handles.report())
        self._sites.remove(quiet=quiet or seen)
        self._engine.flush()
        if not quiet:
            self._rules.warn_if_nothing_counted()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove(quiet=exc_info[0] is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        # As with handles: a copied or unpickled model carries no hooks, so a watch that it keeps has counted nothing.
        return _nothing_watched, ()

    # -- hooks -------------------------------------------------------------------------------------------

    def _begin(self, target: Target, exclude: Target, kinds: list[str], optimizer: Any, *, lenient: bool) -> None:
        self._sites.choose(target, exclude, kinds, self._end_pass, lenient=lenient)
        rules, passes = self._rules, self._sites.passes
        if optimizer is not None:
            rules.steps = OptimizerSteps(self._schedule, optimizer, self._before_step, self._advance)
        else:
            over, started = self._advance, self._start_steps
            rules.steps = ForwardSteps(self._schedule, self.model, rules.counts_forward, over, started)
            if passes is not None and not self._sites.hooks:
                passes.hook_parameters()  # nothing else would show that the model's own forward is not called
        self._sites.switch(rules.needs_hooks())

    def count_steps_of(self, optimizer: Any) -> None:
        """Count the steps of the host's ``optimizer``, as if given here; leave it where the user said what a step is.

        Runs of other trainers call it: where gradients are accumulated, or ranks reduce them with the last batch of a
        step alone, those at the end of a backward pass are not final.
        """
        steps = self._rules.steps
        if self._removed or not (self._follows_host or isinstance(steps, ForwardSteps)):
            return
        self._follows_host = True
        steps.remove()
        if self._sites.passes is not None:
            self._sites.passes.unhook_parameters()
        self._sites.switch(False)  # what notices the ends of backward passes is not put on again
        self._rules.steps = OptimizerSteps(self._schedule, optimizer, self._before_step, self._advance)
        self._rules.steps.load_state_dict({"count": steps.count})
        self._sites.switch(self._rules.needs_hooks())

    def _end_pass(self) -> None:
        """Read the gradients of parameters: at the end of a pass they are as final as they get without an optimizer."""
        steps = self._rules.steps
        if self._sites.parameters is None or self._removed or not isinstance(steps, ForwardSteps):
            return
        if self._rules.counts_backward():
            self._sites.parameters.read_gradients(self._sites.scale())
        if not self._sites.hooks and not steps.has_begun:  # the model itself is not called, and no module is hooked
            steps.what = "one backward pass, since the model's own forward is not called"
            self._advance()

    def _start_steps(self) -> None:
        """Begin the first step; it is known by now which module's forwards are the steps."""
        passes = self._sites.passes
        if passes is not None and self._rules.counter.stand_in is None:
            passes.unhook_parameters()
        elif passes is not None:
            passes.hook_parameters()
        self._sites.switch(self._rules.needs_hooks())

    def _advance(self) -> None:
        """End a step; the hooks are on for the next one if it is due."""
        self._engine.flush()
        self._rules.steps.advance()
        if not self._removed:
            self._sites.switch(self._rules.needs_hooks())

    def _before_step(self, optimizer: Optimizer) -> None:
        self._rules.during.note_step()
        if self._sites.parameters is not None and self._rules.counts_now():
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales by itself, later
            self._sites.parameters.read_gradients(scale, of=optimizer)

    def _forget(self) -> None:
        """Drop what was counted: training begins, and it was something else."""
        self.times_forgotten += 1
        self._engine.flush()
        for place in list(self._engine.places.values()):
            if place.kind not in ("", "param"):
                place.empty()
        self._rules.steps.restart()


def _nothing_watched() -> Watch:
    return Watch(nn.Identity(), Layout.of(None), StepSchedule(), frozenset({"train"}), None)
