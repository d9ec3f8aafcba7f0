"""Rows about ranks: a flush of a watch over two ranks, and what a watch adds to a step under DDP.

``rows`` calls `ranks`, which starts two processes over gloo (this file again); the first hands its samples back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from measure import Row, Samples, Trial, interleave, ratios, spread, trial, typical
from models import Shape
from subject import Setting
from torch import nn
from watching import Training

import hookline as hl

__all__ = ["ranks"]

SMALL_GPT = Shape("transformer", 4, 128, 4, 500, 4, 64)
SITES = 1000
_BYTES = 150
"""What a rank sends of each: 13 numbers, and a name."""


def ranks(setting: Setting) -> Iterator[Row]:
    """Start two ranks, and make rows of the samples of the first."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, folder, str(setting.rounds(40))]
        processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        samples: Samples = json.loads(Path(folder, "samples").read_text(encoding="utf-8"))
    yield Row(
        "flush over 2 ranks (ms, wall clock)",
        f"`watch.to_metrics()` of {SITES:,} sites, nine statistics each: read, reduce over gloo, name",
        "1 ms",
        f"{SITES:,} Linear layers, forward watched; two processes on one machine",
        spread([seconds * 1e3 for seconds in samples["flush"]]),
        spread(ratios(samples, "flush again", "flush")),
        f"{typical(samples, 'flush') * 1e3:.2f} ms, of this rank alone {typical(samples, 'local') * 1e3:.2f} ms",
        at_most=3.0,
    )
    # Milliseconds depend on who else uses the cores that two processes meet on; what we add to gloo does not.
    parts = [alone + bare for alone, bare in zip(samples["local"], samples["gloo"], strict=True)]
    yield Row(
        "flush over 2 ranks, against its parts",
        f"`watch.to_metrics()` of {SITES:,} sites over two ranks",
        "the same of this rank alone, and a bare exchange of the same bytes over gloo",
        f"{SITES:,} Linear layers, forward watched; two processes on one machine",
        spread([flush / both for flush, both in zip(samples["flush"], parts, strict=True)]),
        spread(ratios(samples, "flush again", "flush")),
        f"{typical(samples, 'flush') * 1e3:.2f} / {typical(samples, 'local') * 1e3:.2f} + "
        f"{typical(samples, 'gloo') * 1e3:.2f} ms",
    )
    under_ddp, alone = ratios(samples, "ddp, watched", "ddp"), ratios(samples, "one, watched", "one")
    yield Row(
        "watch under DDP, 2 processes",
        "what `hl.watch` on every layer makes of a DDP step, as a ratio",
        "the same ratio without DDP",
        f"{SMALL_GPT.name}: 4 layers, d 128, seq 64, batch 4; forward and gradient, default set",
        spread([first / second for first, second in zip(under_ddp, alone, strict=True)]),
        spread(ratios(samples, "ddp again", "ddp")),
        f"{spread(under_ddp).median:.3f} / {spread(alone).median:.3f}",
        at_most=1.05,
    )


# -- in the processes ------------------------------------------------------------------------------------------


def main(folder: str, rounds: int, rank: int) -> None:
    """Measure on one rank; the order of the trials is the same on both."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    samples = {**interleave(flushing(), rounds), **interleave(training(), rounds)}
    if rank == 0:
        Path(folder, "samples").write_text(json.dumps(samples), encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # once in some fifty runs torch aborts while its threads are taken down


def flushing() -> list[Trial]:
    """Read a watch of many sites, over ranks and alone."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(SITES)])
    watch = hl.watch(model, [str(index) for index in range(SITES)], on="forward")
    model(torch.ones(2, 4))

    watch.to_metrics()  # ranks connect
    numbers = bytes(SITES * _BYTES)

    def exchange() -> None:
        dist.all_gather_object([None, None], numbers)

    def timed(name: str, call: Callable[[], object]) -> Trial:
        def run() -> Mapping[str, float]:
            return {name: min(_seconds(call) for _ in range(10))}

        return run

    return [
        timed("flush", watch.to_metrics),
        timed("flush again", watch.to_metrics),
        timed("local", lambda: watch.to_metrics(local=True)),
        timed("gloo", exchange),
    ]


def _seconds(call: Callable[[], object]) -> float:
    """Wall clock, since a collective waits; both ranks begin at the same time."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def training() -> list[Trial]:
    """Steps with and without a watch, with and without DDP."""
    setting = Setting(torch.device("cpu"))
    one, other = Training(SMALL_GPT, setting), Training(SMALL_GPT, setting)
    ddp = nn.parallel.DistributedDataParallel(other.model)
    watched = {"on": ("forward", "backward"), "target": "*"}
    return [
        trial("ddp, watched", lambda: other.step(ddp), inner=2, hooked=other.watched(**watched)),
        *[trial(name, lambda: other.step(ddp), inner=2, hooked=nullcontext) for name in ("ddp", "ddp again")],
        trial("one, watched", one.step, inner=2, hooked=one.watched(**watched)),
        trial("one", one.step, inner=2, hooked=nullcontext),
    ]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
