"""Check token and origin and bound the body of each request, before FastAPI sees it.

uvicorn calls `Gate`, which calls the app with what `Settings` lets through. It is outside of FastAPI because FastAPI
reads the whole body first: a client without the token could make it read gigabytes, and would learn whether they parse.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hookline.errors import OptionError
from hookline.serve.http.error_answers import Refused, refused_response
from hookline.serve.http.local_access import bearer_token, is_local_name, is_same_token

AT_THE_END: Final = "hookline.at_the_end"
"""In the scope of a request: what to call when it is over, also when its client has gone in the middle of a stream."""
_PIECE: Final = 1 << 18
"""Bytes of an answer that are sent at a time."""

logger = logging.getLogger("hookline.serve")


@dataclass(frozen=True)
class Settings:
    """Settings of the server.

    Recipe::

        settings = hookline.serve.Settings(model_name="tiny", token="secret", protect="everything")
        app = hookline.serve.make_app(engine, settings)
    """

    model_name: str = "model"
    """What ``/v1/models`` calls the model; a request that names another is refused."""
    token: str | None = None
    """The value of ``Authorization: Bearer``; without one, hooks cannot be changed over HTTP."""
    protect: Literal["hooks", "everything"] = "hooks"
    """What needs the token: changing hooks, or everything but ``/health``."""
    allow: tuple[str, ...] = ("hookline.factories",)
    """What paths of factories that come with ``POST /hooks``, which needs the token, may begin with."""
    allow_requests: tuple[str, ...] = ()
    """What paths of factories of hooks of single requests may begin with, beside those of ``hookline.factories`` that
    need no files: of whoever may generate, with any configuration."""
    export_dir: Path | None = None
    """Where files of hooks that come over HTTP have to lie; without it such hooks get no files."""
    local_only: bool = True
    """Whether a request without the token has to name this machine in its ``Host`` and ``Origin``, or any page in a
    browser of this machine could use the server (DNS rebinding). `Server` sets it False at an address of a network."""
    max_body: int = 4 << 20
    """The largest body of a request in bytes: a prompt of a million tokens fits."""
    body_s: float = 30.0
    """How long the next piece of a body may take to come, and that of an answer to be taken."""
    max_sequences: int = 64
    """The most answers (prompts times ``n``) that one request may ask for."""
    drain_s: float = 30.0
    """How long running requests may take after SIGTERM."""

    def __post_init__(self) -> None:
        if self.token is not None and (not self.token or any(each.isspace() for each in self.token)):
            raise OptionError("The token is empty, or has spaces or line breaks in it, which no header can say.")
        if self.protect == "everything" and self.token is None:
            raise OptionError("Everything is to be protected, and there is no token; give one with --token-file FILE.")


class Gate:
    """An ASGI app around another one.

    Recipe: ``app.add_middleware(Gate, settings=settings)``.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_stalled = False

        async def sending(message: Message) -> None:
            nonlocal has_stalled
            for piece in _pieces(message):
                try:
                    async with asyncio.timeout(self._settings.body_s):
                        await send(piece)
                except TimeoutError:
                    has_stalled = True
                    raise

        try:
            await self._through(scope, receive, sending)
        except Exception:
            if not has_stalled:
                raise
            logger.warning("a client took nothing of its answer for %g s, and is cut off", self._settings.body_s)
        finally:
            for act in scope.get(AT_THE_END, ()):
                act()

    async def _through(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_sender(self._settings, scope)
            body: bytes | None = await self._read(receive)
        except Refused as refused:  # uvicorn drops what is still sent, so that the client reads the answer
            await refused_response(refused)(scope, receive, send)
            return

        async def replay() -> Message:
            nonlocal body
            if body is None:  # what comes now is the end of the connection, whenever that is
                return await receive()
            message, body = {"type": "http.request", "body": body, "more_body": False}, None
            return message

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes:
        """Return the body of a request; raise for one that is too large or too slow."""
        settings, body, is_over = self._settings, bytearray(), False
        while not is_over:
            try:
                async with asyncio.timeout(settings.body_s):
                    message = await receive()
            except TimeoutError:
                text = f"Nothing came of the body for {settings.body_s:g} s; send it again."
                raise Refused(408, text, headers={"Connection": "close"}) from None
            if message["type"] == "http.disconnect":
                raise Refused(400, "The connection ended before the body did.")
            body += message.get("body", b"")
            if len(body) > settings.max_body:
                text = f"The body is larger than {settings.max_body} bytes. Send less at once, or start the server with"
                raise Refused(413, f"{text} a larger --max-body.")
            is_over = not message.get("more_body", False)
        return bytes(body)


_OPEN: Final = "/health"
"""What a load balancer asks, which has no token."""


def _check_sender(settings: Settings, scope: Scope) -> None:
    """Raise for a request without the token where it needs one, and for one of another site where it needs none.

    Called before the body is read.
    """
    path = _route_path(scope)
    if path == _OPEN:
        return
    changes_hooks = f"{path}/".startswith("/hooks/") and scope["method"] not in ("GET", "HEAD", "OPTIONS")
    if changes_hooks or settings.protect == "everything":
        _check_token(settings.token, _header(scope, b"authorization"))
    elif settings.local_only:
        for name in ("Host", "Origin"):
            value = _header(scope, name.lower().encode())
            if value is not None and not is_local_name(value.decode("latin-1")):
                raise Refused(
                    403,
                    f"The header {name} names another machine, and this server answers only its own without a token. "
                    "Ask for localhost; behind a proxy, start it with a token and --protect everything (of an app of "
                    "your own: Settings(local_only=False)).",
                )


def _check_token(token: str | None, authorization: bytes | None) -> None:
    if token is None:
        raise Refused(
            403,
            "Hooks cannot be changed over HTTP: the server was started without a token. "
            "Start it with HOOKLINE_SERVE_TOKEN=TOKEN in its environment (or hookline serve with --token-file FILE), "
            "and send 'Authorization: Bearer TOKEN'.",
        )
    if authorization is None or not is_same_token(bearer_token(authorization), token):
        wrong = "The request has no token" if authorization is None else "The token is not the server's"
        text = f"{wrong}; send the header 'Authorization: Bearer TOKEN'."
        raise Refused(401, text, headers={"WWW-Authenticate": "Bearer"})


def _pieces(message: Message) -> Iterator[Message]:
    """Yield a body in pieces: the server takes the next when the client has taken most of those before, so that an
    answer is over, and what it holds let go, when it is sent.
    """
    body = message.get("body", b"")
    for start in range(0, len(body) - _PIECE, _PIECE):
        yield {"type": message["type"], "body": body[start : start + _PIECE], "more_body": True}
    yield {**message, "body": body[(len(body) - 1) // _PIECE * _PIECE :]} if len(body) > _PIECE else message


def _header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header; both values of one that comes twice, which is no token and no number."""
    found = [value for key, value in scope["headers"] if key == name]
    return b", ".join(found) if found else None


def _route_path(scope: Scope) -> str:
    """Return the path that routes are chosen by: without that of a mount or a proxy (``--root-path``), if it has it."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path
