"""Measure what grows with sites, tensors, steps, ranks and clients, and draw a plot of each.

    make bench-growth                          everything, about eight minutes; writes the plots and docs/scaling.md
    make bench-growth ARGS='--only ranks'      one part
    make bench-growth ARGS=--quick             a tenth of it, to see that all run; writes nothing
    python benchmarks/growth.py --draw         plots and tables again, from the numbers in growth.json

``growth_page`` keeps the numbers and draws. Steps and ranks run in processes of their own, clients ask a server that is
one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import httpx
import torch
import torch.distributed as dist
from growth_page import NUMBERS, Plot, draw_all, keep
from measure import added, interleave, trial, typical
from rank_rows import SITES, flushing
from serving_load import STATS, Seen, Server, ask, body_for, random_llama
from subject import Setting, empty
from torch import nn

import hookline as hl
from hookline import HookPoint, RunDataContext

COUNTS = (10, 100, 1000, 10_000)
ELEMENTS = (100, 1000, 10_000, 100_000, 1_000_000, 10_000_000)
STEPS, LOOKS = 100_000, 20
_EPOCH = 1000
RANKS = (1, 2, 4)
CLIENTS = (1, 4, 16, 64)


# -- sites -----------------------------------------------------------------------------------------------------------


def sites(setting: Setting) -> Plot:
    """Return what one site of many costs: to attach and remove, at a call, at a flush."""
    found: dict[str, list[tuple[float, float]]] = {}
    for count in COUNTS:
        model = nn.Sequential(*[nn.Identity() for _ in range(count)])
        x, watch = torch.zeros(16), hl.watch(model, "#", on="forward")
        model(x)
        flush = trial("flush of a watch", lambda watch=watch: watch.to_metrics(reset=False), inner=2)
        hooked: dict[str, Callable[[], AbstractContextManager[object]]] = {
            "bare": nullcontext,
            "empty hook, a call": lambda model=model: hl.attach(model, "#", empty, observe=True),
            "capture, a call": lambda model=model: hl.capture(model, "#"),
            "watch, a call": lambda model=model: hl.watch(model, "#", on="forward"),
        }
        calls = [trial(name, lambda model=model, x=x: model(x), inner=2, hooked=on) for name, on in hooked.items()]
        attach = trial("attach and remove", lambda model=model: hl.attach(model, "#", empty, strict=False).remove(),
                       inner=2)  # fmt: skip
        rounds = max(5, setting.rounds(40) * 100 // max(count, 100))
        flushes = interleave([flush], rounds)
        watch.remove()
        samples = interleave([*calls, attach], rounds)
        for name in hooked:
            if name != "bare":
                found.setdefault(name, []).append((count, added(samples, name, "bare") / count * 1e6))
        found.setdefault("attach and remove", []).append((count, typical(samples, "attach and remove") / count * 1e6))
        found.setdefault("flush of a watch", []).append((count, typical(flushes, "flush of a watch") / count * 1e6))
    return Plot("cost of one site among many", "sites", "µs a site", found)


# -- tensors ---------------------------------------------------------------------------------------------------------


def tensors(setting: Setting) -> Plot:
    """Return what a hook on one module adds to a call, by the size of its output."""
    found: dict[str, list[tuple[float, float]]] = {}
    for count in ELEMENTS:
        model, x = nn.Sequential(nn.Identity()), torch.randn(count)
        hooked: dict[str, Callable[[], AbstractContextManager[object]]] = {
            "bare": nullcontext,
            "capture": lambda model=model: hl.capture(model, "0"),
            "watch, nine statistics": lambda model=model: hl.watch(model, "0", on="forward"),
            "six by torch, `.item()`": lambda model=model: _six_numbers(model),
        }
        batch = max(1, min(200, 100_000 // count))
        calls = [
            trial(name, lambda model=model, x=x: model(x), inner=3, batch=batch, hooked=on)
            for name, on in hooked.items()
        ]
        clone = trial("clone of the tensor", lambda x=x: x.clone(), inner=3, batch=batch)
        samples = interleave([*calls, clone], setting.rounds(30 if count < 1_000_000 else 10))
        for name in ("capture", "watch, nine statistics", "six by torch, `.item()`"):
            found.setdefault(name, []).append((count, max(added(samples, name, "bare"), 1e-8) * 1e6))
        found.setdefault("clone of the tensor", []).append((count, typical(samples, "clone of the tensor") * 1e6))
    return Plot("cost of one call by the size of the tensor", "numbers in the tensor (float32)", "µs a call", found)


@contextmanager
def _six_numbers(model: nn.Module) -> Iterator[None]:
    def note(module: nn.Module, args: object, output: torch.Tensor) -> None:
        numbers = (output.mean(), output.std(), output.norm(), output.min(), output.max(), (output == 0).float().mean())
        for each in numbers:
            each.item()

    with model[0].register_forward_hook(note):
        yield


# -- steps -----------------------------------------------------------------------------------------------------------


def steps(setting: Setting) -> Plot:
    """Return what a run holds in memory after so many steps, watched, fired and recorded at each."""
    count = STEPS // 20 if setting.quick else STEPS
    done = subprocess.run(
        [sys.executable, __file__, "--steps", str(count)], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    return Plot("memory of a watched run", "steps", "MB", found, log=False)


class Last(hl.TrainingHook):
    """Report the step."""

    hook_points = frozenset({HookPoint.POST_STEP})

    def compute(self, ctx: RunDataContext) -> dict[str, float]:
        """Return a number that is another at each step."""
        return {"step": float(ctx.epoch)}


def hold_memory(count: int) -> dict[str, list[tuple[float, float]]]:
    """Train ``count`` steps with a watch and a manager that writes records; look at memory twenty times."""
    torch.set_num_threads(1)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: dict[str, list[tuple[float, float]]] = {"resident (RSS)": [], "Python's own (tracemalloc)": []}
    with tempfile.TemporaryDirectory() as folder, hl.watch(model, on="forward", optimizer=optimizer) as watch:
        manager = hl.HookManager(hooks=[Last()], sinks=[hl.sinks.JSONLSink(Path(folder) / "records.jsonl")])
        tracemalloc.start()
        for step in range(1, count + 1):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.advance_step()
            if step % 10 == 0:
                manager.fire(HookPoint.POST_STEP, lambda step=step: RunDataContext(HookPoint.POST_STEP, step))
            if step % 100 == 0:
                watch.to_metrics(reset=True)
            if step % _EPOCH == 0:
                manager.flush_step_metrics(step // _EPOCH)  # what a step returned waits for this, as in every loop
            if step == 1000 or step % (count // LOOKS) == 0:
                gc.collect()
                found["resident (RSS)"].append((step, _resident() / 1e6))
                found["Python's own (tracemalloc)"].append((step, tracemalloc.get_traced_memory()[0] / 1e6))
        tracemalloc.stop()
    return found


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# -- ranks -----------------------------------------------------------------------------------------------------------


def ranks(setting: Setting) -> Plot:
    """Return how long a flush of a thousand sites takes by the number of processes, beside the same without ranks."""
    found: dict[str, list[tuple[float, float]]] = {"over all ranks": [], "of one rank alone": []}
    for size in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--rank", folder, str(setting.rounds(20)), str(size)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(size)]
            codes = [process.wait() for process in processes]
            if any(codes):
                raise RuntimeError(f"the ranks ended with {codes}")
            samples = json.loads(Path(folder, "samples").read_text(encoding="utf-8"))
        found["over all ranks"].append((size, typical(samples, "flush") * 1e3))
        found["of one rank alone"].append((size, typical(samples, "local") * 1e3))
    cores = os.cpu_count()
    return Plot(f"a flush of {SITES:,} sites by ranks (gloo, {cores} cores)", "processes", "ms, wall clock", found)


def be_rank(folder: str, rounds: int, size: int, rank: int) -> None:
    """Flush on one rank; the first writes its samples."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    samples = interleave(flushing(), rounds)
    if rank == 0:
        Path(folder, "samples").write_text(json.dumps(samples), encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in rank_rows: torch's threads now and then abort on the way out


# -- clients ---------------------------------------------------------------------------------------------------------


def clients(setting: Setting) -> Plot:
    """Return tokens a second by the number of clients: a bare server, and one with statistics and hidden states."""
    seconds = 1.5 if setting.quick else 6.0
    rates: dict[str, dict[int, list[float]]] = {"without hooks": {}, "statistics and hidden states": {}}
    with tempfile.TemporaryDirectory() as folder:
        model, hooks = random_llama(Path(folder) / "llama"), Path(folder) / "hooks.json"
        hooks.write_text(json.dumps([STATS]), encoding="utf-8")
        bare = Server(["--model", str(model)])
        hooked = Server(["--model", str(model), "--hooks", str(hooks)])
        try:
            for count, _ in itertools.product(CLIENTS, range(3)):
                for name, server in (("without hooks", bare), ("statistics and hidden states", hooked)):
                    rate = asyncio.run(_tokens_a_second(server, count, seconds, with_states=server is hooked))
                    rates[name].setdefault(count, []).append(rate)
        finally:
            bare.stop()
            hooked.stop()
    found = {name: [(count, statistics.median(each)) for count, each in by.items()] for name, by in rates.items()}
    return Plot("tokens a second of a server by clients", "clients", "tokens a second", found)


async def _tokens_a_second(server: Server, count: int, seconds: float, *, with_states: bool) -> float:
    seen, start = Seen(), time.monotonic()

    async def ask_on(client: httpx.AsyncClient, place: int) -> None:
        chance = random.Random(place)
        while time.monotonic() < start + seconds:
            body = body_for(place, chance)
            if not with_states:
                body.pop("hooks", None)
            await ask(client, body, seen, time.perf_counter())

    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        await asyncio.gather(*[ask_on(client, place) for place in range(count)])
    return seen.tokens / (time.monotonic() - start)


PARTS: dict[str, Callable[[Setting], Plot]] = {
    "sites": sites,
    "tensors": tensors,
    "steps": steps,
    "ranks": ranks,
    "clients": clients,
}


def main() -> None:
    """Parse the options; measure, keep the numbers, write."""
    options = parse()
    if options.steps:
        print("\n" + json.dumps(hold_memory(options.steps)))
        return
    if options.rank:
        folder, rounds, size, rank = options.rank
        be_rank(folder, int(rounds), int(size), int(rank))
    if not options.draw:
        measure(options.only or list(PARTS), Setting(torch.device("cpu"), options.quick))
    if not options.quick:
        draw_all()


def measure(parts: list[str], setting: Setting) -> None:
    """Measure the parts one after the other, printing and keeping what comes."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    for name in parts:
        start = time.perf_counter()
        plot = PARTS[name](setting)
        for label, points in plot.series.items():
            print(f"{plot.title}, {label}: " + ", ".join(f"{x:g}: {y:.3g}" for x, y in points), flush=True)
        print(f"  ({name}: {time.perf_counter() - start:.0f} s)", flush=True)
        if not setting.quick:
            keep(NUMBERS, name, plot)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], choices=list(PARTS), help="one part (repeatable)")
    parser.add_argument("--quick", action="store_true", help="a tenth of it; printed, not written")
    parser.add_argument("--draw", action="store_true", help="measure nothing; write plots and tables again")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
