"""Read a run: flags over a run file, or over the run that is resumed; validate it once, tell all mistakes at once.

``hookline run``, ``check`` and ``audit`` call `read`, adapters of trainers call `read_file`. Each source is a plain
nested dictionary of what was given; the later one wins. A mistake is told with its place: the flag, or the line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from hookline.errors import HooklineError, OptionError
from hookline.load import from_folder
from hookline.runs.documents import ENDINGS, Document, Fault, Place, read_document, validated
from hookline.runs.find import EMBEDDED, FoundExperiment, find_experiment
from hookline.runs.flags import COMMAND, FlagText, KeyPath, Option, Show, options_of_dataclass, read_flags, refuse_words
from hookline.runs.folder import newest_run, read_run_json
from hookline.runs.run import Run, object_of_hooks, run_flags_by_name

_ABOUT: Final = """Train an experiment, with hooks.

Examples:
  hookline run mod_arithmetic --with-hooks observers --hook-csv
  hookline run mod_arithmetic --help                      # with the experiment's own options
  hookline run my_file.py:MyExperiment --epochs 5 --hooks norms hessian --hook-config hessian.every_n_steps=50
  hookline run my_run.yaml --lr 1e-4                      # flags win over the file
  hookline run mod_arithmetic --strategy all --resume
  hookline run --hooks norms --hook-csv -- torchrun --nproc-per-node 2 train.py   # a script of your own
"""
_EXPERIMENT: Final = Option(
    "experiment",
    str,
    "A name (mod_arithmetic), path/file.py:Class, file.py:function, package.module:Class, or a run file "
    "(.yaml, .toml, .json); or your own script behind --, such as -- python train.py.",
    None,
    Show("EXPERIMENT | -- COMMAND", is_word=True, group="Arguments"),
    ("experiment",),
)
_NOT_IN_LOOP: Final = {"epoch": {"steps"}, "step": {"epochs", "eval_every"}}
_OF_HOOKS: Final = ("hooks", "specs", "hook_specs", "sinks")
_OF_SCRIPTS: Final = (*_OF_HOOKS, "command", "snapshot_every", "output_dir", "name", "console", "report", "run_group")
"""What a run file says to a trainer, or to a script: the rest is theirs to decide."""
_MAY_BE_FILES: Final = ("experiment", "hooks", "names", "sinks", "others", "sink")
"""The keys under which ``file.py:Name`` may stand."""
_SAVED: Final = ("run", "flags")
"""The keys of ``run.json`` that have what a run was asked for, in all and by flags alone."""
_HELP: Final = {"-h", "--help"}
Values = dict[str, Any]
logger = logging.getLogger(__name__)


@dataclass
class How:
    """What ``hookline run`` does with a run."""

    config: Annotated[str | None, Show("FILE")] = None
    """A run file whose settings hold where no flag is given; the same as giving it in place of EXPERIMENT."""
    resume: bool = False
    """Go on with the newest run of this experiment and strategy, with its options; flags given here win over them."""
    force: bool = False
    """Resume although the configuration has changed."""
    live: bool = False
    """The same as --console live."""
    silent: bool = False
    """The same as --console silent; goes before --live."""
    no_console_output: bool = False
    """The same as --console none: print nothing but errors. Goes before --silent."""
    dry_run: bool = False
    """Print the plan (which hook when, which files), and leave."""
    json: bool = False
    """Print the plan of --dry-run, or what --hooks-list and --hooks-describe say, as JSON."""
    hooks_list: bool = False
    """List all hooks, and leave."""
    hooks_describe: Annotated[tuple[str, ...] | None, Show("[HOOK ...]")] = None
    """Describe the metrics of hooks (all, if none is named), and leave."""


class Asked(NamedTuple):
    """What the command line asks for."""

    run: Run
    found: FoundExperiment | None
    """The experiment; None for a script."""
    how: How
    """What is done with it: trained, planned, resumed."""
    flags: Values
    """What flags say of the run, those of the run that is resumed among them."""


class Source(NamedTuple):
    """What was given at one place."""

    values: Values
    place: Place
    """Returns where a value is, for messages."""


def _place_in(sources: Sequence[Source]) -> Place:
    """Return what tells where a value was given: by the source that has most of the way to it; of two, the later."""
    return lambda path: max(reversed(sources), key=lambda source: _depth(source.values, path)).place(path)


def _depth(values: Any, path: KeyPath) -> int:
    for depth, key in enumerate(path):
        is_there = key in values if isinstance(values, dict) else isinstance(values, list) and key in range(len(values))
        if not is_there:
            return depth
        values = values[key]
    return len(path)


def read(arguments: Sequence[str]) -> Asked:
    """Return the run that the words of a command line ask for; a script's command stands behind a ``--``."""
    words, command = split_command(arguments)
    flags, how, unknown = _flags(words)
    document = _document(flags, how)
    sources = [] if document is None else [_source(document)]
    file = sources[0].values if sources else {}
    named = flags.get("experiment", file.get("experiment"))
    if how.hooks_list or how.hooks_describe is not None:
        return Asked(Run.model_construct(experiment=named if isinstance(named, str) else None), None, how, flags)
    is_script = bool(command or file.get("command"))
    if (is_script or named is None) and not _HELP.isdisjoint(words):
        read_flags([_EXPERIMENT, *_options(None).values()], ["--help"], "hookline run", _ABOUT)  # leaves
    if is_script:
        refuse_words(unknown, _options(None), "hookline run")
        return Asked(_script(command, flags, how, sources), None, how, flags)
    found, faults = _find(named, document)
    if found is not None:
        flags, _, unknown = _flags(words, found)
        refuse_words(unknown, _options(found), f"hookline run {found.path}")
    if document is not None and how.config is None:
        flags.pop("experiment", None)  # it named the file
    if found is not None and how.resume:
        saved, before = _saved(found, _merged(file, flags))
        sources += [saved] if document is None else []
        flags = _merged(before, flags)
    sources.append(Source(flags, flag_of))
    run = _validated(sources, found, faults, is_unknown=found is None)
    return Asked(run, found, how, _picked(run.model_dump(exclude_unset=True), flags))


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before the first ``--``, and the command behind it; nothing for what there is not."""
    given = list(arguments)
    if "--" not in given:
        return given, []
    place = given.index("--")
    if place == len(given) - 1:
        raise OptionError("There is no command behind the --. Next: write it as a shell has it: -- python train.py.")
    return given[:place], given[place + 1 :]


def read_file(path: str | Path, *, of_script: bool = False) -> Run:
    """Return the run of a file, for a trainer: what the file says of training itself is the trainer's to decide.

    Args:
        path: The run file.
        of_script: Keep what it says of a script: its command, the folder and name of the run, how often it reports.
    """
    source = _source(read_document(path))
    kept = _only(source.values, _OF_SCRIPTS if of_script else _OF_HOOKS)
    if len(kept) < len(source.values):
        others = ", ".join(sorted(set(source.values) - set(kept)))
        logger.info("%s: the trainer decides about %s", path, others)
    return _validated([source._replace(values=kept)], None)


def _only(values: Values, keys: Sequence[str]) -> Values:
    """Return the values of `keys`, and of keys that no run has, which are mistakes."""
    return {key: value for key, value in values.items() if key in keys or key not in Run.model_fields}


def _script(command: Sequence[str], flags: Values, how: How, sources: Sequence[Source]) -> Run:
    """Return the run of a script, which decides itself how it trains."""
    file = sources[0].values if sources else {}
    named = flags.get("experiment") or (file.get("experiment") if not command else None)
    if named or (command and file.get("command")):
        second = f"the experiment {named!r}" if named else "the command of the run file"
        raise OptionError(f"Two things were asked to run: a command, and {second}. Next: leave one of them out.")
    wrong = [flag_of((key,)) for key in flags if key not in _OF_SCRIPTS]
    wrong += [f"--{name}" for name in ("resume", "force") if getattr(how, name)]
    wrong += ["--console"] if flags.get("console") not in (None, "silent", "none") else []
    if wrong:
        raise OptionError(
            f"{', '.join(sorted(wrong))}: that is for experiments; here the script decides how it is trained and what "
            "it prints. Next: leave it out, or give it to the script, behind the --."
        )
    given = Source(flags | ({"command": list(command)} if command else {}), flag_of)
    return _validated([*(one._replace(values=_only(one.values, _OF_SCRIPTS)) for one in sources), given], None)


# -- flags -----------------------------------------------------------------------------------------------------


def _options(found: FoundExperiment | None) -> dict[str, Option]:
    """Return the flags of ``hookline run`` by name, with those of the experiment's own options."""
    command = {one.name: one for one in options_of_dataclass(How)}
    if found is None:
        return run_flags_by_name() | command
    own: dict[str, Option] = {}
    if found.config_class is not None:
        options = options_of_dataclass(found.config_class, f"Options of {found.name}", ("config",))
        own = {one.name: one for one in options}
    left_out = _NOT_IN_LOOP.get(found.loop or "", set())
    if {"epochs", "steps"} & set(own):
        left_out = left_out | {"epochs", "steps"}
    made = {name: one for name, one in run_flags_by_name().items() if name not in left_out - set(own)}
    for name in [name for name in made if name in own and made[name].default is None]:  # its own text says more
        show = own[name].show._replace(group=made[name].show.group)
        made[name] = own[name]._replace(path=made[name].path, show=show)
    return own | made | command


def _flags(words: Sequence[str], found: FoundExperiment | None = None) -> tuple[Values, How, list[str]]:
    """Return what flags say, as a run file would say it; how the command works; and the words that are left over.

    Without its experiment this is a first look: help waits until there is one, whose options are flags too.
    """
    options = {"experiment": _EXPERIMENT, **_options(found)}
    name = "" if found is None else found.path
    values, unknown = read_flags(
        options.values(), words, f"hookline run {name}", f"Train {name}, with hooks.", has_help=found is not None
    )
    how = How(**{name: values.pop(name) for name in list(values) if options[name].show.group == COMMAND})
    given: Values = {}
    for name, value in values.items():
        path = options[name].path
        if path == ("hooks", "config"):
            value = _hook_config(value)
        _put(given, path, FlagText(value) if isinstance(value, str) and path[0] == "config" else value)
    modes = {"none": how.no_console_output, "silent": how.silent, "live": how.live}
    if mode := next((mode for mode, is_on in modes.items() if is_on), None):
        given["console"] = mode
    return given, how, unknown


def _hook_config(items: Sequence[str]) -> dict[str, Values]:
    """Return ``hook.param=value`` words as arguments by hook; the texts become what the hook declares later."""
    found: dict[str, Values] = {}
    for item in items:
        path, equals, text = item.partition("=")
        hook, dot, name = path.partition(".")
        if not (equals and dot and hook and name):
            raise OptionError(f"Invalid --hook-config format: '{item}' (expected hook_name.param=value)")
        found.setdefault(hook, {})[name] = FlagText(text)
    return found


def flag_of(path: KeyPath) -> str:
    """Return the flag of a value of a run: ``--hooks`` for ``("hooks", "names", 2)``, ``--lr`` for an option."""
    if path[:1] == ("config",) and len(path) > 1:
        return f"--{str(path[1]).replace('_', '-')}"
    return next((one.flag for one in run_flags_by_name().values() if path[: len(one.path)] == one.path), "")


# -- files, and the run that is resumed ------------------------------------------------------------------------


def _document(flags: Values, how: How) -> Document | None:
    """Return the run file, which is named by ``--config`` or in place of the experiment."""
    path = how.config
    if path is not None and how.resume:
        raise OptionError("--config and --resume do not go together: a run that is resumed has its own options.")
    if path is None and Path(flags.get("experiment", "")).suffix.lower() in ENDINGS:
        path = flags.pop("experiment")
    return None if path is None else read_document(path)


def _source(document: Document) -> Source:
    """Return what a run file says; its files are relative to its folder."""
    values = document.settings("experiment: NAME, strategy, config")

    def in_file(path: KeyPath) -> KeyPath:
        """Return the path by which the file has a value: there ``hooks`` may be a list of names."""
        others = [("hooks", *path[2:])] if path[:2] == ("hooks", "names") else []
        return max([path, *others, ("config", *path)], key=lambda one: _depth(values, one) - len(one) + len(path))

    given = object_of_hooks({key: value for key, value in values.items() if value is not None})
    return Source(placed_files(given, document.path.parent), lambda path: document.place(in_file(path)))


def placed_files(values: Values, folder: Path) -> Values:
    """Return `values` with every ``file.py:Name``, and the file of specs, relative to `folder`."""

    def placed(value: Any) -> Any:
        if isinstance(value, str):
            return from_folder(value, folder)
        if isinstance(value, list):
            return [placed(one) for one in value]
        if isinstance(value, dict):
            return {key: placed(one) if key in _MAY_BE_FILES else one for key, one in value.items()}
        return value

    found: Values = placed(values)
    if isinstance(found.get("hook_specs"), str):
        found["hook_specs"] = str(folder / found["hook_specs"])
    return found


def _saved(found: FoundExperiment, given: Values) -> tuple[Source, Values]:
    """Return what the newest run of an experiment was asked for, in all and by flags.

    Raise if its one strategy has nothing to resume; of several, those that are missing begin.
    """
    output_dir = Path(str(given.get("output_dir", Run.model_fields["output_dir"].default)))  # not validated yet
    strategies = found.chosen(given.get("strategy"))
    folder = next(filter(None, (newest_run(output_dir, found.name, strategy) for strategy in strategies)), None)
    if folder is None and len(strategies) == 1:
        raise OptionError(
            f"There is nothing to resume: no checkpoints in {output_dir / found.name / strategies[0]}. Start without "
            "--resume, or say where the run is: --output-dir DIR."
        )
    facts = {} if folder is None else read_run_json(folder, is_needed=True)
    asked_anew = ("experiment", "strategy", "output_dir")
    run, flags = ({key: one for key, one in facts.get(which, {}).items() if key not in asked_anew} for which in _SAVED)
    return Source(run, lambda path: f"{folder}/run.json, {'.'.join(map(str, path))}"), flags


def _find(named: Any, document: Document | None) -> tuple[FoundExperiment | None, list[Fault]]:
    """Return the experiment, or what is wrong with its name: told with all other mistakes of the run."""
    if named is None and document is None:
        raise OptionError(
            f"hookline run needs an experiment: {', '.join(EMBEDDED)}, path/file.py:Class, or a run file; or a "
            "script, behind --: hookline run --hooks norms -- python train.py."
        )
    if named is None and document is not None:
        what = "experiment: NAME, or path/file.py:Class; or command: python train.py"
        return None, [((), f"{document.path} does not say what to run: {what}.")]
    if not isinstance(named, str):
        return None, []  # as the validation says
    try:
        return find_experiment(named), []
    except HooklineError as error:
        return None, [(("experiment",), str(error))]


# -- one value, validated once ---------------------------------------------------------------------------------


def _validated(
    sources: Sequence[Source], found: FoundExperiment | None, faults: Sequence[Fault] = (), *, is_unknown: bool = False
) -> Run:
    """Return the run of all sources, the later ones over the earlier; raise one error with all that is wrong."""
    given: Values = {}
    faults = [*faults]
    for source in sources:
        faults += [] if found is None else _lift(source.values, found)
        given = _merged(given, source.values)
    run: Run = validated(Run, given, _place_in(sources), faults, found=found, is_unknown=is_unknown)
    return run


def _lift(values: Values, found: FoundExperiment) -> list[Fault]:
    """Move options of the experiment that are flags of hookline too (``seed``) to where a run has them."""
    own: Any = values.get("config")
    if not isinstance(own, dict):
        return []
    faults: list[Fault] = []
    shared = found.shared
    for name in [name for name in own if name in shared]:
        path = shared[name]
        if path[0] in values and values[path[0]] != own[name]:
            faults.append((("config", name), f"this is {flag_of(path)}, and {name} says another."))
        _put(values, path, own[name])
    values["config"] = {name: value for name, value in own.items() if name not in shared}
    return faults


def _put(values: Values, path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        values[str(key)] = values = dict(values.get(str(key), {}))
    values[str(path[-1])] = value


def _picked(values: Any, keys: Any) -> Any:
    """Return what a nested dictionary has at the keys of another one."""
    if not isinstance(values, Mapping) or not isinstance(keys, Mapping):
        return values
    return {key: _picked(values[key], keys[key]) for key in keys if key in values}


def _merged(given: Any, later: Any) -> Any:
    """Return two nested dictionaries as one; the later wins, key by key. Lists are not joined."""
    if not isinstance(given, Mapping) or not isinstance(later, Mapping):
        return later
    return {**given, **{key: _merged(given[key], value) if key in given else value for key, value in later.items()}}
