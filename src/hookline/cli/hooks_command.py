"""List the hooks there are, or describe some: ``hookline hooks [NAME ...]``.

`main` calls `hooks`, and `run_command` the functions behind it; they print what `HookRegistry` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional

from hookline.cli.json_output import tell_json
from hookline.cli.main import DONE
from hookline.cli.parse import flag, parse
from hookline.cli.screen import messages, print_table, tell

__all__ = ["HooksOptions", "describe_hooks", "hooks", "list_hooks", "tell_hooks"]


@dataclass
class HooksOptions:
    """List the hooks there are; with names, describe their options and metrics.

    Examples:
      hookline hooks
      hookline hooks norms hessian
      hookline hooks --json
    """

    names: Annotated[Positional[tuple[str, ...]], flag("[NAME ...]")] = ()
    """Hooks to describe, or all, observers, interventions, with_debug; also file.py:Class."""
    json: bool = False
    """Print options and metrics of these hooks, or of all, as JSON."""


def hooks(arguments: Sequence[str]) -> int:
    """List all hooks, or describe those that are named."""
    options = parse(HooksOptions, arguments, "hooks")
    if options.json:
        return tell_hooks(options.names)
    return describe_hooks(options.names) if options.names else list_hooks()


def tell_hooks(names: Sequence[str]) -> int:
    """Print everything that is known of the hooks ``names``, or of all, as JSON."""
    from hookline.lifecycle.registry import HookRegistry

    with messages():
        found = _resolved(names) if names else list(_all_hooks())
        tell_json("hooks", {"hooks": [{"name": name, **_plain(name, HookRegistry.get(name))} for name in found]})
    return DONE


def _plain(name: str, cls: type) -> dict[str, Any]:
    from hookline.lifecycle.registry import HookRegistry

    return {
        **HookRegistry.get_info(name),
        "options": [{"name": one, "type": hint, "default": default} for one, hint, default in _parameters(cls)],
        "metrics": [
            {"name": m.name, "description": m.description, "formula": m.formula, "sign_info": m.sign_info}
            for m in HookRegistry.describe(name)
        ],
    }


def _all_hooks() -> dict[str, Any]:
    from hookline.lifecycle.registry import HookRegistry

    return HookRegistry.get_all_info()


def list_hooks() -> int:
    """Print all hooks, those for debugging too; a warning names those that cannot be loaded."""
    with messages():
        known = _all_hooks()
    for role in ("observer", "intervention"):
        rows = [(name, _what(info)) for name, info in known.items() if info["kind"] == role]
        if rows:
            print_table("", (role, "what it does"), rows)
            tell()
    tell(f"{len(known)} hooks. Points, needs, options and metrics of one: hookline hooks NAME")
    return DONE


def _what(info: Any) -> str:
    return f"{info['description']}{' (for debugging)' if info['debug'] else ''}"


def _role(info: Any) -> str:
    role = str(info["kind"])
    return f"{role} (debug)" if info["debug"] else role


def _needs(info: Any) -> str:
    return ", ".join(need.removeprefix("needs_").replace("_", " ") for need in info["needs"]) or "–"


def describe_hooks(names: Sequence[str]) -> int:
    """Print the options and metrics of each hook; of all but those for debugging if none is named."""
    with messages():
        for name in _resolved(names):
            _describe(name)
    return DONE


def _resolved(names: Sequence[str]) -> list[str]:
    """Return the hooks that ``names`` stand for; all but those for debugging if none is named."""
    from hookline.lifecycle.registry import HookRegistry
    from hookline.runs.look_up import known_hook

    return [hook for name in names for hook in known_hook(name)] if names else HookRegistry.list_all()


def _describe(name: str) -> None:
    from hookline.lifecycle.registry import HookRegistry

    info = HookRegistry.get_info(name)
    tell(f"{name}: {info['description']}")
    tell(f"  {_role(info)}, at {', '.join(info['hook_points']) or 'points of its own'}; needs {_needs(info)}")
    for line in _options(HookRegistry.get(name)):
        tell(f"  {line}")
    rows = [(m.name, m.description, m.formula, m.sign_info) for m in HookRegistry.describe(name)]
    if rows:
        print_table("", ("metric", "what it measures", "formula", "how to read it"), rows)
    else:
        tell("  Its metrics are not described.")


def _options(cls: type) -> list[str]:
    shown = []
    for name, hint, default in _parameters(cls):
        after = f" (default: {default})" if default else ""
        shown.append(f"--hook-config {getattr(cls, 'name', '')}.{name}=…{f': {hint}' if hint else ''}{after}")
    return shown


def _parameters(cls: type) -> list[tuple[str, str, str]]:
    """Return name, type and default of each option of a hook as text; empty where there is none."""
    import inspect

    return [
        (
            one.name,
            "" if one.annotation is one.empty else _text(one.annotation),
            "" if one.default is one.empty else str(one.default),
        )
        for one in inspect.signature(cls).parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
