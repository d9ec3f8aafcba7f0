"""Feed trackers: the hooks that hand the tensors of one component to its tracker.

``builders`` and the analyses make them. None changes anything. A value that cannot be counted (a tuple, a missing key,
no gradient) is not counted, and the tracker is told the reason for its warning. Where several hooks feed one tracker
with one component, only the first of them counts a pass.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch
from torch import Tensor, nn

from hookline.errors import HooklineWarning
from hookline.lifecycle.run_phase import During, Phases
from hookline.messages import caller_stacklevel, type_name
from hookline.metta.component_tracker import ComponentTracker
from hookline.sites import _torch
from hookline.sites.kinds import Kind
from hookline.sites.modules.module_hooks import existing_hooks
from hookline.sites.site_info import Site
from hookline.sites.tree import main_tensor

__all__ = ["ActivationFeeder", "GradientFeeder", "TrackerFeeder", "claim_backward"]


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
        self.during = During(during, self._forget)
        self.__qualname__ = type(tracker).__name__  # its name in reports

    def _forget(self) -> None:
        self.tracker.forget_counts(self.component)

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
        _begin_call(self.tracker, self.component, module, self)
        if (site is not None and site.recompute) or not self._count_forward(module, site):
            self._note(_not_counted, self.during)
            return
        tensor = self._extracted(output)
        if not isinstance(tensor, Tensor):
            self._note(_not_extracted, output, self.extract)
            return
        main = main_tensor(output)  # a function may extract another tensor each time
        if _claim_forward(self.tracker, self.component, module, self, tensor if main is None else main):
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
        grads = grad_input if self.of_input else grad_output
        grad = grads[0] if isinstance(grads, tuple) and grads else grads
        if not isinstance(grad, Tensor):
            self._note(*((_no_input_gradient, module, self.component) if self.of_input else (_no_output_gradient,)))
        elif not self._count_backward(module, site):
            self._note(_not_counted, self.during)
        # With the module: policies that share a tracker may have components of the same name.
        elif claim_backward(self.tracker, (self.component, id(module)), self):
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


# -- one count per pass, however many hooks feed the same tracker ------------------------------------------------
#
# A tracker may be registered twice for a component; two hooks then fire in each call, one after the other, and the
# second has to notice. Hooks are told apart by id, not counted, so that any of them may be removed while the others go
# on. Modules are told apart too: policies that share a tracker may have components of the same name.


class _Passes:
    """Remember which hook has shown one tracker which pass."""

    def __init__(self) -> None:
        self.last: dict[Hashable, tuple[Any, int]] = {}
        """By component, module and thread: the output that was counted last, and the hook that counted it."""
        self.fired: OrderedDict[int, dict[Hashable, dict[int, int]]] = OrderedDict()
        """By backward pass and place: how often each hook has fired."""


_PASSES: Final[weakref.WeakKeyDictionary[Any, _Passes]] = weakref.WeakKeyDictionary()
_MOST_THREADS: Final = 4096
_MOST_PASSES: Final = 64
"""More backward passes than that do not run at once."""


def _passes_of(tracker: Any) -> _Passes:
    passes = _PASSES.get(tracker)
    return _PASSES.setdefault(tracker, _Passes()) if passes is None else passes


def _call_key(component: str, module: nn.Module) -> Hashable:
    return component, id(module), threading.get_ident()


def _begin_call(tracker: Any, component: str, module: nn.Module, hook: object) -> None:
    """Forget what ``hook`` counted itself: that was an earlier call, though it may be the very same tensor."""
    counted, key = _passes_of(tracker).last, _call_key(component, module)
    last = counted.get(key)
    if last is not None and last[1] == id(hook):
        del counted[key]


def _claim_forward(tracker: Any, component: str, module: nn.Module, hook: object, output: Tensor) -> bool:
    """Count this call for ``hook``; return False if another hook has shown the tracker ``output`` already."""
    counted, key = _passes_of(tracker).last, _call_key(component, module)
    last = counted.get(key)
    if last is not None and _is_same(last[0], output) and _is_attached(module, last[1], hook):
        return False
    if len(counted) > _MOST_THREADS:
        counted.clear()  # threads come and go
    # With a weak reference around, a parameter could not be swapped; it lives long, so its id will do.
    counted[key] = id(output) if isinstance(output, nn.Parameter) else weakref.ref(output), id(hook)
    return True


def _is_same(last: Any, output: Tensor) -> bool:
    return last == id(output) if isinstance(last, int) else last() is output


def _is_attached(module: nn.Module, other: int, hook: object) -> bool:
    """Return whether the hook with the id ``other`` is still on ``module``; a removed one has not seen this call."""
    hooks = existing_hooks(module)
    ours = () if hooks is None else hooks.hooks_of_kind(Kind.FORWARD)
    on = {id(entry.hook) for entry in ours} | {id(each) for each in module._forward_hooks.values()}
    return other in on or id(hook) not in on  # a replica of DataParallel does not show its hooks


def claim_backward(tracker: Any, place: Hashable, hook: object) -> bool:
    """Count this firing of ``hook``; return False if another has fired as often at ``place`` in this backward pass.

    A component that was called several times fires several times. Gradients cannot be compared instead: a weak
    reference to what becomes a ``.grad`` would forbid ``torch.utils.swap_tensors``.
    """
    task = _torch.graph_task_id()
    if task == -1:
        return True  # called by hand
    passes = _passes_of(tracker).fired
    fired = passes.setdefault(task, {}).setdefault(place, defaultdict(int))
    fired[id(hook)] += 1
    while len(passes) > _MOST_PASSES:
        passes.popitem(last=False)
    return all(count < fired[id(hook)] for other, count in fired.items() if other != id(hook))
