"""Keep what requests asked of an engine until their clients fetch it: hidden states, what hooks did, flags of probes.

The adapters of vLLM and SGLang have one `RequestResults` each; our own server puts all of it into the answer instead.
A request asks with a plain object (`RequestOptions`). What is wrong with it is its result, and harms nobody else.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.engines.engine_modules import find_sources, never_called
from hookline.engines.hidden_states import RequestStates, StatesOfLayer, StateSource, StatesWanted
from hookline.errors import Hint, HooklineError, HookNameError, OptionError
from hookline.factories.request_notes import RequestFlag, merge_flags
from hookline.messages import suggest
from hookline.sites.receipt import cause_around
from hookline.sites.wrappers import submodule

if TYPE_CHECKING:
    from torch import nn

    from hookline.engines.request_hooks import PreparedHooks
    from hookline.engines.session import Session

__all__ = ["MOST_PATTERNS", "RequestOptions", "RequestResults", "check_called", "error_to_plain"]

logger = logging.getLogger("hookline.engines")

MOST_PATTERNS: Final = 256
"""Names and patterns of modules in one request: each is held against every module, 256 of them for 0.4 s in a model of
423."""
_MOST_KEPT: Final = 4096
"""Requests whose results, or flags, wait to be taken."""
_LONGEST_TEXT: Final = 4 << 20
_KEYS: Final = ("hidden_states", "hooks", "key")


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks for."""

    key: str | None = None
    """A UUID under which its results are kept; without one they are under the id that the client gave."""
    states: StatesWanted | None = None
    hooks: tuple[Mapping[str, Any], ...] = ()
    """Specs of hooks for this request alone."""

    @classmethod
    def read(cls, given: Any) -> RequestOptions:
        """Return the options of a request, an object or its JSON; raise for what they cannot be.

        >>> RequestOptions.read('{"hidden_states": {"layers": ["model.norm"]}}').states.layers
        ('model.norm',)
        """
        given = _object(given)
        for key in given:
            if key not in _KEYS:
                raise OptionError(
                    f"A request has no option {key!r}{suggest(str(key), _KEYS) or '.'} It takes {', '.join(_KEYS)}."
                )
        states, hooks = given.get("hidden_states"), given.get("hooks") or ()
        if not isinstance(hooks, list | tuple) or not all(isinstance(each, Mapping) for each in hooks):
            raise OptionError(f"hooks is a list of hook specs, got {hooks!r}.")
        made = cls(_key(given.get("key")), None if states is None else StatesWanted.read(states), tuple(hooks))
        if made.patterns > MOST_PATTERNS:
            raise OptionError(f"A request has at most {MOST_PATTERNS} names and patterns of modules; name fewer.")
        return made

    @property
    def patterns(self) -> int:
        """Return how many names and patterns of modules it has."""
        lists: list[Any] = [] if self.states is None else [self.states.layers]
        lists += [hook.get(name) for hook in self.hooks for name in ("target_modules", "exclude")]
        return sum(len(each) if isinstance(each, list | tuple) else 1 for each in lists if each is not None)


def _object(given: Any) -> Mapping[str, Any]:
    """Return the options of a request as an object, of which they may be the JSON."""
    if isinstance(given, str):
        if len(given) > _LONGEST_TEXT:
            raise OptionError(f"The options of a request have at most {_LONGEST_TEXT} characters, got {len(given)}.")
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"The options of a request are JSON, got {given[:80]!r} ({error}).") from None
    if not isinstance(given, Mapping):
        raise OptionError(f"The options of a request are an object with {', '.join(_KEYS)}, got {given!r}.")
    return given


def _key(given: Any) -> str | None:
    """Return a key as it is looked up: whoever knows it gets the results, so it has to be one that nobody guesses."""
    if given is None:
        return None
    try:
        return str(uuid.UUID(given))
    except (ValueError, AttributeError, TypeError):
        raise OptionError(f"key is a UUID such as {uuid.uuid4()}, made anew for each request; got {given!r}.") from None


@dataclass(eq=False)
class _Result:
    """One request that asked for something, from its beginning until its client has taken what it left."""

    id: str
    """The engine's own id."""
    name: str
    """What users call it."""
    prompt: int
    not_computed: int
    key: str = ""
    place: tuple[int, ...] = ()
    """Where it stands among the answers under one key."""
    states: RequestStates | None = None
    hooks: PreparedHooks | None = None
    error: Exception | None = None
    has_ended: bool = False
    hook_results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its states."""
        return 0 if self.states is None else self.states.nbytes


@dataclass
class _Flagged:
    id: str
    """The engine's own id: a name may come again."""
    flags: list[RequestFlag]


class RequestResults:
    """The requests of one worker that asked for something, and what probes flagged in any request.

    Args:
        session: Where their hooks go, and their hidden states come from.
        most_bytes: How much the hidden states of all of them together may take.
        allow: What paths of factories of their hooks may begin with, beside ``hookline.factories``.
        check: Raises for options that this engine cannot do.
        tp_size: Into how many parts tensor parallelism cuts outputs.
        can_stop: Whether the engine ends answers that a probe wants to stop.
    """

    def __init__(
        self,
        session: Session,
        *,
        most_bytes: int = 1 << 30,
        allow: Sequence[str] | None = None,
        check: Callable[[RequestOptions], None] = lambda options: None,
        tp_size: int = 1,
        can_stop: bool = False,
    ) -> None:
        self._session = session
        self._most_bytes = most_bytes
        self._allow = allow
        self._check = check
        self._can_stop = can_stop
        # Remembered: the answers to one prompt, which come one by one, have the same patterns.
        self._sources = lru_cache(maxsize=32)(partial(_sources_or_error, session.model, tp_size))
        self._running: dict[str, _Result] = {}
        self._kept: dict[str, list[_Result]] = {}
        """By key, in the order in which their first request began."""
        self._flagged: dict[str, _Flagged] = {}

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
            name: What users call it.
            options: An object, or its JSON; see `RequestOptions`.
            prompt: How many tokens its prompt has.
            not_computed: How many of them no hook sees.
            place: Where it stands among the answers under one key.
        """
        self._flagged.pop(name, None)  # what an earlier one of that name has left
        if options is None:
            return
        result = _Result(id, name, prompt, not_computed, name, place)
        try:
            given = _object(options)
            result.key = _key(given.get("key")) or name  # first of all: what is wrong with the rest is told under it
            asked = RequestOptions.read(given)
            if asked.states is None and not asked.hooks:
                return
            if asked.key is None:
                self._kept.pop(name, None)  # what an earlier one of that name has left, as no two run at a time
            self._check(asked)
            self._begin(result, asked)
        except Exception as error:
            logger.warning("request %r: %s", name, error)
            self._end(result)
            result.error = error
        self._running[id] = result
        self._kept.setdefault(result.key, []).append(result)
        self._make_room()

    def _begin(self, result: _Result, asked: RequestOptions) -> None:
        session = self._session
        if asked.states is not None:
            asked.states.check(result.prompt)
            found = self._sources(asked.states.layers, asked.states.of)
            if isinstance(found, Exception):
                raise found.with_traceback(None)
            result.states = RequestStates(result.id, asked.states, result.prompt, found)
            session.states.open(result.states)
        if asked.hooks:
            result.hooks = session.of_requests.prepare(result.id, asked.hooks, self._allow)
            for spec in result.hooks.specs:
                check_called(session.model, spec.target_modules)
            result.hooks.open()

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

    def collect(self, ids: Mapping[str, str]) -> list[str]:
        """Take what the last step gave; return the engine's ids of requests whose answers are to end.

        Args:
            ids: The engine's own id of each request of the step, by its name.
        """
        ending: list[str] = []
        for name, flags in self._session.collect().items():
            id = ids[name]
            if self._can_stop and any(flag.stops for flag in flags):
                ending.append(id)
            known = self._flagged.pop(name, None)
            earlier = known.flags if known is not None and known.id == id else []
            self._flagged[name] = _Flagged(id, merge_flags([*earlier, *flags]))
        while len(self._flagged) > _MOST_KEPT:
            del self._flagged[next(iter(self._flagged))]
        self._make_room()
        return ending

    def fail_running(self, error: Exception) -> None:
        """Give up the states of all running requests: nobody knows which of a step's tokens were theirs."""
        for result in self._running.values():
            if result.states is not None:
                result.states.fail(error)
                self._session.states.close(result.states)

    def _make_room(self) -> None:
        """Keep what is held within its bounds: drop what ended longest ago and nobody took, then fail the largest."""
        if not self._is_too_much():
            return
        for key, results in list(self._kept.items()):
            if all(result.has_ended for result in results):
                logger.warning("what request %r asked for was not taken, and is dropped", key)
                del self._kept[key]
                if not self._is_too_much():
                    return
        while self.nbytes > self._most_bytes:
            states = max((each for each in self._running.values()), key=lambda each: each.nbytes).states
            assert states is not None
            text = (
                f"Hidden states of all requests together may take {self._most_bytes} bytes (captured_bytes), and these "
                "do not fit; ask for fewer layers or positions, or take those of earlier requests."
            )
            states.fail(OptionError(text))
            self._session.states.close(states)

    def _is_too_much(self) -> bool:
        return len(self._kept) > _MOST_KEPT or self.nbytes > self._most_bytes

    # -- answers ----------------------------------------------------------------------------------------------

    def take(self, key: str) -> list[dict[str, Any]]:
        """Return what the requests under a key asked for as plain data, one entry for each, and forget it.

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
        self.close(result.id)
        plain: dict[str, Any] = {
            "request": result.name,
            "prompt_tokens": result.prompt,
            "not_computed": result.not_computed,
            "hooks": result.hook_results,
            "flags": self.take_flags(result.name, result.id),
            "states": {},
            "silent": {},
            "error": None,
        }
        try:
            return {**plain, **self._taken_states(result)}
        except Exception as error:
            return {**plain, "error": error_to_plain(error)}

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
        found = states.result()
        return {
            "states": {name: _plain(layer) for name, layer in found.items() if name not in silent},
            "silent": silent,
        }

    def _why_silent(self, source: StateSource) -> str:
        """Return why a module did not fire in a step."""
        model = self._session.model
        module = submodule(model, source.module) if source.module else model
        cause = never_called(module) or cause_around(model, source.module, module)
        return cause or "it was not called in a step of the request"

    def take_flags(self, name: str, id: str | None = None) -> list[dict[str, Any]]:
        """Return what probes flagged in a request as plain data, and forget it.

        Args:
            name: What users call the request.
            id: The engine's own id, if it is known: flags of another request of that name stay.
        """
        known = self._flagged.get(name)
        if known is None or id not in (None, known.id):
            return []
        del self._flagged[name]
        return [flag.to_plain(stopped=flag.stops and self._can_stop) for flag in known.flags]

    def drop(self, key: str) -> bool:
        """Forget the requests under a key, which may be running; return whether there were any."""
        results = self._kept.pop(key, [])
        for result in results:
            self.close(result.id)
        return bool(results)

    def clear(self) -> None:
        """Forget all requests."""
        for key in list(self._kept):
            self.drop(key)
        self._flagged.clear()


def check_called(model: nn.Module, names: Sequence[str]) -> None:
    """Raise for a hook on modules of which the engine calls none; beside others, they are told as silent."""
    causes = [never_called(submodule(model, name.partition(":")[0]) if name else model) for name in names]
    if causes and all(causes):
        raise OptionError(f"A hook on {', '.join(map(repr, names))} would never fire: {causes[0]}.")


def error_to_plain(error: Exception) -> dict[str, str]:
    """Return an error as plain data, for another process; of a KeyError, without the quotes that Python adds.

    Hints are for the process that has the model: who asked the worker has neither ``hookline.find`` nor ``/modules``.
    """
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, HooklineError):
        text = error.text(dict.fromkeys(Hint, ""))
    return {"type": type(error).__name__, "message": text}


def _sources_or_error(model: nn.Module, tp_size: int, layers: tuple[str, ...], of: str) -> Any:
    """Return what `find_sources` does, or the error that it raises: that took as long, and is remembered too."""
    try:
        return find_sources(model, layers, of, tp_size)
    except HooklineError as error:
        return error


def _plain(layer: StatesOfLayer) -> dict[str, Any]:
    """Return the states of one layer as bytes."""
    values = layer.values.contiguous()
    return {
        "dtype": str(values.dtype).removeprefix("torch."),
        "shape": list(values.shape),
        "positions": layer.positions,
        "data": values.view(torch.uint8).numpy().tobytes() if values.numel() else b"",
    }
