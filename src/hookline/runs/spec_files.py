"""Read hooks on modules from files: a list of specs, the settings of a server, or a run file that has some.

``hookline serve --hooks`` and the engines call `specs_of_file`, ``hookline check`` calls `spec_faults`, `ServerArgs`
calls `server_settings`. Everything that is wrong is raised at once, each with its path and line. Nothing that a spec
names is imported here: a server decides which code it lets in.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hookline.errors import ConfigError
from hookline.messages import did_you_mean, short_repr, type_name
from hookline.runs.documents import Document, Fault, KeyPath, read_document
from hookline.specs import hook_spec

__all__ = [
    "NO_HOOKS",
    "is_server_file",
    "placed_specs",
    "server_faults",
    "server_settings",
    "spec_faults",
    "specs_of_file",
    "switch_faults",
    "unknown_key",
]

logger = logging.getLogger("hookline.serve")

NO_HOOKS: Final = "enable_hooks=True but no 'hooks' specified in server_args"
_RUN_KEYS: Final = frozenset(
    ("experiment", "strategy", "specs", "trackers", "sinks", "console", "output_dir", "save_checkpoints")
)
"""Keys that a run file has, and no server."""
_LISTS: Final = ("hooks", "forward_hooks")


def specs_of_file(path: str | Path) -> list[dict[str, Any]]:
    """Return the specs of a file of hooks; log if it has none."""
    document = read_document(path)
    values = document.values
    if values is None:
        raise ConfigError(f"{path} is empty; a file of hooks is a list of specs.")
    specs = [spec for _, spec in placed_specs(document)]
    if isinstance(values, dict) and values.get("enable_hooks") and not values.get("hooks"):
        logger.warning(NO_HOOKS)
    elif not specs:
        logger.warning("%s has no hooks that are switched on; nothing is attached from it", path)
    return specs


def placed_specs(document: Document) -> list[tuple[KeyPath, dict[str, Any]]]:
    """Return the hooks on modules of a file that is there for them, each with the path to it.

    ``hooks`` and ``specs`` count unless ``enable_hooks`` is false: the file was asked for by name.
    """
    values = document.values
    if isinstance(values, list):
        document.refuse(spec_faults(values, ()))
        return [((number,), spec) for number, spec in enumerate(values)]
    keys = _LISTS
    if isinstance(values, dict) and "specs" in values:
        keys = (*_LISTS[1:], "specs")  # a run file, whose hooks are names
        document.refuse(spec_faults(values["specs"], ("specs",)))
    else:
        server_settings(document)
    is_off = values.get("enable_hooks") is False
    listed = {key: values.get(key) or () for key in keys if not (is_off and key != "forward_hooks")}
    return [((key, number), spec) for key, specs in listed.items() for number, spec in enumerate(specs)]


def is_server_file(values: Any) -> bool:
    """Return whether these are settings of a server: with hooks on modules, and without keys that only a run has."""
    if not isinstance(values, Mapping) or not _RUN_KEYS.isdisjoint(values):
        return False
    hooks = values.get("hooks")
    is_list_of_specs = isinstance(hooks, list) and not (hooks and all(isinstance(entry, str) for entry in hooks))
    return "enable_hooks" in values or "forward_hooks" in values or is_list_of_specs


def server_settings(document: Document) -> dict[str, Any]:
    """Return the settings of a server, their hooks checked; other keys are as they are."""
    document.refuse(server_faults(document))
    return {key: value for key, value in document.values.items() if key != "$schema"}


def server_faults(document: Document) -> list[Fault]:
    """Return what is wrong with the hooks in the settings of a server."""
    values = document.values
    if values is None:
        raise ConfigError(f"{document.path} is empty; settings of a server have enable_hooks and hooks, at least.")
    if not isinstance(values, dict):
        raise ConfigError(f"{document.path} holds {_kind(values)}; settings of a server are enable_hooks, hooks, ….")
    return switch_faults(values) + [fault for key in _LISTS for fault in spec_faults(values.get(key), (key,))]


def switch_faults(values: Mapping[str, Any]) -> list[Fault]:
    """Return what is wrong with ``enable_hooks`` of a server."""
    switch = values.get("enable_hooks")
    if switch is None or isinstance(switch, bool):
        return []
    return [(("enable_hooks",), f"expected true or false, got {short_repr(switch)}.")]


def spec_faults(values: Any, path: KeyPath) -> list[Fault]:
    """Return what is wrong with a list of specs, which `path` leads to; None is no list, and nothing is wrong."""
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
