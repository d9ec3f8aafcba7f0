"""Make the experiment of a run, seeded and on its device, and run its loop.

`session`, the dry run and the audit call `make_experiment` and get a `RunExperiment`, whatever it was made from: a
class, a function, or a `TrainTool`. It calls the loops of `training`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import OptionError
from hookline.metta.train_tool import TrainTool
from hookline.runs.flags import run_flags_by_name
from hookline.runs.process import device_of, dtype_of, launched_ranks, local_device, seed_everything

if TYPE_CHECKING:
    from hookline.runs.build import Built
    from hookline.runs.find import FoundExperiment
    from hookline.runs.run import Run

__all__ = ["RunExperiment", "make_config", "make_experiment"]

_EPOCHS: Final = 10
_STEPS: Final = 1000
"""How long to train if nothing says it."""
_SEEDS_APART: Final = 1_000_003
"""What the seeds of two ranks differ by; a prime that is no usual distance of the seeds of two runs."""


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
    hooks: list[Any] = field(default_factory=list)
    """Lifecycle hooks of its own."""

    @property
    def unit(self) -> str:
        """``"epochs"`` or ``"steps"``."""
        return f"{self.loop}s"

    @property
    def bare_model(self) -> Any:
        """The model without what averages gradients over ranks."""
        model = self.experiment.model
        if launched_ranks()[1] == 1:
            return model
        from hookline.training.ranks import bare_model

        return bare_model(model)

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

    @contextmanager
    def attached(self, built: Built) -> Iterator[None]:
        """Attach the hooks on modules of a run, and those of the tool, while the block lasts."""
        tool: AbstractContextManager[None] = nullcontext()
        if self.tool is not None:
            tool = self.tool.attached(policy=self.experiment.policy, trainer=self.experiment)
        with tool, built.attached(self.experiment.model):
            yield

    def report_trackers_to(self, manager: Any) -> None:
        """Send what the trackers of a tool report to the sinks of `manager`."""
        reporter = getattr(self.experiment, "reporter", None)
        if self.tool is not None and reporter is not None:
            reporter.sinks.append(_ToManager(manager))

    def train(self, manager: Any, context: Mapping[str, Any], checkpoints: Any = None, **options: Any) -> Any:
        """Run the loop, and return its result; `options` are ``resume`` and ``progress``."""
        options |= {
            "manager": manager,
            "snapshot_every": self.snapshot_every,
            "run_context": context if manager is not None else None,
            "checkpoints": checkpoints,
        }
        if self.loop == "step":
            from hookline.training.loops import step_loop

            return step_loop(self.experiment, steps=self.length, **options)
        from hookline.training.loops import epoch_loop

        if self.eval_every is not None:
            options["eval_every"] = self.eval_every
        return epoch_loop(self.experiment, epochs=self.length, **options)


class _ToManager:
    """Send what a tool's trackers report to a manager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Send it."""
        self._manager.emit_metrics(metrics, epoch, hook_point)


def make_config(run: Run, found: FoundExperiment) -> Any:
    """Return the experiment's configuration; a field that is a flag of hookline too has its value (``seed``)."""
    shared = {}
    for name in set(found.options) & set(run_flags_by_name()):
        value: Any = run
        for key in run_flags_by_name()[name].path:
            value = getattr(value, str(key))
        if value is not None:
            shared[name] = value
    return found.make_config(run.config | shared)


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

    def option(name: str) -> Any:
        given = getattr(run, name)
        return getattr(config, name, None) if given is None else given

    every = {"snapshot_every": option("snapshot_every"), "eval_every": option("eval_every")}
    if isinstance(made, TrainTool):
        trainer = made._initialize_trainer(made._load_or_create_policy())
        length = option("epochs")
        epochs = made.epochs if length is None else length
        return RunExperiment(trainer, config, "epoch", epochs, **every, tool=made, hooks=list(made.hooks))
    if not hasattr(made, "model"):
        raise OptionError(
            f"{found.path} gave {made!r}, and hookline run takes an Experiment, something with its attributes (model, "
            "optimizer, loader, …), or a TrainTool."
        )
    loop = "step" if run.steps is not None else str(found.loop or getattr(made, "loop", "epoch"))
    length = option(f"{loop}s")
    if length is None:
        own = getattr(made, "config", None)
        length = own.get(f"{loop}s") if isinstance(own, Mapping) else getattr(own, f"{loop}s", None)
    usual = _EPOCHS if loop == "epoch" else _STEPS
    return RunExperiment(made, config, loop, int(usual if length is None else length), **every)
