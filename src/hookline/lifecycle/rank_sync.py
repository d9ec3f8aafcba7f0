"""Keep the ranks of a run together: one record of all ranks, one answer to what failed, one moment to stop.

`HookManager` and the loops own a `RankSync` where there are several ranks. Its calls are collectives: every rank makes
them in the same order, since points, schedules and flushes are the same on every rank. ``hookline.distributed`` does
the communication, with its time-out.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hookline.distributed.channels import connections, reaching, stop_reaching
from hookline.distributed.exchange import Exchange
from hookline.distributed.metric_rules import reduce_metrics
from hookline.distributed.ranks import gather_objects, has_group, is_distributed, rank_count, rank_names, this_rank
from hookline.error_policy import error_text
from hookline.errors import HooklineWarning, RankError
from hookline.lifecycle.packed_metrics import pack, pack_series, unpack, unpack_series
from hookline.lifecycle.rank_notes import is_lost_connection, leave_note, read_notes
from hookline.lifecycle.reduce_rules import ReduceRules
from hookline.messages import caller_stacklevel
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook
    from hookline.records.sink import StepSeries

__all__ = ["RankFailure", "RankSync", "join_ranks"]

_SECONDS_BETWEEN: Final = 2.0
"""About how long ranks train before they ask each other whether one of them has to stop; the answer takes 0.3 ms."""
_FAILED: Final = "\x1ffailed"
"""The number, beside the metrics, of failures since the last exchange."""
_STOP: Final = "\x1fstop"
_SECONDS: Final = "\x1fseconds"
_numbers: Final = itertools.count(1)
_STATE: Final = "state of the run"
_OF_STEPS: Final = "metrics of steps"
_SIGNALS: Final = ("", "SIGINT", "SIGTERM")
_LONGEST: Final = 160
"""How much of the text of another library is told."""


def join_ranks(hooks: Mapping[str, TrainingHook], flush_every: int | None = None) -> RankSync:
    """Return what keeps this rank together with the others.

    Hooks, their schedules and the flushes have to be the same on every rank: a difference is a `RankError` on all.
    """
    described = [f"{name} ({hook.step_schedule})" if hook.step_schedule else name for name, hook in hooks.items()]
    said = {"hooks": ", ".join(described) or "none", "flush_every": str(flush_every)}
    _check_same(gather_objects(said, what="comparing the hooks of the ranks"))
    return RankSync(ReduceRules(hooks), at_steps=[name for name, hook in hooks.items() if _is_at_steps(hook)])


def _is_at_steps(hook: TrainingHook) -> bool:
    points = [*hook.hook_points, *(point for of_loop in (hook.loop_points or {}).values() for point in of_loop)]
    return any(HookPoint.of(point).is_step for point in points)


def _check_same(said: list[dict[str, Any]]) -> None:
    if all(one == said[0] for one in said):
        return
    lines = []
    for key in dict.fromkeys(key for one in said for key in one):
        values = [str(one.get(key, "none")) for one in said]
        if len(set(values)) > 1:
            lines.append(f"{key}: " + "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(values)))
    others = tuple(rank for rank, one in enumerate(said) if one != said[0])
    raise RankError(
        f"The ranks do not have the same hooks, so they would wait for each other. {' | '.join(lines)}. Next: make the "
        "manager with the same hooks, in the same order, on every rank.",
        ranks=others,
    )


@dataclass
class RankFailure:
    """What a hook raised, on which ranks."""

    ranks: tuple[int, ...]
    text: str
    ends: bool
    """Whether it ends the run."""
    error: Exception | None = None
    """The error itself, on the rank where it was raised."""
    is_of_others: bool = False
    """Whether it only says that another rank has failed."""

    def sentence(self, hook: str) -> str:
        """Return it in words."""
        return f"Hook {hook!r} raised {self.text.rstrip('.')} on {rank_names(self.ranks)}."


class RankSync:
    """Exchange what ranks have to agree on."""

    def __init__(self, rules: ReduceRules, at_steps: Sequence[str] = ()) -> None:
        self._at_steps = at_steps
        self.rank, self.ranks = this_rank(), rank_count()
        self._connections = connections() if is_distributed() else None
        self._run = str(next(_numbers))
        """The number of the run, the same on every rank."""
        self._is_exit = False
        self._rules = rules
        self._exchanges: dict[str, Exchange] = {}
        self._held: dict[str, RankFailure] = {}
        """What hooks raised here, and the other ranks do not know of yet."""
        self.signal: str | None = None
        """The signal that came to this rank."""
        self.agreed_signal: str | None = None
        """The signal that came to any rank, once all know of it: then all stop at the same step."""
        self._next_check: int | None = None
        self._interval = 1
        self._checked_at: tuple[int, float] = (0, 0.0)
        self.is_lost = False
        """Whether ranks cannot reach each other any more; then nothing is exchanged, and this rank ends alone."""
        self.alone = ""
        """Why metrics are of this rank alone, where the process group was destroyed before they were written."""
        self._failed: dict[str, RankFailure] = {}
        """What hooks raised on any rank, once all know of it."""
        self._relayed: set[str] = set()
        """The errors in words that were raised here because another rank has failed."""
        self.agreed_error: BaseException | None = None
        """The error that ends the run on all ranks at the same place, if one does."""

    # -- metrics ---------------------------------------------------------------------------------------------------

    def reduce(self, metrics: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Return the metrics of all ranks at one moment; the same on every rank but for those of rule ``none``."""
        packed = pack(metrics, self._rules.of)
        return unpack(self._call(what, packed.values, packed.rules), metrics)

    def reduce_steps(
        self, series: Mapping[HookPoint, Mapping[str, StepSeries]], first: int
    ) -> dict[HookPoint, dict[str, StepSeries]]:
        """Return the step metrics of all ranks, with one exchange for all points; ``first`` begins what is flushed."""
        joined = {f"{point.name} {name}": one for point, found in series.items() for name, one in found.items()}
        packed = pack_series(joined, first, lambda name: self._rules.of(name.partition(" ")[2]))
        reduced = self._call(_OF_STEPS, packed.values, packed.rules, _steps_in_words(joined))
        found: dict[HookPoint, dict[str, StepSeries]] = {}
        for key, one in unpack_series(reduced, joined, first).items():
            point, _, name = key.partition(" ")
            found.setdefault(HookPoint[point], {})[name] = one
        return {point: found[point] for point in HookPoint if point in found}

    def reach(self) -> AbstractContextManager[None]:
        """Return a context in which the other ranks can be reached, also once the process group was destroyed."""
        return reaching(None if self.is_lost else self._connections)

    def _call(self, what: str, values: dict[str, Any], rules: dict[str, str], steps: str = "") -> dict[str, Any]:
        if self.is_lost:
            return _of_one_rank(values, rules)
        exchange = self._exchanges.get(what)
        if exchange is None:
            exchange = self._exchanges[what] = Exchange(what)
        own = {_FAILED: float(len(self._held)), _STOP: float(_SIGNALS.index(self.signal or ""))}
        try:
            with self.reach():
                found = reduce_metrics(exchange, values | own, rules | {_FAILED: "sum", _STOP: "max"})
        except RankError as error:
            self.is_lost = True
            if has_group() and not self._is_exit:
                raise self._with_hooks(error, what) from error
            self._go_on_alone(f"beginning with {what}{steps}", _short(error))
            return _of_one_rank(values, rules)
        self._take_signal(found.pop(_STOP))
        if found.pop(_FAILED):
            self._learn_failures(what)
        return found

    def _with_hooks(self, error: RankError, what: str) -> RankError:
        """Return the error with the hooks at steps, where ranks meet between steps: one may keep a rank from coming."""
        names = ", ".join(self._at_steps)
        if not names or what not in (_STATE, _OF_STEPS):
            return error
        return RankError(f"{error} The hooks at steps: {names}.", ranks=error.ranks)

    def meet_at_end(self, *, is_exit: bool) -> None:
        """Tell the others that the run ends here; at the end of the process, wait for them, but not for long."""
        self._is_exit = is_exit
        if self.is_lost or self._connections is None:
            return
        self._connections.note_end(self._run)
        missing = self._connections.wait_for_ends(self._run) if is_exit else []
        if missing:
            self.is_lost = True
            leave_note(f"rank {self.rank}: its process ended while others were training")
            self._go_on_alone("which were not written yet", f"{rank_names(missing)} did not end")

    def _go_on_alone(self, which: str, reason: str) -> None:
        """Say that records are of this rank alone: the run has not ended on all ranks, or some are gone."""
        self.alone = (
            f"Metrics are of rank {self.rank} alone from here on, {which}: {reason}. Next: call close() of the run on "
            "every rank, before destroy_process_group()."
        )
        stop_reaching()  # what hooks exchange themselves is of this rank alone too
        warnings.warn(self.alone, HooklineWarning, stacklevel=caller_stacklevel())

    def _take_signal(self, number: float) -> None:
        if number and self.agreed_signal is None:
            self.agreed_signal = _SIGNALS[int(number)]

    # -- failures --------------------------------------------------------------------------------------------------

    def hold(self, hook: str, text: str, error: Exception | None) -> None:
        """Keep what a hook raised until the ranks meet next: a rank that left alone would leave the others waiting.

        Args:
            hook: Its name.
            text: The error in words.
            error: The error, if it is to end the run.
        """
        before = self._held.get(hook)
        if before is None or (error is not None and not before.ends):
            is_of_others = text.startswith(tuple(self._relayed))
            self._held[hook] = RankFailure((self.rank,), text, error is not None, error, is_of_others)

    def _learn_failures(self, what: str) -> None:
        own = {hook: (one.text, one.ends, one.is_of_others) for hook, one in self._held.items()}
        said = self.gather(own, f"{what}, what failed")
        for hook in dict.fromkeys(hook for failures in said for hook in failures):
            rows = [(rank, *failures[hook]) for rank, failures in enumerate(said) if hook in failures]
            blamed = [row for row in rows if not row[3]] or rows
            known = self._failed.get(hook) or RankFailure((), "", ends=False)
            error = self._held[hook].error if hook in self._held else known.error
            ends = known.ends or any(row[2] for row in rows)
            ranks = (*known.ranks, *(row[0] for row in blamed))
            self._failed[hook] = RankFailure(ranks, blamed[-1][1], ends, error)
        self._held = {}

    def take_failures(self) -> dict[str, RankFailure]:
        """Return what hooks raised on any rank since the last time."""
        failed, self._failed = self._failed, {}
        return failed

    def together(self, what: str, act: Callable[[], None]) -> None:
        """Do something that may fail on one rank alone, and raise on all if it does."""
        raised: BaseException | None = None
        try:
            act()
        except Exception as error:
            raised = error
        agreed = self.meet(raised, what)
        if agreed is not None:
            if not self.is_lost:
                self.agreed_error = agreed
            raise agreed

    def meet(self, error: BaseException | None, what: str) -> BaseException | None:
        """Wait for all ranks after something that each did; return this rank's error, or one that names who failed."""
        if self.is_lost:
            return error
        try:
            said = self.gather(None if error is None else error_text(error), what)
        except RankError:
            if error is None:
                raise
            return error  # others wait somewhere else, and learn of it when this rank ends
        failed = {rank: text for rank, text in enumerate(said) if text is not None}
        if not failed or error is not None:
            return error
        relayed = RankError(f"{what}: {_told(failed)}", ranks=tuple(failed))
        self._relayed.add(error_text(relayed).rstrip("."))
        return relayed

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the value of every rank."""
        if self.is_lost:
            return [value]
        try:
            with self.reach():
                return gather_objects(value, what=what)
        except RankError:
            self.is_lost = True
            raise

    def leave(self, error: BaseException) -> RankError | None:
        """Exchange nothing more, unless all ranks end by `error`; return one that says more, if others ended first."""
        if error is self.agreed_error:
            return None
        self.is_lost = True
        leave_note(f"rank {self.rank}: {error_text(error)}")
        if not is_lost_connection(error):
            return None
        notes, silent = read_notes()
        told = [text for _, text in sorted(notes.items())]
        if silent:
            told.append(f"{rank_names(silent)} left no word: killed, or waiting for a collective")
        return RankError(
            f"The ranks have lost each other; {'; '.join(told)}. Rank {self.rank} noticed it by {_short(error)}. Next: "
            "look at the output of the rank that ended first; with checkpoints the run can be resumed.",
            ranks=(*silent, *notes),
        )

    # -- from step to step -----------------------------------------------------------------------------------------

    def check(self, step: int) -> None:
        """Ask the other ranks every few seconds whether a hook failed or a signal came; call at each step."""
        if self._next_check is None:
            self._next_check, self._checked_at = step + 1, (step, time.perf_counter())
        if step < self._next_check or self.is_lost or not has_group():
            return
        before, began = self._checked_at
        seconds = (time.perf_counter() - began) / max(1, step - before)
        found = self._call(_STATE, {_SECONDS: seconds}, {_SECONDS: "max"})
        # The slowest rank decides. The first steps are slow, so the distance grows by doubling at most.
        wanted = int(_SECONDS_BETWEEN / max(found[_SECONDS], 1e-6))
        self._interval = max(1, min(wanted, 2 * self._interval))
        self._next_check, self._checked_at = step + self._interval, (step, time.perf_counter())


def _of_one_rank(values: Mapping[str, Any], rules: Mapping[str, str]) -> dict[str, Any]:
    return {name: [value] if rules[name] == "concat" else value for name, value in values.items()}


def _steps_in_words(series: Mapping[str, StepSeries]) -> str:
    steps = [step for one in series.values() for step in one.steps]
    return f" {min(steps)} to {max(steps)}" if steps else ""


def _told(failed: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank} failed with {text}" for rank, text in failed.items())


def _short(error: BaseException) -> str:
    """Return the first line of an error; of a long one, the sentences that fit, or the words."""
    text = error_text(error).partition("\n")[0]
    if len(text) > _LONGEST:
        sentences, dot, _ = text[:_LONGEST].rpartition(". ")
        text = sentences if dot else text[:_LONGEST].rpartition(" ")[0] + " …"
    return text.rstrip(". ")
