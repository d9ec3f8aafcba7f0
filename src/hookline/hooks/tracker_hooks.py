"""The hooks that feed trackers.

Made by ``builders``; each is called at one component, takes the tensor it is about and hands it to its tracker. None of
them changes anything, and what a tracker has no use for (a tuple, a missing key, no gradient) is passed over.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from hookline.errors import HooklineWarning
from hookline.hooks.extract import Extractor
from hookline.hooks.turns import begin_turn, is_first_in_backward, is_first_in_forward
from hookline.lifecycle.phase import Phases, phase
from hookline.observe.trackers.counting import CountingTracker
from hookline.observe.trackers.gradient_flow import GradientFlowState, ReLUGradientFlowState
from hookline.sites.main_tensor import main_tensor
from hookline.sites.site import Site
from hookline.wording import outside

__all__ = ["ActivationHook", "GradientFlowHook", "ReLUGradientFlowHook"]


class ActivationHook:
    """Shows a tracker what a component gives out."""

    def __init__(self, tracker: CountingTracker[Any], component: str, extract: Extractor, during: Phases) -> None:
        self.tracker, self.component, self.extract, self.during = tracker, component, extract, during
        self._has_warned = False
        self.__qualname__ = type(tracker).__name__  # its name in reports

    def __call__(self, module: nn.Module, args: Any, output: Any, *, site: Site | None = None) -> None:
        """A forward hook; a forward that activation checkpointing repeats was counted the first time."""
        begin_turn(self.tracker, self.component, module, self)
        if phase() not in self.during or (site is not None and site.recompute):
            return
        tensor = self._extracted(output)
        if not isinstance(tensor, Tensor):
            return
        call = main_tensor(output)  # what a function extracts may be another tensor each time
        if is_first_in_forward(self.tracker, self.component, module, self, tensor if call is None else call):
            self.tracker.update(self.component, tensor)

    def _extracted(self, output: Any) -> Any:
        """What the extractor finds; one that raises finds nothing, since whoever runs the model did not write it."""
        try:
            return self.extract(output)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                what = f"{type(error).__name__}: {error}"
                text = f"Component {self.component!r} is passed over where its extractor raises; here it was {what}"
                warnings.warn(text, HooklineWarning, stacklevel=outside())
            return None


class GradientFlowHook:
    """Shows a tracker the gradients of what a component gives out."""

    def __init__(self, tracker: GradientFlowState, component: str, during: Phases) -> None:
        self.tracker, self.component, self.during = tracker, component, during
        self.__qualname__ = type(tracker).__name__

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        """A backward hook."""
        grad = _first(grad_output)
        if grad is None or phase() not in self.during or not _is_first(self, module):
            return
        # One dimension is one sample; to the tracker it would be ready sizes, which are not negative.
        self.tracker.update(self.component, grad.detach().abs() if grad.dim() == 1 else grad)


class ReLUGradientFlowHook:
    """Shows a tracker the gradients of what a component takes in."""

    def __init__(self, tracker: ReLUGradientFlowState, component: str, during: Phases) -> None:
        self.tracker, self.component, self.during = tracker, component, during
        self.__qualname__ = type(tracker).__name__

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        """A backward hook."""
        grad = _first(grad_input)
        if grad is None or phase() not in self.during or not _is_first(self, module):
            return
        self.tracker.update(self.component, grad)


def _is_first(hook: GradientFlowHook | ReLUGradientFlowHook, module: nn.Module) -> bool:
    # With the module: policies that share a tracker may have components of the same name.
    return is_first_in_backward(hook.tracker, (hook.component, id(module)), hook)


def _first(grads: Any) -> Tensor | None:
    grad = grads[0] if isinstance(grads, tuple) and grads else grads
    return grad if isinstance(grad, Tensor) else None
