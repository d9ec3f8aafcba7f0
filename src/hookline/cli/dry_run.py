"""Print the plan of a run, without training or writing anything: ``--dry-run``.

``hookline run`` calls `dry_run`. `_plan` collects which hook is due when, on which sites, at what cost in memory, and
which files there would be; it is printed as tables or as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookline.cli.main import DONE
from hookline.cli.screen import print_table, tell, tell_json
from hookline.observe.capture.stored_value import size_text
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
    manager = built.make_manager([*built.hooks, *made.hooks], loop_type=made.loop)
    planned = manager.plan()
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
        "hooks": [row._asdict() for row in planned.rows],
        "left_out": [{"hook": name, "why": why} for name, why in planned.left_out.items()],
        "sites": _sites(manager, made, built),
        "memory": _memory(manager, made.experiment),
        "files": [_files(asked, found.name, strategy, has_hooks=bool(manager.hooks)) for strategy in strategies],
    }


def _print(plan: Row) -> None:
    model = plan["model"]
    tell(f"{plan['experiment']}: {plan['length']} {plan['unit']}, strategies: {', '.join(plan['strategies'])}")
    tell(f"{model['type']}, {model['parameters']:,} parameters, {model['dtype']} on {model['device']}")
    if plan["config"]:
        tell(", ".join(f"{name}={value!r}" for name, value in plan["config"].items()))
    if plan["hooks"]:
        columns = ("point", "order", "hook", "does", "when", "needs")
        rows = [[str(row[column]) for column in columns] for row in plan["hooks"]]
        print_table("Hooks", ("point", "", *columns[2:]), rows)
    for row in plan["left_out"]:
        tell(f"left out: {row['hook']} ({row['why']})")
    if plan["sites"]:
        rows = [[row["hook"], row["kind"], _few(row["sites"])] for row in plan["sites"]]
        print_table("On the model", ("hook", "kind", "sites"), rows)
    if plan["hooks"] or plan["left_out"] or plan["sites"]:
        rows = [[row["what"], ", ".join(row["hooks"]), size_text(row["bytes"])] for row in plan["memory"]]
        print_table("Memory", ("what", "for", "bytes"), rows or [["nothing", "", size_text(0)]])
    else:
        tell("No hooks.")
    rows = [[row["strategy"], row["folder"], ", ".join(row["files"])] for row in plan["files"]]
    print_table("Files", ("strategy", "folder", "files"), rows)


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
    model = experiment.model
    buffers, trained = _bytes(model.buffers()), _bytes(one for one in model.parameters() if one.requires_grad)
    optimizer = _optimizer_bytes(getattr(experiment, "optimizer", None), trained)
    state = _bytes(model.parameters()) + buffers + optimizer
    planned = [hook for point in manager.plan().points.values() for hook in point.hooks]
    guarded = {one.name: getattr(one.hook, "scope", "trains") for one in planned if one.intervenes}
    scopes = sorted(set(guarded.values()))
    copied = state + trained if "trains" in scopes else buffers

    def users(need: str) -> list[str]:
        return [name for name, hook in manager.hooks.items() if getattr(hook, need)]

    rows = [
        ("mean gradients of the epoch", users("needs_grads"), trained),
        ("gradients of the step before", users("needs_prev_step_grads"), trained),
        ("state before the epoch, on the CPU", users("needs_pre_epoch_state"), state),
        (f"copies of the guard ({', '.join(scopes)})", sorted(guarded), copied),
    ]
    return [{"what": what, "hooks": hooks, "bytes": nbytes} for what, hooks, nbytes in rows if hooks]


def _bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def _optimizer_bytes(optimizer: Any, trained: int) -> int:
    """Return how much an optimizer will hold once it has made a step; by its kind, as it holds nothing yet."""
    import torch

    from hookline.sites.optimizers import unwrap_optimizer

    optimizer = unwrap_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.Adamax | torch.optim.NAdam):
        return 2 * trained + (trained if optimizer.defaults.get("amsgrad") else 0)
    if isinstance(optimizer, torch.optim.SGD):
        return trained if optimizer.defaults.get("momentum") else 0
    return 0 if optimizer is None else trained


def _files(asked: Asked, name: str, strategy: str, *, has_hooks: bool) -> Row:
    run, output_dir = asked.run, Path(asked.run.output_dir)
    resumed = newest_run(output_dir, name, strategy) if asked.how.resume else None
    files = ["run.json", "checkpoints/"]
    if has_hooks:
        files += [LOG, *run.sinks.files(strategy).values()]
        files += ["report.html"] if run.report else []
    return {"strategy": strategy, "folder": str(resumed or next_folder(output_dir, name, strategy)), "files": files}
