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
from typing import TYPE_CHECKING, Annotated, Any, Final

from hookline.cli.find import model_at
from hookline.cli.main import DONE
from hookline.cli.screen import messages, print_table, shell_text, tell, tell_json
from hookline.errors import ConfigError, HooklineError, NoMatchError, OptionError
from hookline.load import add_current_folder_to_path
from hookline.messages import counted
from hookline.runs.flags import Show, parse

if TYPE_CHECKING:
    from hookline.runs.documents import Fault
    from hookline.runs.flags import KeyPath
    from hookline.specs.hook_spec import HookSpec

__all__ = ["CheckOptions", "check"]

_NO_MODEL: Final = "(no --model given)"


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
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        found = _Found(options)
        if isinstance(document.values, list) or is_server_file(document.values):
            specs = placed_specs(document, is_server=False, even_off=True)
            refuse(document, found.unmatched(specs))
            found.show_specs(specs.values())
            if isinstance(document.values, dict):
                _check_switch(document.values, found)
        else:
            _check_run(options.config, found)
        warned = len(found.warnings)
        summary = f", but see the {counted(warned, 'warning')} above" if warned else ""
        tell(f"{options.config}: nothing is wrong with it{summary}.")
    if options.json:
        tell_json("check", {"file": options.config, "hooks": found.hooks, "warnings": found.warnings})
    return DONE


class _Found:
    """Print and keep what a file means, and what its patterns match in the model of ``--model``, if there is one."""

    def __init__(self, options: CheckOptions) -> None:
        self._options = options
        self._model = None if options.model is None else model_at(options.model)
        self.hooks: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Print a warning: about what is allowed, but probably a mistake."""
        tell(f"warning: {text}")
        self.warnings.append(text)

    def unmatched(self, specs: Mapping[KeyPath, HookSpec]) -> list[Fault]:
        """Return which of ``specs`` match nothing, with the nearest names; with ``--no-strict`` warn of them."""
        told = {place: self._why_unmatched(spec) for place, spec in specs.items() if spec.enabled}
        if not self._options.no_strict:
            return [((*place, "target_modules"), text) for place, text in told.items() if text]
        for place, text in told.items():
            if text:
                self.warn(f"hook {specs[place].name!r}: {text}")
        return []

    def _why_unmatched(self, spec: HookSpec) -> str:
        """Return why a pattern of ``spec`` matches nothing; empty if each matches something."""
        from hookline.specs.apply_specs import find_sites

        if self._model is None:
            return ""
        try:
            find_sites(self._model, spec, strict=True)
        except NoMatchError as error:
            return shell_text(error, self._options.model or "")
        except HooklineError as error:  # what cannot be hooked there, whatever its name
            return str(error)
        return ""

    def show_specs(self, specs: Iterable[HookSpec]) -> None:
        """Print a table of ``specs``, with the modules of the model that each matches."""
        for spec in specs:
            patterns = list(spec.target_modules)
            one = {"name": spec.name, "on": str(spec.on), "target_modules": patterns, "matches": self._matches(spec)}
            self.hooks.append(one)
        _print_rows(("hook", "on", "target modules", "matches"), self.hooks)

    def _matches(self, spec: HookSpec) -> str:
        from hookline.specs.apply_specs import find_sites

        if not spec.enabled:
            return "(not enabled)"
        if self._model is None:
            return _NO_MODEL
        sites = find_sites(self._model, spec)
        return "nothing" if sites is None else ", ".join(name or "(the model)" for name in sites.names)


def _print_rows(columns: Sequence[str], found: Sequence[Mapping[str, Any]]) -> None:
    rows = [[", ".join(one) or "–" if isinstance(one, list) else one for one in row.values()] for row in found]
    if rows:
        print_table("", columns, rows)


def _check_run(path: str, report: _Found) -> None:
    """Check a run file as far as a run does before it trains; print what the file means."""
    from hookline.runs.build import hook_names
    from hookline.runs.find import make_config
    from hookline.runs.read import read

    with messages():
        run, found, *_ = read([path])
    faults = report.unmatched({("specs", place): spec for place, spec in enumerate(run.specs)})
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
    report.show_specs(run.specs)


def _check_switch(settings: Mapping[str, Any], report: _Found) -> None:
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
