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
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hookline.engines.session import Session
from hookline.errors import EngineBusy, EngineClosed, OptionError
from hookline.serve.engine_loop import EngineLoop
from hookline.serve.generation_request import Event, GenerationRequest
from hookline.serve.request_row import RequestRow, Ticket
from hookline.serve.served_model import ServedModel

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
        captured_bytes: Hidden states that all requests together may want, from when a request is submitted until it
            has ended (or is released, see `submit_all`). One that could want more than that by itself is refused; one
            for which others leave no room is told to come back (`EngineBusy`).
        allow: What paths of hook factories may begin with, for ``hooks``; None allows all.
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
    ) -> None:
        limits = {"max_batch": max_batch, "max_waiting": max_waiting, "captured_bytes": captured_bytes}
        _check_limits(**limits, max_sequence=1 if max_sequence is None else max_sequence)
        self.model = model
        self.tokenizer = tokenizer
        self._served = ServedModel(model, tokenizer, max_sequence=max_sequence, batches=max_batch > 1)
        self.max_sequence = self._served.max_sequence
        self.widths = self._served.widths
        """How many numbers the output of each module has for a token; without modules that have no row for each."""
        self._session = self._served.forward.session = Session(
            model,
            self.between,
            allow=allow,
            widths=self.widths,
            outputs=self.widths,
            inputs=self._served.inputs,
        )
        self._loop = EngineLoop(self._served.forward, max_batch=max_batch)
        self._max_waiting = max_waiting
        self._captured_bytes = captured_bytes
        self._changed = threading.Condition()
        """Guards what follows, and tells the engine's thread that there is something to do."""
        self._tickets: list[Ticket] = []
        """All that was accepted, until it has ended and its hidden states are kept by nobody."""
        self._waiting: list[RequestRow] = []
        self._acts: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._accepted = self._refused = 0
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
                # Before the interpreter ends: a thread inside torch would crash the process.
                atexit.register(self._close, 0.0, _EXIT_S)

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
            EngineBusy: As many wait as may, or the hidden states or hooks of others leave no room.
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
        rows = [self._served.row(*each) for each in zip(requests, listeners, strict=True)]
        ticket = Ticket(rows, hold=hold)
        try:
            for row in rows:
                if row.request.hooks:
                    prepare = self._session.of_requests.prepare
                    row.hooks = prepare(row.request.id, row.request.hooks, allow, answers=len(rows))
            self._accept(ticket)
        except BaseException:
            for row in rows:
                if row.hooks is not None:
                    row.hooks.close()
            raise
        return ticket

    def _accept(self, ticket: Ticket) -> None:
        """Queue all rows of a ticket, or none; raise if they would be more than the engine may hold."""
        with self._changed:
            self._check_runs()
            self._tickets = [each for each in self._tickets if each.is_open]
            in_use = {row.request.id for each in self._tickets for row in each.rows if row.finished is None}
            for row in ticket.rows:
                if row.request.id in in_use:
                    raise OptionError(
                        f"A request {row.request.id!r} is waiting or running already; give each its own id."
                    )
                in_use.add(row.request.id)
            if ticket.nbytes > self._captured_bytes:
                raise OptionError(
                    f"Its hidden states can come to {ticket.nbytes:,} bytes, and all requests together may have "
                    f"{self._captured_bytes:,}; ask for fewer layers, positions, tokens or answers."
                )
            if len(self._waiting) + len(ticket.rows) > self._max_waiting:
                self._refuse(ticket, f"{len(self._waiting)} requests are waiting, and {self._max_waiting} may")
            if ticket.nbytes > self._captured_bytes - self._reserved():
                self._refuse(ticket, "The hidden states of other requests leave no room for these")
            self._tickets.append(ticket)
            self._waiting.extend(ticket.rows)
            self._accepted += len(ticket.rows)
            self._changed.notify_all()

    def _refuse(self, ticket: Ticket, why: str) -> NoReturn:
        self._refused += len(ticket.rows)
        raise EngineBusy(f"{why}; try again later.")

    def _reserved(self) -> int:
        """Return the bytes of hidden states that are set aside."""
        return sum(ticket.nbytes for ticket in self._tickets if ticket.is_open)

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

    def counts(self) -> dict[str, float]:
        """Return figures for a metrics page: sums since the start, and what waits and runs now."""
        with self._changed:
            reserved = self._reserved()
        return {
            **self._loop.counts,
            "requests_accepted": self._accepted,
            "requests_refused": self._refused,
            "requests_waiting": len(self._waiting),
            "requests_running": len(self._loop.rows),
            "captured_bytes": self._session.states.gathered,
            "captured_bytes_reserved": reserved,
            "captured_bytes_limit": self._captured_bytes,
            "hooks": len(self.hooks.list()),
        }

    # -- on the engine's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._has_work():
                self._run_once()
        except BaseException as error:
            self.has_failed = True
            logger.exception("The engine has failed, and serves no more")
            self._abandon(f"The engine failed: {type(error).__name__}: {error}")
        finally:
            self._finish()

    def _has_work(self) -> bool:
        """Wait for something to do; return False once the engine is closing and all is done."""
        with self._changed:
            while True:
                if self._acts or self._waiting or self._loop.rows:
                    return True
                if self._is_closing:
                    return False
                self._changed.wait()

    def _run_once(self) -> None:
        """Do what has to be done between two forwards, then run one: over new prompts, and over all that runs."""
        self._do_acts()
        if time.monotonic() >= self._deadline:
            for ticket in self._tickets:
                ticket.cancel()
        self._loop.leave_cancelled()
        with self._changed:
            gone = [row for row in self._waiting if row.cancelled]
            self._waiting = [row for row in self._waiting if row not in gone]
            entering = self._loop.fitting(self._waiting)
            self._waiting = self._waiting[len(entering) :]
        for row in gone:
            self._loop.end(row)
        self._loop.enter(entering)
        if self._loop.rows:
            self._loop.run_round()

    def _do_acts(self) -> None:
        with self._changed:
            acts, self._acts = self._acts, deque()
        for act, future in acts:
            _do(act, future)

    def _abandon(self, error: str) -> None:
        """End all requests that are left."""
        with self._changed:
            self._is_closing = True
            self._waiting = []
        self._loop.abandon([row for ticket in self._tickets for row in ticket.rows], error)

    def _finish(self) -> None:
        with self._changed:
            self._is_over = True
        self._do_acts()
        self._session.close()
        atexit.unregister(self._close)


def _check_limits(**limits: int) -> None:
    """Raise for a limit that means nothing."""
    for name, value in limits.items():
        least = 1 if name in ("max_batch", "max_sequence") else 0
        if type(value) is not int or value < least:
            raise OptionError(f"{name} is a whole number from {least} on, got {value!r}.")


def _do(act: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(act())
    except BaseException as error:
        future.set_exception(error)
