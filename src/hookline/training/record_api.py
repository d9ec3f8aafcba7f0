"""``record``: a metric from wherever code runs, without a return value to put it in.

Called by hooks of every kind, adds to the firing under way, or to the step that a manager is in.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from hookline.errors import LifecycleError, MetricError

__all__ = ["Recorder", "now", "record"]


class Recorder(Protocol):
    """Where metrics go now."""

    def take_record(self, name: str, value: Any) -> None:
        """Take one in."""


class _Now:
    # Of the process, not of a thread: on CUDA, gradient hooks run in a thread of autograd's.
    recorder: weakref.ref[Any] | None = None


def record(name: str, value: Any) -> None:
    """Have a metric join the current record.

    Recipe::

        def hook(module, inputs, output):
            hookline.record("largest", output.detach().abs().amax())

    Inside a hook of a manager it is one more of that hook's metrics, ``"hook/name"``. Elsewhere, in a hook of a module
    say, it is a metric ``name`` of the step that the run is in: of the manager whose ``advance_step()`` was called
    last. Tensors stay on their device until the step metrics are flushed.
    """
    recorder = None if _Now.recorder is None else _Now.recorder()
    if recorder is None:
        raise LifecycleError(
            f"record({name!r}, ...) has no record to join: no manager is in a step. Call manager.advance_step() at the "
            "start of each step."
        )
    if not isinstance(name, str):
        raise MetricError(f"record() was given the name {name!r}; names of metrics are strings.")
    recorder.take_record(name, value)


def now(recorder: weakref.ref[Any] | None) -> weakref.ref[Any] | None:
    """From now on records go there; where they went before."""
    before, _Now.recorder = _Now.recorder, recorder
    return before
