"""Put the hooks of a trace on modules and parameters, and number steps, forwards and calls.

`Trace` makes one `TraceSites`. Its hooks hand every tensor to the `TraceRecorder`. They are ordinary hooks of
``attach``, so compiled code calls them with real tensors as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.debug.compare.recorder import TraceMoment, TraceRecorder
from hookline.debug.compare.rows import RowTable
from hookline.errors import NoMatchError
from hookline.factories.served_batch import running
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.parameters import select_parameters
from hookline.sites.targets import select, without_scripted
from hookline.tree import leaves
from hookline.when import StepSchedule

if TYPE_CHECKING:
    from hookline.hook_types import Target
    from hookline.sites.parameters import NamedParameter
    from hookline.sites.site_info import Site
    from hookline.sites.targets import Named

__all__ = ["TraceSites", "TraceStepNumbers", "rows_of"]

_KEPT: Final = 256
"""Forwards whose gradients may still come."""


class _ForwardNumbers:
    """One forward of the model: the step it is in, which of its forwards it is, and the calls of sites before it."""

    __slots__ = ("before", "is_due", "micro_batch", "step")

    def __init__(self, step: int, micro_batch: int, is_due: bool, before: dict[str, int]) -> None:
        self.step, self.micro_batch, self.is_due, self.before = step, micro_batch, is_due, before


class TraceStepNumbers:
    """Numbers steps, and forwards and calls within them.

    Args:
        by_forward: Whether each forward of the model begins a step; else `advance` does.
        schedule: Which steps are traced.
    """

    def __init__(self, by_forward: bool, schedule: StepSchedule) -> None:
        self.by_forward = by_forward
        self._schedule = schedule
        self.step = -1 if by_forward else 0
        """The step that is under way."""
        self.paused = 0
        """How many ``paused()`` blocks are open."""
        self._micro_batches = 0
        self._calls: dict[str, int] = {}
        self._forwards: dict[int, _ForwardNumbers] = {}

    @property
    def is_due(self) -> bool:
        """Return whether the step under way is traced."""
        return not self.paused and self._schedule.is_active(max(self.step, 0))

    def advance(self) -> None:
        """Begin the next step; while paused, there is none."""
        if not self.paused:
            self.step += 1
            self._micro_batches = 0
            self._calls.clear()

    def count_by_hand(self) -> int:
        """Let `advance` begin steps from now on; return how many forwards were taken for steps of their own."""
        self.by_forward = False
        self.step = max(self.step, 0)
        return self.step

    def knows(self, site: Site) -> bool:
        """Return whether the forward of a call has begun, and is not forgotten."""
        return site.step in self._forwards

    def begin_forward(self, site: Site) -> None:
        """Begin the forward of a call; one that is paused is no step and no micro-batch."""
        if self.by_forward:
            self.advance()
        begun = _ForwardNumbers(max(self.step, 0), self._micro_batches, self.is_due, dict(self._calls))
        self._micro_batches += not self.paused
        self._forwards[site.step] = begun
        if len(self._forwards) > _KEPT:
            del self._forwards[next(iter(self._forwards))]

    def moment(self, site: Site) -> TraceMoment | None:
        """Return when a call is, or was; None if it is not traced."""
        forward = self._forwards.get(site.step)
        if forward is None or not forward.is_due or self.paused:
            return None
        call = forward.before.get(site.name, 0) + site.call
        return TraceMoment(forward.step, call, forward.micro_batch, site.recompute)

    def count(self, site: Site, moment: TraceMoment) -> None:
        """Count a call, for the forwards of this step that come after it."""
        if not moment.recompute and moment.step == max(self.step, 0):
            self._calls[site.name] = max(self._calls.get(site.name, 0), moment.call + 1)


class _TracedParameter:
    """A parameter by its module and name: FSDP2 or ``load_state_dict(assign=True)`` may put another one there."""

    __slots__ = ("_key", "_module", "name")

    def __init__(self, item: NamedParameter) -> None:
        self.name = item.name
        self._module = weakref.ref(item.module)
        self._key = item.name.rpartition(".")[2]

    def current(self) -> Tensor | None:
        module = self._module()
        found = None if module is None else dict(module._parameters).get(self._key)
        return None if found is None or is_lazy(found) else found


class TraceSites:
    """The hooks of one trace."""

    def __init__(
        self, model: nn.Module, recorder: TraceRecorder, kinds: Sequence[str], numbers: TraceStepNumbers
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._kinds = frozenset(kinds)
        self.numbers = numbers
        self.rows: RowTable | None = None
        """What the user has said of the rows of the forwards to come."""
        self.handles = HandleSet()
        self.parameters: list[_TracedParameter] = []
        self.names: list[str] = []
        """The sites and parameters that hooks are on."""
        self._has_told = False
        self.optimizers: tuple[Any, ...] = ()
        """Those whose steps are the steps of the trace."""

    def put_on(self, target: Target, exclude: Target) -> None:
        """Select modules and parameters, and put the hooks on."""
        of_modules = self._kinds & {"output", "input", "output_grad", "input_grad"}
        of_parameters = self._kinds & {"parameter", "param_grad"}
        chosen = self._choose_modules(target, exclude, required=not of_parameters) if of_modules else []
        modules = [module for _, module in chosen]
        named: list[NamedParameter] = []
        if of_parameters:
            named = self._choose_parameters(target, exclude, required=not modules)
            self.parameters = [_TracedParameter(item) for item in named]
        self.names = [*(name for name, _ in chosen), *(item.name for item in named)]
        self._hook(modules)
        if named and "param_grad" in self._kinds and self.numbers.by_forward:
            self._add(self._begin_pass, "backward_pre", [self._model])
            if not modules:  # forwards are steps, and nothing else counts them
                self._add(self.count_call, "forward", [self._model])

    def _choose_modules(self, target: Target, exclude: Target, *, required: bool) -> list[Named]:
        try:
            return without_scripted(select(self._model, target, exclude=exclude), target)
        except NoMatchError:
            if required:
                raise
            return []

    def _choose_parameters(self, target: Target, exclude: Target, *, required: bool) -> list[NamedParameter]:
        try:
            return select_parameters(self._model, target, exclude=exclude, trained=False)
        except KeyError:
            if required:
                raise
            return []

    def _hook(self, modules: list[nn.Module]) -> None:
        if not modules:
            return
        if "input" in self._kinds:
            self._add(self.take_input, "forward_pre", modules, with_kwargs=True)
        # Calls are counted here, for gradients as well.
        self._add(self.take_output if "output" in self._kinds else self.count_call, "forward", modules)
        if "output_grad" in self._kinds:
            self._add(self.take_output_grad, "backward_pre", modules)
        if "input_grad" in self._kinds:
            self._add(self.take_input_grad, "backward", modules)

    def _add(self, hook: Any, on: str, modules: list[nn.Module], *, with_kwargs: bool = False) -> None:
        handle = attach(self._model, modules, hook, on=on, observe=True, name="trace", with_kwargs=with_kwargs)
        self.handles.add(handle)

    # -- hooks -------------------------------------------------------------------------------------------

    def take_output(self, module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
        """Take what a module returns."""
        moment = self._counted(site)
        if moment is None:
            return
        rows = self.rows or rows_of(args)
        if isinstance(output, Tensor):
            self._recorder.take(site.name, "output", "", output, moment, rows)
        else:
            self._take_leaves(site.name, "output", output, moment, rows)
        if not site.name and not site.gradients:  # nothing else comes of this forward
            self._recorder.end_part()

    def count_call(self, module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
        """Count a call whose output is not asked for."""
        self._counted(site)

    def _counted(self, site: Site) -> TraceMoment | None:
        self._enter(site)
        moment = self.numbers.moment(site)
        if moment is not None:
            self.numbers.count(site, moment)
        return moment

    def take_input(self, module: nn.Module, args: Any, kwargs: Any, *, site: Site) -> None:
        """Take what a module is called with."""
        self._enter(site)
        moment = self.numbers.moment(site)
        if moment is not None:
            rows = self.rows or rows_of(args)
            self._take_leaves(site.name, "input", tuple(args), moment, rows)
            if kwargs:
                self._take_leaves(site.name, "input", {"kwargs": dict(kwargs)}, moment, rows)

    def _enter(self, site: Site) -> None:
        """Begin a forward with its first call, and write what those before have left, and their backward passes.

        A process that is killed loses the forward under way at most, whatever ends a step.
        """
        if not site.recompute and not self.numbers.knows(site):
            self._recorder.end_part()
            self.numbers.begin_forward(site)

    def take_output_grad(self, module: nn.Module, grads: Any, *, site: Site) -> None:
        """Take the gradients of what a module has returned."""
        self._take_grads(site, "output_grad", grads, site.outputs)

    def take_input_grad(self, module: nn.Module, grad_input: Any, grad_output: Any, *, site: Site) -> None:
        """Take the gradients of what a module was called with."""
        self._take_grads(site, "input_grad", grad_input, site.inputs)

    def _take_grads(self, site: Site, kind: str, grads: Any, names: tuple[str, ...]) -> None:
        if not self.numbers.knows(site):
            text = f"Gradients of forwards before the last {_KEPT} were left out: their steps are forgotten"
            self._recorder.tell(text, is_left_out=True)
        moment = self.numbers.moment(site)
        if moment is None:
            return
        for index, grad in enumerate(grads):
            if isinstance(grad, Tensor):
                leaf = names[index] if index < len(names) else str(index)
                self._recorder.take(site.name, kind, leaf, grad, moment._replace(recompute=False))

    def _take_leaves(self, name: str, kind: str, value: Any, moment: TraceMoment, rows: RowTable | None) -> None:
        for leaf, tensor in leaves(value):
            if isinstance(tensor, Tensor):
                self._recorder.take(name, kind, leaf, tensor, moment, rows)

    # -- parameters --------------------------------------------------------------------------------------

    def read_parameters(self) -> None:
        """Take the parameters as they are now."""
        if "parameter" in self._kinds:
            for each in self.parameters:
                value = each.current()
                if value is not None:
                    self._recorder.take(each.name, "parameter", "", value, TraceMoment(max(self.numbers.step, 0), 0))

    def read_gradients(self, of: Any = None) -> None:
        """Take the gradients of parameters as they are now; of those of one optimizer alone, if given."""
        if "param_grad" not in self._kinds or not self.numbers.is_due:
            return
        own = None if of is None else _ids_of(of)
        if own is not None:
            self._tell_of_others()
        moment = TraceMoment(max(self.numbers.step, 0), 0)
        for each in self.parameters:
            value = each.current()
            if value is not None and value.grad is not None and (own is None or id(value) in own):
                self._recorder.take(each.name, "param_grad", "", value.grad, moment)

    def _tell_of_others(self) -> None:
        """Say once which parameters have gradients that are not read, as none of the given optimizers has them."""
        if self._has_told:
            return
        own = set[int]().union(*map(_ids_of, self.optimizers))
        left_out = [each.name for each in self.parameters if _has_gradient(each.current(), own)]
        if left_out:
            self._has_told = True
            self._recorder.tell(
                f"param_grad of {len(left_out)} parameter(s) ({', '.join(left_out[:3])}{', …' * (len(left_out) > 3)}) "
                "was left out: no optimizer of step= has them. Give all optimizers: step=[first, second]",
                is_left_out=True,
            )

    def _begin_pass(self, module: nn.Module, grads: Any) -> None:
        # Queued from the end of the pass, so that it comes after DDP, which averages gradients there. A pass inside of
        # this one, as reentrant checkpointing makes them, ends before.
        _torch.queue_end_of_backward(lambda: _torch.queue_end_of_backward(self._end_pass))

    def _end_pass(self) -> None:
        """Take gradients at the end of a backward pass, when they are as final as they get without an optimizer."""
        if self.numbers.by_forward:
            self.read_gradients()
            self._recorder.end_part()


def _ids_of(optimizer: Any) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def _has_gradient(parameter: Tensor | None, besides: set[int]) -> bool:
    return parameter is not None and parameter.grad is not None and id(parameter) not in besides


# -- whose rows are in a forward ------------------------------------------------------------------------------------


def rows_of(inputs: Any) -> RowTable | None:
    """Return whose rows the running forward has; None if nobody says, or only a device knows."""
    tokens = running(inputs)
    if tokens is None or not tokens.has_names:
        return None
    firsts = tuple(first for first in tokens.firsts if first is not None)
    if len(firsts) < len(tokens.firsts):
        return None
    if tokens.width is None:
        return RowTable("packed", tokens.requests, (), tokens.lengths, firsts)
    starts = tuple(tokens.width - length for length in tokens.lengths)
    return RowTable("padded", tokens.requests, starts, tokens.lengths, firsts)
