"""Read hooks on modules from files: a list of specs, the settings of a server, or a run file that has some.

``hookline serve --hooks`` and the engines call `specs_of_file`, ``hookline check`` and `Run` call `placed_specs`,
`ServerArgs` calls `server_settings`. Everything that is wrong is raised at once, each with its path and line. What a
spec names is imported only for a run: a server decides which code it lets in.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, StrictBool, ValidationInfo

from hookline.errors import ConfigError
from hookline.runs.documents import Document, read_document, validated
from hookline.runs.flags import KeyPath
from hookline.specs.hook_spec import HookSpec

logger = logging.getLogger("hookline.serve")

NO_HOOKS: Final = "enable_hooks=True but no 'hooks' specified in server_args"
_RUN_KEYS: Final = frozenset(("experiment", "strategy", "specs", "sinks", "console", "output_dir", "save_checkpoints"))
"""Keys that a run file has, and no server."""


def _checked(spec: HookSpec, info: ValidationInfo) -> HookSpec:
    if not (info.context or {}).get("is_server"):
        from hookline.runs.look_up import check_spec

        check_spec(spec)
    return spec


Spec = Annotated[HookSpec, AfterValidator(_checked)]
"""A hook on modules whose factory can be imported, and takes its config."""


class ServerFile(BaseModel):
    """The settings of a server: hooks on modules, and other keys, which are the server's own."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)
    enable_hooks: StrictBool | None = None
    """Whether hooks are attached; default false."""
    hooks: list[Spec] | None = None
    """Hooks on modules, attached if enable_hooks is true."""
    forward_hooks: list[Spec] | None = None
    """The same, attached in any case."""


class _RunFile(ServerFile):
    """A run file, whose hooks are names."""

    hooks: Any = None
    specs: list[Spec] | None = None


def specs_of_file(path: str | Path) -> list[dict[str, Any]]:
    """Return the specs of a file of hooks, as it has them; log if there are none."""
    document = read_document(path)
    values = document.values
    if values is None:
        raise ConfigError(f"{path} is empty; a file of hooks is a list of specs.")
    specs = [document.at(place) for place in placed_specs(document, is_server=True)]
    if isinstance(values, dict) and values.get("enable_hooks") and not values.get("hooks"):
        logger.warning(NO_HOOKS)
    elif not specs:
        logger.warning("%s has no hooks that are switched on; nothing is attached from it", path)
    return specs


def placed_specs(document: Document, *, is_server: bool, even_off: bool = False) -> dict[KeyPath, HookSpec]:
    """Return the hooks on modules of a file that is there for them, by the path to each.

    ``hooks`` and ``specs`` count unless ``enable_hooks`` is false: the file was asked for by name.

    Args:
        document: The file.
        is_server: Whether nothing is imported yet.
        even_off: Whether they count in any case.
    """
    if isinstance(document.values, list):
        listed = validated(list[Spec], document.values, document, is_server=is_server)
        return {(number,): spec for number, spec in enumerate(listed)}
    kind, key = (ServerFile, "hooks") if "specs" not in (document.values or ()) else (_RunFile, "specs")
    settings = _validated_server(document, kind, is_server=is_server)
    is_off = settings.enable_hooks is False and not even_off
    lists = {key: () if is_off else getattr(settings, key), "forward_hooks": settings.forward_hooks}
    return {(key, number): spec for key, specs in lists.items() for number, spec in enumerate(specs or ())}


def specs_for_run(path: str | Path) -> list[HookSpec]:
    """Return the hooks on modules of a file, for a run: their factories can be had."""
    return list(placed_specs(read_document(path), is_server=False).values())


def is_server_file(values: Any) -> bool:
    """Return whether these are settings of a server: with hooks on modules, and without keys that only a run has."""
    if not isinstance(values, Mapping) or not _RUN_KEYS.isdisjoint(values):
        return False
    hooks = values.get("hooks")
    is_list_of_specs = isinstance(hooks, list) and not (hooks and all(isinstance(entry, str) for entry in hooks))
    return "enable_hooks" in values or "forward_hooks" in values or is_list_of_specs


def server_settings(document: Document) -> dict[str, Any]:
    """Return the settings of a server, their hooks checked; other keys are as they are."""
    _validated_server(document, ServerFile, is_server=True)
    return {key: value for key, value in document.values.items() if key != "$schema"}


def _validated_server(document: Document, kind: type[ServerFile], *, is_server: bool) -> Any:
    return validated(kind, document.settings("enable_hooks, hooks"), document, is_server=is_server)
