"""``trace_outputs``: write a trace of outputs from a hook that a spec puts on, as on a served model.

Specs and users make it. It hands outputs to a `TraceRecorder`, with whose rows they are, and writes what `trace` would.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.debug.compare.recorder import TraceRecorder
from hookline.debug.compare.rows import RowTable
from hookline.debug.compare.trace import bytes_of_budget, rows_of
from hookline.debug.compare.trace_files import TraceWriter
from hookline.distributed.ranks import rank_count, this_rank
from hookline.factories.factory_hook import ByModule, Observer, read_options, tried_by
from hookline.observe.tokens import current_tokens
from hookline.sites import _torch
from hookline.tree import leaves

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site


@dataclass(frozen=True)
class TraceOptions:
    """The config of ``trace_outputs``."""

    folder: Path
    tensors: Any = False
    budget: Any = "1GB"
    requests: tuple[str, ...] | None = None
    every: int = 1


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
            in ``trace``. ``requests``: names or patterns; only forwards with such a request are written. ``every``:
            take each n-th forward.
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
        self._every = options.every
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
        if step % self._every or not self._is_asked_for(rows):
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
