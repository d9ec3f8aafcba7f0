"""Read what ``hookline run`` was asked for: flags, over a run file or the options of a run that is resumed.

`run_command` and ``check`` call it with the arguments and get a `Request`. The arguments are read twice: first to learn
which experiment it is, then with the experiment's own options among the flags.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any, Final

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from hookline.cli.find_experiment import ConfigFlags, FoundExperiment, find_experiment
from hookline.cli.hook_config import read_hook_config
from hookline.cli.option_sources import RunSettings, settings_of_file, settings_of_run
from hookline.cli.parse import read_flags
from hookline.cli.run_hooks import (
    HookObjects,
    check_factories,
    check_specs,
    choose_hooks,
    specs_of_file,
    valid_schedules,
    valid_trackers,
)
from hookline.errors import OptionError
from hookline.runs.named_hooks import ALWAYS
from hookline.runs.run_options import FILE_KEYS, RunOptions, flat

__all__ = ["MARKERS", "Request", "first_look", "joined_flags", "merged_options", "read_request"]

MARKERS: Final = (OmitArgPrefixes, FlagCreatePairsOff)
_SEVERAL: Final = ("--hooks", "--hook-config", "--hook-sink", "--hooks-describe", "--show")
_NOT_SAVED: Final = frozenset(
    ("experiment", "resume", "force", "dry_run", "json", "config", "hooks_list", "hooks_describe", "hook_config")
)
_FLAG_AT: Final = {place.key: name for name, place in FILE_KEYS.items()}
"""By key of a run file, the flag."""
_NAMES_HOOKS: Final = (("hooks", "names"), ("hooks", "with_hooks"), ("experiment",))
"""The keys of a run file that say which hooks there are."""
UNKNOWN: Final = FoundExperiment("", "", make=lambda config, strategy: None)
"""Stands for an experiment that there is not, while the rest of a run file is checked."""
_ABOUT: Final = """Train an experiment, with hooks.

Examples:
  hookline run mod_arithmetic --with-hooks observers --hook-csv
  hookline run mod_arithmetic --help                      # with the experiment's own options
  hookline run my_file.py:MyExperiment --epochs 5 --hooks norms hessian --hook-config hessian.every_n_steps=50
  hookline run my_run.yaml --lr 1e-4                      # flags win over the file
  hookline run mod_arithmetic --strategy all --resume
  hookline run --hooks norms --hook-csv -- torchrun --nproc-per-node 2 train.py   # a script of your own
"""


@dataclass
class Request:
    """Hold everything that was asked for."""

    options: RunOptions
    found: FoundExperiment
    config: Any
    """The experiment's configuration; None if it has none."""
    loop: dict[str, Any]
    """``epochs`` or ``steps``, ``snapshot_every``, ``eval_every``, as far as the configuration has no such field."""
    settings: RunSettings

    def saved(self, hook_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options as ``run.json`` keeps them for ``--resume``."""
        flags = {name: value for name, value in flat(self.options).items() if name not in _NOT_SAVED}
        return {
            "flags": flags,
            "loop": self.loop,
            "hook_config": dict(hook_config),
            "specs": self.settings.specs,
            "sinks": [list(entry) for entry in self.settings.sinks],
            "trackers": self.settings.trackers,
            "schedules": self.settings.schedules,
        }

    def hook_objects(self) -> HookObjects:
        """Return what makes its hooks; raise now if one is unknown or does not take its arguments."""
        asked, settings = self.options.hook, self.settings
        mistakes = settings.mistakes
        groups = None if self.found is UNKNOWN else self.found.hook_sets
        names = choose_hooks(asked.with_hooks, asked.hooks, groups, self.found.name, self._at)
        trackers = valid_trackers(settings.trackers, names, mistakes)
        if trackers and not names:
            names = [ALWAYS]
        known = None if mistakes.has_any(*_NAMES_HOOKS) else names  # otherwise it cannot be said what has no effect
        config = read_hook_config(asked.hook_config, settings.hook_config, known, mistakes)
        for name, arguments in self.found.hook_config.items():
            if name in names:
                config[name] = {**arguments, **config.get(name, {})}
        return HookObjects(names, config, valid_schedules(settings.schedules, known, mistakes), trackers)

    def module_specs(self) -> list[dict[str, Any]]:
        """Return the hooks on modules, of the run file and of ``--hook-specs``; import their factories now."""
        place = self.settings.mistakes.place
        placed = [(place(["specs", number]), spec) for number, spec in enumerate(self.settings.specs)]
        file = self.options.hook.hook_specs
        return check_factories([*placed, *(() if file is None else specs_of_file(file))])

    def check(self) -> None:
        """Look up everything that the run file names, and raise one error with all that is wrong with the file.

        A value that a flag replaces is not checked.
        """
        from hookline.cli.process_settings import device_of, dtype_of
        from hookline.runs.named_sinks import sink_maker

        options, settings = self.options, self.settings
        self.hook_objects()
        sink_maker(vars(options.sink), settings.sinks, self._at)
        check_specs(settings.specs, ("specs",), settings.mistakes)
        with self._at(["strategy"]):
            if self.found is not UNKNOWN:
                self.found.chosen(options.training.strategy)
        with self._at(["device"]):
            device_of(options.training.device)
        with self._at(["dtype"]):
            dtype_of(options.training.dtype)
        settings.mistakes.check()

    def _at(self, path: Sequence[str | int]) -> AbstractContextManager[None]:
        """Collect the errors of a block about a value of the file, unless a flag has said otherwise."""
        flag = _FLAG_AT.get(".".join(map(str, path[:2])), str(path[0]))
        value = flat(self.options).get(flag)
        is_of_file = path[:2] == ["sinks", "others"] or (value is not None and value == self.settings.flags.get(flag))
        return self.settings.mistakes.at(*path) if is_of_file else nullcontext()


def first_look(argv: Sequence[str]) -> tuple[RunOptions, list[str]]:
    """Return the flags that every experiment has, and the arguments with flags of several values joined."""
    joined = joined_flags(argv)
    without_help = [one for one in joined if one not in ("-h", "--help")]
    options, _ = read_flags(RunOptions, without_help, "hookline run", config=MARKERS, return_unknown_args=True)
    if options.experiment == "[]":  # tyro 1.0, for a positional that is not there beside flags it does not know
        options.experiment = None
    return options, joined


def read_request(options: RunOptions, arguments: Sequence[str]) -> Request:
    """Return all options, the experiment's own among them; one error has all that is wrong with a run file."""
    if options.experiment is None and options.checkpoint.config is None:
        _only_help(arguments)
    settings, path = settings_of_file(options)
    mistakes = settings.mistakes
    found = _find(path, settings)
    if options.checkpoint.resume and not settings.flags and not settings.config:
        settings = settings_of_run(options, found) or settings
        mistakes = settings.mistakes
    flags = ConfigFlags(found.config_class, flat(options)) if found.config_class is not None else None
    given = {} if flags is None else flags.valid(settings.config, mistakes)
    if flags is None and settings.config and found is not UNKNOWN:
        mistakes.add(["config"], f"{found.name} takes no options of its own.")
    shared = {} if flags is None else {name: settings.config[name] for name in flags.shared if name in given}
    defaults = flat(RunOptions())
    for name, value in shared.items():
        if settings.flags.get(name, value) not in (value, defaults[name]):
            mistakes.add(["config", name], f"this is the flag --{name.replace('_', '-')}, and {name} says another.")
    if len(mistakes):
        Request(merged_options(options, settings), found, None, {}, settings).check()  # raises, with the rest
    values = _second_look(options, arguments, found, flags, given, settings, shared)
    config = None
    if flags is not None:
        config = flags.make(vars(values.config), flat(values.options))
    loop = {name: value for name, value in vars(values.loop).items() if value is not None}
    values.options.experiment = path
    request = Request(values.options, found, config, loop, settings)
    if settings.flags:  # of a file, or of the run that is resumed
        request.check()
    return request


def _find(path: str, settings: RunSettings) -> FoundExperiment:
    """Return the experiment; UNKNOWN if the run file does not name one that there is."""
    if not settings.says_experiment:
        return find_experiment(path)
    if path:
        with settings.mistakes.at("experiment"):
            return find_experiment(path)
    return UNKNOWN


def merged_options(options: RunOptions, settings: RunSettings) -> RunOptions:
    """Return the settings of the file with the flags over them, as far as they are known without the experiment."""
    defaults = flat(RunOptions())
    given = {name: value for name, value in flat(options).items() if value != defaults[name]}
    return RunOptions().with_values(settings.flags | given)


def _only_help(arguments: Sequence[str]) -> None:
    if "-h" in arguments or "--help" in arguments:
        tyro.cli(RunOptions, args=["--help"], prog="hookline run", description=_ABOUT, config=MARKERS)
    from hookline.runs.embedded import EMBEDDED

    raise OptionError(
        f"hookline run needs an experiment: one of {', '.join(EMBEDDED)}, path/file.py:Class, or a run file; or a "
        "script, behind --: hookline run --hooks norms -- python train.py."
    )


def joined_flags(argv: Sequence[str]) -> list[str]:
    """Return the arguments; a flag of several values that is given twice has all of them at its first place."""
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


# -- the flags of this experiment ------------------------------------------------------------------------------


def _second_look(
    options: RunOptions,
    arguments: Sequence[str],
    found: FoundExperiment,
    flags: ConfigFlags | None,
    given: Mapping[str, Any],
    settings: RunSettings,
    shared: dict[str, Any],
) -> Any:
    default = RunOptions(options.experiment).with_values(settings.flags | shared)
    default.experiment = options.experiment
    switches = flat(default) | ({} if flags is None else flags.switch_defaults(given))
    # Of a switch that is on, tyro knows --no-x alone.
    on = {f"--{name}".replace("_", "-") for name, value in switches.items() if value is True}
    needed = [one for one in arguments if one.replace("_", "-") not in on]
    try:
        return read_flags(
            _all_options(default, found, flags, given, settings.flags.get("loop", {})),
            needed,
            f"hookline run {options.experiment or found.name}",
            description=f"Train {found.name}, with hooks.",
            config=(FlagCreatePairsOff,),
        )
    except SystemExit as left:
        if left.code:  # tyro has said what is wrong
            own = [f"--{name.replace('_', '-')}" for name in ([] if flags is None else flags.names)]
            takes = f"{found.name} itself takes {', '.join(own)}. " if own else ""
            print(f"{takes}All options of {found.name}: hookline run {options.experiment} --help", file=sys.stderr)
        raise


def _all_options(
    default: RunOptions,
    found: FoundExperiment,
    flags: ConfigFlags | None,
    given: Mapping[str, Any],
    loop_given: Mapping[str, Any],
) -> Any:
    """Return one type with every flag of this experiment."""
    common = Annotated[RunOptions, arg(name=""), OmitArgPrefixes]
    own = make_dataclass("Nothing", []) if flags is None else flags.dataclass(given)
    made: list[Any] = [
        ("options", common, field(default_factory=lambda: default)),
        _group("config", own),
        _group("loop", _loop_options(found, flags, loop_given)),
    ]
    return make_dataclass("Run", made, kw_only=True)


def _group(name: str, cls: type) -> Any:
    needs = any(one.default is one.default_factory for one in fields(cls))  # both MISSING: a value has to be given
    kind: Any = Annotated[cls, arg(name="")]  # --opt.lr below it stays so
    return (name, kind) if needs else (name, kind, field(default_factory=cls))


_LOOP: Final = {
    "epochs": ("N", "How many times to go through the data."),
    "steps": ("N", "How many steps to train, in the step loop."),
    "snapshot_every": ("N", "How many epochs (step loop: steps) from one snapshot to the next; 0 for none."),
    "eval_every": ("N", "How many epochs from one evaluation to the next."),
}


def _loop_options(found: FoundExperiment, flags: ConfigFlags | None, given: Mapping[str, Any]) -> type:
    """Return the flags of the loop that are no fields of the configuration."""
    known = set() if flags is None else set(flags.names)
    left_out = {"epoch": {"steps"}, "step": {"epochs", "eval_every"}}.get(found.loop or "", set())
    if known & {"epochs", "steps"}:
        left_out = left_out | {"epochs", "steps"}
    made: list[Any] = [
        (name, Annotated[int | None, arg(metavar=metavar, help=text, help_behavior_hint="")], given.get(name))
        for name, (metavar, text) in _LOOP.items()
        if name not in known | left_out
    ]
    return make_dataclass("Loop", made, kw_only=True)
