"""Find the experiment that a run names, and make it: seeded, on its device, with how its loop runs; set up its process.

`read` calls `find_experiment` with a name, a file or a module, and makes flags of its options; `Run` checks them.
`session`, the dry run and the audit call `make_experiment` later, and get a `RunExperiment`, whatever it was made from:
a class, or a function. Seeds, determinism, precision, device and ranks hold for the whole process;
`process_settings` restores them. Importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import random
import re
import shutil
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from hookline.errors import ConfigError, OptionError
from hookline.load import load_object
from hookline.messages import unknown_name_text
from hookline.runs.flags import KeyPath, declared
from hookline.runs.run import Run, run_flags_by_name

EMBEDDED: Final = {"mod_arithmetic": "hookline.training.mod_arithmetic:ModArithmetic"}
"""The experiment that comes with hookline, one short file to read and to begin from, by its name."""

_USUAL: Final = {"epoch": 10, "step": 1000}
"""How long to train if nothing says it."""
_SEEDS_APART: Final = 1_000_003
"""What the seeds of two ranks differ by; a prime that is no usual distance of the seeds of two runs."""


@dataclass(frozen=True)
class FoundExperiment:
    """Hold what is known of an experiment before it is made, and how to make it."""

    name: str
    """Name of its run folder."""
    path: str
    """What the user wrote."""
    make: Callable[[Any, str], Any]
    """Takes a configuration and a strategy; returns an `Experiment`."""
    loop: str | None = None
    """``"epoch"`` or ``"step"``; None if only the experiment itself knows."""
    config_class: type | None = None
    strategies: Sequence[str] = ()
    hook_sets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    hook_config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    live_metrics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def chosen(self, strategy: str | None) -> list[str]:
        """Return the strategies to run, one after the other."""
        known = list(self.strategies) or ["default"]
        if strategy is None:
            return known[:1]
        if strategy == "all":
            return known
        if strategy not in known:
            raise OptionError(
                f"{self.name} has no strategy {strategy!r}.{unknown_name_text(strategy, [*known, 'all'])}"
            )
        return [strategy]

    @property
    def options(self) -> dict[str, dataclasses.Field[Any]]:
        """The fields of its configuration, by name."""
        if self.config_class is None:
            return {}
        if not dataclasses.is_dataclass(self.config_class):
            raise OptionError(f"config_class is a dataclass, whose fields become flags; got {self.config_class!r}.")
        return {one.name: one for one in dataclasses.fields(self.config_class) if one.init}

    @property
    def shared(self) -> dict[str, KeyPath]:
        """The fields that are flags of hookline too (``seed``), with where a run has their value."""
        own = self.options
        return {name: one.path for name, one in run_flags_by_name().items() if name in own}

    def option(self, name: str, value: Any) -> Any:
        """Return the value of an option as it is declared; raise if there is none of that name."""
        if self.config_class is None:
            raise ConfigError(f"{self.name} takes no options of its own.")
        if name not in self.options:
            known = unknown_name_text(name, list(self.options))
            raise ConfigError(f"{self.config_class.__qualname__} has no {name!r}.{known}")
        return declared(value, typing.get_type_hints(self.config_class, include_extras=True)[name])


# -- finding ---------------------------------------------------------------------------------------------------


def find_experiment(path: str) -> FoundExperiment:
    """Return the experiment of a name, in a file or a module. Imports it, and torch with it."""
    if path in EMBEDDED:
        return replace(_found(load_object(EMBEDDED[path], wanted="an experiment"), path), name=path)
    if ":" not in path and "." not in path and "/" not in path:
        if shutil.which(path):
            raise OptionError(f"{path} is a program, which stands behind --: hookline run -- {path} train.py.")
        raise OptionError(
            f"Unknown experiment {path!r}.{unknown_name_text(path, list(EMBEDDED))} One of your own: "
            "path/file.py:Class. EXPERIMENT comes before its flags."
        )
    if path.endswith(".py") and Path(path).is_file() and not _EXPERIMENT.search(Path(path).read_bytes()):
        raise OptionError(
            f"{path} defines no Experiment. Next, for a script: hookline run -- python {path}; for something "
            f"else in it: {path}:NAME."
        )
    return _found(load_object(path, wanted="an experiment", pick=_experiments_of), path)


_DECLARED: Final = ("loop", "config_class", "strategies", "hook_sets", "hook_config", "live_metrics")
"""What the class of an experiment may say of it."""
_EXPERIMENT: Final = re.compile(rb"^\s*class \w+\([^)]*Experiment", re.MULTILINE)
"""Finds an experiment in the text of a file: a script would train when it is imported."""


def _experiments_of(module: Any) -> list[str]:
    from hookline.training.experiment import Experiment

    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Experiment) and value.__module__ == module.__name__
    ]


def _found(thing: Any, path: str) -> FoundExperiment:
    from hookline.training.experiment import Experiment

    if not callable(thing):  # one that exists already would be no run of the seed, the same for every strategy
        raise OptionError(
            f"{path} is {thing!r}, and hookline run takes an Experiment: its class, or a function that makes one."
        )
    if isinstance(thing, type) and not issubclass(thing, Experiment):
        raise OptionError(
            f"{path} is the class {thing.__name__}, which is no Experiment: derive it from hookline.Experiment, or "
            "name a function that makes one."
        )
    name = getattr(thing, "name", "") or getattr(thing, "__name__", "")
    declared = {key: getattr(thing, key) for key in _DECLARED if hasattr(thing, key)}
    return FoundExperiment(
        name=re.sub(r"[^\w.\-]+", "_", name).strip("._") or "experiment",
        path=path,
        make=lambda config, strategy: _call(thing, config, strategy),
        **declared,
    )


def _call(make: Callable[..., Any], config: Any, strategy: str) -> Any:
    """Call a class with as many of the two as it takes; a function without arguments, or with the ``strategy``."""
    parameters = inspect.signature(make).parameters
    if not isinstance(make, type):
        return make(strategy=strategy) if "strategy" in parameters else make()
    by_place = [one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return make(*(config, strategy)[: len(by_place)])


# -- making ----------------------------------------------------------------------------------------------------


@dataclass
class RunExperiment:
    """Hold an experiment and how its loop runs."""

    experiment: Any
    config: Any
    """Its configuration; None if it has none."""
    loop: str
    """``"epoch"`` or ``"step"``."""
    length: int
    """How many of them."""
    snapshot_every: int | None
    eval_every: int | None

    @property
    def unit(self) -> str:
        """``"epochs"`` or ``"steps"``."""
        return f"{self.loop}s"

    @property
    def epochs_to_snapshot(self) -> int | None:
        """How many epochs from one snapshot to the next; None in the step loop."""
        from hookline.training.loops import distance_of_snapshots

        return None if self.loop == "step" else distance_of_snapshots(self.experiment, self.snapshot_every, "epoch")

    def train(self, manager: Any, context: Mapping[str, Any], **options: Any) -> Any:
        """Run the loop, and return its result; `context` is what hooks and sinks are told of the run."""
        from hookline.training.loops import epoch_loop, step_loop

        options |= {"manager": manager, "run_context": context, "snapshot_every": self.snapshot_every}
        if self.loop == "step":
            return step_loop(self.experiment, steps=self.length, **options)
        options |= {} if self.eval_every is None else {"eval_every": self.eval_every}
        return epoch_loop(self.experiment, epochs=self.length, **options)


def make_config(run: Run, found: FoundExperiment) -> Any:
    """Return the experiment's configuration, None if it has none; a flag of hookline counts for a field of its name."""
    if found.config_class is None:
        return None
    values = dict(run.config)
    for name, path in found.shared.items():
        value: Any = run
        for key in path:
            value = getattr(value, str(key))
        if value is not None:
            values[name] = value
    needed = [name for name, one in found.options.items() if one.default is one.default_factory]  # both MISSING
    if missing := [f"--{name.replace('_', '-')}" for name in needed if name not in values]:
        raise OptionError(f"{found.name} needs {', '.join(missing)}; or under config, in a run file.")
    return found.config_class(**values)


def make_experiment(run: Run, found: FoundExperiment, strategy: str) -> RunExperiment:
    """Return the experiment of a strategy, seeded, on its device, with its share of the data."""
    seed_everything(run.seed)
    made = _make(run, found, strategy)
    made.experiment.to(device_of(local_device(run.device)))
    if run.with_compile:
        made.experiment.model.compile()
    rank, ranks = launched_ranks()
    if ranks > 1:
        from hookline.training.ranks import share_experiment

        share_experiment(made.experiment, rank=rank, ranks=ranks, seed=run.seed)
        if rank > 0:  # the ranks began alike, so that they have the same data; they drop out different units
            seed_everything(run.seed + _SEEDS_APART * rank)
    return made


def _make(run: Run, found: FoundExperiment, strategy: str) -> RunExperiment:
    from hookline.training.experiment import Experiment

    config = make_config(run, found)
    made = found.make(config, strategy)
    if not isinstance(made, Experiment):
        raise OptionError(f"{found.path} gave {made!r}, and hookline run takes an Experiment.")
    loop = "step" if run.steps is not None else str(found.loop or made.loop)
    places = [run, config, SimpleNamespace(**made.config) if isinstance(made.config, Mapping) else made.config]

    def option(name: str, places: Sequence[Any]) -> Any:
        return next((value for one in places if (value := getattr(one, name, None)) is not None), None)

    length = option(f"{loop}s", places)
    every = {name: option(name, places[:2]) for name in ("snapshot_every", "eval_every")}
    return RunExperiment(made, config, loop, int(_USUAL[loop] if length is None else length), **every)


# -- what holds for the whole process --------------------------------------------------------------------------

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_T = TypeVar("_T")


def seed_everything(seed: int) -> None:
    """Seed the random streams of torch, NumPy and Python."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of every device


@contextmanager
def process_settings(*, deterministic: bool, matmul_precision: str | None) -> Iterator[None]:
    """Make torch take deterministic kernels where it has any, and multiply float32 as exactly as asked.

    Costs nothing on the CPU; on a GPU some kernels are slower, and an operation without such a kernel warns and runs.
    """
    import torch

    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    kernels = cudnn.deterministic, cudnn.benchmark
    fills = memory.fill_uninitialized_memory
    precision = matmul_precision and torch.get_float32_matmul_precision()
    try:
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
            torch.use_deterministic_algorithms(True, warn_only=True)
            cudnn.deterministic, cudnn.benchmark = True, False
            memory.fill_uninitialized_memory = False  # it would write every new tensor twice
        if matmul_precision is not None:
            torch.set_float32_matmul_precision(matmul_precision)
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = kernels
        memory.fill_uninitialized_memory = fills
        if precision is not None:
            torch.set_float32_matmul_precision(precision)


def device_of(name: str | None) -> Any:
    """Return the device of that name; without one the GPU if there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        said = str(error).strip().partition("\n")[0].rstrip(".")
        raise OptionError(f"{name}: there is no such device here ({said}). cpu is always there.") from None
    return device


# -- several processes, started by torchrun ---------------------------------------------------------------------


def launched_ranks() -> tuple[int, int]:
    """Return the rank of this process and how many there are, as torchrun says; ``(0, 1)`` without it."""
    values = [os.environ.get(name, "") for name in _VARIABLES]
    if not all(values) or not values[0].isdecimal() or not values[1].isdecimal():
        return 0, 1
    return int(values[0]), int(values[1])


def is_first_rank() -> bool:
    """Return whether this process is the one that prints and writes."""
    return launched_ranks()[0] == 0


def rank_prefix() -> str:
    """Return what lines of this process begin with, where another one prints for all."""
    return "hookline: " if is_first_rank() else f"hookline (rank {launched_ranks()[0]}): "


def local_device(name: str | None) -> str | None:
    """Return the device for this process: with several on a machine each takes the GPU of its number there."""
    import torch

    if launched_ranks()[1] == 1 or name not in (None, "cuda") or not torch.cuda.is_available():
        return name
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise OptionError(
            f"Process {local} of this machine has no GPU of its own: there are {count}. Next: "
            f"torchrun --nproc-per-node {count}, or --device cpu."
        )
    return f"cuda:{local}"


@contextmanager
def rank_group(device: Any) -> Iterator[None]:
    """Join the process group of all ranks while the block lasts: NCCL for a GPU, gloo for the CPU.

    One that is there already is used, and stays.
    """
    import torch
    from torch import distributed

    if launched_ranks()[1] == 1 or distributed.is_initialized():
        yield
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def from_rank_zero(make: Callable[[], _T], what: str) -> _T:
    """Return what `make` returns on rank 0, on every rank; raise its error on every rank."""
    if launched_ranks()[1] == 1:
        return make()
    from hookline.distributed.ranks import gather_objects, this_rank

    found: tuple[Any, Exception | None] = (None, None)
    if this_rank() == 0:
        try:
            found = (make(), None)
        except Exception as error:
            found = (None, error)
    value, raised = gather_objects(found, what=what)[0]
    if raised is not None:
        raise raised
    return value  # type: ignore[no-any-return]
