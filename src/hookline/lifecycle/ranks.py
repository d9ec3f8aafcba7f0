"""Keep the ranks of a run together: one record of all ranks, one answer to what failed, one moment to stop.

`HookManager` and the loops have a `RankSync`, or `OneProcess` where there is no other rank. Its calls are collectives:
every rank makes them in the same order, since points, schedules and flushes are the same on every rank. Whatever is
exchanged, each rank says with it which of its hooks failed and which signal came to it.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from hookline.distributed.ranks import (
    connections,
    gather_objects,
    has_group,
    rank_count,
    rank_names,
    reaching,
    stop_reaching,
    this_rank,
)
from hookline.distributed.reduce import check_rule, reduce_records, reduce_values
from hookline.error_policy import error_text, warn_user
from hookline.errors import OptionError, RankError
from hookline.records.log import has_ranks
from hookline.records.sink import StepSeries
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook

_SECONDS_BETWEEN: Final = 2.0
"""About how long ranks train before they ask each other whether one of them has to stop; the answer takes 0.5 ms."""
_numbers: Final = itertools.count(1)
_LONGEST: Final = 160
"""How much of the text of another library is told."""
_USUAL_RULE: Final = "mean"
"""The rule of a metric that no hook says anything about: the loss, an evaluation, `hookline.record`."""
_LOST: Final = re.compile(r"gloo|nccl|connection|process ?group|socket|peer|pipe|timed? ?out", re.IGNORECASE)
Series = Mapping[HookPoint, Mapping[str, StepSeries]]
"""Metrics of single steps, by point and name."""


class OneProcess:
    """The ranks of a run that has one: nobody is waited for, and every answer is this process's own."""

    is_single = True
    """Whether there is no other rank."""
    is_lost = False
    """Whether ranks cannot reach each other any more; then nothing is exchanged, and this rank ends alone."""
    rank, size = 0, 1
    signal: str | None = None
    """The signal that came to this rank; the others learn of it."""
    agreed_signal: str | None = None
    """The signal that came to any rank, once all know of it: then all stop at the same step."""
    last_words = ""
    """What ended the run here, or why metrics are of this rank alone from here on; the next flush writes it."""
    agreed_error: BaseException | None = None
    """The error by which all ranks end at the same place, if there is one: they can still reach each other."""

    def __init__(self) -> None:
        self.failures: dict[str, dict[int, str]] = {}
        """What hooks raised, in words, by hook and rank, once all ranks know of it; whoever reads it empties it."""

    def reduce(self, metrics: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Return the metrics of all ranks at one moment, the same on every rank."""
        return dict(metrics)

    def reduce_steps(self, series: Series) -> Series:
        """Return the step metrics of all ranks, by one exchange."""
        return series

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the value of every rank."""
        return [value]

    def together(self, what: str, act: Callable[[], None]) -> None:
        """Do something that may fail on one rank alone, and raise on all if it does."""
        error: BaseException | None = None
        try:
            act()
        except Exception as raised:
            error = raised
        error = self.meet(error, what)
        if error is not None:
            raise error

    def meet(self, error: BaseException | None, what: str) -> BaseException | None:
        """Wait for all ranks after something that each did; return this rank's error, or one that names who failed."""
        return error

    def hold(self, hook: str, text: str) -> None:
        """Tell the other ranks, when they exchange something next, what a hook raised."""

    def check(self, step: int) -> None:
        """Ask the other ranks every few seconds whether a hook failed or a signal came; call at each step."""

    def leave(self, error: BaseException) -> RankError | None:
        """Exchange nothing more, unless all ranks end by `error`; return one that says more, if others ended first."""
        return None

    @contextmanager
    def ending(self, *, is_exit: bool = False) -> Iterator[bool]:
        """End a run in the block: the other ranks are reached also if their group was destroyed since.

        Yields whether all ranks end it; if not, hooks must not wait for the others.

        With ``is_exit`` the process ends, for whatever reason: others may still train, and are not waited for long.
        """
        yield True


def join_ranks(hooks: Mapping[str, TrainingHook], flush_every: int | None = None) -> OneProcess:
    """Return what keeps this rank together with the others, if there are any.

    Hooks, their schedules and the flushes have to be the same on every rank: a difference is a `RankError` on all.
    """
    if not has_ranks():
        return OneProcess()
    described = [f"{name} ({hook.step_schedule})" if hook.step_schedule else name for name, hook in hooks.items()]
    own = {"hooks": ", ".join(described) or "none", "flush_every": str(flush_every)}
    said = gather_objects(own, what="comparing the hooks of the ranks")
    different = [key for key in own if len({one[key] for one in said}) > 1]
    if different:
        told = [
            f"{key}: " + "; ".join(f"rank {rank} has {one[key]}" for rank, one in enumerate(said)) for key in different
        ]
        raise RankError(
            f"The ranks do not have the same hooks, so they would wait for each other. {' | '.join(told)}. Next: make "
            "the manager with the same hooks, in the same order, on every rank."
        )
    return RankSync(rule_finder(hooks), list(hooks))


class RankSync(OneProcess):
    """One of several ranks: exchange what all have to agree on."""

    is_single = False

    def __init__(self, rule_of: Callable[[str], str], hooks: Sequence[str] = ()) -> None:
        super().__init__()
        self._rule_of, self._hooks = rule_of, hooks
        self.rank, self.size = this_rank(), rank_count()
        self._connections = connections()
        self._run = str(next(_numbers))
        """The number of the run, the same on every rank."""
        self._is_exit = False
        self._held: dict[str, str] = {}
        """What hooks raised here, and the other ranks do not know of yet."""
        self._next_check, self._interval = 1, 1
        self._checked_at = (0, time.perf_counter())

    # -- metrics ---------------------------------------------------------------------------------------------------

    def reduce(self, metrics: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Return the metrics of all ranks at one moment, the same on every rank."""
        return reduce_records(self._exchange(dict(metrics), what), self._rule_of)

    def reduce_steps(self, series: Series) -> Series:
        """Return the step metrics of all ranks, by one exchange."""
        steps = [step for found in series.values() for one in found.values() for step in one.steps]
        said = self._exchange(series, "metrics of steps", f" {min(steps)} to {max(steps)}" if steps else "")
        reduced: dict[HookPoint, dict[str, StepSeries]] = {}
        for point in HookPoint:
            of_ranks = [one[point] for one in said if point in one]
            for name in dict.fromkeys(name for one in of_ranks for name in one):
                parts = [one[name] for one in of_ranks if name in one]
                reduced.setdefault(point, {})[name] = reduce_series(name, self._rule_of(name), parts)
        return reduced

    def _exchange(self, value: Any, what: str, steps: str = "") -> list[Any]:
        """Return the value of every rank, and learn what failed on any of them; of this one alone if they are lost."""
        if self.is_lost:
            return [value]
        try:
            said = self.gather((value, self._held, self.signal), what)
        except RankError as error:
            if has_group() and not self._is_exit:
                raise
            self._go_on_alone(f"beginning with {what}{steps}", _short(error))
            return [value]
        self.agreed_signal = self.agreed_signal or next((signal for *_, signal in said if signal), None)
        self._held = {}
        for rank, (_, held, _) in enumerate(said):
            for hook, text in held.items():
                self.failures.setdefault(hook, {})[rank] = text
        return [each for each, *_ in said]

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the value of every rank."""
        if self.is_lost:
            return [value]
        try:
            with self._reach():
                return gather_objects(value, what=what)
        except RankError as error:  # one of the hooks may have kept a rank from coming
            self.is_lost = True
            raise RankError(f"{error} The hooks: {', '.join(self._hooks) or 'none'}.") from error

    def _reach(self) -> Any:
        """Return a context in which the other ranks can be reached, also once the process group was destroyed."""
        return reaching(None if self.is_lost else self._connections)

    # -- failures --------------------------------------------------------------------------------------------------

    def hold(self, hook: str, text: str) -> None:
        """Tell the other ranks, when they exchange something next, what a hook raised; the first counts."""
        self._held.setdefault(hook, text)

    def meet(self, error: BaseException | None, what: str) -> BaseException | None:
        """Wait for all ranks after something that each did; return this rank's error, or one that names who failed."""
        if self.is_lost or not isinstance(error, Exception | None):
            return error
        try:
            said = self.gather(None if error is None else error_text(error), what)
        except RankError:
            if error is None:
                raise
            return error  # others wait somewhere else, and learn of it when this rank ends
        failed = {rank: text for rank, text in enumerate(said) if text is not None}
        if failed and error is None:
            told = "; ".join(f"rank {rank} failed with {text}" for rank, text in failed.items())
            error = RankError(f"{what}: {told}")
        self.agreed_error = error
        return error

    # -- from step to step, and the end ----------------------------------------------------------------------------

    def check(self, step: int) -> None:
        """Ask the other ranks every few seconds whether a hook failed or a signal came; call at each step."""
        before, began = self._checked_at
        if step < before:  # another run
            self._next_check, self._checked_at = step + 1, (step, time.perf_counter())
        if step < self._next_check or self.is_lost or not has_group():
            return
        seconds = (time.perf_counter() - began) / max(1, step - before)
        slowest = max(self._exchange(seconds, "state of the run"))
        # The slowest rank decides. The first steps are slow, so the distance grows by doubling at most.
        self._interval = max(1, min(int(_SECONDS_BETWEEN / max(slowest, 1e-6)), 2 * self._interval))
        self._next_check, self._checked_at = step + self._interval, (step, time.perf_counter())

    def leave(self, error: BaseException) -> RankError | None:
        """Exchange nothing more, unless all ranks end by `error`; return one that says more, if others ended first."""
        self.last_words = error_text(error)
        if error is self.agreed_error and not self.is_lost:
            return None
        self.is_lost = True
        if not (isinstance(error, RuntimeError | OSError) and _LOST.search(str(error))):
            return None
        found = RankError(
            f"Rank {self.rank} has lost another rank: {_short(error)}. Next: look at the output of the rank that ended "
            "first, which torchrun names; with checkpoints the run can be resumed."
        )
        self.last_words = error_text(found)
        return found

    @contextmanager
    def ending(self, *, is_exit: bool = False) -> Iterator[bool]:
        """End a run in the block; see `OneProcess`."""
        with self._reach():
            self._is_exit = is_exit
            if not self.is_lost and self._connections is not None:
                missing = self._connections.end(self._run, is_exit=is_exit)
                if missing:
                    self._go_on_alone("which were not written yet", f"{rank_names(missing)} did not end")
            yield not self.is_lost

    def _go_on_alone(self, which: str, reason: str) -> None:
        """Say that records are of this rank alone: the run has not ended on all ranks, or some are gone."""
        self.is_lost = True
        self.last_words = (
            f"Metrics are only of rank {self.rank} from here on, {which}: {reason}. Next: call close() of the run on "
            "every rank, before destroy_process_group()."
        )
        stop_reaching()  # what hooks exchange themselves is of this rank alone too
        warn_user(self.last_words)


def _short(error: BaseException) -> str:
    """Return the beginning of what an error of another library says."""
    return error_text(error).partition("\n")[0][:_LONGEST].rstrip(". ")


# -- the rule of each metric ----------------------------------------------------------------------------------------


def reduce_series(name: str, rule: str, parts: Sequence[StepSeries]) -> StepSeries:
    """Return one series of those of the ranks; a step that some lack is of the others."""
    if rule not in ("concat", "none") and all(one.steps == parts[0].steps for one in parts):
        return StepSeries(reduce_values(name, rule, [list(one) for one in parts]), parts[0].steps)
    values: dict[tuple[int, int], list[Any]] = {}
    for one in parts:
        seen: Counter[int] = Counter()
        for value, step in zip(one, one.steps, strict=True):
            values.setdefault((step, seen[step]), []).append(value)
            seen[step] += 1  # `record` may be called many times in a step
    places = sorted(values)
    return StepSeries([reduce_values(name, rule, values[place]) for place in places], [step for step, _ in places])


def rule_finder(hooks: Mapping[str, TrainingHook]) -> Callable[[str], str]:
    """Return a function that finds the rule of a metric by its name, as its hook declares it."""
    # The longest name first: a hook may be called "a" and another one "a/b".
    prefixed = [(f"{name}/", _patterns(hooks[name])) for name in sorted(hooks, key=len, reverse=True)]

    @cache
    def rule_of(name: str) -> str:
        for prefix, patterns in prefixed:
            if name.startswith(prefix):
                return _match(name[len(prefix) :], patterns)
        return _USUAL_RULE

    return rule_of


def _patterns(hook: TrainingHook) -> Mapping[str, str]:
    declared = checked_reduce(hook.name, hook.reduce)
    return {"*": declared} if isinstance(declared, str) else declared


def _match(name: str, patterns: Mapping[str, str]) -> str:
    return next((rule for pattern, rule in patterns.items() if fnmatchcase(name, pattern)), _USUAL_RULE)


def checked_reduce(hook: str, given: Any) -> str | dict[str, str]:
    """Return what a hook declares as ``reduce``; raise if it is neither a rule nor rules by pattern."""
    try:
        if isinstance(given, Mapping):
            return {str(pattern): check_rule(rule) for pattern, rule in given.items()}
        return check_rule(given)
    except OptionError as error:
        raise OptionError(f"Hook {hook!r}, reduce: {error}") from None
