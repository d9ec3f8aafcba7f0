"""Collect the hidden states of single requests while an engine runs many, and hand them out when asked.

`WorkerHooks` opens a request when it begins, tells of every step, and closes it when it has ended; the answer is taken
over ``collective_rpc``. An observer on each module that is wanted copies the rows of the requests that want it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hookline.engines.vllm.layer_sources import LayerSource, Shard, find_sources, never_called, shard_of, stream_of
from hookline.engines.vllm.step_rows import BookedRequest, StepRow, key_of_answer
from hookline.errors import HooklineError, HookNameError, OptionError
from hookline.observe.tokens import sent_to_host
from hookline.sites.attach import attach
from hookline.sites.receipt import cause_around
from hookline.sites.wrappers import submodule

if TYPE_CHECKING:
    from hookline.engines.vllm.request_options import StatesPlan
    from hookline.sites.handle import HookHandle

__all__ = ["RequestStates", "StatesOfRequest"]

logger = logging.getLogger("hookline.engines.vllm")

_MOST_KEPT: Final = 4096
"""Requests whose states wait to be taken."""
_MOST_REMEMBERED: Final = 32


@dataclass(eq=False)
class StatesOfRequest:
    """The hidden states of one request so far."""

    key: str
    booked: BookedRequest
    plan: StatesPlan | None = None
    sources: list[LayerSource] = field(default_factory=list)
    pieces: dict[LayerSource, list[tuple[Sequence[int], Tensor]]] = field(default_factory=dict)
    shards: dict[LayerSource, Shard | None] = field(default_factory=dict)
    silent: set[LayerSource] = field(default_factory=set)
    """Sources that did not fire in a step in which the request wanted their states."""
    nbytes: int = 0
    error: Exception | None = None
    has_ended: bool = False
    hooks: list[dict[str, Any]] = field(default_factory=list)
    """What the hooks of the request did and found, once it has ended."""

    def fail(self, error: Exception) -> None:
        """Give the states up, and keep the reason."""
        self.error = self.error or error
        self.pieces.clear()


class _Taken(NamedTuple):
    """What an observer copies in one step for one request."""

    states: StatesOfRequest
    positions: Sequence[int]
    start: int


class _StateObserver:
    """Observe one side of one module for all requests that want it."""

    def __init__(self, model: nn.Module, module: str, of: str) -> None:
        self.module = submodule(model, module) if module else model
        self.users: dict[str, list[LayerSource]] = {}
        """By the id of each request that wants states from here, which of its sources these are."""
        self.taken: list[_Taken] = []
        self.index: Tensor | None = None
        self.total = 0
        hook: Any = self._after if of == "output" else self._before
        on = "forward" if of == "output" else "forward_pre"
        self.handle: HookHandle = attach(
            model, module or None, hook, on=on, with_kwargs=of == "input", observe=True, name="states"
        )
        self.copied: Tensor | None = None

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._copy(output)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._copy((args, kwargs))

    def _copy(self, value: Any) -> None:
        if not self.taken or self.copied is not None:  # nothing is wanted, or the module is called again
            return
        try:
            rows = stream_of(self.module, value)
            if rows is None or rows.dim() != 2 or rows.shape[0] < self.total:
                raise OptionError(f"{type(self.module).__name__} has no row of numbers for each token here")
            if self.index is None:  # every token of the step
                self.copied = rows[: self.total].clone()
            else:
                self.copied = rows.index_select(0, self.index.to(rows.device, non_blocking=True))
            self.copied = sent_to_host(self.copied)
        except Exception as error:  # fails the requests that asked, not the step
            for each in self.taken:
                each.states.fail(error)


class RequestStates:
    """The hidden states of all requests of one worker that asked for some."""

    def __init__(self, model: nn.Module, *, tp_size: int, most_bytes: int) -> None:
        self._model = model
        # Remembered: the answers to one prompt, which come one by one, have the same patterns.
        self._find_sources = lru_cache(maxsize=_MOST_REMEMBERED)(partial(_sources_or_error, model))
        self._tp_size = tp_size
        self._most_bytes = most_bytes
        self._held = 0
        self._by_key: dict[str, StatesOfRequest] = {}
        self._by_id: dict[str, StatesOfRequest] = {}
        self._observers: dict[tuple[str, str], _StateObserver] = {}

    @property
    def is_active(self) -> bool:
        """Return whether a running request wants states."""
        return bool(self._observers)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the states that are kept."""
        return self._held

    def open(
        self, key: str, booked: BookedRequest, plan: StatesPlan | None, error: Exception | None = None
    ) -> StatesOfRequest:
        """Begin to collect for a request; what is wrong with its plan is kept for whoever takes the states.

        If another request has that key, it keeps it: the new one gets an error, under the engine's own id.
        """
        key = key_of_answer(key, booked.id, self.id_of(key))
        if key in self._by_key:
            error = error or OptionError(f"Another request has the key {key!r}; give each a key of its own.")
            logger.warning("request %r: %s", booked.id, error)
            key = booked.id
        states = StatesOfRequest(key, booked, plan, error=error)
        self._make_room(0)
        self._by_key[key] = self._by_id[booked.id] = states
        if plan is None or error is not None:
            return states
        try:
            plan.check(booked.prompt)
            found = self._find_sources(plan.wanted.layers, plan.wanted.of)
            if isinstance(found, Exception):
                raise found.with_traceback(None)
            states.sources = [*found]
            for source in states.sources:
                module = submodule(self._model, source.module) if source.module else self._model
                states.shards[source] = shard_of(module, source.of, self._tp_size)
                self._observer(source).users.setdefault(booked.id, []).append(source)
        except Exception as failure:
            states.fail(failure)
            self._leave(states)
        return states

    def _observer(self, source: LayerSource) -> _StateObserver:
        place = source.module, source.of
        if place not in self._observers:
            self._observers[place] = _StateObserver(self._model, *place)
        return self._observers[place]

    def close(self, id: str, hooks: Sequence[dict[str, Any]] = ()) -> None:
        """Stop collecting for a request that has ended; its states stay until they are taken, and so does ``hooks``."""
        states = self._by_id.pop(id, None)
        if states is not None:
            states.has_ended = True
            states.hooks = list(hooks)
            self._leave(states)

    def fail_running(self, error: Exception) -> None:
        """Give up the states of all running requests: nobody knows which of a step's tokens were theirs."""
        for states in list(self._by_id.values()):
            self._give_up(states, error)

    def _give_up(self, states: StatesOfRequest, error: Exception) -> None:
        """Keep an error in place of states, and stop collecting: a compiled engine need not run eagerly for them."""
        states.fail(error)
        self._held -= states.nbytes
        states.nbytes = 0
        self._leave(states)

    def _leave(self, states: StatesOfRequest) -> None:
        for place, observer in list(self._observers.items()):
            observer.users.pop(states.booked.id, None)
            observer.taken = [each for each in observer.taken if each.states is not states]
            if not observer.users:
                observer.handle.remove(quiet=True)
                del self._observers[place]

    # -- one step ---------------------------------------------------------------------------------------------

    def begin_step(self, rows: Sequence[StepRow]) -> None:
        """Tell observers which rows of the step to copy."""
        if not self._observers:
            return
        total = sum(row.count for row in rows)
        chosen = self._chosen(rows)
        for observer in self._observers.values():
            observer.taken, observer.copied, observer.total = [], None, total
            places: list[int] = []
            for states, positions, offset in chosen:
                if states.booked.id in observer.users:
                    observer.taken.append(_Taken(states, positions, len(places)))
                    places += [offset + position for position in positions]
            observer.index = None if len(places) == total else torch.tensor(places)

    def _chosen(self, rows: Sequence[StepRow]) -> list[tuple[StatesOfRequest, Sequence[int], int]]:
        """Return who wants tokens of the step: which positions, and what to add to a position for its row."""
        found: list[tuple[StatesOfRequest, Sequence[int], int]] = []
        begin = 0
        for row in rows:
            states = self._by_id.get(row.request_id)
            if states is not None and states.error is None and states.plan is not None:
                positions = states.plan.positions(row)
                if positions:
                    found.append((states, positions, begin - row.first))
            begin += row.count
        return found

    def end_step(self) -> None:
        """Hand the copies of the step to their requests."""
        for observer in list(self._observers.values()):
            copied, taken = observer.copied, observer.taken
            observer.copied, observer.taken = None, []
            for states, positions, start in taken:
                sources = observer.users.get(states.booked.id, [])
                if states.error is not None:
                    self._give_up(states, states.error)
                    continue
                if copied is None:
                    states.silent.update(sources)
                    continue
                for source in sources:
                    self._keep(states, source, positions, copied[start : start + len(positions)])

    def _keep(self, states: StatesOfRequest, source: LayerSource, positions: Sequence[int], piece: Tensor) -> None:
        size = piece.numel() * piece.element_size()
        if states.error is None and not self._make_room(size):
            text = (
                f"Hidden states of all requests together may take {self._most_bytes} bytes (captured_bytes), and these "
                "do not fit; ask for fewer layers or positions, or take those of earlier requests."
            )
            self._give_up(states, OptionError(text))
        if states.error is None:
            states.nbytes += size
            self._held += size
            states.pieces.setdefault(source, []).append((positions, piece))

    def _make_room(self, size: int) -> bool:
        """Return whether ``size`` more bytes fit, after dropping states that ended longest ago and nobody took."""
        if self._held + size <= self._most_bytes and len(self._by_key) < _MOST_KEPT:
            return True
        for states in [each for each in self._by_key.values() if each.has_ended]:
            if self._held + size <= self._most_bytes and len(self._by_key) < _MOST_KEPT:
                break
            logger.warning("hidden states of request %r were not taken, and are dropped", states.key)
            self._forget(states.key)
        return self._held + size <= self._most_bytes

    def _forget(self, key: str) -> StatesOfRequest | None:
        states = self._by_key.pop(key, None)
        self._held -= 0 if states is None else states.nbytes
        return states

    # -- answers ----------------------------------------------------------------------------------------------

    def take(self, key: str) -> dict[str, Any]:
        """Return the states of a request as plain data, and forget them."""
        states = self._forget(key)
        if states is None:
            raise HookNameError(
                f"No hidden states of a request {key!r} are kept: it did not ask for any, has not begun, or they were "
                "taken or dropped."
            )
        if not states.has_ended:
            self.close(states.booked.id)
        if states.error is not None:
            raise states.error
        silent = {source.name: self._why_silent(source) for source in states.silent}
        if silent and len(silent) == len(states.sources):
            raise OptionError("; ".join(f"{name!r}: {cause}" for name, cause in silent.items()) + ".")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are made by its streams
        return {
            "states": {source.name: _plain(states, source) for source in states.sources if source not in states.silent},
            "silent": silent,
            "hooks": states.hooks,
            "prompt_tokens": states.booked.prompt,
            "not_computed": states.booked.not_computed,
        }

    def _why_silent(self, source: LayerSource) -> str:
        """Return why a module did not fire in a step."""
        module = submodule(self._model, source.module) if source.module else self._model
        cause = never_called(module) or cause_around(self._model, source.module, module)
        return cause or "it was not called in a step of the request"

    def drop(self, key: str) -> bool:
        """Forget a request, which may be running; return whether it was known."""
        states = self._forget(key)
        if states is not None:
            self.close(states.booked.id)
        return states is not None

    def clear(self) -> None:
        """Forget all requests."""
        for key in list(self._by_key):
            self.drop(key)

    def id_of(self, key: str) -> str | None:
        """Return the engine's own id of the request with that key; None if there is none."""
        booked = self.booked_of(key)
        return None if booked is None else booked.id

    def booked_of(self, key: str) -> BookedRequest | None:
        """Return what is known of the request with that key; None if there is none."""
        states = self._by_key.get(key)
        return None if states is None else states.booked


def _sources_or_error(model: nn.Module, layers: tuple[str, ...], of: str) -> list[LayerSource] | HooklineError:
    """Return what `find_sources` does, or the error that it raises: that took as long, and is remembered too."""
    try:
        return find_sources(model, layers, of)
    except HooklineError as error:
        return error


def _plain(states: StatesOfRequest, source: LayerSource) -> dict[str, Any]:
    """Return the states of one source as bytes; of a position that came twice, the last."""
    pieces = states.pieces.get(source, [])
    shard = states.shards.get(source)
    if not pieces:
        return {"dtype": None, "shape": [0, 0], "positions": [], "data": b"", "part": None, "shard": None}
    values = torch.cat([piece for _, piece in pieces])
    places = {position: place for place, position in enumerate(p for each, _ in pieces for p in each)}
    order = sorted(places)
    if order != list(places) or len(order) != len(values):  # put off and run again, or drafted tokens
        values = values.index_select(0, torch.tensor([places[position] for position in order]))
    return {
        "dtype": str(values.dtype).removeprefix("torch."),
        "shape": list(values.shape),
        "positions": order,
        "data": values.contiguous().view(torch.uint8).numpy().tobytes(),
        "part": source.part,
        "shard": None if shard is None else {"sizes": list(shard.sizes), "replicas": list(shard.replicas)},
    }
