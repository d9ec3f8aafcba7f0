"""Count how many files of hookline a datum passes on its way, and how often the way changes file.

    python benchmarks/journeys.py                       # all journeys
    python benchmarks/journeys.py "compute to CSV" run --files

Definition. `Counter` listens to ``sys.setprofile`` in the thread of the caller, and in those that `completion` starts,
the engine's among them, so that its changes vary a little. Each call of a Python function whose
code is in the package is one visit to the file of that code; generators count each time they are resumed.

- files: the number of different files visited.
- changes: the number of pairs of consecutive visits to different files. Returning to a caller is no visit, and code
  outside the package (torch, the standard library, the hook itself) is passed over.
- calls: the number of visits.

Bodies of modules and classes are not functions and do not count. Each journey first runs once without being counted, so
that lazy imports do not count either, and then once more with a fresh model, manager and folder. Journeys begin at
public names and the command line only, so that two versions of the package can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import inspect
import io
import json
import os
import runpy
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

import hookline as hl
import hookline.sglang
import hookline.sinks

__all__ = ["GOALS", "JOURNEYS", "Counter", "make_hook"]

GOALS: Final[dict[str, tuple[int, int]]] = {
    "attach": (8, 16),
    "watch: steady step": (9, 60),
    "compute to CSV": (7, 12),
    "run": (45, 900),
    "run file": (45, 900),
}
"""The most files and changes that a journey should take, where there is a goal."""

_PACKAGE: Final = str(Path(hl.__file__).parent) + os.sep
_FEATURES: Final = 4
_RUN_FILE: Final = "experiment: mod_arithmetic\nconfig: {epochs: 2}\nhooks: {with_hooks: minimal}\n"


class Counter:
    """Count the visits to files of hookline while it is entered."""

    def __init__(self) -> None:
        self.visits: list[str] = []
        self._is_on = False

    def __enter__(self) -> Counter:
        gc.collect()
        gc.disable()  # callbacks of dead objects are no part of a journey
        self._is_on = True
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._is_on = False
        gc.enable()

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Count a call while entered, in whichever thread listens."""
        code = frame.f_code
        if (
            self._is_on
            and event == "call"
            and code.co_flags & inspect.CO_OPTIMIZED
            and code.co_filename.startswith(_PACKAGE)
        ):
            self.visits.append(code.co_filename.removeprefix(_PACKAGE))


@dataclass(slots=True)
class World:
    """Hold what one journey needs, made fresh for each run of it."""

    folder: Path
    model: nn.Module = field(default_factory=lambda: nn.Sequential(nn.Linear(_FEATURES, 8), nn.ReLU(), nn.Linear(8, 2)))
    batch: Tensor = field(default_factory=lambda: torch.ones(3, _FEATURES))

    def train_step(self) -> None:
        """Run forward and backward."""
        self.model(self.batch).sum().backward()


Journey = Callable[[World, Counter], None]
"""Prepare, then walk the journey inside ``with counter:``."""


def observe_nothing(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Do nothing: the hook that journeys attach."""


def make_hook(config: dict[str, Any]) -> Callable[..., None]:
    """Return `observe_nothing`; the factory that specs name."""
    return observe_nothing


def attach_hook(world: World, counter: Counter) -> None:
    """Attach one hook to one layer of a model that has none."""
    with counter:
        handle = hl.attach(world.model, "0", observe_nothing)
    world.model(world.batch)
    handle.remove()


def hooked_forward(world: World, counter: Counter) -> None:
    """Call a model with one hook, not for the first time."""
    with hl.attach(world.model, "0", observe_nothing):
        world.model(world.batch)
        with counter:
            world.model(world.batch)


def create_watch(world: World, counter: Counter) -> None:
    """Create a watch with all defaults."""
    with counter:
        watched = hl.watch(world.model)
    world.train_step()
    watched.remove()


def first_watched_step(world: World, counter: Counter) -> None:
    """Train one step under a new watch."""
    with hl.watch(world.model), counter:
        world.train_step()


def steady_watched_step(world: World, counter: Counter) -> None:
    """Train one step under a watch that has seen three."""
    with hl.watch(world.model):
        for _ in range(3):
            world.train_step()
        with counter:
            world.train_step()


def read_watch(world: World, counter: Counter) -> None:
    """Read the metrics of a watch after one step."""
    with hl.watch(world.model) as watched:
        world.train_step()
        with counter:
            watched.to_metrics()


def write_metric(world: World, counter: Counter, before: int) -> None:
    """Take one metric from ``compute()`` to the disk, through a record log and a CSV sink.

    Fire the hook `before` times without being counted, then once more; check that its cell is on the disk.
    """

    class OneMetric(hl.TrainingHook):
        name = "journey"
        hook_points = frozenset({hl.HookPoint.POST_EPOCH})

        def compute(self, ctx: hl.RunDataContext) -> dict[str, float]:
            counter.visits.clear()  # as the last act of compute
            return {"loss": 0.5}

    table = world.folder / "metrics.csv"
    log = world.folder / "records.jsonl"
    with hl.HookManager(hooks=[OneMetric()], sinks=[hl.sinks.CSVSink(table)], log=log) as manager:
        for epoch in range(before):
            manager.fire(hl.HookPoint.POST_EPOCH, epoch=epoch, model=world.model)
        with counter:
            manager.fire(hl.HookPoint.POST_EPOCH, epoch=before, model=world.model)
        assert table.read_text().splitlines()[-1] == f"{before},POST_EPOCH,0.5"


def spec_text(**wrapping: object) -> str:
    """Return a list of one hook spec as JSON; with `wrapping`, the settings of a server around it."""
    specs = [{"name": "journey", "target_modules": ["0"], "hook_factory": "journeys:make_hook", "config": {"a": 1}}]
    return json.dumps({**wrapping, "hooks": specs} if wrapping else specs)


def spec_to_firing(world: World, counter: Counter) -> None:
    """Take a spec from JSON text through ``register_hooks`` to a firing."""
    text = spec_text()
    with counter:
        handles = hl.register_hooks(world.model, json.loads(text))
        world.model(world.batch)
    handles.remove()


def spec_file_to_firing(world: World, counter: Counter) -> None:
    """Take a spec from a JSON file through the settings of a server to a firing."""
    path = world.folder / "server.json"
    path.write_text(spec_text(enable_hooks=True))
    with counter:
        runner = hl.sglang.ModelRunner(world.model, hl.sglang.ServerArgs.from_file(path))
        runner.initialize()
        world.model(world.batch)
    runner.close()


def completion(world: World, counter: Counter) -> None:
    """Answer a completion with hidden states of two layers, by the app of our server, not for the first time."""
    import httpx
    from transformers import LlamaConfig, LlamaForCausalLM

    from hookline.serve import Engine, make_app

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "hooks": {"hidden_states": {"layers": ["model.layers.#"]}}}
    engine = Engine(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval())

    async def ask() -> None:
        transport = httpx.ASGITransport(app=make_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            (await client.post("/v1/completions", json=body)).raise_for_status()
            with counter:
                (await client.post("/v1/completions", json=body)).raise_for_status()

    threading.setprofile(counter.note)
    try:
        engine.start()
        asyncio.run(ask())
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        engine.close()


def run_flags(world: World, counter: Counter) -> None:
    """Run two epochs of the embedded experiment with its smallest group of hooks, by flags."""
    command_line(world, counter, "run", "mod_arithmetic", "--epochs", "2", "--with-hooks", "minimal")


def run_file(world: World, counter: Counter) -> None:
    """Run the same by a run file."""
    (world.folder / "run.yaml").write_text(_RUN_FILE)
    command_line(world, counter, "run", "run.yaml")


def command_line(world: World, counter: Counter, *words: str) -> None:
    """Run the command line of hookline in this process, in the folder of `world`."""
    sys.argv = ["hookline", *words]
    with kept_process(world.folder), contextlib.redirect_stdout(io.StringIO()), counter:
        try:
            runpy.run_module("hookline", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"hookline {' '.join(words)} ended with {end.code}") from end


@contextlib.contextmanager
def kept_process(folder: Path) -> Iterator[None]:
    """Work in `folder`; leave the random streams, the settings of torch and the environment as they were."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    environment = dict(os.environ)
    with contextlib.chdir(folder), torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            os.environ.clear()
            os.environ.update(environment)


JOURNEYS: Final[dict[str, Journey]] = {
    "attach": attach_hook,
    "forward": hooked_forward,
    "watch": create_watch,
    "watch: first step": first_watched_step,
    "watch: steady step": steady_watched_step,
    "watch: read": read_watch,
    "compute to CSV": lambda world, counter: write_metric(world, counter, before=0),
    "compute to CSV, next": lambda world, counter: write_metric(world, counter, before=1),
    "spec to firing": spec_to_firing,
    "spec file to firing": spec_file_to_firing,
    "completion": completion,
    "run": run_flags,
    "run file": run_file,
}
"""The journeys by name, in the order of the table."""


def walk(name: str) -> list[str]:
    """Walk the journey `name` once in a fresh world; return the files visited, one by one."""
    counter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        JOURNEYS[name](World(Path(folder)), counter)
    return counter.visits


def main() -> None:
    """Print the counts of the journeys named on the command line, or of all of them."""
    parser = argparse.ArgumentParser(description="Count how many files of hookline a datum passes.")
    parser.add_argument("names", nargs="*", metavar="JOURNEY", help=f"any of: {', '.join(JOURNEYS)}")
    parser.add_argument("--files", action="store_true", help="list the files as well")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(JOURNEYS)):
        parser.error(f"no journey is called {', '.join(unknown)}; there are: {', '.join(JOURNEYS)}")
    warnings.simplefilter("ignore")
    print(f"{'journey':22} files  changes   calls   goal: files, changes")
    for name in options.names or JOURNEYS:
        walk(name)
        visits = walk(name)
        changes = sum(one != other for one, other in pairwise(visits))
        goal = "{:8} {:8}".format(*GOALS[name]) if name in GOALS else ""
        print(f"{name:22} {len(set(visits)):5} {changes:8} {len(visits):7} {goal}", flush=True)
        if options.files:
            print(*(f"    {path}" for path in sorted(set(visits))), sep="\n")


if __name__ == "__main__":
    main()
