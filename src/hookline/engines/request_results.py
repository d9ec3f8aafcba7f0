"""Keep what requests asked of an engine until their clients fetch it: hidden states, what hooks did, flags of probes.

The adapters of vLLM and SGLang have one `RequestResults` each; our own server puts all of it into the answer instead.
A request asks with a plain object (`RequestOptions`). What is wrong with it is its result, and harms nobody else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hookline.engines.engine_modules import check_called, check_no_stop, find_sources, never_called
from hookline.engines.hidden_states import RequestStates, StateSource
from hookline.engines.request_options import RequestOptions, remembered, split_key
from hookline.errors import Hint, HooklineError, HookNameError, OptionError
from hookline.factories.request_notes import RequestFlag, merge_flags
from hookline.sites.receipt import cause_around
from hookline.sites.wrappers import submodule

if TYPE_CHECKING:
    from hookline.engines.request_hooks import PreparedHooks
    from hookline.engines.session import Session

__all__ = ["RequestResults", "error_to_plain"]

logger = logging.getLogger("hookline.engines")

_MOST_KEPT: Final = 4096
"""Keys under which results wait to be taken."""


@dataclass(eq=False)
class _Result:
    """One request, from its beginning until its client has taken what it left."""

    id: str
    """The engine's own id."""
    name: str
    """What users call it."""
    prompt: int
    not_computed: int
    place: tuple[int, ...]
    """Where it stands among the answers under one key."""
    key: str
    states: RequestStates | None = None
    hooks: PreparedHooks | None = None
    error: Exception | None = None
    has_asked: bool = False
    """Whether its client asked for something, and so will come for it; others are kept for their flags."""
    has_ended: bool = False
    hook_results: list[dict[str, Any]] = field(default_factory=list)
    flags: list[RequestFlag] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its states."""
        return 0 if self.states is None else self.states.nbytes


class RequestResults:
    """The requests of one worker, and what was found for those that asked for something, or that a probe flagged.

    Args:
        session: Where their hooks go, and their hidden states come from.
        most_bytes: How much the hidden states of all of them together may take.
        allow: What paths of factories of their hooks may begin with, beside ``hookline.factories``.
        check: Raises if no hook can fire in this engine.
        tp_size: Into how many parts tensor parallelism cuts outputs.
    """

    def __init__(
        self,
        session: Session,
        *,
        most_bytes: int = 1 << 30,
        allow: Sequence[str] | None = None,
        check: Callable[[], object] = lambda: None,
        tp_size: int = 1,
    ) -> None:
        self._session = session
        self._most_bytes = most_bytes
        self._allow = allow
        self._check = check
        self._has_logged = False
        self._sources = remembered(partial(find_sources, session.model, tp_size))
        self._running: dict[str, _Result] = {}
        """By the engine's own id."""
        self._kept: dict[str, list[_Result]] = {}
        """What waits to be taken, by key; in the order in which the first request under it was kept."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of hidden states that are held."""
        return sum(result.nbytes for results in self._kept.values() for result in results)

    def open(
        self, id: str, name: str, options: Any, *, prompt: int, not_computed: int = 0, place: tuple[int, ...] = ()
    ) -> None:
        """Begin with a request; `options` is what it asks for, None for nothing.

        Args:
            id: The engine's own id, by which rows are found.
            name: What users call it. No two that run have one; what an earlier one has left under it is dropped.
            options: An object, or its JSON; see `RequestOptions`.
            prompt: How many tokens its prompt has.
            not_computed: How many of them no hook sees.
            place: Where it stands among the answers under one key.
        """
        self._kept.pop(name, None)
        has_asked = options is not None
        result = self._running[id] = _Result(id, name, prompt, not_computed, place, name, has_asked=has_asked)
        try:
            if has_asked:
                self._begin(result, options)
        except Exception as error:
            logger.warning("request %r: %s", name, error)
            self._keep(result)
            self._end(result)
            result.error = error
        self._make_room()

    def _begin(self, result: _Result, options: Any) -> None:
        key, given = split_key(options)
        result.key = key or result.name  # first of all: what is wrong with the rest is told under it
        asked = RequestOptions.read(given)
        if asked == RequestOptions():
            return
        self._keep(result)
        self._check()
        check_no_stop(asked.hooks)
        session, wanted = self._session, asked.hidden_states
        if wanted is not None:
            wanted.check(result.prompt)
            result.states = RequestStates(result.id, wanted, result.prompt, self._sources(wanted.layers, wanted.of))
            session.states.open(result.states)
        if asked.hooks:
            result.hooks = session.of_requests.prepare(result.id, asked.hooks, self._allow)
            for live in result.hooks.hooks:
                check_called(session.model, live.spec.target_modules)
            result.hooks.open()

    def _keep(self, result: _Result) -> None:
        kept = self._kept.setdefault(result.key, [])
        if result not in kept:
            kept.append(result)

    def close(self, id: str) -> None:
        """Stop with what a request has asked for; what was found stays until it is taken."""
        result = self._running.pop(id, None)
        if result is not None:
            self._end(result)

    def _end(self, result: _Result) -> None:
        result.has_ended = True
        if result.states is not None:
            self._session.states.close(result.states)
        if result.hooks is not None:
            result.hook_results, result.hooks = result.hooks.close(), None

    def collect(self, ids: Mapping[str, str]) -> None:
        """Take what the last step gave; raise nothing, as the answers of that step are there.

        Args:
            ids: The engine's own id of each request of the step, by its name.
        """
        try:
            for name, flags in self._session.collect().items():
                result = self._running.get(ids[name])
                if result is not None:  # an engine that does not tell of all its requests has no answer for them
                    result.flags = merge_flags([*result.flags, *flags])
                    self._keep(result)
            self._make_room()
        except Exception as error:
            self.give_up("what hooks found in a step could not be read", error)

    def give_up(self, what: str, error: Exception) -> None:
        """Fail the states of all running requests, as nobody knows which tokens of a step were theirs; log it once."""
        for result in self._running.values():
            if result.states is not None:
                result.states.fail(OptionError(f"For a request's own results, {what} ({error!r})."))
                self._session.states.close(result.states)
        if not self._has_logged:
            self._has_logged = True
            logger.error("%s; hooks do not know whose tokens they see", what, exc_info=error)

    def _make_room(self) -> None:
        """Keep what is held within its bounds: drop what ended longest ago and nobody took, then fail the largest.

        Flags that nobody asked for go first.
        """
        if not self._is_too_much():
            return
        ended = [key for key, results in self._kept.items() if all(result.has_ended for result in results)]
        for key in sorted(ended, key=self._is_asked):
            if self._is_asked(key):
                logger.info("what was found for request %r was not taken, and is dropped", key)
            elif len(self._kept) <= _MOST_KEPT:
                continue  # it has no bytes
            del self._kept[key]
            if not self._is_too_much():
                return
        while self.nbytes > self._most_bytes:
            held = (result for results in self._kept.values() for result in results)
            states = max(held, key=lambda each: each.nbytes).states
            assert states is not None  # it has bytes
            text = (
                f"Hidden states of all requests together may take {self._most_bytes} bytes (captured_bytes), and these "
                "do not fit; ask for fewer layers or positions, or take those of earlier requests."
            )
            states.fail(OptionError(text))
            self._session.states.close(states)

    def _is_asked(self, key: str) -> bool:
        return any(result.has_asked for result in self._kept[key])

    def _is_too_much(self) -> bool:
        return len(self._kept) > _MOST_KEPT or self.nbytes > self._most_bytes

    # -- answers ----------------------------------------------------------------------------------------------

    def take(self, key: str) -> list[dict[str, Any]]:
        """Return what was found for the requests under a key as plain data, one entry for each, and forget it.

        Raises:
            HookNameError: There is nothing under that key.
        """
        results = self._kept.pop(key, None)
        if results is None:
            raise HookNameError(
                f"Nothing is kept for {key!r}: the request did not ask for anything, has not begun, or it was taken or "
                "dropped."
            )
        return [self._taken(result) for result in sorted(results, key=lambda each: each.place)]

    def _taken(self, result: _Result) -> dict[str, Any]:
        self._end(result)
        plain: dict[str, Any] = {
            "request": result.name,
            "prompt_tokens": result.prompt,
            "not_computed": result.not_computed,
            "hooks": result.hook_results,
            "flags": [flag.to_plain(stopped=False) for flag in result.flags],
            "states": {},
            "silent": {},
            "error": None,
        }
        try:
            plain |= self._taken_states(result)
        except Exception as error:
            plain["error"] = error_to_plain(error)
        result.states, result.error, result.hook_results, result.flags = None, None, [], []
        return plain

    def _taken_states(self, result: _Result) -> dict[str, Any]:
        states = result.states
        error = result.error or (None if states is None else states.error)
        if error is not None:
            raise error
        if states is None:
            return {}
        silent = {source.title: self._why_silent(source) for source in states.silent}
        if silent and len(silent) == len(states.sources):
            raise OptionError("; ".join(f"{name!r}: {cause}" for name, cause in silent.items()) + ".")
        found = {name: layer.to_plain() for name, layer in states.result().items() if name not in silent}
        return {"states": found, "silent": silent}

    def _why_silent(self, source: StateSource) -> str:
        """Return why a module did not fire in a step."""
        model = self._session.model
        module = submodule(model, source.module) if source.module else model
        cause = never_called(module) or cause_around(model, source.module, module)
        return cause or "it was not called in a step of the request"

    def clear(self) -> None:
        """Forget all requests."""
        for id in list(self._running):
            self.close(id)
        self._kept.clear()


def error_to_plain(error: Exception) -> dict[str, str]:
    """Return an error as plain data, for another process; of a KeyError, without the quotes that Python adds.

    Hints are for the process that has the model: who asked the worker has neither ``hookline.find`` nor ``/modules``.
    """
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, HooklineError):
        text = error.text(dict.fromkeys(Hint, ""))
    return {"type": type(error).__name__, "message": text}
