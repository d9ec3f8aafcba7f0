"""What stands below the flags of ``hookline run``: a run file, or the options of a run that is resumed.

Asked by `request`; hands back `Settings`, over which flags win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hookline.cli.find_experiment import Found
from hookline.cli.folder import newest_run, read_run_file
from hookline.cli.run_options import RunOptions
from hookline.config.mistakes import Mistakes
from hookline.errors import OptionError

__all__ = ["Settings", "settings_of_file", "settings_of_run"]


@dataclass
class Settings:
    """What is said by something else than flags; flags win."""

    flags: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    hook_config: dict[str, dict[str, Any]] = field(default_factory=dict)
    specs: list[dict[str, Any]] = field(default_factory=list)
    sinks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    trackers: list[dict[str, Any]] = field(default_factory=list)
    schedules: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By hook, what a `StepSchedule` is made with."""
    mistakes: Mistakes = field(default_factory=Mistakes)
    """What is wrong with it; of a run file, all of that is told at once."""
    says_experiment: bool = False
    """Whether the experiment is named here, and not by a flag."""


def settings_of_file(options: RunOptions) -> tuple[Settings, str]:
    """The settings of a run file, if there is one, and what the experiment is."""
    from hookline.config.read_settings import ENDINGS, read_document

    path = options.experiment
    file = options.checkpoint.config
    if file is not None and options.checkpoint.resume:
        raise OptionError("--config and --resume do not go together: a run that is resumed has its own options.")
    if file is None and path is not None and Path(path).suffix.lower() in ENDINGS:
        file, path = path, None
    if file is None:
        return Settings(), path or ""
    document = read_document(file)
    settings, experiment = _of_run_file(document)
    settings.says_experiment = path is None
    path = path or experiment
    if path is None and not settings.mistakes.has_any(("experiment",)):
        settings.mistakes.add_text(f"{file} does not say what to run: experiment: NAME, or path/file.py:Class.")
    return settings, _beside(path or "", Path(file))


def _of_run_file(document: Any) -> tuple[Settings, str | None]:
    from hookline.config.run_file import RunFile

    mistakes = Mistakes.of(document)
    run = RunFile.of(document, mistakes)
    settings = Settings(_flags_of(run), dict(run.config), dict(run.hooks.config), mistakes=mistakes)
    settings.specs = run.given_specs()
    settings.trackers = [entry.model_dump() for entry in run.trackers]
    settings.schedules = {name: entry.arguments() for name, entry in run.hooks.schedules.items()}
    for other in run.sinks.others:
        settings.sinks.append((other, {}) if isinstance(other, str) else (other.sink, dict(other.options)))
    return settings, run.experiment


def _flags_of(run: Any) -> dict[str, Any]:
    """What a run file says, by the names of the flags."""
    found = {
        "strategy": run.strategy,
        "seed": run.seed,
        "device": run.device,
        "dtype": run.dtype,
        "with_compile": run.with_compile,
        "no_determinism": not run.determinism,
        "matmul_precision": run.matmul_precision,
        "output_dir": run.output_dir,
        "console": "tables" if run.console == "normal" else run.console,
        "show": tuple(run.show),
        "no_report": not run.report,
        "with_hooks": run.hooks.with_hooks,
        "hooks": None if run.hooks.names is None else tuple(run.hooks.names),
        "hook_offload_state": run.hooks.offload_state,
        "on_hook_error": run.hooks.on_error,
        "profile_hooks": run.hooks.profile,
    }
    found |= {f"hook_{name}": value for name, value in run.sinks if name != "others"}
    if run.save_checkpoints is not False:
        found["save_checkpoints"] = () if run.save_checkpoints is True else (run.save_checkpoints,)
    return found


def _beside(path: str, file: Path) -> str:
    """The experiment's file may stand beside the run file."""
    where, colon, name = path.rpartition(":")
    where = where if colon else path
    if where.endswith(".py") and not Path(where).exists() and (file.parent / where).exists():
        return f"{file.parent / where}{colon}{name if colon else ''}"
    return path


def settings_of_run(options: RunOptions, found: Found) -> Settings | None:
    """The options of the newest run that can be gone on with."""
    strategies = found.chosen(options.training.strategy)
    for strategy in strategies:
        folder = newest_run(Path(options.output.output_dir), found.name, strategy)
        if folder is not None:
            facts = read_run_file(folder)
            saved = facts.get("options", {})
            flags = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.get("flags", {}).items()}
            if not facts.get("hooks") and flags.get("with_hooks") is None and flags.get("hooks") is None:
                flags["with_hooks"] = "none"  # of a version in which no flag meant no hooks
            flags |= {"strategy": options.training.strategy, "output_dir": options.output.output_dir}
            return Settings(
                flags | {"loop": saved.get("loop", {}), "run_group": saved.get("run_group")},
                dict(facts.get("config") or {}),
                saved.get("hook_config", {}),
                saved.get("specs", []),
                [(path, arguments) for path, arguments in saved.get("sinks", [])],
                saved.get("trackers", []),
                saved.get("schedules", {}),
                Mistakes(partial(_in_run, folder)),
            )
    return None


def _in_run(folder: Path, path: Sequence[str | int]) -> str:
    return f"{folder / 'run.json'}, {'.'.join(map(str, path))}"
