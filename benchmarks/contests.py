"""Contests between ours and what others offer for the same work: who takes part, and what comes of it.

The families (``peers``, ``training_peers``, ``guard_peers``, ``debug_peers``) define `Contest`s, ``bench_peers`` runs
them. Every contest has a process of its own, as some packages leave torch changed behind them. In that process ours,
ours again (the A/A), theirs and the bare call take turns, round by round.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Row, Samples, Spread, interleave, spread, trial, typical

import hookline as hl

__all__ = [
    "LIMIT", "NOTHING", "Contest", "Result", "Work", "block_ratios", "in_child", "installed", "last_line", "results",
    "take_turns",
]  # fmt: skip

LIMIT = 600
"""Seconds after which a package that hangs is given up."""
BLOCK = 5
"""Rounds whose medians make one ratio."""


class NoFigure(Spread):
    """In the place of a figure where there is none."""

    def __str__(self) -> str:
        return "–"


NOTHING = NoFigure(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """What both sides of a contest do, in words."""

    ours: str
    theirs: str
    model: str
    beyond: bool = True
    """Whether what each adds to the bare call is compared; else whole calls are."""
    why: str = ""
    """Why ours takes longer, where it does."""


@dataclass(frozen=True, slots=True)
class Contest:
    """One package, and the works at which it meets ours."""

    label: str
    package: str
    measure: Callable[[int], Mapping[str, Samples | str]]
    """Takes the number of rounds; returns for each work the samples, or the reason why there are none."""
    works: Mapping[str, Work]
    rounds: int = 40
    absent: str = ""
    """Why it cannot be installed."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one work of a contest."""

    work: str
    label: str
    row: Row
    why: str

    @property
    def has_figure(self) -> bool:
        """Whether it was measured."""
        return self.row.ratio.median != 0.0


def results(name: str, contest: Contest, rounds: int, script: str, family: str) -> Iterator[Result]:
    """Run a contest in a process of its own, and return a result for each work."""
    found = _found(name, contest, rounds, script, family)
    for work, words in contest.works.items():
        samples = found if isinstance(found, str) else found.get(work, "not measured")
        yield Result(work, contest.label, _row(work, contest, words, samples), words.why)


def _found(name: str, contest: Contest, rounds: int, script: str, family: str) -> Mapping[str, Samples | str] | str:
    if not installed(contest.package):
        return contest.absent or f"{contest.package} is not installed"
    try:
        result: Mapping[str, Samples | str] = in_child(script, "--one", family, name, str(rounds))
    except subprocess.TimeoutExpired:
        return f"did not finish within {LIMIT} s"
    except subprocess.CalledProcessError as error:
        return f"failed: {last_line(error)}"
    return result


def _row(work: str, contest: Contest, words: Work, samples: Samples | str) -> Row:
    name = f"{work}, against {contest.label}"
    if isinstance(samples, str):
        return Row(name, words.ours, words.theirs, words.model, NOTHING, NOTHING, samples.replace("|", "/"))
    beyond = "bare" if words.beyond else None
    ratio = spread(block_ratios(samples, "ours", "theirs", beyond=beyond))
    same = spread(block_ratios(samples, "ours again", "ours", beyond=beyond))
    return Row(
        name,
        words.ours,
        words.theirs,
        words.model,
        ratio,
        same,
        _measured(samples, contest.package, beyond),
        at_most=1.0,
    )


def _measured(samples: Samples, package: str, beyond: str | None) -> str:
    bare = typical(samples, beyond) if beyond is not None else 0.0
    ours, theirs = (typical(samples, side) - bare for side in ("ours", "theirs"))
    unit, factor = ("ms", 1e3) if max(ours, theirs) > 1e-2 else ("µs", 1e6)
    words = f"{ours * factor:.3g} / {theirs * factor:.3g} {unit}"
    if bare:
        words += f" beyond {bare * factor:.3g}"
    return words if package == "hookline" else f"{words}; {package} {importlib.metadata.version(package)}"


def block_ratios(samples: Samples, numerator: str, denominator: str, *, beyond: str | None = None) -> list[float]:
    """Return numerator over denominator for every few rounds; with ``beyond``, of what each costs more than that.

    What a hook adds to a forward is a twentieth of it. The ratio of two such differences is noise in a single round, so
    the median of each difference over `BLOCK` rounds comes first.
    """
    length = len(samples[numerator])
    base = samples[beyond] if beyond is not None else [0.0] * length
    above, below = ([a - c for a, c in zip(samples[name], base, strict=True)] for name in (numerator, denominator))
    blocks = [slice(start, start + BLOCK) for start in range(0, length - BLOCK + 1, BLOCK)] or [slice(0, length)]
    found = [statistics.median(above[block]) / statistics.median(below[block]) for block in blocks]
    return found if len(found) > 1 else found * 2


def installed(package: str) -> bool:
    """Return whether the package is there; ours need not be, it is found beside the benchmarks."""
    if package == "hookline":
        return True
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def in_child(script: str, *arguments: str, limit: float = LIMIT, folder: str | None = None) -> Any:
    """Run the script in a process of its own, and return what it prints last, read as JSON."""
    home = str(Path(hl.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",  # nothing is to be downloaded
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment, cwd=folder, capture_output=True, text=True, check=True, timeout=limit,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])  # some packages print


def last_line(error: subprocess.CalledProcessError) -> str:
    """Return the last line of what a child said, short enough for a cell of a table."""
    last: str = (error.stderr.strip().splitlines() or ["no message"])[-1]
    return last[:120].replace("|", "/")


def take_turns(calls: Mapping[str, Callable[[], object]], rounds: int, *, inner: int, batch: int = 1) -> Samples:
    """Time the calls in turn; ``ours`` is timed a second time, as the A/A."""
    named: Sequence[tuple[str, Callable[[], object]]] = [*calls.items(), ("ours again", calls["ours"])]
    return dict(interleave([trial(name, call, inner=inner, batch=batch) for name, call in named], rounds))
