"""Say what compiled code hands over of a tensor, and add that to its places, call after call.

Watch hooks (hooks.py) leave `find_in` in compiled graphs, and make a `GraphHandover` for each operator of ours there.
factories/streaming_stats.py calls `hand_over_late`. A place is a `WatchedPlace` (engine.py), and what it has is a
`StatRow` there. A `Share` (sites/compiled/op_schemas.py) says what one place has of the tensors of an operator.

Anywhere but on a CUDA device the tensor itself is handed over. On a GPU the compiler would make a launch of its own for
the last step of every sum, six per tensor, and those take longer than reading it. So the graph finds the same for
slices of a tensor of up to 1024 numbers, called rows here, while it computes them (21 µs for nine outputs of a GPT-2
block on an H200, 1.4 ms with all six launches). It writes that into one buffer for each statistic. A table on the
device tells which slices belong to which place, and one launch of ours adds them all (`fold_rows` of
triton_programs.py). Our kernel itself reads the rest, many tensors in one launch: wider ones, gradients of 16 bits
(`_is_read_whole`), and all where a layout has thresholds or details (`find_in`).

The order and types of what `_by_row` returns are known to `_TYPES`, to `row_of_parts` of row.py, and to ``fold_rows``
with its callers `add_rows` and `add_found` of kernel.py: change all together. If an operator then computes something
else, count up the number in its name at `_FIND` and `_JOIN`. `Share` is read here by its names, and by position
(``share[:3]``). `find_in` is traced: what is not tensor code in it has to be `constant_while_tracing`
(sites/_torch.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.observe.watch.kernel import Kernel, is_read_in_place
from hookline.sites import _torch
from hookline.sites.compiled.graph_passes import arrange

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookline.observe.watch.engine import StatsEngine, WatchedPlace
    from hookline.observe.watch.row import Layout
    from hookline.sites.compiled.op_schemas import Share

_LONGEST: Final = 1024
"""The longest row that the compiler holds in registers."""
_SHORTEST: Final = 32
"""The shortest row: of shorter ones there would be too many."""
_BY_ROW: Final = frozenset({"cuda"})
"""Device types where a graph finds statistics by row."""
_IN_ROWS: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})
_CALLS: Final = 16
"""How many sets of addresses are remembered for the tensors of one operator."""


# -- while a graph is traced ---------------------------------------------------------------------------------


def find_in(tensor: Tensor, layout: Layout, *, is_gradient: bool = False) -> tuple[list[Tensor], int]:
    """Return what a graph hands over of a tensor, and how many numbers each entry of that stands for. Can be traced.

    1 means that it is the tensor itself, whose statistics are not known yet.
    """
    whole = tensor.detach()
    if whole.device.type not in _BY_ROW:
        return [whole], 1
    hand_over_late()
    if whole.dim() == 0 or layout.details or layout.thresholds or _is_read_whole(whole.dtype, is_gradient):
        return [whole], 1
    numbers = whole.flatten(2) if whole.dim() > 3 else whole  # images: a row is one channel of one image
    each = numbers.shape[-1]
    if not _torch.is_known_to_be_at_most(each, _LONGEST) or each < _SHORTEST:
        return [whole], 1
    return _FIND(numbers, each), each


@_torch.constant_while_tracing
def _is_read_whole(dtype: torch.dtype, is_gradient: bool) -> bool:
    """Return whether our kernel reads a tensor, however short its rows are.

    Gradients of 16 bits: by row, the compiler joins them with the sum for the bias in a kernel that takes 22 + 11 µs
    instead of 6 + 7 (H200). Rows of more than 1024 numbers are read whole as well: its kernels go through them in parts
    that wait for one another. A GELU with both statistics takes 69 µs, 36 without any, and 13 each to read both at full
    speed; and what is as wide lies in memory anyway, because a matrix product reads it.
    """
    return dtype not in _IN_ROWS or (is_gradient and dtype is not torch.float32)


@_torch.constant_while_tracing
def hand_over_late() -> None:
    """Arrange what the graph that is being traced hands over (`graph_passes`), as far as the compiler lets us.

    Otherwise it keeps other tensors for the backward pass than without a hook: twice the bytes for the widest layer of
    a GPT-2, and 4 GiB more at a batch of 32.
    """
    arrange(_FIND, _JOIN)


def _by_row(numbers: Any, each: int, aten: Callable[..., Any]) -> list[Any]:
    """Return sums, sums of squares, minima, maxima and numbers of zeros of the rows.

    ``aten`` calls an operator by its name: it computes it, or has the compiler write it (`open_late`).
    """
    narrow = aten("_to_copy.default", aten("reshape.default", numbers, [-1, each]), dtype=torch.float32)
    wide = aten("_to_copy.default", narrow, dtype=torch.float64)
    return [
        aten("sum.dim_IntList", wide, [-1]),
        aten("sum.dim_IntList", aten("mul.Tensor", wide, wide), [-1]),
        aten("amin.default", narrow, [-1]),
        aten("amax.default", narrow, [-1]),
        aten("sum.dim_IntList", aten("eq.Scalar", narrow, 0), [-1], dtype=torch.int32),
    ]


_TYPES: Final = (torch.float64, torch.float64, torch.float32, torch.float32, torch.int32)
"""The types of what `_by_row` returns."""


def _pretend(numbers: Tensor, each: int) -> list[Tensor]:
    # Here, and not when this file is imported: both look for inductor among the loaded modules. If inductor is what
    # compiles this graph, it is loaded by now.
    _torch.open_late(_FIND, _by_row)
    _torch.join_late(_JOIN)
    return [numbers.new_empty([numbers.numel() // each], dtype=dtype) for dtype in _TYPES]


def _join(parts: list[Tensor], kinds: int) -> list[Tensor]:
    return [torch.cat(list(parts[kind::kinds])) for kind in range(kinds)]


_LIBRARY: Final[Any] = torch.library.Library("hookline", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(name: str, arguments: str, compute: Callable[..., Any], pretend: Callable[..., Any]) -> Any:
    _LIBRARY.define(f"{name}({arguments}) -> Tensor[]")
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"hookline::{name}", pretend, lib=_LIBRARY)
    return getattr(torch.ops.hookline, name).default


# The compiler keeps its code on disk by the name of the operator: if the operator computes something else, count up the
# number in its name.
_FIND: Final[Any] = _define("find_3", "Tensor numbers, int each", partial(_by_row, aten=_torch.call_aten), _pretend)
"""The operator that finds statistics by row; the compiler opens it only when it writes the loops."""
_JOIN: Final[Any] = _define("join_1", "Tensor[] parts, int kinds", _join, _join)
"""The operator that joins what was found: each ``kinds``-th part, beginning with each of the first ``kinds``."""


# -- when it runs --------------------------------------------------------------------------------------------


class GraphHandover:
    """Adds to places what one operator hands over in each call.

    What does not change from call to call is worked out once: which rows are whose; and of whole tensors the launches
    that read them, for as long as they lie where they lay in one of the last calls.

    Args:
        engine: Where the places are.
        shares: The places, and what belongs to each.
    """

    def __init__(self, engine: StatsEngine, shares: list[tuple[WatchedPlace, Share]]) -> None:
        self._engine = engine
        self._shares = shares
        self._are_whole = all(share.each == 1 for _, share in shares)
        self._tables: dict[int, list[Tensor]] = {}
        """The tables for the kernel, by stream: a stream would not wait for one that another stream copies."""
        self._calls: dict[tuple[Any, ...], Callable[[], None]] = {}
        """Launches by stream, address of the scale, and addresses and sizes of the tensors; the latest `_CALLS`."""

    def take(self, found: list[Tensor], scale: Any) -> None:
        """Add the tensors of one call, divided by ``scale``."""
        if not self._shares:
            return
        device = found[0].device
        kernel = self._engine.kernel(device)
        if kernel is not None:
            stream = _torch.current_stream_of(device.index)()
            try:
                if self._shares[0][1].in_rows:
                    self._add_rows(kernel, stream, found, scale)
                    return
                if self._are_whole and self._read_whole(kernel, stream, found, scale):
                    return
            except Exception:  # the engine says why, if the kernel does not work for it either
                self._calls.clear()
        self._engine.take_found([(place, share.of(found), share.each) for place, share in self._shares], scale)

    def _add_rows(self, kernel: Kernel, stream: int, found: list[Tensor], scale: Any) -> None:
        tables = self._tables.get(stream)
        if tables is None:
            rows = [(self._engine.row(place, found[0].device), share) for place, share in self._shares]
            tables = self._tables[stream] = kernel.row_tables([(row.address, *share[:3]) for row, share in rows])
        for table in tables:
            kernel.add_rows(table, found, scale)

    def _read_whole(self, kernel: Kernel, stream: int, found: list[Tensor], scale: Any) -> bool:
        """Read tensors where they lie; return False if that cannot be done."""
        divisor = None if scale is None else kernel.divisor(scale)
        # Sizes may be open, and of two graphs with the same texts one may run under autocast.
        at = [(tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.is_contiguous()) for tensor in found]
        key = (stream, 0 if divisor is None else divisor.data_ptr(), *at)
        call = self._calls.get(key)
        if call is None:
            if not all(is_read_in_place(tensor) and tensor.device == found[0].device for tensor in found):
                return False
            rows = [(found[share.first], self._engine.row(place, found[0].device)) for place, share in self._shares]
            call = self._calls[key] = kernel.prepare([(tensor, row, divisor) for tensor, row in rows])
            if len(self._calls) > _CALLS:
                del self._calls[next(iter(self._calls))]
        call()
        return True
