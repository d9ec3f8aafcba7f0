"""Take ``hooks`` out of the bodies of requests to ``vllm serve``, and put hidden states into the answers.

The endpoint plugin puts `RequestHooksMiddleware` before the routes of vLLM. What a request wants goes to the workers in
``vllm_xargs``; what they have gathered is asked of `WorkerCalls` when the answer is whole. Other requests pass through
untouched. The middleware also checks the token where everything needs it, and adds hooks to ``/metrics``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hookline.engines.vllm.answer_states import AnswerWriter
from hookline.engines.vllm.asked_hooks import check_asks_nothing, read_request
from hookline.engines.vllm.worker_calls import WorkerCalls
from hookline.serve.engine_counts import EngineCount
from hookline.serve.http.error_answers import Refused, error_body, refusal_from_error, to_json
from hookline.serve.http.http_settings import Settings, check_access
from hookline.serve.http.metrics_page import HookFigures, Metrics
from hookline.serve.http.request_gate import Asgi, LimitedBody, Message, Receive, Scope, Send, route_path

__all__ = ["RequestHooksMiddleware"]

logger = logging.getLogger("hookline.engines.vllm")

_GENERATE: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
_WITHOUT_HOOKS: Final = frozenset(
    {"/v1/responses", "/v1/messages", "/v1/chat/completions/batch", "/inference/v1/generate"}
)
"""Paths of vLLM that give options to workers as well, but whose answers have no place for states."""
_METRICS: Final = "/metrics"
_NAME: Final = b"x-request-id"
_REFUSED: Final = frozenset({400, 401, 404, 422})
"""What vLLM answers to a request that it does not begin."""


class RequestHooksMiddleware:
    """An ASGI app before that of vLLM.

    Recipe: ``app.add_middleware(RequestHooksMiddleware, settings=settings, calls=calls)``.
    """

    def __init__(self, app: Asgi, settings: Settings, calls: WorkerCalls) -> None:
        self._app = app
        self._settings = settings
        self._calls = calls
        self._metrics = Metrics()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, changed or not, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], route_path(scope)
        try:
            check_access(self._settings, method, path, dict(scope["headers"]).get(b"authorization"))
            if method == "POST" and path in _GENERATE:
                await self._generate(path, scope, receive, send)
            elif method == "POST" and path in _WITHOUT_HOOKS:
                await self._pass_without_hooks(scope, receive, send)
            elif method == "GET" and path == _METRICS:
                await self._with_figures(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Refused as refused:  # before anything was sent
            await _send_whole(send, refused.status, to_json(error_body(refused)), refused.headers)

    async def _pass_without_hooks(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages, content = await self._read(scope, receive)
        check_asks_nothing(content)
        await self._app(scope, _replay(messages, receive), send)

    async def _generate(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        messages, content = await self._read(scope, receive)
        name = dict(scope["headers"]).get(_NAME, b"").decode("latin-1")
        is_whole = messages[-1]["type"] == "http.request"
        asked = read_request(content, path=path, name=name, settings=self._settings) if is_whole else None
        if asked is None:
            await self._app(scope, _replay(messages, receive), send)
            return
        writer = AnswerWriter(self._calls, asked.keys, send)
        headers = [(key, value) for key, value in scope["headers"] if key != _NAME]
        headers = [*_with_length(headers, len(asked.body)), (_NAME, asked.name.encode("latin-1"))]
        scope = {**scope, "headers": headers}
        changed: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]
        try:
            await self._app(scope, _replay(changed, receive), writer.send)
        finally:
            has_not_begun = asked.has_one_prompt and writer.status in _REFUSED
            if not writer.has_taken and not has_not_begun:
                await self._calls.drop_states(asked.keys)

    async def _read(self, scope: Scope, receive: Receive) -> tuple[list[Message], bytes]:
        """Return the messages of the body, to its end or to that of the connection, and what they say together."""
        body = LimitedBody(receive, self._settings, option="max_body in --additional-config")
        try:
            body.check_announced(dict(scope["headers"]).get(b"content-length"))
            messages = [await body.receive()]
            while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
                messages.append(await body.receive())
        except Refused:
            await body.drop_rest()
            raise
        return messages, b"".join(each.get("body", b"") for each in messages)

    async def _with_figures(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``/metrics`` with what vLLM has there, and the counts of hooks behind it."""
        parts: list[bytes] = []
        start: Message = {}

        async def keep(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))

        plain = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        await self._app({**scope, "headers": plain}, receive, keep)
        if start.get("status") == 200:
            parts.append(self._metrics.page(*await self._figures()))
        content = b"".join(parts)
        await send({**start, "headers": _with_length(start["headers"], len(content))})
        await send({"type": "http.response.body", "body": content})

    async def _figures(self) -> tuple[Mapping[EngineCount, float], Sequence[HookFigures]]:
        try:
            return await self._calls.counts(), await self._calls.figures()
        except Exception as error:  # the metrics of the engine are worth more than ours
            logger.warning("/metrics has no hooks: %s", refusal_from_error(error).message)
            return {}, []


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """Return a ``receive`` that gives `messages` first."""
    waiting = list(messages)

    async def replayed() -> Message:
        return waiting.pop(0) if waiting else await receive()

    return replayed


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]


async def _send_whole(send: Send, status: int, content: bytes, headers: Mapping[str, str]) -> None:
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    raw += [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
