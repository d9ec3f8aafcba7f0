"""Tell a watch when a backward pass is over, so that it reads the gradients of parameters then.

Called by ``watch`` where no optimizer says when gradients are final. A pass is noticed at the model's output; where
the model's own forward is not called and it has no output, at the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from hookline.sites import _torch
from hookline.sites.attach import new_attachment
from hookline.sites.kinds import Kind
from hookline.sites.tensors.parameter_hooks import NamedParameter, attach_to_parameters

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.handle import HookHandle

__all__ = ["Passes"]


class Passes:
    """The backward passes through one model.

    Args:
        model: The model.
        parameters: Those whose gradients are read.
        over: Called at the end of each pass.
    """

    def __init__(self, model: nn.Module, parameters: list[NamedParameter], over: Callable[[], None]) -> None:
        self._model = model
        self._parameters = [item for item in parameters if not is_lazy(item.parameter)]
        self._over = over
        self._handle: HookHandle | None = None
        self._latest = -1

    def begins(self, module: nn.Module, grads: Any) -> None:
        """Note that a pass has come to the model's output; to be attached there as ``backward_pre``."""
        # Queued from the end of the pass, so that it comes after DDP, which averages gradients there. A pass inside of
        # this one, as reentrant checkpointing makes them, ends before.
        _torch.queue_end_of_backward(lambda: _torch.queue_end_of_backward(self._over))

    def hold_parameters(self) -> None:
        """Notice passes at the parameters from now on; the compiled code of modules stays as it is."""
        if self._handle is None and self._parameters:
            request = new_attachment(self._came, Kind.PARAM_GRAD, name="watch")
            self._handle = attach_to_parameters(request, self._model, self._parameters)

    def let_go(self) -> None:
        """Notice passes at the parameters no more."""
        if self._handle is not None:
            self._handle.remove(quiet=True)
            self._handle = None

    def _came(self, parameter: Tensor) -> None:
        current = _torch.graph_task_id()
        if current not in (self._latest, -1):  # the first gradient of this pass
            self._latest = current
            _torch.queue_end_of_backward(lambda: _torch.queue_end_of_backward(self._end))

    def _end(self) -> None:
        if self._handle is not None:
            self._over()
