"""Format answers of ``/v1/chat/completions`` as OpenAI does: messages, and in a stream the changes of one.

The app gives `ChatFormat` to `answer` and `stream` of `generation_routes`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Final

from hookline.serve.generation_request import Finished, Token
from hookline.serve.http.engine_state import AnswerSoFar, Serving
from hookline.serve.http.generation_routes import AnswerFormat, usage_of
from hookline.serve.http.parsed_request import ParsedRequest

__all__ = ["ChatFormat"]

_NEVER: Final = -9999.0
"""What OpenAI sends for a token that is all but impossible; JSON has no infinity."""
_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"


class ChatFormat(AnswerFormat):
    """Format answers as OpenAI's chat completions."""

    def __init__(self, asked: ParsedRequest, serving: Serving, model_name: str, *, include_usage: bool = False) -> None:
        self._parsed = asked
        self._serving = serving
        self._include_usage = include_usage
        self._frame = {"id": asked.id, "created": int(time.time()), "model": model_name}

    def whole(self, answers: Sequence[AnswerSoFar], hooks: Sequence[Any]) -> Any:
        """Return one object with all choices."""
        choices = []
        for index, (answer, found) in enumerate(zip(answers, hooks, strict=True)):
            assert answer.finished is not None
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            choice = self._choice(index, answer.tokens, answer.finished.reason, found)
            choices.append({**choice, "message": message})
        usage = usage_of(self._parsed, answers)
        return {**self._frame, "object": "chat.completion", "choices": choices, "usage": usage}

    def first(self) -> list[Any]:
        """Return the beginning of each message."""
        begun = {"role": "assistant", "content": "", "refusal": None}
        return [
            self._chunk({**self._choice(i, [], None, None), "delta": begun}) for i in range(len(self._parsed.echoes))
        ]

    def piece(self, index: int, answer: AnswerSoFar, event: Token | Finished, hooks: Any) -> Any | None:
        """Return the text that is new, or the end."""
        if isinstance(event, Finished):
            return self._chunk({**self._choice(index, [], event.reason, hooks), "delta": {}})
        if not event.text and event.logprob is None:
            return None  # half a character: nothing to tell yet
        return self._chunk({**self._choice(index, [event], None, None), "delta": {"content": event.text}})

    def last(self, answers: Sequence[AnswerSoFar]) -> list[Any]:
        """Return the usage, if it was asked for."""
        if not self._include_usage:
            return []
        return [
            {**self._frame, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(self._parsed, answers)}
        ]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._frame, "object": "chat.completion.chunk", "choices": [choice]}

    def _choice(self, index: int, tokens: Sequence[Token], reason: str | None, hooks: Any) -> dict[str, Any]:
        choice = {"index": index, "logprobs": self._logprobs(index, tokens), "finish_reason": reason}
        return choice if hooks is None else {**choice, "hooks": hooks}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._parsed.requests[index].logprobs is None or not tokens:
            return None
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: Token) -> dict[str, Any]:
        top = [self._word(id, logprob) for id, logprob in token.top_logprobs]
        return {**self._word(token.id, token.logprob), "top_logprobs": top}

    def _word(self, id: int, logprob: float | None) -> dict[str, Any]:
        text = self._serving.word_of(id)
        known = logprob is not None and math.isfinite(logprob)
        # A token that is part of a character has no text of its own, and so none whose bytes could be told.
        return {"token": text, "logprob": logprob if known else _NEVER, "bytes": _bytes(text)}


def _bytes(text: str) -> list[int] | None:
    return None if _BROKEN in text else list(text.encode())
