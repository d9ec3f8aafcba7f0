"""Add the paths of ``hookline serve`` to ``vllm serve``; an entry point of ``vllm.endpoint_plugins``.

vLLM makes `HookEndpoints` in the process that answers HTTP, if ``VLLM_PLUGINS`` names ``hookline``. It puts ``/hooks``
beside vLLM's routes, and `RequestHooksMiddleware` before them. Needs fastapi and prometheus_client, which vLLM has.

    HOOKLINE_VLLM=1 VLLM_PLUGINS=hookline HOOKLINE_SERVE_TOKEN=s3cret vllm serve models/tiny
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final

from hookline.engines.vllm.hooks_middleware import RequestHooksMiddleware
from hookline.engines.vllm.start_options import StartOptions
from hookline.engines.vllm.worker_calls import WorkerCalls
from hookline.errors import OptionError
from hookline.serve.http.hook_paths import make_hook_app
from hookline.serve.http.http_settings import Settings

__all__ = ["HookEndpoints", "endpoint_settings"]

logger = logging.getLogger("hookline.engines.vllm")

_TOKEN: Final = "HOOKLINE_SERVE_TOKEN"
_TOKEN_FILE: Final = "HOOKLINE_SERVE_TOKEN_FILE"
_PATHS: Final = ("/hooks", "/hooks/{id}")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""All of them, so that ours answers those that a path does not take. vLLM's start fails on a route without methods."""


class HookEndpoints:
    """The endpoint plugin.

    Recipe: ``plugin = HookEndpoints(); plugin.attach_router(app); await plugin.init_state(client, app.state, args)``.
    """

    name = "hookline"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._calls: WorkerCalls | None = None

    def attach_router(self, app: Any) -> None:
        """Add the paths of hooks, and the middleware for ``hooks`` in the bodies of requests."""
        from starlette.routing import Route

        settings = endpoint_settings(getattr(app.state.args, "additional_config", None))
        self._calls = WorkerCalls(settings)
        hooks = make_hook_app(self._calls, settings)
        # First of all: a route of vLLM must not take these paths.
        app.router.routes[:0] = [Route(path, hooks, methods=_METHODS) for path in _PATHS]
        app.add_middleware(RequestHooksMiddleware, settings=settings, calls=self._calls)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take the engine; None where a server has none, which then refuses hooks."""
        assert self._calls is not None
        self._calls.client = engine_client
        if engine_client is not None:
            logger.info("hooks over HTTP: %s", await self._calls.describe())


def endpoint_settings(additional: Any) -> Settings:
    """Return the settings in ``--additional-config`` (`StartOptions`) and the token of the environment."""
    options = StartOptions.read(additional)
    return Settings(
        token=_token(),
        protect="everything" if options.protect == "everything" else "hooks",
        allow=options.allow or ("hookline.factories",),
        export_dir=None if options.export_dir is None else Path(options.export_dir),
        max_body=options.max_body,
    )


def _token() -> str | None:
    file = os.environ.get(_TOKEN_FILE)
    if not file:
        return os.environ.get(_TOKEN) or None
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        raise OptionError(
            f"{_TOKEN_FILE}={file} cannot be read: {error.strerror}. Give a file with the token."
        ) from None
