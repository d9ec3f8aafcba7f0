"""Hand every record to the log first, then to each sink.

The manager calls `FanOut.write`. Sinks that are slow read the log in a helper process; the others run here, each behind
a `RetryingSink`. A sink that fails is warned of once and counted; the run and the other sinks go on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from hookline.error_policy import ErrorPolicy
from hookline.errors import HooklineWarning, MissingPackageError, OptionError
from hookline.messages import type_name
from hookline.records.helper_process import HelperProcess, sink_recipe
from hookline.records.log import RecordLog
from hookline.records.resilient_log import BackOff, ResilientLog
from hookline.records.sink import Record, check_sink, hand

__all__ = ["FanOut", "has_ranks", "own_rank"]

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 1_000
"""Records that wait for one sink; the log has them all."""


class FanOut:
    """A log and several sinks, as one.

    Recipe::

        fan_out = hookline.records.FanOut([hookline.sinks.JSONLSink("metrics.jsonl")], log="records.jsonl")
        manager = hookline.HookManager(hooks=[MyHook()], sinks=fan_out)

    Args:
        sinks: Where records go; anything with ``emit(metrics, epoch, hook_point)``. Those that are ``slow`` run in a
            helper process, which begins with the first record and reads the log.
        log: The record log, or its path; None for none (with slow sinks, one in a temporary folder). In a process
            group only rank 0 has a log and sinks; processes that are in none have each their own log.
        patience: Seconds that ``flush`` and ``close`` wait for slow sinks.
    """

    is_silent = False
    """Whether it writes nothing: this is a process of a distributed run, and not the first."""
    keep_streams: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around each call of a sink that is not one of ours, which may draw random numbers: a manager sets it to what
    gives the run its streams back. It is not imported here, as the helper process has no torch."""

    def __init__(
        self, sinks: Iterable[Any] = (), log: str | Path | RecordLog | None = None, *, patience: float = 30.0
    ) -> None:
        if callable(getattr(sinks, "emit", None)):
            one = f"{sinks.__name__}()" if isinstance(sinks, type) else type_name(sinks)
            raise OptionError(f"sinks= takes a list of sinks; put {one} into one.")
        self._errors = ErrorPolicy()
        self.pending = self._errors.pending
        """Warnings that wait for `warn_pending`."""
        self._patience = patience
        if has_ranks() and own_rank() > 0:  # rank 0 writes what all ranks have to say
            self.is_silent, log = True, None
        self._log = None if log is None else ResilientLog(_log_of_rank(log), self._errors)
        self._helper: HelperProcess | None = None
        self.sinks: list[Any] = []
        """All of them, as given; a slow one does no work here, it only describes itself to the helper process."""
        self._local: list[RetryingSink] = []
        self._names: Counter[str] = Counter()
        self.is_empty = log is None
        """Whether there is neither a log nor a sink; read at every firing."""
        for sink in sinks:
            self.add(sink)

    @property
    def errors(self) -> Counter[str]:
        """How often each sink has failed, by its class, and its place among those of one class; also the ``"log"``."""
        if self._helper is not None:
            self._helper.read_messages()
        return self._errors.counts

    @property
    def log(self) -> Path | None:
        """The path of the log."""
        return None if self._log is None else self._log.path

    def open_log(self, path: Path) -> None:
        """Write every record from now on to a log at ``path``, if there is none yet."""
        if self.log is None and not self.is_silent:
            self._log = ResilientLog(_log_of_rank(path), self._errors)
            self.is_empty = False

    def release_log(self) -> None:
        """Let others write the file of the log; the next record opens it again."""
        if self._log is not None:
            self._log.close()

    def add(self, sink: Any) -> None:
        """Add a sink; it receives the records from now on."""
        check_sink(sink, "sinks= takes objects")
        cls = type(sink).__name__
        self._names[cls] += 1
        name = cls if self._names[cls] == 1 else f"{cls} {self._names[cls]}"
        self.sinks.append(sink)
        if self.is_silent:
            return
        self.is_empty = False
        recipe = sink_recipe(sink, name) if getattr(sink, "slow", False) else None
        if isinstance(recipe, dict):
            self._log = self._log or ResilientLog(None, self._errors)
            self._helper = self._helper or HelperProcess(self._log, self._errors, self._patience)
            self._helper.add(recipe)
            return
        if recipe is not None:
            self._errors.warn_later(
                f"here {name}",
                f"{name} is slow, and runs in this process all the same, where it holds the training up: {recipe}.",
            )
        self._local.append(RetryingSink(name, sink))

    def write(self, record: Record) -> None:
        """Hand ``record`` to the log and to every sink, unless it is empty."""
        if not record.metrics:
            return
        if self._log is not None:
            record = self._log.append(record)
        self._each("take metrics", lambda sink: sink.write(record))
        if self._helper is not None:
            self._helper.keep_running()

    def set_run_context(self, context: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Tell the log and every sink which run follows."""
        context = {**(context or {}), **more}
        if self._log is not None:
            self._log.append_context(context)
        self._drop_waiting()
        self._each("begin another run", lambda sink: sink.call("set_run_context", **context))

    def flush(self) -> None:
        """Write everything: the log to the disk, and what sinks hold back. Wait for slow sinks."""
        self._flush_local()
        if self._helper is not None and self._log is not None:
            self._helper.flush(self._log.number)

    def _flush_local(self) -> None:
        if self._log is not None:
            self._log.flush()
        self._each("take metrics", RetryingSink.retry_now)
        self._each("flush", lambda sink: sink.call("flush"))

    def close(self) -> None:
        """Flush, and close files and processes. May be called more than once."""
        # Slow sinks come last: a user who interrupts the wait for them has everything else closed.
        self._flush_local()
        self._drop_waiting()
        self._each("close", lambda sink: sink.call("close"))
        if self._log is None:
            return
        self._log.close()
        if self._helper is not None:
            self._helper.flush(self._log.number)
        if self._helper is None or not self._helper.close():
            self._log.remove()  # else the helper process removes a temporary log, when everything is delivered

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the log, and of each sink of this process, for a run that is resumed from now."""
        states: dict[str, Any] = {}

        def keep(sink: RetryingSink) -> None:
            if hasattr(sink.sink, "state_dict"):
                states[sink.name] = sink.sink.state_dict()

        self._each("say how far it is", keep)
        return {"log": {} if self._log is None else self._log.state_dict(), "sinks": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drop what was written after ``state``. Slow sinks skip what they have received already."""
        if self._log is not None:
            self._log.load_state_dict(state.get("log", {}))
        states = state.get("sinks", {})

        def restore(sink: RetryingSink) -> None:
            sink.drop_waiting()
            if sink.name in states and hasattr(sink.sink, "load_state_dict"):
                sink.sink.load_state_dict(states[sink.name])

        self._each("go back to where it was", restore)
        if self._helper is not None:
            self._helper.seek()

    def warn_pending(self) -> None:
        """Issue the warnings that were collected; a warning may raise, so the manager calls this last."""
        if self._errors.pending:
            self._errors.warn_pending()

    def __enter__(self) -> FanOut:
        return self

    def __exit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        self.close()
        try:
            self.warn_pending()
        except HooklineWarning:  # where warnings are errors; the user has to see what ended the block
            if error_class is None:
                raise

    def _each(self, what: str, act: Callable[[RetryingSink], None]) -> None:
        for sink in self._local:
            try:
                if sink.is_foreign:
                    with self.keep_streams():
                        act(sink)
                else:
                    act(sink)
            except Exception as error:
                self._note_failure(sink.name, what, error)

    def _drop_waiting(self) -> None:
        """Try once more to deliver what waits; drop the rest, as it belongs to the run that is over."""
        self._each("take metrics", RetryingSink.retry_now)
        for sink in self._local:
            if lost := sink.drop_waiting():
                where = "the log has them: hookline replay" if self._log is not None else "there is no log"
                self._errors.warn_later(
                    f"lost {sink.name} {lost}", f"{sink.name} could not take {lost:,} records of the run; {where}."
                )

    def _note_failure(self, name: str, what: str, error: Exception) -> None:
        self._errors.count(name, error)
        is_new = self._errors.warn_later(
            name,
            f"{name} could not {what} ({type(error).__name__}: {error}); the run and the other sinks go on. "
            "Further failures are counted in manager.sink_errors.",
        )
        if is_new:
            # For a full disk or a missing package the sentence is enough; a mistake in a sink needs its traceback.
            is_clear = isinstance(error, OSError | OptionError | MissingPackageError)
            level = logging.INFO if is_clear else logging.ERROR
            logger.log(level, "%s could not %s; the run goes on", name, what, exc_info=error)


class RetryingSink:
    """A sink of this process, and the records it could not take yet.

    An `OSError` (a full disk, a host that is gone) passes, so the record waits and is given again, ever later, before
    those that follow. Any other error would be raised again, so that record is skipped.
    """

    def __init__(self, name: str, sink: Any) -> None:
        self.name, self.sink = name, sink
        self.is_foreign = not type(sink).__module__.startswith("hookline.")
        """Whether somebody else wrote it. Ours draw nothing, which a test of each holds."""
        self._waiting: deque[Record] = deque()
        self._back_off = BackOff()
        self._num_lost = 0

    def write(self, record: Record) -> None:
        """Hand over ``record``, after those that wait; raise what the sink raises."""
        if self._waiting:
            self._wait(record)
            self._write_waiting()
            return
        try:
            hand(self.sink, record)
        except OSError:
            self._wait(record)
            self._back_off.fail()
            raise

    def retry_now(self) -> None:
        """Try at once to hand over what waits."""
        if self._waiting:
            self._back_off.hurry()
            self._write_waiting()

    def drop_waiting(self) -> int:
        """Drop what waits; return how many records were lost since the last time."""
        lost, self._num_lost = self._num_lost + len(self._waiting), 0
        self._waiting.clear()
        self._back_off.reset()
        return lost

    def call(self, method: str, **arguments: Any) -> None:
        """Call ``method`` of the sink, if it has one."""
        if hasattr(self.sink, method):
            getattr(self.sink, method)(**arguments)

    def _write_waiting(self) -> None:
        while self._waiting and self._back_off.is_due:
            try:
                hand(self.sink, self._waiting[0])
            except OSError:
                self._back_off.fail()
                raise
            except Exception:
                self._waiting.popleft()
                raise
            self._waiting.popleft()
            self._back_off.reset()

    def _wait(self, record: Record) -> None:
        self._waiting.append(record)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._num_lost += 1


def _log_of_rank(log: str | Path | RecordLog) -> Path | RecordLog:
    """Return the log of this process of a distributed run: ``records.rank1.jsonl``."""
    if isinstance(log, RecordLog):
        return log
    path, rank = Path(log), own_rank()
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def own_rank() -> int:
    """Return which process of a distributed run this is, as torch or ``torchrun`` says; 0 without either."""
    if has_ranks():
        return int(sys.modules["torch.distributed"].get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def has_ranks() -> bool:
    """Return whether this is one of several processes that can reach each other, so that one writes for all.

    torch is not imported for it: a process that has not imported torch is in no group.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    is_in_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return bool(is_in_group and distributed.get_world_size() > 1)
