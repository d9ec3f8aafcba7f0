"""Measure ours beside what others offer for the same work, and write the table and the pictures.

    make bench-peers                                     everything, about ten minutes, after an installation of five
    make bench-peers ARGS='--only dispatch'              one family
    make bench-peers ARGS=--quick                        a tenth of the rounds, to see that all run; writes nothing
    python benchmarks/bench_peers.py --draw              pictures and pages again, from the numbers in peers.json

The environment is peers.txt. The numbers go into benchmarks/peers.json; from them ``peers_page`` makes
the pictures under docs/pictures, and the words of docs/peers.md and README.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping

import torch
from contests import Contest, Result, results
from debug_peers import DEBUGGING
from guard_peers import GUARDING
from peers import CAPTURING
from peers_page import NUMBERS, keep, write_pages
from results import console_line
from subject import Setting
from training_peers import DISPATCH, STATISTICS

FAMILIES: Mapping[str, Mapping[str, Contest]] = {
    "capture": CAPTURING,
    "statistics": STATISTICS,
    "dispatch": DISPATCH,
    "guard": GUARDING,
    "debuggers": DEBUGGING,
}


def main() -> None:
    """Parse the options; measure, keep the numbers, write."""
    options = parse()
    if options.one:
        family, name, rounds = options.one
        print("\n" + json.dumps(FAMILIES[family][name].measure(int(rounds))))
        return
    if not options.draw:
        setting = Setting(torch.device("cpu"), options.quick)
        for family in options.only or FAMILIES:
            found = measured(family, setting)
            if not options.quick:
                keep(NUMBERS, family, found)
    if not options.quick:
        write_pages()


def measured(family: str, setting: Setting) -> list[Result]:
    """Run the contests of a family one after the other, printing each row as it comes."""
    found, start = [], time.perf_counter()
    for name, contest in FAMILIES[family].items():
        for result in results(name, contest, setting.rounds(contest.rounds), __file__, family):
            found.append(result)
            print(console_line(result.row), flush=True)
    print(f"  ({family}: {time.perf_counter() - start:.0f} s)", flush=True)
    return found


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], choices=list(FAMILIES), help="one family (repeatable)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds; printed, not written")
    parser.add_argument("--draw", action="store_true", help="measure nothing; write pages and pictures again")
    parser.add_argument("--one", nargs=3, metavar=("FAMILY", "PEER", "ROUNDS"), help="one contest, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
