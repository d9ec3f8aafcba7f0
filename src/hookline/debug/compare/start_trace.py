"""Write a trace of a model: what flows through its modules, in call order, so that two runs can be compared.

Users call `trace`. It puts hooks on by `TraceSites`, which hand tensors to a `TraceRecorder`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import nn

from hookline.debug.compare.files import TraceWriter
from hookline.debug.compare.key import KINDS
from hookline.debug.compare.recorder import TraceRecorder
from hookline.debug.compare.rows import RowTable
from hookline.debug.compare.sites import TraceSites, TraceStepNumbers
from hookline.distributed.ranks import rank_count, this_rank
from hookline.errors import OptionError
from hookline.messages import nearest_names, parse_size, suggest
from hookline.observe.watch.steps import OptimizerSteps
from hookline.sites.optimizers import unwrap_optimizer
from hookline.sites.targets import check_model, name_matcher
from hookline.sites.wrappers import unwrap
from hookline.when import StepSchedule

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookline.hook_types import Target

__all__ = ["Trace", "bytes_of_budget", "checked_trace_kinds", "dims_finder", "matching", "trace"]

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
            self._steps = OptimizerSteps(optimizer, self._sites.read_gradients, self._advance)
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
