"""Rows about traces: what a trace of every module adds to a training step, beside other tools, and how fast it is read.

Takes the transformer of ``watching``, hands `Row`s to ``rows``. All run on one model in one process, but for msprobe,
which changes torch when it is imported, and is measured in a process of its own, with ours beside it::

    python benchmarks/debugging.py msprobe 10    the times over ten rounds, as JSON

What there is to compare with, and how to install it, is in ``peers.txt``; what is not installed is listed as that.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from measure import Row, Samples, interleave, ratios, spread, trial, typical
from models import SMALL
from subject import Setting
from threads import NOTHING, in_child, installed
from watching import FOUR, Training

from hookline.debug.compare.compare import compare
from hookline.debug.trace.start_trace import trace

__all__ = ["debug"]

FLOWS = ("output", "output_grad")
LARGE = 64 << 20
"""Bytes of each tensor whose reading is timed."""


def debug(setting: Setting) -> Iterator[Row]:
    """Traces of every module; torch's DebugMode, the detector of transformers, msprobe; comparing."""
    training = Training(SMALL if setting.device.type == "cuda" else FOUR, setting)
    with tempfile.TemporaryDirectory() as folder:
        samples = _measured(training, _hooked(training, Path(folder)), setting, 20)
        words = "of every module, outputs and gradients"
        yield _row(samples, training, "trace", f"fingerprints {words}, to disk", 1.25)
        yield _row(samples, training, "trace, forward", "fingerprints of outputs of every module, to disk")
        yield _row(samples, training, "trace, default kinds", f"fingerprints {words}, and gradients of parameters")
        samples = _measured(training, _peers(training), setting, 10)
        yield _row(samples, training, "DebugMode", "torch's `DebugMode`: every operator, both passes, no hashes")
        yield _row(samples, training, "DebugMode, hashes", "the same with `log_tensor_hashes`")
        yield _row(samples, training, "transformers", "transformers' `DebugUnderflowOverflow`: forward alone")
        yield _msprobe(setting)
        yield comparing(setting, Path(folder))


_Hooked = dict[str, Callable[[], AbstractContextManager[object]]]


def _measured(training: Training, hooked: _Hooked, setting: Setting, rounds: int) -> Samples:
    around = hooked | {"bare": nullcontext, "bare again": nullcontext}
    trials = [trial(name, training.step, inner=1, hooked=on, device=setting.device) for name, on in around.items()]
    return interleave(trials, setting.rounds(rounds))


def _hooked(training: Training, folder: Path) -> _Hooked:
    numbers = itertools.count()

    def traced(*kinds: str) -> Callable[[], AbstractContextManager[object]]:
        return lambda: trace(training.model, to=folder / str(next(numbers)), kinds=kinds, step=training.optimizer)

    return {
        "trace": traced(*FLOWS),
        "trace, forward": traced("output"),
        "trace, default kinds": traced(*FLOWS, "param_grad"),
    }


def _peers(training: Training) -> _Hooked:
    """Return what other tools are entered by, as far as they are installed."""
    found: _Hooked = {}
    try:
        from torch.utils._debug_mode import DebugMode

        found["DebugMode"] = DebugMode
        if hasattr(DebugMode, "log_tensor_hashes"):
            found["DebugMode, hashes"] = lambda: _with_hashes(DebugMode)
    except ImportError:  # older versions of torch have none
        pass
    if installed("transformers"):
        found["transformers"] = lambda: _detector(training)
    return found


@contextmanager
def _with_hashes(mode: Any) -> Iterator[None]:
    with mode(), mode.log_tensor_hashes():
        yield


@contextmanager
def _detector(training: Training) -> Iterator[None]:
    """Detect overflow as the documentation of transformers says; its hooks have no handles, so they are found again."""
    from transformers.debug_utils import DebugUnderflowOverflow

    before = {id(module): set(module._forward_hooks) for module in training.model.modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        DebugUnderflowOverflow(training.model)
    try:
        yield
    finally:
        for module in training.model.modules():
            for key in set(module._forward_hooks) - before[id(module)]:
                del module._forward_hooks[key]


def _row(samples: Samples, training: Training, name: str, words: str, at_most: float | None = None) -> Row:
    shape = SMALL if training.tokens.device.type == "cuda" else FOUR
    if name not in samples:
        return Row(f"debug: {name}, training step", words, "the same step without hooks", str(shape), NOTHING, NOTHING,
                   "not installed")  # fmt: skip
    return Row(
        f"debug: {name}, training step",
        words,
        "the same step without hooks",
        f"{shape}, AdamW",
        spread(ratios(samples, name, "bare")),
        spread(ratios(samples, "bare again", "bare")),
        f"{typical(samples, name) * 1e3:.1f} / {typical(samples, 'bare') * 1e3:.1f} ms",
        at_most=at_most,
    )


# -- msprobe, in a process of its own --------------------------------------------------------------------------------


def _msprobe(setting: Setting) -> Row:
    ratio = same = NOTHING
    words = "mindstudio-probe is not installed"
    if installed("mindstudio-probe"):
        try:
            samples = in_child("msprobe", setting.rounds(10), script=__file__)
            ratio, same = spread(ratios(samples, "msprobe", "bare")), spread(ratios(samples, "bare again", "bare"))
            version = importlib.metadata.version("mindstudio-probe")
            ours = spread(ratios(samples, "trace", "bare"))
            words = f"{typical(samples, 'msprobe') * 1e3:.1f} / {typical(samples, 'bare') * 1e3:.1f} ms; "
            words += f"trace beside it {ours.median:.3f}; mindstudio-probe {version}"
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            words = f"failed: {type(error).__name__}"
    return Row("debug: msprobe, training step", "msprobe's statistics of modules (level L0), forward and backward",
               "the same step without hooks", f"{FOUR}, AdamW", ratio, same, words)  # fmt: skip


def in_own_process(rounds: int) -> Samples:
    """Measure msprobe, and ours beside it; to be called in a child, as msprobe changes torch."""
    from msprobe.pytorch import PrecisionDebugger

    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    training = Training(FOUR, Setting(torch.device("cpu")))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        statistics = {"scope": [], "list": [], "data_mode": ["all"]}
        common = {"task": "statistics", "dump_path": f"{folder}/dump", "rank": [], "step": [], "level": "L0"}
        config.write_text(json.dumps(common | {"statistics": statistics}))
        debugger = PrecisionDebugger(config_path=str(config))

        def probed() -> None:
            debugger.start(model=training.model)
            training.step()
            debugger.stop()
            debugger.step()  # which writes

        numbers = itertools.count()
        ours = lambda: trace(  # noqa: E731
            training.model, to=Path(folder) / str(next(numbers)), kinds=FLOWS, step=training.optimizer
        )
        hooked = {"trace": ours, "bare": nullcontext, "bare again": nullcontext}
        trials = [trial(name, training.step, inner=1, hooked=on) for name, on in hooked.items()]
        trials.append(trial("msprobe", probed, inner=1))
        return interleave(trials, rounds)


# -- reading -----------------------------------------------------------------------------------------------------


def comparing(setting: Setting, folder: Path) -> Row:
    """How long it takes to compare the tensors of two traces, beside the time that 1 GB/s would take."""
    names, value = ("read_a", "read_b"), torch.randn(LARGE // 4)
    for name in names:
        model = torch.nn.Identity()
        with trace(model, to=folder / name, kinds="output", tensors=True, budget=None):
            for number in range(4):
                model(value * (1 + 1e-6 * number * (name == "read_b")))
    samples: Samples = {"compare": [], "compare again": [], "1 GB/s": []}
    for _ in range(setting.rounds(20)):
        for name in ("compare", "compare again"):
            start = time.thread_time()
            compare(folder / "read_a", folder / "read_b")
            samples[name].append(time.thread_time() - start)
        samples["1 GB/s"].append(8 * LARGE / 1e9)
    speed = 8 * LARGE / typical(samples, "compare") / 1e9
    return Row("debug: compare tensors", "`compare` of two traces with tensors", "their bytes at 1 GB/s",
               f"four tensors of {LARGE >> 20} MiB in each", spread(ratios(samples, "compare", "1 GB/s")),
               spread(ratios(samples, "compare again", "compare")), f"{speed:.2f} GB/s", at_most=1.0)  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(in_own_process(int(sys.argv[2]))))
