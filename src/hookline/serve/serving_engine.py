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

from hookline.errors import EngineBusy, EngineClosed, OptionError
from hookline.serve.engine_counts import EngineCount
from hookline.serve.generation.engine_loop import EngineLoop
from hookline.serve.generation.hidden_states import Gatherer
from hookline.serve.generation.model_probe import end_tokens, longest_sequence, probe_model
from hookline.serve.generation.request_row import RequestRow, Ticket
from hookline.serve.generation.request_validator import RequestValidator, check_settings
from hookline.serve.generation.row_batch import BatchForward
from hookline.serve.generation_request import Event, GenerationRequest
from hookline.serve.live_hooks import LiveHooks
from hookline.serve.request_hook_maker import RequestHookMaker

if TYPE_CHECKING:
    from torch import nn

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
            engine is made, the model is run a few times on a few tokens, which its hooks do not see: to learn which
            modules have hidden states, and that padding does not change its answers. Of a compiled model, compiled code
            runs the tokens of answers, and prompts are run as they are; it is compiled three times (for the first
            answer, for any length, for more than one row) and again when hooks come, or states are asked for, where
            none were. Requests wait meanwhile; after eight times, torch runs as it is what it has no code for.
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
        check_settings(model, on_error, max_batch=max_batch, max_waiting=max_waiting, captured_bytes=captured_bytes)
        self.model = model
        self.tokenizer = tokenizer
        self.max_sequence = longest_sequence(model, max_sequence)
        self._forward = BatchForward(model)
        shapes = probe_model(self._forward, batches=max_batch > 1)
        self.widths = {source.name: shape.features for source, shape in shapes.items() if source.of == "output"}
        """How many numbers the output of each module has for a token; without modules that have no row for each."""
        self._validator = RequestValidator(
            model,
            shapes,
            max_sequence=self.max_sequence,
            vocabulary=self._forward.vocabulary,
            captured_bytes=captured_bytes,
            has_text=tokenizer is not None,
        )
        self._forward.end_probe()
        self._gatherer = self._forward.gatherer = Gatherer(model, self._forward.device)
        self._loop = EngineLoop(self._forward, self._gatherer, max_batch=max_batch)
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
        self._is_closing = False
        self._is_over = False
        self._deadline = float("inf")
        self.hooks = LiveHooks(model, self.between, allow=allow, on_error=on_error, widths=self.widths)
        self._request_hooks = LiveHooks(model, self.between, allow=None, widths=self.widths)
        """Those of single requests, which nobody else is shown."""
        self._hook_maker = RequestHookMaker(
            model,
            self._request_hooks,
            self.widths,
            frozenset(source.name for source in shapes if source.of == "input"),
            is_compiled=self._forward.is_compiled,
        )

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
        options = {"tokenizer": self.tokenizer, "eos": self._eos}
        rows = [
            RequestRow(request, listener, states=states, **options)
            for request, listener, states in zip(requests, listeners, self._validator.check(requests), strict=True)
        ]
        ticket = Ticket(rows, self._wake, hold=hold)
        try:
            for row in rows:
                row.hooks = self._hook_maker.prepare(row.request.id, row.request.hooks, allow, answers=len(rows))
            self._accept(rows)
        except BaseException:
            for row in rows:
                if row.hooks is not None:
                    row.hooks.close()
            raise
        return ticket

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

    def counts(self) -> dict[EngineCount, float]:
        """Return figures for a metrics page: sums since the start, and what waits and runs now."""
        ended, forward = self._loop.ended, self._forward
        return {
            EngineCount.REQUESTS_ACCEPTED: self._accepted,
            EngineCount.REQUESTS_REFUSED: self._refused,
            EngineCount.REQUESTS_STOP: ended["stop"],
            EngineCount.REQUESTS_LENGTH: ended["length"],
            EngineCount.REQUESTS_CANCELLED: ended["cancelled"],
            EngineCount.REQUESTS_ERROR: ended["error"],
            EngineCount.REQUESTS_WAITING: len(self._waiting),
            EngineCount.REQUESTS_RUNNING: len(self._loop.rows),
            EngineCount.PROMPT_TOKENS: forward.counts["prefill_tokens"],
            EngineCount.ANSWER_TOKENS: self._loop.answered,
            EngineCount.PREFILL_FORWARDS: forward.counts["prefill_forwards"],
            EngineCount.DECODE_FORWARDS: forward.counts["decode_forwards"],
            EngineCount.FORWARD_SECONDS: forward.seconds,
            EngineCount.CAPTURED_BYTES: self._gatherer.gathered,
            EngineCount.CAPTURED_BYTES_RESERVED: self._reserved(),
            EngineCount.CAPTURED_BYTES_LIMIT: self._captured_bytes,
            EngineCount.HOOKS: len(self.hooks.list()),
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
        self.hooks.close()
        self._request_hooks.close()
        atexit.unregister(self._close_at_exit)


def _do(act: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(act())
    except BaseException as error:
        future.set_exception(error)
