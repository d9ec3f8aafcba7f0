"""Check a run file, a list of hook specs or the settings of a server: ``hookline check``.

`main` calls `check`, which attaches and writes nothing, but imports what the file names. Options of factories are tried
where a factory says how, as those of hookline do; others are not called. With ``--model`` it also makes the model.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from hookline.cli.main import DONE
from hookline.cli.models import model_at
from hookline.cli.screen import print_table, shell_text, tell, tell_json
from hookline.errors import ConfigError, HooklineError, NoMatchError, OptionError
from hookline.load import add_current_folder_to_path
from hookline.runs.flags import Show, parse

if TYPE_CHECKING:
    from hookline.runs.documents import Fault
    from hookline.runs.flags import KeyPath
    from hookline.runs.read import Asked
    from hookline.specs.hook_spec import HookSpec

__all__ = ["CheckOptions", "check"]


@dataclass
class CheckOptions:
    """Check a run file, a list of hooks on modules, or the settings of a server (enable_hooks, hooks, forward_hooks).

    Nothing is attached or written; the modules that the file names are imported, and the options of hookline's own
    factories are tried. Other factories are not called. --model makes the model.

    Examples:
      hookline check run.yaml
      hookline check hooks.json --model my_file.py:make_model
      hookline check hooks.json --model models/llama      # a folder of transformers: its config.json is enough

    With --model, a pattern that matches nothing is an error, as it is for hookline serve.
    """

    config: Annotated[str | None, Show("FILE", is_word=True)] = None
    """The file: .yaml, .toml, .json."""
    model: Annotated[str | None, Show("FILE:MODEL")] = None
    """Show what the patterns match in this model; one that matches nothing is an error."""
    no_strict: bool = False
    """With --model, warn of a pattern that matches nothing, and go on."""
    json: bool = False
    """Print JSON; what is said otherwise goes to the standard error."""


def check(arguments: Sequence[str]) -> int:
    """Print what a file means, or raise one error with everything that is wrong with it."""
    options = parse(CheckOptions, arguments, "check")
    if options.config is None:
        raise OptionError("hookline check needs a file: hookline check run.yaml.")
    from hookline.runs.documents import read_document, refuse
    from hookline.runs.spec_files import is_server_file, placed_specs

    document = read_document(options.config)
    add_current_folder_to_path()
    report = _Report()
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        model = None if options.model is None else model_at(options.model)
        matcher = _Matcher(model, options.model or "", is_strict=not options.no_strict)
        if isinstance(document.values, list) or is_server_file(document.values):
            specs = placed_specs(document, is_server=False, even_off=True)
            refuse(document, matcher.faults(specs))
            _show_specs(specs.values(), matcher, report)
            if isinstance(document.values, dict):
                _check_switch(document.values, report)
        else:
            _check_run(options.config, matcher, report)
        tell(f"{options.config}: nothing is wrong with it{report.summary()}.")
    if options.json:
        tell_json("check", {"file": options.config, **vars(report)})
    return DONE


class _Report:
    """Keep what was found; print warnings: about what is allowed, but probably a mistake."""

    def __init__(self) -> None:
        self.hooks: list[dict[str, Any]] = []
        self.trackers: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Print the warning ``text``, and keep it."""
        tell(f"warning: {text}")
        self.warnings.append(text)

    def summary(self) -> str:
        """Return how many warnings there were, for the last line."""
        count = len(self.warnings)
        return f", but see the {count} warning{'s' * (count > 1)} above" if count else ""


# -- a run file ------------------------------------------------------------------------------------------------


def _check_run(path: str, matcher: _Matcher, report: _Report) -> None:
    """Check a run file as far as a run does before it trains; print what the file means."""
    from hookline.cli.screen import messages
    from hookline.runs.build import hook_names
    from hookline.runs.find import make_config
    from hookline.runs.read import read

    with messages():
        asked = read([path])
    run, found = asked.run, asked.found
    faults = matcher.faults({("specs", place): spec for place, spec in enumerate(run.specs)})
    if faults:
        raise ConfigError("\n".join(f"{run.place(*where)}: {text}" for where, text in faults))
    if found is None:
        tell(f"command     {shlex.join(run.command)}")
    else:
        tell(f"experiment  {found.name}, strategies {', '.join(found.chosen(run.strategy))}")
        config = make_config(run, found)
        if config is not None:
            tell(f"config      {', '.join(f'{name}={value!r}' for name, value in vars(config).items())}")
    tell(f"hooks       {', '.join(hook_names(run, found)) or 'none'}")
    _show_specs(run.specs, matcher, report)
    _check_trackers(asked, matcher.model, report)


def _check_trackers(asked: Asked, model: Any, report: _Report) -> None:
    """Print a table of the trackers; raise if one finds nothing to count in ``model``."""
    from hookline.runs.build import tracked_modules, tracker_name

    rows = []
    for place, one in enumerate(asked.run.trackers):
        matches = "(no --model given)"
        if model is not None:
            matches = ", ".join(tracked_modules(asked.run, place, one, model)) or "the layers of its kind"
        name, patterns = tracker_name(one), list(one.target_modules)
        rows.append((name, one.kind, ", ".join(patterns) or "–", matches))
        report.trackers.append({"name": name, "counts": one.kind, "target_modules": patterns, "matches": matches})
    if rows:
        print_table("", ("tracker", "counts", "target modules", "matches"), rows)


# -- hooks on modules ------------------------------------------------------------------------------------------


class _Matcher:
    """Find what the patterns of a spec match in the model of ``--model``, if there is one."""

    def __init__(self, model: Any, path: str, *, is_strict: bool) -> None:
        self.model = model
        self._path = path
        self._is_strict = is_strict

    def faults(self, specs: Mapping[KeyPath, HookSpec]) -> list[Fault]:
        """Return which of ``specs`` match nothing, with the nearest names, if that is an error."""
        if not self._is_strict or self.model is None:
            return []
        told = {place: self.unmatched(spec) for place, spec in specs.items() if spec.enabled}
        return [((*place, "target_modules"), text) for place, text in told.items() if text]

    def unmatched(self, spec: HookSpec) -> str:
        """Return why a pattern of ``spec`` matches nothing; empty if each matches something."""
        from hookline.specs.apply_specs import find_sites

        try:
            find_sites(self.model, spec, strict=True)
        except NoMatchError as error:
            return shell_text(error, self._path)
        except HooklineError as error:  # what cannot be hooked there, whatever its name
            return str(error)
        return ""

    def matches(self, spec: HookSpec, report: _Report) -> str:
        """Return the names of what ``spec`` matches; warn of a pattern without a match."""
        from hookline.specs.apply_specs import find_sites

        if not spec.enabled:
            return "(not enabled)"
        if self.model is None:
            return "(no --model given)"
        if text := self.unmatched(spec):
            report.warn(f"hook {spec.name!r}: {text}")
        places = find_sites(self.model, spec)
        return "nothing" if places is None else ", ".join(name or "(the model)" for name in places.names)


def _check_switch(settings: Mapping[str, Any], report: _Report) -> None:
    """Say whether the hooks of a server's settings are switched on, and what is not looked at."""
    others = [str(key) for key in settings if key not in ("$schema", "enable_hooks", "hooks", "forward_hooks")]
    switch, hooks = settings.get("enable_hooks"), settings.get("hooks")
    if switch and not hooks:
        report.warn("enable_hooks=True but no 'hooks' specified in server_args.")
    elif hooks and switch is False:
        report.warn("enable_hooks is false: none of 'hooks' is attached.")
    elif hooks and not switch and others:  # it has more than hooks, so that it is for --server-args
        report.warn("a server attaches none of 'hooks' unless its settings say enable_hooks: true.")
    elif hooks and not switch:
        tell("'hooks' are attached by hookline serve --hooks; by --server-args only with enable_hooks: true.")
    if others:
        tell(f"kept for the server, unchecked: {', '.join(others)}")


def _show_specs(specs: Iterable[HookSpec], matcher: _Matcher, report: _Report) -> None:
    """Print a table of ``specs``, with the modules of the model that each matches."""
    rows = []
    for spec in specs:
        matches = matcher.matches(spec, report)
        rows.append((spec.name, spec.on, ", ".join(spec.target_modules), matches))
        report.hooks.append(
            {"name": spec.name, "on": str(spec.on), "target_modules": list(spec.target_modules), "matches": matches}
        )
    if rows:
        print_table("", ("hook", "on", "target modules", "matches"), rows)
