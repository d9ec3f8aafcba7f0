"""Print the plan of a run, without training or writing anything: ``--dry-run``.

`run_command` calls `dry_run` with what it has prepared: which hook is due when, on which sites, at what cost in memory,
and which files there would be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookline.cli.main import DONE
from hookline.cli.prepared_experiment import PreparedExperiment
from hookline.cli.run_folder import LOG, newest_run, next_folder
from hookline.cli.run_session import Prepared, Session
from hookline.cli.run_sinks import sink_files
from hookline.cli.screen import print_table, size, tell

__all__ = ["dry_run", "memory_rows"]


def dry_run(prepared: Prepared) -> int:
    """Print the plan."""
    request = prepared.request
    strategies = request.found.chosen(request.options.training.strategy)
    made = Session(prepared, strategies[0], may_be_new=True).make()
    _print_run(prepared, made, strategies)
    manager = _manager(prepared, made)
    if manager is None:
        tell("No hooks.")
    else:
        _print_plan(manager)
        _print_sites(prepared, manager, made)
        print_table("Memory", ("what", "for", "bytes"), memory_rows(manager, made.experiment))
    _print_files(prepared, strategies, has_hooks=manager is not None)
    return DONE


def _print_run(prepared: Prepared, made: PreparedExperiment, strategies: list[str]) -> None:
    model = made.experiment.model
    parameters = sum(one.numel() for one in model.parameters())
    tell(f"{prepared.request.found.name}: {made.length} {made.unit}, strategies: {', '.join(strategies)}")
    tell(f"{type(model).__name__}, {parameters:,} parameters, {made.dtype} on {made.device}")
    config = prepared.request.config
    if config is not None:
        tell(", ".join(f"{name}={value!r}" for name, value in vars(config).items()))


def _manager(prepared: Prepared, made: PreparedExperiment) -> Any:
    objects = prepared.hook_objects
    if not objects.names and not made.hooks:
        return None
    from hookline.training.manager import HookManager

    hooks = [*objects.make(), *made.hooks]
    return HookManager(hooks=hooks, hook_config=objects.reference, loop_type=made.loop)


def _print_plan(manager: Any) -> None:
    rows = [(row.point, str(row.order), row.hook, row.does, row.when, row.needs) for row in manager.plan().rows]
    print_table("Hooks", ("point", "", "hook", "does", "when", "needs"), rows)
    for name, why in manager.plan().left_out.items():
        tell(f"left out: {name} ({why})")


def _print_sites(prepared: Prepared, manager: Any, made: PreparedExperiment) -> None:
    """Print what hooks attach to the model: start each, look, and finish it again."""
    from hookline.sites.find import attached

    model = made.experiment.model
    rows = []
    for name, hook in manager.hooks.items():
        before = len(attached(model))
        hook.start(model)
        try:
            handles = attached(model)[before:]
            rows += [(name, *_site(handle)) for handle in handles]
        finally:
            hook.finish()
    if prepared.specs:
        with made.hooks_on_modules(prepared.specs):
            rows += [(f"{handle.name} (spec)", *_site(handle)) for handle in attached(model)]
    if rows:
        print_table("On the model", ("hook", "kind", "sites"), rows)


def _site(handle: Any) -> tuple[str, str]:
    names = list(dict.fromkeys(name or "(the model)" for name in handle.names))
    shown = ", ".join(names[:6]) + (f", … {len(names)} in all" if len(names) > 6 else "")
    return str(handle.report().kind), shown


def memory_rows(manager: Any, experiment: Any) -> list[tuple[str, str, str]]:
    """Return the rows about memory that hooks need beside the run's own tensors, at most."""
    weights = _bytes(experiment.model.parameters())
    trained = _bytes(one for one in experiment.model.parameters() if one.requires_grad)
    buffers = _bytes(experiment.model.buffers())
    optimizer = _optimizer_bytes(getattr(experiment, "optimizer", None), trained)
    rows = []
    for need, what, nbytes in (
        ("needs_grads", "mean gradients of the epoch", trained),
        ("needs_prev_step_grads", "gradients of the step before", trained),
        ("needs_pre_epoch_state", "state before the epoch, on the CPU", weights + buffers + optimizer),
    ):
        users = [name for name, hook in manager.hooks.items() if getattr(hook, need)]
        if users:
            rows.append((what, ", ".join(users), size(nbytes)))
    scopes = {getattr(entry.hook, "scope", "trains") for entry in _entries(manager) if entry.intervenes}
    users = sorted({entry.name for entry in _entries(manager) if entry.intervenes})
    if scopes:
        whole = weights + buffers + optimizer + trained
        guard = whole if "trains" in scopes else buffers
        rows.append((f"copies of the guard ({', '.join(sorted(scopes))})", ", ".join(users), size(guard)))
    return rows or [("nothing", "", size(0))]


def _entries(manager: Any) -> list[Any]:
    return [entry for slot in manager.plan().points.values() for entry in slot.hooks]


def _bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def _optimizer_bytes(optimizer: Any, trained: int) -> int:
    """Return how much an optimizer will hold once it has made a step; by its kind, as it holds nothing yet."""
    import torch

    from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer

    optimizer = unwrap_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.Adamax | torch.optim.NAdam):
        return 2 * trained + (trained if optimizer.defaults.get("amsgrad") else 0)
    if isinstance(optimizer, torch.optim.SGD):
        return trained if optimizer.defaults.get("momentum") else 0
    return 0 if optimizer is None else trained


def _print_files(prepared: Prepared, strategies: list[str], *, has_hooks: bool) -> None:
    options = prepared.request.options
    rows = []
    for strategy in strategies:
        folder = _folder(prepared, strategy)
        names = ["run.json", "checkpoints/"]
        if has_hooks:
            names += [LOG, *sink_files(options.sink, strategy).values()]
            names += [] if options.output.no_report else ["report.html"]
        rows.append((strategy, str(folder), ", ".join(names)))
    print_table("Files", ("strategy", "folder", "files"), rows)


def _folder(prepared: Prepared, strategy: str) -> Path:
    options = prepared.request.options
    output_dir, name = Path(options.output.output_dir), prepared.request.found.name
    if options.checkpoint.resume:
        found = newest_run(output_dir, name, strategy)
        if found is not None:
            return found
    return next_folder(output_dir, name, strategy)
