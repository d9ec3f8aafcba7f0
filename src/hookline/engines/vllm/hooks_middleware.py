"""Take ``hooks`` out of the bodies of requests to ``vllm serve``, and put hidden states into the answers.

The endpoint plugin puts `RequestHooksMiddleware` before the routes of vLLM. What a request wants goes to the workers in
``vllm_xargs``; what they have gathered is asked of `WorkerCalls` when the answer is whole. Other requests pass through
untouched. The middleware also checks the token where everything needs it, and adds hooks to ``/metrics``.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from hookline.engines.vllm.answer_states import AnswerWriter
from hookline.engines.vllm.worker_calls import WorkerCalls
from hookline.serve.http.error_answers import Refused, error_body, refusal_from_error, refusal_from_validation, to_json
from hookline.serve.http.http_settings import Settings, check_access
from hookline.serve.http.metrics_page import HookFigures, Metrics
from hookline.serve.http.request_bodies import KEYS, HiddenStatesBody, RequestHooks
from hookline.serve.http.request_gate import Asgi, Message, Receive, Scope, Send

__all__ = ["EngineRequestHooks", "EngineStatesBody", "RequestHooksMiddleware", "StatesRequest", "read_request"]

logger = logging.getLogger("hookline.engines.vllm")

_GENERATE: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
_METRICS: Final = "/metrics"
_NAME: Final = b"x-request-id"
_XARGS: Final = "vllm_xargs"
_OPTION: Final = "hookline"
"""The key of ``vllm_xargs`` and ``SamplingParams.extra_args`` that workers read."""


class EngineStatesBody(HiddenStatesBody):
    """The hidden states of this request to send back."""

    window: Annotated[list[int | None], Field(min_length=2, max_length=2)] | None = None
    """First position and the one behind the last, such as ``[-8, null]``; negative ones count from the end of the
    prompt."""
    bypass_cache: bool = False
    """Compute the whole prompt: what comes from the prefix cache passes no hook, and has no states."""


class EngineRequestHooks(RequestHooks):
    """Hooks that live for this one request."""

    hidden_states: EngineStatesBody | None = None
    """Send these hidden states back."""
    hooks: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=64)] | None = None
    """Attach these specs for this request alone: they see its rows, and change them alone."""
    key: str | None = None
    """What hooks for single requests call this one, if it asks for nothing itself."""


@dataclass(frozen=True)
class StatesRequest:
    """A request that wants hidden states, as it goes on to vLLM."""

    name: str
    """What vLLM is told to call it."""
    keys: tuple[str, ...]
    """The ids under which workers keep the states of each choice, in the order of choices."""
    body: bytes
    states_as: Literal["base64", "safetensors"]


def read_request(content: bytes, *, path: str = "/v1/completions", name: str | None = None) -> StatesRequest | None:
    """Return the request that goes to vLLM instead of the body `content`; None if it asks for no hooks.

    Args:
        content: The body.
        path: Where it was sent to; vLLM's ids depend on it.
        name: The id that the client gave it. A random end makes it unique: no two requests may mix their states.

    Raises:
        Refused: The hooks are not valid.
    """
    body = _body_with_hooks(content)
    if body is None:
        return None
    options, given = _given_options(body), body.pop("hooks", None)
    if given is not None and options is not None:
        raise Refused(400, f"Hooks come in hooks or in {_XARGS}.{_OPTION}; send one of the two.", param="$.hooks")
    place = "hooks" if options is None else f"{_XARGS}.{_OPTION}"
    wanted = _validated(place, given if options is None else options)
    states = wanted.hidden_states
    if states is None and wanted.hooks is None:
        return None
    if wanted.key is not None:
        raise Refused(400, "A request that gets hooks is named by the header X-Request-Id; leave key out.")
    states_as = "base64" if states is None else states.as_
    if states_as == "safetensors" and body.get("stream"):
        raise Refused(400, "as='safetensors' is a whole body, and a stream has none; ask for base64.")
    unique = "-".join([*([name] if name else []), uuid.uuid4().hex])
    body[_XARGS] = {**(body.get(_XARGS) or {}), _OPTION: json.dumps(_for_workers(wanted))}
    if states is not None and states.bypass_cache:
        body["cache_salt"] = unique  # blocks of another salt are never shared
    return StatesRequest(unique, tuple(_keys(body, path, unique)), to_json(body), states_as)


def _for_workers(wanted: EngineRequestHooks) -> dict[str, Any]:
    """Return the options that workers read, see `request_options`."""
    asked = wanted.model_dump(exclude_none=True)
    if "hidden_states" in asked:
        asked["hidden_states"].pop("as_")
        asked["hidden_states"].pop("bypass_cache")
    return asked


def _body_with_hooks(content: bytes) -> dict[str, Any] | None:
    """Return the body if it asks for hooks in one of the two ways; None if not, or if vLLM is to say what is wrong."""
    if b"hook" not in content:
        return None
    try:
        body = json.loads(content)
    except ValueError:
        return None
    if not isinstance(body, dict) or (body.get("hooks") is None and _given_options(body) is None):
        return None
    return body


def _keys(body: Mapping[str, Any], path: str, name: str) -> list[str]:
    """Return the ids that vLLM gives to each prompt and each answer to it."""
    copies = body.get("n") or 1
    prompt = body.get("prompt")
    is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    count = len(prompt) if is_list and isinstance(prompt, list) else 1
    ids = [f"chatcmpl-{name}"] if "chat" in path else [f"cmpl-{name}-{place}" for place in range(count)]
    if not isinstance(copies, int) or copies == 1:
        return ids
    return [f"{copy}_{id}" for id in ids for copy in range(copies)]


def _given_options(body: Mapping[str, Any]) -> Any:
    """Return what a client has put into ``vllm_xargs`` itself; its values are texts there."""
    xargs = body.get(_XARGS)
    given = xargs.get(_OPTION) if isinstance(xargs, dict) else None
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise Refused(400, f"{_XARGS}.{_OPTION} is no JSON: {error}.", param=f"$.{_XARGS}.{_OPTION}") from None


def _validated(place: str, given: Any) -> EngineRequestHooks:
    try:
        return EngineRequestHooks.model_validate(given)
    except ValidationError as error:
        found = [{**each, "loc": (*place.split("."), *each["loc"])} for each in error.errors()]
        raise refusal_from_validation(found, (*KEYS, "bypass_cache", "window")) from None


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
        method, path = scope["method"], scope["path"]
        try:
            check_access(self._settings, method, path, dict(scope["headers"]).get(b"authorization"))
            if method == "POST" and path in _GENERATE:
                await self._generate(scope, receive, send)
            elif method == "GET" and path == _METRICS:
                await self._with_figures(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Refused as refused:  # before anything was sent
            await _send_whole(send, refused.status, to_json(error_body(refused)), refused.headers)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages = await _read(receive)
        content = b"".join(each.get("body", b"") for each in messages)
        name = dict(scope["headers"]).get(_NAME, b"").decode("latin-1")
        is_whole = messages[-1]["type"] == "http.request"
        asked = read_request(content, path=scope["path"], name=name) if is_whole else None
        if asked is None:
            await self._app(scope, _replay(messages, receive), send)
            return
        writer = AnswerWriter(self._calls, asked.keys, asked.states_as, send)
        headers = [(key, value) for key, value in scope["headers"] if key != _NAME]
        headers = [*_with_length(headers, len(asked.body)), (_NAME, asked.name.encode("latin-1"))]
        scope = {**scope, "headers": headers}
        changed: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]
        try:
            await self._app(scope, _replay(changed, receive), writer.send)
        finally:
            if not writer.has_taken:
                await self._calls.drop_states(asked.keys)

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

    async def _figures(self) -> tuple[Mapping[str, float], Sequence[HookFigures]]:
        try:
            return await self._calls.counts(), await self._calls.figures()
        except Exception as error:  # the metrics of the engine are worth more than ours
            logger.warning("/metrics has no hooks: %s", refusal_from_error(error).message)
            return {}, []


async def _read(receive: Receive) -> list[Message]:
    """Return the messages of the body, to its end or to that of the connection."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


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
