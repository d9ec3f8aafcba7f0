"""List the hooks there are, or describe some: ``hookline hooks [NAME ...]``.

`main` calls `hooks`, and `run_command` the two functions behind it; they print what `HookRegistry` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional

from hookline.cli.main import DONE
from hookline.cli.parse import parse
from hookline.cli.screen import messages, print_table, tell
from hookline.config.run_options import flag

__all__ = ["HooksOptions", "describe_hooks", "hooks", "list_hooks"]


@dataclass
class HooksOptions:
    """List the hooks there are; with names, describe their options and metrics.

    Examples:
      hookline hooks
      hookline hooks norms hessian
    """

    names: Annotated[Positional[tuple[str, ...]], flag("[NAME ...]")] = ()
    """Hooks to describe, or all, observers, interventions, with_debug; also file.py:Class."""


def hooks(arguments: Sequence[str]) -> int:
    """List all hooks, or describe those that are named."""
    options = parse(HooksOptions, arguments, "hooks")
    return describe_hooks(options.names) if options.names else list_hooks()


def list_hooks() -> int:
    """Print all hooks, those for debugging too; a warning names those that cannot be loaded."""
    from hookline.training.registry import DEBUG_HOOKS, HookRegistry

    with messages():
        known = HookRegistry.get_all_info()
        known |= {name: HookRegistry.get_info(name) for name in DEBUG_HOOKS}
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
    from hookline.config.named_hooks import known_name
    from hookline.training.registry import HookRegistry

    with messages():
        found = HookRegistry.resolve([known_name(name) for name in names]) if names else HookRegistry.list_all()
        for name in found:
            _describe(name)
    return DONE


def _describe(name: str) -> None:
    from hookline.training.registry import HookRegistry

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
    import inspect

    shown = []
    for one in inspect.signature(cls).parameters.values():
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            default = "" if one.default is one.empty else f" (default: {one.default})"
            hint = "" if one.annotation is one.empty else f": {_text(one.annotation)}"
            shown.append(f"--hook-config {getattr(cls, 'name', '')}.{one.name}=…{hint}{default}")
    return shown


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
