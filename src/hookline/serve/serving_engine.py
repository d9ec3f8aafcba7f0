"""Run a causal language model for many requests at once, on a thread of its own.

Any thread may submit requests; `EngineLoop` runs them and reports their tokens. Hooks are attached and removed, and any
other act that needs the model to stand still is run, between two forwards.

    submit() ──► waiting ──► prefill ──► batch ──► one token for all ──► on_event(Token) … on_event(Finished)
                               └─ a forward of their own, then they join what runs
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from hookline.engines.hidden_states import RequestStates, StateSource
from hookline.engines.request_options import StatesWanted
from hookline.engines.session import Session
from hookline.errors import EngineBusy, EngineClosed, OptionError
from hookline.messages import nearest_names
from hookline.serve.engine_loop import EngineLoop
from hookline.serve.generation_request import Event, GenerationRequest
from hookline.serve.model_probe import end_tokens, longest_sequence, probe_model
from hookline.serve.request_row import RequestRow, Ticket
from hookline.serve.row_batch import BatchForward
from hookline.sites import _torch
from hookline.sites.targets import check_model, select

if TYPE_CHECKING:
    from torch import nn

    from hookline.engines.live_hooks import LiveHooks

__all__ = ["Engine", "Ticket"]

logger = logging.getLogger("hookline.serve.serving_engine")

T = TypeVar("T")

_EXIT_S = 90.0
"""How long a program that ends waits for an engine that was not closed: hooks may take a minute to write all."""


class Engine:
    """Generate in batches on one model, for requests that come and go.

    Recipe::

        model, tokenizer = hookline.serve.load("models/tiny", device="cpu")
        engine = hookline.serve.Engine(model, tokenizer)
        engine.start()
        prompt = tuple(tokenizer("Once upon a").input_ids)
        engine.submit(hookline.serve.GenerationRequest("r1", prompt, max_tokens=8), on_event=print)
        engine.close()  # after the last token: what was submitted is finished first

    New requests join between two rounds. The answer of a request does not depend on what runs beside it, but for the
    rounding of sums that batches of other sizes add up in another order. A prompt is run in one piece, up to 16,384
    tokens of prompts together: for as long as that takes, no request gets a token, and none can be cancelled. A program
    that ends without `close` cancels what runs and has hooks write what they have.

    Args:
        model: A causal language model of ``transformers``, in eval mode, on the device that is to run it. When the
            engine is made, the model is run on a few tokens: to learn which modules have hidden states, and that
            padding does not change its answers. It is not to be compiled: hooks come and go.
        tokenizer: Turns answers into text; without one, tokens have none, and there are no stop texts.
        max_batch: So many requests run at once.
        max_waiting: So many more may wait; then `EngineBusy`.
        max_sequence: Tokens of prompt and answer together; as many as the model has positions if None.
        captured_bytes: Hidden states that all requests together may want, from when a request runs until it has ended
            (or is released, see `submit_all`). One that could want more than that by itself is refused; others wait
            until there is room, and requests that want none pass them meanwhile.
        allow: What paths of hook factories may begin with, for ``hooks``; None allows all.
        on_error: What an exception in a hook does, unless its spec says: ``"disable"``, ``"warn"`` or
            ``"raise"``, which fails the requests of that batch.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        max_batch: int = 32,
        max_waiting: int = 256,
        max_sequence: int | None = None,
        captured_bytes: int = 1 << 30,
        allow: Iterable[str] | None = ("hookline.factories",),
        on_error: str = "disable",
    ) -> None:
        _check_settings(model, on_error, max_batch=max_batch, max_waiting=max_waiting, captured_bytes=captured_bytes)
        self.model = model
        self.tokenizer = tokenizer
        self.max_sequence = longest_sequence(model, max_sequence)
        self._forward = BatchForward(model, Session(model))
        self._shapes = probe_model(self._forward, batches=max_batch > 1)
        self.widths = {source.module: shape.features for source, shape in self._shapes.items() if source.of == "output"}
        """How many numbers the output of each module has for a token; without modules that have no row for each."""
        self._session = self._forward.session = Session(
            model,
            self.between,
            allow=allow,
            on_error=on_error,
            widths=self.widths,
            outputs=self.widths,
            inputs=frozenset(source.module for source in self._shapes if source.of == "input"),
        )
        self._forward.end_probe()
        self._loop = EngineLoop(self._forward, max_batch=max_batch)
        self._eos = end_tokens(model, tokenizer)
        self._max_waiting = max_waiting
        self._captured_bytes = captured_bytes
        self._changed = threading.Condition()
        self._waiting: deque[RequestRow] = deque()
        self._known: dict[str, RequestRow] = {}
        """The requests that wait or run, and some that have ended, by their ids."""
        self._acts: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._accepted = self._refused = 0
        self._holding: list[Ticket] = []
        """Those whose hidden states have room."""
        self._thread: threading.Thread | None = None
        self.has_failed = False
        """Whether the engine has stopped by itself."""
        self._is_closing = False
        self._is_over = False
        self._deadline = float("inf")

    @property
    def hooks(self) -> LiveHooks:
        """Return the hooks of the engine, to add to and take from."""
        return self._session.live

    # -- from any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve; a second call does nothing."""
        with self._changed:
            if self._is_closing:
                raise EngineClosed("The engine was closed, and does not start again; make another.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hookline-engine", daemon=True)
                self._thread.start()
                atexit.register(self._close_at_exit)

    @property
    def is_running(self) -> bool:
        """Return whether requests are answered; False before the start, after the end, and after a failure."""
        return self._thread is not None and self._thread.is_alive() and not self._is_over

    def submit(
        self, request: GenerationRequest, on_event: Callable[[Event], None], *, allow: Sequence[str] = ()
    ) -> Ticket:
        """Queue a request.

        Args:
            request: What is asked.
            on_event: Called on the engine's thread with each `Token`, then once with `Finished`. It must not block: as
                long as it runs, no request gets a token. If it raises, that is logged, and the request cancelled.
            allow: What paths of factories of its hooks may begin with, beside those of `hookline.factories` that need
                no files.

        Raises:
            EngineBusy: As many wait as may.
            EngineClosed: The engine is not running, or takes no more.
            OptionError: The request is too long, or wants what cannot be had; its id is in use; a hook of it cannot
                be made, or is for outputs of another width.
            NotAllowedError: A hook of it has a factory that requests may not name, or files.
            NoMatchError: (a KeyError) a layer that the model does not have; the message names the nearest.
        """
        return self.submit_all([request], [on_event], allow=allow)

    def submit_all(
        self,
        requests: Sequence[GenerationRequest],
        listeners: Sequence[Callable[[Event], None]],
        *,
        allow: Sequence[str] = (),
        hold: bool = False,
    ) -> Ticket:
        """Queue several requests of one client, all or none; each has its ``on_event`` in `listeners`.

        Patterns of layers and hooks are matched once. With `hold`, the hidden states count as captured until
        `Ticket.release`, because the client still has them; otherwise until the last request has ended.
        """
        rows = self._rows(requests, listeners)
        ticket = Ticket(rows, self._wake, hold=hold)
        try:
            for row in rows:
                if row.request.hooks:
                    prepare = self._session.of_requests.prepare
                    row.hooks = prepare(row.request.id, row.request.hooks, allow, answers=len(rows))
            self._accept(rows)
        except BaseException:
            for row in rows:
                if row.hooks is not None:
                    row.hooks.close()
            raise
        return ticket

    def _rows(
        self, requests: Sequence[GenerationRequest], listeners: Sequence[Callable[[Event], None]]
    ) -> list[RequestRow]:
        """Return a row for each request, checked against the model before any of them touches it."""
        for request in requests:
            self._check_tokens(request)
        wanted = {request.states for request in requests} - {None}  # matched once, however many answers there are
        sources = {each: self._sources(each) for each in wanted if each is not None}
        rows = []
        for request, listener in zip(requests, listeners, strict=True):
            states, most = None, 0
            if request.states is not None:
                found = sources[request.states]
                most = self._most_bytes(request, found)
                prompt = len(request.prompt_ids)
                states = RequestStates(request.id, request.states, prompt, found, most)
            options: Any = {"tokenizer": self.tokenizer, "eos": self._eos, "states": states, "most_bytes": most}
            rows.append(RequestRow(request, listener, **options))
        nbytes = sum(row.most_bytes for row in rows)
        if nbytes > self._captured_bytes:
            raise OptionError(
                f"Its hidden states can come to {nbytes:,} bytes, and all requests together may have "
                f"{self._captured_bytes:,}; ask for fewer layers, positions, tokens or answers."
            )
        return rows

    def _check_tokens(self, request: GenerationRequest) -> None:
        prompt, answer, most = len(request.prompt_ids), request.max_tokens, self.max_sequence
        if most is not None and prompt + answer > most:
            raise OptionError(
                f"The prompt has {prompt} tokens and the answer may have {answer}, together {prompt + answer}; this "
                f"model takes {most}."
            )
        size = self._forward.vocabulary
        strange = next((token for token in request.prompt_ids if not 0 <= token < size), None)
        if strange is not None:  # on a GPU, an index that is out of bounds ends the process
            raise OptionError(f"Token {strange} is not in the model's vocabulary, which goes from 0 to {size - 1}.")
        if request.stop and self.tokenizer is None:
            raise OptionError("stop needs text, and this engine has no tokenizer; leave stop out.")

    def _sources(self, wanted: StatesWanted) -> list[StateSource]:
        """Return the sources that a request asks for, each once; raise if there is none for a name."""
        found: dict[StateSource, None] = {}
        for layer in dict.fromkeys(wanted.layers):
            named = [StateSource(name, wanted.of) for name, _ in select(self.model, layer)]
            known = [source for source in named if source in self._shapes]  # a glob over everything has containers too
            if not known:
                there = [source.module for source in self._shapes if source.of == wanted.of and source.module]
                raise OptionError(
                    f"{layer!r} has no {wanted.of} with a row for each token in a forward of this model; nearest that "
                    f"has: {', '.join(map(repr, nearest_names(layer, there)))}."
                )
            found |= dict.fromkeys(known)
        return list(found)

    def _most_bytes(self, request: GenerationRequest, sources: Sequence[StateSource]) -> int:
        """Return the bytes that the states of a request can come to; raise for positions that are never run."""
        assert request.states is not None
        prompt = len(request.prompt_ids)
        end = prompt + max(request.max_tokens, 1) - 1  # the last token of an answer is run by no forward
        request.states.check(prompt, end - 1)
        count = len(request.states.places(0, end, prompt))
        return sum(count * self._shapes[source].nbytes for source in sources)

    def _accept(self, rows: Sequence[RequestRow]) -> None:
        with self._changed:
            self._check_runs()
            ids = [row.request.id for row in rows]
            for place, id in enumerate(ids):
                other = self._known.get(id)
                if id in ids[:place] or (other is not None and other.finished is None):
                    raise OptionError(f"A request {id!r} is waiting or running already; give each an id of its own.")
            if len(self._waiting) + len(rows) > self._max_waiting:
                self._refused += len(rows)
                raise EngineBusy(
                    f"{len(self._waiting)} requests are waiting, and {self._max_waiting} may; try again later."
                )
            self._known.update(zip(ids, rows, strict=True))
            self._waiting.extend(rows)
            self._accepted += len(rows)
            self._changed.notify_all()

    def _check_runs(self) -> None:
        if self._thread is None or self._is_closing:
            raise EngineClosed(f"The engine {'is closing' if self._is_closing else 'has not been started'}.")
        if not self._thread.is_alive():
            raise EngineClosed("The engine runs in the process that this one was forked from; start one here.")

    def between(self, act: Callable[[], T]) -> Future[T]:
        """Run `act` while no forward is running: at once if none can be, else on the engine's thread.

        Recipe: ``engine.between(lambda: model.load_state_dict(newer)).result()``.
        """
        future: Future[T] = Future()
        with self._changed:
            runs = self.is_running
            if runs and threading.current_thread() is not self._thread:
                self._acts.append((act, future))
                self._changed.notify_all()
                return future
        _do(act, future)
        return future

    def close(self, drain_s: float = 30.0) -> None:
        """Refuse new requests, finish those that were accepted, then remove hooks and flush them.

        Args:
            drain_s: After so many seconds, those that are not finished are cancelled.
        """
        self._close(drain_s)

    def _close(self, drain_s: float, patience_s: float | None = None) -> None:
        with self._changed:
            self._is_closing = True
            self._deadline = min(self._deadline, time.monotonic() + drain_s)
            thread = self._thread
            self._changed.notify_all()
        if thread is None:
            self._finish()
        elif thread is threading.current_thread():
            return
        else:
            thread.join(patience_s)
        self.hooks.wait_until_closed(patience_s)

    def _close_at_exit(self) -> None:
        """Close before the interpreter ends: a thread inside torch would crash the process."""
        self._close(0.0, _EXIT_S)

    def counts(self) -> dict[str, float]:
        """Return figures for a metrics page: sums since the start, and what waits and runs now."""
        forward = self._forward
        return {
            **{f"requests_{reason}": self._loop.ended[reason] for reason in ("stop", "length", "cancelled", "error")},
            "requests_accepted": self._accepted,
            "requests_refused": self._refused,
            "requests_waiting": len(self._waiting),
            "requests_running": len(self._loop.rows),
            "prompt_tokens": forward.counts["prefill_tokens"],
            "answer_tokens": self._loop.answered,
            "prefill_forwards": forward.counts["prefill_forwards"],
            "decode_forwards": forward.counts["decode_forwards"],
            "forward_seconds": forward.seconds,
            "captured_bytes": self._session.states.gathered,
            "captured_bytes_reserved": self._reserved(),
            "captured_bytes_limit": self._captured_bytes,
            "hooks": len(self.hooks.list()),
        }

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- on the engine's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except BaseException as error:
            self.has_failed = True
            logger.exception("The engine has failed, and serves no more")
            self._abandon(f"The engine failed: {type(error).__name__}: {error}")
        finally:
            self._finish()

    def _run_once(self) -> bool:
        """Run one turn; return False if it was the last."""
        with self._changed:
            while not self._has_work():
                self._changed.wait(min(self._deadline - time.monotonic(), threading.TIMEOUT_MAX))
            acts = list(self._acts)
            self._acts.clear()
        for act, future in acts:
            _do(act, future)
        self._leave()
        if self._is_closing and time.monotonic() >= self._deadline:
            self._abandon(None)
        self._enter()
        if self._loop.rows:
            self._loop.run_round()
        self._forget()
        return bool(self._loop.rows or self._waiting or self._acts or not self._is_closing)

    def _has_work(self) -> bool:
        """Return whether there is something to do now; requests that wait for room alone are no work."""
        if self._acts or self._loop.rows or self._fitting() or any(row.cancelled for row in self._waiting):
            return True
        return self._is_closing and (not self._waiting or time.monotonic() >= self._deadline)

    def _fitting(self) -> list[RequestRow]:
        """Return the waiting requests that can be taken in now."""
        return self._loop.select_fitting(list(self._waiting), self._captured_bytes - self._reserved())

    def _reserved(self) -> int:
        """Return the bytes of hidden states that are set aside."""
        return sum(ticket.nbytes for ticket in tuple(self._holding) if ticket.needs_room)

    def _leave(self) -> None:
        """End cancelled requests, those that still wait too."""
        self._loop.leave_cancelled()
        with self._changed:
            gone = [row for row in self._waiting if row.cancelled]
            for row in gone:
                self._waiting.remove(row)
        for row in gone:
            self._loop.end(row, entered=False)

    def _enter(self) -> None:
        with self._changed:
            rows = self._fitting()
            for row in rows:
                self._waiting.remove(row)
                if row.ticket.nbytes and not row.ticket.has_room:
                    row.ticket.has_room = True
                    self._holding.append(row.ticket)
        if rows:
            self._loop.enter(rows)

    def _forget(self) -> None:
        """Drop requests that have ended, and the room of states that nobody keeps."""
        running = self._loop.rows
        with self._changed:
            self._known = {row.request.id: row for row in (*running, *self._waiting)}
            self._holding = [ticket for ticket in self._holding if ticket.needs_room]

    def _abandon(self, error: str | None) -> None:
        """End all requests that are left."""
        with self._changed:
            self._is_closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for row in waiting:
            self._loop.end(row, error, entered=False)
        self._loop.abandon(error)

    def _finish(self) -> None:
        with self._changed:
            self._is_over = True
            acts = list(self._acts)
            self._acts.clear()
        for act, future in acts:
            _do(act, future)
        self._session.close()
        atexit.unregister(self._close_at_exit)


def _check_settings(model: nn.Module, on_error: str, **limits: int) -> None:
    """Raise for a model that cannot be served as it is, and for settings of an engine that mean nothing."""
    check_model(model)
    if model.training:
        raise OptionError("The model is in training mode, where dropout changes its answers; call model.eval().")
    if any(_torch.is_compiled(each) or _torch.is_compiled_function(each.forward) for each in model.modules()):
        raise OptionError("The model is compiled, and hooks come and go while it is served; give the model itself.")
    if on_error not in ("disable", "warn", "raise"):
        raise OptionError(f"on_error is 'disable', 'warn' or 'raise', got {on_error!r}.")
    for name, value in limits.items():
        least = 1 if name == "max_batch" else 0
        if type(value) is not int or value < least:
            raise OptionError(f"{name} is a whole number from {least} on, got {value!r}.")


def _do(act: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(act())
    except BaseException as error:
        future.set_exception(error)
