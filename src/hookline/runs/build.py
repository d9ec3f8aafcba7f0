"""Make hooks, specs, sinks and the manager of a `Run`: the only place that does.

``hookline run``, ``--dry-run``, ``audit``, ``check``, followed scripts and the adapters of trainers call `build`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hookline.guard.rng import kept_rng
from hookline.lifecycle.manager import HookManager
from hookline.lifecycle.registry import HookRegistry
from hookline.runs.look_up import REFERENCE, chosen_hooks, make_sink
from hookline.runs.spec_files import specs_for_run

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook
    from hookline.runs.find import FoundExperiment, RunExperiment
    from hookline.runs.run import Run
    from hookline.specs.hook_spec import HookSpec


_ARGUMENTS: Final = {"prometheus": "port", "wandb": "project"}
"""The argument that a sink gets the value of its flag by."""


@dataclass(frozen=True)
class Built:
    """What a run is made of."""

    run: Run
    hooks: list[TrainingHook]
    specs: list[HookSpec]
    """Hooks on modules, as data."""
    options: dict[str, Any]
    """What the run says to its `HookManager`."""

    def make_sinks(self) -> list[Any]:
        """Make the sinks, new ones at each call: some begin a run somewhere when they are made."""
        chosen, others = self.run.sinks.chosen(), self.run.sinks.others
        by_flag = {name: {_ARGUMENTS[name]: value} if name in _ARGUMENTS else {} for name, value in chosen.items()}
        return [make_sink(*one) for one in [*by_flag.items(), *((other.sink, other.options) for other in others)]]

    def make_manager(self, hooks: Sequence[Any] | None = None, **others: Any) -> HookManager:
        """Return a manager of the hooks, or of `hooks`; `others` are options of it, and win."""
        return HookManager(hooks=self.hooks if hooks is None else hooks, **(self.options | others))

    @contextmanager
    def attached(self, made: RunExperiment) -> Iterator[None]:
        """Attach the hooks on modules to an experiment, and those that it brings, while the block lasts."""
        with made.attach_own():
            if not self.specs:
                yield
                return
            from hookline.specs.apply_specs import close_hooks, hooks_of, register_hooks

            handles = register_hooks(made.experiment.model, self.specs)
            try:
                yield
            finally:
                handles.remove()
                close_hooks(hooks_of(handles))


def build(run: Run, found: FoundExperiment | None = None, *, only: Collection[str] | None = None) -> Built:
    """Make everything that a run names.

    Recipe::

        built = build(read_file("run.yaml"))
        manager = built.make_manager(sinks=built.make_sinks())

    The random streams of the run stay where they are.

    Args:
        run: The run.
        found: Its experiment, which has groups of hooks, and arguments that fit it.
        only: The hooks and specs to make, by name; None for all.
    """
    specs = _specs(run)
    chosen = [name for name in hook_names(run, found) if only is None or name in only]
    config = _arguments(run, found, chosen)
    with kept_rng():
        hooks = HookRegistry.create(chosen, config)
        for hook in hooks:
            if hook.name in run.hooks.schedules:
                hook.step_schedule = run.hooks.schedules[hook.name].make()
    kept = [spec for place, spec in enumerate(specs) if only is None or spec_name(spec, place) in only]
    options = {
        "offload_state": run.hooks.offload_state,
        "profile_hooks": run.hooks.profile,
        "on_error": run.hooks.on_error,
        "reference_weights": run.hooks.config.get(REFERENCE, {}).get("path"),
    }
    return Built(run, hooks, kept, options)


def hook_names(run: Run, found: FoundExperiment | None = None) -> list[str]:
    """Return the names of the lifecycle hooks of a run, without making them."""
    groups = {} if found is None else found.hook_sets
    return chosen_hooks(run.hooks.with_hooks, run.hooks.names, groups)


def spec_name(spec: HookSpec, place: int) -> str:
    """Return what a hook on modules is called."""
    return spec.name or f"specs[{place}]"


def _arguments(run: Run, found: FoundExperiment | None, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the arguments of hooks by name; those that an experiment has for them, under what the run says."""
    own = {} if found is None else found.hook_config
    given = {name: {**own.get(name, {}), **run.hooks.config.get(name, {})} for name in names}
    return {name: arguments for name, arguments in given.items() if arguments}


def _specs(run: Run) -> list[HookSpec]:
    listed = list(run.specs) if run.enable_hooks else []
    return listed if run.hook_specs is None else [*listed, *specs_for_run(run.hook_specs)]
