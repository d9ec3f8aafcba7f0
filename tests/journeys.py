"""Count how many files of hookline a datum passes on its way, and how often the way changes file.

Run ``python tests/journeys.py`` for a table; ``test_journeys.py`` compares the counts with `BOUNDS`. Calls only the
public API of hookline.

Definition. `Counter` listens to ``sys.setprofile`` in the thread of the caller. Each call of a Python function whose
code is in the package is one visit to the file of that code; generators count each time they are resumed.

- files: the number of different files visited.
- changes: the number of pairs of consecutive visits to different files. Returning to a caller is no visit, and code
  outside the package (torch, the standard library, the hook itself) is passed over.

Bodies of modules and classes are not functions and do not count. Each journey first runs once without being counted, so
that lazy imports do not count either, and then once more with a fresh model, manager and folder. All run in one process
of their own, in the order of `JOURNEYS`: a module that some other test has imported may add a file to a journey.

The option ``--cold`` counts each journey in a fresh process, with the bodies of modules: the files that it imports too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn

import hookline as hl

HOMES: Final[dict[str, str]] = {
    "CSVSink": "hookline.sinks",
    "FanOut": "hookline.sinks",
    "RecordLog": "hookline.sinks",
    "ServerArgs": "hookline.sglang",
    "ModelRunner": "hookline.sglang",
}
"""The homes of the names that a journey uses, where they are not at the top."""

__all__ = ["BOUNDS", "JOURNEYS", "Bound", "Counter", "Journey", "Passed", "count", "count_all", "make_hook"]


@dataclass(frozen=True, slots=True)
class Bound:
    """The most files and changes that a journey may take."""

    files: int
    changes: int


@dataclass(frozen=True, slots=True)
class Passed:
    """Hold the files that a journey passes, and how often it changes file."""

    files: list[str]
    changes: int


BOUNDS: Final[dict[str, Bound]] = {
    "attach": Bound(9, 42),
    "forward": Bound(6, 7),
    "watch": Bound(22, 364),
    "watch: first step": Bound(17, 203),
    "watch: read": Bound(8, 48),
    "compute to CSV": Bound(12, 27),
    "compute to CSV, next": Bound(12, 20),
    "spec to firing": Bound(16, 100),
    "spec file to firing": Bound(21, 130),
    "run": Bound(77, 1671),  # asks whether there are other ranks
}
"""The upper bounds, by journey: lower them as the package gets simpler, never raise them."""

_PACKAGE: Final = str(Path(hl.__file__).parent) + os.sep
_FEATURES: Final = 4


def api(name: str) -> Any:
    """Return the public `name` of hookline; import it only now, as a user does."""
    return getattr(importlib.import_module(HOMES.get(name, "hookline")), name)


class Counter:
    """Count the visits to files of hookline while it is entered.

    Args:
        imports: Count the bodies of modules and classes as well.
    """

    def __init__(self, *, imports: bool = False) -> None:
        self._imports = imports
        self._visits: list[str] = []
        self._previous: Any = None

    def __enter__(self) -> Counter:
        gc.collect()
        gc.disable()  # callbacks of dead objects are no part of a journey
        self._previous = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(self._previous)
        gc.enable()

    def restart(self) -> None:
        """Forget the visits made so far."""
        self._visits.clear()

    def passed(self) -> Passed:
        """Return the files visited, relative to the package, and the number of changes."""
        files = sorted({name.removeprefix(_PACKAGE) for name in self._visits})
        return Passed(files, sum(one != other for one, other in pairwise(self._visits)))

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self._counts(frame.f_code):
            self._visits.append(frame.f_code.co_filename)

    def _counts(self, code: CodeType) -> bool:
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
        return (is_function or self._imports) and code.co_filename.startswith(_PACKAGE)


@dataclass(slots=True)
class World:
    """Hold what one journey needs, made fresh for each run of it."""

    folder: Path
    model: nn.Module = field(default_factory=lambda: small_model())
    batch: Tensor = field(default_factory=lambda: torch.ones(3, _FEATURES))


Journey = Callable[[World, Counter], None]
"""Prepare, then walk the journey inside ``with counter:``."""


def small_model() -> nn.Sequential:
    """Return a model of three layers."""
    return nn.Sequential(nn.Linear(_FEATURES, 8), nn.ReLU(), nn.Linear(8, 2))


def observe_nothing(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Do nothing: the hook that journeys attach."""


def make_hook(config: dict[str, Any]) -> Callable[..., None]:
    """Return `observe_nothing`; the factory that specs name."""
    return observe_nothing


def attach_hook(world: World, counter: Counter) -> None:
    """Attach one hook to one layer of a model that has none."""
    with counter:
        handle = api("attach")(world.model, "0", observe_nothing)
    world.model(world.batch)
    handle.remove()


def hooked_forward(world: World, counter: Counter) -> None:
    """Call a model with one hook, not for the first time."""
    with api("attach")(world.model, "0", observe_nothing):
        world.model(world.batch)
        with counter:
            world.model(world.batch)


def create_watch(world: World, counter: Counter) -> None:
    """Create a watch with all defaults."""
    with counter:
        watched = api("watch")(world.model)
    train_step(world)
    watched.remove()


def first_watched_step(world: World, counter: Counter) -> None:
    """Train one step under a new watch."""
    with api("watch")(world.model), counter:
        train_step(world)


def read_watch(world: World, counter: Counter) -> None:
    """Read the metrics of a watch after one step."""
    with api("watch")(world.model) as watched:
        train_step(world)
        with counter:
            watched.to_metrics()


def train_step(world: World) -> None:
    """Run forward and backward."""
    world.model(world.batch).sum().backward()


def one_metric(counter: Counter) -> Any:
    """Return a hook with one metric that restarts `counter` as the last act of ``compute()``."""

    class OneMetric(api("TrainingHook")):  # type: ignore[misc]
        name = "journey"
        hook_points = frozenset({api("HookPoint").POST_EPOCH})

        def compute(self, ctx: Any) -> dict[str, float]:
            counter.restart()
            return {"loss": 0.5}

    return OneMetric()


def first_metric_to_csv(world: World, counter: Counter) -> None:
    """Take the first metric of a run from ``compute()`` to the disk, through a record log and a CSV sink."""
    write_metrics(world, counter, before=0)


def next_metric_to_csv(world: World, counter: Counter) -> None:
    """Take the second metric of a run from ``compute()`` to the disk."""
    write_metrics(world, counter, before=1)


def write_metrics(world: World, counter: Counter, before: int) -> None:
    """Fire a hook `before` times without being counted, then once more; check that its cell is on the disk."""
    table = world.folder / "metrics.csv"
    log = world.folder / "records.jsonl"
    with api("HookManager")(hooks=[one_metric(counter)], sinks=[api("CSVSink")(table)], log=log) as manager:
        for epoch in range(before):
            fire(manager, epoch, world.model)
        with counter:
            fire(manager, before, world.model)
        assert table.read_text().splitlines()[-1] == f"{before},POST_EPOCH,0.5"


def fire(manager: Any, epoch: int, model: nn.Module) -> None:
    """Fire the end of `epoch`."""
    manager.fire(api("HookPoint").POST_EPOCH, epoch=epoch, model=model)


def spec_text(**wrapping: object) -> str:
    """Return a list of one hook spec as JSON; with `wrapping`, the settings of a server around it."""
    specs = [{"name": "journey", "target_modules": ["0"], "hook_factory": "journeys:make_hook", "config": {"a": 1}}]
    return json.dumps({**wrapping, "hooks": specs} if wrapping else specs)


def spec_to_firing(world: World, counter: Counter) -> None:
    """Take a spec from JSON text through ``register_hooks`` to a firing."""
    text = spec_text()
    with counter:
        handles = api("register_hooks")(world.model, json.loads(text))
        world.model(world.batch)
    handles.remove()


def spec_file_to_firing(world: World, counter: Counter) -> None:
    """Take a spec from a JSON file through the settings of a server to a firing."""
    path = world.folder / "server.json"
    path.write_text(spec_text(enable_hooks=True))
    with counter:
        runner = api("ModelRunner")(world.model, api("ServerArgs").from_file(path))
        runner.initialize()
        world.model(world.batch)
    runner.close()


def run_two_epochs(world: World, counter: Counter) -> None:
    """Run ``hookline run`` with its embedded experiment and its smallest group of hooks."""
    with in_folder(world.folder), contextlib.redirect_stdout(io.StringIO()), counter:
        command_line("run", "mod_arithmetic", "--epochs", "2", "--with-hooks", "minimal")


def command_line(*words: str) -> None:
    """Run the command line of hookline in this process."""
    kept = sys.argv
    sys.argv = ["hookline", *words]
    try:
        runpy.run_module("hookline", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"hookline {' '.join(words)} ended with {end.code}") from end
    finally:
        sys.argv = kept


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Work in `folder`; leave the random streams and the settings of torch as they were."""
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
    "watch: read": read_watch,
    "compute to CSV": first_metric_to_csv,
    "compute to CSV, next": next_metric_to_csv,
    "spec to firing": spec_to_firing,
    "spec file to firing": spec_file_to_firing,
    "run": run_two_epochs,
}
"""The journeys by name, in the order of the table."""


def count(name: str) -> Passed:
    """Walk the journey `name` twice; return what it passes the second time."""
    walk(name, Counter())
    return walk(name, Counter())


def walk(name: str, counter: Counter) -> Passed:
    """Walk the journey `name` once in a fresh world; return what it passes."""
    with tempfile.TemporaryDirectory() as folder:
        JOURNEYS[name](World(Path(folder)), counter)
    return counter.passed()


def count_all() -> dict[str, Passed]:
    """Return what every journey passes, counted in a process of its own."""
    lines = fresh_process("--json").splitlines()
    return {name: Passed(**passed) for name, passed in json.loads(lines[-1]).items()}


def fresh_process(*words: str) -> str:
    """Run this file with `words` in a process of its own; return what it prints."""
    command = [sys.executable, "-W", "ignore", __file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def row(name: str, passed: Passed) -> str:
    """Return the line of the table for the journey `name`."""
    bound = BOUNDS[name]
    return f"{name:22} {len(passed.files):5} {passed.changes:8}   {bound.files:5} {bound.changes:8}"


def main() -> None:
    """Print the counts of the journeys named on the command line, or of all of them."""
    parser = argparse.ArgumentParser(description="Count how many files of hookline a datum passes.")
    parser.add_argument("names", nargs="*", metavar="JOURNEY", help=f"any of: {', '.join(JOURNEYS)}")
    parser.add_argument("--cold", action="store_true", help="count each in a fresh process, imports included")
    parser.add_argument("--files", action="store_true", help="list the files as well")
    parser.add_argument("--json", action="store_true", help="print all of it as one line of JSON")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(JOURNEYS)):
        parser.error(f"no journey is called {', '.join(unknown)}; there are: {', '.join(JOURNEYS)}")
    names = options.names or list(JOURNEYS)
    if options.json:
        print(json.dumps({name: asdict(measure(name, options.cold)) for name in names}))
    else:
        print_table(names, cold=options.cold, files=options.files)


def measure(name: str, cold: bool) -> Passed:
    """Return what the journey `name` passes in this process: the second time, or, if `cold`, the first."""
    return walk(name, Counter(imports=True)) if cold else count(name)


def print_table(names: list[str], *, cold: bool, files: bool) -> None:
    """Print a line for each of `names`; if `files`, the files it passes below."""
    print(f"{'journey':22} files  changes   bounds: files, changes")
    for name in names:
        passed = count_cold(name) if cold else count(name)
        print(row(name, passed), flush=True)
        if files:
            print(*(f"    {path}" for path in passed.files), sep="\n")


def count_cold(name: str) -> Passed:
    """Return what the journey `name` passes in a fresh process, imports included."""
    printed = json.loads(fresh_process("--json", "--cold", name).splitlines()[-1])
    return Passed(**printed[name])


if __name__ == "__main__":
    main()
