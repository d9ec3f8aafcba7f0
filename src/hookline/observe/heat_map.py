"""Draw numbers as a heat map for a notebook: a tensor, or a table with names.

Users make a `HeatMap` (``hookline.observe.HeatMap``). Captures in a notebook show themselves by `heat_maps_of`
(``_repr_html_`` in observe/capturing.py). Without names a tensor is drawn as a picture; with names it is a table with
coloured cells. What is read and drawn is chosen here (`_matrix`, `_strongest`). Colours, cells and pictures are made by
hookline/tables.py.

Making a `HeatMap` reads the numbers, which waits for the device: no hook may make one while the model runs. `_MAX_ROWS`
and `_MAX_COLUMNS` stand again, as 64 and 120, in the docstrings of `HeatMap` and `_strongest` and in docs/notebooks.md:
change them together. Tests: tests/test_tables.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.observe.host_values import countable
from hookline.tables import ColourScale, ShownAsTable, Table, legend, line, picture

_MAX_ROWS: Final = 64
"""Rows of a picture, and of a table with names."""
_MAX_COLUMNS: Final = 120
"""Columns of a picture: with the rows, 10 kB of text at most."""
_MAX_READ: Final = 1 << 20
"""About how many numbers of a square tensor are brought to the host: of a larger one, every n-th row and column. Of a
long thin tensor more come, since few of its rows can be left out."""
_MAX_NAMED: Final = 40
"""Named columns of a table."""


class HeatMap(ShownAsTable):
    """Numbers as colours: red above zero, blue below, yellow where one is NaN or Inf.

    Recipe: ``hookline.observe.HeatMap(tensor)`` at the end of a cell, or, with a number in each cell,
    ``HeatMap(effects, rows=layers, columns=tokens, title="effect of a patch")``. Two maps have the same colours with
    ``HeatMap(effects, vmin=-1, vmax=1)``.

    Of more than two dimensions the first entry of each leading one is drawn. A picture has 64 rows and 120 columns at
    most: a pixel of a larger tensor has the strongest of the numbers that it stands for. Making one reads the numbers,
    which waits for the device of the tensor; nothing else is done to it.

    Args:
        values: A tensor, an array, or rows of numbers.
        rows: The names of the rows.
        columns: The names of the columns.
        title: A line above it.
        vmin: With ``vmax``: the number with the strongest blue, or, from 0 on, the one without a colour; numbers below
            it look like it. Without them zero has no colour, and the largest number the strongest.
        vmax: The number with the strongest red, or, up to 0, the one without a colour.
    """

    def __init__(
        self,
        values: Any,
        *,
        rows: Sequence[Any] = (),
        columns: Sequence[Any] = (),
        title: str = "",
        vmin: float | None = None,
        vmax: float | None = None,
    ) -> None:
        tensor = values if isinstance(values, Tensor) else _as_tensor(values)
        matrix, drawn_rows, drawn_columns, note = _matrix(tensor)
        self._matrix = matrix
        self._has_names = len(rows) + len(columns) > 0
        self._rows = _labels("rows", rows, drawn_rows)
        self._columns = _labels("columns", columns, drawn_columns)
        self._scale = _scale_of(matrix, vmin, vmax)
        span = _range_of(matrix)
        self._words = " · ".join(filter(None, (title, f"{tuple(tensor.shape)}{note}", span)))
        self._title, self._foot = title, f"numbers{note}: {span}"

    def _table(self) -> Table:
        if not self._has_names:
            return Table(title=self._words)
        rows = zip(self._rows, self._matrix, strict=True)
        cells = [[str(name), *(f"{x:.3g}" for x in row[:_MAX_NAMED])] for name, row in rows]
        more = len(self._columns) - _MAX_NAMED
        foot = [f"… and {more} more columns", self._foot] if more > 0 else [self._foot]
        header = ["", *map(str, self._columns[:_MAX_NAMED])]
        return Table(header, cells, range(1, len(header)), self._title, foot, most=_MAX_ROWS, heat=self._scale)

    def _repr_html_(self) -> str:
        colours = "" if self._scale is None else legend(self._scale, behind_text=self._has_names)
        if self._has_names:
            return self._table().html() + colours
        scale = self._scale or ColourScale(-1, 1)
        shares = [[scale.share(number) for number in row] for row in _strongest(self._matrix).tolist()]
        return line(self._words) + picture(shares, self._words) + colours


def heat_maps_of(tensors: dict[str, Tensor]) -> str:
    """Return a heat map for each of ``tensors`` that has one, under its name."""
    found = []
    for name, tensor in tensors.items():
        try:
            found.append(HeatMap(tensor, title=name)._repr_html_())
        except OptionError:
            found.append(line(f"{name} · {tuple(tensor.shape)} · {str(tensor.dtype).removeprefix('torch.')}"))
    return "\n".join(found)


def _as_tensor(values: Any) -> Tensor:
    try:
        return torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"A heat map takes numbers in rows, got {type_name(values)} ({error}).") from None


def _labels(what: str, names: Sequence[Any], drawn: range) -> Sequence[Any]:
    """Return the names of the rows or columns that are drawn, or their numbers; ``names`` has one for each or none."""
    if len(names) not in (0, drawn.stop):
        raise OptionError(f"{what}= has {len(names)} names, and the heat map has {drawn.stop} {what}.")
    return [*map(str, names)][:: drawn.step] if len(names) else drawn


def _matrix(tensor: Tensor) -> tuple[NDArray[np.float64], range, range, str]:
    """Return the numbers that are drawn, which rows and columns they are, and a note which part of ``tensor``."""
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    real = tensor.detach() if whole and tensor.layout is torch.strided and not tensor.is_meta else countable(tensor)
    if real is None or not real.numel():
        raise OptionError("A heat map takes real numbers in memory; these are empty, complex or sparse, or have none.")
    with torch.no_grad():
        leading = real.dim() - 2
        flat = real[(0,) * leading] if leading > 0 else real.reshape(1, -1) if leading < 0 else real
        note = f", [{', '.join(['0'] * leading)}]" if leading > 0 and real.shape[:leading].numel() > 1 else ""
        stride = math.ceil(math.sqrt(max(1, flat.numel() / _MAX_READ)))
        rows, columns = (range(0, size, stride) for size in flat.shape)
        note += f", one in {stride} of its rows and columns" if stride > 1 else ""
        numbers: NDArray[np.float64] = flat[::stride, ::stride].to(device="cpu", dtype=torch.float64).numpy()
    return numbers, rows, columns, note


def _strongest(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a matrix of at most 64 by 120; each number is the one farthest from zero in its part of ``matrix``."""
    for axis, most in ((0, _MAX_ROWS), (1, _MAX_COLUMNS)):
        size = matrix.shape[axis]
        if size > most:
            starts = np.arange(most) * size // most
            high, low = (reduce(matrix, starts, axis=axis) for reduce in (np.maximum.reduceat, np.minimum.reduceat))
            matrix = np.where(np.abs(low) > np.abs(high), low, high)  # NaN stays: both have it
    return matrix


def _scale_of(matrix: NDArray[np.float64], low: float | None, high: float | None) -> ColourScale | None:
    """Return the scale from ``low`` to ``high``; without them, as far from zero on each side as the largest number."""
    if low is not None and high is not None and -math.inf < low < high < math.inf:
        return ColourScale(low, high)
    if low is not None or high is not None:
        raise OptionError(f"vmin= and vmax= are two finite numbers, the smaller first; got {low!r} and {high!r}.")
    finite = matrix[np.isfinite(matrix)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    if not largest:
        return None  # all are zero, or none is finite
    return ColourScale(-largest if finite.min() < 0 else 0.0, largest if finite.max() > 0 else 0.0)


def _range_of(matrix: NDArray[np.float64]) -> str:
    """Return the smallest and the largest number, and how many are not finite, in words."""
    finite = matrix[np.isfinite(matrix)]
    bad = matrix.size - finite.size
    span = f"{finite.min():.3g} to {finite.max():.3g}" if finite.size else ""
    return " · ".join(filter(None, (span, f"{bad:,} not finite" if bad else "")))
