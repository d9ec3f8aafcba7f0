"""Answer requests that generate: whole, or as a stream.

The app calls `answer` and `stream` with a `ParsedRequest`; both run it on the engine. Each route has an `AnswerFormat`,
which makes the JSON of an answer and of a piece of one. Hidden states go as base64 in JSON; no pickle anywhere.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse

from hookline.errors import EngineClosed
from hookline.serve.generation_request import Finished, Token
from hookline.serve.http.engine_state import AnswerSoFar, RunningRequest, Serving, check_complete
from hookline.serve.http.error_answers import Refused, error_body, to_json
from hookline.serve.http.parsed_request import ParsedRequest
from hookline.serve.http.request_gate import AT_THE_END

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.serve.generation_request import StatesOfLayer

__all__ = ["NAMED", "AnswerFormat", "CompletionFormat", "answer", "stream", "usage_of"]

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


class AnswerFormat:
    """The JSON of the answers of one route."""

    def whole(self, answers: Sequence[AnswerSoFar], hooks: Sequence[Any]) -> Any:
        """Return all answers, ended."""
        raise NotImplementedError

    def piece(self, index: int, answer: AnswerSoFar, event: Token | Finished, hooks: Any) -> Any | None:
        """Return an event; None if there is nothing to send."""
        raise NotImplementedError

    def first(self) -> list[Any]:
        """Return the events before the first token."""
        return []

    def last(self, answers: Sequence[AnswerSoFar]) -> list[Any]:
        """Return the events after the last token."""
        return []


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
            if isinstance(event, Finished):
                check_complete(event)
            answer = running.answers[index]
            hooks = None
            if isinstance(event, Finished):
                hooks = await asyncio.to_thread(_hooks, answer) if has_states else _hooks(answer)
            piece = form.piece(index, answer, event, hooks)
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


def usage_of(asked: ParsedRequest, answers: Sequence[AnswerSoFar]) -> dict[str, int]:
    """Return the counts of tokens, as OpenAI's clients read them."""
    prompt, completion = asked.prompt_tokens, sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


# -- the format of /v1/completions; `chat_format` has that of chat ---------------------------------------------


class CompletionFormat(AnswerFormat):
    """Format answers as OpenAI does."""

    def __init__(
        self,
        asked: ParsedRequest,
        serving: Serving,
        model_name: str,
        *,
        include_usage: bool = False,
        with_ids: bool = False,
    ) -> None:
        self._parsed = asked
        self._with_ids = with_ids
        self._serving = serving
        self._include_usage = include_usage
        self._frame = {
            "id": asked.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._offsets = [len(echo) for echo in asked.echoes]

    def whole(self, answers: Sequence[AnswerSoFar], hooks: Sequence[Any]) -> Any:
        """Return one object with all choices."""
        choices = []
        for index, (answer, found) in enumerate(zip(answers, hooks, strict=True)):
            text = self._parsed.echoes[index] + answer.text
            assert answer.finished is not None
            choices.append(self._choice(index, text, answer.tokens, answer.finished.reason, found))
        return {**self._frame, "choices": choices, "usage": usage_of(self._parsed, answers)}

    def first(self) -> list[Any]:
        """Return the echoed prompts."""
        echoes = enumerate(self._parsed.echoes)
        return [{**self._frame, "choices": [self._choice(i, echo, [], None, None)]} for i, echo in echoes if echo]

    def piece(self, index: int, answer: AnswerSoFar, event: Token | Finished, hooks: Any) -> Any | None:
        """Return a choice with the text that is new."""
        if isinstance(event, Finished):
            choice = self._choice(index, "", [], event.reason, hooks)
        elif event.text or event.logprob is not None or self._with_ids:
            choice = self._choice(index, event.text, [event], None, None)
        else:
            return None  # half a character: nothing to tell yet
        return {**self._frame, "choices": [choice]}

    def last(self, answers: Sequence[AnswerSoFar]) -> list[Any]:
        """Return the usage, if it was asked for."""
        return [{**self._frame, "choices": [], "usage": usage_of(self._parsed, answers)}] if self._include_usage else []

    def _choice(self, index: int, text: str, tokens: Sequence[Token], reason: str | None, hooks: Any) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": self._logprobs(index, tokens), "finish_reason": reason}
        if self._with_ids:
            choice["token_ids"] = [token.id for token in tokens]
        return choice if hooks is None else {**choice, "hooks": hooks}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        wanted = self._parsed.requests[index].logprobs
        if wanted is None or not tokens:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.text)
        return {
            "tokens": [self._serving.word_of(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens] if wanted else None,
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for id, logprob in token.top_logprobs:
            found.setdefault(self._serving.word_of(id), _finite(logprob))  # the likeliest of those that look the same
        return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
