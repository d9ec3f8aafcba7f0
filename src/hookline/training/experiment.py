"""Define what an experiment supplies to the loops: model, data, loss, evaluation.

Users make or derive one; the loops read it through an `ExperimentAdapter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.training.step import optimizer_step, usual_loss

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Experiment"]

Per = Literal["epoch", "step"]


class Experiment:
    """Supply model, data, loss and evaluation of a training run, without its loop.

    Recipe::

        experiment = hookline.Experiment(model, optimizer, loader, loss_fn)
        hookline.epoch_loop(experiment, epochs=10, manager=hookline.HookManager(hooks=[MyHook()]))


        class Parity(hookline.Experiment):  # or as methods
            def loss_fn(self, model, batch): ...
            def evaluate(self, model):
                return {"val_acc": ...}

    Any object will do that has the attributes and methods of this class that it needs: ``model``, and ``loader`` with
    ``optimizer`` and ``loss_fn``, or a ``train_step`` of its own. What is not there is as it is here.

    For ``hookline run FILE:Class`` a subclass is made with ``Class(config, strategy)``, ``config`` being a
    ``config_class``, and hands what it has made to ``super().__init__``; it is then moved to the device by ``to``.

    Args:
        model: What is trained.
        optimizer: What trains it.
        loader: Batches; anything that can be iterated again and again.
        loss_fn: ``loss_fn(model, batch)`` gives the loss. If left out: the usual one for such a batch.
        scheduler: Of the learning rate; stepped by the loop. One that watches a plateau is given the training loss.
        scheduler_per: Whether the scheduler counts ``"epoch"`` or ``"step"``. If left out: as the loop does, but for
            `OneCycleLR` and `CyclicLR`, which count steps.
        scaler: A `GradScaler`. Gradients are unscaled before anyone sees them.
        accumulate: How many batches make one step.
        clip_norm: The largest norm that all gradients together may have.
        evaluate, train_step, should_stop, on_epoch_end, target_gradient, get_loader, shuffled_loader: The method of
            that name, as a function.
        config: Whatever hooks are to find as ``ctx.config``; the loops read ``config.snapshot_every``.
    """

    name: ClassVar[str] = ""
    """What the command line and folders call it; if left out, the name of its class."""
    loop: ClassVar[Per] = "epoch"
    """Which loop ``hookline run`` takes: the one that counts epochs, or steps."""
    config_class: ClassVar[type | None] = None
    """A dataclass whose fields are options of ``hookline run``: ``epochs`` (or ``steps``), ``snapshot_every``, …"""
    strategies: ClassVar[tuple[str, ...]] = ()
    """The ways it can be run, the usual one first: ``--strategy NAME`` or ``all``."""
    hook_sets: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Hooks by the name of a group: ``--with-hooks NAME``."""
    hook_config: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Arguments that fit it better than the hooks' own, by hook; a run file and ``--hook-config`` win over them."""
    live_metrics: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """What ``--live`` shows: ``{group: {label: metric}}``."""

    shares_data: bool = False
    """Whether it gives each rank its part of the data itself; if not, ``hookline run`` does so under torchrun."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        loader: Iterable[Any] | None = None,
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        *,
        scheduler: Any = None,
        scheduler_per: Per | None = None,
        scaler: Any = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        evaluate: Callable[[nn.Module], Mapping[str, Any] | None] | None = None,
        train_step: Callable[[Any], Any] | None = None,
        should_stop: Callable[[int, Mapping[str, Any]], bool] | None = None,
        on_epoch_end: Callable[[int, Mapping[str, Any]], None] | None = None,
        target_gradient: Callable[[nn.Module, int], dict[str, Tensor] | None] | None = None,
        get_loader: Callable[[int], Iterable[Any] | None] | None = None,
        shuffled_loader: Callable[..., Iterable[Any]] | None = None,
        config: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"An experiment trains an nn.Module, got {type_name(model)}.")
        if isinstance(loss_fn, torch.nn.modules.loss._Loss):
            raise OptionError(
                f"loss_fn= is called with the model and a batch, and {type(loss_fn).__name__} takes output and target: "
                "hand over lambda model, batch: criterion(model(batch[0]), batch[1])."
            )
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self.scheduler = scheduler
        self.scheduler_per: Per | None = scheduler_per
        self.scaler = scaler
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        self.config = config
        given = {
            "loss_fn": loss_fn,
            "evaluate": evaluate,
            "train_step": train_step,
            "should_stop": should_stop,
            "on_epoch_end": on_epoch_end,
            "target_gradient": target_gradient,
            "get_loader": get_loader,
            "shuffled_loader": shuffled_loader,
        }
        for name, function in given.items():
            if function is not None:
                setattr(self, name, function)  # in front of the method of that name

    def __repr__(self) -> str:
        # A subclass may set these later than __init__, or never.
        parts = [getattr(self, name, None) for name in ("model", "optimizer", "scheduler", "scaler")]
        words = [type(part).__name__ for part in parts if part is not None]
        loader: Any = getattr(self, "loader", None)
        try:
            words.append("no loader" if loader is None else f"{len(loader)} batches")
        except TypeError:
            words.append("a loader without a length")
        return f"<{type(self).__name__} of {', '.join(words)}>"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Move the model, before training has begun; its parameters stay the objects that the optimizer has."""
        self.model.to(device=device, dtype=dtype)

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, to call ``backward`` on."""
        return usual_loss(model, batch)

    def train_step(self, batch: Any) -> Any:
        """Make one step: gradients of the batch, then the optimizer.

        Leave the gradients in ``.grad`` (zero them before the backward, not after the step): hooks read them there.
        With ``accumulate=`` over 1 the batch is a tuple of batches. Interventions train by it as well; what it changes
        on the experiment (counters, lists, other optimizers and modules) is put back when they are over.

        Returns:
            The loss; or a dictionary with ``loss`` and whatever else is to be reported; or False if nothing was
            trained, and the scheduler is to wait.
        """
        return optimizer_step(self, batch)

    def get_loader(self, epoch: int) -> Iterable[Any] | None:
        """Return the batches of an epoch (in the step loop: of a pass over the data); ``loader`` every time."""
        return self.loader

    shuffled_loader: Callable[..., Iterable[Any]] | None = None
    """``shuffled_loader(generator)`` gives the batches in another order, where the loader can only be iterated."""

    def evaluate(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Return metrics of the model; hooks see ``train_acc`` and ``val_acc`` among them by these names.

        The model is in evaluation mode by then, no gradients are recorded, trackers are paused, and random numbers
        that are drawn here are not missing in training.
        """
        return None

    def should_stop(self, position: int, metrics: Mapping[str, Any]) -> bool:
        """Return whether that was the last epoch (in the step loop: step), by ``loss`` and the newest evaluation."""
        return False

    def target_gradient(self, model: nn.Module, step: int) -> dict[str, Tensor] | None:
        """Return the gradient that hooks compare with, by parameter; called when they read ``ctx.target_grad``."""
        return None

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Do something after an epoch and its hooks."""
