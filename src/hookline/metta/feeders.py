"""Feed trackers: the hooks that hand the tensors of one component to its tracker.

``builders`` and the analyses make them. None changes anything. A value that cannot be counted (a tuple, a missing key,
no gradient) is not counted, and the tracker is told the reason for its warning.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel, type_name
from hookline.phases import During, Phases
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet, HookHandle
from hookline.sites.site_info import Site
from hookline.sites.tensors import attach_tensor
from hookline.sites.wrappers import walk
from hookline.tree import main_tensor

__all__ = ["ActivationFeeder", "GradientFeeder", "ParameterFeeder", "TrackerFeeder"]


class TrackerFeeder:
    """Decide which passes count, and tell the tracker why the others do not.

    Args:
        tracker: What the hook feeds.
        component: The name it does so under.
        during: The phases that count.
    """

    def __init__(self, tracker: Any, component: str, during: Phases) -> None:
        self.tracker, self.component = tracker, component
        self.during = During(during, functools.partial(tracker.forget_counts, component))
        self.__qualname__ = type(tracker).__name__  # its name in reports

    def release(self) -> None:
        """Let another hook take its place: this one is off."""
        self.tracker.end_feeding(self.component)

    def _count_pass(self, training: bool, gradients: bool, which: Any) -> bool:
        """Count the pass ``which`` if its phase is wanted; return whether it is."""
        counts = self.during.count_forward(training, gradients, which)
        if not counts:
            self._note(functools.partial(_not_counted, self.during))
        return counts

    def _note(self, why: Callable[[], str]) -> None:
        self.tracker.note_nothing(self.component, why)


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
        if site is None:
            counts = self._count_pass(module.training, torch.is_grad_enabled(), object())
        else:
            counts = not site.recompute and self._count_pass(site.training, site.gradients, site.step)
        if not counts:
            return
        tensor = self._extracted(output)
        if isinstance(tensor, Tensor):
            self.tracker.update(self.component, tensor)
        else:
            self._note(lambda: _not_extracted(output, self.extract))

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
        grads = grad_input if self.of_input else grad_output
        grad = grads[0] if isinstance(grads, tuple) and grads else grads
        if not isinstance(grad, Tensor):
            self._note(lambda: _no_input_gradient(module, self.component) if self.of_input else _NO_OUTPUT_GRADIENT)
        elif self._count_pass(module.training if site is None else site.training, True, object()):
            # One dimension is one sample; to the tracker it would be ready sizes, which are not negative.
            self.tracker.update(self.component, grad.detach().abs() if grad.dim() == 1 else grad)


# -- gradients of parameters -----------------------------------------------------------------------------------


class ParameterFeeder(TrackerFeeder):
    """Feed a tracker with the gradients of a component's parameters, those of modules below it included.

    A backward hook can only read ``.grad``. Where a component is called twice in a pass, that is not there yet when the
    first of the calls is through; where micro-batches are accumulated, it is the sum of all so far. So it attaches
    itself to the parameters: a hook on the leaf is shown the gradient of each pass, whole and by itself.

    Args:
        tracker: What the hook feeds.
        component: The name it does so under.
        during: The phases that count.
        names: The parameters to count, by their names in the component; all of them if left out.
    """

    def __init__(self, tracker: Any, component: str, during: Phases, names: Set[str] | None = None) -> None:
        super().__init__(tracker, component, during)
        self.names = names

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any, *, site: Site | None = None) -> None:
        """Count the gradients as they are accumulated by now, where it is attached as a plain backward hook."""
        if self._count_pass(module.training if site is None else site.training, True, object()):
            for name, owner, key in _parameters_in(module):
                parameter = owner._parameters[key]
                if parameter is not None and isinstance(parameter.grad, Tensor):
                    self.tracker.update(self.component, f"{self.component}.{name}", parameter.grad)

    def attach_to(self, model: nn.Module, module: nn.Module) -> RemovableHandle:
        """Attach it to every parameter of ``module``, and to those that take their place later."""
        return _OnLeaves(self, model, module)

    def take(self, name: str, gradient: Tensor, *, training: bool) -> None:
        """Count the gradient of the parameter ``name`` in the backward pass that is running."""
        if self._count_pass(training, True, _torch.graph_task_id()):
            self.tracker.update(self.component, f"{self.component}.{name}", gradient)

    def note_without_parameters(self, are_frozen: bool) -> None:
        """Note a call of the component that has no parameter to train."""
        why = "none of its parameters requires a gradient" if are_frozen else "it has no parameters"
        self._note(lambda: f"{why}; hook a component that is trained")


class _OnLeaves(HandleSet):
    """Hold a feeder on the parameters of one module, and on those that take their place."""

    def __init__(self, feeder: ParameterFeeder, model: nn.Module, module: nn.Module) -> None:
        super().__init__()
        # Weak: a hook on a leaf is invisible to the garbage collector.
        self._feeder, self._model = feeder, weakref.ref(model)
        self._places = {
            name: (weakref.ref(owner), key)
            for name, owner, key in _parameters_in(module)
            if feeder.names is None or name in feeder.names
        }
        self._hooked: dict[str, tuple[int, HookHandle]] = {}
        """By name: the id of the parameter that has the hook, and its handle."""
        # Parameters are looked up before each forward: FSDP, load_state_dict(assign=True) and a plain assignment put
        # others in their place, and lazy ones have no shape until then.
        self.add(attach(model, module, self._follow, on="forward_pre", observe=True, name="FisherInformationState"))
        self._follow_all()

    def _follow(self, module: nn.Module, args: Any) -> None:
        self._follow_all()
        if not self._hooked:
            self._feeder.note_without_parameters(bool(self._places))

    def _follow_all(self) -> None:
        for name in self._places:
            parameter = self._parameter(name)
            if parameter is None or not parameter.requires_grad or not parameter.is_leaf or is_lazy(parameter):
                continue
            # By id: a weak reference would forbid torch.utils.swap_tensors. A new parameter with the id of a deleted
            # one has no hook yet: that went with the other.
            before = self._hooked.get(name)
            if before is None or before[0] != id(parameter) or not before[1].alive:
                if before is not None:
                    before[1].remove()
                hook = functools.partial(self._take, name)
                self._hooked[name] = id(parameter), attach_tensor(parameter, hook, observe=True, name=name)

    def _parameter(self, name: str) -> Tensor | None:
        owner, key = self._places[name]
        module = owner()
        return None if module is None else module._parameters.get(key)

    def _take(self, name: str, gradient: Tensor) -> None:
        parameter, model = self._parameter(name), self._model()
        if parameter is None or _accumulates(parameter):
            self._feeder.take(name, gradient, training=model is None or model.training)

    def remove(self, *, quiet: bool = False) -> None:
        """Remove the hook from all parameters."""
        super().remove(quiet=True)  # a module that is never called (nn.ModuleList) may well have gradients
        for _, handle in self._hooked.values():
            handle.remove()


def _accumulates(parameter: Tensor) -> bool:
    """Return whether the gradient goes into ``.grad``: one that ``torch.autograd.grad`` asks for does not."""
    try:
        return _torch.will_execute(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch raises this in autograd.grad()
        return False


def _parameters_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield, for every parameter in ``module``, its name without wrappers, its owner, and its key there."""
    seen: set[int] = set()
    for path, owner, *_ in walk(module):
        for key, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{path}.{key}" if path else key), owner, key


# -- why a pass gave nothing, and what to do about it -----------------------------------------------------------

_NO_OUTPUT_GRADIENT = "no gradient comes to its first output; hook a component whose first output the loss is made of"


def _not_counted(during: During) -> str:
    wanted, more = ", ".join(map(repr, sorted(during.phases))), during.in_words()
    return f"every pass so far was outside of during=({wanted}){f' ({more})' if more else ''}; name other phases there"


def _not_extracted(output: Any, extract: Callable[[Any], Any]) -> str:
    return (
        f"its output is {type_name(output)}, in which extractor={extract!r} finds no tensor; give extractor= the key "
        "of one, or a function from the output to it"
    )


def _no_input_gradient(module: nn.Module, component: str) -> str:
    relu = next((name for name, child in module.named_modules() if name and isinstance(child, nn.ReLU)), None)
    inside = "" if relu is None else f", such as its ReLU ({component + '.' + relu!r} in PolicyAutoBuilder.of(policy))"
    return (
        "its first input needs no gradient (it is data, or detached), so none comes out of it; hook a module further "
        f"in{inside}, or have the input require a gradient"
    )
