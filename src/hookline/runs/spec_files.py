"""Check hooks on modules in files: a list of specs, or the settings of a server.

`ServerArgs`, `run_file` and the command line call it with a `Document`. Everything that is wrong is raised at once,
each with its path and line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hookline.errors import ConfigError
from hookline.messages import did_you_mean, short_repr, type_name
from hookline.runs.mistakes import Mistakes
from hookline.runs.read import Document, KeyPath
from hookline.specs import hook_spec

__all__ = ["is_server_file", "list_of_specs", "server_settings", "spec_faults", "unknown_key"]

_RUN_KEYS: Final = frozenset(
    ("experiment", "strategy", "specs", "trackers", "sinks", "console", "output_dir", "save_checkpoints")
)
"""Keys that a run file has, and no server."""


def is_server_file(values: Any) -> bool:
    """Return whether these are settings of a server: with hooks on modules, and without keys that only a run has."""
    if not isinstance(values, Mapping) or not _RUN_KEYS.isdisjoint(values):
        return False
    hooks = values.get("hooks")
    is_list_of_specs = isinstance(hooks, list) and not (hooks and all(isinstance(entry, str) for entry in hooks))
    return "enable_hooks" in values or "forward_hooks" in values or is_list_of_specs


def server_settings(document: Document, mistakes: Mistakes | None = None) -> dict[str, Any]:
    """Return the settings of a server, their hooks checked; other keys are as they are.

    What is wrong with the hooks is added to `mistakes`, and raised if there are none given.
    """
    values = document.values
    if values is None:
        raise ConfigError(f"{document.path} is empty; settings of a server have enable_hooks and hooks, at least.")
    if not isinstance(values, dict):
        raise ConfigError(f"{document.path} holds {_kind(values)}; settings of a server are enable_hooks, hooks, ….")
    found = Mistakes.of(document) if mistakes is None else mistakes
    switch = values.get("enable_hooks")
    if switch is not None and not isinstance(switch, bool):
        found.add(["enable_hooks"], f"expected true or false, got {short_repr(switch)}.")
    for key in ("hooks", "forward_hooks"):
        found.add_all(spec_faults(values.get(key), (key,)))
    if mistakes is None:
        found.check()
    return {key: value for key, value in values.items() if key != "$schema"}


def list_of_specs(document: Document, mistakes: Mistakes | None = None) -> list[dict[str, Any]]:
    """Return the specs of a file that is a list of them; what is wrong goes where `server_settings` puts it."""
    found = Mistakes.of(document) if mistakes is None else mistakes
    found.add_all(spec_faults(document.values, ()))
    if mistakes is None:
        found.check()
    return list(document.values)


def spec_faults(values: Any, path: KeyPath) -> list[tuple[KeyPath, str]]:
    """Return the path and a sentence for each thing that is wrong with a list of specs, which `path` leads to.

    None is no list, and nothing is wrong with it.
    """
    if values is None:
        return []
    if not isinstance(values, list):
        return [(path, f"expected a list of hook specs, got {_kind(values)}; write [spec].")]
    return [
        ((*path, number, *keys), text)
        for number, entry in enumerate(values)
        for keys, text in hook_spec.spec_faults(entry)
    ]


def unknown_key(key: Any, known: Sequence[str]) -> str:
    """Return the sentence about an unknown key: which may have been meant, and which there are."""
    return f"nothing is called {key!r} here.{did_you_mean(key, known)} There are: {', '.join(known)}."


def _kind(value: Any) -> str:
    names: dict[type, str] = {list: "a list", dict: "an object", str: "text"}
    return names.get(type(value), type_name(value))
