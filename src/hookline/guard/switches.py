"""Read the switches of torch that a thread or the process has, and set them back; hold interrupts back meanwhile.

`Guard` reads them before an intervention (about 50 µs), sets back those that differ afterwards, and names an observer
that moves one. They decide how the run computes: ``torch.set_num_threads`` alone alters the bits of later sums.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Final

import torch

from hookline.sites import _torch

__all__ = ["TorchSwitches", "interrupts_deferred"]

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _autocast(device: str) -> dict[str, _Switch]:
    return {
        f"autocast on {device}": (
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        ),
        f"autocast dtype on {device}": (
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        ),
    }


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _leave_inference_mode(before: bool) -> None:
    raise RuntimeError("only the block that began it can end it")


_SWITCHES: Final[dict[str, _Switch]] = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (_torch.default_device, torch.set_default_device),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "number of threads between operators": (torch.get_num_interop_threads, torch.set_num_interop_threads),
    **_autocast("cpu"),
    **_autocast("cuda"),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "autocast blocks": (_torch.autocast_nesting, _torch.set_autocast_nesting),
    "deterministic algorithms": (
        _deterministic,
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    ),
    "anomaly detection": (_anomalies, lambda before: torch.set_anomaly_enabled(*before)),
    "float32 precision": (_torch.precision, _torch.set_precision),
    "half-precision reductions": (_torch.reductions, _torch.set_reductions),
    **_torch.KERNEL_SWITCHES,
    **_torch.CONVERSION_SWITCHES,
    "inference mode": (torch.is_inference_mode_enabled, _leave_inference_mode),
}
"""How to read each, and how to set it."""


class TorchSwitches:
    """The switches as they are when this is made."""

    __slots__ = ("_before", "lost")

    def __init__(self) -> None:
        self._before = {name: read() for name, (read, _) in _SWITCHES.items()}
        self.lost: dict[str, str] = {}
        """The switches that `restore` could not set back, and why."""

    @property
    def values(self) -> dict[str, Any]:
        """The switches by name."""
        return dict(self._before)

    def changed(self) -> list[str]:
        """Return the names of the switches that differ now."""
        return [name for name, (read, _) in _SWITCHES.items() if read() != self._before[name]]

    def restore(self) -> list[str]:
        """Set back the switches that differ, and return their names."""
        changed = self.changed()
        for name in changed:
            try:
                _SWITCHES[name][1](self._before[name])
            except RuntimeError as error:
                self.lost[name] = str(error)
        return changed


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Deliver an interrupt (Ctrl-C) that comes inside the block after it (8 µs).

    Only the main thread is sent interrupts, so do nothing in others; nor where a handler was not set from Python, since
    it could not be set again.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    received: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)
