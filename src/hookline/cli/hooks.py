"""List the hooks there are, or describe some: ``hookline hooks [NAME ...]``.

`main` calls `hooks`, and ``hookline run --hooks-list`` calls `show_hooks`; they print what `HookRegistry` knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hookline.cli.main import DONE
from hookline.cli.screen import messages, print_table, tell, tell_json, tell_plan
from hookline.runs.flags import Show, parse

__all__ = ["HooksOptions", "hooks", "show_hooks"]


@dataclass
class HooksOptions:
    """List the hooks there are; with names, describe their options and metrics.

    Examples:
      hookline hooks
      hookline hooks norms hessian
      hookline hooks --json
    """

    names: Annotated[tuple[str, ...], Show("[NAME ...]", is_word=True)] = ()
    """Hooks to describe, or all, observers, interventions, with_debug; also file.py:Class."""
    json: bool = False
    """Print options and metrics of these hooks, or of all, as JSON."""


def hooks(arguments: Sequence[str]) -> int:
    """List all hooks, or describe those that are named."""
    options = parse(HooksOptions, arguments, "hooks")
    return show_hooks(options.names or None, as_json=options.json)


def show_hooks(names: Sequence[str] | None, *, as_json: bool) -> int:
    """Describe the hooks ``names``, or all but those for debugging if it is empty; list all hooks if it is None."""
    with messages():
        if as_json:
            found = _resolved(names) if names else list(_all_hooks())
            tell_json("hooks", {"hooks": [_facts(name) for name in found]})
        elif names is None:
            _list(_all_hooks())
        else:
            for name in _resolved(names):
                tell_plan("hooks", _facts(name), as_json=False)
    return DONE


def _list(known: dict[str, Any]) -> None:
    for kind in ("observer", "intervention"):
        rows = [
            (name, f"{info['description']}{' (for debugging)' * info['debug']}")
            for name, info in known.items()
            if info["kind"] == kind
        ]
        if rows:
            print_table("", (kind, "what it does"), rows)
            tell()
    tell(f"{len(known)} hooks. Points, needs, options and metrics of one: hookline hooks NAME")


def _all_hooks() -> dict[str, Any]:
    """Return what is known of all hooks, those for debugging too; a warning names those that cannot be loaded."""
    from hookline.lifecycle.registry import HookRegistry

    return HookRegistry.get_all_info()


def _resolved(names: Sequence[str]) -> list[str]:
    """Return the hooks that ``names`` stand for; all but those for debugging if none is named."""
    from hookline.lifecycle.registry import HookRegistry
    from hookline.runs.build import known_hook

    return [hook for name in names for hook in known_hook(name)] if names else HookRegistry.list_all()


def _facts(name: str) -> dict[str, Any]:
    """Return everything that is known of a hook, as JSON."""
    from hookline.lifecycle.registry import HookRegistry

    parameters = inspect.signature(HookRegistry.get(name)).parameters.values()
    return {
        "name": name,
        **HookRegistry.get_info(name),
        "options": [_option(one) for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)],
        "metrics": [
            {"name": m.name, "description": m.description, "formula": m.formula, "sign_info": m.sign_info}
            for m in HookRegistry.describe(name)
        ],
    }


def _option(one: inspect.Parameter) -> dict[str, str]:
    """Return name, type and default of an option as text; empty where there is none."""
    hint = one.annotation if isinstance(one.annotation, str) else inspect.formatannotation(one.annotation)
    return {
        "name": one.name,
        "type": "" if one.annotation is one.empty else hint,
        "default": "" if one.default is one.empty else str(one.default),
    }
