"""Read one side of a comparison into a `Run`: a trace, a cache, a dict of tensors, safetensors or ``.npy`` files.

`compare` and `bisect` call `read_run` for each side; what comes after it does not know where a value came from.
`compare` also calls `unshard`, which puts the parts that ranks hold of one tensor together, by placements or by a text
that names its dimensions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from hookline.debug.compare.key import PARAMETERS, Value, ValueKey, Values
from hookline.debug.compare.rows import RowTable, as_row_keys
from hookline.debug.compare.trace_files import TraceFolder, read_trace
from hookline.errors import CompareError, OptionError
from hookline.factories.factory_hook import read_tensors
from hookline.guard.digest import dense
from hookline.messages import type_name
from hookline.observe.capturing import Cache
from hookline.sites.targets import name_matcher
from hookline.tree import leaves

_RANK: Final = re.compile(r"rank_(\d+)")
"""The folder of one rank in that of a precision check."""

_CHECKED: Final = re.compile(r"(.*)_(\d+)_(forward|backward|forward_input|backward_input)(?:_t(\d+))?")
"""The name of a file of a precision check, as `PrecisionRecord.stem` writes it."""
_STAGES: Final = {
    "forward": "output", "forward_input": "input", "backward": "output_grad", "backward_input": "input_grad",
}  # fmt: skip

RunSource: TypeAlias = str | Path | TraceFolder | Cache | Mapping[str, Any]
"""What can be compared: the path of a trace, of a safetensors file or of a folder of ``.npy`` files, a read trace, a
cache, tensors by name."""


@dataclass(frozen=True, slots=True)
class Run:
    """All values of one side."""

    name: str
    values: Values
    problems: Sequence[str] = ()
    """What is wrong with the files, in words."""
    notes: Sequence[str] = ()
    """What the writer of a trace has to say, and how values were put together."""
    left_out: Sequence[str] = ()
    """Those of its notes by which something is missing in it."""
    asked: Sequence[str] = ()
    """The kinds that a trace was to have."""

    @property
    def kinds(self) -> set[str]:
        """Return the kinds that there are values of, or were to be, as a trace says."""
        return {*self.asked, *(key.kind for key in self.values)}


def by_key(items: Iterable[tuple[ValueKey, Value]]) -> dict[ValueKey, Value]:
    """Return values by their keys; what is seen again under one key, such as a gradient, is a further call."""
    found: dict[ValueKey, Value] = {}
    for key, value in items:
        while key in found:
            key = key._replace(call=key.call + 1)
        found[key] = value
    return found


def read_run(source: RunSource, name: str, rows: RowTable | None = None) -> Run:
    """Return the values of one side; ``name`` stands for it in messages, ``rows`` says whose rows tensors have.

    Recipe: ``read_run("trace_a", "A").values``.
    """
    run = _read(source, name)
    if not run.values:
        why = f" {' '.join(run.problems)}" if run.problems else ""
        raise CompareError(f"{name} holds nothing to compare.{why} Trace or capture a run first.")
    if rows is None:
        return run
    return replace(run, values={key: _with_rows(value, rows) for key, value in run.values.items()})


def _with_rows(value: Value, rows: RowTable) -> Value:
    return value if value.kind in PARAMETERS else replace(value, rows=as_row_keys(rows, value.shape))


def _read(source: Any, name: str) -> Run:
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix == ".safetensors":
            return _of_mapping(read_tensors(name, path), name)
        arrays = sorted(path.rglob("*.npy"), key=_when_written)
        if arrays:
            return _of_arrays(path, arrays, name)
        return _of_trace(read_trace(path), name)
    if isinstance(source, TraceFolder):
        return _of_trace(source, name)
    if isinstance(source, Cache):
        return _of_cache(source, name)
    if isinstance(source, Mapping):
        return _of_mapping(source, name)
    raise CompareError(
        f"{name} is {type_name(source)}: give the path of a trace, what read_trace() or capture() gave, or a dict from "
        "names to tensors."
    )


def _of_trace(folder: TraceFolder, name: str) -> Run:
    values = by_key((record.key, record) for record in folder.records)
    others = [note for note in folder.notes if note not in folder.left_out]
    notes, missing, problems = (
        [f"{name}: {one}" for one in dict.fromkeys(texts)] for texts in (others, folder.left_out, folder.problems)
    )
    return Run(name, values, problems, notes, missing, folder.head.get("kinds", ()))


def _of_arrays(folder: Path, files: Sequence[Path], name: str) -> Run:
    """Read ``.npy`` files, in the order of the calls; those without numbers are left out."""
    values, unread = [], []
    for order, path in enumerate(files):
        try:
            array = _array(path)
        except (OSError, ValueError, TypeError, EOFError) as error:
            unread.append(f"{name}: {path} was left out: it cannot be read as numbers ({error}).")
            continue
        dtype = str(array.dtype).removeprefix("torch.")
        key = _key_of_file(path.relative_to(folder))
        values.append(Value(key, order, tuple(array.shape), dtype, partial(_array, path)))
    notes = [f"{name}: the order of the calls is that in which its .npy files were written."]
    return Run(name, by_key((value.key, value) for value in values), notes=notes, left_out=unread)


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


def _key_of_file(path: Path) -> ValueKey:
    """Return the key of an array: as a precision check names its files, else the name is that of a site."""
    *folders, file = path.with_suffix("").parts
    rank = _RANK.fullmatch(folders[0]) if folders else None
    site = "/".join([*folders[bool(rank) :], file])
    number = int(rank[1]) if rank else 0
    found = _CHECKED.fullmatch(site)
    if found is None:
        return ValueKey(number, 0, "output", site)
    return ValueKey(number, 0, _STAGES[found[3]], unquote(found[1]), found[4] or "", int(found[2]))


def _of_cache(cache: Cache, name: str) -> Run:
    """Return the values of a cache, in the order of the calls: it keeps modules by the end of their first call."""
    calls = [(call.step, site, call) for site, captured in cache.items() for call in captured.calls]
    calls.sort(key=lambda item: item[0])
    begins = _begins([(step, site) for step, site, _ in calls])
    found: list[tuple[tuple[int, ...], Value]] = []
    """With when it was: forward or backward, place, depth."""
    for place, (step, site, call) in enumerate(calls):
        key = ValueKey(0, step, "output", site, call=call.call)
        found += [((0, 2 * place + 1), one) for one in _leaves_of(key, call.output)]
        if "inputs" in call.values:
            given: dict[Any, Any] = {**dict(enumerate(call.inputs)), **call.kwargs}
            # A module takes its input before the modules in it are called; the outer one first.
            when = 0, 2 * begins.get((step, site), place), site.count(".") if site else -1
            found += [(when, one) for one in _leaves_of(key._replace(kind="input"), given)]
        if call.gradients or call.is_mixed:
            found += [((1, -place), one) for one in _leaves_of(key._replace(kind="output_grad"), call.grads[0])]
    found.sort(key=lambda item: item[0])
    return Run(name, _numbered(value for _, value in found))


def _begins(calls: Sequence[tuple[int, str]]) -> dict[tuple[int, str], int]:
    """Return for each step and module the place of the first call inside of it."""
    found: dict[tuple[int, str], int] = {}
    for place, (step, site) in enumerate(calls):
        parts = site.split(".") if site else []
        for depth in range(len(parts) + 1):
            found.setdefault((step, ".".join(parts[:depth])), place)
    return found


def _of_mapping(tensors: Mapping[str, Any], name: str) -> Run:
    named = [(ValueKey(0, 0, "output", str(site)), value) for site, value in tensors.items()]
    return Run(name, _numbered(one for key, value in named for one in _leaves_of(key, value)))


def _leaves_of(key: ValueKey, value: Any) -> list[Value]:
    """Return the tensors in ``value`` that have numbers."""
    found = [(key._replace(leaf=str(path)), leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor)]
    return [_value_of(at, tensor.dtype, plain) for at, tensor in found if (plain := dense(tensor)) is not None]


def _value_of(key: ValueKey, dtype: torch.dtype, plain: Tensor) -> Value:
    return Value(key, 0, tuple(plain.shape), str(dtype).removeprefix("torch."), lambda: plain)


def _numbered(values: Iterable[Value]) -> dict[ValueKey, Value]:
    return by_key((value.key, replace(value, order=order)) for order, value in enumerate(values))


# -- parts that ranks hold ------------------------------------------------------------------------------------------

_PART: Final = re.compile(r"([A-Za-z0-9_*]+)(?:\[([a-z0-9_]+)(?::(sum|partial))?\])?")
_SHARD: Final = re.compile(r"(?:Strided)?Shard\((-?\d+)(?:, (\d+))?\)")
_PARTIAL: Final = re.compile(r"Partial\((\w+)\)")
_REDUCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
}
"""What becomes of partial results of ranks, which are stacked, in float64."""

DimsOption = str | Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """How parts lie on the dimensions of a mesh."""

    axes: tuple[int | str | None, ...]
    """For each, the dimension of the tensor that is cut, how partial results are reduced, or None for copies."""
    sizes: tuple[int, ...]
    coordinates: dict[int, tuple[int, ...]]
    """By rank."""
    text: str
    order: tuple[int, ...]
    """In which order the tensor was cut along them."""


def unshard(run: Run, dims: DimsOption = None) -> Run:
    """Return a run with what ranks hold parts of as one value on rank 0, and with notes on what could not be joined.

    Values that every rank has a copy of, or of which nobody has said how they lie, stay one for each rank.
    """
    groups: dict[ValueKey, dict[ValueKey, Value]] = {}
    for key, value in run.values.items():
        groups.setdefault(key._replace(rank=0), {})[key] = value
    find = _finder(dims)
    found: dict[ValueKey, Value] = {}
    notes: dict[str, None] = {}
    for whole, parts in groups.items():
        members = list(parts.values())
        layout = _layout(members, find(whole)) if len(members) > 1 else None
        if layout is None or all(axis is None for axis in layout.axes):
            found |= parts
        elif why := _why_apart(members, layout):
            notes[f"{run.name}: {why}; sharded tensors cannot be put together."] = None
        else:
            found[whole] = _joined(members, layout)
    return replace(run, values=found, notes=[*run.notes, *notes])


def _finder(dims: DimsOption) -> Callable[[ValueKey], str | None]:
    """Return what finds the dimensions of a value; a single text is for what flows, not for parameters."""
    if dims is None or isinstance(dims, str):
        return lambda key: None if key.kind in PARAMETERS else dims
    matchers = [(name_matcher(pattern), text) for pattern, text in dims.items()]
    return lambda key: next((text for matches, text in matchers if matches(key.site)), None)


def _layout(members: Sequence[Value], dims: str | None) -> _Layout | None:
    """Return how the parts lie; None if nobody has said."""
    if all(member.placements is not None and member.placements.coordinate for member in members):
        return _by_placements(members)
    return None if dims is None else _by_dims(members, dims)


def _why_apart(members: Sequence[Value], layout: _Layout) -> str:
    """Return why parts cannot be put together; nothing if they can."""
    unknown = [axis for axis in layout.axes if isinstance(axis, str) and axis not in _REDUCTIONS]
    if unknown:
        return f"how ranks reduce {layout.text} is not known"
    there = {layout.coordinates[member.rank] for member in members}
    missing = [number for number, place in enumerate(_places(layout.sizes)) if place not in there]
    return f"parts of ranks {missing} are missing" if missing else ""


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Return the places of a mesh, rank by rank: the outermost axis comes first, and its number changes last."""
    return itertools.product(*map(range, sizes))


def _by_placements(members: Sequence[Value]) -> _Layout:
    first = members[0].placements
    assert first is not None
    axes: list[int | str | None] = []
    factors = []
    for placement in first.placements:
        shard, partial = _SHARD.fullmatch(placement), _PARTIAL.fullmatch(placement)
        other = None if placement == "Replicate()" else partial[1] if partial else placement
        axes.append(int(shard[1]) if shard else other)
        factors.append(int(shard[2] or 1) if shard else 1)
    coordinates = {member.rank: member.placements.coordinate for member in members if member.placements is not None}
    # A strided shard is one of what was cut before it into as many parts as its factor says.
    order = tuple(sorted(range(len(axes)), key=lambda number: factors[number]))
    return _Layout(tuple(axes), first.mesh_shape, coordinates, ", ".join(first.placements), order)


def _by_dims(members: Sequence[Value], dims: str) -> _Layout | None:
    parts = [_PART.fullmatch(part) for part in dims.split()]
    if not parts or not all(parts):
        raise OptionError(
            f"dims={dims!r}: write a name for each dimension, with [axis] where ranks share it: 'b s h[tp] d'."
        )
    if len(parts) != len(members[0].shape):
        return None
    cut = {part[2]: ("sum" if part[3] else dim) for dim, part in enumerate(parts) if part is not None and part[2]}
    if not cut:
        return None
    if len(cut) > 1:
        raise OptionError(f"dims={dims!r} has {len(cut)} axes: all ranks share one, unless their tensors are DTensors.")
    ranks = range(max(member.rank for member in members) + 1)
    return _Layout(tuple(cut.values()), (len(ranks),), {rank: (rank,) for rank in ranks}, dims, (0,))


def _joined(members: Sequence[Value], layout: _Layout) -> Value:
    """Return one value for all parts; copies along a dimension of the mesh count once."""
    axes = [layout.axes[number] for number in layout.order]
    by_place = {tuple(layout.coordinates[member.rank][at] for at in layout.order): member for member in members}
    shapes = {place: torch.empty(member.shape, device="meta") for place, member in by_place.items()}
    shape = tuple(_join(shapes, axes).shape)

    def read() -> Tensor:
        return _join({place: member.tensor() for place, member in by_place.items()}, axes)

    first = min(members, key=lambda member: member.rank)
    return replace(
        first,
        shape=shape,
        read=read if all(member.read is not None for member in by_place.values()) else None,
        fingerprint=None,
        placements=None,
        rows=None if shape != first.shape and 0 in layout.axes else first.rows,
        note=f"put together from {len(members)} ranks ({layout.text})",
    )


def _join(parts: Mapping[tuple[int, ...], Tensor], axes: Sequence[int | str | None]) -> Tensor:
    """Return the tensor of which parts lie at these places along ``axes``."""
    if not axes:
        return parts[()]
    axis, *inner = axes
    indices = [0] if axis is None else sorted({place[0] for place in parts})
    pieces = [_join({place[1:]: part for place, part in parts.items() if place[0] == at}, inner) for at in indices]
    if isinstance(axis, int):
        return torch.cat(pieces, dim=axis)
    if axis is None:
        return pieces[0]
    dtype = pieces[0].dtype
    return _REDUCTIONS[axis](torch.stack(pieces).to(torch.promote_types(dtype, torch.float64))).to(dtype)
