"""Use the data, the scheduler and the evaluation of an experiment, as a loop does.

A `Run` has a `Passes` and a `Schedule`, and calls `evaluate`. The adapters of trainers derive from the first two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from hookline.errors import OptionError
from hookline.guard.loaders import samplers_of
from hookline.guard.rng import RandomStates
from hookline.messages import type_name
from hookline.phases import in_phase
from hookline.training.experiment import Experiment
from hookline.training.ranks import RankModel, bare_model
from hookline.training.step import Grouped

__all__ = ["Passes", "Schedule", "evaluate"]


class Passes:
    """Give out the data of an experiment, one pass after the other."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.loader: Any = experiment.loader
        """Of this pass."""

    @property
    def has_no_data(self) -> bool:
        """True if the steps need no batches."""
        return self.experiment.loader is None and not self.experiment.has_own("get_loader")

    def take_loader(self, epoch: int) -> None:
        """Ask for the loader of another pass."""
        self.loader = self.experiment.get_loader(epoch)
        if self.loader is None:
            raise OptionError(f"The experiment has no loader to take the batches of epoch {epoch} from: give it one.")
        for sampler in samplers_of(self.loader).values():
            if hasattr(sampler, "set_epoch"):  # a DistributedSampler gives out the same order until it is told
                sampler.set_epoch(epoch)

    def batches(self) -> Iterator[Any]:
        """Return the batches of the steps of this pass."""
        return iter(self.grouped(self.loader))

    def grouped(self, loader: Any) -> Any:
        """Return a loader that gives out as many batches at a time as make a step."""
        number = self.experiment.accumulate
        return loader if number == 1 else Grouped(loader, number)


class Schedule:
    """Step the scheduler of an experiment."""

    def __init__(self, experiment: Experiment, loop: str) -> None:
        self._experiment = experiment
        self._loop = loop

    def step(self, per: str, loss: Any) -> None:
        """Step the scheduler, if it counts `per`: "epoch" or "step"."""
        scheduler = self._experiment.scheduler
        usual = "step" if isinstance(scheduler, OneCycleLR | CyclicLR) else self._loop
        if scheduler is None or per != (self._experiment.scheduler_per or usual):
            return
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        elif loss is None:
            raise OptionError("ReduceLROnPlateau goes by the training loss, and train_step() returned none.")
        else:
            scheduler.step(float(loss))


def evaluate(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment's metrics; modes, random streams and trackers are as before afterwards."""
    model = experiment.model
    modes = [(module, module.training) for module in model.modules()]
    # Not `kept_rng`: there NumPy draws from a stream that hooks draw from as well, and what an evaluation finds would
    # depend on the hooks of the run.
    random = RandomStates()
    try:
        with in_phase("eval"), torch.no_grad():
            model.eval()
            # What we have wrapped, the experiment does not know as wrapped; and an evaluation needs no collectives.
            found = experiment.evaluate(bare_model(model) if isinstance(model, RankModel) else model)
    finally:
        random.restore()
        for module, mode in modes:
            module.training = mode
    if found is not None and not isinstance(found, Mapping):
        raise OptionError(f"evaluate() returns a dictionary of metrics, or None; got {type_name(found)}.")
    return dict(found or {})
