"""Keep what probes flag in requests until somebody asks for it.

`WorkerHooks` lets ``probe`` hooks note into `RequestFlags` in each step; the answer of a request takes its flags out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hookline.factories.request_notes import RequestFlag, RequestNotes, merge_flags, set_notes

if TYPE_CHECKING:
    from hookline.observe.tokens import Tokens

__all__ = ["RequestFlags"]

_MOST_KEPT: Final = 4096
"""Requests whose flags wait to be taken; the oldest are dropped."""


class _FlagsOfRequest(NamedTuple):
    id: str
    """The engine's own id: a name may come again."""
    flags: list[RequestFlag]


class RequestFlags:
    """The flags of requests in one worker."""

    def __init__(self, *, can_stop: bool = False) -> None:
        self._can_stop = can_stop
        self._notes = RequestNotes()
        self._by_name: dict[str, _FlagsOfRequest] = {}

    def begin(self, name: str) -> None:
        """Begin with a request: drop what an earlier one of that name has left."""
        self._by_name.pop(name, None)

    def begin_step(self) -> None:
        """Let the hooks of a step note what they find."""
        self._notes.clear()
        set_notes(self._notes)

    def end_step(self, table: Tokens) -> list[str]:
        """Read what the hooks have noted, and return the ids of requests whose answers are to end.

        Waits for the device only if there is something.
        """
        set_notes(None)
        ids = dict(zip(table.requests, table.keys, strict=True))
        ending: list[str] = []
        for name, flags in self._notes.read().items():
            if self._can_stop and any(flag.stops for flag in flags):
                ending.append(ids[name])
            known = self._by_name.pop(name, None)
            earlier = known.flags if known is not None and known.id == ids[name] else []
            self._by_name[name] = _FlagsOfRequest(ids[name], merge_flags([*earlier, *flags]))
        while len(self._by_name) > _MOST_KEPT:
            del self._by_name[next(iter(self._by_name))]
        return ending

    def take(self, name: str, id: str | None = None) -> list[dict[str, Any]]:
        """Return the flags of a request as plain data, and forget them.

        Args:
            name: What users call it.
            id: The engine's own id, if it is known: flags of another request of that name stay.
        """
        known = self._by_name.get(name)
        if known is None or id not in (None, known.id):
            return []
        del self._by_name[name]
        return [flag.to_plain(stopped=flag.stops and self._can_stop) for flag in known.flags]

    def clear(self) -> None:
        """Forget all flags."""
        set_notes(None)
        self._by_name.clear()
