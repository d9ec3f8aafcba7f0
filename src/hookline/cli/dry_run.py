"""Print the plan of a run, without training or writing anything: ``--dry-run``.

`run_command` calls `dry_run` with what it has prepared. `_plan` collects which hook is due when, on which sites, at
what cost in memory, and which files there would be; it is printed as tables or as JSON.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hookline.cli.json_output import tell_json
from hookline.cli.main import DONE
from hookline.cli.prepared_experiment import PreparedExperiment
from hookline.cli.run_session import Prepared, Session
from hookline.cli.screen import print_table, size, tell
from hookline.runs.folder import LOG, newest_run, next_folder, to_plain
from hookline.runs.named_sinks import sink_files

__all__ = ["dry_run"]

Row = dict[str, Any]


def dry_run(prepared: Prepared) -> int:
    """Print the plan."""
    plan = _plan(prepared)
    if prepared.request.options.output.json:
        tell_json("dry-run", plan)
    else:
        _print(plan)
    return DONE


def _plan(prepared: Prepared) -> Row:
    request = prepared.request
    strategies = request.found.chosen(request.options.training.strategy)
    made = Session(prepared, strategies[0], may_be_new=True).make()
    model = made.experiment.model
    manager = _manager(prepared, made)
    planned = None if manager is None else manager.plan()
    return {
        "experiment": request.found.name,
        "length": made.length,
        "unit": made.unit,
        "strategies": strategies,
        "model": {
            "type": type(model).__name__,
            "parameters": sum(one.numel() for one in model.parameters()),
            "dtype": str(made.dtype),
            "device": str(made.device),
        },
        "config": {} if request.config is None else to_plain(vars(request.config)),
        "hooks": [] if planned is None else [asdict(row) for row in planned.rows],
        "left_out": [] if planned is None else [{"hook": name, "why": why} for name, why in planned.left_out.items()],
        "sites": [] if manager is None else _sites(prepared, manager, made),
        "memory": [] if manager is None else _memory(manager, made.experiment),
        "files": [_files(prepared, strategy, has_hooks=manager is not None) for strategy in strategies],
    }


def _print(plan: Row) -> None:
    model = plan["model"]
    tell(f"{plan['experiment']}: {plan['length']} {plan['unit']}, strategies: {', '.join(plan['strategies'])}")
    tell(f"{model['type']}, {model['parameters']:,} parameters, {model['dtype']} on {model['device']}")
    if plan["config"]:
        tell(", ".join(f"{name}={value!r}" for name, value in plan["config"].items()))
    if plan["hooks"] or plan["left_out"] or plan["sites"]:
        _print_hooks(plan)
    else:
        tell("No hooks.")
    rows = [(row["strategy"], row["folder"], ", ".join(row["files"])) for row in plan["files"]]
    print_table("Files", ("strategy", "folder", "files"), rows)


def _print_hooks(plan: Row) -> None:
    columns = ("point", "order", "hook", "does", "when", "needs")
    rows = [tuple(str(row[column]) for column in columns) for row in plan["hooks"]]
    print_table("Hooks", ("point", "", *columns[2:]), rows)
    for row in plan["left_out"]:
        tell(f"left out: {row['hook']} ({row['why']})")
    if plan["sites"]:
        rows = [(row["hook"], row["kind"], _few(row["sites"])) for row in plan["sites"]]
        print_table("On the model", ("hook", "kind", "sites"), rows)
    rows = [(row["what"], ", ".join(row["hooks"]), size(row["bytes"])) for row in plan["memory"]]
    print_table("Memory", ("what", "for", "bytes"), rows or [("nothing", "", size(0))])


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", … {len(names)} in all" if len(names) > 6 else "")


def _manager(prepared: Prepared, made: PreparedExperiment) -> Any:
    objects = prepared.hook_objects
    if not objects.names and not made.hooks:
        return None
    return prepared.make_manager([*objects.make(), *made.hooks], made.loop)


def _sites(prepared: Prepared, manager: Any, made: PreparedExperiment) -> list[Row]:
    """Return what hooks attach to the model: start each, look, and finish it again."""
    from hookline.sites.find import attached

    model = made.experiment.model
    rows = []
    for name, hook in manager.hooks.items():
        before = len(attached(model))
        hook.start(model)
        try:
            rows += [_site(name, handle) for handle in attached(model)[before:]]
        finally:
            hook.finish()
    if prepared.specs:
        with made.hooks_on_modules(prepared.specs):
            rows += [_site(f"{handle.name} (spec)", handle) for handle in attached(model)]
    return rows


def _site(hook: str, handle: Any) -> Row:
    names = list(dict.fromkeys(name or "(the model)" for name in handle.names))
    return {"hook": hook, "kind": str(handle.report().kind), "sites": names}


def _memory(manager: Any, experiment: Any) -> list[Row]:
    """Return the memory that hooks need beside the run's own tensors, at most."""
    weights = _bytes(experiment.model.parameters())
    trained = _bytes(one for one in experiment.model.parameters() if one.requires_grad)
    buffers = _bytes(experiment.model.buffers())
    optimizer = _optimizer_bytes(getattr(experiment, "optimizer", None), trained)
    rows: list[Row] = []
    for need, what, nbytes in (
        ("needs_grads", "mean gradients of the epoch", trained),
        ("needs_prev_step_grads", "gradients of the step before", trained),
        ("needs_pre_epoch_state", "state before the epoch, on the CPU", weights + buffers + optimizer),
    ):
        users = [name for name, hook in manager.hooks.items() if getattr(hook, need)]
        if users:
            rows.append({"what": what, "hooks": users, "bytes": nbytes})
    scopes = {getattr(entry.hook, "scope", "trains") for entry in _entries(manager) if entry.intervenes}
    users = sorted({entry.name for entry in _entries(manager) if entry.intervenes})
    if scopes:
        guard = weights + buffers + optimizer + trained if "trains" in scopes else buffers
        rows.append({"what": f"copies of the guard ({', '.join(sorted(scopes))})", "hooks": users, "bytes": guard})
    return rows


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


def _files(prepared: Prepared, strategy: str, *, has_hooks: bool) -> Row:
    options = prepared.request.options
    names = ["run.json", "checkpoints/"]
    if has_hooks:
        names += [LOG, *sink_files(options.sink, strategy).values()]
        names += [] if options.output.no_report else ["report.html"]
    return {"strategy": strategy, "folder": str(_folder(prepared, strategy)), "files": names}


def _folder(prepared: Prepared, strategy: str) -> Path:
    options = prepared.request.options
    output_dir, name = Path(options.output.output_dir), prepared.request.found.name
    if options.checkpoint.resume:
        found = newest_run(output_dir, name, strategy)
        if found is not None:
            return found
    return next_folder(output_dir, name, strategy)
