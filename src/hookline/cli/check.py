"""``hookline check FILE``: whether a run file, or a file of hooks on modules, says what can be done.

Takes a path, prints what it means; with a model, what each pattern matches. It attaches nothing and calls no factory,
but imports what the file names: that a factory is there cannot be told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from hookline.cli.failures import DONE
from hookline.cli.load import see_current_folder
from hookline.cli.module_specs import wrong_factory
from hookline.cli.parse import parse
from hookline.cli.show import print_table, tell
from hookline.errors import ConfigError, HooklineError, OptionError

if TYPE_CHECKING:
    from hookline.cli.hook_objects import HookObjects
    from hookline.config.read import Document
    from hookline.hooks.specs import HookSpec

__all__ = ["CheckOptions", "command"]


@dataclass
class CheckOptions:
    """Check a run file, a list of hooks on modules, or the settings of a server (enable_hooks, hooks, forward_hooks).

    Nothing is attached and no factory is called; the modules that the file names are imported.

    Examples:
      hookline check run.yaml
      hookline check hooks.json --model my_file.py:make_model
    """

    config: Annotated[Positional[str | None], arg(metavar="FILE", help_behavior_hint="")] = None
    """The file: .yaml, .toml, .json."""
    model: Annotated[str | None, arg(metavar="FILE:MODEL", help_behavior_hint="")] = None
    """Show what the patterns match in this model."""


def command(arguments: Sequence[str]) -> int:
    """Check it."""
    options = parse(CheckOptions, arguments, "check")
    if options.config is None:
        raise OptionError("hookline check needs a file: hookline check run.yaml.")
    from hookline.config.read import read_document
    from hookline.config.run_file import RunFile
    from hookline.config.spec_files import checked_list, is_server_file, server_settings

    document = read_document(options.config)
    see_current_folder()
    warnings = _Warnings()
    model = None if options.model is None else _model(options.model)
    if isinstance(document.values, list):
        _check_specs(document, {(): checked_list(document)}, model, warnings)
    elif is_server_file(document.values):
        _check_server(document, server_settings(document), model, warnings)
    else:
        run = RunFile.of(document)
        objects = _check_run(options.config)
        key = "specs" if "specs" in document.values else "hooks"
        _check_specs(document, {(key,): run.given_specs()}, model, warnings)
        _check_trackers(objects, model)
    tell(f"{options.config}: nothing is wrong with it{warnings.summary()}.")
    return DONE


class _Warnings:
    """What is allowed, and hardly meant."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, text: str) -> None:
        """Tell one."""
        tell(f"warning: {text}")
        self._count += 1

    def summary(self) -> str:
        """How many there were, for the last line."""
        return f", but see the {self._count} warning{'s' * (self._count > 1)} above" if self._count else ""


def _model(path: str) -> Any:
    from hookline.cli.find import model_at

    return model_at(path)


# -- a run file ------------------------------------------------------------------------------------------------


def _check_run(path: str) -> HookObjects:
    """A run file: everything that would be found out before training is found out now."""
    from hookline.cli.destinations import destinations
    from hookline.cli.request import first_look, read_request
    from hookline.cli.screen import messages

    request = read_request(*first_look([path]))
    options, found, settings = request.options, request.found, request.settings
    with messages():
        objects = request.hook_objects()
        destinations(options.sink, settings.sinks)
    tell(f"experiment  {found.name}, strategies {', '.join(found.chosen(options.training.strategy))}")
    if request.config is not None:
        tell(f"config      {', '.join(f'{name}={value!r}' for name, value in vars(request.config).items())}")
    tell(f"hooks       {', '.join(objects.names) or 'none'}")
    return objects


def _check_trackers(objects: HookObjects, model: Any) -> None:
    rows = []
    for one in objects.trackers:
        matches = "(no --model given)" if model is None else ", ".join(one.check(model)) or "the layers of its kind"
        rows.append((one.name, one.tracker, ", ".join(one.targets) or "–", matches))
    if rows:
        print_table("", ("tracker", "counts", "target modules", "matches"), rows)


# -- hooks on modules ------------------------------------------------------------------------------------------


def _check_server(document: Document, settings: dict[str, Any], model: Any, warnings: _Warnings) -> None:
    _check_specs(document, {(key,): settings.get(key) or [] for key in ("hooks", "forward_hooks")}, model, warnings)
    if settings.get("hooks") and not settings.get("enable_hooks"):
        warnings.add("a server attaches none of 'hooks' unless it says enable_hooks: true.")
    if settings.get("enable_hooks") and not settings.get("hooks"):
        warnings.add("enable_hooks=True but no 'hooks' specified in server_args.")
    others = [str(key) for key in settings if key not in ("enable_hooks", "hooks", "forward_hooks")]
    if others:
        tell(f"kept for the server, unchecked: {', '.join(others)}")


def _check_specs(
    document: Document, lists: dict[tuple[str, ...], list[dict[str, Any]]], model: Any, warnings: _Warnings
) -> None:
    """The specs of each list, as a table; what is wrong with all of them at once."""
    from hookline.hooks.specs import HookSpec

    rows, wrong = [], []
    for key, entries in lists.items():
        for number, entry in enumerate(entries):
            spec = HookSpec.from_dict(entry)
            found = _cannot_be_made(spec, number)
            if found:
                wrong.append(f"{document.place([*key, number])}: {found}")
            else:
                rows.append((spec.name, spec.on, ", ".join(spec.target_modules), _matches(model, spec, warnings)))
    if wrong:
        raise ConfigError("\n".join(wrong))
    if rows:
        print_table("", ("hook", "on", "target modules", "matches"), rows)


def _cannot_be_made(spec: HookSpec, number: int) -> str:
    """Why nothing would come of a spec; empty if something would."""
    who = f"Hook {number} ({spec.name or 'without a name'})"
    lacking = [key for key in ("target_modules", "hook_factory") if not getattr(spec, key)]
    if lacking:
        return f"{who} has no {' and no '.join(lacking)}."
    wrong = wrong_factory(vars(spec))
    return f"{who}: {wrong}" if wrong else ""


def _matches(model: Any, spec: HookSpec, warnings: _Warnings) -> str:
    if not spec.enabled:
        return "(not enabled)"
    if model is None:
        return "(no --model given)"
    from hookline.hooks.apply_specs import find_for

    try:
        places = find_for(model, spec)
    except HooklineError as error:  # what cannot be hooked there, whatever its name
        raise ConfigError(f"Hook {spec.name!r}: {error}") from error
    if places is None:
        patterns = ", ".join(map(repr, spec.target_modules))
        warnings.add(f"hook {spec.name!r} would go nowhere: nothing matches {patterns}.")
        return "nothing"
    for pattern in spec.target_modules:
        if find_for(model, replace(spec, target_modules=(pattern,), exclude=None)) is None:
            warnings.add(f"hook {spec.name!r}: nothing matches {pattern!r}.")
    return ", ".join(name or "(the model)" for name in places.names)
