"""The family "debuggers": record what every module computes in a training step.

``bench_peers`` runs the `DEBUGGING` contests, on a small transformer. Ours is `hl.trace`: fingerprints of
every module, written to disk.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contests import Contest, Work
from debugging import FLOWS
from measure import Samples, interleave, trial
from subject import Setting
from training_peers import SHAPE, quiet
from watching import Training

import hookline as hl

__all__ = ["DEBUGGING", "msprobe_debugger"]

BOTH, FORWARD = "both passes of a step", "forward of a step"


def measure(name: str, rounds: int) -> dict[str, Samples | str]:
    """Time a step: bare, traced by ours, under theirs."""
    quiet()
    training = Training(SHAPE, Setting(torch.device("cpu")))
    work = FORWARD if name == "transformers" else BOTH
    kinds = ("output",) if work == FORWARD else FLOWS
    with tempfile.TemporaryDirectory() as folder:
        numbers = itertools.count()
        place = lambda: Path(folder) / str(next(numbers))  # noqa: E731
        ours = lambda: hl.trace(training.model, to=place(), kinds=kinds, step=training.optimizer)  # noqa: E731
        theirs, step = PEERS[name](training, Path(folder))
        named: dict[str, tuple[Callable[[], object], Callable[[], AbstractContextManager[object]]]] = {
            "bare": (training.step, nullcontext),
            "ours": (training.step, ours),
            "ours again": (training.step, ours),
            "theirs": (step, theirs),
        }
        trials = [trial(who, call, inner=1, hooked=on) for who, (call, on) in named.items()]
        return {work: dict(interleave(trials, rounds))}


def debug_mode(training: Training, folder: Path, *, hashes: bool = False) -> tuple[Any, Any]:
    """Return torch's DebugMode, to be entered, and the step."""
    from torch.utils._debug_mode import DebugMode

    @contextmanager
    def with_hashes() -> Iterator[None]:
        with DebugMode(), DebugMode.log_tensor_hashes():
            yield

    return with_hashes if hashes else DebugMode, training.step


def detector(training: Training, folder: Path) -> tuple[Any, Any]:
    """Return the detector of transformers; its hooks have no handles, so they are found again to be removed."""
    from transformers.debug_utils import DebugUnderflowOverflow

    @contextmanager
    def entered() -> Iterator[None]:
        before = {id(module): set(module._forward_hooks) for module in training.model.modules()}
        DebugUnderflowOverflow(training.model)
        try:
            yield
        finally:
            for module in training.model.modules():
                for key in set(module._forward_hooks) - before[id(module)]:
                    del module._forward_hooks[key]

    return entered, training.step


def msprobe(training: Training, folder: Path) -> tuple[Any, Any]:
    """Return a step between msprobe's start and stop, which writes."""
    debugger = msprobe_debugger(folder / "msprobe")

    def probed() -> None:
        debugger.start(model=training.model)
        training.step()
        debugger.stop()
        debugger.step()

    return nullcontext, probed


def msprobe_debugger(folder: Path) -> Any:
    """Return msprobe's debugger, which writes statistics of modules (level L0) into the folder."""
    from msprobe.pytorch import PrecisionDebugger

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    common = {"task": "statistics", "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": "L0"}
    file.write_text(json.dumps(common | {"statistics": {"scope": [], "list": [], "data_mode": ["all"]}}))
    return PrecisionDebugger(config_path=str(file))


PEERS: dict[str, Callable[[Training, Path], tuple[Any, Any]]] = {
    "msprobe": msprobe,
    "debug_mode": debug_mode,
    "hashes": partial(debug_mode, hashes=True),
    "transformers": detector,
}


def _contest(name: str, label: str, package: str, words: str, why: str) -> Contest:
    flows = "outputs" if name == "transformers" else "outputs and gradients"
    work = Work(f"what a trace with fingerprints of {flows} of every module, to disk, adds", words, f"{SHAPE}, AdamW",
                why=why)  # fmt: skip
    return Contest(
        label, package, partial(measure, name), {FORWARD if name == "transformers" else BOTH: work}, rounds=20
    )


DEBUGGING: dict[str, Contest] = {
    "msprobe": _contest("msprobe", "msprobe", "mindstudio-probe", "what its statistics of modules (L0), to disk, add",
                        "it keeps a few numbers of a tensor; ours a fingerprint that tells where two runs part"),
    "debug_mode": _contest("debug_mode", "torch `DebugMode`", "torch", "what it adds, without hashes, nothing on disk",
                           "it notes names and shapes of operators and reads no value"),
    "hashes": _contest("hashes", "torch `DebugMode`, hashes", "torch", "what it adds with `log_tensor_hashes`",
                       "it keeps one number of a tensor, and writes nothing to disk"),
    "transformers": _contest("transformers", "HF `DebugUnderflowOverflow`", "transformers",
                             "what it adds: two extremes of every module's tensors, in memory",
                             "it keeps two numbers in memory; ours a fingerprint on disk"),
}  # fmt: skip
