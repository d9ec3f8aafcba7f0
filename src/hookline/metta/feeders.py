"""Feed trackers: the hooks that hand the tensors of one component to its tracker.

``builders`` and the analyses make them. None changes anything. A value that cannot be counted (a tuple, a missing key,
no gradient) is not counted, and the tracker is told the reason for its warning. Of the hooks that builders
make for one component of a tracker, the last one feeds it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel, type_name
from hookline.metta.component_tracker import ComponentTracker
from hookline.phases import During, Phases
from hookline.sites.site_info import Site
from hookline.tree import main_tensor

__all__ = ["ActivationFeeder", "GradientFeeder", "TrackerFeeder"]


class TrackerFeeder:
    """Decide which passes count, and tell the tracker why the others do not.

    Args:
        tracker: What the hook feeds.
        component: The name it does so under.
        during: The phases that count.
    """

    tracker: ComponentTracker[Any]

    def __init__(self, tracker: Any, component: str, during: Phases) -> None:
        self.tracker, self.component = tracker, component
        self._number = self.tracker.feeder_number(component)
        self.during = During(during, self._forget)
        self.__qualname__ = type(tracker).__name__  # its name in reports

    def _forget(self) -> None:
        self.tracker.forget_counts(self.component)

    def _feeds(self) -> bool:
        """Return whether the tracker takes its passes: no other hook has taken its place."""
        return self.tracker.feeder_number(self.component) == self._number

    def _count_forward(self, module: nn.Module, site: Site | None) -> bool:
        """Count the running forward if its phase is wanted, by ``site`` or the mode of ``module``; return if it is."""
        if site is None:
            return self.during.count_forward(module.training, torch.is_grad_enabled(), object())
        return self.during.count_forward(site.training, site.gradients, site.step)

    def _count_backward(self, module: nn.Module, site: Site | None) -> bool:
        """Count a backward pass through ``module`` if its phase counts; return whether it does."""
        # A backward pass is the surest sign of training: it decides what counts.
        return self.during.count_forward(module.training if site is None else site.training, True, object())

    def _note(self, why_not: Callable[..., str], *args: Any) -> None:
        self.tracker.note_pass(self.component, functools.partial(why_not, *args))


class ActivationFeeder(TrackerFeeder):
    """Feed a tracker with the output of a component, of which ``extract`` takes a tensor."""

    def __init__(
        self, tracker: Any, component: str, during: Phases, extract: Callable[[Any], Any] = main_tensor
    ) -> None:
        super().__init__(tracker, component, during)
        self.extract = extract
        self._has_warned = False

    def __call__(self, module: nn.Module, args: Any, output: Any, *, site: Site | None = None) -> None:
        """Count ``output``, as a forward hook; not again where activation checkpointing repeats the forward."""
        if not self._feeds():
            return
        if (site is not None and site.recompute) or not self._count_forward(module, site):
            self._note(_not_counted, self.during)
            return
        tensor = self._extracted(output)
        if not isinstance(tensor, Tensor):
            self._note(_not_extracted, output, self.extract)
            return
        self.tracker.update(self.component, tensor)  # type: ignore[attr-defined]
        self._note(_not_countable, tensor)

    def _extracted(self, output: Any) -> Any:
        """Return what the extractor finds; nothing where it raises, since whoever runs the model did not write it."""
        try:
            return self.extract(output)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                what = f"{type(error).__name__}: {error}"
                text = f"Component {self.component!r} is passed over where its extractor raises; here it was {what}"
                warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())
            return None


class GradientFeeder(TrackerFeeder):
    """Feed a tracker with the gradient of a component's first output, or with ``of_input`` of its first input."""

    def __init__(self, tracker: Any, component: str, during: Phases, *, of_input: bool = False) -> None:
        super().__init__(tracker, component, during)
        self.of_input = of_input

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any, *, site: Site | None = None) -> None:
        """Count the gradient, as a backward hook."""
        if not self._feeds():
            return
        grads = grad_input if self.of_input else grad_output
        grad = grads[0] if isinstance(grads, tuple) and grads else grads
        if not isinstance(grad, Tensor):
            self._note(*((_no_input_gradient, module, self.component) if self.of_input else (_no_output_gradient,)))
        elif not self._count_backward(module, site):
            self._note(_not_counted, self.during)
        else:
            # One dimension is one sample; to the tracker it would be ready sizes, which are not negative.
            self.tracker.update(self.component, grad.detach().abs() if grad.dim() == 1 else grad)  # type: ignore[attr-defined]
            self._note(_not_countable, grad)


# -- why a pass gave nothing, and what to do about it -----------------------------------------------------------


def _not_counted(during: During) -> str:
    wanted = ", ".join(map(repr, sorted(during.phases)))
    more = during.in_words()
    return f"every pass so far was outside of during=({wanted}){f' ({more})' if more else ''}; name other phases there"


def _not_extracted(output: Any, extract: Callable[[Any], Any]) -> str:
    return (
        f"its output is {type_name(output)}, in which extractor={extract!r} finds no tensor; give extractor= the key "
        "of one, or a function from the output to it"
    )


def _not_countable(tensor: Tensor) -> str:
    return (
        f"what came by ({tensor.dtype}, shape {tuple(tensor.shape)}) has no real numbers to count; hook a component "
        "that gives out floating-point numbers"
    )


def _no_output_gradient() -> str:
    return "no gradient comes to its first output; hook a component whose first output the loss is made of"


def _no_input_gradient(module: nn.Module, component: str) -> str:
    relu = next((name for name, child in module.named_modules() if name and isinstance(child, nn.ReLU)), None)
    inside = "" if relu is None else f", such as its ReLU ({component + '.' + relu!r} in PolicyAutoBuilder.of(policy))"
    return (
        "its first input needs no gradient (it is data, or detached), so none comes out of it; hook a module further "
        f"in{inside}, or have the input require a gradient"
    )
