"""Run a step several times from one state and compare the bits: does it repeat, and where does it first not?

Users call `replay_check`. It saves the run by a `Guard`, runs the step operator by operator, and keeps one number for
each result, made of its bits. The order of operators is the order of calls, backward and optimizer included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hookline.debug.first_bad.operator_places import OperatorPlace, OperatorPlaces
from hookline.debug.first_bad.run_optimizers import JoinedOptimizers, join_optimizers
from hookline.errors import GuardError, OptionError
from hookline.guard.guard import Guard
from hookline.guard.rng import RandomStates
from hookline.guard.snapshot import Snapshot, roots_of
from hookline.phases import in_phase
from hookline.sites import _torch
from hookline.sites.targets import check_model
from hookline.tables import ShownAsTable, Table

__all__ = ["Replay", "replay_check"]

_UNFILLED: Final = ("empty", "new_empty", "resize_")
_MULTIPLIER: Final = 6364136223846793005
"""Of Knuth's generator: spreads the bits of positions over 64."""


def replay_check(
    step_fn: Callable[..., Any],
    model: nn.Module,
    optimizer: Any = None,
    *args: Any,
    times: int = 3,
    scheduler: Any = None,
    scaler: Any = None,
    loader: Any = None,
    operators: bool = True,
) -> Replay:
    """Run a step several times from one state, and compare the bits of everything that it computes.

    Recipe::

        print(hookline.debug.replay_check(train_step, model, optimizer, batch))

    Afterwards the run is as it was before, random streams included. A step that does not repeat draws from a stream
    that nobody saved, uses operators that add up in any order, or runs on a machine that computes wrong.

    Args:
        step_fn: ``step_fn(*args)`` makes one step.
        model: The model.
        optimizer: What trains it; a list of all optimizers where there are several.
        args: What the step is called with: the batch.
        times: How often it is run, 2 or more.
        scheduler: The scheduler, if the step moves it.
        scaler: The ``GradScaler``, if there is one.
        loader: The loader, if the step reads from it.
        operators: Compare every operator, with compiled code running eagerly. False compares what the step leaves
            behind, and runs it as it is.
    """
    check_model(model, None)
    if not isinstance(times, int) or times < 2:
        raise OptionError(f"times= is how often the step is run, 2 or more; got {times!r}.")
    parts = (model, join_optimizers(optimizer), scheduler, scaler)
    guard = Guard(*parts, loader=loader)
    snapshot = Snapshot(roots_of(*parts, loader))
    snapshot.take("all", gradients=True, batch=args)
    guard.save(["trains"], batch=args)
    runs: list[list[_Mark]] = []
    try:
        with in_phase("intervention"), guard.protecting("replay check"):
            random = RandomStates()
            for _ in range(times):
                snapshot.restore_or_raise("A step that was run again", gradients=True, versions=False)
                random.restore()
                runs.append(_run_again(step_fn, args, model, parts, operators=operators))
    finally:
        guard.release()
    return _compare(runs)


class _Mark(NamedTuple):
    """One result of a run: where it was made, and a number made of its bits."""

    operator: str
    place: OperatorPlace | None
    bits: int


@dataclass(frozen=True)
class Replay(ShownAsTable):
    """What came of running a step several times; true if all runs were equal."""

    times: int
    """How often the step was run."""
    compared: int
    """How many results of each run were compared."""
    equal: bool
    """Whether all runs had the same bits everywhere."""
    operator: str = ""
    """The first operator whose result differs; ``"parameter 0.weight"`` where only the end was compared."""
    where: str = ""
    """Where it is: ``"forward of 'layers.3'"``."""
    source: str = ""
    """The line of code that called it."""
    number: int = -1
    """How many results before it were equal."""
    run: int = -1
    """The first run that differs from run 0."""

    def __bool__(self) -> bool:
        return self.equal

    def _table(self) -> Table:
        if self.equal:
            return Table(title=f"{self.times} runs of the step are equal, bit for bit, in {self.compared} results")
        article = "" if self.where == "outside of the model" else "in the "
        at = f", {article}{self.where}" if self.where else ""
        title = f"run {self.run} of {self.times} differs from run 0 first at {self.operator}{at}"
        foot = (f"{self.number} results before it are equal", *((f"at {self.source}",) if self.source else ()))
        return Table(title=title, foot=foot)


def _run_again(
    step_fn: Callable[..., Any], args: Any, model: nn.Module, parts: tuple[Any, ...], *, operators: bool
) -> list[_Mark]:
    """Run the step; return its marks in the order of calls, then those of what it leaves behind."""
    if not operators:
        result = step_fn(*args)
        return list(_left_behind(result, model, parts[1]))
    recorder = _BitRecorder(model)
    with torch.compiler.set_stance("force_eager"), recorder:
        result = step_fn(*args)
    return [*recorder.marks, *_left_behind(result, model, parts[1])]


def _left_behind(result: Any, model: nn.Module, optimizer: Any) -> Iterator[_Mark]:
    if isinstance(result, Tensor):
        yield _Mark("the result of the step", None, _bits_of(result))
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield _Mark(f"the gradient of {name}", None, _bits_of(parameter.grad))
        yield _Mark(f"parameter {name}", None, _bits_of(parameter))
    for name, buffer in model.named_buffers():
        yield _Mark(f"buffer {name}", None, _bits_of(buffer))
    for each in optimizer.optimizers if isinstance(optimizer, JoinedOptimizers) else (optimizer,):
        for parameter, state in getattr(each, "state", {}).items():
            for key, value in state.items() if isinstance(parameter, Tensor) else ():
                if isinstance(value, Tensor):
                    yield _Mark(f"{key} of the optimizer", None, _bits_of(value))


def _compare(runs: list[list[_Mark]]) -> Replay:
    first = runs[0]
    found: tuple[int, int] | None = None
    for number, run in enumerate(runs[1:], 1):
        same = zip(first, run, strict=False)
        at = next((i for i, (a, b) in enumerate(same) if (a.operator, a.bits) != (b.operator, b.bits)), None)
        if at is None and len(run) != len(first):
            at = min(len(run), len(first))
        if at is not None and (found is None or at < found[0]):
            found = at, number
    if found is None:
        return Replay(len(runs), len(first), equal=True)
    at, number = found
    mark = (first if at < len(first) else runs[number])[at]
    place = mark.place
    where = "" if place is None else place.where + (f" of {place.module!r}" if place.module else "")
    source = "" if place is None else place.source
    return Replay(len(runs), len(first), False, mark.operator, where, source, at, number)


class _BitRecorder(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep a number of the bits of every result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = OperatorPlaces(model, _run_again.__code__)
        self.marks: list[_Mark] = []

    def __enter__(self) -> Any:
        self._places.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._places.__exit__(*exc_info)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self._places.of_operator(str(func))
        result = func(*args, **(kwargs or {}))
        if not str(func._schema.name).rpartition("::")[2].startswith(_UNFILLED):
            for tensor in result if isinstance(result, list | tuple) else (result,):
                if isinstance(tensor, Tensor):
                    self.marks.append(_Mark(str(func), place, _bits_of(tensor)))
        return result


def _bits_of(tensor: Tensor) -> int:
    """Return a number of 64 bits that changes with every bit of a tensor, as far as 64 bits can."""
    local = _torch.local_tensor(tensor)
    if local is None or local.device.type == "meta" or local.layout is not torch.strided or not local.numel():
        return 0
    try:
        raw = local.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError) as error:  # quantized and other layouts
        raise GuardError(f"The bits of a {local.dtype} tensor cannot be compared: {error}") from None
    bytes_left = raw.numel() % 4
    words = raw[: raw.numel() - bytes_left].view(torch.int32).long() if raw.numel() >= 4 else raw.new_empty(0).long()
    words = torch.cat([words, raw[raw.numel() - bytes_left :].long()])
    positions = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64)
    return int(((words + positions) * (positions * 2 + 1) * _MULTIPLIER).sum())
