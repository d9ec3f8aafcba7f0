"""Keep what probes flag in requests until somebody asks for it.

`WorkerHooks` lets ``probe`` hooks note into `RequestFlags` in each step; the answer of a request takes its flags out.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from hookline.factories.request_notes import RequestFlag, RequestNotes, merge_flags, set_notes

__all__ = ["RequestFlags"]

_MOST_KEPT: Final = 4096
"""Requests whose flags wait to be taken; the oldest are dropped."""


class RequestFlags:
    """The flags of requests in one worker."""

    def __init__(self) -> None:
        self._notes = RequestNotes()
        self._by_request: dict[str, list[RequestFlag]] = {}

    def begin_step(self) -> None:
        """Let the hooks of a step note what they find."""
        self._notes.clear()
        set_notes(self._notes)

    def end_step(self) -> None:
        """Read what the hooks have noted; waits for the device only if there is something."""
        set_notes(None)
        for request, flags in self._notes.read().items():
            self._by_request[request] = merge_flags([*self._by_request.pop(request, []), *flags])
        while len(self._by_request) > _MOST_KEPT:
            del self._by_request[next(iter(self._by_request))]

    def take(self, request: str) -> list[dict[str, Any]]:
        """Return the flags of a request as plain data, and forget them."""
        return [asdict(flag) for flag in self._by_request.pop(request, [])]

    def clear(self) -> None:
        """Forget all flags."""
        set_notes(None)
        self._by_request.clear()
