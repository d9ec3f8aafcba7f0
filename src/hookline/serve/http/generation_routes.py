"""Answer requests that generate, as OpenAI does: completions and chat completions, whole or as a stream.

The app calls `answer` and `stream` with a `ParsedRequest` and an `AnswerFormat`, which makes the JSON. Hidden states go
as base64 in JSON; no pickle anywhere.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse

from hookline.serve.generation_request import Finished, Token
from hookline.serve.http.engine_state import AnswerSoFar, RunningRequest, Serving, check_complete
from hookline.serve.http.error_answers import Refused, error_body, to_json
from hookline.serve.http.request_bodies import ParsedRequest
from hookline.serve.http.request_gate import AT_THE_END

__all__ = ["NAMED", "AnswerFormat", "ChatFormat", "CompletionFormat", "answer", "base64_data", "stream"]

NAMED: Final = "X-Request-Id"
"""The header that names a request, and its answer."""


_NEVER: Final = -9999.0
"""What OpenAI sends for a token that is all but impossible; JSON has no infinity."""
_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"
_GONE = 499
"""Status for the metrics alone: the client has disconnected."""


async def answer(
    http: HttpRequest, serving: Serving, asked: ParsedRequest, form: AnswerFormat, allow: Sequence[str]
) -> Any:
    """Return the whole answer; if the client disconnects, cancel its sequences."""
    running = await _start(http, serving, asked, allow, every_token=False)
    answers = await _unless_gone(http, running)
    if answers is None:
        return Response(status_code=_GONE)
    if asked.has_states:  # in a thread: a hundred megabytes of them would block all other clients
        return await asyncio.to_thread(_response, asked, form, answers)
    return _response(asked, form, answers)


def _response(asked: ParsedRequest, form: AnswerFormat, answers: list[AnswerSoFar]) -> Any:
    content = to_json(form.whole(answers, [_hooks(answer) for answer in answers]))
    return Response(content, media_type="application/json", headers={NAMED: asked.id})


async def stream(
    http: HttpRequest, serving: Serving, asked: ParsedRequest, form: AnswerFormat, allow: Sequence[str]
) -> Any:
    """Return server-sent events; the engine has accepted the request before the first, so a refusal has its status."""
    running = await _start(http, serving, asked, allow, every_token=True)
    return StreamingResponse(
        _events(running, form, has_states=asked.has_states),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", NAMED: asked.id},
    )


async def _start(
    http: HttpRequest, serving: Serving, asked: ParsedRequest, allow: Sequence[str], *, every_token: bool
) -> RunningRequest:
    """Hand the sequences to the engine; `allow` is what paths of factories of their hooks may begin with."""
    running = RunningRequest(asked.requests, every_token=every_token)
    engine = serving.ready()
    http.scope.setdefault(AT_THE_END, []).append(running.end)
    if asked.has_hooks or asked.has_states:  # in a thread: hundreds of patterns take seconds
        await asyncio.to_thread(running.submit, engine, allow)
    else:
        running.submit(engine)
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
    if answer.finished.states is not None:
        plain = {layer: states.to_plain() for layer, states in answer.finished.states.items()}
        found["hidden_states"] = {layer: base64_data(states) for layer, states in plain.items()}
    if answer.finished.hooks:
        found["hooks"] = list(answer.finished.hooks)
    if answer.finished.flags:
        found["flags"] = [each.to_plain(stopped=each.stops) for each in answer.finished.flags]
    return found or None


def base64_data(states: dict[str, Any]) -> dict[str, Any]:
    """Return hidden states of `StatesOfLayer.to_plain` as JSON has them.

    Recipe: ``torch.frombuffer(bytearray(base64.b64decode(it["data"])), dtype=torch.float32).reshape(it["shape"])``.
    """
    return {**states, "data": base64.b64encode(states["data"]).decode("ascii")}


# -- the JSON of answers ------------------------------------------------------------------------------------------


class AnswerFormat:
    """The JSON of the answers of one route: an object with choices, and usage at its end."""

    whole_object = piece_object = ""
    """What a whole answer, and a piece of one, calls itself."""

    def __init__(self, asked: ParsedRequest, serving: Serving, model_name: str) -> None:
        self._asked = asked
        self._serving = serving
        created = int(time.time())
        self._frame = {"id": asked.id, "object": self.piece_object, "created": created, "model": model_name}

    def whole(self, answers: Sequence[AnswerSoFar], hooks: Sequence[Any]) -> Any:
        """Return one object with all choices, ended."""
        choices = []
        for index, (answer, found) in enumerate(zip(answers, hooks, strict=True)):
            assert answer.finished is not None
            text = self._text(self._asked.echoes[index] + answer.text)
            choices.append(self._choice(index, text, answer.tokens, answer.finished.reason, found))
        return {**self._frame, "object": self.whole_object, "choices": choices, "usage": self._usage(answers)}

    def first(self) -> list[Any]:
        """Return the events before the first token."""
        raise NotImplementedError

    def piece(self, index: int, event: Token | Finished, hooks: Any) -> Any | None:
        """Return an event of a stream: the text that is new, or the end; None if there is nothing to tell yet."""
        if isinstance(event, Finished):
            return self._chunk(index, self._new_text(""), [], event.reason, hooks)
        if not event.text and event.logprob is None and not self._asked.with_ids:
            return None  # half a character
        return self._chunk(index, self._new_text(event.text), [event])

    def last(self, answers: Sequence[AnswerSoFar]) -> list[Any]:
        """Return the events after the last token: the usage, if it was asked for."""
        if not self._asked.include_usage:
            return []
        return [{**self._frame, "choices": [], "usage": self._usage(answers)}]

    def _text(self, text: str) -> dict[str, Any]:
        """Return the part of a choice that has its text."""
        raise NotImplementedError

    def _new_text(self, text: str) -> dict[str, Any]:
        """Return the part of a choice of a stream that has the text that is new."""
        raise NotImplementedError

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""
        raise NotImplementedError

    def _chunk(
        self, index: int, text: dict[str, Any], tokens: Sequence[Token], reason: str | None = None, hooks: Any = None
    ) -> dict[str, Any]:
        return {**self._frame, "choices": [self._choice(index, text, tokens, reason, hooks)]}

    def _choice(
        self, index: int, text: dict[str, Any], tokens: Sequence[Token], reason: str | None, hooks: Any
    ) -> dict[str, Any]:
        wants = self._asked.requests[index].logprobs is not None and bool(tokens)
        logprobs = self._logprobs(index, tokens) if wants else None
        choice = {"index": index, **text, "logprobs": logprobs, "finish_reason": reason}
        if self._asked.with_ids:
            choice["token_ids"] = [token.id for token in tokens]
        return choice if hooks is None else {**choice, "hooks": hooks}

    def _usage(self, answers: Sequence[AnswerSoFar]) -> dict[str, int]:
        prompt, completion = self._asked.prompt_tokens, sum(len(answer.tokens) for answer in answers)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class CompletionFormat(AnswerFormat):
    """Format answers of ``/v1/completions``."""

    whole_object = piece_object = "text_completion"

    def __init__(self, asked: ParsedRequest, serving: Serving, model_name: str) -> None:
        super().__init__(asked, serving, model_name)
        self._offsets = [len(echo) for echo in asked.echoes]

    def first(self) -> list[Any]:
        """Return the echoed prompts."""
        return [self._chunk(i, self._text(echo), []) for i, echo in enumerate(self._asked.echoes) if echo]

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _new_text = _text

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.text)
        return {
            "tokens": [self._serving.word_of(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens] if self._asked.requests[index].logprobs else None,
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for id, logprob in token.top_logprobs:
            found.setdefault(self._serving.word_of(id), _finite(logprob))  # the likeliest of those that look the same
        return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class ChatFormat(AnswerFormat):
    """Format answers of ``/v1/chat/completions``: messages, and in a stream the changes of one."""

    whole_object, piece_object = "chat.completion", "chat.completion.chunk"

    def first(self) -> list[Any]:
        """Return the beginning of each message."""
        begun = {"delta": {"role": "assistant", "content": "", "refusal": None}}
        return [self._chunk(i, begun, []) for i in range(len(self._asked.echoes))]

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _new_text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: Token) -> dict[str, Any]:
        top = [self._word(id, logprob) for id, logprob in token.top_logprobs]
        return {**self._word(token.id, token.logprob), "top_logprobs": top}

    def _word(self, id: int, logprob: float | None) -> dict[str, Any]:
        text = self._serving.word_of(id)
        known = logprob is not None and math.isfinite(logprob)
        # A token that is part of a character has no text of its own, and so none whose bytes could be told.
        raw = None if _BROKEN in text else list(text.encode())
        return {"token": text, "logprob": logprob if known else _NEVER, "bytes": raw}
