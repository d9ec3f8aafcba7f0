"""Run numbered cases in child processes, so that one that crashes or hangs is counted and named; `run.py` calls it.

A case is a number: it decides everything that is random in it, so that a bad one can be run again alone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import NoReturn

__all__ = ["Case", "Outcome", "Part", "go_on", "run_part"]

HANG = 180.0
"""Seconds after which a case counts as hung. The slowest takes ten on a busy machine."""


@dataclass
class Case:
    """What came of one case."""

    number: int
    acts: int = 1
    """How many things were done in it: interventions, kills, requests, records."""
    wrong: list[str] = field(default_factory=list)
    """What was lost, changed or mixed up, in words. Empty: nothing."""
    refused: str = ""
    """The error by which the package said that it could not do as asked. That is no fault."""
    counts: dict[str, int] = field(default_factory=dict)
    """More things to count, by name."""


@dataclass
class Part:
    """One kind of torture: what it does, what must hold, and how to run a case of it."""

    name: str
    does: str
    holds: str
    """What a wrong case has lost: "bits", "records", "captures", "requests"."""
    goal: int
    """How many acts a whole run makes."""
    quick: int
    """How many acts a run of seconds makes, in the tests."""
    run_case: Callable[[int], Case]
    prepare: Callable[[], object] = lambda: None
    """Import and build what all cases need, before the processes are forked."""
    batch: int = 50
    """Cases in one child process. A fork takes 20 ms, importing torch again four seconds."""


@dataclass
class Outcome:
    """What came of a part."""

    part: Part
    first: int
    cases: int = 0
    acts: int = 0
    seconds: float = 0.0
    wrong: list[Case] = field(default_factory=list)
    died: list[tuple[int, str]] = field(default_factory=list)
    """Cases that ended or hung their process, and how."""
    refused: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    next_number: int = 0
    """The case that has not run yet."""

    def __post_init__(self) -> None:
        self.next_number = self.first

    @property
    def is_clean(self) -> bool:
        """Return whether nothing went wrong, and something was tried."""
        return bool(self.cases) and not self.wrong and not self.died

    def add(self, case: Case) -> None:
        """Count one more case."""
        self.cases += 1
        self.acts += case.acts
        self.counts.update(case.counts)
        if case.wrong:
            self.wrong.append(case)
        if case.refused:
            self.refused[case.refused.split("\n")[0][:100]] += 1


def run_part(part: Part, *, first: int = 0, acts: int | None = None, seconds: float = 600.0) -> Outcome:
    """Run cases from ``first`` on, until so many ``acts`` (the part's goal by default) are done or the time is over."""
    part.prepare()
    outcome = Outcome(part, first)
    go_on(outcome, part.goal if acts is None else acts, seconds)
    return outcome


def go_on(outcome: Outcome, goal: int, seconds: float) -> None:
    """Run more cases of a part, until so many acts are done or the time is over."""
    part, begin = outcome.part, time.monotonic()
    while outcome.acts < goal and time.monotonic() - begin < seconds:
        for case in _run_batch(part, outcome.next_number, outcome, begin + seconds, goal - outcome.acts):
            outcome.add(case)
            outcome.next_number = case.number + 1
        if outcome.died and outcome.died[-1][0] >= outcome.next_number:
            outcome.next_number = outcome.died[-1][0] + 1
        print(f"{part.name}: {outcome.acts} of {goal}, {len(outcome.wrong)} wrong", file=sys.stderr, flush=True)
    outcome.seconds += time.monotonic() - begin


def _run_batch(part: Part, first: int, outcome: Outcome, until: float, acts: int) -> list[Case]:
    """Run cases in one child; add to ``outcome.died`` the case that ended or hung it."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        _be_child(part, first, theirs, until, acts)
    os.close(theirs)
    lines, is_hung = _read_lines(ours)
    if is_hung:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    cases = [Case(**json.loads(line)) for line in lines]
    if is_hung or status:
        how = f"hung for {HANG:.0f} s" if is_hung else f"ended its process, status {status}"
        outcome.died.append((cases[-1].number + 1 if cases else first, how))
    return cases


def _read_lines(pipe: int) -> tuple[list[str], bool]:
    """Read what the child writes to its end; also return whether nothing came for too long."""
    kept = b""
    with open(pipe, "rb", buffering=0) as source:
        while select.select([source], [], [], HANG)[0]:
            piece = source.read(1 << 16)
            if not piece:
                return kept.decode().splitlines(), False
            kept += piece
    return [line for line in kept.decode().splitlines(keepends=True) if line.endswith("\n")], True


def _be_child(part: Part, first: int, pipe: int, until: float, acts: int) -> NoReturn:
    faulthandler.enable()
    status = 1
    try:
        with open(pipe, "w") as out:
            for number in range(first, first + part.batch):
                case = part.run_case(number)
                print(json.dumps(asdict(case)), file=out, flush=True)
                acts -= case.acts
                if acts <= 0 or time.monotonic() > until:
                    break
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
