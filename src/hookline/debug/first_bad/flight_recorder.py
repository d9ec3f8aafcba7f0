"""Record the last steps of a run, and write them when something happens: NaN, a loss spike, an exception, a signal.

A lifecycle hook for the loops and run files, and a context manager (`recording`) for any other loop. It listens to the
steps of the repeated blocks of the model, and writes by `write_flight`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
from torch import Tensor, nn

from hookline.debug.first_bad.bad_operation import count_batches, describe_batch, find_ids, name_batch, name_first
from hookline.distributed.ranks import this_rank
from hookline.errors import HooklineError, OptionError
from hookline.files import replace_file
from hookline.guard.rng import cuda_states, numpy_state, set_cuda_states, set_numpy_state, set_state
from hookline.lifecycle.hook import TrainingHook
from hookline.observe.watch.monitor import StepListener, StepRows, listen
from hookline.observe.watch.row import BAD, COUNT, FIRES, SQUARES, SUM
from hookline.phases import phase
from hookline.plain import to_plain
from hookline.report.recent_changes import LossHistory
from hookline.report.report_runs import FLIGHT_FILE, FLIGHT_FORMAT, FLIGHT_VERSION
from hookline.sites.optimizers import attach_optimizer, unwrap_optimizer
from hookline.sites.wrappers import clean_modules
from hookline.tables import ShownAsTable, Table
from hookline.when import HookPoint

if TYPE_CHECKING:
    from types import FrameType

    from hookline.hook_types import Target
    from hookline.lifecycle.context import RunDataContext
    from hookline.training.run import RunStep

__all__ = ["Flight", "FlightRecorder", "Streams", "read_flight", "write_flight"]

logger = logging.getLogger("hookline.debug.flight_recorder")


class FlightRecorder(TrainingHook):
    """Record the last steps; write them to a file when something happens.

    Recipe: ``HookManager(hooks=[hookline.debug.FlightRecorder()])``; ``hookline run EXPERIMENT --hooks
    flight_recorder``; in any other loop::

        with hookline.debug.FlightRecorder(to="flight.json").recording(model, optimizer) as recorder:
            for batch in loader:
                recorder.note(loss=train_step(batch), batch=batch)
        print(hookline.debug.read_flight("flight.json"))

    A step leaves its loss, learning rate, batch, random streams, and mean, norm and NaN of what the blocks of the model
    return and of its gradients. Nothing waits for the device. The report of the run shows the file as "the minutes
    before".

    Args:
        to: The file; by default ``flight_recorder.json`` beside the log of the run, or in its folder. Rank 1 of several
            writes ``flight_recorder.rank_1.json`` beside it, and so on.
        keep: How many steps are kept.
        target: Which modules; by default the elements of the longest ``ModuleList`` of the model, else ``Sequential``.
        signals: Signals at which the file is written, ``["SIGTERM"]``; then they do what they did before. None by
            default: a script may have handlers of its own.
    """

    name = "flight_recorder"
    description = "keep the last steps, and write them at NaN, a loss spike, an exception or a signal"
    hook_points = frozenset({HookPoint.POST_STEP})
    wraps_steps = True
    pure = True
    debug = True

    def __init__(
        self,
        *,
        to: str | Path | None = None,
        keep: int = 64,
        target: Target = None,
        signals: Sequence[str] = (),
    ) -> None:
        if keep < 1:
            raise OptionError(f"keep= is a number of steps, 1 or more; got {keep!r}.")
        self._to = None if to is None else Path(to)
        self._folder: Path | None = None
        self._target = target
        self._losses = LossHistory()
        self._signals = [signal.Signals[name] for name in ([signals] if isinstance(signals, str) else signals)]
        self._before: dict[int, Any] = {}
        self._steps: deque[_FlightStep] = deque(maxlen=keep)
        self._listener: StepListener | None = None
        self._streams: Streams | None = None
        self._handle: Any = None
        self._noted: dict[str, Any] = {}
        self._wraps = False
        self._last_bad = self._written_bad = -2
        self._has_failed = False
        self.written: list[str] = []
        """Why the file was written, each time."""

    # -- the run -----------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """Where the file is written, of rank 1 and so on beside that of rank 0; None if nothing says where."""
        folder = log_folder(self.manager) or self._folder
        path = self._to or (None if folder is None else folder / FLIGHT_FILE)
        rank = this_rank()
        return path if path is None or not rank else path.with_name(f"{path.stem}.rank_{rank}{path.suffix}")

    def set_run_context(self, **context: Any) -> None:
        """Learn where the run is kept."""
        if context.get("run_dir") is not None:
            self._folder = Path(context["run_dir"])

    def start(self, model: nn.Module) -> None:
        """Begin to record; a model that cannot be watched is no reason to end a run."""
        try:
            self._begin(model)
        except HooklineError as error:
            logger.warning("no flight recorder: %s", error)

    def _begin(self, model: nn.Module) -> None:
        target = blocks_of(model) if self._target is None else self._target
        self._listener = listen(model, target, on=("forward", "backward"), stats=("norm",))
        self._streams = Streams()
        self._wraps = False
        self._take_signals()

    def finish(self) -> None:
        """Judge the last steps; take everything off."""
        self._give_signals_back()
        if self._listener is not None:
            self._take(self._listener.arrived(wait=True))
            self._listener.remove(quiet=True)
        self._listener = None

    def reset(self) -> None:
        """Forget the last run."""
        self._steps.clear()
        self.written = []
        self._losses = LossHistory()
        self._last_bad = self._written_bad = -2
        self._has_failed = False

    def around_step(self, step: RunStep, batch: Any) -> Any:
        """Make a step, and record it."""
        self._wraps = True
        streams, run = Streams(), step.run
        try:
            result = step(batch)
        except BaseException as error:
            self._add(run.step, run.epoch, batch, run.batch_idx, run.lr, None, streams)
            self.write(f"{type(error).__name__}: {error}")
            raise
        self._add(run.step, run.epoch, batch, run.batch_idx, run.lr, result.loss, streams)
        return result

    def compute(self, ctx: RunDataContext) -> None:
        """Record a step of a loop that is only followed."""
        if not self._wraps and self._listener is not None:
            self._add(ctx.step or 0, ctx.epoch, ctx.batch_data, ctx.batch_idx, ctx.lr, ctx.raw("loss"), self._streams)
            self._streams = Streams()

    # -- any other loop ----------------------------------------------------------------------------------------

    def recording(self, model: nn.Module, optimizer: Any) -> Self:
        """Begin to record a loop of your own, in which a step of ``optimizer`` ends a step; for ``with``."""
        if self.path is None:
            raise OptionError("The recorder does not know where to write: give it a file, FlightRecorder(to=...).")
        self._begin(model)
        inner = unwrap_optimizer(optimizer)
        self._noted = {}
        self._handle = attach_optimizer(inner, self._end_step, on="step_post", name=self.name)
        return self

    def note(self, *, loss: Any = None, batch: Any = None, ids: Any = None) -> None:
        """Say what the loss and the batch of the step were that has just ended, or of the one that is under way."""
        if self._listener is not None and self._steps and self._steps[-1].is_open:
            self._steps[-1].note(loss, batch, ids)
            self._listener.note_loss(self._steps[-1].number, loss)
            self._take(self._listener.arrived())
            if self._steps[-1].number == self._written_bad:
                self._dump(self.written[-1])  # now with the batch
        else:
            self._noted = {"loss": loss, "batch": batch, "ids": ids}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.write(f"{type(error).__name__}: {error}")
        if self._handle is not None:
            self._handle.remove(quiet=True)
            self._handle = None
        self.finish()

    def _end_step(self, optimizer: Any, *args: Any) -> None:
        if phase() == "intervention":
            return
        noted, self._noted = self._noted, {}
        number = self._steps[-1].number + 1 if self._steps else 0
        lr = optimizer.param_groups[0]["lr"]
        self._add(number, None, noted.get("batch"), None, lr, noted.get("loss"), self._streams, ids=noted.get("ids"))
        self._steps[-1].is_open = not noted
        self._streams = Streams()

    # -- recording ---------------------------------------------------------------------------------------------

    def _add(
        self, number: int, epoch: int | None, batch: Any, index: int | None, lr: Any, loss: Any,
        streams: Streams | None, *, ids: Any = None,
    ) -> None:  # fmt: skip
        if self._listener is None:
            return
        ids = name_batch(find_ids(batch) if ids is None else ids, index, epoch, count_batches(batch))
        step = _FlightStep(number, epoch, describe_batch(batch, ids), lr, loss, streams)
        if self._steps:
            self._steps[-1].is_open = False
        self._steps.append(step)
        self._listener.end_step(number, loss if isinstance(loss, Tensor | float) else None)
        self._take(self._listener.arrived())

    def _take(self, arrived: list[StepRows]) -> None:
        """Give steps their numbers, and write if they are bad."""
        by_number = {step.number: step for step in self._steps}
        for rows in arrived:
            step = by_number.get(rows.number)
            if step is None:
                continue
            first = step.take(rows)
            if first:
                is_first, self._last_bad = step.number > self._last_bad + 1, step.number
                if is_first and self.write(f"NaN or infinity at {first} in step {step.number}") is not None:
                    self._written_bad = step.number
            if rows.loss is not None and self._losses.add(step.loss_value)[0]:  # else it comes by itself, later
                self.write(f"a loss spike, {step.loss_value:.4g} in step {step.number}")

    def write(self, reason: str) -> Path | None:
        """Write the last steps to the file now; return where it is."""
        path = self._dump(reason)
        if path is not None:
            self.written.append(reason)
            logger.warning("the last %d steps are in %s, because of %s", len(self._steps), path, reason)
        return path

    def _dump(self, reason: str) -> Path | None:
        path = self.path
        if path is None:
            return None
        if self._listener is not None:
            by_number = {step.number: step for step in self._steps}
            for rows in self._listener.coming():  # left there for `_take`: this may run in a signal handler
                if rows.number in by_number:
                    by_number[rows.number].take(rows)
        try:
            write_flight(path, reason, [(step.facts(), step.streams) for step in self._steps])
        except OSError as error:  # a full disk, a folder that is gone: no reason to end the run
            if not self._has_failed:
                logger.warning(
                    "the last steps cannot be written to %s, because of %s; the run goes on, and this is said once. "
                    "Next: make room there, or give FlightRecorder(to=...) another file",
                    path,
                    error,
                )
            self._has_failed = True
            return None
        return path

    # -- signals -----------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        for number in self._signals:
            before = signal.getsignal(number)
            if before is not None and before is not signal.SIG_IGN:  # None: set by another language
                self._before[number] = before
                signal.signal(number, self._receive)

    def _give_signals_back(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, before)
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if os.getpid() == self._process:  # not in a worker of a loader
            self.write(signal.Signals(number).name)
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, before)
            signal.raise_signal(number)


class _FlightStep:
    """One step that is kept."""

    __slots__ = ("bad", "batch", "epoch", "is_open", "loss", "lr", "number", "statistics", "streams", "time")

    def __init__(self, number: int, epoch: int | None, batch: str, lr: Any, loss: Any, streams: Streams | None) -> None:
        self.number, self.epoch, self.batch, self.lr = number, epoch, batch, lr
        self.loss = loss.detach() if isinstance(loss, Tensor) else loss
        self.streams = streams
        self.time = time.time()
        self.statistics: dict[str, dict[str, float]] = {}
        self.bad: list[str] = []
        """The places that were not finite, by their first bad calls."""
        self.is_open = False

    @property
    def loss_value(self) -> float | None:
        """The loss as a number; waits for the device."""
        return None if self.loss is None else float(self.loss)

    def note(self, loss: Any, batch: Any, ids: Any) -> None:
        """Take what is known only after the step."""
        self.loss = loss.detach() if isinstance(loss, Tensor) else loss
        self.batch = describe_batch(batch, find_ids(batch) if ids is None else ids)
        self.is_open = False

    def take(self, rows: StepRows) -> str:
        """Take the statistics that have arrived; return the first place that was not finite, ``"loss"`` or nothing."""
        for place, row in rows.of_places():
            count, fires = max(row[COUNT], 1.0), max(row[FIRES], 1.0)
            norm = math.sqrt(row[SQUARES] / fires) if row[SQUARES] >= 0 else math.nan
            self.statistics[place.label] = {"mean": float(row[SUM] / count), "norm": norm, "bad": float(row[BAD])}
        calls = rows.bad_places()
        bad = [place.label for place in calls.places]
        self.bad = bad or self.bad
        first = name_first(bad, calls.num_candidates) if bad else ""
        if rows.loss is not None:
            self.loss = rows.loss
            if not math.isfinite(float(rows.loss)):
                first = first or "loss"
        return first

    def facts(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "step": self.number,
            "epoch": self.epoch,
            "time": self.time,
            "loss": self.loss_value,
            "lr": None if self.lr is None else float(self.lr),
            "batch": self.batch,
            "bad": ", ".join(self.bad[:3]) + (f" and {len(self.bad) - 3} more" if len(self.bad) > 3 else ""),
            "statistics": self.statistics,
        }


def log_folder(manager: Any) -> Path | None:
    """Return the folder in which the log of a manager lies; None without one."""
    log = None if manager is None else manager.fan_out.log
    return None if log is None else log.parent


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the elements of its longest ``ModuleList``, else ``Sequential``."""
    for kind in (nn.ModuleList, nn.Sequential):
        lists = [list(each.children()) for _, each in clean_modules(model) if isinstance(each, kind)]
        if any(lists):
            return max(lists, key=len)
    return list(model.children()) or [model]


# -- the file --------------------------------------------------------------------------------------------------------


class Streams:
    """The random streams of torch, Python and NumPy at one moment; taken without waiting for a device."""

    __slots__ = ("cuda", "numpy", "python", "torch")

    def __init__(self) -> None:
        self.torch = torch.default_generator.get_state()
        self.cuda = cuda_states()
        self.python = random.getstate()
        self.numpy = numpy_state()

    def to_bytes(self) -> dict[str, bytes]:
        """Return the states as bytes, by name."""
        found = {"torch": self.torch.numpy().tobytes()}
        found |= {f"cuda:{index}": state.numpy().tobytes() for index, state in enumerate(self.cuda or ())}
        version, keys, gauss = self.python
        found["python"] = json.dumps([version, list(keys), gauss]).encode()
        if self.numpy["bit_generator"] == "MT19937":
            state = {
                **self.numpy,
                "state": {"key": self.numpy["state"]["key"].tolist(), "pos": self.numpy["state"]["pos"]},
            }
            found["numpy"] = json.dumps(state, default=int).encode()
        return found


def set_streams(states: Mapping[str, bytes]) -> None:
    """Set the random streams to what `Streams.to_bytes` returned."""
    for name, state in states.items():
        if name == "python":
            version, keys, gauss = json.loads(state)
            random.setstate((version, tuple(keys), gauss))
        elif name == "numpy":
            found = json.loads(state)
            found["state"]["key"] = np.array(found["state"]["key"], dtype=np.uint32)
            set_numpy_state(found)
        elif name == "torch":
            set_state(torch.default_generator, torch.frombuffer(bytearray(state), dtype=torch.uint8))
    if torch.cuda.is_available():
        of_devices = [state for name, state in sorted(states.items()) if name.startswith("cuda:")]
        set_cuda_states(torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in of_devices)


def write_flight(path: Path, reason: str, steps: list[tuple[dict[str, Any], Streams | None]]) -> None:
    """Write steps, each with its random streams, and why they are written."""
    streams: dict[str, str] = {}
    rows = []
    for facts, taken in steps:
        keys = {}
        for name, state in {} if taken is None else taken.to_bytes().items():
            key = hashlib.blake2b(state, digest_size=8).hexdigest()
            streams.setdefault(key, base64.b64encode(state).decode())
            keys[name] = key
        rows.append({**facts, "random": keys})
    found = {"format": FLIGHT_FORMAT, "version": FLIGHT_VERSION, "reason": reason, "steps": rows, "streams": streams}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(to_plain(found), allow_nan=False))


@dataclass(frozen=True)
class Flight(ShownAsTable):
    """The last steps of a run, as a recorder wrote them; prints as a table.

    Recipe: ``flight = hookline.debug.read_flight("runs/x/flight_recorder.json")``; then ``print(flight)``,
    ``flight.steps[-1]["statistics"]``, ``flight.set_random(-1)``.
    """

    reason: str
    """Why it was written."""
    steps: list[dict[str, Any]]
    """Each step: its number, epoch, time, loss, learning rate, batch, statistics by place."""
    streams: dict[str, str]

    def set_random(self, index: int) -> None:
        """Set the random streams to the beginning of the step at ``index`` of ``steps``."""
        keys = self.steps[index].get("random", {})
        set_streams({name: base64.b64decode(self.streams[key]) for name, key in keys.items()})

    def _table(self) -> Table:
        rows = [[str(step.get(name, "")) for name in _COLUMNS] for step in self.steps]
        return Table(_COLUMNS, rows, numbers=(0, 1, 2, 3), title=f"written because of {self.reason}", rule=False)


_COLUMNS: Final = ("step", "epoch", "loss", "lr", "batch", "bad")


def read_flight(path: str | Path) -> Flight:
    """Read what a `FlightRecorder` wrote.

    Recipe: ``print(hookline.debug.read_flight("runs/mod_arithmetic/random/flight_recorder.json"))``
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"{str(path)!r} is no file of a flight recorder: {error}.") from None
    if not isinstance(found, dict) or found.get("format") != FLIGHT_FORMAT:
        raise OptionError(f"{str(path)!r} is no file of a flight recorder; FlightRecorder writes one.")
    version = found.get("version")
    if version != FLIGHT_VERSION:
        raise OptionError(f"{str(path)!r} has version {version!r}, and this hookline reads {FLIGHT_VERSION}.")
    return Flight(found["reason"], found["steps"], found["streams"])
