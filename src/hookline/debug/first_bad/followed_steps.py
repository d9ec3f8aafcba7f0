"""Follow the steps of a loop that nobody hands over, and run the model's part of a step again.

`BadOperations` and `FirstBadOperation` make a `FollowedSteps` where they cannot make the step themselves. A step begins
at the first forward of the model in training. What the model was given is kept, and so are the gradients that come back
to what it returned: with both, forward and backward of the model run again, whatever the loss was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.debug.first_bad.bad_operation import describe_batch
from hookline.debug.first_bad.bad_operation_finder import BadOperationFinder
from hookline.phases import known_phase, phase
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.training.experiment import MicroBatches
from hookline.tree import leaves

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = ["FollowedSteps"]

_NO_LOSS: Final = (
    "forward and backward of the model were run again, from what it was given and the gradients that came back; the "
    "loss and the optimizer were not: to have them too, give step_fn="
)


@dataclass(slots=True)
class KeptForward:
    """One forward of the model; a step that accumulates gradients has several."""

    args: Any
    kwargs: Any
    autocast: list[tuple[str, torch.dtype]]
    batch: Any
    """What the user calls the batch of it, if that is known."""
    ids: Any
    backwards: list[dict[str, Tensor | None]] = field(default_factory=list)
    """For each backward pass, the gradients that came back, by the leaves of the output."""
    begins_at: int = 0
    """How many operators the second run had made when it came to this."""


class FollowedSteps:
    """Begin steps at forwards of the model, check them by a `BadOperationFinder`, and run the model's part again.

    Args:
        model: The model.
        options: As for the finder.
    """

    def __init__(self, model: nn.Module, scaler: Any = None, **options: Any) -> None:
        self._model = model
        # A second run changes the model alone.
        parts = (model, None, None, scaler, None)
        self.finder = BadOperationFinder(model, lambda: parts, self._run_again, every=1, **options)
        self.finder.note = _NO_LOSS
        self._current: dict[int, KeptForward] | None = None
        """The forwards of the step, by the number that the site has of each."""
        self._noted: tuple[Any, Any] = None, None
        self._handles = HandleSet()
        add = partial(attach, model, observe=True, name="first bad operation")
        self._handles.add(add(self._begin_forward, on="forward_pre", with_kwargs=True))
        self._handles.add(add(self._take_gradients, on="backward_pre"))

    def note_batch(self, batch: Any, ids: Any = None) -> None:
        """Name the batch of the forwards that follow, until the next call."""
        self._noted = batch, ids

    def end_step(self, loss: Any = None, batch: Any = None) -> None:
        """End the step, if one has begun; ``batch`` is that of the step, if it becomes known only now."""
        forwards, self._current = self._current, None
        if forwards is None:
            return
        batches = batch if isinstance(batch, MicroBatches) else [batch]
        for forward, each in zip(forwards.values(), batches, strict=False):
            forward.batch = each if forward.batch is None else forward.batch
        self.finder.end_step(loss)

    def remove(self) -> None:
        """Take the hooks off."""
        self._handles.remove(quiet=True)
        self._current = None
        self.finder.remove()

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any, *, site: Site) -> None:
        is_training = self._model.training and torch.is_grad_enabled() and known_phase() in (None, "train")
        if not is_training or _torch.in_recomputation():
            return
        if self._current is None:
            self._current = {}
            self.finder.begin_step(self._current, partial(_describe, self._current))
        self._current[site.step] = KeptForward(args, kwargs, _autocast(), *self._noted)

    def _take_gradients(self, module: nn.Module, grads: Any, *, site: Site) -> None:
        if self._current is not None and site.step in self._current and phase() != "intervention":
            self._current[site.step].backwards.append(dict(zip(site.outputs, grads, strict=False)))

    def _run_again(self, forwards: dict[int, KeptForward]) -> list[Tensor]:
        """Run forwards and backwards in turns, as a loop that accumulates makes them; return what the model returns."""
        self._model.train()
        ends: list[Tensor] = []
        for forward in forwards.values():
            forward.begins_at = self.finder.operators_run
            with _under(forward.autocast):
                output = self._model(*forward.args, **forward.kwargs)
            made = {str(path): leaf for path, leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad}
            for number, grads in enumerate(forward.backwards, 1):
                given = {path: grad for path, grad in grads.items() if grad is not None and path in made}
                if given:
                    is_last = number == len(forward.backwards)
                    outputs = [made[path] for path in given]
                    torch.autograd.backward(outputs, [*given.values()], retain_graph=not is_last)
            ends += made.values()
        return ends


def _describe(forwards: dict[int, KeptForward], operator: int | None) -> str:
    """Return the batches of a step in words, or the one in which the operator of that number ran."""
    kept = list(forwards.values())
    told = [describe_batch(each.args if each.batch is None else each.batch, each.ids) for each in kept]
    if operator is None or len(kept) == 1:
        return "; ".join(told)
    place = sum(each.begins_at <= operator for each in kept)
    return f"{told[place - 1]}, micro-batch {place} of {len(kept)}"


@contextmanager
def _under(autocast: list[tuple[str, torch.dtype]]) -> Iterator[None]:
    """Cast as the forward did."""
    with ExitStack() as entered:
        for device, dtype in autocast:
            entered.enter_context(torch.autocast(device, dtype=dtype))
        yield


def _autocast() -> list[tuple[str, torch.dtype]]:
    """Return the devices whose operators are cast now, and to which type."""
    devices = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
    return [(each, torch.get_autocast_dtype(each)) for each in devices if torch.is_autocast_enabled(each)]
