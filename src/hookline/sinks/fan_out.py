"""The fan-out: every record goes to the log first, then to each sink; slow sinks read the log in a process of theirs.

Takes records from the dispatcher, hands them on. A sink that fails is warned of once and counted; the run and the other
sinks go on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hookline.errors import HooklineWarning, MissingPackageError, OptionError
from hookline.messages import type_name
from hookline.sinks.helper_process import HelperProcess, sink_spec
from hookline.sinks.record import Record, own_rank
from hookline.sinks.record_log import RecordLog
from hookline.sinks.resilient_log import LogKeeper
from hookline.sinks.retrying_sink import QuickSink
from hookline.sinks.sink import check_sink
from hookline.sinks.warn_once import Teller

__all__ = ["FanOut"]

logger = logging.getLogger(__name__)


class FanOut:
    """A log and several sinks, as one.

    Recipe::

        fan_out = hookline.sinks.FanOut([hookline.sinks.JSONLSink("metrics.jsonl")], log="records.jsonl")
        manager = hookline.HookManager(hooks=[MyHook()], sinks=fan_out)

    Args:
        sinks: Where records go; anything with ``emit(metrics, epoch, hook_point)``. Those that are ``slow`` run in a
            helper process, which begins with the first record and reads the log.
        log: The record log, or its path; None for none (with slow sinks, one in a temporary folder).
        patience: Seconds that ``flush`` and ``close`` wait for slow sinks.
    """

    def __init__(
        self, sinks: Iterable[Any] = (), log: str | Path | RecordLog | None = None, *, patience: float = 30.0
    ) -> None:
        if callable(getattr(sinks, "emit", None)):
            one = f"{sinks.__name__}()" if isinstance(sinks, type) else type_name(sinks)
            raise OptionError(f"sinks= takes a list of sinks; put {one} into one.")
        self._teller = Teller()
        self._patience = patience
        self._keeper = None if log is None else LogKeeper(_of_rank(log), self._teller)
        self._helper: HelperProcess | None = None
        self.sinks: list[Any] = []
        """All of them, as given; those that are slow only say here what they are made of."""
        self._quick: list[QuickSink] = []
        self._names: Counter[str] = Counter()
        self.is_empty = log is None
        """Whether there is nobody to hand a record to; looked at in every firing."""
        for sink in sinks:
            self.add(sink)

    @property
    def errors(self) -> Counter[str]:
        """How often each sink has failed, by its class, and its place among those of one class; also the ``"log"``."""
        if self._helper is not None:
            self._helper.look()
        return self._teller.counts

    @property
    def log(self) -> Path | None:
        """Where the log is."""
        return None if self._keeper is None else self._keeper.path

    def add(self, sink: Any) -> None:
        """One more sink, from now on."""
        check_sink(sink, "sinks= takes objects")
        name = self._named(sink)
        self.sinks.append(sink)
        self.is_empty = False
        spec = sink_spec(sink, name) if getattr(sink, "slow", False) else None
        if isinstance(spec, dict):
            self._give_to_helper(spec)
            return
        if spec is not None:
            self._teller.once(
                f"here {name}",
                f"{name} is slow, and runs in this process all the same, where it holds the training up: {spec}.",
            )
        self._quick.append(QuickSink(name, sink))

    def write(self, record: Record) -> None:
        """Hand a record to the log and to every sink, unless there is nothing in it."""
        if not record.metrics:
            return
        if self._keeper is not None:
            record = self._keeper.append(record)
        for sink in self._quick:
            try:
                sink.give(record)
            except Exception as error:
                self._note(sink.name, "take metrics", error)
        if self._helper is not None:
            self._helper.go()

    def set_run_context(self, context: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Tell every sink that wants to know which run follows."""
        context = {**(context or {}), **more}
        if self._keeper is not None:
            self._keeper.append_context(context)
        self._give_up()
        self._each("begin another run", lambda sink: sink.call("set_run_context", **context))

    def flush(self) -> None:
        """Have everything written: the log on the disk, and what sinks hold back. Waits for slow sinks."""
        self._flush_here()
        if self._helper is not None and self._keeper is not None:
            self._helper.flush(self._keeper.number)

    def _flush_here(self) -> None:
        if self._keeper is not None:
            self._keeper.flush()
        self._each("take metrics", QuickSink.hurry)
        self._each("flush", lambda sink: sink.call("flush"))

    def close(self) -> None:
        """Flush, and let go of files and processes; once or more often."""
        # Slow sinks come last: whoever does not want to wait for them and interrupts has everything else closed.
        self._flush_here()
        self._give_up()
        self._each("close", lambda sink: sink.call("close"))
        if self._keeper is None:
            return
        self._keeper.close()
        if self._helper is not None:
            self._helper.flush(self._keeper.number)
        if self._helper is None or not self._helper.close():
            self._keeper.remove()  # else the helper process takes a temporary log away, when everything is delivered

    def state_dict(self) -> dict[str, Any]:
        """What to go back to when a run is resumed from now: of the log, and of each sink of this process."""
        states: dict[str, Any] = {}
        for quick in self._quick:
            try:
                if hasattr(quick.sink, "state_dict"):
                    states[quick.name] = quick.sink.state_dict()
            except Exception as error:
                self._note(quick.name, "say how far it is", error)
        return {"log": {} if self._keeper is None else self._keeper.state_dict(), "sinks": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to that: what was written later goes. Slow sinks pass over what they have had already."""
        if self._keeper is not None:
            self._keeper.load_state_dict(state.get("log", {}))
        states = state.get("sinks", {})
        for sink in self._quick:
            sink.give_up()
            if sink.name in states:
                try:
                    if hasattr(sink.sink, "load_state_dict"):
                        sink.sink.load_state_dict(states[sink.name])
                except Exception as error:
                    self._note(sink.name, "go back to where it was", error)
        if self._helper is not None:
            self._helper.seek()

    def tell(self) -> None:
        """Warn of what failed for the first time; when all sinks have had their turn, as a warning may raise."""
        self._teller.tell()

    def __enter__(self) -> FanOut:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        try:
            self.tell()
        except HooklineWarning:  # where warnings are errors; what ended the block is what the user has to see
            if kind is None:
                raise

    # -- each by itself ------------------------------------------------------------------------------------------

    def _named(self, sink: Any) -> str:
        name = type(sink).__name__
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name} {self._names[name]}"

    def _give_to_helper(self, spec: dict[str, Any]) -> None:
        if self._keeper is None:
            self._keeper = LogKeeper(None, self._teller)
        if self._helper is None:
            self._helper = HelperProcess(self._keeper, self._teller, self._patience)
        self._helper.add(spec)

    def _each(self, what: str, act: Callable[[QuickSink], None]) -> None:
        for sink in self._quick:
            try:
                act(sink)
            except Exception as error:
                self._note(sink.name, what, error)

    def _give_up(self) -> None:
        """What sinks could not take of the run that is over; once more at once."""
        self._each("take metrics", QuickSink.hurry)
        for sink in self._quick:
            if lost := sink.give_up():
                where = "the log has them: hookline replay" if self._keeper is not None else "there is no log"
                self._teller.once(
                    f"lost {sink.name} {lost}", f"{sink.name} could not take {lost:,} records of the run; {where}."
                )

    def _note(self, name: str, what: str, error: Exception) -> None:
        self._teller.counts[name] += 1
        sentence = (
            f"{name} could not {what} ({type(error).__name__}: {error}); the run and the other sinks go on. "
            "Further failures are counted in manager.sink_errors."
        )
        if self._teller.once(name, sentence):
            # Of a full disk or a missing package the sentence says it all; of a mistake in a sink, the place is wanted.
            told = isinstance(error, OSError | OptionError | MissingPackageError)
            logger.log(
                logging.INFO if told else logging.ERROR, "%s could not %s; the run goes on", name, what, exc_info=error
            )


def _of_rank(log: str | Path | RecordLog) -> Path | RecordLog:
    """In a distributed run each process has a log of its own: ``records.rank1.jsonl``."""
    if isinstance(log, RecordLog):
        return log
    path, rank = Path(log), own_rank()
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path
