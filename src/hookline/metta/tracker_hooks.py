"""The hooks that feed trackers.

Made by ``builders``; each is called at one component, takes the tensor it is about and hands it to its tracker. None of
them changes anything, and what a tracker has no use for (a tuple, a missing key, no gradient) is passed over; the
tracker is told why, so that one that never yields anything can say so.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import HooklineWarning
from hookline.lifecycle.run_phase import During, Phases
from hookline.messages import caller_stacklevel, type_name
from hookline.metta.counting import CountingTracker
from hookline.metta.extract import Extractor
from hookline.metta.gradient_flow_state import GradientFlowState, ReLUGradientFlowState
from hookline.metta.pass_turns import begin_turn, is_first_in_backward, is_first_in_forward
from hookline.metta.tracked_components import ComponentTracker
from hookline.sites.site_info import Site
from hookline.sites.tree import main_tensor

__all__ = ["ActivationHook", "GradientFlowHook", "ReLUGradientFlowHook", "TrackerHook"]


class TrackerHook:
    """What the hooks of trackers share: which passes count, and why nothing has come of them.

    Args:
        tracker: What the hook feeds.
        component: The name it does so under.
        during: The phases that count.
    """

    tracker: ComponentTracker[Any]

    def __init__(self, tracker: Any, component: str, during: Phases) -> None:
        self.tracker, self.component = tracker, component
        self.during = During(during, self._forget)
        self.__qualname__ = type(tracker).__name__  # its name in reports

    def _forget(self) -> None:
        self.tracker.forget_counts(self.component)

    def _takes_forward(self, module: nn.Module, site: Site | None) -> bool:
        """Return whether the forward under way counts, as `site` tells, or without one the module."""
        if site is None:
            return self.during.count_forward(module.training, torch.is_grad_enabled(), object())
        return self.during.count_forward(site.training, site.gradients, site.step)

    def _note(self, why_not: Callable[..., str], *args: Any) -> None:
        self.tracker.note_pass(self.component, functools.partial(why_not, *args))


class ActivationHook(TrackerHook):
    """Shows a tracker what a component gives out."""

    tracker: CountingTracker[Any]

    def __init__(self, tracker: CountingTracker[Any], component: str, extract: Extractor, during: Phases) -> None:
        super().__init__(tracker, component, during)
        self.extract = extract
        self._has_warned = False

    def __call__(self, module: nn.Module, args: Any, output: Any, *, site: Site | None = None) -> None:
        """A forward hook; a forward that activation checkpointing repeats was counted the first time."""
        begin_turn(self.tracker, self.component, module, self)
        if (site is not None and site.recompute) or not self._takes_forward(module, site):
            self._note(_not_counted, self.during)
            return
        tensor = self._extracted(output)
        if not isinstance(tensor, Tensor):
            self._note(_not_extracted, output, self.extract)
            return
        call = main_tensor(output)  # what a function extracts may be another tensor each time
        if is_first_in_forward(self.tracker, self.component, module, self, tensor if call is None else call):
            self.tracker.update(self.component, tensor)
            self._note(_not_countable, tensor)

    def _extracted(self, output: Any) -> Any:
        """What the extractor finds; one that raises finds nothing, since whoever runs the model did not write it."""
        try:
            return self.extract(output)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                what = f"{type(error).__name__}: {error}"
                text = f"Component {self.component!r} is passed over where its extractor raises; here it was {what}"
                warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())
            return None


class _BackwardHook(TrackerHook):
    """What the hooks on gradients share."""

    def _takes(self, module: nn.Module, site: Site | None) -> bool:
        training = module.training if site is None else site.training
        # A backward pass is as much like training as anything that gradients come to: it settles what counts.
        if self.during.count_forward(training, True, object()):
            # With the module: policies that share a tracker may have components of the same name.
            return is_first_in_backward(self.tracker, (self.component, id(module)), self)
        self._note(_not_counted, self.during)
        return False


class GradientFlowHook(_BackwardHook):
    """Shows a tracker the gradients of what a component gives out."""

    tracker: GradientFlowState

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any, *, site: Site | None = None) -> None:
        """A backward hook."""
        grad = _first(grad_output)
        if grad is None:
            self._note(_no_gradient_in)
        elif self._takes(module, site):
            # One dimension is one sample; to the tracker it would be ready sizes, which are not negative.
            self.tracker.update(self.component, grad.detach().abs() if grad.dim() == 1 else grad)
            self._note(_not_countable, grad)


class ReLUGradientFlowHook(_BackwardHook):
    """Shows a tracker the gradients of what a component takes in."""

    tracker: ReLUGradientFlowState

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any, *, site: Site | None = None) -> None:
        """A backward hook."""
        grad = _first(grad_input)
        if grad is None:
            self._note(_no_gradient_out, module, self.component)
        elif self._takes(module, site):
            self.tracker.update(self.component, grad)
            self._note(_not_countable, grad)


def _first(grads: Any) -> Tensor | None:
    grad = grads[0] if isinstance(grads, tuple) and grads else grads
    return grad if isinstance(grad, Tensor) else None


# -- why a pass gave nothing, and what to do about it -----------------------------------------------------------


def _not_counted(during: During) -> str:
    wanted = ", ".join(map(repr, sorted(during.phases)))
    more = during.in_words()
    return f"every pass so far was outside of during=({wanted}){f' ({more})' if more else ''}; name other phases there"


def _not_extracted(output: Any, extract: Extractor) -> str:
    return (
        f"its output is {type_name(output)}, in which extractor={extract!r} finds no tensor; give extractor= the key "
        "of one, or a function from the output to it"
    )


def _not_countable(tensor: Tensor) -> str:
    return (
        f"what came by ({tensor.dtype}, shape {tuple(tensor.shape)}) has no real numbers to count; hook a component "
        "that gives out floating-point numbers"
    )


def _no_gradient_in() -> str:
    return "no gradient comes to its first output; hook a component whose first output the loss is made of"


def _no_gradient_out(module: nn.Module, component: str) -> str:
    relu = next((name for name, child in module.named_modules() if name and isinstance(child, nn.ReLU)), None)
    inside = "" if relu is None else f", such as its ReLU ({component + '.' + relu!r} in PolicyAutoBuilder.of(policy))"
    return (
        "its first input needs no gradient (it is data, or detached), so none comes out of it; hook a module further "
        f"in{inside}, or have the input require a gradient"
    )
