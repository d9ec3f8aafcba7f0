"""`HookManager`: the hooks of a run, fired at its moments, and their metrics on their way to sinks.

Takes hooks by name or as objects, contexts from a loop; hands metrics to sinks. The loops of hookline use it, and so
may any other.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from hookline.errors import HooklineWarning, HookNameError, OptionError
from hookline.guard.rng import kept_rng, restart_hook_stream
from hookline.lifecycle.points import HookPoint
from hookline.messages import caller_stacklevel
from hookline.training import record_api as recording
from hookline.training.checkpoint_profiler import CheckpointProfiler
from hookline.training.choose_hooks import choose_hooks, split_config, without_what_is_missing
from hookline.training.dispatcher import Dispatcher
from hookline.training.firing import ObserverCheck, new_error_policy
from hookline.training.hook_metrics import settled
from hookline.training.hook_state import Offload, Reference, copied
from hookline.training.manager_output import Reporting
from hookline.training.metric_buffer import Records, fan_out_of
from hookline.training.plan import Plan, make_plan
from hookline.training.registry import HookRegistry

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from hookline.sinks.fan_out import FanOut
    from hookline.sinks.record_log import RecordLog
    from hookline.training.training_hook import TrainingHook

__all__ = ["HookManager"]


class HookManager(Dispatcher, Reporting):
    """Runs hooks at the moments of a run, and hands their metrics on.

    Recipe::

        with hookline.HookManager(hooks=[MyHook()], sinks=[hookline.sinks.MemorySink()]) as manager:
            for epoch in range(epochs):
                for batch in loader:
                    manager.advance_step(epoch)
                    train_step(batch)
                    manager.fire(HookPoint.POST_STEP, epoch=epoch, model=model)
                manager.flush_step_metrics(epoch)

    Args:
        hook_names: Hooks by their names in `HookRegistry`; also ``"all"``, ``"observers"``, ``"with_debug"``, groups.
        hooks: Hooks as objects or classes; trackers and watches as well, which report when an epoch ends.
        sinks: Where metrics go; anything with ``emit(metrics, epoch, hook_point)``, or a `FanOut` of such. One that
            raises is warned of once and counted (``sink_errors``); the others get theirs, and the run goes on.
        offload_state: Keep the state tensors of hooks on the CPU while they do not run.
        hook_config: Arguments for making hooks: ``{"hessian": {"epsilon": 1e-3}}``.
        step_metrics_log: A file that gets the metrics of single steps, a line of JSON per flush.
        profile_hooks: Time every hook: ``print(manager.profiler)``.
        loop_type: ``"epoch"`` or ``"step"``: which of the ``loop_points`` hold. None: ``hook_points`` do.
        capabilities: What the run can do; hooks that require something else are left out, with a warning.
        on_error: When a hook raises, and what it did has been undone: ``"raise"``, ``"warn"`` (once; it stays on) or
            ``"disable"`` (logged; it is switched off). Metrics of the others go out in any case.
        strict: Check that observers change nothing.
        reference_weights: For hooks that need them: tensors by parameter, a function that finds them, or a file.
        log: A file that gets every record before the sinks do: the record log, which survives a kill.
        flush_every: How many steps from one flush of the step metrics to the next; None: when the epoch ends, or the
            loop says so. What is not flushed dies with the process, or is in its checkpoint.
    """

    def __init__(
        self,
        hook_names: Iterable[str] | str | None = None,
        hooks: Iterable[Any] | None = None,
        sinks: Iterable[Any] | FanOut | None = None,
        offload_state: bool = False,
        hook_config: Mapping[str, Mapping[str, Any]] | None = None,
        step_metrics_log: str | Path | None = None,
        profile_hooks: bool = False,
        loop_type: str | None = None,
        capabilities: Iterable[str] | None = None,
        *,
        on_error: str = "raise",
        strict: bool = False,
        reference_weights: Any = None,
        log: str | Path | RecordLog | None = None,
        flush_every: int | None = None,
    ) -> None:
        config, reference_path = split_config(hook_config)
        with kept_rng():  # a hook may begin with a random projection; a run without it must not differ
            self.hooks: dict[str, TrainingHook] = choose_hooks(hook_names, hooks, config)
        """All hooks by name, in the order they were given."""
        self.profiler = CheckpointProfiler(profile_hooks)
        """How long each hook takes."""
        self.fired: Counter[str] = Counter()
        """How often each hook was called."""
        self._seconds = defaultdict(float)
        self._flush_every = _checked_interval(flush_every)
        self.loop_type = self._made_for = loop_type
        """Which of the ``loop_points`` of hooks hold."""
        self.strict = strict
        self._records = Records(fan_out_of(sinks, log, step_metrics_log))
        self._errors = new_error_policy(on_error)
        self._reference = Reference(reference_path if reference_weights is None else reference_weights)
        self._offload = Offload() if offload_state else None
        self._check = ObserverCheck() if strict else None
        self._context: dict[str, Any] = {}
        self._global_step = -1
        self._firing = None
        self._done = ()
        self._told: set[str] = set()
        self._referenced: set[str] = set()
        self._self = weakref.ref(self)
        for hook in self.hooks.values():
            hook.manager = self
        self.set_capabilities(capabilities)

    # -- the plan ----------------------------------------------------------------------------------------

    def set_capabilities(self, capabilities: Iterable[str] | None) -> None:
        """What the run can do; None is anything."""
        self._missing = without_what_is_missing(self.hooks, capabilities)
        self._make_plan()

    def _make_plan(self) -> None:
        off = dict.fromkeys(sorted(self._errors.disabled), "switched off, as it raised")
        known = [] if all(not (h.before or h.after) for h in self.hooks.values()) else HookRegistry.known()
        self._plan = make_plan(self.hooks, self.loop_type, {**self._missing, **off}, known)
        # By name as well, so that `fire("POST_EPOCH", ...)` is the same look-up.
        self._slots = {point: self._plan.slots.get(point) for point in HookPoint}
        self._slots |= {point.name: self._plan.slots.get(point) for point in HookPoint}
        if self._plan.undecided:
            self._slots.clear()  # so that `fire` finds nothing there, and says why
        self._at_steps = self._entries_at_steps()

    def plan(self) -> Plan:
        """Which hook runs at which point, in which order, on which steps, and what it needs; prints as a table."""
        return self._plan

    def set_loop_type(self, loop_type: str) -> None:
        """Tell which loop runs, unless that was said when the manager was made; what the loops of hookline do."""
        if self._made_for not in (None, loop_type):
            raise OptionError(
                f"This manager was made for the {self._made_for} loop (loop_type={self._made_for!r}), and the "
                f"{loop_type} loop was to use it; leave loop_type= out, or make another manager."
            )
        if loop_type != self.loop_type:
            self.loop_type = loop_type
            self._make_plan()

    def will_fire(self, points: Iterable[HookPoint]) -> tuple[str, ...]:
        """A sentence for each hook that will never fire if these are all the points there will be."""
        there = [point for point in HookPoint if point in {HookPoint.of(given) for given in points}]
        fires = ", ".join(point.name for point in there) or "nothing"
        return tuple(
            f"Hook {name!r} will not fire: it waits for {', '.join(names)}, and the run fires {fires}."
            for name, names in self._plan.silent_without(there).items()
        )

    # -- steps -------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """The step that the run is in, counted from 0; -1 before the first."""
        return self._global_step

    def advance_step(self, epoch: int | None = None) -> int:
        """A step begins; its number.

        Args:
            epoch: The epoch that it is in, if there is a ``flush_every``: what is flushed now belongs to it. If left
                out, to the epoch of the last firing.
        """
        self._global_step += 1
        if self._flush_every is not None and self._global_step % self._flush_every == 0 and self._records.steps:
            self._flush_before(epoch)
        recording.now(self._self)
        return self._global_step

    def take_record(self, name: str, value: Any) -> None:
        """What ``hookline.record`` calls."""
        if self._firing is None or not self._firing.take_record(name, value):
            self._records.steps.add(
                HookPoint.POST_STEP, max(self._global_step, 0), {name: settled(value, "record()", name)}
            )

    # -- runs --------------------------------------------------------------------------------------------

    def get_hook(self, name: str) -> TrainingHook:
        """A hook by its name."""
        if name not in self.hooks:
            raise HookNameError(f"Unknown hook: {name!r}. Available: {', '.join(self.hooks) or 'none'}.")
        return self.hooks[name]

    def start(self, model: nn.Module) -> None:
        """Tell every hook that training begins, or goes on; what the loops of hookline do."""
        with kept_rng():
            for name, hook in self.hooks.items():
                try:
                    hook.start(model)
                except Exception as error:
                    error.add_note(f"Raised by the hook {name!r} when training began, in start(model).")
                    raise

    def finish(self) -> None:
        """Tell every hook that training is over; what the loops of hookline do, whatever ended it."""
        with kept_rng(), ExitStack() as stack:  # one that raises does not keep the others from being told
            for hook in self.hooks.values():
                stack.callback(hook.finish)

    def reset_all(self) -> None:
        """Another run begins: steps count from 0, buffers are empty, every hook is reset."""
        restart_hook_stream()
        self._step_is(-1)
        self._records.clear()
        self._done = ()
        self._reference.reset()
        self._referenced.clear()
        with self._hooks_at_home():
            for hook in self.hooks.values():
                hook.reset()

    def set_run_context(self, **context: Any) -> None:
        """Tell hooks and sinks which run this is: ``strategy=``, ``output_dir=``, ``experiment_name=``, …"""
        self._context |= context
        with kept_rng():
            for hook in self.hooks.values():
                hook.set_run_context(**context)
        self._records.set_run_context(context)

    def _step_is(self, step: int) -> None:
        self._global_step = step
        for slot in self._plan.slots.values():
            slot.wakes = -2  # what was worked out from a later step does not hold

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know: the step, what is buffered, and the state of every hook."""
        with self._hooks_at_home():  # copies, with tensors where they belong: a resumed run must find them there
            hooks = {name: copied(hook.state_dict()) for name, hook in self.hooks.items()}
        return {
            "global_step": self._global_step,
            "hooks": hooks,
            "step_metrics": self._records.steps.state_dict(),
            "disabled": sorted(self._errors.disabled),
            "sinks": self._records.out.state_dict(),
        }

    @contextmanager
    def _hooks_at_home(self) -> Iterator[None]:
        """For talking to all hooks: their tensors are where they left them, and what they draw does not count."""
        hooks = self.hooks.values()
        with kept_rng():
            if self._offload is not None:
                self._offload.bring(hooks)
            try:
                yield
            finally:
                if self._offload is not None and self._firing is None:  # a hook that runs may ask for the state
                    self._offload.send()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave. Hooks that were not there then begin anew."""
        missing = [key for key in ("global_step", "hooks", "step_metrics") if key not in state]
        if missing:
            raise OptionError(
                f"load_state_dict() takes what state_dict() of a manager gave; this has no {', '.join(missing)}."
            )
        unknown = [name for name in state["hooks"] if name not in self.hooks]
        if unknown:
            _warn(f"The state of hooks that are not here is passed over: {', '.join(map(repr, unknown))}.")
        with self._hooks_at_home():
            for name, hook in self.hooks.items():
                if name in state["hooks"]:
                    hook.load_state_dict(copied(state["hooks"][name]))
        self._records.steps.load_state_dict(state["step_metrics"])
        self._records.out.load_state_dict(state.get("sinks", {}))
        self._records.out.tell()
        self._errors.disabled = set(state.get("disabled", ())) & set(self.hooks)
        self._make_plan()
        self._step_is(state["global_step"])
        if self._global_step >= 0:  # a run that goes on before its next step may evaluate, and record
            recording.now(self._self)

    def __repr__(self) -> str:
        names = ", ".join(self.hooks) or "none"
        return f"<HookManager of {len(self.hooks)} hooks, step {self._global_step}: {names}>"

    def _repr_html_(self) -> str:
        fired = ", ".join(f"{name} {count}" for name, count in self.fired.items()) or "none yet"
        return self._plan._table().with_foot(f"step {self._global_step}; fired: {fired}").html()


def _checked_interval(steps: int | None) -> int | None:
    if steps is None or (isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1):
        return steps
    raise OptionError(f"flush_every= is a number of steps, 1 or more, or None; got {steps!r}.")


def _warn(text: str) -> None:
    warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())
