"""What ``hookline run`` was asked for: flags, over a run file or the options of a run that is resumed.

Takes the arguments, hands a `Request` to `run`. They are read twice: first to learn which experiment it is, then with
the experiment's own options among the flags.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from hookline.cli.config_flags import ConfigFlags
from hookline.cli.experiments import Found, find_experiment
from hookline.cli.folder import newest_run, read_run_file
from hookline.cli.options import RunOptions, flat
from hookline.errors import ConfigError, OptionError

__all__ = ["Request", "Settings", "first_look", "read_request"]

_MARKERS: Final = (OmitArgPrefixes, FlagCreatePairsOff)
_SEVERAL: Final = ("--hooks", "--hook-config", "--hook-sink", "--hooks-describe")
_NOT_SAVED: Final = frozenset(
    ("experiment", "resume", "force", "dry_run", "config", "hooks_list", "hooks_describe", "hook_config")
)
_ABOUT: Final = """Train an experiment, with hooks.

Examples:
  hookline run mod_arithmetic --with-hooks observers --hook-csv
  hookline run mod_arithmetic --help                      # with the experiment's own options
  hookline run my_file.py:MyExperiment --epochs 5 --hooks norms hessian --hook-config hessian.every_n_steps=50
  hookline run my_run.yaml --lr 1e-4                      # flags win over the file
  hookline run mod_arithmetic --strategy all --resume
"""


@dataclass
class Settings:
    """What is said by something else than flags; flags win."""

    flags: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    hook_config: dict[str, dict[str, Any]] = field(default_factory=dict)
    specs: list[dict[str, Any]] = field(default_factory=list)
    sinks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    place: Callable[[Sequence[str | int]], str] = lambda path: ".".join(map(str, path))
    """Where a value stands, for errors."""


@dataclass
class Request:
    """Everything that a run needs to know."""

    options: RunOptions
    found: Found
    config: Any
    """The experiment's configuration; None if it has none."""
    loop: dict[str, Any]
    """``epochs`` or ``steps``, ``snapshot_every``, ``eval_every``: what the configuration does not say."""
    settings: Settings

    def saved(self, hook_config: Mapping[str, Any]) -> dict[str, Any]:
        """The options, to be found again by ``--resume``."""
        flags = {name: value for name, value in flat(self.options).items() if name not in _NOT_SAVED}
        return {
            "flags": flags,
            "loop": self.loop,
            "hook_config": dict(hook_config),
            "specs": self.settings.specs,
            "sinks": [list(entry) for entry in self.settings.sinks],
        }


def first_look(argv: Sequence[str]) -> tuple[RunOptions, list[str]]:
    """The flags that every experiment has, and the arguments with flags of several values joined."""
    joined = _joined(argv)
    without_help = [one for one in joined if one not in ("-h", "--help")]
    options, _ = tyro.cli(RunOptions, args=without_help, prog="hookline run", return_unknown_args=True, config=_MARKERS)
    if options.experiment == "[]":  # tyro 1.0, for a positional that is not there beside flags it does not know
        options.experiment = None
    return options, joined


def read_request(options: RunOptions, arguments: Sequence[str]) -> Request:
    """All options, the experiment's own among them."""
    if options.experiment is None and options.checkpoint.config is None:
        _only_help(arguments)
    settings, path = _settings_of_file(options)
    found = find_experiment(path)
    if options.checkpoint.resume and not settings.flags and not settings.config:
        settings = _settings_of_run(options, found) or settings
    flags = ConfigFlags(found.config_class, flat(options)) if found.config_class is not None else None
    given = {} if flags is None else flags.checked(settings.config, lambda name: settings.place(["config", name]))
    if flags is None and settings.config:
        raise ConfigError(f"{settings.place(['config'])}: {found.name} takes no options of its own.")
    values = _second_look(options, arguments, found, flags, given, settings)
    config = None
    if flags is not None:
        config = flags.make(vars(values.config), flat(values.options), given)
    loop = {} if values.loop is None else {k: v for k, v in vars(values.loop).items() if v is not None}
    values.options.experiment = path
    return Request(values.options, found, config, loop, settings)


def _only_help(arguments: Sequence[str]) -> None:
    if "-h" in arguments or "--help" in arguments:
        tyro.cli(RunOptions, args=["--help"], prog="hookline run", description=_ABOUT, config=_MARKERS)
    from hookline.experiments import EMBEDDED

    raise OptionError(
        f"hookline run needs an experiment: one of {', '.join(EMBEDDED)}, path/file.py:Class, or a run file."
    )


def _joined(argv: Sequence[str]) -> list[str]:
    """Arguments where a flag of several values that is given twice has all of them at its first place."""
    rest: list[str] = []
    several: dict[str, list[str]] = {}
    current: str | None = None
    for argument in argv:
        name, equals, value = argument.partition("=")
        spelled = name.replace("_", "-")
        if spelled in _SEVERAL:
            current = spelled
            if current not in several:
                several[current] = []
                rest.append(current)
            several[current] += [value] if equals else []
        elif argument.startswith("--") or current is None:
            current = None
            rest.append(argument)
        else:
            several[current].append(argument)
    return [one for argument in rest for one in (argument, *several.get(argument, ()))]


# -- what stands below the flags -------------------------------------------------------------------------------


def _settings_of_file(options: RunOptions) -> tuple[Settings, str]:
    """The settings of a run file, if there is one, and what the experiment is."""
    from hookline.config.read import ENDINGS, read_document

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
    path = path or experiment
    if path is None:
        raise ConfigError(f"{file} does not say what to run: experiment: NAME, or path/file.py:Class.")
    return settings, _beside(path, Path(file))


def _of_run_file(document: Any) -> tuple[Settings, str | None]:
    from hookline.config.run_file import RunFile

    run = RunFile.of(document)
    settings = Settings(_flags_of(run), dict(run.config), dict(run.hooks.config), place=document.place)
    settings.specs = [entry.given() for entry in run.specs] if run.enable_hooks else []
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
        "live": run.console == "live",
        "silent": run.console == "silent",
        "no_console_output": run.console == "none",
        "no_report": not run.report,
        "with_hooks": run.hooks.with_hooks,
        "hooks": None if run.hooks.names is None else tuple(run.hooks.names),
        "hook_offload_state": run.hooks.offload_state,
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


def _settings_of_run(options: RunOptions, found: Found) -> Settings | None:
    """The options of the newest run that can be gone on with."""
    strategies = found.chosen(options.training.strategy)
    for strategy in strategies:
        folder = newest_run(Path(options.output.output_dir), found.name, strategy)
        if folder is not None:
            facts = read_run_file(folder)
            saved = facts.get("options", {})
            flags = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.get("flags", {}).items()}
            flags["strategy"] = options.training.strategy
            return Settings(
                flags | {"output_dir": options.output.output_dir, "loop": saved.get("loop", {})},
                dict(facts.get("config") or {}),
                saved.get("hook_config", {}),
                saved.get("specs", []),
                [(path, arguments) for path, arguments in saved.get("sinks", [])],
                partial(_in_run, folder),
            )
    return None


def _in_run(folder: Path, path: Sequence[str | int]) -> str:
    return f"{folder / 'run.json'}, {'.'.join(map(str, path))}"


# -- the flags of this experiment ------------------------------------------------------------------------------


def _second_look(
    options: RunOptions,
    arguments: Sequence[str],
    found: Found,
    flags: ConfigFlags | None,
    given: Mapping[str, Any],
    settings: Settings,
) -> Any:
    default = RunOptions(options.experiment).with_values(settings.flags)
    default.experiment = options.experiment
    common = Annotated[RunOptions, arg(name=""), OmitArgPrefixes]
    made: list[Any] = [("options", common, field(default_factory=lambda: default))]
    if flags is not None and len(flags.shared) < len(flags.names):
        made.append(_group("config", flags.dataclass(given), f"Options of {found.name}"))
    loop = _loop_options(found, flags, settings.flags.get("loop", {}))
    if loop is not None:
        made.append(_group("loop", loop, "Length and rhythm"))
    everything = make_dataclass("Run", made, namespace={"config": None, "loop": None} if len(made) == 1 else {})
    about = _ABOUT.partition("\n")[0] if found.config_class is None else f"Train {found.name}, with hooks."
    prog = f"hookline run {options.experiment or found.name}"
    on = {
        name for name, value in {**flat(default), **({} if flags is None else flags.on(given))}.items() if value is True
    }
    needed = [one for one in arguments if one.removeprefix("--").replace("-", "_") not in on]  # tyro has --no-x there
    try:
        values: Any = tyro.cli(everything, args=needed, prog=prog, description=about, config=(FlagCreatePairsOff,))
    except SystemExit as left:
        if left.code:  # tyro has said what is wrong
            print(f"All options of {found.name}: hookline run {options.experiment} --help", file=sys.stderr)
        raise
    for name in ("config", "loop"):
        if not hasattr(values, name):
            setattr(values, name, make_dataclass("Nothing", [])() if name == "config" else None)
    return values


def _group(name: str, cls: type, title: str) -> Any:
    cls.__doc__ = title
    needs = any(one.default is one.default_factory for one in fields(cls))  # both MISSING: a value has to be given
    kind = Annotated.__class_getitem__((cls, arg(name="")))  # type: ignore[attr-defined]  # --opt.lr below it stays so
    return (name, kind) if needs else (name, kind, field(default_factory=cls))


_LOOP: Final = {
    "epochs": ("N", "How many times to go through the data."),
    "steps": ("N", "How many steps to train, in the step loop."),
    "snapshot_every": ("N", "How many epochs (step loop: steps) from one snapshot to the next; 0 for none."),
    "eval_every": ("N", "How many epochs from one evaluation to the next."),
}


def _loop_options(found: Found, flags: ConfigFlags | None, given: Mapping[str, Any]) -> type | None:
    """Flags for what the configuration leaves open."""
    known = set() if flags is None else set(flags.names)
    left_out = {"epoch": {"steps"}, "step": {"epochs", "eval_every"}}.get(found.loop or "", set())
    if known & {"epochs", "steps"}:
        left_out = left_out | {"epochs", "steps"}
    made: list[Any] = [
        (name, Annotated[int | None, arg(metavar=metavar, help=text, help_behavior_hint="")], given.get(name))
        for name, (metavar, text) in _LOOP.items()
        if name not in known | left_out
    ]
    return make_dataclass("Loop", made, kw_only=True) if made else None
