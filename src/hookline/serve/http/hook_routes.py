"""Attaching, listing and removing over HTTP: between two forwards, on the engine's own thread.

Takes bodies from `app`, checks them with `hook_bodies`, asks the engine's `LiveHooks`, hands dictionaries back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from hookline.errors import HooklineError, HookNameError
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.error_answers import Refused
from hookline.serve.http.hook_bodies import figures_of, spec_of, told_of
from hookline.serve.http.http_settings import Settings
from hookline.serve.http.metrics_page import HookFigures
from hookline.serve.http.request_bodies import HookBody
from hookline.serve.live_hooks import LiveHook
from hookline.specs.hook_spec import HookSpec

__all__ = ["Attaching"]

logger = logging.getLogger("hookline.serve")


class Attaching:
    """The live hooks, as the routes use them.

    Recipe: ``await Attaching(serving, settings).list()``.
    """

    def __init__(self, serving: Serving, settings: Settings) -> None:
        self._serving = serving
        self._settings = settings

    async def list(self) -> list[dict[str, Any]]:
        """What is attached."""
        hooks = self._serving.ready().hooks
        return [self._told(each) for each in hooks.list()]

    async def add(self, body: HookBody) -> dict[str, Any]:
        """Attach one; all of it or nothing."""
        spec = spec_of(body, self._settings)
        hooks = self._serving.ready().hooks
        try:
            live = await self._serving.between_forwards(partial(hooks.add, spec, allow=self._settings.allow))
        except (Refused, HooklineError):
            raise
        except Exception as error:  # the factory's own, or that of importing it
            logger.info("hook %r was not attached", spec.name, exc_info=error)
            raise Refused(400, _failed(spec, error), param="$.hook_factory") from error
        told = self._told(live)
        logger.info("hook %s (%s) is attached: %s", told["id"], told["hook_factory"], ", ".join(told["matched"]))
        return told

    async def remove(self, id: str) -> dict[str, Any]:
        """Take one off."""
        hooks = self._serving.ready().hooks
        try:
            told = self._told(await self._serving.between_forwards(partial(hooks.remove, id)))
        except HookNameError as error:
            raise Refused(404, str(error)) from None
        logger.info("hook %s (%s) is taken off", told["id"], told["hook_factory"])
        return told

    def _told(self, live: LiveHook) -> dict[str, Any]:
        return told_of(live, self._settings.export_dir)

    async def figures(self) -> Sequence[HookFigures]:
        """What ``/metrics`` shows; while there is no engine to ask, nothing."""
        if self._serving.status != "ready":
            return []
        hooks = self._serving.ready().hooks
        metrics = await self._serving.on_engine(hooks.metrics)  # anybody may ask, as often as they like
        return [figures_of(each, metrics.get(each.id, {})) for each in hooks.list()]


def _failed(spec: HookSpec, error: Exception) -> str:
    said = str(error).strip().rstrip(".")
    return f"hook_factory {spec.hook_factory!r} made no hook: {type(error).__name__}{f': {said}' if said else ''}."
