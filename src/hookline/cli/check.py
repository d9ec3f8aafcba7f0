"""``hookline check CONFIG``: whether a run file, or a file of hooks on modules, says what can be done.

Takes a path, prints what it means; with a model, what each pattern matches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from hookline.cli.failures import DONE
from hookline.cli.parse import parse
from hookline.cli.show import print_table, tell
from hookline.errors import OptionError

__all__ = ["CheckOptions", "command"]


@dataclass
class CheckOptions:
    """Check a run file, or a file of hooks on modules (a list, or a server's enable_hooks and hooks).

    Examples:
      hookline check run.yaml
      hookline check hooks.json --model my_file.py:make_model
      hookline check --schema > run.schema.json
    """

    config: Annotated[Positional[str | None], arg(metavar="CONFIG", help_behavior_hint="")] = None
    """The file: .yaml, .toml, .json."""
    model: Annotated[str | None, arg(metavar="FILE:MODEL", help_behavior_hint="")] = None
    """Show what the patterns match in this model."""
    schema: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print the JSON schema of run files, for editors."""


def command(arguments: Sequence[str]) -> int:
    """Check it."""
    options = parse(CheckOptions, arguments, "check")
    from hookline.config.run_file import RunFile

    if options.schema:
        tell(json.dumps(RunFile.model_json_schema(), indent=2))
        return DONE
    if options.config is None:
        raise OptionError("hookline check needs a file: hookline check run.yaml.")
    from hookline.config.read import read_document
    from hookline.config.run_file import HooksFile, read_specs

    document = read_document(options.config)
    specs = read_specs(document)
    keys = set(document.values) if isinstance(document.values, dict) else set()
    if isinstance(document.values, dict) and not keys <= set(HooksFile.model_fields):
        _check_run(options.config)
    if specs:
        _check_specs(specs, None if options.model is None else _model(options.model))
    tell(f"{options.config}: nothing is wrong with it.")
    return DONE


def _check_run(path: str) -> None:
    """A run file: everything that would be found out before training is found out now."""
    from hookline.cli.choose import choose_hooks
    from hookline.cli.destinations import destinations
    from hookline.cli.hook_config import read_hook_config
    from hookline.cli.request import first_look, read_request
    from hookline.cli.screen import messages

    request = read_request(*first_look([path]))
    options, found, settings = request.options, request.found, request.settings
    with messages():
        names = choose_hooks(options.hook.with_hooks, options.hook.hooks, found.hook_sets, found.name)
        read_hook_config((), settings.hook_config, names, settings.place)
        destinations(options.sink, settings.sinks)
    tell(f"experiment  {found.name}, strategies {', '.join(found.chosen(options.training.strategy))}")
    if request.config is not None:
        tell(f"config      {', '.join(f'{name}={value!r}' for name, value in vars(request.config).items())}")
    tell(f"hooks       {', '.join(names) or 'none'}")


def _model(path: str) -> Any:
    from hookline.cli.find import model_at

    return model_at(path)


def _check_specs(specs: Sequence[dict[str, Any]], model: Any) -> None:
    from hookline.hooks.resolve import resolve_callable
    from hookline.hooks.specs import HookSpec

    rows = []
    for number, entry in enumerate(specs):
        spec = HookSpec.from_dict(entry)
        lacking = [key for key in ("target_modules", "hook_factory") if not entry.get(key)]
        if lacking:
            raise OptionError(f"Hook {number} ({spec.name or 'without a name'}) has no {' and no '.join(lacking)}.")
        try:
            resolve_callable(str(entry["hook_factory"]))
        except (ImportError, AttributeError, ValueError) as error:
            raise OptionError(f"Hook {number} ({spec.name}): {error}") from error
        rows.append((spec.name, spec.on, ", ".join(_patterns(spec)), _matches(model, spec)))
    print_table("", ("hook", "on", "target modules", "matches"), rows)


def _patterns(spec: Any) -> Sequence[str]:
    patterns = spec.target_modules
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _matches(model: Any, spec: Any) -> str:
    if model is None:
        return "(no --model given)"
    from hookline.hooks.apply_specs import find_for

    places = find_for(model, spec)
    if places is None:
        tell(f"warning: hook {spec.name!r} would go nowhere: nothing matches {', '.join(map(repr, _patterns(spec)))}.")
        return "nothing"
    return ", ".join(name or "(the model)" for name in places.names)
