"""Add the hook paths of ``hookline serve`` to ``vllm serve``; an entry point of ``vllm.endpoint_plugins``.

vLLM makes `HookEndpoints` in the process that answers HTTP, if ``VLLM_PLUGINS`` names ``hookline``. It puts ``/hooks``
beside vLLM's own routes, which stay as they are: a request asks in ``vllm_xargs``, and its client fetches the results.
`WorkerCalls` asks all workers over ``collective_rpc``. Needs fastapi and prometheus_client, which vLLM has.

    HOOKLINE_VLLM=1 VLLM_PLUGINS=hookline HOOKLINE_SERVE_TOKEN=s3cret vllm serve models/tiny
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.routing import Route

from hookline.engines.request_options import ClientHook
from hookline.engines.vllm.start_options import StartOptions
from hookline.engines.vllm.vllm_hooks import check_answers, merge_hooks, merge_metrics, merge_results
from hookline.serve.http.app import make_hook_app
from hookline.serve.http.error_answers import Refused, json_response
from hookline.serve.http.generation_routes import base64_data
from hookline.serve.http.hook_routes import PATIENCE_S, HookPaths, metrics_page
from hookline.serve.http.request_gate import Settings

logger = logging.getLogger("hookline.engines.vllm")

_TOKEN: Final = "HOOKLINE_SERVE_TOKEN"
_PATHS: Final = ("/hooks", "/hooks/{id}", "/hooks/results/{key}")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""All of them, so that ours answers those that a path does not take. vLLM's start fails on a route without methods."""
_ADD: Final = "hookline_add"
_COUNTS: Final = ("steps", "eager_steps", "prompt_tokens", "not_computed")
"""Of the engine; each worker counts the same."""


class HookEndpoints:
    """The endpoint plugin.

    Recipe: ``plugin = HookEndpoints(); plugin.attach_router(app); await plugin.init_state(client, app.state, args)``.
    """

    name = "hookline"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._calls: WorkerCalls | None = None

    def attach_router(self, app: Any) -> None:
        """Add the paths of hooks."""
        self._calls = WorkerCalls(endpoint_settings(getattr(app.state.args, "additional_config", None)))
        hooks = make_hook_app(self._calls)
        # First of all: a route of vLLM must not take these paths.
        app.router.routes[:0] = [Route(path, hooks, methods=_METHODS) for path in _PATHS]

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take the engine; None where a server has none, which then refuses hooks."""
        assert self._calls is not None
        self._calls.client = engine_client


def endpoint_settings(additional: Any) -> Settings:
    """Return the settings in ``--additional-config`` (`StartOptions`) and the token of the environment."""
    options = StartOptions.read(additional)
    return Settings(
        token=os.environ.get(_TOKEN) or None,
        protect=options.protect,
        allow=options.allow or ("hookline.factories",),
        export_dir=None if options.export_dir is None else Path(options.export_dir),
        local_only=False,  # vLLM's other paths are open to all that reach its address
    )


class WorkerCalls(HookPaths):
    """The hook paths of a vLLM server. Workers take a call between two steps.

    Recipe: ``calls = WorkerCalls(Settings(token="secret")); calls.client = engine_client; await calls.all()``.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.client: Any = None
        """The engine client of the server; None until it is ready."""
        self._changes = asyncio.Lock()
        """Workers number hooks by themselves: calls that change them come in one order everywhere."""
        self._undoing: asyncio.Future[None] | None = None
        """Kept here, as the event loop does not keep it."""

    def add_to(self, app: Any) -> None:
        """Add the paths to `app`."""
        app.add_api_route("/hooks/metrics", self.show_metrics, methods=["GET"])
        app.add_api_route("/hooks/results/{key}", self.take_results, methods=["GET"])
        super().add_to(app)

    async def all(self) -> list[dict[str, Any]]:
        """Return the attached hooks, with what they have done in all workers together."""
        return merge_hooks(await self._call("hookline_list"))

    async def attach(self, given: ClientHook) -> dict[str, Any]:
        """Attach one hook in all workers, or in none."""
        async with self._changes:
            answers = await self._call(_ADD, [asdict(given)], [*self.settings.allow])
            try:
                return merge_hooks(answers)[0]
            except Exception:
                await self._undo(answers)
                raise

    async def _undo(self, answers: list[dict[str, Any]]) -> None:
        """Remove what workers have attached."""
        for id in {hook["id"] for answer in answers for hook in answer.get("hooks", ())}:
            await self._call("hookline_remove", id)

    async def detach(self, id: str) -> dict[str, Any]:
        """Remove one hook from all workers."""
        async with self._changes:
            return merge_hooks(await self._call("hookline_remove", id))[0]

    async def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Return what the hooks measure in all workers together."""
        return merge_metrics(await self._call("hookline_metrics"))

    async def show_metrics(self) -> Any:
        """Give the counts of hooks and of the workers' steps, in Prometheus' text format; bytes are of all workers."""
        answers = await self._call("hookline_describe")
        check_answers(answers)
        found = [answer["engine"] for answer in answers]
        counts = {name: max(float(each[name]) for each in found) for name in _COUNTS}
        counts["captured_bytes_reserved"] = sum(float(each["captured_bytes"]) for each in found)
        return metrics_page(counts, await self.figures())

    async def take_results(self, key: str) -> Any:
        """Give what a request asked for under the UUID that its client made up, once; an entry for each answer.

        Nothing else has a UUID for a key: results of requests that gave none cannot be had here.
        """
        try:
            known = str(uuid.UUID(key))
        except ValueError:
            raise Refused(404, "Results are kept under the UUID that was sent as key in vllm_xargs.hookline.") from None
        merged = merge_results(await self._call("hookline_take", known))
        # In a thread: a hundred megabytes of states would block all other clients.
        return await asyncio.to_thread(lambda: json_response({"answers": [_to_json(each) for each in merged]}))

    async def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        if self.client is None:
            raise Refused(503, "The engine is not ready; ask /health until it is.", headers={"Retry-After": "2"})
        asked: asyncio.Future[Any] = asyncio.ensure_future(self.client.collective_rpc(method, args=args))
        try:
            return list(await asyncio.wait_for(asyncio.shield(asked), PATIENCE_S))
        except TimeoutError:
            asked.add_done_callback(partial(self._on_late, method))
            raise Refused(503, f"The engine had no time for this within {PATIENCE_S:g} s; try again.") from None
        except Exception as error:
            logger.warning("workers did not answer %s", method, exc_info=error)
            text = f"The workers did not answer ({type(error).__name__}); see the server's log. Do they have hooks"
            raise Refused(503, f"{text} (HOOKLINE_VLLM=1 in the environment)?") from error

    def _on_late(self, method: str, asked: asyncio.Future[list[dict[str, Any]]]) -> None:
        """Take back a hook that workers attached after its client was told that they had no time: a call that is
        under way cannot be cancelled.
        """
        if not asked.cancelled() and asked.exception() is None and method == _ADD:
            self._undoing = asyncio.ensure_future(self._undo(asked.result()))


def _to_json(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of `merge_results` as the answer has it."""
    states = {name: base64_data(layer) for name, layer in merged["states"].items()}
    rest = {name: merged[name] for name in ("request", "hooks", "flags", "silent", "error")}
    return {**rest, "hidden_states": states, "tokens_not_computed": merged["not_computed"]}
