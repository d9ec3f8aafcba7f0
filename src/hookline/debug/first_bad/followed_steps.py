"""Tell when steps begin in a loop that is only followed, and run the model's part of one again.

`BadOperations` and the hook `FirstBadOperation` use it where nobody calls them with the step: the first forward of the
model in training begins a step. What the model was given is kept, and so are the gradients that come back to what it
returned: with both, forward and backward of the model run again, whatever the loss was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.debug.first_bad.bad_operation import BadStep
from hookline.debug.first_bad.kept_steps import FollowedBatch, KeptForward, KeptStep, SecondRun
from hookline.phases import known_phase, phase
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.training.experiment import MicroBatches
from hookline.tree import leaves

if TYPE_CHECKING:
    from hookline.debug.first_bad.bad_operation_finder import BadOperationFinder
    from hookline.sites.site_info import Site

__all__ = ["FollowedSteps"]

_NO_LOSS: Final = (
    "forward and backward of the model were run again, from what it was given and the gradients that came back; the "
    "loss and the optimizer were not: to have them too, give step_fn="
)


class FollowedSteps:
    """Begin steps at forwards of the model, and run its part of them again."""

    def __init__(self, finder: BadOperationFinder, model: nn.Module) -> None:
        self._finder = finder
        self._model = model
        self._current: FollowedBatch | None = None
        self._noted: list[tuple[Any, Any]] = []
        self._again = SecondRun(self._run_again, _NO_LOSS, is_step=False)
        self._handles = HandleSet()
        name = "first bad operation"
        self._handles.add(
            attach(model, self._begin_forward, on="forward_pre", with_kwargs=True, observe=True, name=name)
        )
        self._handles.add(attach(model, self._take_gradients, on="backward_pre", observe=True, name=name))

    def note_batch(self, batch: Any, ids: Any = None) -> None:
        """Name the batch of the forwards that follow."""
        ids = self._finder.ids_of(batch) if ids is None else ids
        if self._current is None:
            self._noted.append((batch, ids))
        else:
            self._current.add(batch, ids)

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any, *, site: Site) -> None:
        is_training = self._model.training and torch.is_grad_enabled() and known_phase() in (None, "train")
        if not is_training or _torch.in_recomputation():
            return
        if self._current is None:
            self._current = followed = FollowedBatch()
            noted, self._noted = self._noted, []
            for batch, ids in noted:
                followed.add(batch, ids)
            self._finder.begin_step(followed, self._again)
        self._current.forwards[site.step] = KeptForward(args, kwargs, _autocast())

    def _take_gradients(self, module: nn.Module, grads: Any, *, site: Site) -> None:
        if self._current is not None and site.step in self._current.forwards and phase() != "intervention":
            self._current.forwards[site.step].backwards.append(dict(zip(site.outputs, grads, strict=False)))

    def end_step(self, loss: Any, batch: Any = None) -> list[BadStep]:
        """End the step, if one has begun; ``batch`` is that of the step, if it becomes known only now."""
        followed, self._current = self._current, None
        if followed is None:
            return []
        if batch is not None and not followed.batches:
            for each in batch if isinstance(batch, MicroBatches) else [batch]:
                followed.add(each, self._finder.ids_of(each))
        return self._finder.end_step(loss, self._again)

    def flush(self) -> list[BadStep]:
        """Judge all steps whose numbers are still under way."""
        return self._finder.flush(self._again)

    def remove(self) -> None:
        """Take the hooks off."""
        self._handles.remove(quiet=True)
        self._current = None

    def _run_again(self, kept: KeptStep) -> Any:
        """Run forwards and backwards in turns, as a loop that accumulates makes them; return what the model returns."""
        followed: FollowedBatch = kept.batch
        self._model.train()
        followed.starts = []
        ends: list[Tensor] = []
        for forward in followed.forwards.values():
            followed.starts.append(self._finder.operators_run)
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
