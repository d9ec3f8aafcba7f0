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

from hookline.cli.find import model_at
from hookline.cli.main import DONE
from hookline.cli.screen import messages, shell_text, tell, tell_json, tell_plan
from hookline.errors import HooklineError, NoMatchError, OptionError
from hookline.load import add_current_folder_to_path
from hookline.messages import counted
from hookline.plain import to_plain
from hookline.runs.flags import Show, parse

if TYPE_CHECKING:
    from hookline.runs.documents import Places
    from hookline.runs.flags import KeyPath
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
    from hookline.runs.documents import is_server_file, placed_specs, read_document, refuse

    document = read_document(options.config)
    add_current_folder_to_path()
    plan: dict[str, Any] = {"file": options.config}
    with messages(), contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        model = None if options.model is None else model_at(options.model)
        places: Places = document
        warned: list[str] = []
        if isinstance(document.values, list) or is_server_file(document.values):
            specs = placed_specs(document, is_server=False, even_off=True)
            if isinstance(document.values, dict):
                warned += _of_switch(document.values, plan)
        else:
            specs, places = _of_run(options.config, plan)
        unmatched = {place: _why_unmatched(model, spec, options.model or "") for place, spec in specs.items()}
        if options.no_strict:
            warned += [f"hook {specs[place].name!r}: {text}" for place, text in unmatched.items() if text]
        else:
            refuse(places, [((*place, "target_modules"), text) for place, text in unmatched.items() if text])
        plan["hooks"] = [_row(spec, model) for spec in specs.values()]
    if options.json:
        tell_json("check", plan | {"warnings": warned})
        return DONE
    tell_plan("check", plan, as_json=False)
    for text in warned:
        tell(f"warning: {text}")
    summary = f", but see the {counted(len(warned), 'warning')} above" if warned else ""
    tell(f"{options.config}: nothing is wrong with it{summary}.")
    return DONE


def _of_run(path: str, plan: dict[str, Any]) -> tuple[dict[KeyPath, HookSpec], Places]:
    """Read a run file as a run does before it trains; add what it means to the plan; return its specs."""
    from hookline.runs.build import hook_names
    from hookline.runs.find import make_config
    from hookline.runs.read import read

    run, found, *_ = read([path])
    if found is None:
        plan["command"] = shlex.join(run.command)
    else:
        config = make_config(run, found)
        plan |= {"experiment": found.name, "strategies": found.chosen(run.strategy)}
        plan["config"] = {} if config is None else to_plain(vars(config))
    plan["lifecycle_hooks"] = hook_names(run, found)
    return {("specs", place): spec for place, spec in enumerate(run.specs)}, run.places


def _of_switch(settings: Mapping[str, Any], plan: dict[str, Any]) -> list[str]:
    """Warn if the hooks of a server's settings are switched off; add to the plan what is not looked at."""
    others = [str(key) for key in settings if key not in ("$schema", "enable_hooks", "hooks", "forward_hooks")]
    switch, hooks = settings.get("enable_hooks"), settings.get("hooks")
    plan["unchecked"] = others
    if switch and not hooks:
        return ["enable_hooks=True but no 'hooks' specified in server_args."]
    if hooks and switch is False:
        return ["enable_hooks is false: none of 'hooks' is attached."]
    if hooks and not switch and others:  # it has more than hooks, so that it is for --server-args
        return ["a server attaches none of 'hooks' unless its settings say enable_hooks: true."]
    return []


def _why_unmatched(model: Any, spec: HookSpec, path: str) -> str:
    """Return why a pattern of ``spec`` matches nothing; empty if each matches something, or there is no model."""
    from hookline.specs.apply_specs import find_sites

    if model is None or not spec.enabled:
        return ""
    try:
        find_sites(model, spec, strict=True)
    except NoMatchError as error:
        return shell_text(error, path)
    except HooklineError as error:  # what cannot be hooked there, whatever its name
        return str(error)
    return ""


def _row(spec: HookSpec, model: Any) -> dict[str, Any]:
    from hookline.specs.apply_specs import find_sites

    matches = "(not enabled)" if not spec.enabled else "(no --model given)"
    if spec.enabled and model is not None:
        sites = find_sites(model, spec)
        matches = "nothing" if sites is None else ", ".join(name or "(the model)" for name in sites.names)
    return {"name": spec.name, "on": str(spec.on), "target_modules": list(spec.target_modules), "matches": matches}
