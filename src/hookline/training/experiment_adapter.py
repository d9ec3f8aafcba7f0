"""Give the loops one spelling of an experiment, whatever kind of object it is.

The loops and checkpoints read the experiment through it: an `Experiment`, or any object with some of its attributes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from hookline.errors import OptionError
from hookline.guard.loaders import call_loader_factory, copy_loader, samplers_of
from hookline.guard.rng import RandomStates
from hookline.messages import type_name
from hookline.phases import in_phase
from hookline.training.experiment import Experiment
from hookline.training.rank_model import RankModel, bare_model
from hookline.training.step import (
    Grouped,
    MicroBatches,
    StepResult,
    as_result,
    optimizer_step,
    usual_loss,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["ExperimentAdapter", "whole_number"]

_DEFAULTS: Final = {
    "optimizer": None,
    "loader": None,
    "scheduler": None,
    "scheduler_per": None,
    "scaler": None,
    "accumulate": 1,
    "clip_norm": None,
    "config": None,
}


class ExperimentAdapter:
    """Read attributes and call methods of an experiment, with the defaults of `Experiment`.

    Attributes are read anew each time: an experiment may change its optimizer on the way.
    """

    def __init__(self, experiment: Any, loop: str) -> None:
        if not isinstance(getattr(experiment, "model", None), nn.Module):
            raise OptionError(
                f"{loop}_loop() takes an Experiment, or an object that has a model as one; got {type_name(experiment)} "
                "without one."
            )
        self.experiment = experiment
        self.current_loader: Any = self.loader
        """Of this pass over the data."""
        self.loop = loop
        """Which counts: "epoch" or "step"."""
        self._evaluate = self._method("evaluate")
        self._should_stop = self._method("should_stop")
        self._train_step = self._method("train_step")
        self._check()

    # Duck-typed experiments have what they need, and the defaults of `Experiment` for the rest.
    def __getattr__(self, name: str) -> Any:
        if name not in _DEFAULTS:
            raise AttributeError(f"An experiment has no {name!r}.")
        return getattr(self.experiment, name, _DEFAULTS[name])

    if TYPE_CHECKING:
        optimizer: Optimizer | None
        loader: Any
        scheduler: Any
        scheduler_per: str | None
        scaler: Any
        accumulate: int
        clip_norm: float | None
        config: Any

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        model: nn.Module = self.experiment.model
        return model

    @property
    def bare_model(self) -> nn.Module:
        """The model without what averages gradients over ranks: as hooks see it, and may differentiate it."""
        model: nn.Module = self.experiment.model
        return bare_model(model) if isinstance(model, DistributedDataParallel) else model

    @property
    def lr(self) -> Any:
        """The learning rate of the optimizer's first group; a tensor if it is one there."""
        groups = getattr(self.optimizer, "param_groups", ())
        return groups[0]["lr"] if groups else None

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch; of batches that make one step together, their mean."""
        loss: Callable[..., Tensor] = getattr(self.experiment, "loss_fn", usual_loss)
        if not isinstance(batch, MicroBatches):
            return loss(model, batch)
        return torch.stack([loss(model, part) for part in batch]).mean()

    @property
    def has_loss(self) -> bool:
        """True if a loss can be had without a step; not of an experiment that has only a step of its own."""
        return self._train_step is None or self._method("loss_fn") is not None

    @property
    def has_own_step(self) -> bool:
        """True if it trains by a method of its own."""
        return self._train_step is not None

    def train_step(self, batch: Any) -> StepResult:
        """Make one step, by the experiment's own method if it has one."""
        if self._train_step is None:
            return optimizer_step(self, batch)
        return as_result(self._train_step(batch))

    def train_and_schedule(self, batch: Any) -> StepResult:
        """Make one step, then step the scheduler, if it counts steps; interventions train by it too."""
        result = self.train_step(batch)
        if result.trained:
            self.step_scheduler("step", result.loss)
        return result

    def step_scheduler(self, per: str, loss: Any) -> None:
        """Step the scheduler, if it counts `per`."""
        scheduler = self.scheduler
        if scheduler is None or per != (self.scheduler_per or self._usual_per(scheduler)):
            return
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        elif loss is None:
            raise OptionError("ReduceLROnPlateau goes by the training loss, and train_step() returned none.")
        else:
            scheduler.step(float(loss))

    def _usual_per(self, scheduler: Any) -> str:
        """Return what the loop counts; but "step" for schedulers that are made for steps."""
        return "step" if isinstance(scheduler, (OneCycleLR, CyclicLR)) else self.loop

    @property
    def has_no_data(self) -> bool:
        """True if its steps need no batches."""
        return self.loader is None and self._method("get_loader") is None

    def take_loader(self, epoch: int) -> None:
        """Ask for the loader of another pass over the data."""
        get_loader = getattr(self.experiment, "get_loader", None)
        self.current_loader = self.loader if get_loader is None else get_loader(epoch)
        if self.current_loader is None:
            raise OptionError(f"The experiment has no loader to take the batches of epoch {epoch} from: give it one.")
        for sampler in samplers_of(self.current_loader).values():
            if hasattr(sampler, "set_epoch"):  # a DistributedSampler gives out the same order until it is told
                sampler.set_epoch(epoch)

    def batches(self) -> Iterator[Any]:
        """Return the batches of the steps of this pass over the data."""
        return iter(self.current_loader if self.accumulate == 1 else Grouped(self.current_loader, self.accumulate))

    @property
    def make_shuffled(self) -> Callable[..., Any] | None:
        """The function that makes a loader in another order, where the guard does not know how to."""
        own: Callable[..., Any] | None = getattr(self.experiment, "shuffled_loader", None)
        if self.accumulate == 1:
            return own

        def grouped(generator: torch.Generator) -> Grouped:
            loader = self.current_loader
            made = copy_loader(loader, generator, shuffle=True) if own is None else call_loader_factory(own, generator)
            return Grouped(made, self.accumulate)

        return grouped

    @property
    def evaluates(self) -> bool:
        """True if there is anything to evaluate."""
        return self._evaluate is not None

    def evaluate(self) -> dict[str, Any]:
        """Return the experiment's metrics; modes, random streams and trackers are as before afterwards."""
        if self._evaluate is None:
            return {}
        modes = [(module, module.training) for module in self.model.modules()]
        # Not `kept_rng`: there NumPy draws from a stream that hooks draw from as well, and what an evaluation finds
        # would depend on the hooks of the run.
        random = RandomStates()
        try:
            with in_phase("eval"), torch.no_grad():
                self.model.eval()
                # What we have wrapped, the experiment does not know as wrapped; and an evaluation needs no collectives.
                found = self._evaluate(self.bare_model if isinstance(self.model, RankModel) else self.model)
        finally:
            random.restore()
            for module, mode in modes:
                module.training = mode
        if found is not None and not isinstance(found, Mapping):
            raise OptionError(f"evaluate() returns a dictionary of metrics, or None; got {type_name(found)}.")
        return dict(found or {})

    @property
    def may_stop(self) -> bool:
        """True if the experiment decides when to stop."""
        return self._should_stop is not None

    def should_stop(self, position: int, metrics: Mapping[str, Any]) -> bool:
        """Return whether the experiment asks to stop."""
        return self._should_stop is not None and bool(self._should_stop(position, metrics))

    def end_epoch(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Tell the experiment that an epoch is over."""
        on_epoch_end = self._method("on_epoch_end")
        if on_epoch_end is not None:
            on_epoch_end(epoch, metrics)

    @property
    def target_gradient(self) -> Callable[[nn.Module, int], Any] | None:
        """The function that finds the target gradient, if the experiment has one."""
        return self._method("target_gradient")

    def _method(self, name: str) -> Callable[..., Any] | None:
        """Return the experiment's own method; None where it has only that of `Experiment`."""
        method = getattr(self.experiment, name, None)
        if getattr(method, "__func__", None) is getattr(Experiment, name):
            return None
        return method

    def snapshot_interval(self, given: int | None, usual: int) -> int:
        """Return the distance of snapshots: as the loop was told, else as the experiment's configuration says."""
        if given is None:
            config = self.config
            name = "snapshot_every"
            given = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return whole_number("snapshot_every", usual if given is None else given, 0)

    def _check(self) -> None:
        if self._train_step is None and self.optimizer is None:
            raise OptionError("The experiment has no optimizer: give it one, or a train_step() of its own.")
        if self.has_no_data and self._train_step is None and self._method("loss_fn") is None:
            raise OptionError("The experiment has no loader to take batches from: give it one, or a train_step().")
        if self.loader is not None and not hasattr(self.loader, "__iter__") and not hasattr(self.loader, "__getitem__"):
            raise OptionError(f"loader= is something to iterate over, again and again; got {type_name(self.loader)}.")
        whole_number("accumulate", self.accumulate, 1)
        if self.clip_norm is not None and not self.clip_norm > 0:  # a negative one turns gradients around
            raise OptionError(f"clip_norm= is the largest norm, over 0, or None for any; got {self.clip_norm!r}.")
        if self.scheduler_per not in (None, "epoch", "step"):
            raise OptionError(f"scheduler_per= is 'epoch' or 'step', got {self.scheduler_per!r}.")
        if self.loop == "step" and self.scheduler_per == "epoch":
            raise OptionError("step_loop() has no epochs to count: let scheduler_per= be 'step', or take epoch_loop().")


def whole_number(name: str, value: Any, least: int) -> int:
    """Return an option that counts something as an int; refuse one below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise OptionError(f"{name}= must be a whole number of at least {least}, got {value!r}.")
    return number
