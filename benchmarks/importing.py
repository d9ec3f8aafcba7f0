"""The row about importing the library. Hands a `Row` to ``rows``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from measure import Row, Trial, interleave, ratios, spread, typical
from subject import Setting

import hookline as hl

__all__ = ["importing"]

_CHILD = """
import time
{before}
start = time.process_time()
{timed}
print(time.process_time() - start)
"""


def importing(setting: Setting) -> Iterator[Row]:
    """What an import costs a fresh process; the child times itself, so that its start does not count."""
    children = {
        "torch": ("", "import torch"),
        "torch again": ("", "import torch"),
        "beyond": ("import torch", "import hookline; hookline.attach"),
        "beyond again": ("import torch", "import hookline; hookline.attach"),
        "alone": ("", "import hookline"),
        "alone again": ("", "import hookline"),
    }
    trials = [import_trial(name, *code) for name, code in children.items()]
    samples = interleave(trials, setting.rounds(10))
    for name, words, limit in (
        ("beyond", "`import hookline; hookline.attach` where torch is imported", 60.0),
        ("alone", "`import hookline` alone, which does not import torch", None),
    ):
        yield Row(
            f"import, {'beyond torch' if limit else 'hookline alone'} (ms)",
            words,
            "1 ms",
            f"a fresh process, compiled files there; `import torch` {typical(samples, 'torch') * 1e3:.0f} ms",
            spread([seconds * 1e3 for seconds in samples[name]]),
            spread(ratios(samples, f"{name} again", name)),
            f"{typical(samples, name) * 1e3:.2f} ms",
            at_most=limit,
        )


def import_trial(name: str, before: str, timed: str) -> Trial:
    home = str(Path(hl.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", _CHILD.format(before=before, timed=timed)]

    def run() -> Mapping[str, float]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return {name: float(done.stdout)}

    return run
