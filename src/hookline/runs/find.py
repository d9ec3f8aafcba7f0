"""Find the experiment that a run names, and make it: seeded, on its device, with how its loop runs.

`read` calls `find_experiment` with a name, a file or a module, and makes flags of its options; `Run` checks them.
`session`, the dry run and the audit call `make_experiment` later, and get a `RunExperiment`, whatever it was made from:
a class, a function, or a `TrainTool`. Importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import ConfigError, OptionError
from hookline.load import load_object
from hookline.messages import unknown_name_text
from hookline.runs.flags import KeyPath, declared
from hookline.runs.process import device_of, dtype_of, launched_ranks, local_device, seed_everything
from hookline.runs.run import Run, run_flags_by_name

if TYPE_CHECKING:
    from hookline.metta.train_tool import TrainTool

EMBEDDED: Final = {
    "mod_arithmetic": "hookline.training.mod_arithmetic:ModArithmetic",
    "digits": "hookline.training.digits:Digits",
}
"""The experiments that come with hookline, each one short file to read and to begin from, by name."""

_LAUNCHERS: Final = ("python", "torchrun", "accelerate", "deepspeed")
"""Programs that start scripts, also where they are not on the PATH."""
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
    """Takes a configuration and a strategy; returns an `Experiment`, an object like one, or a `TrainTool`."""
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
        if path in _LAUNCHERS or shutil.which(path):
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
    if isinstance(thing, type):
        if not any(hasattr(thing, name) for name in ("train_step", "loss_fn")):  # an Experiment has both
            raise OptionError(
                f"{path} is the class {thing.__name__}, which is no Experiment and has no train_step or loss_fn; "
                "derive it from hookline.Experiment, or name a function that makes an experiment."
            )
        return _of_class(thing, path)
    if callable(thing) and not hasattr(thing, "model"):
        return _of_function(thing, path)
    if hasattr(thing, "model") or _is_tool(thing):
        # The object exists already: every strategy would train the same one.
        return replace(_of_class(type(thing), path), make=lambda config, strategy: thing, config_class=None)
    raise OptionError(
        f"{path} is {thing!r}, and hookline run takes an Experiment (its class, a function that makes one, or one that "
        "is made), or a TrainTool."
    )


def _of_class(cls: type, path: str) -> FoundExperiment:
    return FoundExperiment(
        name=_folder_name(getattr(cls, "name", "") or cls.__name__),
        path=path,
        make=lambda config, strategy: _call(cls, config, strategy),
        loop=getattr(cls, "loop", "epoch"),
        config_class=getattr(cls, "config_class", None),
        strategies=tuple(getattr(cls, "strategies", ())),
        hook_sets=dict(getattr(cls, "hook_sets", {})),
        hook_config=dict(getattr(cls, "hook_config", {})),
        live_metrics=dict(getattr(cls, "live_metrics", {})),
    )


def _call(make: Callable[..., Any], config: Any, strategy: str) -> Any:
    """Call ``make(config, strategy)``, or with as many of the two as it takes."""
    parameters = [
        one
        for one in inspect.signature(make).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)
    ]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return make(config, strategy)
    if len(parameters) == 1 and parameters[0].name == "strategy":
        return make(strategy)
    return make(*(config, strategy)[: len(parameters)])


def _of_function(function: Callable[..., Any], path: str) -> FoundExperiment:
    """Return the experiment that a function makes: its parameters, but for ``strategy``, are its options."""
    parameters, hints = inspect.signature(function).parameters, typing.get_type_hints(function)
    name = getattr(function, "__name__", "experiment")
    fields: list[Any] = []
    for one in parameters.values():
        if one.name != "strategy" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            default = one.default
            hint = hints.get(one.name, str if default in (None, one.empty) else type(default))
            fields.append((one.name, hint) if default is one.empty else (one.name, hint, _constant(default)))

    def make(config: Any, strategy: str) -> Any:
        own = {} if config is None else vars(config)
        return function(**own, **({"strategy": strategy} if "strategy" in parameters else {}))

    config_class = dataclasses.make_dataclass(name, fields, kw_only=True) if fields else None
    return FoundExperiment(_folder_name(name), path, make, config_class=config_class)


def _constant(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value)


def _is_tool(thing: Any) -> bool:
    from hookline.metta.train_tool import TrainTool

    return isinstance(thing, TrainTool)


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.\-]+", "_", name).strip("._") or "experiment"


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
    tool: TrainTool | None = None
    """What it comes from, if it does."""

    @property
    def hooks(self) -> list[Any]:
        """Lifecycle hooks of its own."""
        return [] if self.tool is None else list(self.tool.hooks)

    @property
    def unit(self) -> str:
        """``"epochs"`` or ``"steps"``."""
        return f"{self.loop}s"

    @property
    def bare_model(self) -> Any:
        """The model without what averages gradients over ranks."""
        from hookline.training.ranks import bare_model

        return bare_model(self.experiment.model)

    @property
    def device(self) -> Any:
        """The device of the model."""
        return next((one.device for one in self.experiment.model.parameters()), "cpu")

    @property
    def dtype(self) -> Any:
        """The dtype of its first parameter."""
        return next((one.dtype for one in self.experiment.model.parameters()), None)

    @property
    def epochs_to_snapshot(self) -> int | None:
        """How many epochs from one snapshot to the next; None in the step loop."""
        if self.loop == "step":
            return None
        if self.snapshot_every is not None:
            return self.snapshot_every
        own = getattr(getattr(self.experiment, "config", None), "snapshot_every", None)
        return 1 if own is None else int(own)

    def attach_own(self) -> AbstractContextManager[None]:
        """Attach the hooks on modules that a tool has, while the block lasts."""
        if self.tool is None:
            return nullcontext()
        return self.tool.attached(policy=self.experiment.policy, trainer=self.experiment)

    def report_trackers_to(self, manager: Any) -> None:
        """Send what the trackers of a tool report to the sinks of `manager`."""
        reporter = getattr(self.experiment, "reporter", None)
        if self.tool is not None and reporter is not None:
            reporter.sinks.append(SimpleNamespace(emit=manager.emit_metrics))

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
    device, dtype = device_of(local_device(run.device)), dtype_of(run.dtype)
    if hasattr(made.experiment, "to"):
        made.experiment.to(device, dtype)
    else:
        made.experiment.model.to(device=device, dtype=dtype)
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
    config = make_config(run, found)
    made = found.make(config, strategy)
    tool = made if _is_tool(made) else None
    if tool is None and not hasattr(made, "model"):
        raise OptionError(
            f"{found.path} gave {made!r}, and hookline run takes an Experiment, something with its attributes (model, "
            "optimizer, loader, …), or a TrainTool."
        )
    experiment = made if tool is None else tool._initialize_trainer(tool._load_or_create_policy())
    loop = "step" if run.steps is not None and tool is None else str(found.loop or getattr(made, "loop", "epoch"))
    own = getattr(made, "config", None) if tool is None else tool
    places = [run, config, SimpleNamespace(**own) if isinstance(own, Mapping) else own]

    def option(name: str, places: Sequence[Any]) -> Any:
        return next((value for one in places if (value := getattr(one, name, None)) is not None), None)

    length = option(f"{loop}s", places)
    every = {name: option(name, places[:2]) for name in ("snapshot_every", "eval_every")}
    return RunExperiment(experiment, config, loop, int(_USUAL[loop] if length is None else length), **every, tool=tool)
