"""Runs that were really made, kept small: the curves that rules look at, in one file.

Run as a script, it makes that file out of folders of runs: ``python recorded.py NAME=FOLDER …``. The runs were
``hookline run mod_arithmetic --seed N`` (slow: ``--lr 0.001``, fast: ``--lr 0.01``) and ``hookline run digits --seed N
--snapshot-every 10`` (fast: ``--lr 0.1`` and ``--lr 0.3``), with the hooks norms, training_diagnostics and stats; those
of digits had the gradient norm of every step as well. A run is called quiet if its validation accuracy was never more
than 0.02 below the best so far, and ill otherwise: by that number alone, whatever the rules say.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hookline.report.metric_series import Collector, Curve, RunSeries
from hookline.report.report_runs import read_runs

FILE = Path(__file__).with_name("recorded_runs.npz")
_KEPT = re.compile(
    r"((^|/|_)(loss|acc)|grad_norm(_mean|_max)?|/total_norm|(forward|backward|param_grad)/(norm|zero_fraction))$"
)
FACTS: dict[str, Any] = {
    "status": "finished",
    "hooks": {
        "norms": {"fired": 1, "metrics": [{"name": "total_norm", "description": "length of the whole gradient"}]}
    },
}


def recorded_runs() -> dict[str, RunSeries]:
    """Return the runs by their names."""
    found: dict[str, RunSeries] = {}
    with np.load(FILE) as file:
        steps, bits, names = file["steps"].astype(np.int64), file["bits"], json.loads(file["names"].tobytes())
    values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    for run, metric, first_step, first, size in names:
        curve = Curve(metric, steps[first_step : first_step + size], values[first : first + size])
        found.setdefault(run, RunSeries()).curves.append(curve)
    return found


def _write(folders: dict[str, Path]) -> None:
    """Keep the upper half of each float32, which is right to 0.4 %; steps that are the same are kept once."""
    names, steps, bits = [], [np.zeros(0, np.int16)], [np.zeros(0, np.uint16)]
    starts: dict[bytes, int] = {}
    for run, folder in folders.items():
        (data,) = read_runs(folder, Collector)
        for curve in data.collected.series().curves:
            if _KEPT.search(curve.name) and not curve.same_as:
                if curve.steps.tobytes() not in starts:
                    starts[curve.steps.tobytes()] = sum(map(len, steps))
                    steps.append(curve.steps.astype(np.int16))
                names.append([run, curve.name, starts[curve.steps.tobytes()], sum(map(len, bits)), curve.steps.size])
                bits.append(((curve.values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16))
    text = np.frombuffer(json.dumps(names, separators=(",", ":")).encode(), np.uint8)
    np.savez_compressed(FILE, steps=np.concatenate(steps), bits=np.concatenate(bits), names=text)


if __name__ == "__main__":
    _write({name: Path(folder) for name, folder in (argument.split("=") for argument in sys.argv[1:])})
