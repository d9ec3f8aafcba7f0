"""Ask all workers of a vLLM server at once, and give one answer: hooks, metrics, hidden states of a request.

The endpoint plugin has one `WorkerCalls`; the hook paths and `RequestHooksMiddleware` call it. It calls the methods of
`HookExtension` over the engine client's ``collective_rpc``. Workers take a call between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from hookline.engines.vllm.merge_answers import (
    check_answers,
    error_of,
    merge_added,
    merge_hook,
    merge_hooks,
    merge_metrics,
)
from hookline.errors import HookNameError
from hookline.serve.engine_counts import EngineCount
from hookline.serve.http.error_answers import Refused
from hookline.serve.http.hook_routes import shown_config, values_from_body
from hookline.serve.http.http_settings import Settings
from hookline.serve.http.metrics_page import HookFigures
from hookline.serve.http.request_bodies import HookBody

__all__ = ["WorkerCalls"]

logger = logging.getLogger("hookline.engines.vllm")

_ADD: Final = "hookline_add"
_PATIENCE_S: Final = 60.0
"""How long a route waits for the workers: they are in a step, and its next comes first."""
_COUNTS: Final = (EngineCount.STEPS, EngineCount.EAGER_STEPS, EngineCount.PROMPT_TOKENS, EngineCount.NOT_COMPUTED)
"""Of the engine; each worker counts the same."""
_Shown = list[dict[str, Any]]  # `WorkerCalls` has a method `list`


class WorkerCalls:
    """The hooks of a vLLM server, as its HTTP routes use them.

    Recipe: ``calls = WorkerCalls(Settings(token="secret")); calls.client = engine_client; await calls.list()``.
    """

    def __init__(self, settings: Settings) -> None:
        self.client: Any = None
        """The engine client of the server; None until it is ready."""
        self._settings = settings
        self._changes = asyncio.Lock()
        """Workers number hooks by themselves: calls that change them come in one order everywhere."""
        self._undoing: asyncio.Future[None] | None = None
        """Kept here, as the event loop does not keep it."""

    async def describe(self) -> str:
        """Return a sentence on what the engine is, for the log."""
        try:
            answers = await self._checked("hookline_describe")
        except Refused as refused:
            return refused.message
        first = answers[0]["engine"]
        kind = "compiled" if first["compiled"] else "eager"
        return f"{len(answers)} workers of vLLM {first['version']}, {kind}, runner {first['runner']}"

    # -- hooks ------------------------------------------------------------------------------------------------

    async def list(self) -> _Shown:
        """Return the attached hooks, with what they have done in all workers together."""
        return [self._shown(each) for each in merge_hooks(await self._checked("hookline_list"))]

    async def add(self, body: HookBody) -> dict[str, Any]:
        """Attach one hook in all workers, or in none."""
        spec = values_from_body(body, self._settings)
        async with self._changes:
            answers = await self._call(_ADD, [spec], [*self._settings.allow], True, "http")
            try:
                added = merge_added(answers)[0]
            except Exception:
                await self._undo(answers)
                raise
        logger.info("hook %s (%s) is attached: %s", added["id"], added["hook_factory"], ", ".join(added["matched"]))
        return self._shown(added)

    async def _undo(self, answers: _Shown) -> None:
        """Remove what workers have attached."""
        for id in {hook["id"] for answer in answers for hook in answer.get("hooks", ())}:
            await self._call("hookline_remove", id)

    async def remove(self, id: str) -> dict[str, Any]:
        """Remove one hook from all workers."""
        async with self._changes:
            answers = await self._call("hookline_remove", id)
        found = [answer["hook"] for answer in answers if answer.get("error") is None]
        if not found:
            error = error_of(answers)
            if isinstance(error, HookNameError):
                raise Refused(404, str(error))
            check_answers(answers)
        logger.info("hook %s is taken off", id)
        return self._shown(merge_hook(found, [int(answer["rank"]) for answer in answers]))

    async def figures(self) -> Sequence[HookFigures]:
        """Return what ``/metrics`` shows of hooks."""
        metrics = merge_metrics(await self._checked("hookline_metrics"))
        return [(each, metrics.get(each["id"], {})) for each in await self.list()]

    async def counts(self) -> dict[EngineCount, float]:
        """Return what ``/metrics`` shows of the workers' steps; bytes are those of all workers."""
        found = [answer["engine"] for answer in await self._checked("hookline_describe")]
        most = {name: max(float(each[name]) for each in found) for name in _COUNTS}
        return {**most, EngineCount.CAPTURED_BYTES_RESERVED: sum(float(each["captured_bytes"]) for each in found)}

    def _shown(self, hook: Mapping[str, Any]) -> dict[str, Any]:
        """Return a hook for clients, which are not told where the export folder is."""
        config = shown_config(hook["hook_factory"], hook["config"], self._settings.export_dir)
        return {**hook, "config": config}

    # -- hidden states of requests --------------------------------------------------------------------------------

    async def take_states(self, key: str) -> _Shown:
        """Return what each worker has gathered for one answer, and forget it there."""
        return await self._call("hookline_take_states", key)

    async def drop_states(self, keys: Iterable[str]) -> None:
        """Forget what workers have gathered, in one call: the client has gone, or the request has failed."""
        try:
            await self._call("hookline_drop_states", [*keys])
        except Refused as refused:
            logger.warning("states of a request that is over could not be dropped: %s", refused.message)

    # -- workers ------------------------------------------------------------------------------------------------

    async def _checked(self, method: str) -> _Shown:
        answers = await self._call(method)
        check_answers(answers)
        return answers

    async def _call(self, method: str, *args: Any) -> _Shown:
        if self.client is None:
            raise Refused(503, "The engine is not ready; ask /health until it is.", headers={"Retry-After": "2"})
        asked: asyncio.Future[_Shown] = asyncio.ensure_future(self.client.collective_rpc(method, args=args))
        try:
            return await asyncio.wait_for(asyncio.shield(asked), _PATIENCE_S)
        except TimeoutError:
            asked.add_done_callback(partial(self._on_late, method))
            raise Refused(503, f"The engine had no time for this within {_PATIENCE_S:g} s; try again.") from None
        except Exception as error:
            logger.warning("workers did not answer %s", method, exc_info=error)
            raise Refused(503, _no_extension(error)) from error

    def _on_late(self, method: str, asked: asyncio.Future[_Shown]) -> None:
        """Take back a hook that workers attached after its client was told that they had no time: a call that is
        under way cannot be cancelled.
        """
        if not asked.cancelled() and asked.exception() is None and method == _ADD:
            self._undoing = asyncio.ensure_future(self._undo(asked.result()))


def _no_extension(error: Exception) -> str:
    if "hookline_" in str(error) and "attribute" in str(error):
        return (
            "The workers of this engine have no hooks. Start it with HOOKLINE_VLLM=1 in the environment, or with "
            "--worker-extension-cls hookline.engines.vllm.extension.HookExtension."
        )
    return f"The workers did not answer ({type(error).__name__}); see the server's log."
