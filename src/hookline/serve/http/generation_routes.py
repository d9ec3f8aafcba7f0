"""Answer requests that generate, as OpenAI does: completions and chat completions, whole or as a stream.

The app makes a `Generation` of each request, which owns its answers from the engine's queue until they are sent:
however the request ends, its sequences leave the engine. A `CompletionFormat` or `ChatFormat` makes the JSON. Hidden
states go as base64 in it; no pickle anywhere.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse

from hookline.serve.generation_request import Event, Finished, GenerationRequest, Token
from hookline.serve.http.error_answers import Refused, error_body, json_response, to_json
from hookline.serve.http.request_bodies import GenerationBody
from hookline.serve.http.request_gate import AT_THE_END
from hookline.serve.request_row import Ticket
from hookline.serve.serving_engine import Engine

if TYPE_CHECKING:
    from hookline.serve.http.app import Serving

T = TypeVar("T")

NAMED: Final = "X-Request-Id"
"""The header that names a request, and its answer."""
_NEVER: Final = -9999.0
"""What OpenAI sends for a token that is all but impossible; JSON has no infinity."""
_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass
class _Answer:
    """One answer, as far as it has come."""

    index: int
    request: GenerationRequest
    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def hooks(self) -> dict[str, Any]:
        """Return what the request asked for beside text, as JSON has it; nothing before the end."""
        found: dict[str, Any] = {}
        if self.finished is not None and self.finished.states is not None:
            states = self.finished.states.items()
            found["hidden_states"] = {layer: base64_data(each.to_plain()) for layer, each in states}
        if self.finished is not None and self.finished.hooks:
            found["hooks"] = list(self.finished.hooks)
        if self.finished is not None and self.finished.flags:
            found["flags"] = [each.to_plain(stopped=each.stops) for each in self.finished.flags]
        return found


def base64_data(states: dict[str, Any]) -> dict[str, Any]:
    """Return hidden states of `StatesOfLayer.to_plain` as JSON has them.

    Recipe: ``torch.frombuffer(bytearray(base64.b64decode(it["data"])), dtype=torch.float32).reshape(it["shape"])``.
    """
    return {**states, "data": base64.b64encode(states["data"]).decode("ascii")}


class Generation:
    """The answers to one HTTP request, whose sequences have the ``requests`` to the engine."""

    def __init__(self, http: HttpRequest, body: GenerationBody, id: str, requests: Sequence[GenerationRequest]) -> None:
        self.id = id
        self.body = body
        self.answers = [_Answer(index, request) for index, request in enumerate(requests)]
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[_Answer, Event]] = asyncio.Queue()
        self._ticket: Ticket | None = None
        self._is_over = False

    async def run(self, engine: Engine, form: CompletionFormat, allow: Sequence[str]) -> Any:
        """Return the response; `allow` is what paths of factories of hooks may begin with.

        The engine has accepted the request before a stream begins, so that a refusal has its status.
        """
        self._http.scope.setdefault(AT_THE_END, []).append(self._end)
        await self._apart(partial(self._submit, engine, allow))
        headers = {NAMED: self.id}
        if self.body.stream:
            headers["Cache-Control"] = "no-store"
            return StreamingResponse(self._pieces(form), media_type="text/event-stream", headers=headers)
        if not await self._are_whole():
            return Response()  # to nobody: the client has disconnected
        return await self._apart(lambda: json_response(form.whole(self.answers), headers=headers))

    async def _apart(self, act: Callable[[], T]) -> T:
        """Call `act`; in a thread if hooks or states are asked for.

        Hundreds of patterns, or a hundred megabytes of states, would block all other clients.
        """
        asked = self.body.hooks
        return await asyncio.to_thread(act) if asked.hooks or asked.hidden_states is not None else act()

    async def _pieces(self, form: CompletionFormat) -> AsyncIterator[bytes]:
        for answer in self.answers if form.opening else ():
            yield _event(form.chunk(answer, form.opening))
        try:
            async for answer, event in self._until_ended():
                piece = partial(form.piece, answer, event)
                made = await self._apart(piece) if isinstance(event, Finished) else piece()
                if made is not None:
                    yield _event(made)
            for each in form.last(self.answers):
                yield _event(each)
        except Refused as refused:  # the status is long sent: the error is the last event
            yield _event(error_body(refused))
        yield b"data: [DONE]\n\n"

    async def _are_whole(self) -> bool:
        """Wait for the end of all answers; return False if the client disconnects before."""
        work, gone = asyncio.ensure_future(self._all_ended()), asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return work.done() and work.result() is None
        finally:
            work.cancel()
            gone.cancel()

    async def _all_ended(self) -> None:
        async for _ in self._until_ended():
            pass

    async def _disconnected(self) -> None:
        while (await self._http.receive())["type"] != "http.disconnect":
            pass

    async def _until_ended(self) -> AsyncIterator[tuple[_Answer, Event]]:
        """Yield events until all answers have ended; raise for one that was cut off, which must not look whole."""
        left = len(self.answers)
        while left:
            answer, event = await self._events.get()
            if isinstance(event, Finished):
                said = (event.error or "").rstrip(".")
                if event.reason == "error":
                    raise Refused(500, f"{said or 'The model failed on this request'}; see the server's log.")
                if event.reason == "cancelled":
                    raise Refused(503, "The server stopped before this answer was whole.")
                answer.finished = event
                left -= 1
            yield answer, event

    # -- on the engine's side ------------------------------------------------------------------------------------

    def _submit(self, engine: Engine, allow: Sequence[str]) -> None:
        """Hand all sequences to the engine, or none; from any thread."""
        listeners = [partial(self._on_event, answer) for answer in self.answers]
        requests = [answer.request for answer in self.answers]
        self._ticket = engine.submit_all(requests, listeners, allow=allow, hold=True)
        if self._is_over:  # the client went meanwhile
            self._end()

    def _on_event(self, answer: _Answer, event: Event) -> None:
        """Take an event of an answer; called on the engine's thread, so it must not wait."""
        if isinstance(event, Token):
            # A list of Python may be appended to by one thread and read by another.
            answer.tokens.append(event)
            if not self.body.stream:
                return  # waking the event loop costs about 20 µs, and this token is read later
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (answer, event))
        except RuntimeError:  # the event loop has ended, and with it the client's connection
            self._end()

    def _end(self) -> None:
        """Cancel what still runs, and let go of the hidden states: the answer is sent, or its client has gone."""
        self._is_over = True
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket.release()


def _event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


# -- the JSON of answers ------------------------------------------------------------------------------------------


class CompletionFormat:
    """The JSON of ``/v1/completions``: an object with choices, and usage at its end."""

    whole_object = piece_object = "text_completion"
    """What a whole answer, and a piece of one, calls itself."""
    opening: Mapping[str, Any] = {}
    """What a choice of a stream has before its first token."""

    def __init__(self, id: str, body: GenerationBody, serving: Serving, model_name: str) -> None:
        self._body = body
        self._word_of = serving.word_of
        self._frame = {"id": id, "object": self.piece_object, "created": int(time.time()), "model": model_name}

    def whole(self, answers: Sequence[_Answer]) -> dict[str, Any]:
        """Return one object with all choices, ended."""
        choices = [
            self._choice(answer, self._whole_text("".join(token.text for token in answer.tokens)), answer.tokens)
            for answer in answers
        ]
        return {**self._frame, "object": self.whole_object, "choices": choices, "usage": self._usage(answers)}

    def piece(self, answer: _Answer, event: Event) -> dict[str, Any] | None:
        """Return an event of a stream: the text that is new, or the end; None if there is nothing to tell yet."""
        if isinstance(event, Finished):
            return self.chunk(answer, self._new_text(""))
        if not event.text and event.logprob is None and not self._body.return_token_ids:
            return None  # half a character
        return self.chunk(answer, self._new_text(event.text), [event])

    def last(self, answers: Sequence[_Answer]) -> Iterator[dict[str, Any]]:
        """Yield the events after the last token: the usage, if it was asked for."""
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**self._frame, "choices": [], "usage": self._usage(answers)}

    def chunk(self, answer: _Answer, text: Mapping[str, Any], tokens: Sequence[Token] = ()) -> dict[str, Any]:
        """Return an event of a stream with a part of one choice."""
        return {**self._frame, "choices": [self._choice(answer, text, tokens)]}

    def _choice(self, answer: _Answer, text: Mapping[str, Any], tokens: Sequence[Token]) -> dict[str, Any]:
        reason = None if answer.finished is None else answer.finished.reason
        logprobs = self._logprobs(tokens) if answer.request.logprobs is not None and tokens else None
        choice = {"index": answer.index, **text, "logprobs": logprobs, "finish_reason": reason}
        if self._body.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        hooks = answer.hooks
        return {**choice, "hooks": hooks} if hooks else choice

    def _usage(self, answers: Sequence[_Answer]) -> dict[str, int]:
        prompt = sum(len(answer.request.prompt_ids) for answer in answers[:: self._body.n])  # once for all its answers
        completion = sum(len(answer.tokens) for answer in answers)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _whole_text(self, text: str) -> dict[str, Any]:
        """Return the part of a choice that has its text."""
        return {"text": text}

    def _new_text(self, text: str) -> dict[str, Any]:
        """Return the part of a choice of a stream that has the text that is new."""
        return {"text": text}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""
        return {
            "tokens": [self._word_of(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _top(self, token: Token) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for id, logprob in token.top_logprobs:
            found.setdefault(self._word_of(id), _finite(logprob))  # the likeliest of those that look the same
        return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class ChatFormat(CompletionFormat):
    """The JSON of ``/v1/chat/completions``: messages, and in a stream the changes of one."""

    whole_object, piece_object = "chat.completion", "chat.completion.chunk"
    opening: Mapping[str, Any] = {"delta": {"role": "assistant", "content": ""}}

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _new_text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        words = [(self._word(token.id, token.logprob), token.top_logprobs) for token in tokens]
        return {"content": [{**word, "top_logprobs": [self._word(*each) for each in top]} for word, top in words]}

    def _word(self, id: int, logprob: float | None) -> dict[str, Any]:
        text, known = self._word_of(id), _finite(logprob)
        # A token that is part of a character has no text of its own, and so none whose bytes could be told.
        raw = None if _BROKEN in text else list(text.encode())
        return {"token": text, "logprob": _NEVER if known is None else known, "bytes": raw}
