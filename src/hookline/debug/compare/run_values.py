"""Read one side of a comparison into plain values: a trace, a cache, a dict of tensors, safetensors or ``.npy`` files.

`compare` calls `read_run` for each side; what comes after it does not know where a value came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from hookline.debug.compare.row_layouts import as_row_keys
from hookline.debug.trace.read_trace import TraceFolder, read_trace
from hookline.errors import CompareError
from hookline.messages import type_name
from hookline.observe.capture.cache import Cache
from hookline.tree import leaves

if TYPE_CHECKING:
    from hookline.debug.trace.trace_record import Fingerprint, MeshPlacement, RowKeys

__all__ = ["PARAMETERS", "RunSource", "RunValue", "RunValues", "read_run"]

_CACHE_KEY: Final = "hookline.capture"
"""What the metadata of a file has that `Cache.save` wrote."""

_RANK: Final = re.compile(r"rank_(\d+)")
"""The folder of one rank in that of a trace, or of a precision check."""

_CHECKED: Final = re.compile(r"(.*)_(\d+)_(forward|backward|forward_input|backward_input)(?:_t(\d+))?")
"""The name of a file of a precision check, as `PrecisionRecord.stem` writes it."""
_STAGES: Final = {
    "forward": "output", "forward_input": "input", "backward": "output_grad", "backward_input": "input_grad",
}  # fmt: skip

PARAMETERS: Final = ("parameter", "param_grad")
"""The kinds that belong to a parameter: they have no rows of a batch."""

RunSource: TypeAlias = str | Path | TraceFolder | Cache | Mapping[str, Any]
"""What can be compared: the path of a trace, of a safetensors file or of a folder of ``.npy`` files, a read trace, a
cache, tensors by name."""


@dataclass(slots=True)
class RunValue:
    """One tensor of a run, where it was seen, and how to read it."""

    site: str
    kind: str
    leaf: str
    step: int
    call: int
    order: int
    """A running number: values of one rank come in this order."""
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor] | None
    """Returns the tensor; None if there is only the fingerprint."""
    rank: int = 0
    fingerprint: Fingerprint | None = None
    dims: str | None = None
    placements: MeshPlacement | None = None
    rows: RowKeys | None = None
    """Whose its rows are."""
    note: str = ""
    """How it was put together, where it is not as it was recorded."""

    @property
    def module(self) -> str:
        """The module it belongs to: of a parameter, the one that owns it."""
        return self.site.rpartition(".")[0] if self.kind in PARAMETERS else self.site


@dataclass(slots=True)
class RunValues:
    """All values of one side."""

    name: str
    values: list[RunValue]
    problems: list[str] = field(default_factory=list)
    """What is wrong with the files, in words."""
    notes: list[str] = field(default_factory=list)
    """What the writer of a trace has to say."""
    left_out: list[str] = field(default_factory=list)
    """Those of its notes by which something is missing in it."""
    asked: Sequence[str] = ()
    """The kinds that a trace was to have."""

    @property
    def kinds(self) -> set[str]:
        """Return the kinds that there are values of, or were to be, as a trace says."""
        return {*self.asked, *(value.kind for value in self.values)}


def read_run(source: RunSource, name: str, rows: Any = None) -> RunValues:
    """Return the values of one side; ``name`` stands for it in messages, ``rows`` says whose rows tensors have.

    Recipe: ``read_run("trace_a", "A").values``.
    """
    run = _read(source, name)
    if rows is not None:
        for value in run.values:
            if value.kind not in PARAMETERS:
                value.rows = as_row_keys(rows, value.shape)
    if not run.values:
        why = f" {' '.join(run.problems)}" if run.problems else ""
        raise CompareError(f"{name} holds nothing to compare.{why} Trace or capture a run first.")
    return run


def _read(source: Any, name: str) -> RunValues:
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix == ".safetensors" or path.is_file():
            return _of_file(path, name)
        arrays = sorted(path.rglob("*.npy"), key=_when_written)
        if arrays:
            return _of_arrays(path, arrays, name)
        return _of_rank(path, name) if _RANK.fullmatch(path.name) else _of_trace(read_trace(path), name)
    if isinstance(source, TraceFolder):
        return _of_trace(source, name)
    if isinstance(source, Cache):
        return _of_cache(source, name)
    if isinstance(source, Mapping):
        return RunValues(name, _of_mapping(source))
    raise CompareError(
        f"{name} is {type_name(source)}: give the path of a trace, what read_trace() or capture() gave, or a dict from "
        "names to tensors."
    )


def _of_trace(folder: TraceFolder, name: str) -> RunValues:
    values = [
        RunValue(
            record.site, record.kind, record.leaf, record.step, record.call, record.order, record.shape, record.dtype,
            None if record.tensor is None else _reader(folder, record), record.rank, record.fingerprint, record.dims,
            record.placements, folder.row_keys(record),
        )
        for record in folder.records
        # Checkpointing repeats calls of the forward: such records are no calls of their own.
        if not record.recompute
    ]  # fmt: skip
    others = [note for note in folder.notes if note not in folder.left_out]
    notes, missing, problems = (
        [f"{name}: {one}" for one in dict.fromkeys(texts)] for texts in (others, folder.left_out, folder.problems)
    )
    return RunValues(name, values, problems, notes, missing, folder.head.get("kinds", ()))


def _of_rank(path: Path, name: str) -> RunValues:
    """Read the folder of one rank, so that two ranks of one run can be compared."""
    run = _of_trace(read_trace(path.parent), name)
    rank = int(path.name.removeprefix("rank_"))
    values = [replace(value, rank=0) for value in run.values if value.rank == rank]
    return replace(run, values=values)


def _reader(folder: TraceFolder, record: Any) -> Callable[[], Tensor]:
    return lambda: folder.tensor(record)


def _of_file(path: Path, name: str) -> RunValues:
    """Read a file that `Cache.save` wrote, or any safetensors file, whose keys are then the names."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            if _CACHE_KEY not in (file.metadata() or {}):
                return RunValues(name, _of_mapping({key: file.get_tensor(key) for key in file.keys()}))  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CompareError(
            f"{name}: {path} cannot be read as safetensors ({error}). Give the folder of a trace, or such a file."
        ) from error
    return _of_cache(Cache.load(path), name)


def _of_arrays(folder: Path, files: Sequence[Path], name: str) -> RunValues:
    """Read ``.npy`` files, in the order of the calls; those without numbers are left out."""
    values, unread = [], []
    for path in files:
        try:
            array = _array(path)
        except (OSError, ValueError, TypeError, EOFError) as error:
            unread.append(f"{name}: {path} was left out: it cannot be read as numbers ({error}).")
            continue
        *folders, file = path.relative_to(folder).with_suffix("").parts
        found = _RANK.fullmatch(folders[0]) if folders else None
        rank = int(found[1]) if found else 0
        site, kind, leaf, call = _named("/".join([*folders[bool(found) :], file]))
        dtype = str(array.dtype).removeprefix("torch.")
        values.append(RunValue(site, kind, leaf, 0, call, 0, tuple(array.shape), dtype, partial(_array, path), rank))
    notes = [f"{name}: the order of the calls is that in which its .npy files were written."]
    return RunValues(name, _numbered(values), notes=notes, left_out=unread)


def _array(path: Path) -> Tensor:
    """Return an array, mapped from its file; it is not written to."""
    array = np.load(path, mmap_mode="c", allow_pickle=False)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _when_written(path: Path) -> tuple[Any, ...]:
    """Return what files are sorted by: when they were written, which some systems know to 4 ms.

    Within that, those of the forward come first, then by the numbers in names, and the modules in a module before it.
    """
    words = re.split(r"(\d+)", path.with_suffix("").as_posix())
    name = [(int(word), "") if word.isdecimal() else (-1, f"{word}~") for word in words]
    return path.stat().st_mtime_ns, "_backward" in path.name, name


def _named(stem: str) -> tuple[str, str, str, int]:
    """Return site, kind, leaf and call of a file: as a precision check names them, else its name is that of a site."""
    found = _CHECKED.fullmatch(stem)
    if found is None:
        return stem, "output", "", 0
    return unquote(found[1]), _STAGES[found[3]], found[4] or "", int(found[2])


def _of_cache(cache: Cache, name: str) -> RunValues:
    """Return the values of a cache, in the order of the calls: it keeps modules by the end of their first call."""
    calls = [(call.step, site, call) for site, captured in cache.items() for call in captured.calls]
    calls.sort(key=lambda item: item[0])
    forward: list[tuple[tuple[int, int], RunValue]] = []
    backward: list[tuple[tuple[int, int], RunValue]] = []
    begins = _begins([(step, site) for step, site, _ in calls])
    for place, (step, site, call) in enumerate(calls):
        forward += [((2 * place + 1, 0), one) for one in _leaves_of(site, "output", call.output, step, call.call)]
        if "inputs" in call.values:
            given: dict[Any, Any] = {**dict(enumerate(call.inputs)), **call.kwargs}
            # A module takes its input before the modules in it are called; the outer one first.
            when = 2 * begins.get((step, site), place), site.count(".") if site else -1
            forward += [(when, one) for one in _leaves_of(site, "input", given, step, call.call)]
        if call.gradients or call.is_mixed:
            grads = _leaves_of(site, "output_grad", call.grads[0], step, call.call)
            backward += [((-place, 0), one) for one in grads]
    ordered = [value for part in (forward, backward) for _, value in sorted(part, key=lambda item: item[0])]
    return RunValues(name, _numbered(ordered))


def _begins(calls: Sequence[tuple[int, str]]) -> dict[tuple[int, str], int]:
    """Return for each step and module the place of the first call inside of it."""
    found: dict[tuple[int, str], int] = {}
    for place, (step, site) in enumerate(calls):
        parts = site.split(".") if site else []
        for depth in range(len(parts) + 1):
            found.setdefault((step, ".".join(parts[:depth])), place)
    return found


def _of_mapping(tensors: Mapping[str, Any]) -> list[RunValue]:
    found = [one for site, value in tensors.items() for one in _leaves_of(str(site), "output", value, 0, 0)]
    return _numbered(found)


def _leaves_of(site: str, kind: str, value: Any, step: int, call: int) -> list[RunValue]:
    found = [(path, leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor)]
    return [_value_of(site, kind, str(path), step, call, leaf) for path, leaf in found]


def _value_of(site: str, kind: str, leaf: str, step: int, call: int, tensor: Tensor) -> RunValue:
    dtype = str(tensor.dtype).removeprefix("torch.")
    plain = _plain(tensor)
    return RunValue(site, kind, leaf, step, call, 0, tuple(plain.shape), dtype, lambda: plain)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor with all its entries: of a sparse one zeros too, of a nested one zeros as padding."""
    if tensor.is_nested:
        padded: Tensor = tensor.to_padded_tensor(0.0)
        return padded
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _numbered(values: Sequence[RunValue]) -> list[RunValue]:
    for order, value in enumerate(values):
        value.order = order
    return list(values)
