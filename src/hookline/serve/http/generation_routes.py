"""The answers of ``/v1/completions`` and ``/generate``: whole, as a stream, or as a safetensors file.

Takes `Asked` from `asking`, runs it on the engine, hands responses to `app`. Each route has a `Shape`, which says
how an answer and a piece of one look; the rest is the same for both.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse

from hookline.errors import EngineClosed
from hookline.serve.generation_request import Finished, Token
from hookline.serve.http.encoded_states import SAFETENSORS, Shelf, states_as_base64
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.error_answers import Refused, as_json, error_body
from hookline.serve.http.parse_request import Asked
from hookline.serve.http.request_gate import AT_THE_END
from hookline.serve.http.running_request import Gathered, Running, check_ended_well

__all__ = ["CompletionShape", "GenerateShape", "answer", "stream"]

_GONE = 499
"""For the metrics alone: nobody is there to read it."""


class Shape(Protocol):
    """How one route writes its answers."""

    def whole(self, answers: Sequence[Gathered], hooks: Sequence[Any]) -> Any:
        """All answers, ended."""

    def first(self) -> list[Any]:
        """Events before the first token."""

    def piece(self, index: int, answer: Gathered, event: Token | Finished, hooks: Any) -> Any | None:
        """An event; None for nothing to tell."""

    def last(self, answers: Sequence[Gathered]) -> list[Any]:
        """Events after the last token."""


async def answer(http: HttpRequest, serving: Serving, asked: Asked, shape: Shape) -> Any:
    """The whole answer; a client that goes away takes its sequences out of the engine."""
    running = _begun(http, serving, asked, every_token=False)
    answers = await _unless_gone(http, running)
    if answers is None:
        return Response(status_code=_GONE)
    if asked.has_states:  # in a thread: a hundred megabytes of them would keep everybody else waiting
        return await asyncio.to_thread(_written, asked, shape, answers)
    return _written(asked, shape, answers)


def _written(asked: Asked, shape: Shape, answers: list[Gathered]) -> Any:
    if asked.states_as == "safetensors":
        shelf = Shelf()
        hooks = [_hooks(answer, shelf, index) for index, answer in enumerate(answers)]
        return Response(shelf.file(shape.whole(answers, hooks)), media_type=SAFETENSORS)
    hooks = [_hooks(answer) for answer in answers]
    return Response(as_json(shape.whole(answers, hooks)), media_type="application/json")


async def stream(http: HttpRequest, serving: Serving, asked: Asked, shape: Shape) -> Any:
    """Server-sent events; the engine has taken the request before the first, so that a refusal has its status."""
    running = _begun(http, serving, asked, every_token=True)
    return StreamingResponse(
        _events(running, shape, has_states=asked.has_states),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
    )


def _begun(http: HttpRequest, serving: Serving, asked: Asked, *, every_token: bool) -> Running:
    try:
        running = Running(serving.ready(), asked.requests, every_token=every_token)
    except EngineClosed:
        serving.has_failed = not serving.is_draining  # nobody has closed it
        raise
    http.scope.setdefault(AT_THE_END, []).append(running.cancel)
    return running


async def _events(running: Running, shape: Shape, *, has_states: bool) -> AsyncIterator[bytes]:
    for each in shape.first():
        yield _event(each)
    try:
        async for index, event in running.events():
            if isinstance(event, Finished):
                check_ended_well(event)
            answer = running.answers[index]
            hooks = await asyncio.to_thread(_hooks, answer) if has_states and isinstance(event, Finished) else None
            piece = shape.piece(index, answer, event, hooks)
            if piece is not None:
                yield _event(piece)
        for each in shape.last(running.answers):
            yield _event(each)
    except Refused as refused:  # the status is long sent: the error is the last event
        yield _event(error_body(refused))
    yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"


async def _unless_gone(http: HttpRequest, running: Running) -> list[Gathered] | None:
    """The answers; None if the client went away before they were whole."""
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


def _hooks(answer: Gathered, shelf: Shelf | None = None, index: int = 0) -> Any:
    states = None if answer.finished is None else answer.finished.states
    if states is None:
        return None
    return {"hidden_states": states_as_base64(states) if shelf is None else shelf.put(index, states)}


# -- the two shapes --------------------------------------------------------------------------------------------


class CompletionShape:
    """OpenAI's."""

    def __init__(self, asked: Asked, serving: Serving, model_name: str, *, include_usage: bool = False) -> None:
        self._asked = asked
        self._serving = serving
        self._include_usage = include_usage
        self._frame = {
            "id": asked.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._offsets = [len(echo) for echo in asked.echoes]

    def whole(self, answers: Sequence[Gathered], hooks: Sequence[Any]) -> Any:
        """One object with all choices."""
        choices = []
        for index, (answer, found) in enumerate(zip(answers, hooks, strict=True)):
            text = self._asked.echoes[index] + answer.text
            assert answer.finished is not None
            choices.append(self._choice(index, text, answer.tokens, answer.finished.reason, found))
        return {**self._frame, "choices": choices, "usage": self._usage(answers)}

    def first(self) -> list[Any]:
        """The echoed prompts."""
        echoes = enumerate(self._asked.echoes)
        return [{**self._frame, "choices": [self._choice(i, echo, [], None, None)]} for i, echo in echoes if echo]

    def piece(self, index: int, answer: Gathered, event: Token | Finished, hooks: Any) -> Any | None:
        """A choice with the text that is new."""
        if isinstance(event, Finished):
            choice = self._choice(index, "", [], event.reason, hooks)
        elif event.text or event.logprob is not None:
            choice = self._choice(index, event.text, [event], None, None)
        else:
            return None  # half a character: nothing to tell yet
        return {**self._frame, "choices": [choice]}

    def last(self, answers: Sequence[Gathered]) -> list[Any]:
        """The usage, if it was asked for."""
        return [{**self._frame, "choices": [], "usage": self._usage(answers)}] if self._include_usage else []

    def _usage(self, answers: Sequence[Gathered]) -> dict[str, int]:
        prompt, completion = self._asked.prompt_tokens, sum(len(answer.tokens) for answer in answers)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _choice(self, index: int, text: str, tokens: Sequence[Token], reason: str | None, hooks: Any) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": self._logprobs(index, tokens), "finish_reason": reason}
        return choice if hooks is None else {**choice, "hooks": hooks}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        wanted = self._asked.requests[index].logprobs
        if wanted is None or not tokens:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.text)
        return {
            "tokens": [self._word(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens] if wanted else None,
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for id, logprob in token.top_logprobs:
            found.setdefault(self._word(id), _finite(logprob))  # the likeliest of those that look the same
        return found

    def _word(self, id: int) -> str:
        tokenizer = getattr(self._serving.engine, "tokenizer", None)
        return f"token_id:{id}" if tokenizer is None else str(tokenizer.decode([id]))


class GenerateShape:
    """SGLang's: an object for each answer, and in a stream the text so far."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._so_far = [""] * len(asked.requests)
        self._heard = [0] * len(asked.requests)

    def whole(self, answers: Sequence[Gathered], hooks: Sequence[Any]) -> Any:
        """One object, or a list."""
        told = [
            self._one(answer, answer.tokens, answer.text, found) for answer, found in zip(answers, hooks, strict=True)
        ]
        return told[0] if self._asked.is_one else told

    def first(self) -> list[Any]:
        """Nothing."""
        return []

    def piece(self, index: int, answer: Gathered, event: Token | Finished, hooks: Any) -> Any | None:
        """The answer so far."""
        if isinstance(event, Token):
            self._so_far[index] += event.text
            self._heard[index] += 1  # the engine's thread may be ahead of us
            if not event.text:
                return None
        told = self._one(answer, answer.tokens[: self._heard[index]], self._so_far[index], hooks)
        return told if self._asked.is_one else {**told, "index": index}

    def last(self, answers: Sequence[Gathered]) -> list[Any]:
        """Nothing."""
        return []

    def _one(self, answer: Gathered, tokens: Sequence[Token], text: str, hooks: Any) -> dict[str, Any]:
        finished = answer.finished
        meta: dict[str, Any] = {
            "id": answer.request.id,
            "finish_reason": None if finished is None else {"type": finished.reason},
            "prompt_tokens": len(answer.request.prompt_ids),
            "completion_tokens": len(tokens),
        }
        if answer.request.logprobs is not None:
            meta["output_token_logprobs"] = [[_finite(token.logprob), token.id] for token in tokens]
        told = {"text": text, "output_ids": [token.id for token in tokens], "meta_info": meta}
        return told if hooks is None else {**told, "hooks": hooks}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
