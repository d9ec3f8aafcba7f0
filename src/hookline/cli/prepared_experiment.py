"""Make the experiment of a run, and run its loop.

`run_session` calls `make_experiment` with a `Request` and gets a `PreparedExperiment`, whatever it was made from: a
class, a function, or a `TrainTool`. It calls the loops of `training`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from hookline.cli.process_settings import launched_ranks
from hookline.cli.run_request import Request
from hookline.errors import OptionError

__all__ = ["PreparedExperiment", "make_experiment"]

_EPOCHS: Final = 10
_STEPS: Final = 1000
"""How long to train if nothing says it."""


@dataclass
class PreparedExperiment:
    """Hold an experiment and how its loop runs."""

    experiment: Any
    loop: str
    """``"epoch"`` or ``"step"``."""
    length: int
    """How many of them."""
    snapshot_every: int | None
    eval_every: int | None
    tool: Any = None
    """The `TrainTool` it comes from, if it does."""
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

    def move(self, device: Any, dtype: Any) -> None:
        """Move the model to a device, before training begins."""
        if hasattr(self.experiment, "to"):
            self.experiment.to(device, dtype)
        else:
            self.experiment.model.to(device=device, dtype=dtype)

    @contextmanager
    def hooks_on_modules(self, specs: list[dict[str, Any]]) -> Iterator[None]:
        """Attach the hooks of `specs`, and those of the tool, while the block lasts."""
        with self._tool_attached():
            if not specs:
                yield
                return
            from hookline.specs.apply_specs import close_hooks, hooks_of, register_hooks

            handles = register_hooks(self.experiment.model, specs)
            try:
                yield
            finally:
                handles.remove()
                close_hooks(hooks_of(handles))

    def _tool_attached(self) -> AbstractContextManager[None]:
        if self.tool is None:
            return nullcontext()
        attached: AbstractContextManager[None] = self.tool.attached(
            policy=self.experiment.policy, trainer=self.experiment
        )
        return attached

    def report_trackers_to(self, manager: Any) -> None:
        """Send what the trackers of a tool report to the sinks of `manager`."""
        reporter = getattr(self.experiment, "reporter", None)
        if self.tool is not None and reporter is not None:
            reporter.sinks.append(_ToManager(manager))

    def train(self, manager: Any, context: Mapping[str, Any], checkpoints: Any, *, resume: bool) -> Any:
        """Run the loop, and return its result."""
        options: dict[str, Any] = {
            "manager": manager,
            "snapshot_every": self.snapshot_every,
            "run_context": context if manager is not None else None,
            "checkpoints": checkpoints,
            "resume": resume,
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


def make_experiment(request: Request, strategy: str) -> PreparedExperiment:
    """Make the experiment of a strategy."""
    from hookline.metta.train_tool import TrainTool

    made = request.found.make(request.config, strategy)
    if isinstance(made, TrainTool):
        return _of_tool(made, request)
    if not hasattr(made, "model"):
        raise OptionError(
            f"{request.found.path} gave {made!r}, and hookline run takes an Experiment, something with its attributes "
            "(model, optimizer, loader, …), or a TrainTool."
        )
    loop = _loop(made, request)
    length = _length(request, loop, made)
    every, evaluated = _value_of(request, "snapshot_every"), _value_of(request, "eval_every")
    _check_lengths(**{f"{loop}s": length}, snapshot_every=every)
    return PreparedExperiment(made, loop, length, every, evaluated)


def _of_tool(tool: Any, request: Request) -> PreparedExperiment:
    policy = tool._load_or_create_policy()
    trainer = tool._initialize_trainer(policy)
    length = _value_of(request, "epochs")
    every, evaluated = _value_of(request, "snapshot_every"), _value_of(request, "eval_every")
    _check_lengths(epochs=length, snapshot_every=every)
    return PreparedExperiment(
        trainer, "epoch", tool.epochs if length is None else length, every, evaluated, tool, list(tool.hooks)
    )


def _check_lengths(**lengths: Any) -> None:
    """Raise for a negative length, before there is a folder."""
    for name, value in lengths.items():
        if isinstance(value, int) and value < 0:
            raise OptionError(f"--{name.replace('_', '-')} takes a number of at least 0, got {value}.")


def _loop(made: Any, request: Request) -> str:
    if request.loop.get("steps") is not None:
        return "step"
    return str(request.found.loop or getattr(made, "loop", "epoch"))


def _length(request: Request, loop: str, made: Any) -> int:
    length = _value_of(request, f"{loop}s")
    if length is None:
        own = getattr(made, "config", None)
        length = own.get(f"{loop}s") if isinstance(own, Mapping) else getattr(own, f"{loop}s", None)
    return int((_EPOCHS if loop == "epoch" else _STEPS) if length is None else length)


def _value_of(request: Request, name: str) -> Any:
    """Return an option of the loop: of a flag, or of the configuration."""
    value = request.loop.get(name)
    return getattr(request.config, name, None) if value is None else value
