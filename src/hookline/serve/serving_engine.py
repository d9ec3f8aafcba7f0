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
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import torch

from hookline.engines.live_hooks import at_once
from hookline.engines.session import Session
from hookline.errors import EngineBusy, EngineClosed, OptionError
from hookline.serve.generation_request import Event, GenerationRequest
from hookline.serve.request_row import RequestRow, Ticket
from hookline.serve.row_batch import BatchForward, RowBatch, choose
from hookline.serve.served_model import ServedModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookline.engines.live_hooks import LiveHooks

logger = logging.getLogger("hookline.serve.serving_engine")

T = TypeVar("T")

_EXIT_S: Final = 90.0
"""How long a program that ends waits for an engine that was not closed: hooks may take a minute to write all."""
_PREFILL_TOKENS: Final = 16_384
"""Prompts that are run together have at most so many tokens, padding included; a longer one is run alone."""

_COUNTS: Final = (
    *(f"requests_{reason}" for reason in ("stop", "length", "cancelled", "error")),
    *("prompt_tokens", "answer_tokens", "prefill_forwards", "decode_forwards", "forward_seconds"),
)


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
        if max_batch < 1 or min(max_waiting, captured_bytes) < 0 or (max_sequence is not None and max_sequence < 1):
            raise OptionError("max_batch and max_sequence are at least 1, max_waiting and captured_bytes at least 0.")
        self.model = model
        self.tokenizer = tokenizer
        self._served = ServedModel(model, tokenizer, max_sequence=max_sequence, batches=max_batch > 1)
        self.max_sequence = self._served.max_sequence
        self.widths = self._served.widths
        """How many numbers the output of each module has for a token; without modules that have no row for each."""
        self._session = self._served.forward.session = Session(
            model, self.between, allow=allow, widths=self.widths, outputs=self.widths, inputs=self._served.inputs
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
                atexit.register(self.close, 0.0, patience_s=_EXIT_S)

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
        return at_once(act, future)

    def close(self, drain_s: float = 30.0, *, patience_s: float | None = None) -> None:
        """Refuse new requests, finish those that were accepted, then remove hooks and flush them.

        Args:
            drain_s: After so many seconds, those that are not finished are cancelled.
            patience_s: How long to wait for the end; None waits for it.
        """
        with self._changed:
            self._is_closing = True
            self._deadline = min(self._deadline, time.monotonic() + drain_s)
            thread = self._thread
            self._changed.notify_all()
        if thread is None:
            self._finish()
        elif thread is not threading.current_thread():
            thread.join(patience_s)

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
        self._loop.let_go()
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
            at_once(act, future)

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
        atexit.unregister(self.close)


class EngineLoop:
    """Hold the batch that runs, and move rows into and out of it."""

    def __init__(self, forward: BatchForward, *, max_batch: int) -> None:
        self._forward = forward
        self._session = forward.session
        self._batch = RowBatch(forward)
        self._max_batch = max_batch
        self.counts: dict[str, float] = dict.fromkeys(_COUNTS, 0)
        """Requests by how they ended, forwards with the choice of tokens, and tokens, since the start."""

    @property
    def rows(self) -> list[RequestRow]:
        """Return the rows that run."""
        return self._batch.rows

    def fitting(self, waiting: Sequence[RequestRow]) -> Sequence[RequestRow]:
        """Return the first rows of `waiting`, as many as can be taken in together."""
        width = count = 0
        for row in waiting[: self._max_batch - len(self.rows)]:
            width = max(width, len(row.request.prompt_ids))
            if count and width * (count + 1) > _PREFILL_TOKENS:
                break
            count += 1
        return waiting[:count]

    def enter(self, rows: Sequence[RequestRow]) -> None:
        """Run the prompts of new rows, and put those that go on into the batch."""
        joining = RowBatch(self._forward, [row for row in rows if self._open(row)])
        if joining.rows:
            self.counts["prompt_tokens"] += sum(len(row.request.prompt_ids) for row in joining.rows)
            self._advance(joining, joining.prefill, "prefill_forwards")
        if joining.rows:
            try:
                self._batch.join(joining)
            except Exception as error:  # no memory, most likely; the running rows are unchanged
                self._fail(joining, error)

    def _open(self, row: RequestRow) -> bool:
        """Attach what `row` asks for; return False, and fail the row, if that raises."""
        try:
            row.open(self._session)
        except Exception as error:
            self._fail(RowBatch(self._forward, [row]), error)
            return False
        return True

    def run_round(self) -> None:
        """Run one more token for every row of the batch."""
        self._advance(self._batch, self._batch.decode, "decode_forwards")

    def _advance(self, batch: RowBatch, forward: Callable[[], Tensor], counted: str) -> None:
        """Run a forward, give each row its next token, and release the rows that end with it."""
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                chosen = choose(forward(), [row.request for row in batch.rows], [row.draws for row in batch.rows])
            flags = self._session.collect()
        except Exception as error:
            self._fail(batch, error)
            return
        self.counts["forward_seconds"] += time.perf_counter() - start
        self.counts[counted] += 1
        for row, choice in zip(batch.rows, chosen, strict=True):
            before = len(row.answer)
            row.take(choice, flags.get(row.request.id, ()))
            self.counts["answer_tokens"] += len(row.answer) - before
        self.let_go(batch)

    def let_go(self, batch: RowBatch | None = None) -> None:
        """Release the rows that are over or cancelled; of those that run if no other batch is given."""
        batch = batch or self._batch
        rows = batch.rows
        goes = [row.is_over or row.cancelled for row in rows]  # read once: any thread may cancel
        try:
            batch.keep([place for place, is_going in enumerate(goes) if not is_going])
        except Exception as error:
            self._fail(batch, error)
        for row, is_going in zip(rows, goes, strict=True):
            if is_going:
                self.end(row)

    def end(self, row: RequestRow, error: str | None = None) -> None:
        """End a row that is out of the batch: with `error`, as complete, or as cancelled."""
        if row.finished is None:
            row.error = row.error or error
            row.end(self._session)
            self.counts[f"requests_{row.finished}"] += 1

    def abandon(self, rows: Sequence[RequestRow], error: str) -> None:
        """Empty the batch, and end `rows` with an error."""
        self._batch.clear()
        for row in rows:
            self.end(row, error)

    def _fail(self, batch: RowBatch, error: Exception) -> None:
        rows = batch.rows
        logger.error("A forward failed, and with it %d requests", len(rows), exc_info=error)
        batch.clear()
        for row in rows:
            self.end(row, f"{type(error).__name__}: {error}")
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
