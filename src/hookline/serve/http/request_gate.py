"""Check the token, bound the body and measure the time of each request, before FastAPI sees it.

uvicorn calls `Gate`, which calls the app. It is outside of FastAPI because FastAPI reads the whole body first: a
client without the token could make it read gigabytes, and would learn whether they parse.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import suppress
from typing import Any, Final

from hookline.serve.http.error_answers import Refused, error_body, to_json
from hookline.serve.http.http_settings import Settings, check_access, check_local

__all__ = ["AT_THE_END", "Gate"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
Observe = Callable[[str, str, int, float], None]
"""Takes method, route, status and seconds of every request."""

AT_THE_END: Final = "hookline.at_the_end"
"""In the scope of a request: what to call when it is over, also when its client has gone in the middle of a stream."""
_PIECE: Final = 1 << 18
"""Bytes of an answer that are sent at a time."""
_DROP_FACTOR: Final = 4
"""Of a body that is too large, so many times the limit is read and dropped before the connection is closed: a client
that is still sending would get a reset connection instead of the answer."""

logger = logging.getLogger("hookline.serve")


class Gate:
    """An ASGI app around another one.

    Recipe: ``app.add_middleware(Gate, settings=settings, observe=metrics.observe)``.
    """

    def __init__(self, app: Asgi, settings: Settings, observe: Observe) -> None:
        self._app = app
        self._settings = settings
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status, has_stalled = 500, False

        async def noting(message: Message) -> None:
            nonlocal status, has_stalled
            if message["type"] == "http.response.start":
                status = message["status"]
            for piece in _pieces(message):
                try:
                    async with asyncio.timeout(self._settings.body_s):
                        await send(piece)
                except TimeoutError:
                    has_stalled = True
                    raise

        try:
            await self._through(scope, receive, noting)
        except Exception:
            if not has_stalled:
                raise
            logger.warning("a client took nothing of its answer for %g s, and is cut off", self._settings.body_s)
        finally:
            for act in scope.get(AT_THE_END, ()):
                act()
            self._observe(scope["method"], _route(scope), status, time.perf_counter() - start)

    async def _through(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _LimitedBody(receive, self._settings)
        try:
            method, path = scope["method"], _route_path(scope)
            check_access(self._settings, method, path, _header(scope, b"authorization"))
            names = {"Host": _header(scope, b"host"), "Origin": _header(scope, b"origin")}
            check_local(self._settings, method, path, names)
            body.check_announced(_header(scope, b"content-length"))
        except Refused as refused:
            await body.drop_rest()
            await _answer(send, refused)
            return

        async def unless_refused(message: Message) -> None:
            if body.refused is None:
                await send(message)

        try:
            await self._app(scope, body.receive, unless_refused)
        except Exception:
            if body.refused is None:
                raise
        if body.refused is not None:
            await body.drop_rest()
            await _answer(send, body.refused)


class _LimitedBody:
    """Read the body of a request, and bound its size and time."""

    def __init__(self, receive: Receive, settings: Settings) -> None:
        self._receive = receive
        self._limit = settings.max_body
        self._patience_s = settings.body_s
        self._seen = 0
        self._has_ended = False
        self.refused: Refused | None = None
        """Why it is not taken, once that is known."""

    def check_announced(self, length: bytes | None) -> None:
        """Raise for a body that says it is too large."""
        if length is not None and length.isdigit() and int(length) > self._limit:
            raise self._too_large()

    async def receive(self) -> Message:
        """Return the next piece; raise for a body that is too large or too slow.

        What came of such a body may be valid JSON, and must not be done; what FastAPI answers to it is not sent.
        """
        if self._has_ended:  # what comes now is the end of the connection, whenever that is
            return await self._receive()
        try:
            message = await self._next()
        except TimeoutError:
            text = f"Nothing came of the body for {self._patience_s:g} s; send it again."
            self.refused = Refused(408, text, headers={"Connection": "close"})
            raise self.refused from None
        if self._seen > self._limit:
            self.refused = self._too_large()
            raise self.refused
        return message

    async def drop_rest(self) -> None:
        """Read on for a while and keep nothing, so that the client is there for the answer."""
        with suppress(TimeoutError):
            while not self._has_ended and self._seen <= _DROP_FACTOR * self._limit:
                await self._next()

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(self._patience_s):
                message = await self._receive()
        except TimeoutError:
            self._has_ended = True
            raise
        self._seen += len(message.get("body", b""))
        self._has_ended = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    def _too_large(self) -> Refused:
        return Refused(
            413,
            f"The body is larger than {self._limit} bytes. Send less at once, or start the server with a larger "
            "--max-body.",
            headers={"Connection": "close"},
        )


def _pieces(message: Message) -> Iterator[Message]:
    """Yield a body in pieces: the server takes the next when the client has taken most of those before, so that an
    answer is over, and what it holds let go, when it is sent.
    """
    body = message.get("body", b"")
    for start in range(0, len(body) - _PIECE, _PIECE):
        yield {"type": message["type"], "body": body[start : start + _PIECE], "more_body": True}
    yield {**message, "body": body[(len(body) - 1) // _PIECE * _PIECE :]} if len(body) > _PIECE else message


async def _answer(send: Send, refused: Refused) -> None:
    content = to_json(error_body(refused))
    headers = {"content-type": "application/json", "content-length": str(len(content)), **refused.headers}
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": raw})
    await send({"type": "http.response.body", "body": content})


def _header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header; both values of one that comes twice, which is no token and no number."""
    found = [value for key, value in scope["headers"] if key == name]
    return b", ".join(found) if found else None


def _route_path(scope: Scope) -> str:
    """Return the path that routes are chosen by: without that of a mount or a proxy (``--root-path``), if it has it."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _route(scope: Scope) -> str:
    """Return the route as it is declared, so that no client can invent new series of metrics."""
    return str(getattr(scope.get("route"), "path", "other"))
