"""``activation_stats`` and ``nan_alarm``: statistics of outputs while a model answers, by the engine of ``watch``.

Specs and users make them; ``probe`` derives from their classes. In inference mode torch does not say
whether a tensor was changed in place, so an output cannot be noted and read later, as ``watch`` does in training. A
launch for each takes the host 140 µs next to an H200, more than many a layer has to do when it decodes; a copy takes
10. So small outputs on a GPU are copied (`Copies`), and those of a forward are reduced together; larger ones are worth
a launch of their own. On a CPU each is reduced in its call. Compiled code hands the outputs of all modules over by one
operator, and they are reduced together.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline.factories.factory_hook import ByModule, Observer, read_options, tried_by
from hookline.factories.served_batch import output_tensor
from hookline.observe.tokens import current_tokens
from hookline.observe.watch.engine import StatsEngine, WatchedPlace
from hookline.observe.watch.graph import hand_over_late
from hookline.observe.watch.pending import Streams, limit_of
from hookline.observe.watch.row import BAD, INF, NAN, Layout, as_metrics, table_of
from hookline.sites import _torch
from hookline.sites.compiled.op_schemas import Summary
from hookline.sites.hook_at_site import PerSiteHook
from hookline.tree import main_of

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.compiled.op_schemas import Found, Share
    from hookline.sites.hook_at_site import Site

logger = logging.getLogger("hookline.factories.activation_stats")
alarm_logger = logging.getLogger("hookline.factories.nan_alarm")

_READ_AT_ONCE: Final = ("cpu", "mps", "meta")
"""Devices that the engine reads at once, as they do not run behind the host."""
_SHARE: Final = 16
"""Of what `limit_of` gives, copies take one part in so many at most: 1/1024 of the GPU's memory, 140 MiB on an H200."""
_SMALL_SHARE: Final = 256
"""Of that, an output has one part in so many at most: 560 KiB on an H200, a batch of 64 tokens of width 4096."""


@dataclass(slots=True, eq=False)
class StreamedModule:
    """Hold the row of one module, and count its calls."""

    name: str
    watched: WatchedPlace
    copies: Copies | None = None
    """What copies its outputs, if it may."""
    calls: int = 0
    was_logged: bool = False
    """Whether an alarm has told of it."""


Gathered: TypeAlias = list[tuple[StreamedModule, Tensor]]
"""Outputs of compiled code that are reduced together, before it goes on and uses their memory again."""


class Copies:
    """Copy small outputs on a GPU, one of each module, and reduce them together. Threads may share it.

    An output may be changed in place right after the call. Its copy lies where the one of the last forward lay, so the
    table of addresses is on the device already, and the host makes two launches a forward.
    """

    def __init__(self, engine: StatsEngine, device: torch.device) -> None:
        self._engine = engine
        self._limit = limit_of(device) // _SHARE
        self._streams = Streams(device)
        self._stream = self._streams.now()
        """The stream that copies and reduces."""
        self._buffers: dict[StreamedModule, Tensor] = {}
        self._waiting: dict[StreamedModule, Tensor] = {}
        self._launch: tuple[list[StreamedModule], Callable[[], None]] = [], lambda: None
        """Whose copies were reduced last, and the call that does it again."""
        self._lock = threading.Lock()

    def take(self, module: StreamedModule, tensor: Tensor) -> bool:
        """Copy an output; return False if that cannot be done."""
        if (
            type(tensor) is not Tensor
            or not tensor.is_inference()
            or (_torch.transforms_active() and _torch.is_wrapped(tensor))
        ):
            return False
        with self._lock:
            stream = self._streams.now()
            if stream and _torch.capturing():  # CUDA records no graph on the stream of number 0: asking takes 2 µs
                return False
            if stream != self._stream:
                self._follow(stream)
            buffer = self._buffers.get(module)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype is not tensor.dtype:
                buffer = self._new_buffer(module, tensor)
            elif module in self._waiting:
                self._reduce()
            if buffer is not None:
                self._waiting[module] = buffer.copy_(tensor)
            return buffer is not None

    def flush(self) -> None:
        """Reduce all copies; the current stream waits for that."""
        with self._lock:
            if not _torch.capturing():  # it would become part of the graph, and be done at each replay
                self._reduce()
                self._follow(self._streams.now())

    def forget(self) -> None:
        """Drop all copies."""
        with self._lock:
            self._waiting = {}

    def _new_buffer(self, module: StreamedModule, tensor: Tensor) -> Tensor | None:
        """Return memory for outputs like ``tensor``, if there is enough."""
        if self._buffers.pop(module, None) is not None:
            self._reduce()
            self._launch = [], lambda: None  # it has the addresses
        held, size = sum(each.nbytes for each in self._buffers.values()), tensor.nbytes
        if (
            not size
            or size > self._limit // _SMALL_SHARE
            or held + size > self._limit
            or tensor.layout != torch.strided
        ):
            return None
        with torch.inference_mode(False):
            buffer = self._buffers[module] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return buffer

    def _follow(self, stream: int) -> None:
        """Go on on another stream, behind the one so far, with other memory: torch's allocator asks no other stream
        whether it is done.
        """
        if stream != self._stream:
            self._reduce()
            self._buffers.clear()
            self._launch = [], lambda: None
            self._streams.join(self._stream)
            self._stream = stream

    def _reduce(self) -> None:
        """Reduce all copies on the stream that made them."""
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        with self._streams.on(self._stream):
            if list(waiting) != self._launch[0]:
                notes = [(module.watched, buffer, None) for module, buffer in waiting.items()]
                self._launch = list(waiting), self._engine.prepare(notes)
            self._launch[1]()


def _main_output(tensors: list[Tensor]) -> Found:
    """Return the main tensor of an output, to be handed over; an output without a tensor counts as a call."""
    main = main_of(tensors)
    hand_over_late()
    return ([] if main is None else [main.detach()]), 1


class StreamingObserver(Observer, PerSiteHook, Summary):
    """Add up statistics of the outputs of each module that the hook is on, on the devices of the tensors."""

    number = zlib.crc32(b"main tensor of an output")
    make = staticmethod(_main_output)

    def __init__(self, layout: Layout, *, add_residual: bool = False) -> None:
        engine = self.engine = StatsEngine(layout)
        self._copies: dict[torch.device, Copies] = {}
        self._modules = ByModule(lambda name: StreamedModule(name, engine.place(name, "")))
        self._expected: set[str] = set()
        """Modules that it was told of before they ran."""
        self._add_residual = add_residual
        self._first: StreamedModule | None = None
        """The module that was called first: when it is called again, a forward is over."""
        self.summary = None if add_residual else self

    def expect(self, names: Iterable[str]) -> None:
        """Make the rows of modules with these names now."""
        self._expected |= set(names)
        self._modules.expect(names)

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Add the output of a module."""
        if not _torch.in_recomputation():  # it was counted the first time
            self._fire(self._modules.of(module, site), output)

    @property
    def is_per_site(self) -> bool:
        """Whether nothing is done around a call that `for_site` would leave out, such as reading the inputs."""
        return type(self).__call__ is StreamingObserver.__call__

    def for_site(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return what observes the module called ``name``, whose state is found once."""
        seen: StreamedModule | None = None

        def observe(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal seen
            if not _torch.in_recomputation():
                seen = seen or self._modules.named(name, module)
                self._fire(seen, output)

        return observe

    def _fire(self, seen: StreamedModule, output: Any, gathered: Gathered | None = None) -> None:
        """Add the output of a module; into ``gathered``, if it is to be reduced together with others."""
        if seen is self._first:
            self._end_forward()
        elif self._first is None:
            self._first = seen
        seen.calls += 1
        tensor = output if type(output) is Tensor else output_tensor(output, self._add_residual)
        if tensor is None:
            seen.watched.unread = "there is no tensor in its output"
        else:
            self._take(seen, tensor, gathered)

    def prepare(self, sites: Sequence[tuple[str, nn.Module, Share]]) -> Callable[[list[Tensor]], None]:
        """Return what adds the outputs that compiled code hands over, in one call where they are small."""
        known = [(self._modules.named(name, module), share) for name, module, share in sites]

        def take(found: list[Tensor]) -> None:
            if not _torch.in_recomputation():
                gathered: Gathered = []
                for seen, share in known:
                    self._fire(seen, next(iter(share.of(found)), None), gathered)
                self.engine.take_all((seen.watched, tensor, None) for seen, tensor in gathered)

        return take

    def _end_forward(self) -> None:
        """Begin the next forward."""
        self._flush()

    def _flush(self) -> None:
        """Reduce what waits."""
        self.engine.flush()
        for copies in list(self._copies.values()):
            copies.flush()

    def _take(self, seen: StreamedModule, tensor: Tensor, gathered: Gathered | None) -> None:
        """Add the statistics of the real entries of ``tensor``: outputs at padding have no meaning, and may be NaN."""
        try:
            tokens = current_tokens()
            real = tensor if tokens is None else tokens.real(tensor)
            if real is not None:
                self._add(seen, real, gathered)
        except Exception as error:  # an observer must not end the run
            seen.watched.give_up(tensor, error)

    def _add(self, seen: StreamedModule, real: Tensor, gathered: Gathered | None = None) -> None:
        """Add the statistics of a tensor, now or at the end of the forward; or put it into ``gathered`` for that."""
        if gathered is None and seen.copies is not None and seen.copies.take(seen, real):
            return
        place, device = seen.watched, real.device
        if device not in place.rows and _torch.capturing():
            place.unread = "the first forward was recorded as a CUDA graph, where nothing can be made ready"
        elif device.type in _READ_AT_ONCE:
            self.engine.take(place, real)
        elif gathered is not None:
            gathered.append((seen, real))
        else:  # the first one at once: rows are made then, and the kernel that a CUDA graph may need as well
            self.engine.take(place, real)
            if not self.engine.layout.by_unit:
                seen.copies = self._copies.get(device) or self._copies.setdefault(device, Copies(self.engine, device))

    def read(self) -> dict[str, dict[str, float]]:
        """Return the columns of each module's row, from which statistics are computed; one transfer per device."""
        with self.engine.lock:
            self._flush()
            cells = self.engine.read()
            return {name: cells[seen.watched] for name, seen in self._modules.items()}

    def reset(self) -> None:
        """Drop what was counted so far."""
        for copies in list(self._copies.values()):
            copies.forget()
        self.engine.reset()


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
_torch.leave_to_python(StreamingObserver.__call__)


# -- activation_stats -------------------------------------------------------------------------------------------------

_COUNTS: Final = ("nonfinite", "nan", "inf")


@dataclass(frozen=True)
class StatsOptions:
    """The config of ``activation_stats``."""

    stats: tuple[str, ...] | None = None
    log_every: int | None = None
    add_residual: bool = False


@tried_by()
def activation_stats(config: Mapping[str, Any] | None = None) -> ActivationStats:
    """Make a hook that keeps streaming statistics of every module it is on.

    Recipe::

        hook = activation_stats({"stats": ["mean", "absmax"]})
        with hookline.attach(model, "layers.#", hook):
            model(x)
        hook.to_metrics()  # {"layers.0/mean": ..., "layers.0/absmax": ...}

    Args:
        config: ``stats``: their names, as ``hookline.watch`` takes them. ``log_every``: seconds after which the next
            forward writes a table to the log, as `close` does at the end; it waits for the device once.
            ``add_residual``: of an output that is a pair of tensors of one shape, as SGLang's layers give, look at
            their sum.
    """
    options = read_options("activation_stats", StatsOptions, config)
    layout = Layout.of(None if options.stats is None else tuple(options.stats))
    return ActivationStats(layout, log_every=options.log_every, add_residual=options.add_residual)


class ActivationStats(StreamingObserver):
    """Keep the statistics of all modules that one ``activation_stats`` is on, also after removal."""

    name = "activation_stats"

    def __init__(self, layout: Layout, *, log_every: int | None = None, add_residual: bool = False) -> None:
        super().__init__(layout, add_residual=add_residual)
        self._log_every = log_every
        self._forwards = self._logged = 0
        self._log_time = time.monotonic()

    def _end_forward(self) -> None:
        self._forwards += 1
        super()._end_forward()
        if self._log_every is not None and time.monotonic() - self._log_time >= self._log_every:
            self._log(self._forwards)

    def to_metrics(self) -> dict[str, float]:
        """Return every statistic since the last reset by ``"module/statistic"``; one transfer.

        Counts of what is not finite are there as 0 before the first: an alert needs its series then.
        """
        layout = self.engine.layout
        if layout.by_unit:
            return self.engine.to_metrics()
        found: dict[str, float] = {}
        for name, cells in self.read().items():
            is_known = "nonfinite" in layout.stats and not cells["bad"] and (name in self._expected or cells["count"])
            stats = dict.fromkeys(_COUNTS, 0.0) if is_known else {}
            found |= {f"{name}/{stat}": value for stat, value in (stats | as_metrics(cells, layout)).items()}
        return found

    def _log(self, forwards: int) -> None:
        self._log_time, self._logged = time.monotonic(), forwards
        logger.info("%d forwards\n%s", forwards, table_of(self.to_metrics()).text())

    def close(self) -> None:
        """Log the forwards that came after the last table."""
        forwards = self._forwards + (self._first is not None)
        if self._log_every is not None and forwards > self._logged:
            self._log(forwards)


# -- nan_alarm ---------------------------------------------------------------------------------------------------

_CPU: Final = torch.device("cpu")
_PAUSE: Final = 1.0
"""Seconds between two reads of a GPU's counts: each waits for the device."""


@dataclass(frozen=True)
class AlarmOptions:
    """The config of ``nan_alarm``: it has no options."""


@tried_by()
def nan_alarm(config: Mapping[str, Any] | None = None) -> NanAlarm:
    """Make a hook that logs once for each module when it first returns NaN or infinity.

    Recipe::

        hook = nan_alarm({})
        with hookline.attach(model, "*", hook):
            model(x)
        hook.to_metrics()  # {"layers.3/nonfinite": 1.0, "layers.3/nan": 4.0, "layers.3/inf": 0.0}

    Args:
        config: Empty; the alarm has no options. Counts are kept on the device of the tensors. On a CPU they are read
            in the same call; on a GPU once in a second, at the end of a forward.
    """
    read_options("nan_alarm", AlarmOptions, config)
    return NanAlarm(Layout.of("nonfinite"))


class NanAlarm(StreamingObserver):
    """Watch all modules that one ``nan_alarm`` is on."""

    name = "nan_alarm"
    _next = 0.0
    """When to read the counts of GPUs."""

    def _end_forward(self) -> None:
        super()._end_forward()
        is_on_gpu = any(device.type == "cuda" for device in self.engine.device_rows)
        if is_on_gpu and time.monotonic() > self._next and not _torch.capturing():
            self.to_metrics()
            self._next = time.monotonic() + _PAUSE

    def _add(self, seen: StreamedModule, real: Tensor, gathered: Gathered | None = None) -> None:
        super()._add(seen, real, gathered)
        row = seen.watched.rows.get(_CPU)
        if row is not None and row.cells is not None and row.cells[BAD]:
            self._log(seen, row.cells[NAN], row.cells[INF])

    def _log(self, seen: StreamedModule, nan: float, inf: float) -> None:
        if not seen.was_logged:
            seen.was_logged = True
            alarm_logger.warning(
                "%s gave out %d NaN and %d infinities, in call %d", seen.name, int(nan), int(inf), seen.calls
            )

    def to_metrics(self) -> dict[str, float]:
        """Return, for each module, in how many calls there were some, and how many NaN and infinities; one transfer."""
        found: dict[str, float] = {}
        read = self.read()
        modules = dict(self._modules.items())
        for name, cells in read.items():
            if cells["bad"]:
                self._log(modules[name], cells["nan"], cells["inf"])
            found |= {f"{name}/nonfinite": cells["bad"], f"{name}/nan": cells["nan"], f"{name}/inf": cells["inf"]}
        return found

    def close(self) -> None:
        """Log what has not been logged yet."""
        self.to_metrics()
