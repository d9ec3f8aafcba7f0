"""``export``: write the outputs or inputs of modules to safetensors files, by request and token.

Specs and users make it. It copies tensors into an `ExportQueue`, whose thread writes them; `served_batch` says whose
tokens they are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.export_files import WrittenSoFar, can_store
from hookline.factories.export_queue import QUEUE_BYTES, ExportItem, ExportQueue
from hookline.factories.factory_hook import (
    ByModule,
    Observer,
    checked_options,
    choice,
    path,
    tried_by,
    whole,
    yes_or_no,
)
from hookline.factories.served_batch import STAGES, measurable, only_in_stage, output_tensor, running
from hookline.observe.patch.parts import find_main_input
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = ["INPUT", "Export", "ExportInputs", "export"]

_NAME: Final = "export"
_OPTIONS: Final = {
    "folder": None,
    "positions": "all",
    "phase": "both",
    "max_bytes": None,
    "add_residual": False,
    "inputs": False,
}
INPUT: Final = "/input"
"""What an export adds to the name of a module whose inputs it writes: a folder may have both sides of one."""


@tried_by()
def export(config: Mapping[str, Any] | None = None) -> Export:
    """Make a hook that writes outputs to safetensors files in a folder; no forward waits for it.

    Recipe::

        hook = export({"folder": "states", "max_bytes": 1_000_000_000})
        with hookline.attach(model, "model.layers.8", hook):
            model(input_ids)
        hook.close()
        for record in read_export("states"):
            print(record.module, record.request, record.positions, record.tensor.shape)

    Args:
        config: ``folder``: where to; the only option that has to be given. ``positions``: ``"all"``, or ``"last"``, the
            last token of each sequence in each forward. ``phase``: ``"prefill"`` or ``"decode"`` of a served model, for
            one of them alone. ``max_bytes``: how much may be written in all; then it stops, and says so once.
            ``add_residual``: of an output that is a pair of tensors of one shape, as SGLang's layers give, write the
            sum. ``inputs``: write what goes into the modules in place of what comes out, under the name
            ``"layers.8/input"``: the main tensor of the positional arguments. The hook is then one for
            ``on="forward_pre"``, as a module may change its input in place.

    At most 256 MiB wait to be written; what does not fit is dropped and counted. A file is complete at 64 MiB, or after
    five seconds.
    """
    options = checked_options(_NAME, config, _OPTIONS)
    if options["folder"] is None:
        raise OptionError(f"{_NAME} needs a folder to write to: {{'folder': 'states'}}.")
    folder = path(_NAME, "folder", options["folder"])
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"{_NAME}: {folder} is a file, and folder has to be a folder.")
    most = options["max_bytes"]
    stage = choice(_NAME, "phase", options["phase"], STAGES)
    if yes_or_no(_NAME, "inputs", options["inputs"]):
        _check_inputs(stage, options)
        kind: type[Export] = ExportInputs
    else:
        kind = only_in_stage(Export, stage)
    return kind(
        folder,
        max_bytes=None if most is None else whole(_NAME, "max_bytes", most),
        only_last=choice(_NAME, "positions", options["positions"], ("all", "last")) == "last",
        add_residual=yes_or_no(_NAME, "add_residual", options["add_residual"]),
    )


def _check_inputs(stage: str, options: Mapping[str, Any]) -> None:
    if stage != "both":
        raise OptionError(
            f"{_NAME}: inputs goes with both phases; leave phase out: each record says of which it is (record.phase)."
        )
    if options["add_residual"]:
        raise OptionError(f"{_NAME}: add_residual is for a pair that a module returns, and inputs writes what it gets.")


class _ModuleCalls:
    """Count the calls of one module."""

    __slots__ = ("calls", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0


class Export(Observer):
    """Export all modules that one ``export`` is on; ``close()`` or the end of the process writes the rest."""

    name = _NAME

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int | None = None,
        only_last: bool = False,
        add_residual: bool = False,
        queue_bytes: int = QUEUE_BYTES,
        earlier: WrittenSoFar | None = None,
    ) -> None:
        self.folder = folder
        self._queue = ExportQueue(folder, max_bytes, queue_bytes, earlier)
        self._only_last = only_last
        self._add_residual = add_residual
        self._calls = ByModule(self._named)
        self._lock = threading.Lock()
        self._unread = 0
        # The queue does not refer to this object: it is closed when the hook is deleted, or when the process ends.
        self._finalizer = weakref.finalize(self, self._queue.close)

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Queue the output of a module."""
        call = self._due_call(module, site)
        if call is not None:
            self._take(*call, inputs, output_tensor(output, self._add_residual))

    @staticmethod
    def _named(name: str) -> _ModuleCalls:
        """Return the count of calls of the module with that ``name``, under the name that its records have."""
        return _ModuleCalls(name)

    def _due_call(self, module: nn.Module, site: Site | None) -> tuple[str, int] | None:
        """Count a call; return the name of the module and the number of the call, or None if it is not to be taken."""
        if _torch.in_recomputation():  # it was taken the first time
            return None
        seen = self._calls.of(module, site)
        with self._lock:
            call = seen.calls
            seen.calls = call + 1
        return (seen.name, call) if self._queue.is_ours() else None

    def _take(self, name: str, call: int, inputs: Any, taken: Tensor | None) -> None:
        tensor = measurable(taken)
        if tensor is None or not can_store(tensor):
            self._unread += 1
            return
        rows = running(inputs)
        is_flat = rows is not None and rows.width is None
        is_last = self._only_last and tensor.dim() == 3 and not is_flat
        if is_last:  # of (batch, sequence, features), padded on the left, the last column
            tensor = tensor[:, -1:]
        size = tensor.numel() * tensor.element_size()
        if self._queue.reserve(size):
            self._queue.put(_copied(ExportItem(name, call, tensor, size, rows, self._only_last, is_last)))

    def to_metrics(self) -> dict[str, float]:
        """Return what was written, waits and was dropped; ``unread`` had no numbers, or none that can be stored."""
        return self._queue.to_metrics() | {"unread": float(self._unread)}

    @property
    def is_full(self) -> bool:
        """Return whether ``max_bytes`` has ended it."""
        return self._queue.is_full

    def wait_until_written(self) -> None:
        """Wait until nothing waits to be written, for a run that may wait; the last file stays open."""
        self._queue.wait_until_written()

    def close(self) -> None:
        """Write what waits, and complete the last file."""
        self._finalizer()


class ExportInputs(Export):
    """Export what goes into the modules; a hook before the forward, which may change its inputs in place."""

    def __call__(self, module: nn.Module, inputs: Any, *, site: Site | None = None) -> None:  # type: ignore[override]
        """Queue the main tensor of the positional arguments."""
        self.take_arguments(module, inputs, {}, site=site)

    def take_arguments(
        self, module: nn.Module, inputs: Any, named: dict[str, Any], *, site: Site | None = None
    ) -> None:
        """Queue the main tensor of the arguments, positional or ``named``, as a hook that is given both."""
        call = self._due_call(module, site)
        if call is not None:
            self._take(*call, inputs, find_main_input(inputs, named))

    @staticmethod
    def _named(name: str) -> _ModuleCalls:
        return _ModuleCalls(name + INPUT)


def _copied(item: ExportItem) -> ExportItem:
    """Return the item with its own tensors: the forward may change these in place."""
    if item.rows is not None:
        item.rows = item.rows.with_tensors(lambda value: value.clone() if isinstance(value, Tensor) else value)
    item.tensor = item.tensor.clone(memory_format=torch.contiguous_format)
    if item.tensor.device.type == "cuda":
        make: Any = torch.cuda.Event
        item.ready = make()
        item.ready.record(torch.cuda.current_stream(item.tensor.device))
    return item


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
for _hook in (Export.__call__, ExportInputs.__call__, ExportInputs.take_arguments):
    _torch.leave_to_python(_hook)
