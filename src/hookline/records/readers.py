"""Hand every record to the log first, then to each sink: a sink is a reader of the log.

The manager calls `FanOut.write`. Each sink has a `Reader`; slow ones have theirs in a process of their own. `replay`
reads the log of another run.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from hookline.error_policy import ErrorPolicy, error_text
from hookline.errors import HooklineWarning, MissingPackageError, OptionError
from hookline.messages import type_name
from hookline.records.helper import HelperProcess, failure_text, sink_recipe
from hookline.records.log import Context, Entry, Log, MemoryLog, Reader, RecordLog, cleaned, hand, read_log
from hookline.records.sink import Record, RunSink, check_sink

__all__ = ["FanOut", "has_ranks", "own_rank", "replay"]

logger = logging.getLogger(__name__)


class FanOut:
    """A log and several sinks, as one.

    Recipe::

        fan_out = hookline.records.FanOut([hookline.sinks.JSONLSink("metrics.jsonl")], log="records.jsonl")
        manager = hookline.HookManager(hooks=[MyHook()], sinks=fan_out)

    Args:
        sinks: Where records go; anything with ``emit(metrics, epoch, hook_point)``. Those that are ``slow`` run in a
            helper process, which begins with the first record and reads the log.
        log: The record log, or its path; None for none (with slow sinks, and when a sink fails, one in a temporary
            folder). In a process group only rank 0 has a log and sinks; processes that are in none have each their own.
        patience: Seconds that ``close`` waits for slow sinks.
    """

    is_silent = False
    """Whether it writes nothing: this is a process of a distributed run, and not the first."""
    keep_streams: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around the calls of sinks if one is not of ours, and may draw random numbers: a manager sets it to what gives the
    run its streams back. It is not imported here, as the helper process has no torch."""

    def __init__(
        self, sinks: Iterable[Any] = (), log: str | Path | RecordLog | None = None, *, patience: float = 30.0
    ) -> None:
        if isinstance(sinks, str) or callable(getattr(sinks, "emit", None)) or not isinstance(sinks, Iterable):
            got = f"{sinks.__name__}: call it" if isinstance(sinks, type) else type_name(sinks)
            raise OptionError(f"sinks= takes a list of sinks, such as [hookline.sinks.MemorySink()]; got {got}.")
        self._errors = ErrorPolicy()
        self.pending = self._errors.pending
        """Warnings that wait for `warn_pending`."""
        self._patience = patience
        if has_ranks() and own_rank() > 0:  # rank 0 writes what all ranks have to say
            self.is_silent, log = True, None
        self._log: RecordLog | MemoryLog = MemoryLog() if log is None else _log_of_rank(log)
        self._temporary: Path | None = None  # the folder of a log for slow sinks alone
        self._streams: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._helper: HelperProcess | None = None
        self._context: dict[str, Any] = {}
        self._is_log_of_run = False
        """Whether the log is one that `open_log` opened."""
        self._first = self._log.number
        """The number of the first record of the run: a log may hold older runs."""
        self._is_resumed = False
        self._log_error: Exception | None = None
        self.sinks: list[Any] = []
        """All of them, as given; a slow one does no work here, it only describes itself to the helper process."""
        self._readers: list[Reader] = []
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
        return self._log.path

    def open_log(self, path: Path) -> None:
        """Write every record from now on to a log at ``path``, unless one was asked for when this was made.

        A log that was opened so for another run is closed, and the next record of each sink begins another file.
        """
        is_unused = self.log is None or (self._temporary is not None and not self._log.number)
        if self.is_silent or self.log == path or not (is_unused or self._is_log_of_run):
            return
        for reader in self._readers if self._is_log_of_run else ():
            if isinstance(reader.sink, RunSink):
                reader.call("end_run")
                reader.sink.files.clear()
        self._log.close()
        log = _log_of_rank(path)
        self._first = log.number
        self._use(log)
        self._is_log_of_run, self.is_empty = True, False

    def release_log(self) -> None:
        """Let others write the file of the log; the next record opens it again, and sinks get what they have added."""
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
        if getattr(sink, "slow", False):
            self._add_slow(sink_recipe(sink, name))
            return
        if not type(sink).__module__.startswith("hookline."):  # ours draw no random numbers, which a test of each holds
            self._streams = lambda: self.keep_streams()
        reader = Reader(name, sink, self._log, self._note_failure)
        reader.go_to_end(self._log)
        self._readers.append(reader)

    def write(self, record: Record) -> None:
        """Hand ``record`` to the log and to every sink, unless it is empty."""
        if record.metrics:
            self._put(record)
            if self._helper is not None:
                self._helper.keep_running()

    def set_run_context(self, context: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Tell the log and every sink which run follows."""
        told = cleaned({**(context or {}), **more})
        if self._is_resumed and told.items() <= self._context.items():
            return  # the log knows: the run goes on
        self._context |= told
        self._put(Context({**(context or {}), **more}))

    def _put(self, entry: Entry) -> None:
        self._is_resumed = False
        if self._helper is not None and isinstance(self._log, MemoryLog):  # it was closed, and is used again
            self._use_temporary_log()
        log = self._log
        entry = log.append(entry)
        if log.error is not None:
            self._note_log()
        with self._streams():
            for reader in self._readers:
                reader.advance(entry)
        if isinstance(log, MemoryLog):
            log.drop(min((reader.offset for reader in self._readers), default=log.size))

    def flush(self) -> None:
        """Write everything: the log to the disk, and what sinks hold back. Slow sinks follow by themselves."""
        self._log.sync()
        self._note_log()
        with self._streams():
            for reader in self._readers:
                if reader.offset != self._log.size:
                    reader.back_off.reset()
                    reader.advance()
                reader.call("flush")

    def close(self) -> None:
        """Flush, wait for slow sinks, and close files and processes. May be called more than once."""
        self.flush()
        with self._streams():
            for reader in self._readers:
                if reader.offset != self._log.size and reader.number < self._log.number:
                    self._note_behind(reader)
                reader.call("close")
        self.release_log()
        if self._log.error is not None:
            self._errors.warn_later("lost", f"The last records could not be written to {self.log}, and are lost.")
        # Slow sinks come last: a user who interrupts the wait for them has everything else closed.
        if self._helper is not None and isinstance(self._log, RecordLog):
            has_all = self._helper.close(self._log.number)
            if has_all and self._temporary is not None:
                self._use(MemoryLog(self._log.number))

    def state_dict(self) -> dict[str, Any]:
        """Return which records of the log are of the run so far, for a run that is resumed from now."""
        return {"first": self._first, "records": self._log.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drop the records after ``state`` from the log, and have the sinks read the run again from its beginning.

        Those that cannot begin anew, as what they have written is elsewhere, go on where they are.
        """
        if self.is_silent or "records" not in state:
            return
        if self._helper is not None:
            self._helper.end_all()
        told = self._context
        try:
            self._first = int(state.get("first", 0))
            known = self._log.truncate(int(state["records"]))
        except (OSError, OptionError) as error:
            self._errors.warn_later(f"load {error}", str(error))
            for reader in self._readers:
                reader.go_to_end(self._log)
            return
        self._is_resumed, self._context = True, told if known is None else known
        with self._streams():
            for reader in self._readers:
                self._restart(reader, is_told=bool(told))
        if told:
            self.set_run_context(told)

    def _restart(self, reader: Reader, *, is_told: bool) -> None:
        """Have a sink read the run again; or, if it cannot, go on, knowing which run it is."""
        reader.go_to_end(self._log)
        try:
            if reader.restart(self._first):
                reader.advance()
                return
            if isinstance(self._log, MemoryLog):
                getattr(reader.sink, "truncate", id)(self._log.number)
            if self._context and not is_told:
                reader.take(Context(self._context), self._log.size)
        except Exception as error:
            self._note_failure(reader.name, "begin anew", error)

    def warn_pending(self) -> None:
        """Issue the warnings that were collected; a warning may raise, so the manager calls this last."""
        if self._errors.pending:
            self._errors.warn_pending()

    def __enter__(self) -> FanOut:
        return self

    def __exit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        self.close()
        # Where warnings are errors, the user has to see what ended the block.
        with nullcontext() if error_class is None else suppress(HooklineWarning):
            self.warn_pending()

    # -- the log, the helper process -----------------------------------------------------------------------------

    def _use(self, log: RecordLog | MemoryLog) -> None:
        """Go on with ``log``: it learns which run this is, and all readers continue at its end."""
        self._log, temporary, self._temporary = log, self._temporary, None
        if isinstance(log, RecordLog):
            if self._context:
                log.append(Context(self._context))
            if self._helper is not None:
                self._helper.read(Log(log.path))  # when all of the log before is delivered
        for reader in self._readers:
            reader.go_to_end(log)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

    def _use_temporary_log(self) -> None:
        """Go on with a log in a temporary folder: slow sinks read one, and no other was asked for."""
        folder = Path(tempfile.mkdtemp(prefix="hookline-"))
        log = RecordLog(folder / "records.jsonl")
        log.number = self._log.number
        self._use(log)
        self._temporary = folder

    def _add_slow(self, recipe: dict[str, Any]) -> None:
        """Add a slow sink to the helper process."""
        if isinstance(self._log, MemoryLog):
            self._use_temporary_log()
        if self._helper is None:
            assert isinstance(self._log, RecordLog)
            self._helper = HelperProcess(Log(self._log.path), self._errors, self._patience)
        self._helper.add(recipe)

    # -- failures ------------------------------------------------------------------------------------------------

    def _note_log(self) -> None:
        error = self._log.error
        if error is not None and error is not self._log_error:
            self._errors.count("log", error)
            self._errors.warn_later(
                "log",
                f"THE RECORD LOG {self.log} CANNOT BE WRITTEN ({error}); the run and its sinks go on. Records are kept "
                "in memory and written as soon as that works. Make room, or give a folder that can be written.",
            )
        self._log_error = error

    def _note_behind(self, reader: Reader) -> None:
        has_log = isinstance(self._log, RecordLog) and self._temporary is None
        where = "the log has them: hookline replay" if has_log else "there is no log"
        lost = self._log.number - reader.number
        self._errors.warn_later(f"lost {reader.name}", f"{reader.name} could not take {lost:,} records; {where}.")

    def _note_failure(self, name: str, what: str, error: Exception) -> None:
        self._errors.count(name, error)
        is_new = self._errors.warn_later(name, failure_text(name, what, error_text(error)))
        if is_new:
            # For a full disk or a missing package the sentence is enough; a mistake in a sink needs its traceback.
            is_clear = isinstance(error, OSError | OptionError | MissingPackageError)
            level = logging.INFO if is_clear else logging.ERROR
            logger.log(level, "%s could not %s; the run goes on", name, what, exc_info=error)


def replay(run: str | Path, sink: Any, *, context: Mapping[str, Any] | None = None) -> int:
    """Give ``sink`` everything that is in a log, in order, then close it; return how many records there were.

    Recipe: ``hookline.records.replay("runs/digits/default", hookline.sinks.TensorBoardSink("events"))``.

    The sink runs in this process, and what it raises is raised. Its context has ``replay=True`` besides.

    Args:
        run: The folder of a run, or its log.
        sink: Anything with ``emit(metrics, epoch, hook_point)``.
        context: Replaces parts of the run's context: ``{"run_dir": elsewhere}``.
    """
    check_sink(sink, "replay() takes a sink, an object")
    own_context = {"replay": True, **(context or {})}  # some sinks would continue the run itself otherwise
    hand(sink, Context(own_context))
    count = 0
    for entry in read_log(run):
        hand(sink, entry if isinstance(entry, Record) else Context({**entry.context, **own_context}))
        count += isinstance(entry, Record)
    for method in ("flush", "close"):
        getattr(sink, method, bool)()
    return count


def _log_of_rank(log: str | Path | RecordLog) -> RecordLog:
    """Return the log of this process of a distributed run: ``records.rank1.jsonl``."""
    if isinstance(log, RecordLog):
        return log
    path, rank = Path(log), own_rank()
    return RecordLog(path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path)


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
