"""``hookline hooks [NAME ...]``: what hooks there are, what each does, and what its metrics mean.

Takes names, prints tables of what `HookRegistry` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from tyro.conf import Positional, arg

from hookline.cli.error_messages import DONE
from hookline.cli.parse import parse
from hookline.cli.printing import print_table, tell

__all__ = ["HooksOptions", "command", "describe_hooks", "list_hooks"]


_HEADINGS: Final = {"observer": "observer", "intervention": "intervention"}
"""By kind, what stands above the names."""


@dataclass
class HooksOptions:
    """List the hooks there are; with names, describe their options and metrics.

    Examples:
      hookline hooks
      hookline hooks norms hessian
    """

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="[NAME ...]", help_behavior_hint="")] = ()
    """Hooks to describe, or all, observers, interventions, with_debug; also file.py:Class."""


def command(arguments: Sequence[str]) -> int:
    """List, or describe."""
    options = parse(HooksOptions, arguments, "hooks")
    return describe_hooks(options.names) if options.names else list_hooks()


def list_hooks() -> int:
    """All hooks, those for debugging included, and those that cannot be loaded passed over with a warning."""
    from hookline.cli.screen import messages
    from hookline.training.registry import HookRegistry

    with messages():
        known = HookRegistry.get_all_info()
    for kind, heading in _HEADINGS.items():
        rows = [(name, _what(info)) for name, info in known.items() if info["kind"] == kind]
        if rows:
            print_table("", (heading, "what it does"), rows)
            tell()
    tell(f"{len(known)} hooks. Points, needs, options and metrics of one: hookline hooks NAME")
    return DONE


def _what(info: Any) -> str:
    return f"{info['description']}{' (for debugging)' if info['debug'] else ''}"


def _kind(info: Any) -> str:
    kind = str(info["kind"])
    return f"{kind} (debug)" if info["debug"] else kind


def _needs(info: Any) -> str:
    return ", ".join(need.removeprefix("needs_").replace("_", " ") for need in info["needs"]) or "–"


def describe_hooks(names: Sequence[str]) -> int:
    """What each hook is made of, and what its metrics mean; all but those for debugging if none is named."""
    from hookline.cli.chosen_hooks import known_name
    from hookline.cli.screen import messages
    from hookline.training.registry import HookRegistry

    with messages():
        found = HookRegistry.resolve([known_name(name) for name in names]) if names else HookRegistry.list_all()
        for name in found:
            _describe(name)
    return DONE


def _describe(name: str) -> None:
    from hookline.training.registry import HookRegistry

    info = HookRegistry.get_all_info()[name]
    tell(f"{name}: {info['description']}")
    tell(f"  {_kind(info)}, at {', '.join(info['hook_points']) or 'points of its own'}; needs {_needs(info)}")
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
            kind = "" if one.annotation is one.empty else f": {_text(one.annotation)}"
            shown.append(f"--hook-config {getattr(cls, 'name', '')}.{one.name}=…{kind}{default}")
    return shown


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
