"""Put the hidden states of a request into the answer that vLLM writes: JSON, or a stream of events.

`RequestHooksMiddleware` gives `AnswerWriter.send` to vLLM's app in place of the server's ``send``. It asks the workers
for the states once the answer, or a choice of a stream, is whole.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, Final

from hookline.engines.vllm.merge_states import merge_states
from hookline.engines.vllm.worker_calls import WorkerCalls
from hookline.errors import HooklineError
from hookline.serve.http.error_answers import Refused, error_body, refusal_from_error, to_json
from hookline.serve.http.request_gate import Message, Send

__all__ = ["AnswerWriter"]

_END: Final = b"\n\n"
_DATA: Final = b"data: "
_DONE: Final = b"data: [DONE]"


class AnswerWriter:
    """Send on an answer of vLLM, with hidden states in it."""

    def __init__(self, calls: WorkerCalls, keys: Sequence[str], send: Send) -> None:
        self.has_taken = False
        """Whether the states have been asked for, and are gone from the workers."""
        self._calls = calls
        self._keys = keys
        self._send = send
        self.status: int | None = None
        """Of vLLM's answer, once it has begun."""
        self._start: Message = {}
        self._is_stream = False
        self._rest = b""
        self._held: list[dict[str, Any]] = []
        """Events of a stream that end a choice."""

    async def send(self, message: Message) -> None:
        """Take a message of vLLM's app."""
        if message["type"] == "http.response.start":
            self._start = message
            self.status = int(message["status"])
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if self._is_stream:
                await self._send(message)
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        self._rest += message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self._is_stream:
            await self._send_events(is_last)
        elif is_last:
            await self._send_answer()

    # -- a stream -----------------------------------------------------------------------------------------------

    async def _send_events(self, is_last: bool) -> None:
        *events, self._rest = self._rest.split(_END)
        if is_last and self._rest:
            events, self._rest = [*events, self._rest], b""
        ready = [each for event in events for each in await self._events_for(event)]
        if is_last:
            ready += await self._release()
        content = b"".join(each + _END for each in ready)
        await self._send({"type": "http.response.body", "body": content, "more_body": not is_last})

    async def _events_for(self, event: bytes) -> list[bytes]:
        """Return what to send for an event; the one that ends a choice waits until all choices have ended.

        Only then are the states complete: those of all choices are taken at once.
        """
        if not event.startswith(_DATA):
            return [event]
        if event == _DONE:
            return [*await self._release(), event]
        value = json.loads(event.removeprefix(_DATA))
        choices = value.get("choices", ())
        if not choices:  # the usage, behind all choices
            return [*await self._release(), event]
        if all(each.get("finish_reason") is None for each in choices):
            return [event]
        self._held.append(value)
        return []

    async def _release(self) -> list[bytes]:
        if not self._held:
            return []
        held, self._held = self._held, []
        hooks = await self._take()
        for value in held:
            for choice in value["choices"]:
                found = hooks[choice["index"]]
                # The status has been sent, so that a failure is told here.
                choice["hooks"] = {"error": found.message} if isinstance(found, Refused) else found
        return [_DATA + to_json(value) for value in held]

    # -- a whole answer -------------------------------------------------------------------------------------------

    async def _send_answer(self) -> None:
        status, content = self._start["status"], self._rest
        answer = json.loads(content) if status == 200 else None
        if isinstance(answer, dict) and "choices" in answer:  # to a client that has gone, vLLM answers null
            try:
                content = await self._whole(answer)
            except Refused as refused:
                status, content = refused.status, to_json(error_body(refused))
        kept = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        headers = [*kept, (b"content-length", str(len(content)).encode())]
        await self._send({**self._start, "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": content})

    async def _whole(self, answer: dict[str, Any]) -> bytes:
        """Return the body with the states in it."""
        hooks = await self._take()
        for choice in answer["choices"]:
            found = hooks[choice["index"]]
            if isinstance(found, Refused):
                raise found
            choice["hooks"] = found
        return to_json(answer)

    async def _take(self) -> list[dict[str, Any] | Refused]:
        """Return ``hooks`` of each choice, or why it has none."""
        self.has_taken = True
        return [await self._of(key) for key in self._keys]

    async def _of(self, key: str) -> dict[str, Any] | Refused:
        try:
            merged = merge_states(await self._calls.take_states(key))
        except (Refused, HooklineError) as error:
            return refusal_from_error(error)
        layers = {
            name: {**layer, "data": base64.b64encode(layer["data"]).decode("ascii")}
            for name, layer in merged["hidden_states"].items()
        }
        rest = {name: merged[name] for name in ("hooks", "flags", "silent") if merged[name]}
        return {"hidden_states": layers, "tokens_not_computed": merged["not_computed"], **rest}
