"""Attach, list and remove hooks over HTTP: between two forwards, on the engine's own thread. List modules.

The app calls `HookRoutes`, which asks the engine's `LiveHooks`. A spec that comes over HTTP is not
trusted: its factory has to be on the allow-list, its paths in the export folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from hookline import factories
from hookline.engines.live_hooks import LiveHook
from hookline.engines.request_options import ClientHook
from hookline.errors import HooklineError, HookNameError, NotAllowedError, OptionError
from hookline.factories import FILE_OPTIONS
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.error_answers import Refused
from hookline.serve.http.http_settings import Settings
from hookline.serve.http.metrics_page import HookFigures
from hookline.serve.serving_engine import Engine
from hookline.sites.find import find

__all__ = ["HookRoutes", "confined_hook", "shown_hook"]

logger = logging.getLogger("hookline.serve")

_READY: Final = "hookline.factories"
_DEPTH: Final = 32
"""How deep lists and objects of a configuration may lie in each other: what goes in has to come out of ``GET /hooks``,
and Python's own limit lies near 300 there."""


def confined_hook(given: ClientHook, settings: Settings) -> ClientHook:
    """Return the hook to attach, with its paths inside the export folder.

    Raises:
        NotAllowedError: It names a factory or a path that HTTP clients may not use.
        OptionError: There is no such factory, or its configuration is too deep.
    """
    _check_plain([given.name, given.config])
    name = _ready_name(given.hook_factory)
    return given if name is None else replace(given, config=_confined(name, given.config, settings.export_dir))


def _check_plain(value: Any, depth: int = 0) -> None:
    """Raise for a configuration that could not be shown again."""
    if depth > _DEPTH + 1:
        raise OptionError(f"Lists and objects lie more than {_DEPTH} deep in each other.")
    if isinstance(value, str) and any("\ud800" <= each <= "\udfff" for each in value):
        raise OptionError("A text has half a character in it (a lone surrogate).")
    if isinstance(value, dict | list):
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_plain(each, depth + 1)


def shown_hook(hook: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return a hook as clients see it: paths in the export folder are relative to it, as they were sent."""
    if folder is None:
        return dict(hook)
    config, root = dict(hook["config"]), folder.resolve()
    for option in FILE_OPTIONS.get(hook["hook_factory"].replace(":", ".").removeprefix(f"{_READY}."), ()):
        given = config.get(option)
        if isinstance(given, str) and Path(given).is_relative_to(root):
            config[option] = str(Path(given).relative_to(root))
    return {**hook, "config": config}


def _ready_name(path: str) -> str | None:
    """Return the name of the ready-made factory that `path` means; None for any other path.

    The package has more in it than factories, and a prefix would let all of that through.
    """
    dotted = path.replace(":", ".")
    if dotted != _READY and not dotted.startswith(f"{_READY}."):
        return None
    name = dotted.removeprefix(_READY).removeprefix(".")
    if name in FILE_OPTIONS:
        return name
    known = f"there are {', '.join(f'{_READY}:{each}' for each in FILE_OPTIONS)}."
    if "." in name or name in factories.__all__:
        raise NotAllowedError(f"{path!r} is no factory that may be named over HTTP; {known}")
    raise OptionError(f"There is no factory {path!r}; {known}")


def _confined(name: str, config: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return the configuration with its paths inside `folder`, which is also the default folder to write to."""
    found = dict(config)
    for option in FILE_OPTIONS[name]:
        given = found.get(option)
        if given is None and option != "folder":
            continue
        if folder is None:
            raise NotAllowedError(
                f"{name} has a {option}, and the server was started without an export folder (--export-dir; on vLLM, "
                "export_dir in --additional-config), so that hooks which come over HTTP have no files."
            )
        found[option] = str(_inside(folder, "." if given is None else given, option))
    return found


def _inside(folder: Path, given: Any, option: str) -> Path:
    if not isinstance(given, str) or "\0" in given:
        raise OptionError(f"{option} is a path, got {given!r}.")
    root = folder.resolve()
    path = (root / given).resolve()  # links are followed: one that leads out is out
    if path != root and root not in path.parents:
        raise NotAllowedError(f"{option} has to lie in the server's export folder, and {given!r} does not.")
    return path


class HookRoutes:
    """Attach, list and remove live hooks for the routes.

    Recipe: ``await HookRoutes(serving, settings).list()``.
    """

    def __init__(self, serving: Serving, settings: Settings) -> None:
        self._serving = serving
        self._settings = settings

    async def list(self) -> list[dict[str, Any]]:
        """Return the attached hooks."""
        return [self._shown(each) for each in self._serving.ready().hooks.list()]

    async def add(self, given: ClientHook) -> dict[str, Any]:
        """Attach one hook, wholly or not at all."""
        spec = confined_hook(given, self._settings)
        hooks = self._serving.ready().hooks
        try:
            live = await self._serving.change_hooks(partial(hooks.add, spec, allow=self._settings.allow))
        except (Refused, HooklineError):
            raise
        except Exception as error:  # the factory's own, or that of importing it
            logger.info("hook %r was not attached", spec.name, exc_info=error)
            said = f"{type(error).__name__}: {error}".rstrip(".: ")
            raise Refused(400, f"{spec.hook_factory!r} made no hook: {said}.", param="$.hook_factory") from error
        logger.info("hook %s (%s) is attached: %s", live.id, spec.hook_factory, ", ".join(live.matched))
        return self._shown(live)

    async def remove(self, id: str) -> dict[str, Any]:
        """Remove one hook."""
        hooks = self._serving.ready().hooks
        try:
            live = await self._serving.change_hooks(partial(hooks.remove, id))
        except HookNameError as error:
            raise Refused(404, str(error)) from None
        logger.info("hook %s is taken off", id)
        return self._shown(live)

    def _shown(self, live: LiveHook) -> dict[str, Any]:
        return shown_hook(live.to_plain(), self._settings.export_dir)

    async def modules(self, pattern: str) -> Sequence[dict[str, Any]]:
        """Return the modules that `pattern` matches, as ``GET /modules`` shows them."""
        engine = self._serving.ready()
        # In a thread: of a thousand modules it takes milliseconds, for which no other client should wait.
        return await asyncio.to_thread(_modules, engine, pattern)

    async def figures(self) -> Sequence[HookFigures]:
        """Return what ``/metrics`` shows of hooks; nothing while there is no engine."""
        if self._serving.status != "ready":
            return []
        hooks = self._serving.ready().hooks
        metrics = await self._serving.on_engine(hooks.metrics)  # clients may ask as often as they like
        return [(self._shown(each), metrics.get(each.id, {})) for each in hooks.list()]


def _modules(engine: Engine, pattern: str) -> Sequence[dict[str, Any]]:
    return [
        {
            "name": site.name,
            "type": site.type,
            "parameters": site.num_parameters,
            "width": engine.widths.get(site.name),
        }
        for site in find(engine.model, pattern)
    ]
