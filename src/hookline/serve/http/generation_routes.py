"""Answer requests that generate: whole, or as a stream.

The app calls `answer` and `stream` with a `ParsedRequest`; both run it on the engine, and an `AnswerFormat` makes the
JSON. Hidden states go as base64 in JSON; no pickle anywhere.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse

from hookline.errors import EngineClosed
from hookline.serve.generation_request import Finished
from hookline.serve.http.answer_format import AnswerFormat
from hookline.serve.http.engine_state import AnswerSoFar, RunningRequest, Serving, check_complete
from hookline.serve.http.error_answers import Refused, error_body, to_json
from hookline.serve.http.request_bodies import ParsedRequest
from hookline.serve.http.request_gate import AT_THE_END

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.engines.hidden_states import StatesOfLayer

__all__ = ["NAMED", "answer", "stream"]

NAMED: Final = "X-Request-Id"
"""The header that names a request, and its answer."""


def _states_as_base64(states: Mapping[str, StatesOfLayer]) -> dict[str, Any]:
    """Return hidden states as JSON.

    Recipe: ``torch.frombuffer(bytearray(base64.b64decode(it["data"])), dtype=torch.float32).reshape(it["shape"])``.
    """
    return {
        layer: {**_facts(found), "data": base64.b64encode(_raw(found.values)).decode("ascii")}
        for layer, found in states.items()
    }


def _facts(states: StatesOfLayer) -> dict[str, Any]:
    return {
        "dtype": str(states.values.dtype).removeprefix("torch."),
        "shape": list(states.values.shape),
        "positions": list(states.positions),
    }


def _raw(values: Tensor) -> bytes:
    import torch

    return values.contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""


_GONE = 499
"""Status for the metrics alone: the client has disconnected."""


async def answer(http: HttpRequest, serving: Serving, asked: ParsedRequest, form: AnswerFormat) -> Any:
    """Return the whole answer; if the client disconnects, cancel its sequences."""
    running = await _start(http, serving, asked, every_token=False)
    answers = await _unless_gone(http, running)
    if answers is None:
        return Response(status_code=_GONE)
    if asked.has_states:  # in a thread: a hundred megabytes of them would block all other clients
        return await asyncio.to_thread(_response, asked, form, answers)
    return _response(asked, form, answers)


def _response(asked: ParsedRequest, form: AnswerFormat, answers: list[AnswerSoFar]) -> Any:
    content = to_json(form.whole(answers, [_hooks(answer) for answer in answers]))
    return Response(content, media_type="application/json", headers={NAMED: asked.id})


async def stream(http: HttpRequest, serving: Serving, asked: ParsedRequest, form: AnswerFormat) -> Any:
    """Return server-sent events; the engine has accepted the request before the first, so a refusal has its status."""
    running = await _start(http, serving, asked, every_token=True)
    return StreamingResponse(
        _events(running, form, has_states=asked.has_states),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", NAMED: asked.id},
    )


async def _start(http: HttpRequest, serving: Serving, asked: ParsedRequest, *, every_token: bool) -> RunningRequest:
    running = RunningRequest(asked.requests, every_token=every_token)
    engine = serving.ready()
    http.scope.setdefault(AT_THE_END, []).append(running.end)
    try:
        if asked.has_hooks or asked.has_states:  # in a thread: a thousand patterns take seconds
            await asyncio.to_thread(running.submit, engine, asked.allow)
        else:
            running.submit(engine)
    except EngineClosed:
        serving.has_failed = not serving.is_draining  # it was not closed on purpose
        raise
    return running


async def _events(running: RunningRequest, form: AnswerFormat, *, has_states: bool) -> AsyncIterator[bytes]:
    for each in form.first():
        yield _event(each)
    try:
        async for index, event in running.events():
            hooks = None
            if isinstance(event, Finished):
                check_complete(event)
                answer = running.answers[index]
                hooks = await asyncio.to_thread(_hooks, answer) if has_states else _hooks(answer)
            piece = form.piece(index, event, hooks)
            if piece is not None:
                yield _event(piece)
        for each in form.last(running.answers):
            yield _event(each)
    except Refused as refused:  # the status is long sent: the error is the last event
        yield _event(error_body(refused))
    yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


async def _unless_gone(http: HttpRequest, running: RunningRequest) -> list[AnswerSoFar] | None:
    """Return the answers; None if the client disconnected before they were complete."""
    work = asyncio.ensure_future(running.all())
    gone = asyncio.ensure_future(_until_gone(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


async def _until_gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _hooks(answer: AnswerSoFar) -> Any:
    if answer.finished is None:
        return None
    found: dict[str, Any] = {}
    states = answer.finished.states
    if states is not None:
        found["hidden_states"] = _states_as_base64(states)
    if answer.finished.hooks:
        found["hooks"] = list(answer.finished.hooks)
    if answer.finished.flags:
        found["flags"] = [each.to_plain(stopped=each.stops) for each in answer.finished.flags]
    return found or None
