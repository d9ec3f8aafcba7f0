"""Define what a hook over time is: it declares when it is due and what it needs, and is called at those points.

Users and ``analyses`` derive from these classes, `HookManager` calls them. An observer has ``compute(ctx)``; an
intervention has ``intervene(run_ctx, model_ctx)`` as well, and may change model and optimizer: everything is put back.
A `TrackerHook` makes a hook of a tracker or watch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hookline.when import HookPoint

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookline.lifecycle.context import RunDataContext
    from hookline.when import StepSchedule

Window = tuple[int | None, int | None]
"""First and last epoch (in the step loop: step) at which a hook fires, both included; None is open."""
LoopPoints = Mapping[str, Iterable[HookPoint] | Mapping[HookPoint, Window]]
"""For each type of loop (``"epoch"``, ``"step"``) the points of a hook, with windows if it is a mapping."""
Scope = Literal["reads", "grads", "trains"]
"""What an intervention may change, see `hookline.guard`."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric of a hook, in words, for lists and pages.

    Recipe: ``MetricInfo("total_norm", "length of the whole gradient", formula="‖g‖")`` in ``describe_metrics``.
    """

    name: str
    """As the hook returns it, without the hook's name."""
    description: str = ""
    """What it measures."""
    formula: str = ""
    """How it is computed."""
    sign_info: str = ""
    """What a high, low or negative value says."""
    label: str = ""
    """What to write beside a curve of it."""
    keys: str = ""
    """What the keys stand for, if the metric is a dictionary with numbers for keys: ``frequency``, ``class``."""


class TrainingHook:
    """Observe a run at certain points, and return metrics.

    Recipe::

        class WeightNorm(hookline.TrainingHook):
            hook_points = {hookline.HookPoint.POST_EPOCH}

            def compute(self, ctx):
                return {"norm": sum(p.detach().norm() for p in ctx.model.parameters())}


        manager = hookline.HookManager(hooks=[WeightNorm()], sinks=[...])

    ``compute`` returns numbers, tensors, lists or dictionaries by name, or None; they are reported as
    ``"hook/metric"``. Tensors stay on the device until they are flushed. An observer changes nothing: random numbers
    it draws do not count, all else is its duty, which `hookline.audit` checks.
    """

    name: str = ""
    """What it is selected and reported by; the name of the class unless given."""
    description: str = ""
    """One line for lists of hooks."""
    hook_points: Iterable[HookPoint] = frozenset()
    """When it is due."""
    loop_points: LoopPoints | None = None
    """When it is due, by type of loop; it does not take part in a loop that has no entry here."""
    step_schedule: StepSchedule | None = None
    """At which steps it is due, for points that come with every step; None is all of them."""
    needs_grads: bool = False
    """Have the loop average the gradients of the epoch: ``ctx.accumulated_grads``."""
    needs_prev_step_grads: bool = False
    """Have the loop keep the gradients of the step before: ``ctx.prev_step_grads``."""
    needs_pre_epoch_state: bool = False
    """Have the loop keep the state before the epoch: ``model_ctx.restore_pre_epoch()``."""
    needs_reference_weights: bool = False
    """Have ``set_reference_weights`` called before it first fires."""
    requires: Iterable[str] = frozenset()
    """Capabilities of the run without which it cannot work; it is left out of a run that has declared others."""
    pure: bool = False
    """Promises that it draws no random number, so that firing it need not put random streams back."""
    reduce: str | Mapping[str, str] = "mean"
    """How its metrics of several ranks become one: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"l2"`` (root of the
    sum of squares), ``"concat"`` (a list) or ``"none"`` (that of rank 0); or rules by pattern of metrics, the first
    that matches: ``{"count": "sum", "*/max": "max"}``, and ``"mean"`` for the rest."""
    debug: bool = False
    """Left out of ``"all"`` and ``"observers"``; selected by its name, or by ``"with_debug"``."""
    wraps_steps: bool = False
    """Have the loop make each step through ``around_step``."""
    may_work_inside_steps: bool = False
    """Whether it may put hooks into the model when it starts, as those with a ``start`` do: what these take is in no
    firing."""
    manager: Any = None
    """The manager that it belongs to, once it does."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not vars(cls).get("name"):
            cls.name = cls.__name__
        if "start" in vars(cls):
            cls.may_work_inside_steps = True

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Observe, and return metrics by name."""
        raise NotImplementedError(f"{type(self).__name__} has to say what it observes: define compute(self, ctx).")

    def around_step(self, step: Any, batch: Any) -> Any:
        """Make a step of the run, ``step(batch)``, and return its result; only with ``wraps_steps``.

        For hooks that look at a step from its beginning to its end, and may run it again. A loop that hookline does
        not own makes its steps by itself: there it is never called. ``step`` is a `hookline.training.run.RunStep`.
        """
        return step(batch)

    def start(self, model: nn.Module) -> None:
        """Attach hooks to the model, say: training begins, or goes on from a checkpoint."""

    def finish(self) -> None:
        """Take off what ``start`` attached: training is over, however it ended."""

    def reset(self) -> None:
        """Forget the last run: another begins."""

    def set_run_context(self, **context: Any) -> None:
        """Learn which run follows (``strategy=``, ``output_dir=``, …)."""

    def take_scaler(self, scaler: Any) -> None:
        """Learn what scales the losses of the run, and so its gradients; None if nothing does."""

    def look_at_reports(self, reports: Any) -> None:
        """Learn which steps are reported: those for which ``reports.is_due(step)``."""

    def set_reference_weights(self, reference: Mapping[str, Tensor]) -> None:
        """Take weights to compare with, by parameter; kept as ``self.reference_weights`` unless defined otherwise."""
        self.reference_weights = reference

    def get_state_tensors(self) -> dict[str, Any]:
        """Return the tensors that it keeps between firings, by name (in lists and dictionaries, if that suits).

        They wait on the CPU with ``HookManager(offload_state=True)``, and are saved with the run.
        """
        return {}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        """Take back what ``get_state_tensors`` returned, moved to another device."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know: the state tensors, unless defined otherwise."""
        return dict(self.get_state_tensors())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        if state:
            self.set_state_tensors(dict(state))

    def describe_metrics(self) -> list[MetricInfo]:
        """Return what its metrics mean."""
        return []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class InterventionHook(TrainingHook):
    """Do something to the run that is undone afterwards: train on other data, perturb weights, ...

    Recipe::

        class OneStepAhead(hookline.InterventionHook):
            hook_points = {hookline.HookPoint.SNAPSHOT}

            def intervene(self, run_ctx, model_ctx):
                model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
                return {"weight": model_ctx.model.weight.norm()}  # of another epoch; the run knows nothing of it

    Whatever it leaves behind, also by raising, is put back when it is over (see `hookline.guard`).
    """

    intervention_points: Iterable[HookPoint] | None = None
    """Where ``intervene`` is called; at its other points it observes, by ``compute``. None: everywhere."""
    scope: Scope = "trains"
    """What it may change: ``"trains"`` is everything; ``"grads"`` and ``"reads"`` are cheaper, and are checked."""

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Observe, at points that are not among ``intervention_points``."""
        return None

    def intervene(self, run_ctx: RunDataContext, model_ctx: Any) -> Mapping[str, Any] | None:
        """Intervene, and return metrics by name."""
        raise NotImplementedError(
            f"{type(self).__name__} has to say what it does: define intervene(self, run_ctx, model_ctx)."
        )


class DebugInterventionHook(InterventionHook):
    """Check whether other interventions are right; runs only if it is selected.

    Recipe: ``HookManager(["all", "with_debug"])``, or its name.
    """

    debug = True


class TrackerHook(TrainingHook):
    """Report what a tracker has counted, and reset it.

    Recipe: ``HookManager(hooks=[watch])``, or ``TrackerHook(watch, name="encoder")`` if there are several.

    It reports at the end of an epoch; in the step loop, at snapshots.
    """

    description = "reports a tracker or watch, then resets it"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = {"epoch": {HookPoint.POST_EPOCH}, "step": {HookPoint.SNAPSHOT}}  # noqa: RUF012
    pure = True
    may_work_inside_steps = True

    def __init__(self, tracker: Any, *, name: str = "") -> None:
        self.tracker = tracker
        self.name = name or getattr(tracker, "name", "") or type(tracker).__name__

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return what was counted since the last time."""
        metrics: Mapping[str, Any] = self.tracker.to_metrics()
        self.tracker.reset()
        return metrics

    def reset(self) -> None:
        """Forget the last run."""
        self.tracker.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the tracker, if it has one."""
        return dict(self.tracker.state_dict()) if hasattr(self.tracker, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the tracker, if it can."""
        if state and hasattr(self.tracker, "load_state_dict"):
            self.tracker.load_state_dict(state)


def is_tracker(thing: Any) -> bool:
    """Return whether it has ``to_metrics`` and ``reset``."""
    return all(callable(getattr(thing, method, None)) for method in ("to_metrics", "reset"))
