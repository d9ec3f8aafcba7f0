"""The row about a file that is made again from the log of a run, as every resumed run does.

Takes a log of made-up records, hands a `Row` to ``rows``.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measure import Row, interleave, ratios, spread, typical
from subject import Setting

import hookline as hl

__all__ = ["replaying"]

RECORDS = 20_000
NUMBERS = 50


def replaying(setting: Setting) -> Iterator[Row]:
    """CPU seconds of ``replay`` from a log into a new CSV file."""
    with tempfile.TemporaryDirectory(prefix="hookline-benchmark-") as name:
        log = Path(name) / "records.jsonl"
        _write_log(log)

        def seconds(into: str) -> float:
            table = Path(name) / f"{into}.csv"
            table.unlink(missing_ok=True)
            start = time.thread_time()
            count = hl.records.replay(log, hl.sinks.CSVSink(table))
            found = time.thread_time() - start
            if count != RECORDS or table.read_bytes().count(b"\n") != RECORDS + 1:
                raise RuntimeError(f"The CSV file does not hold {RECORDS:,} records, so the figure means nothing.")
            return found

        trials = [lambda name=name: {name: seconds(name)} for name in ("made", "made again")]
        samples = interleave(trials, 3 if setting.quick else 7)
    yield Row(
        "CSV made again from the log (s)",
        f"`replay` of {RECORDS:,} records of {NUMBERS} numbers into a `CSVSink`",
        "1 s",
        "no model",
        spread(list(samples["made"])),
        spread(ratios(samples, "made again", "made")),
        f"{typical(samples, 'made'):.2f} s",
        at_most=2.0,
    )


def _write_log(path: Path) -> None:
    chance = random.Random(0)
    log = hl.records.RecordLog(path)
    for number in range(RECORDS):
        metrics = {f"hook{n % 5}/metric_{n}": chance.random() for n in range(NUMBERS)}
        log.append(hl.records.Record(metrics, number, hl.HookPoint.POST_EPOCH, number, "random", 0, float(number)))
    log.close()
