"""Answer ``/hooks`` and ``/hooks/{id}``: list, attach and remove hooks of a served model.

The app of ``hookline serve`` adds `HookPaths` to its routes; the adapter of another engine puts `make_hook_app`
beside the engine's own routes. Both give it what attaches and removes: a `HookCalls`. Needs ``hookline[serve]``.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from fastapi import FastAPI

from hookline.serve.http import request_bodies as bodies
from hookline.serve.http.exception_handlers import add_exception_handlers, json_response
from hookline.serve.http.http_settings import Settings
from hookline.serve.http.request_gate import Gate

__all__ = ["ERRORS", "HookCalls", "HookPaths", "make_hook_app"]

_ERROR: Final = {"description": 'An error: `{"error": {"message", "type", "param", "code"}}`.'}
ERRORS: Final[dict[int | str, dict[str, Any]]] = {"4XX": _ERROR, "5XX": _ERROR}
"""What every route may answer, for ``/openapi.json``."""


class HookCalls(Protocol):
    """List, attach and remove hooks on the model of an engine; each hook is a dictionary as ``GET /hooks`` shows it."""

    async def list(self) -> list[dict[str, Any]]:
        """Return the attached hooks."""

    async def add(self, body: bodies.HookBody) -> dict[str, Any]:
        """Attach one hook, wholly or not at all."""

    async def remove(self, id: str) -> dict[str, Any]:
        """Remove one hook."""


def make_hook_app(hooks: HookCalls, settings: Settings) -> Any:
    """Return an ASGI app of the hook paths alone, behind the same gate as those of ``hookline serve``.

    Recipe: ``outer.routes.append(Route("/hooks", make_hook_app(calls, Settings(token="secret"))))``.
    """
    app = FastAPI(title="hookline", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    HookPaths(hooks).add_to(app)
    add_exception_handlers(app)
    return Gate(app, settings, observe=lambda method, route, status, seconds: None)


class HookPaths:
    """Answer each hook path; the docstring of a route is its description in ``/openapi.json``."""

    def __init__(self, hooks: HookCalls) -> None:
        self._hooks = hooks

    def add_to(self, app: Any) -> None:
        """Add the paths to `app`."""
        app.add_api_route("/hooks", self.list_hooks, methods=["GET"], responses=ERRORS)
        app.add_api_route("/hooks", self.add_hook, methods=["POST"], responses=ERRORS, status_code=201)
        app.add_api_route("/hooks/{id}", self.remove_hook, methods=["DELETE"], responses=ERRORS)

    async def list_hooks(self) -> Any:
        """List the attached hooks: on which modules, how often each fired, and what it costs."""
        return json_response({"hooks": await self._hooks.list()})

    async def add_hook(self, body: bodies.HookBody) -> Any:
        """Attach a hook to the running model, between two forwards; wholly, or not at all."""
        return json_response(await self._hooks.add(body), 201)

    async def remove_hook(self, id: str) -> Any:
        """Remove a hook, also one of the server's start; return what it has done until now."""
        return json_response(await self._hooks.remove(id))
