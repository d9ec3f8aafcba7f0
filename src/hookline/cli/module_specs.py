"""Hooks on modules, as far as they can be checked without a model: whether there is what they name.

Takes specs and where they stand from `request` and `check`; what they name is imported, and nothing is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookline.cli.load_object import see_current_folder
from hookline.errors import ConfigError
from hookline.messages import type_name

if TYPE_CHECKING:
    from hookline.config.mistakes import Mistakes, Path

__all__ = ["PlacedSpec", "check_factories", "check_specs", "specs_of_file", "wrong_factory"]

PlacedSpec = tuple[str, Mapping[str, Any]]
"""Where a spec stands, for errors, and the spec."""


def specs_of_file(file: str) -> list[PlacedSpec]:
    """The specs of a file that is there for them: a list, the settings of a server, a run file."""
    from hookline.config.read_settings import read_document
    from hookline.config.run_file import placed_specs

    document = read_document(file)
    return [(document.place(path), spec) for path, spec in placed_specs(document)]


def check_factories(specs: Sequence[PlacedSpec]) -> list[dict[str, Any]]:
    """Return the specs; if a factory is not there, an error tells of all that are not."""
    see_current_folder()
    wrong = [f"{place}: {text}" for place, spec in specs if (text := wrong_factory(spec))]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return [dict(spec) for _, spec in specs]


def check_specs(specs: Sequence[Any], path: Path, mistakes: Mistakes) -> None:
    """Add to `mistakes` why nothing would come of some of `specs`, a list of a file that `path` leads to.

    Only of those that can be specs at all; what is wrong with the others has been told.
    """
    from hookline.specs.hook_spec import HookSpec

    see_current_folder()
    for number, entry in enumerate(specs):
        if HookSpec.faults(entry) or entry.get("enabled") is False:
            continue
        who = f"Hook {mistakes.original((*path, number))[-1]} ({entry.get('name') or 'without a name'})"
        lacking = [key for key in ("target_modules", "hook_factory") if entry.get(key) in (None, [], ())]
        if lacking:
            mistakes.add((*path, number), f"{who} has no {' and no '.join(lacking)}.")
        elif text := wrong_factory(entry):
            mistakes.add((*path, number, "hook_factory"), f"{who}: {text}")


def wrong_factory(spec: Mapping[str, Any]) -> str:
    """Why the factory of a spec cannot be had; empty if it can, or if nothing would be made of the spec."""
    from hookline.specs.hook_spec import resolve_callable

    path = spec.get("hook_factory")
    if path is None or spec.get("enabled") is False:
        return ""
    try:
        factory = resolve_callable(path)
    except ImportError as error:
        return f"{error} (from hook path '{path}')."
    except (AttributeError, ValueError) as error:
        text = str(error)
        return text if text.endswith(".") else f"{text}."
    return "" if callable(factory) else f"Hook factory '{path}' is called with a config, and is {type_name(factory)}."
