"""Tell when steps begin in a loop that is only followed, and run the forward and backward of one again.

`BadOperations` and the hook `FirstBadOperation` use it where nobody calls them with the step: the first forward of the
model in training begins a step. What the model was given is kept, and so is the batch, if it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.debug.first_bad.bad_operation import BadStep
from hookline.debug.first_bad.bad_operation_finder import SecondRun
from hookline.debug.first_bad.followed_batch import FollowedBatch
from hookline.debug.first_bad.kept_steps import KeptStep
from hookline.phases import known_phase
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.training.experiment import MicroBatches

if TYPE_CHECKING:
    from hookline.debug.first_bad.bad_operation_finder import BadOperationFinder

__all__ = ["FollowedSteps"]

_FORWARD_ALONE: Final = (
    "the forward alone was run again, on the inputs that the model was given; to have the backward too, give loss_fn= "
    "and the batch, or step_fn="
)
_NO_STEP: Final = "forward and backward were run again, without the step of the optimizer"


class FollowedSteps:
    """Begin steps at forwards of the model, and run them again as far as is known how."""

    def __init__(
        self, finder: BadOperationFinder, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor] | None
    ) -> None:
        self._finder = finder
        self._model = model
        self._loss_fn = loss_fn
        self._current: FollowedBatch | None = None
        self._latest = FollowedBatch()
        self._noted: list[tuple[Any, Any]] = []
        self._handle = attach(
            model, self._begin_forward, on="forward_pre", with_kwargs=True, observe=True, name="first bad operation"
        )

    def note_batch(self, batch: Any, ids: Any = None) -> None:
        """Name the batch of the forwards that follow."""
        ids = self._finder.ids_of(batch) if ids is None else ids
        if self._current is None:
            self._noted.append((batch, ids))
        else:
            self._current.add(batch, ids)

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        is_training = self._model.training and torch.is_grad_enabled() and known_phase() in (None, "train")
        if not is_training or _torch.in_recomputation():
            return
        if self._current is None:
            self._current = self._latest = followed = FollowedBatch()
            noted, self._noted = self._noted, []
            for batch, ids in noted:
                followed.add(batch, ids)
            followed.autocast = _autocast()
            self._finder.begin_step(followed, self._second_run(followed))
        self._current.forwards.append((args, kwargs))

    def end_step(self, loss: Any, batch: Any = None) -> list[BadStep]:
        """End the step, if one has begun; ``batch`` is that of the step, if it becomes known only now."""
        followed, self._current = self._current, None
        if followed is None:
            return []
        if batch is not None and not followed.batches:
            for each in batch if isinstance(batch, MicroBatches) else [batch]:
                followed.add(each, self._finder.ids_of(each))
        return self._finder.end_step(loss, self._second_run(followed))

    def flush(self) -> list[BadStep]:
        """Judge all steps whose numbers are still under way."""
        return self._finder.flush(self._second_run(self._latest))

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove(quiet=True)
        self._current = None

    def _second_run(self, followed: FollowedBatch) -> SecondRun:
        has_backward = self._loss_fn is not None and bool(followed.batches)
        note = _NO_STEP if has_backward else _FORWARD_ALONE
        return SecondRun(self._again, note, is_step=False, has_backward=has_backward)

    def _again(self, kept: KeptStep) -> Any:
        followed: FollowedBatch = kept.batch
        self._model.train()
        followed.starts = []
        if self._loss_fn is None or not followed.batches:
            return [self._forward_again(followed, args, kwargs) for args, kwargs in followed.forwards]
        losses = []
        for batch in followed.batches:  # forward and backward in turns, as the loop makes them
            self._begin_part(followed)
            with _under(followed.autocast):
                loss = self._loss_fn(self._model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss)
        return losses

    def _forward_again(self, followed: FollowedBatch, args: Any, kwargs: Any) -> Any:
        self._begin_part(followed)
        with _under(followed.autocast):
            return self._model(*args, **kwargs)

    def _begin_part(self, followed: FollowedBatch) -> None:
        followed.starts.append(self._finder.operators_run)


@contextmanager
def _under(autocast: list[tuple[str, torch.dtype]]) -> Iterator[None]:
    """Cast as the first forward of the step did."""
    with ExitStack() as entered:
        for device, dtype in autocast:
            entered.enter_context(torch.autocast(device, dtype=dtype))
        yield


def _autocast() -> list[tuple[str, torch.dtype]]:
    """Return the devices whose operators are cast now, and to which type."""
    devices = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
    return [(each, torch.get_autocast_dtype(each)) for each in devices if torch.is_autocast_enabled(each)]
