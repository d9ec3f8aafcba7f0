"""Gradients and steps as an intervention makes them: with the run's loss, optimizer and scaler, outside its loop.

Takes batches and callables from `ModelDataContext`, hands back gradients by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import GuardError
from hookline.sites import _torch

__all__ = ["Gradients", "differentiable", "summed_gradients"]

_Loss = Callable[[nn.Module, Any], Tensor]


class Gradients:
    """Forward and backward, scaled and unscaled where the run has a scaler."""

    def __init__(self, model: nn.Module, scaler: Any = None) -> None:
        self._model = model
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None

    def of(self, loss_fn: _Loss, batch: Any) -> None:
        """Have ``.grad`` hold the gradients of this batch alone, unscaled."""
        self._backward(loss_fn, batch)
        scale = None if self._scaler is None else _torch.scale_of(self._scaler)
        if scale is not None:
            with torch.no_grad():
                for grad in (p.grad for p in self._model.parameters() if p.grad is not None):
                    grad.div_(scale.to(grad.device))

    def step(self, loss_fn: _Loss, batch: Any, optimizer: Any) -> None:
        """The same, then a step of the optimizer; the scaler leaves it out where gradients are not finite."""
        self._backward(loss_fn, batch)
        if self._scaler is None:
            optimizer.step()
            return
        self._scaler.unscale_(optimizer)
        self._scaler.step(optimizer)
        self._scaler.update()

    def _backward(self, loss_fn: _Loss, batch: Any) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        loss = differentiable(loss_fn(self._model, batch))
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()


def differentiable(loss: Any) -> Tensor:
    """What a ``loss_fn`` returned, if there is something to differentiate by."""
    if not isinstance(loss, Tensor):
        raise GuardError(f"loss_fn(model, batch) returns a tensor to differentiate; got {type(loss).__name__}.")
    if not loss.requires_grad:
        raise GuardError(
            "The loss depends on no parameter that requires gradients, so it has none. Next: requires_grad_()."
        )
    return loss


def summed_gradients(
    batches: Iterable[Any], step: Callable[[Any], Any], collected: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The mean over the batches of what is collected after each step, in the tensors of the first."""
    totals: dict[str, Tensor] = {}
    count = 0
    for batch in batches:
        step(batch)
        count += 1
        with torch.no_grad():
            for name, grad in collected().items():
                if name in totals:
                    totals[name] += grad
                else:
                    totals[name] = grad.clone()
    if not count:
        raise GuardError("There was no batch to go through: the loader is empty.")
    with torch.no_grad():
        for total in totals.values():
            total /= count
    return totals
