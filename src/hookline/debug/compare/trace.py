"""Write a trace of a model: what flows through its modules, in call order, so that two runs can be compared.

Users call `trace`. It puts hooks on by `_TraceHooks`, which number steps and calls by `_StepNumbers`, and hand every
tensor to a `TraceRecorder`. They are ordinary hooks of ``attach``, so compiled code calls them with real tensors too.
Specs and users make `trace_outputs`, which writes the same of outputs alone, as on a served model.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.debug.compare.key import KINDS, PARAMETERS
from hookline.debug.compare.recorder import Names, TraceMoment, TraceRecorder
from hookline.debug.compare.rows import RowTable
from hookline.debug.compare.trace_files import TraceWriter
from hookline.distributed.ranks import rank_count, this_rank
from hookline.errors import NoMatchError, OptionError
from hookline.factories.factory_hook import ByModule, Observer, read_options, tried_by
from hookline.factories.served_batch import running
from hookline.messages import suggest
from hookline.observe.tokens import current_tokens
from hookline.observe.watch.hooks import OptimizerSteps
from hookline.phases import phase
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.optimizers import checked_optimizer
from hookline.sites.parameters import select_parameters
from hookline.sites.targets import check_model, select
from hookline.sites.wrappers import unwrap
from hookline.tree import leaves
from hookline.when import StepSchedule

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookline.hook_types import Hook, Target
    from hookline.sites.hook_at_site import Site
    from hookline.sites.parameters import NamedParameter

_DEFAULT_KINDS: Final = ("output", "output_grad", "parameter", "param_grad")
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)
"""A number of bytes in words: ``2GB``, ``1.5 GiB``."""


def trace(
    model: nn.Module,
    targets: Target = "*",
    to: str | Path = "trace",
    *,
    kinds: str | Iterable[str] = _DEFAULT_KINDS,
    tensors: Names = False,
    budget: int | str | None = "1GB",
    step: str | Optimizer | Sequence[Optimizer] = "forward",
    every: StepSchedule | int = 1,
    exclude: Target = None,
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
        step: What a step is: ``"forward"``, one forward of the model; or an optimizer (or several), whose steps count
            and before whose steps gradients of parameters are read.
        every: Every how many steps to write, or a `StepSchedule`.
        exclude: Modules and parameters to leave out.

    Names are those of the model inside of wrappers (``torch.compile``, DDP, FSDP, …). What activation checkpointing
    repeats is written once.
    """
    check_model(model, targets)
    wanted = _checked_kinds(kinds)
    if isinstance(step, str) and step != "forward":
        raise OptionError(f"trace(step={step!r}): a step is 'forward' or an optimizer.")
    optimizers = [] if isinstance(step, str) else _checked_optimizers(step)
    limit, schedule, inner = bytes_of_budget(budget), StepSchedule.of(every), unwrap(model)
    modules, parameters = _chosen(inner, targets, exclude, wanted)
    head = {"kinds": list(wanted), "ranks": rank_count(), "model": type(inner).__name__, "torch": torch.__version__}
    recorder = TraceRecorder(TraceWriter(Path(to).absolute(), this_rank(), head), tensors, limit)
    hooks = _TraceHooks(inner, recorder, wanted, _StepNumbers(step == "forward", schedule), parameters)
    found = Trace(recorder, hooks, Path(to).absolute())
    try:
        hooks.put_on(modules)
        if optimizers:
            found._follow(optimizers)
        hooks.read_parameters()
        recorder.flush()
    except BaseException:
        found.remove()
        raise
    return found


def _checked_optimizers(given: Any) -> list[Optimizer]:
    """Return the optimizers whose steps count; raise if there are none, or one takes no hooks."""
    found = [checked_optimizer(each) for each in (given if isinstance(given, list | tuple) else [given])]
    if not found:
        raise OptionError("trace(step=[]): a step is 'forward' or an optimizer.")
    return found


def _checked_kinds(kinds: str | Iterable[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys([kinds] if isinstance(kinds, str) else kinds))
    unknown = [each for each in found if each not in KINDS]
    if unknown or not found:
        got = f"unknown kind {unknown[0]!r}{suggest(unknown[0], KINDS) or '.'}" if unknown else "no kind."
        raise OptionError(f"trace(kinds=...): {got} There are {', '.join(map(repr, KINDS))}.")
    return found


def bytes_of_budget(budget: int | str | None) -> int | None:
    """Return a budget in bytes: a number, a text such as ``"200MB"`` or ``"1.5 GiB"``, or None for no limit."""
    if budget is None or (type(budget) is int and budget > 0):
        return budget
    found = _SIZE.fullmatch(budget) if isinstance(budget, str) else None
    size = 0
    if found is not None:
        power = " kmgt".index((found[2] or " ").lower())  # k is 1, m is 2, …; 0 without a letter
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if not size:
        raise OptionError(f"budget={budget!r}: give a number of bytes, a text such as '200MB' or '1.5GiB', or None.")
    return size


def _chosen(
    model: nn.Module, targets: Target, exclude: Target, kinds: Sequence[str]
) -> tuple[list[nn.Module], list[NamedParameter]]:
    """Return the modules and parameters that ``targets`` names; raise if it names neither."""
    modules: list[nn.Module] = []
    parameters: list[NamedParameter] = []
    of_modules, of_parameters = ([kind for kind in kinds if (kind in PARAMETERS) is which] for which in (False, True))
    if of_modules:
        try:
            modules = [module for _, module in select(model, targets, exclude=exclude)]
        except NoMatchError:
            if not of_parameters:
                raise
    if of_parameters:
        try:
            parameters = select_parameters(model, targets, exclude=exclude, trained=False)
        except KeyError:
            if not modules:
                raise
    return modules, parameters


class Trace:
    """A trace that is being written.

    Recipe: ``trace = hookline.trace(model, to="run_a")``; it ends by ``trace.remove()``, or with a ``with`` block.
    """

    def __init__(self, recorder: TraceRecorder, hooks: _TraceHooks, path: Path) -> None:
        self.path = path
        """The folder it writes to."""
        self._recorder = recorder
        self._hooks = hooks
        self._steps: OptimizerSteps | None = None
        # The recorder does not refer to this object: what waits is written when it is deleted, or the process ends.
        self._finalizer = weakref.finalize(self, recorder.close)

    def _follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the steps of optimizers, which are inside no wrapper, be those of the trace."""
        self._hooks.optimizers = tuple(optimizers)
        self._steps = OptimizerSteps(list(optimizers), self._at_step)

    @property
    def records(self) -> int:
        """Return how many records were taken."""
        return self._recorder.records

    @property
    def bytes(self) -> int:
        """Return how many bytes were written."""
        return self._recorder.bytes

    def _at_step(self, optimizer: Optimizer) -> None:
        """Read the gradients of an optimizer that makes a step; the last of several ends the step."""
        self._hooks.read_gradients(optimizer)
        if optimizer is self._hooks.optimizers[-1] and phase() == "train":
            self._hooks.numbers.advance()
            self._recorder.end_part()

    def set_rows(self, rows: RowTable | Sequence[str] | None) -> None:
        """Say whose rows the next forwards have, so that another run in another order can be compared row by row.

        Recipe: ``trace.set_rows(["sample-7", "sample-3"])`` before the forward.

        Args:
            rows: A name for each sample of the batch; `padded_rows` or `packed_rows`, which tell tokens as well; None
                for nobody's.
        """
        if rows is not None and not isinstance(rows, RowTable):
            rows = RowTable("samples", tuple(map(str, rows)))
        self._hooks.rows = rows

    def note(self, text: str) -> None:
        """Write a sentence into the trace, for whoever reads it."""
        self._recorder.note(text)

    def flush(self) -> None:
        """Write what waits, now."""
        self._recorder.flush()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Write nothing and count no step for as long as the block lasts: ``with trace.paused(): evaluate()``."""
        self._hooks.numbers.paused += 1
        try:
            yield
        finally:
            self._hooks.numbers.paused -= 1

    def remove(self) -> None:
        """Take all hooks off, and complete the files; may be called again."""
        self._hooks.handles.remove(quiet=True)
        if self._steps is not None:
            self._steps.remove()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Trace {str(self.path)!r}: {self.records} records, {self.bytes:,} bytes>"


# -- steps and hooks --------------------------------------------------------------------------------------------------

_KEPT: Final = 256
"""Forwards whose gradients may still come."""


class _ForwardNumbers:
    """One forward of the model: the step it is in, whether that is traced, and the calls of sites before it."""

    __slots__ = ("before", "is_due", "step")

    def __init__(self, step: int, is_due: bool, before: dict[str, int]) -> None:
        self.step, self.is_due, self.before = step, is_due, before


class _StepNumbers:
    """Numbers steps, and calls within them.

    Args:
        by_forward: Whether each forward of the model begins a step; else `advance` does.
        schedule: Which steps are traced.
    """

    def __init__(self, by_forward: bool, schedule: StepSchedule) -> None:
        self.by_forward = by_forward
        self._schedule = schedule
        self._next = 0 if by_forward else 1
        self.paused = 0
        """How many ``paused()`` blocks are open."""
        self._calls: dict[str, int] = {}
        self.forwards: dict[int, _ForwardNumbers] = {}
        """The last forwards, by the step of their sites."""

    @property
    def step(self) -> int:
        """The step that is under way; before the first forward, the first."""
        return max(self._next - 1, 0)

    @property
    def is_due(self) -> bool:
        """Return whether the step under way is traced."""
        return not self.paused and self._schedule.is_active(self.step)

    def advance(self) -> None:
        """Begin the next step; while paused, there is none."""
        if not self.paused:
            self._next += 1
            self._calls.clear()

    def begin_forward(self, site: Site) -> None:
        """Begin the forward of a call; one that is paused is no step."""
        if self.by_forward:
            self.advance()
        self.forwards[site.step] = _ForwardNumbers(self.step, self.is_due, dict(self._calls))
        if len(self.forwards) > _KEPT:
            del self.forwards[next(iter(self.forwards))]

    def moment(self, site: Site) -> TraceMoment | None:
        """Return when a call is, or was; None if it is not traced."""
        forward = self.forwards.get(site.step)
        if forward is None or not forward.is_due or self.paused:
            return None
        return forward.step, forward.before.get(site.name, 0) + site.call

    def count(self, name: str, moment: TraceMoment) -> None:
        """Count a call of a site, for the forwards of this step that come after it."""
        step, call = moment
        if step == max(self._next - 1, 0) and self._calls.get(name, 0) <= call:
            self._calls[name] = call + 1


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


class _TraceHooks:
    """The hooks of one trace."""

    def __init__(
        self, model: nn.Module, recorder: TraceRecorder, kinds: Sequence[str], numbers: _StepNumbers,
        parameters: Sequence[NamedParameter],
    ) -> None:  # fmt: skip
        self._model = model
        self._recorder = recorder
        self._kinds = frozenset(kinds)
        self._takes_outputs = "output" in kinds
        self._parameters = [_TracedParameter(item) for item in parameters]
        self.numbers = numbers
        self.rows: RowTable | None = None
        """What the user has said of the rows of the forwards to come."""
        self.handles = HandleSet()
        self.optimizers: tuple[Any, ...] = ()
        """Those whose steps are the steps of the trace."""

    def put_on(self, modules: list[nn.Module]) -> None:
        """Put the hooks on."""
        by_pass = bool(self._parameters) and "param_grad" in self._kinds and self.numbers.by_forward
        hooks: list[tuple[Hook, str, list[nn.Module], bool]] = [
            (self.take_input, "forward_pre", modules, "input" in self._kinds),
            # Calls are counted here, for gradients as well.
            (self.take_output, "forward", modules or [self._model], bool(modules) or by_pass),
            (self.take_output_grad, "backward_pre", modules, "output_grad" in self._kinds),
            (self.take_input_grad, "backward", modules, "input_grad" in self._kinds),
            (self.begin_pass, "backward_pre", [self._model], by_pass),
        ]
        for hook, on, where, is_wanted in hooks:
            if is_wanted and where:
                with_kwargs = on == "forward_pre"
                self.handles.add(
                    attach(self._model, where, hook, on=on, observe=True, name="trace", with_kwargs=with_kwargs)
                )

    # -- hooks -------------------------------------------------------------------------------------------

    def take_output(self, module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
        """Count a call, and take what the module returns."""
        moment = self._entered(site)
        if moment is None:
            return
        self.numbers.count(site.name, moment)
        if self._takes_outputs:
            self._take_leaves(site.name, "output", output, moment, self.rows or rows_of(args))
            if not site.name:
                self._recorder.end_pass() if site.gradients else self._recorder.end_part()  # nothing else comes of it

    def take_input(self, module: nn.Module, args: Any, kwargs: Any, *, site: Site) -> None:
        """Take what a module is called with."""
        moment = self._entered(site)
        if moment is not None:
            rows = self.rows or rows_of(args)
            self._take_leaves(site.name, "input", tuple(args), moment, rows)
            self._take_leaves(site.name, "input", {"kwargs": dict(kwargs)}, moment, rows)

    def _entered(self, site: Site) -> TraceMoment | None:
        """Return when a call is; None if it is not traced, or repeats one that was.

        The first call of a forward begins it, and writes what those before have left, and their backward passes: a
        process that is killed loses the forward under way at most, whatever ends a step.
        """
        if site.recompute:
            return None
        if site.step not in self.numbers.forwards:
            self._recorder.end_part()
            self.numbers.begin_forward(site)
        return self.numbers.moment(site)

    def take_output_grad(self, module: nn.Module, grads: Any, *, site: Site) -> None:
        """Take the gradients of what a module has returned."""
        self._take_grads(site, "output_grad", grads, site.outputs)

    def take_input_grad(self, module: nn.Module, grad_input: Any, grad_output: Any, *, site: Site) -> None:
        """Take the gradients of what a module was called with."""
        self._take_grads(site, "input_grad", grad_input, site.inputs)

    def _take_grads(self, site: Site, kind: str, grads: Any, names: tuple[str, ...]) -> None:
        if site.step not in self.numbers.forwards:
            text = f"Gradients of forwards before the last {_KEPT} were left out: their steps are forgotten"
            self._recorder.tell(text, is_left_out=True)
        moment = self.numbers.moment(site)
        if moment is None:
            return
        for index, grad in enumerate(grads):
            if isinstance(grad, Tensor):
                self._recorder.take(site.name, kind, names[index] if index < len(names) else str(index), grad, moment)

    def _take_leaves(self, name: str, kind: str, value: Any, moment: TraceMoment, rows: RowTable | None) -> None:
        if isinstance(value, Tensor):
            self._recorder.take(name, kind, "", value, moment, rows)
            return
        for leaf, tensor in leaves(value):
            if isinstance(tensor, Tensor):
                self._recorder.take(name, kind, leaf, tensor, moment, rows)

    # -- parameters --------------------------------------------------------------------------------------

    def read_parameters(self) -> None:
        """Take the parameters as they are now."""
        if "parameter" in self._kinds:
            for each in self._parameters:
                value = each.current()
                if value is not None:
                    self._recorder.take(each.name, "parameter", "", value, (self.numbers.step, 0))

    def read_gradients(self, of: Any = None) -> None:
        """Take the gradients of parameters as they are now.

        At the step of one of several optimizers, of its own alone; those that no optimizer has go with the last.
        """
        if "param_grad" not in self._kinds or not self.numbers.is_due:
            return
        owners = {
            id(parameter): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for each in self._parameters:
            value = each.current()
            is_read = of is None or owners.get(id(value), self.optimizers[-1]) is of
            if is_read and value is not None and value.grad is not None:
                self._recorder.take(each.name, "param_grad", "", value.grad, (self.numbers.step, 0))

    def begin_pass(self, module: nn.Module, grads: Any) -> None:
        """Have gradients of parameters read at the end of a backward pass, when they are as final as they get."""
        # Queued from the end of the pass, so that it comes after DDP, which averages gradients there. A pass inside of
        # this one, as reentrant checkpointing makes them, ends before.
        _torch.queue_end_of_backward(lambda: _torch.queue_end_of_backward(self._end_pass))

    def _end_pass(self) -> None:
        self.read_gradients()
        self._recorder.end_part()


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


# -- a trace by a spec ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceOptions:
    """The config of ``trace_outputs``."""

    folder: Path
    tensors: Any = False
    budget: Any = "1GB"
    requests: tuple[str, ...] | None = None


def _try(config: Mapping[str, Any]) -> None:
    """Check a config; write nothing."""
    bytes_of_budget(read_options("trace_outputs", TraceOptions, config).budget)


@tried_by(_try)
def trace_outputs(config: Mapping[str, Any] | None = None) -> TraceOutputs:
    """Make a hook that writes outputs to a trace: fingerprints, and tensors where asked.

    Recipe::

        {
            "target_modules": ["model.layers.#"],
            "hook_factory": "hookline.debug:trace_outputs",
            "observe": true,
            "config": {"folder": "served", "requests": ["exp-a-*"], "tensors": true, "budget": "200MB"},
        }

    Each forward is a step. Whose rows are in it comes from the engine that runs it, or from a batch object among the
    inputs of a module, so that a trace of a served model can be compared with one of a trainer, row by row.

    Args:
        config: ``folder``: where to; the only option that has to be given. ``tensors``, ``budget``: as
            in ``trace``. ``requests``: names or patterns; only forwards with such a request are written.
    """
    options = read_options("trace_outputs", TraceOptions, config)
    budget = bytes_of_budget(options.budget)
    head = {"kinds": ["output"], "ranks": rank_count(), "torch": torch.__version__}
    recorder = TraceRecorder(TraceWriter(options.folder, this_rank(), head), options.tensors, budget)
    return TraceOutputs(recorder, options)


class _ForwardClock:
    """Counts the forwards that a hook sees, and the calls of modules in each.

    A site tells the forward; an engine's table of rows does; without either, a forward begins when the module that was
    seen first is called again.
    """

    def __init__(self) -> None:
        self.forward = -1
        self._key: Any = None
        self._first: str | None = None
        self._calls: dict[str, int] = {}

    def count(self, name: str, site: Site | None) -> int:
        """Count a call; return how many there were before in this forward."""
        if self._is_new(name, site):
            self.forward += 1
            self._calls = {}
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return call

    def _is_new(self, name: str, site: Site | None) -> bool:
        key: Any = current_tokens()
        if key is None and site is not None and site.step >= 0:
            key = site.step
        if key is not None:
            is_new = not (self._key is key or (isinstance(key, int) and self._key == key))
            self._key = key
            return is_new
        if self._first is None:
            self._first = name
        return name == self._first


class TraceOutputs(Observer):
    """Trace all modules that one ``trace_outputs`` is on; ``close()`` or the end of the process writes the rest."""

    name = "trace_outputs"

    def __init__(self, recorder: TraceRecorder, options: TraceOptions) -> None:
        self._recorder = recorder
        self._requests = options.requests
        self._names: ByModule[str] = ByModule(lambda name: name)
        self._clock = _ForwardClock()
        self._finalizer = weakref.finalize(self, recorder.close)

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Take the output of a module."""
        if _torch.in_recomputation():  # it was taken the first time
            return
        name = site.name if site is not None else self._names.of(module, site)
        before = self._clock.forward
        call = self._clock.count(name, site)
        step = self._clock.forward
        if step != before:
            self._recorder.end_part()
        rows = rows_of(inputs)
        if not self._is_asked_for(rows):
            return
        moment = step, call
        for leaf, tensor in leaves(output):
            if isinstance(tensor, Tensor):
                self._recorder.take(name, "output", leaf, tensor, moment, rows)

    def _is_asked_for(self, rows: RowTable | None) -> bool:
        if self._requests is None:
            return True
        names = () if rows is None else rows.requests
        return any(fnmatchcase(each, pattern) for each in names for pattern in self._requests)

    def to_metrics(self) -> dict[str, float]:
        """Return how many records and bytes there are."""
        return {"records": float(self._recorder.records), "bytes": float(self._recorder.bytes)}

    def close(self) -> None:
        """Write what waits, and complete the trace."""
        self._finalizer()


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
_torch.leave_to_python(TraceOutputs.__call__)
