"""Write a trace of a model: what flows through its modules, in call order, so that two runs can be compared.

Users call `trace`. It puts hooks on by `TraceSites`, which number steps, forwards and calls, and hand every tensor to a
`TraceRecorder`. They are ordinary hooks of ``attach``, so compiled code calls them with real tensors as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.debug.compare.key import KINDS
from hookline.debug.compare.recorder import TraceMoment, TraceRecorder
from hookline.debug.compare.rows import RowTable
from hookline.debug.compare.trace_files import TraceWriter
from hookline.distributed.ranks import rank_count, this_rank
from hookline.errors import NoMatchError, OptionError
from hookline.factories.served_batch import running
from hookline.messages import nearest_names, parse_size, suggest
from hookline.observe.watch.steps import OptimizerSteps
from hookline.phases import phase
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.optimizers import unwrap_optimizer
from hookline.sites.parameters import select_parameters
from hookline.sites.targets import check_model, name_matcher, select, without_scripted
from hookline.sites.wrappers import unwrap
from hookline.tree import leaves
from hookline.when import StepSchedule

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookline.hook_types import Target
    from hookline.sites.parameters import NamedParameter
    from hookline.sites.site_info import Site
    from hookline.sites.targets import Named

__all__ = [
    "Trace", "TraceSites", "TraceStepNumbers", "bytes_of_budget", "checked_trace_kinds", "dims_finder", "matching",
    "rows_of", "trace",
]  # fmt: skip

_DEFAULT_KINDS: Final = ("output", "output_grad", "parameter", "param_grad")


def trace(
    model: nn.Module,
    targets: Target = "*",
    to: str | Path = "trace",
    *,
    kinds: str | Iterable[str] = _DEFAULT_KINDS,
    tensors: bool | str | Sequence[str] = False,
    budget: int | str | None = "1GB",
    step: str | Optimizer | Sequence[Optimizer] = "forward",
    every: StepSchedule | int = 1,
    exclude: Target = None,
    dims: str | Mapping[str, str] | None = None,
) -> Trace:
    """Write what flows through a model to a folder, as fingerprints, and where asked as tensors.

    Recipe::

        with hookline.trace(model, to="run_a", step=optimizer):
            for batch in data:
                train_step(batch)
        print(hookline.debug.read_trace("run_a"))

    The run stays the run it would have been, bit for bit. Records are written when a step ends and when the next
    forward begins; those on a device stay there for 5 seconds, or 4,096 of them, as fetching them waits for it.
    Whatever kills the process, what was written can be read.

    Args:
        model: The model.
        targets: Which modules (as in ``attach``), and with them the parameters below. All by default.
        to: The folder; it must not hold a trace yet. Each rank of a distributed run has a folder of its own in it.
        kinds: What to write: ``"output"`` and ``"input"`` of modules, ``"output_grad"`` and ``"input_grad"``, the
            gradients of these, ``"parameter"``, the parameters when the trace begins, and ``"param_grad"``, their
            gradients at each step. By default all but the inputs and their gradients.
        tensors: Whether to store tensors too: True for all, or names or globs of sites, such as ``"layers.#.mlp"``.
        budget: How many bytes may be written: a number, ``"200MB"``, or None for any. Tensors stop first.
        step: What a step is: ``"forward"``, one forward of the model; an optimizer (or several), whose steps count and
            before whose steps gradients of parameters are read; or ``"manual"``, what lies between calls of
            ``trace.step()``.
        every: Every how many steps to write, or a `StepSchedule`.
        exclude: Modules and parameters to leave out.
        dims: What the dimensions of tensors are, such as ``"b s h[tp] d"``: a text for all, or one by glob of sites.

    Names are those of the model inside of wrappers (``torch.compile``, DDP, FSDP, …). A forward that activation
    checkpointing repeats is marked as such, and is no further call.
    """
    check_model(model, targets)
    wanted = checked_trace_kinds("trace(kinds=...)", kinds)
    if isinstance(step, str) and step not in ("forward", "manual"):
        raise OptionError(f"trace(step={step!r}): a step is 'forward', 'manual', or an optimizer.")
    limit = bytes_of_budget(budget)
    schedule, dims_of, wants = StepSchedule.of(every), dims_finder(dims), matching(tensors)
    head = {"kinds": list(wanted), "ranks": rank_count(), "model": type(unwrap(model)).__name__,
            "torch": torch.__version__}  # fmt: skip
    writer = TraceWriter(Path(to).absolute(), this_rank(), head)
    recorder = TraceRecorder(
        writer,
        budget=limit,
        wants_tensor=wants,
        dims_of=dims_of,
    )
    found = Trace(unwrap(model), recorder, writer.folder, wanted, TraceStepNumbers(step == "forward", schedule))
    try:
        found._begin(targets, exclude, None if isinstance(step, str) else step, tensors)
    except BaseException:
        found.remove()
        if not found.records:
            writer.discard()
        raise
    return found


class Trace:
    """A trace that is being written.

    Recipe: ``trace = hookline.trace(model, to="run_a")``; it ends by ``trace.remove()``, or with a ``with`` block.
    """

    def __init__(
        self, model: nn.Module, recorder: TraceRecorder, path: Path, kinds: Sequence[str], numbers: TraceStepNumbers
    ) -> None:
        self.path = path
        """The folder it writes to."""
        self._recorder = recorder
        self._sites = TraceSites(model, recorder, kinds, numbers)
        self._steps: OptimizerSteps | None = None
        self._numbers = numbers
        # The recorder does not refer to this object: what waits is written when it is deleted, or the process ends.
        self._finalizer = weakref.finalize(self, recorder.close)

    def _begin(
        self, targets: Target, exclude: Target, optimizer: Any, tensors: bool | str | Sequence[str] = False
    ) -> None:
        if optimizer is not None:
            self._steps = OptimizerSteps(optimizer, self._at_step)
            given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
            self._sites.optimizers = tuple(map(unwrap_optimizer, given))
        self._sites.put_on(targets, exclude)
        self._tell_of_unknown(tensors)
        self._sites.read_parameters()
        self._recorder.flush()

    def _tell_of_unknown(self, tensors: bool | str | Sequence[str]) -> None:
        """Warn of names of ``tensors=`` that nothing answers to; on a stage of a pipeline that may be right."""
        patterns = [] if isinstance(tensors, bool) else [tensors] if isinstance(tensors, str) else tensors
        names = self._sites.names
        for each in patterns:
            if not any(map(name_matcher(each), names)):
                near = ", ".join(repr(name or "(model)") for name in nearest_names(each, names))
                self._recorder.warn(
                    f"trace(tensors={each!r}): no site that is traced has such a name, so no tensor is stored for it; "
                    f"nearest: {near}."
                )

    @property
    def records(self) -> int:
        """Return how many records were taken."""
        return self._recorder.records

    @property
    def bytes(self) -> int:
        """Return how many bytes were written."""
        return self._recorder.bytes

    def step(self) -> None:
        """End a step; call it after the backward pass, before gradients are set to zero."""
        if self._steps is not None:
            raise OptionError("The optimizer makes the steps of this trace; call step(), or give step=, not both.")
        if self._numbers.by_forward:
            before = self._numbers.count_by_hand()
            if before:
                self._recorder.note(
                    f"Steps 0 to {before} are the forwards before the first trace.step(); step='manual' avoids that."
                )
        self._sites.read_gradients()
        self._advance()

    def _at_step(self, optimizer: Optimizer) -> None:
        """Read the gradients of an optimizer that makes a step; the last of several ends the step."""
        self._sites.read_gradients(optimizer)
        if optimizer is self._sites.optimizers[-1] and phase() == "train":
            self._advance()

    def _advance(self) -> None:
        self._numbers.advance()
        self._recorder.end_part()

    def set_rows(
        self,
        requests: Sequence[str] | None,
        *,
        starts: Sequence[int] = (),
        lengths: Sequence[int] = (),
        positions: Sequence[int] = (),
    ) -> None:
        """Say whose rows the next forwards have, so that another run in another order can be compared row by row.

        Recipe: ``trace.set_rows(["sample-7", "sample-3"])`` before the forward. With ``lengths`` the tokens of requests
        are known as well: in rows that are padded, if ``starts`` are given, else one request after the other.

        Args:
            requests: One name for each sample of the batch; None for nobody's.
            starts: The first real column of each row.
            lengths: How many tokens each has in the forward.
            positions: The position of the first of them in its sequence; 0 by default.
        """
        if requests is None:
            self._sites.rows = None
            return
        count = len(requests)
        given = {"starts": starts, "lengths": lengths, "positions": positions}
        wrong = [name for name, values in given.items() if values and len(values) != count]
        if wrong or (starts and not lengths):
            what = f"{wrong[0]} has {len(given[wrong[0]])} entries" if wrong else "starts= needs lengths="
            raise OptionError(f"set_rows() of {count} requests: {what}; give one entry for each request.")
        layout = "samples" if not lengths else "padded" if starts else "packed"
        firsts = tuple(positions) or (0,) * count
        self._sites.rows = RowTable(layout, tuple(map(str, requests)), tuple(starts), tuple(lengths), firsts)

    def note(self, text: str) -> None:
        """Write a sentence into the trace, for whoever reads it."""
        self._recorder.note(text)

    def flush(self) -> None:
        """Write what waits, now."""
        self._recorder.flush()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Write nothing and count no step for as long as the block lasts: ``with trace.paused(): evaluate()``."""
        self._numbers.paused += 1
        try:
            yield
        finally:
            self._numbers.paused -= 1

    def remove(self) -> None:
        """Take all hooks off, and complete the files; may be called again."""
        self._sites.handles.remove(quiet=True)
        if self._steps is not None:
            self._steps.remove()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Trace {str(self.path)!r}: {self.records} records, {self.bytes:,} bytes>"


def checked_trace_kinds(where: str, kinds: str | Iterable[str]) -> tuple[str, ...]:
    """Return the kinds; raise unless all are known."""
    found = tuple(dict.fromkeys([kinds] if isinstance(kinds, str) else kinds))
    unknown = [each for each in found if each not in KINDS]
    if unknown or not found:
        got = f"unknown kind {unknown[0]!r}{suggest(unknown[0], KINDS) or '.'}" if unknown else "no kind."
        raise OptionError(f"{where}: {got} There are {', '.join(map(repr, KINDS))}.")
    return found


def bytes_of_budget(budget: int | str | None) -> int | None:
    """Return a budget in bytes: a number, a text such as ``"200MB"`` or ``"1.5 GiB"``, or None for no limit."""
    if budget is None or (type(budget) is int and budget > 0):
        return budget
    found = parse_size(budget) if isinstance(budget, str) else None
    if not found:
        raise OptionError(f"budget={budget!r}: give a number of bytes, a text such as '200MB' or '1.5GiB', or None.")
    return found


def matching(names: bool | str | Sequence[str]) -> Callable[[str], bool]:
    """Return a test of site names: True for all, or names and globs."""
    if isinstance(names, bool):
        return lambda site: names
    tests = [name_matcher(each) for each in ([names] if isinstance(names, str) else names)]
    known: dict[str, bool] = {}

    def wants(site: str) -> bool:
        found = known.get(site)
        if found is None:
            found = known[site] = any(test(site) for test in tests)
        return found

    return wants


def dims_finder(dims: str | Mapping[str, str] | None) -> Callable[[str, str], str | None]:
    """Return what finds the dimensions of a site; a single text is for what flows, not for parameters."""
    if dims is None:
        return lambda site, kind: None
    if isinstance(dims, str):
        return lambda site, kind: None if kind in ("parameter", "param_grad") else dims
    tests = [(name_matcher(pattern), text) for pattern, text in dims.items()]
    return lambda site, kind: next((text for test, text in tests if test(site)), None)


# -- steps and hooks --------------------------------------------------------------------------------------------------

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
