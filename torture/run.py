"""Do to hookline what users, disks and crashes do, many thousand times, and count what is lost.

    make torture                                          # all parts, an hour at most; writes benchmarks/RELIABILITY.md
    python torture/run.py --minutes 5                     # the same, shorter; writes nothing
    python torture/run.py --quick                         # a few cases of each part
    python torture/run.py --parts programs kills          # some parts
    python torture/run.py --parts programs --only 4711    # one case again, in this process

Exit status 1 if anything was lost. Every case is a number; `--first` chooses other ones.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # children are forked, which does not go with OpenMP's threads
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/guard", "tests/serve")]

import broken_sinks  # noqa: E402
import command_runs  # noqa: E402
import fuzzed_files  # noqa: E402
import kills  # noqa: E402
import programs  # noqa: E402
import served_requests  # noqa: E402
import threads  # noqa: E402
import torch  # noqa: E402
import vandals  # noqa: E402
from helpers_cases import Outcome, Part, go_on, run_part  # noqa: E402
from page import write_page  # noqa: E402

_MODULES = (vandals, programs, kills, broken_sinks, threads, fuzzed_files, served_requests)
_ALL: list[Part] = [*(module.PART for module in _MODULES), *command_runs.PARTS.values()]
PARTS: dict[str, Part] = {part.name: part for part in _ALL}


def main() -> int:
    """Run what the command line asks for; return 1 if something was lost."""
    options = _parse()
    torch.set_num_threads(1)
    parts = [PARTS[name] for name in options.parts or PARTS]
    if options.only is not None:
        return _run_one(parts, options.only)
    end = time.monotonic() + options.minutes * 60
    outcomes = []
    for left, part in zip(range(len(parts), 0, -1), parts, strict=True):
        seconds = (end - time.monotonic()) / left  # what a part does not need is for those after it
        outcome = run_part(part, first=options.first, acts=part.quick if options.quick else None, seconds=seconds)
        _tell(outcome)
        outcomes.append(outcome)
    if not options.quick:
        _use_what_is_left(outcomes, end)
    if options.out:
        write_page(Path(options.out), outcomes)
    return 0 if all(outcome.is_clean for outcome in outcomes) else 1


def _use_what_is_left(outcomes: list[Outcome], end: float) -> None:
    """Go on with the parts whose share of the time was too short: on a busy machine, while others needed less."""
    short = [outcome for outcome in outcomes if outcome.acts < outcome.part.goal]
    for left, outcome in zip(range(len(short), 0, -1), short, strict=True):
        go_on(outcome, outcome.part.goal, (end - time.monotonic()) / left)
        _tell(outcome)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most so long, divided among the parts")
    parser.add_argument("--quick", action="store_true", help="a few cases of each part, as the tests do")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case of each part")
    parser.add_argument("--only", type=int, help="one case, in this process")
    parser.add_argument("--out", help="write the page there")
    return parser.parse_args()


def _run_one(parts: list[Part], number: int) -> int:
    for part in parts:
        part.prepare()
        case = part.run_case(number)
        print(case)
        if case.wrong:
            return 1
    return 0


def _tell(outcome: Outcome) -> None:
    print(
        f"{outcome.part.name}: {outcome.cases:,} cases, {outcome.acts:,} acts, {len(outcome.wrong)} wrong, "
        f"{len(outcome.died)} dead, {sum(outcome.refused.values()):,} refused, {outcome.seconds:.0f} s",
        flush=True,
    )
    for case in outcome.wrong[:10]:
        print(f"  case {case.number}: {'; '.join(case.wrong)[:600]}")
    for number, how in outcome.died[:10]:
        print(f"  case {number} {how}")


if __name__ == "__main__":
    raise SystemExit(main())
