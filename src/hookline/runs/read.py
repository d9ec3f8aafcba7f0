"""Read a run: flags over a run file, or over the run that is resumed; validate it once, tell all mistakes at once.

``hookline run``, ``check`` and ``audit`` call `read`, adapters of trainers call `read_file`. Each source is a plain
nested dictionary of what was given; the later one wins. A mistake is told with its place: the flag, or the line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from hookline.errors import ConfigError, HooklineError, OptionError
from hookline.load import from_folder
from hookline.runs.documents import ENDINGS, Document, Fault, KeyPath, read_document
from hookline.runs.faults import refuse, validated
from hookline.runs.find import EMBEDDED, FoundExperiment, find_experiment
from hookline.runs.flags import How, flag_of, refuse_words, run_flags, run_flags_by_name, run_options
from hookline.runs.folder import newest_run, read_run_json
from hookline.runs.run import Run, both_lists, object_of_hooks

__all__ = ["Asked", "placed_files", "read", "read_file", "split_command"]

_ABOUT: Final = """Train an experiment, with hooks.

Examples:
  hookline run mod_arithmetic --with-hooks observers --hook-csv
  hookline run mod_arithmetic --help                      # with the experiment's own options
  hookline run my_file.py:MyExperiment --epochs 5 --hooks norms hessian --hook-config hessian.every_n_steps=50
  hookline run my_run.yaml --lr 1e-4                      # flags win over the file
  hookline run mod_arithmetic --strategy all --resume
  hookline run --hooks norms --hook-csv -- torchrun --nproc-per-node 2 train.py   # a script of your own
"""
_OF_HOOKS: Final = ("hooks", "specs", "hook_specs", "enable_hooks", "trackers", "sinks")
_OF_SCRIPTS: Final = (*_OF_HOOKS, "command", "snapshot_every", "output_dir", "name", "console", "report", "run_group")
"""What a run file says to a trainer, or to a script: the rest is theirs to decide."""
Values = dict[str, Any]
logger = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What the command line asks for."""

    run: Run
    found: FoundExperiment | None
    """The experiment; None for a script."""
    how: How
    """What is done with it: trained, planned, resumed."""


class Source(NamedTuple):
    """What was given at one place."""

    values: Values
    place: Callable[[KeyPath], str]
    """Returns where a value is, for messages."""
    line: Callable[[KeyPath], int | None] = lambda path: None


class Sources(list[Source]):
    """What was given, the later over the earlier."""

    def place(self, path: KeyPath) -> str:
        """Return where the value at `path` was given."""
        return self._of(path).place(path)

    def _of(self, path: KeyPath) -> Source:
        """Return the source that has the value at `path`, or most of the way to it; of two, the later."""
        return max(reversed(self), key=lambda source: _depth(source.values, path))

    def line_of(self, path: KeyPath) -> int | None:
        """Return the line of the value at `path`."""
        return self._of(path).line(path)


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
    flags, how, unknown = run_flags(words, is_first_look=True)
    if how.hooks_list or how.hooks_describe is not None:
        return Asked(Run.model_construct(**flags), None, how)
    document = _document(flags, how)
    file = {} if document is None else placed_files(_values(document), document.path.parent)
    named = flags.get("experiment", file.get("experiment"))
    is_script = bool(command or file.get("command"))
    if (is_script or named is None) and not {"-h", "--help"}.isdisjoint(words):
        run_flags(["--help"], about=_ABOUT)  # leaves
    if is_script:
        refuse_words(unknown, run_options(None), "hookline run")
        return Asked(_script(command, flags, how, document, file), None, how)
    sources = [] if document is None else [_source(document, file)]
    found, faults = _find(named, document)
    if found is not None:
        if how.resume and document is None:
            sources = _saved(found, flags)
        flags, _, unknown = run_flags(words, found, about=f"Train {found.name}, with hooks.")
        refuse_words(unknown, run_options(found), f"hookline run {found.path}")
    if document is not None and how.config is None:
        flags.pop("experiment", None)  # it named the file
    sources.append(Source(flags, flag_of))
    return Asked(_validated(sources, found, faults, is_unknown=found is None), found, how)


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
    document = read_document(path)
    values = placed_files(_values(document), Path(path).parent)
    kept = _only(values, _OF_SCRIPTS if of_script else _OF_HOOKS)
    if len(kept) < len(values):
        logger.info("%s: the trainer decides about %s", path, ", ".join(sorted(set(values) - set(kept))))
    return _validated([_source(document, kept)], None, [])


def _only(values: Values, keys: Sequence[str]) -> Values:
    """Return the values of `keys`, and of keys that no run has, which are mistakes."""
    return {key: value for key, value in values.items() if key in keys or key not in Run.model_fields}


def _script(command: Sequence[str], flags: Values, how: How, document: Document | None, file: Values) -> Run:
    """Return the run of a script, which decides itself how it trains."""
    named = flags.get("experiment") or (file.get("experiment") if not command else None)
    if named or (command and file.get("command")):
        second = f"the experiment {named!r}" if named else "the command of the run file"
        raise OptionError(f"Two things were asked to run: a command, and {second}. Next: leave one of them out.")
    wrong = [flag_of((key,)) for key in flags if key not in _OF_SCRIPTS]
    wrong += [f"--{name}" for name in ("resume", "force", "json") if getattr(how, name)]
    wrong += ["--console"] if flags.get("console") not in (None, "silent", "none") else []
    if wrong:
        raise OptionError(
            f"{', '.join(sorted(wrong))}: that is for experiments; here the script decides how it is trained and what "
            "it prints. Next: leave it out, or give it to the script, behind the --."
        )
    sources = [] if document is None else [_source(document, _only(file, _OF_SCRIPTS))]
    return _validated([*sources, Source(flags | ({"command": list(command)} if command else {}), flag_of)], None, [])


# -- what was given --------------------------------------------------------------------------------------------


def _document(flags: Values, how: How) -> Document | None:
    """Return the run file, which is named by ``--config`` or in place of the experiment."""
    path = how.config
    if path is not None and how.resume:
        raise OptionError("--config and --resume do not go together: a run that is resumed has its own options.")
    if path is None and Path(flags.get("experiment", "")).suffix.lower() in ENDINGS:
        path = flags.pop("experiment")
    return None if path is None else read_document(path)


def _values(document: Document) -> Values:
    values = document.values
    if values is None:
        raise ConfigError(f"{document.path} is empty; it says at least which experiment to run: experiment: NAME.")
    if not isinstance(values, dict):
        what = "a list" if isinstance(values, list) else "text" if isinstance(values, str) else repr(values)
        raise ConfigError(
            f"{document.path} holds {what}, and settings are keys with values (experiment, strategy, config, …)."
        )
    given = {key: value for key, value in values.items() if value is not None}
    refuse(document, both_lists(given))
    found: Values = object_of_hooks(given)
    return found


def placed_files(values: Values, folder: Path) -> Values:
    """Return `values` with every ``file.py:Name`` relative to `folder`, that of the run file."""

    def placed(value: Any) -> Any:
        return from_folder(value, folder) if isinstance(value, str) else value

    def entries(listed: Any, key: str) -> Any:
        if not isinstance(listed, list):
            return listed
        return [{**one, key: placed(one.get(key))} if isinstance(one, dict) else placed(one) for one in listed]

    found = dict(values)
    if "experiment" in found:
        found["experiment"] = placed(found["experiment"])
    if isinstance(found.get("hook_specs"), str):
        found["hook_specs"] = str(folder / found["hook_specs"])
    if "trackers" in found:
        found["trackers"] = entries(found["trackers"], "tracker")
    for section, name, key in (("hooks", "names", ""), ("sinks", "others", "sink")):
        if isinstance(found.get(section), dict) and name in found[section]:
            found[section] = {**found[section], name: entries(found[section][name], key)}
    return found


def _source(document: Document, values: Values) -> Source:
    def in_file(path: KeyPath) -> KeyPath:
        """Return the path by which the file has a value: there ``hooks`` may be a list, of names or of specs."""
        listed = document.values.get("hooks")
        if isinstance(listed, list) and path[:2] == ("hooks", "names"):
            return ("hooks", *path[2:])
        if isinstance(listed, list) and path[:1] == ("specs",) and "specs" not in document.values:
            return ("hooks", *path[1:])
        own = document.values.get("config")
        if path and path[0] not in document.values and isinstance(own, dict) and path[0] in own:
            return ("config", *path)
        return path

    return Source(values, lambda path: document.place(in_file(path)), lambda path: document.line_of(in_file(path)))


def _saved(found: FoundExperiment, flags: Values) -> list[Source]:
    """Return what the newest run of an experiment was asked for, from its run.json; nothing if there is none."""
    output_dir = Path(flags.get("output_dir", Run.model_fields["output_dir"].default))
    for strategy in found.chosen(flags.get("strategy")):
        folder = newest_run(output_dir, found.name, strategy)
        if folder is not None:
            values = read_run_json(folder).get("run", {})
            for key in ("experiment", "strategy", "output_dir"):
                values.pop(key, None)
            return [Source(values, partial(_in_run, folder))]
    return []


def _in_run(folder: Path, path: KeyPath) -> str:
    return f"{folder / 'run.json'}, {'.'.join(map(str, path))}"


def _find(named: Any, file: Document | None) -> tuple[FoundExperiment | None, list[Fault]]:
    """Return the experiment, or what is wrong with its name."""
    if isinstance(named, str):
        try:
            return find_experiment(named), []
        except HooklineError as error:
            return None, [(("experiment",), str(error))]
    if named is not None:
        return None, []  # no text, as the validation says
    if file is not None:
        what = "experiment: NAME, or path/file.py:Class; or command: python train.py"
        return None, [((), f"{file.path} does not say what to run: {what}.")]
    raise OptionError(
        f"hookline run needs an experiment: one of {', '.join(EMBEDDED)}, path/file.py:Class, or a run file; or a "
        "script, behind --: hookline run --hooks norms -- python train.py."
    )


# -- one value, validated once ---------------------------------------------------------------------------------


def _validated(
    sources: Sequence[Source], found: FoundExperiment | None, faults: list[Fault], *, is_unknown: bool = False
) -> Run:
    """Return the run of all sources, the later ones over the earlier; raise one error with all that is wrong."""
    shared = set() if found is None else set(found.options) & set(run_flags_by_name())
    given: Values = {}
    for source in sources:
        faults = faults + _lift(source.values, shared)
        given = _merged(given, source.values)
    places = Sources(sources)
    run: Run = validated(Run, given, places, faults, found=found, unknown=is_unknown)
    run._sources = places
    return run


def _lift(values: Values, shared: set[str]) -> list[Fault]:
    """Move options of the experiment that are flags of hookline too (``seed``) to where a run has them."""
    own: Any = values.get("config")
    faults: list[Fault] = []
    for name in [name for name in own if name in shared] if isinstance(own, dict) else ():
        value = own[name]
        path = run_flags_by_name()[name].path
        if path[0] in values and values[path[0]] != value:
            faults.append((("config", name), f"this is {flag_of(path)}, and {name} says another."))
        values["config"] = {key: one for key, one in values["config"].items() if key != name}
        _put(values, path, value)
    return faults


def _put(values: Values, path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        values[str(key)] = values = dict(values.get(str(key), {}))
    values[str(path[-1])] = value


def _merged(given: Any, later: Any) -> Any:
    """Return two nested dictionaries as one; the later wins, key by key. Lists are not joined."""
    if not isinstance(given, Mapping) or not isinstance(later, Mapping):
        return later
    return {**given, **{key: _merged(given[key], value) if key in given else value for key, value in later.items()}}
