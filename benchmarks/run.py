"""Measure what hookline costs, and write the results beside this file.

    python benchmarks/run.py                    everything; writes results.json and RESULTS.md beside this file
    python benchmarks/run.py --quick            a tenth of the rounds, printed only
    python benchmarks/run.py --only backward    one group of rows, printed only
    python benchmarks/run.py --device cuda      the GPU section alone

With ``--out FILE`` the rows go there, those of --quick and --only as well. A file that exists keeps the rows that were
not measured. ``--merge FILE`` measures nothing: it takes the rows of another file over, from another machine, say.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import torch
from measure import Row
from results import RESULTS, console_line, keep, load, measured, write_page
from rows import BENCHMARKS, ON_CPU, ON_GPU
from subject import Setting

import hookline


def main() -> None:
    """Parse the options, measure section by section."""
    options = parse()
    if options.merge is not None:
        keep(RESULTS, load(options.merge))
        write_page()
        return
    torch.set_num_threads(1)
    # On some machines mkldnn makes small linear layers 4–8× slower, which hides every overhead.
    torch.backends.mkldnn.enabled = False
    # A hook that never fired would be measured as free.
    warnings.simplefilter("error", hookline.HooklineWarning)
    out = options.out or (None if options.quick or options.only else RESULTS)
    for section, device in devices(options.device):
        rows = measure(Setting(torch.device(device), options.quick), options.only)
        if rows and out is not None:
            keep(out, measured(section, rows))
            print(f"written to {out}")
    if out == RESULTS:
        write_page()


def measure(setting: Setting, only: list[str]) -> list[Row]:
    """Run the groups of rows that were asked for, printing each row as it comes."""
    names = ON_CPU if setting.device.type == "cpu" else ON_GPU
    rows: list[Row] = []
    for name in names:
        if only and name not in only:
            continue
        start = time.perf_counter()
        for row in BENCHMARKS[name](setting):
            rows.append(row)
            print(console_line(row), flush=True)
        print(f"  ({name}: {time.perf_counter() - start:.0f} s)", flush=True)
    return rows


def devices(asked: str | None) -> list[tuple[str, str]]:
    """The sections to measure; both where there is a GPU, unless one is asked for."""
    sections = [("CPU", "cpu")]
    if torch.cuda.is_available():
        sections.append(("GPU", "cuda"))
    return [section for section in sections if asked in (None, section[1])]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what hookline costs.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds; printed, not written")
    parser.add_argument("--only", action="append", default=[], choices=list(BENCHMARKS), metavar="NAME",
                        help=f"one group of rows (repeatable): {', '.join(BENCHMARKS)}")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="one section alone; by default all there are")
    parser.add_argument("--out", type=Path, help="where to keep the rows; by default results.json beside this file")
    parser.add_argument(
        "--merge", type=Path, metavar="FILE", help="take the rows of another file over, measure nothing"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU on this machine")
    return options


if __name__ == "__main__":
    main()
