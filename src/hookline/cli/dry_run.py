"""Print the plan of a run, without training or writing anything: ``--dry-run``.

``hookline run`` calls `dry_run`. `_plan` collects which hook is due when, on which sites, at what cost in memory, and
which files there would be; it is printed as tables or as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookline.cli.main import DONE
from hookline.cli.screen import print_table, size, tell, tell_json
from hookline.plain import to_plain
from hookline.runs.build import Built, build
from hookline.runs.find import RunExperiment, make_experiment
from hookline.runs.folder import LOG, newest_run, next_folder
from hookline.runs.read import Asked

__all__ = ["dry_run"]

Row = dict[str, Any]


def dry_run(asked: Asked) -> int:
    """Print the plan."""
    plan = _plan(asked)
    if asked.how.json:
        tell_json("dry-run", plan)
    else:
        _print(plan)
    return DONE


def _plan(asked: Asked) -> Row:
    run, found = asked.run, asked.found
    assert found is not None
    strategies = found.chosen(run.strategy)
    made = make_experiment(run, found, strategies[0])
    model = made.experiment.model
    built = build(run, found, model=model)
    hooks = [*built.hooks, *made.hooks]
    manager = built.make_manager(hooks, loop_type=made.loop) if hooks else None
    planned = None if manager is None else manager.plan()
    return {
        "experiment": found.name,
        "length": made.length,
        "unit": made.unit,
        "strategies": strategies,
        "model": {
            "type": type(model).__name__,
            "parameters": sum(one.numel() for one in model.parameters()),
            "dtype": str(made.dtype),
            "device": str(made.device),
        },
        "config": {} if made.config is None else to_plain(vars(made.config)),
        "hooks": [] if planned is None else [row._asdict() for row in planned.rows],
        "left_out": [] if planned is None else [{"hook": name, "why": why} for name, why in planned.left_out.items()],
        "sites": [] if manager is None else _sites(manager, made, built),
        "memory": [] if manager is None else _memory(manager, made.experiment),
        "files": [_files(asked, strategy, has_hooks=manager is not None) for strategy in strategies],
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


def _sites(manager: Any, made: RunExperiment, built: Built) -> list[Row]:
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
    if built.specs:
        with built.attached(made):
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
    scopes = {getattr(entry.hook, "scope", "trains") for entry in _planned(manager) if entry.intervenes}
    users = sorted({entry.name for entry in _planned(manager) if entry.intervenes})
    if scopes:
        guard = weights + buffers + optimizer + trained if "trains" in scopes else buffers
        rows.append({"what": f"copies of the guard ({', '.join(sorted(scopes))})", "hooks": users, "bytes": guard})
    return rows


def _planned(manager: Any) -> list[Any]:
    return [hook for point in manager.plan().points.values() for hook in point.hooks]


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


def _files(asked: Asked, strategy: str, *, has_hooks: bool) -> Row:
    run = asked.run
    names = ["run.json", "checkpoints/"]
    if has_hooks:
        names += [LOG, *run.sinks.files(strategy).values()]
        names += ["report.html"] if run.report else []
    return {"strategy": strategy, "folder": str(_folder(asked, strategy)), "files": names}


def _folder(asked: Asked, strategy: str) -> Path:
    output_dir, name = Path(asked.run.output_dir), asked.found.name if asked.found is not None else ""
    resumed = newest_run(output_dir, name, strategy) if asked.how.resume else None
    return resumed or next_folder(output_dir, name, strategy)
