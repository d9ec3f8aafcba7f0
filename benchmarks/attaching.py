"""Rows about what comes before a hook fires: importing the library, attaching, and taking off again.

Takes models from ``models``, hands `Row`s to ``rows``.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from measure import Row, Trial, interleave, ratios, spread, typical
from models import wide
from subject import Setting, empty
from torch import nn

import hookline as hl

__all__ = ["attaching", "importing"]

_REMOVE_AT_MOST = 5.5
"""torch deletes one item of one dictionary, in 0.77 µs a module. Ours takes back two items of torch's, the table in the
list of hooked modules and in the counter's: these deletions alone, in one loop without a call, take 3.2 µs, which is
4.1 of torch's. The whole takes 4.0."""


def attaching(setting: Setting) -> Iterator[Row]:
    """Attaching to, and removing from, many modules by glob."""
    large, small = wide(10_000), wide(1_000)
    trials = [
        attach_trial("ours", large),
        attach_by_hand("torch", large),
        attach_by_hand("torch again", large),
        attach_trial("ours, 1,000", small),
        attach_trial("ours, 1,000 again", small),
    ]
    samples = interleave(trials, setting.rounds(25))
    for act, done in (("attaching to", "attach"), ("removing from", "remove")):
        ours, torchs, thousand = (f"{name}: {done}" for name in ("ours", "torch", "ours, 1,000"))
        yield Row(
            f"{act} 10,000 modules",
            '`hl.attach(model, "layers.*", hook)`' if done == "attach" else "`handle.remove()`",
            "`named_modules` + `fnmatch` + `register_forward_hook`"
            if done == "attach"
            else "`handle.remove()` of each of torch's",
            "10,000 modules in 1,000 blocks",
            spread(ratios(samples, ours, torchs)),
            spread(ratios(samples, f"torch again: {done}", torchs)),
            f"{typical(samples, ours) * 1e3:.1f} / {typical(samples, torchs) * 1e3:.1f} ms",
            at_most=1.5 if done == "attach" else _REMOVE_AT_MOST,
        )
        yield Row(
            f"{act} 10,000 modules, linearity",
            "time for 10,000",
            "ten times the time for 1,000",
            "as above, and 1,000 modules in 100 blocks",
            spread([ratio / 10 for ratio in ratios(samples, ours, thousand)]),
            spread(ratios(samples, f"ours, 1,000 again: {done}", thousand)),
            f"{typical(samples, ours) * 1e3:.1f} / 10 × {typical(samples, thousand) * 1e3:.2f} ms",
            at_most=1.3,
        )


def attach_trial(name: str, model: nn.Module) -> Trial:
    def run() -> Mapping[str, float]:
        start = time.thread_time()
        handle = hl.attach(model, "layers.*", empty)
        middle = time.thread_time()
        handle.remove()
        end = time.thread_time()
        return {f"{name}: attach": middle - start, f"{name}: remove": end - middle}

    return run


def attach_by_hand(name: str, model: nn.Module) -> Trial:
    def run() -> Mapping[str, float]:
        start = time.thread_time()
        handles = []
        for path, module in model.named_modules():
            if fnmatch.fnmatch(path, "layers.*"):
                handles.append(module.register_forward_hook(empty))
        middle = time.thread_time()
        for handle in handles:
            handle.remove()
        end = time.thread_time()
        return {f"{name}: attach": middle - start, f"{name}: remove": end - middle}

    return run


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
