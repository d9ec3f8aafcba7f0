"""Check a run file, a list of hook specs or the settings of a server: ``hookline check``.

`main` calls `check`, which attaches and writes nothing, but imports what the file names. Options of factories are tried
where a factory says how, as those of hookline do; others are not called. With ``--model`` it also makes the model.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from hookline.cli.json_output import tell_json
from hookline.cli.main import DONE
from hookline.cli.named_model import model_at
from hookline.cli.parse import parse
from hookline.cli.run_hooks import check_specs
from hookline.cli.screen import print_table, tell
from hookline.cli.shell_hints import shell_text
from hookline.errors import HooklineError, NoMatchError, OptionError
from hookline.load import add_current_folder_to_path
from hookline.runs.run_options import flag

if TYPE_CHECKING:
    from hookline.cli.run_hooks import HookObjects
    from hookline.cli.run_request import Request
    from hookline.runs.read import Document
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

    config: Annotated[Positional[str | None], flag("FILE")] = None
    """The file: .yaml, .toml, .json."""
    model: Annotated[str | None, flag("FILE:MODEL")] = None
    """Show what the patterns match in this model; one that matches nothing is an error."""
    no_strict: Annotated[bool, flag()] = False
    """With --model, warn of a pattern that matches nothing, and go on."""
    json: bool = False
    """Print JSON; what is said otherwise goes to the standard error."""


def check(arguments: Sequence[str]) -> int:
    """Print what a file means, or raise one error with everything that is wrong with it."""
    options = parse(CheckOptions, arguments, "check")
    if options.config is None:
        raise OptionError("hookline check needs a file: hookline check run.yaml.")
    from hookline.runs.read import read_document
    from hookline.runs.spec_files import is_server_file

    document = read_document(options.config)
    add_current_folder_to_path()
    report = _Report()
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        model = None if options.model is None else model_at(options.model)
        matcher = _Matcher(model, options.model or "", is_strict=not options.no_strict)
        if isinstance(document.values, list):
            _show_specs(_valid_list(document, matcher), matcher, report)
        elif is_server_file(document.values):
            _check_server(document, matcher, report)
        else:
            request = _check_run(options.config)
            _check_patterns(request, matcher)
            _show_specs(request.settings.specs, matcher, report)
            _check_trackers(request.hook_objects(), model, report)
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


def _check_run(path: str) -> Request:
    """Check the run file at ``path`` as far as a run does before it trains; print what the file means."""
    from hookline.cli.run_request import first_look, read_request
    from hookline.cli.screen import messages

    with messages():
        request = read_request(*first_look([path]))
        objects = request.hook_objects()
    strategies = request.found.chosen(request.options.training.strategy)
    if request.settings.command:
        tell(f"command     {shlex.join(request.settings.command)}")
    else:
        tell(f"experiment  {request.found.name}, strategies {', '.join(strategies)}")
    if request.config is not None:
        tell(f"config      {', '.join(f'{name}={value!r}' for name, value in vars(request.config).items())}")
    tell(f"hooks       {', '.join(objects.names) or 'none'}")
    return request


def _check_trackers(objects: HookObjects, model: Any, report: _Report) -> None:
    """Print a table of the trackers; raise if one finds nothing to count in ``model``."""
    rows = []
    for one in objects.trackers:
        matches = "(no --model given)" if model is None else ", ".join(one.check(model)) or "the layers of its kind"
        rows.append((one.name, one.tracker, ", ".join(one.targets) or "–", matches))
        report.trackers.append(
            {"name": one.name, "counts": one.tracker, "target_modules": list(one.targets), "matches": matches}
        )
    if rows:
        print_table("", ("tracker", "counts", "target modules", "matches"), rows)


# -- hooks on modules ------------------------------------------------------------------------------------------


class _Matcher:
    """Find what the patterns of a spec match in the model of ``--model``, if there is one."""

    def __init__(self, model: Any, path: str, *, is_strict: bool) -> None:
        self.model = model
        self._path = path
        self._is_strict = is_strict

    def error(self, spec: HookSpec) -> str:
        """Return why a pattern of ``spec`` matches nothing, with the nearest names; empty if that is no error."""
        return self.unmatched(spec) if self._is_strict and self.model is not None else ""

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


def _valid_list(document: Document, matcher: _Matcher) -> list[dict[str, Any]]:
    """Return the specs of ``document``, which is a list of them; raise one error with all mistakes."""
    from hookline.runs.mistakes import Mistakes
    from hookline.runs.spec_files import list_of_specs

    mistakes = Mistakes.of(document)
    specs = list_of_specs(document, mistakes)
    check_specs(specs, (), mistakes, matcher.error)
    mistakes.check()
    return specs


def _check_patterns(request: Request, matcher: _Matcher) -> None:
    """Raise one error for all specs of a run file that match nothing."""
    mistakes = request.settings.mistakes
    check_specs(request.settings.specs, ("specs",), mistakes, matcher.error)
    mistakes.check()


def _check_server(document: Document, matcher: _Matcher, report: _Report) -> None:
    from hookline.runs.mistakes import Mistakes
    from hookline.runs.spec_files import server_settings

    mistakes = Mistakes.of(document)
    settings = server_settings(document, mistakes)
    lists = {key: settings.get(key) for key in ("hooks", "forward_hooks")}
    for key, specs in lists.items():
        check_specs(specs if isinstance(specs, list) else (), (key,), mistakes, matcher.error)
    mistakes.check()
    _show_specs([spec for specs in lists.values() for spec in specs or ()], matcher, report)
    others = [str(key) for key in settings if key not in ("enable_hooks", "hooks", "forward_hooks")]
    _check_switch(settings, others, report)
    if others:
        tell(f"kept for the server, unchecked: {', '.join(others)}")


def _check_switch(settings: Mapping[str, Any], others: Sequence[str], report: _Report) -> None:
    """Say whether the hooks of a server's settings are switched on."""
    switch = settings.get("enable_hooks")
    if switch and not settings.get("hooks"):
        report.warn("enable_hooks=True but no 'hooks' specified in server_args.")
    if switch or not settings.get("hooks"):
        return
    if switch is False:
        report.warn("enable_hooks is false: none of 'hooks' is attached.")
    elif others:  # it has more than hooks, so that it is for --server-args
        report.warn("a server attaches none of 'hooks' unless its settings say enable_hooks: true.")
    else:
        tell("'hooks' are attached by hookline serve --hooks; by --server-args only with enable_hooks: true.")


def _show_specs(specs: Sequence[Mapping[str, Any]], matcher: _Matcher, report: _Report) -> None:
    """Print a table of ``specs``, which are checked already, with the modules of the model that each matches."""
    from hookline.specs.hook_spec import HookSpec

    rows = []
    for entry in specs:
        spec = HookSpec.from_dict(entry)
        matches = matcher.matches(spec, report)
        rows.append((spec.name, spec.on, ", ".join(spec.target_modules), matches))
        report.hooks.append(
            {"name": spec.name, "on": str(spec.on), "target_modules": list(spec.target_modules), "matches": matches}
        )
    if rows:
        print_table("", ("hook", "on", "target modules", "matches"), rows)
