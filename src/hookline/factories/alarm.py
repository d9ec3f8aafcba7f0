"""``nan_alarm``: which module was the first to give out NaN or infinity.

Takes outputs from forward hooks, hands a line to the log for each module that shows some. Counts are kept where the
tensors are. On a CPU they are looked at in the same call; on a GPU a copy is sent for when a forward begins, and read
when it has come, so that the forward never waits, and the line comes a forward or two later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.errors import NonFiniteError
from hookline.factories.factory_hook import ByModule, Observer, checked_options, choice, whole
from hookline.factories.output_rows import shape_of, shown, without_padding
from hookline.factories.streaming_stats import Place, Streaming
from hookline.observe.watch.stat_columns import Layout
from hookline.observe.watch.watch_hooks import give_up
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = ["NanAlarm", "nan_alarm"]

logger = logging.getLogger("hookline.factories.nan_alarm")

_NAME: Final = "nan_alarm"
_OPTIONS: Final = {"every": 1, "action": "log"}
_CPU: Final = torch.device("cpu")
_PAUSE: Final = 0.1
"""Seconds between two looks at a GPU's counts: each is a small launch and a copy."""
_BAD, _NAN, _INF = 5, 6, 7
"""The columns of a row that are added up: firings with something in them, NaN, infinities."""


def nan_alarm(config: Mapping[str, Any] | None = None) -> NanAlarm:
    """A hook that logs once for each module when it first gives out NaN or infinity.

    Recipe::

        hook = nan_alarm({})
        with hookline.attach(model, "*", hook):
            model(x)
        hook.to_metrics()  # {"layers.3/nonfinite": 1.0, "layers.3/nan": 4.0, "layers.3/inf": 0.0}

    Args:
        config: ``every``: look at each n-th call of a module. ``action``: ``"log"``; or ``"raise"``, which raises
            `NonFiniteError` out of the forward, and for that waits for the device at every call.
    """
    options = checked_options(_NAME, config, _OPTIONS)
    action = choice(_NAME, "action", options["action"], ("log", "raise"))
    return NanAlarm(every=whole(_NAME, "every", options["every"]), raises=action == "raise")


class _Seen:
    """What is kept for one module."""

    __slots__ = ("calls", "place", "said", "shape")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.calls = 0
        self.shape: tuple[int, ...] = ()
        self.said = False


class _Asked:
    """Rows of a GPU that were sent for, and have perhaps not come yet."""

    def __init__(self, device: torch.device, seen: list[_Seen]) -> None:
        of = [(each, row.added) for each in seen for row in each.place.rows(device)]
        self._seen = [each for each, _ in of]
        make: Any = torch.cuda.Event
        self._event = make()
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            rows = torch.stack([row for _, row in of]) if of else torch.empty(0)
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)
            self._event.record()

    def has_come(self) -> bool:
        """Whether reading them waits for nothing."""
        return bool(self._event.query())

    def answers(self) -> dict[_Seen, list[float]]:
        """For each module the sum of its rows."""
        found: dict[_Seen, list[float]] = {}
        for seen, row in zip(self._seen, self._rows.tolist(), strict=True):
            found[seen] = list(map(sum, zip(found[seen], row, strict=True))) if seen in found else row
        return found


class NanAlarm(Observer):
    """The alarm of all modules that one ``nan_alarm`` sits on."""

    name = _NAME

    def __init__(self, *, every: int = 1, raises: bool = False) -> None:
        # On a CPU each output is looked at in its call, and small ones are not kept.
        self._streaming = Streaming(Layout.of("nonfinite"), keeps=not raises, keeps_small=False)
        self._seen = ByModule(lambda name: _Seen(self._streaming.place(name)))
        self._every = every
        self._raises = raises
        self._first: _Seen | None = None
        self._asked: dict[torch.device, _Asked] = {}
        self._next = 0.0
        """When to look at what is on GPUs."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """A module has given this out."""
        if _torch.in_recomputation():  # it was looked at the first time
            return
        seen = self._seen.of(module, site)
        if self._first is None:
            self._first = seen
        elif seen is self._first:
            self._streaming.begin_forward()
            self._look_elsewhere()
        count = seen.calls
        seen.calls = count + 1
        if count % self._every == 0:
            self._take(seen, output)

    def _take(self, seen: _Seen, output: Any) -> None:
        tensor = shown(output)
        if tensor is None:
            return
        try:
            real = without_padding(tensor)
            if real is not None:
                seen.shape = shape_of(real)
                self._streaming.take(seen.place, real)
        except Exception as error:  # whoever only watches must not lose the run to it
            give_up(seen.place.watched, tensor, error)
            return
        row = seen.place.watched.rows.get(_CPU)
        if row is not None and row.cells is not None and row.cells[row.start + _BAD] and not seen.said:
            self._say(seen, row.cells[row.start + _NAN], row.cells[row.start + _INF])
        if self._raises:
            self._check_now(seen)

    # -- on other devices --------------------------------------------------------------------------------

    def _check_now(self, seen: _Seen) -> None:
        """Wait for the device, and raise if something is there."""
        self._streaming.engine.flush()
        for row in seen.place.watched.rows.values():
            cells = row.added.tolist()
            if cells[_BAD]:
                raise NonFiniteError(_words(seen, cells[_NAN], cells[_INF]) + ". Look at what goes into it.")

    def _look_elsewhere(self) -> None:
        """Read what has come from GPUs, and send for what is there now."""
        now = time.monotonic()
        if now < self._next or _torch.capturing():
            return
        self._next = now + _PAUSE
        self._streaming.flush_copies()
        for device in list(self._streaming.engine.device_rows):
            asked = self._asked.get(device)
            if device.type != "cuda" or (asked is not None and not asked.has_come()):
                continue
            if asked is not None:
                self._read(asked)
            waiting = [seen for seen in self._seen.values() if not seen.said and seen.place.rows(device)]
            self._asked[device] = _Asked(device, waiting)

    def _read(self, asked: _Asked) -> None:
        for seen, cells in asked.answers().items():
            if cells[_BAD] and not seen.said:
                self._say(seen, cells[_NAN], cells[_INF])

    def _say(self, seen: _Seen, nan: float, inf: float) -> None:
        seen.said = True
        logger.warning("%s", _words(seen, nan, inf))

    def to_metrics(self) -> dict[str, float]:
        """For each module: in how many calls there was something, and how many NaN and infinities; one transfer."""
        items = self._seen.items()
        found: dict[str, float] = {}
        for (name, seen), mine in zip(items, self._streaming.read([seen.place for _, seen in items]), strict=True):
            if mine["bad"] and not seen.said:
                self._say(seen, mine["nan"], mine["inf"])
            found |= {f"{name}/nonfinite": mine["bad"], f"{name}/nan": mine["nan"], f"{name}/inf": mine["inf"]}
        return found

    def close(self) -> None:
        """Say what has not been said yet."""
        self.to_metrics()


def _words(seen: _Seen, nan: float, inf: float) -> str:
    return (
        f"{seen.place.name} gave out {int(nan)} NaN and {int(inf)} infinities, in a tensor of shape {seen.shape}, "
        f"in call {seen.calls}"
    )


# Where plain torch calls it in compiled code, the graph ends there; what is behind the call is not compiled as well.
_torch.leave_to_python(NanAlarm.__call__)
