"""Check a run file, a list of hook specs or the settings of a server: ``hookline check``.

`main` calls `check`, which attaches and writes nothing, but imports what the file names. Options of factories are tried
where a factory says how, as those of hookline do; others are not called. With ``--model`` it also makes the model.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from hookline.cli.json_output import tell_json
from hookline.cli.main import DONE
from hookline.cli.named_model import model_at
from hookline.cli.parse import parse
from hookline.cli.run_hooks import check_specs
from hookline.cli.screen import print_table, tell
from hookline.config.load_object import add_current_folder_to_path
from hookline.config.run_options import flag
from hookline.errors import ConfigError, HooklineError, OptionError

if TYPE_CHECKING:
    from hookline.cli.run_hooks import HookObjects
    from hookline.cli.run_request import Request
    from hookline.config.read_settings import Document
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
    """

    config: Annotated[Positional[str | None], flag("FILE")] = None
    """The file: .yaml, .toml, .json."""
    model: Annotated[str | None, flag("FILE:MODEL")] = None
    """Show what the patterns match in this model."""
    json: bool = False
    """Print JSON; what is said otherwise goes to the standard error."""


def check(arguments: Sequence[str]) -> int:
    """Print what a file means, or raise one error with everything that is wrong with it."""
    options = parse(CheckOptions, arguments, "check")
    if options.config is None:
        raise OptionError("hookline check needs a file: hookline check run.yaml.")
    from hookline.config.read_settings import read_document
    from hookline.config.spec_files import is_server_file

    document = read_document(options.config)
    add_current_folder_to_path()
    report = _Report()
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        model = None if options.model is None else model_at(options.model)
        if isinstance(document.values, list):
            _show_specs(_valid_list(document), model, report)
        elif is_server_file(document.values):
            _check_server(document, model, report)
        else:
            request = _check_run(options.config)
            _show_specs(request.settings.specs, model, report)
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


def _valid_list(document: Document) -> list[dict[str, Any]]:
    """Return the specs of ``document``, which is a list of them; raise one error with all mistakes."""
    from hookline.config.mistakes import Mistakes
    from hookline.config.spec_files import list_of_specs

    mistakes = Mistakes.of(document)
    specs = list_of_specs(document, mistakes)
    check_specs(specs, (), mistakes)
    mistakes.check()
    return specs


def _check_server(document: Document, model: Any, report: _Report) -> None:
    from hookline.config.mistakes import Mistakes
    from hookline.config.spec_files import server_settings

    mistakes = Mistakes.of(document)
    settings = server_settings(document, mistakes)
    lists = {key: settings.get(key) for key in ("hooks", "forward_hooks")}
    for key, specs in lists.items():
        check_specs(specs if isinstance(specs, list) else (), (key,), mistakes)
    mistakes.check()
    _show_specs([spec for specs in lists.values() for spec in specs or ()], model, report)
    if settings.get("hooks") and not settings.get("enable_hooks"):
        report.warn("a server attaches none of 'hooks' unless it says enable_hooks: true.")
    if settings.get("enable_hooks") and not settings.get("hooks"):
        report.warn("enable_hooks=True but no 'hooks' specified in server_args.")
    others = [str(key) for key in settings if key not in ("enable_hooks", "hooks", "forward_hooks")]
    if others:
        tell(f"kept for the server, unchecked: {', '.join(others)}")


def _show_specs(specs: Sequence[Mapping[str, Any]], model: Any, report: _Report) -> None:
    """Print a table of ``specs``, which are checked already, with the modules of ``model`` that each matches."""
    from hookline.specs.hook_spec import HookSpec

    rows = []
    for entry in specs:
        spec = HookSpec.from_dict(entry)
        matches = _matches(model, spec, report)
        rows.append((spec.name, spec.on, ", ".join(spec.target_modules), matches))
        report.hooks.append(
            {"name": spec.name, "on": str(spec.on), "target_modules": list(spec.target_modules), "matches": matches}
        )
    if rows:
        print_table("", ("hook", "on", "target modules", "matches"), rows)


def _matches(model: Any, spec: HookSpec, report: _Report) -> str:
    if not spec.enabled:
        return "(not enabled)"
    if model is None:
        return "(no --model given)"
    from hookline.specs.apply_specs import find_sites

    try:
        places = find_sites(model, spec)
    except HooklineError as error:  # what cannot be hooked there, whatever its name
        raise ConfigError(f"Hook {spec.name!r}: {error}") from error
    if places is None:
        patterns = ", ".join(map(repr, spec.target_modules))
        report.warn(f"hook {spec.name!r} would go nowhere: nothing matches {patterns}.")
        return "nothing"
    for pattern in spec.target_modules:
        if find_sites(model, replace(spec, target_modules=(pattern,), exclude=None)) is None:
            report.warn(f"hook {spec.name!r}: nothing matches {pattern!r}.")
    return ", ".join(name or "(the model)" for name in places.names)
