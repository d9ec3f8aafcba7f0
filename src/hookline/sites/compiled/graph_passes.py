"""Arrange in the compiler's graphs what they hand over: few operators, each reduction where its tensor is made.

What is handed over are summaries for observers: calls of the operator ``sink`` (``op_schemas``). While a graph is
traced, `hand_over_late` of observe/watch/graph.py calls `arrange` with two operators of that file: one finds statistics
of the rows of a tensor, the other joins them. Inductor then calls `_arrange_joint` with the graph of forward and
backward, before it divides that in two *sides*, and `_arrange_side` with each side afterwards (`_torch.lend_pass`).

The passes may move and join our own operators, and must leave the results of all others as they are. They read the
arguments of ``sink`` by position (key, text, the tensors found, ``each``: see `op_schemas.Found`) and those of
``sink_all``, and those of the two operators of observe/watch/graph.py (`_FIND`, `_JOIN`): a change of a schema is one
here. They write the text of ``sink_all`` by `op_schemas.line_of`, which ``op_runtime`` reads by ``read_line``. Raise
`_VERSION` with any change of what they do: it is part of what the compiler knows graphs on the disk by. Tested in
tests/observe/watch/test_graph_stats.py and test_watch_compiled.py.

Before the division, our operators come last in the forward: the compiler decides by the order of the forward what to
keep for the backward, and computes nothing again that comes behind an operator that it cannot join with others. What
was found by row in all tensors of a side is joined in one buffer for each statistic, and one ``sink_all`` takes these
(five hundred small tensors took 2 ms of the host). Tensors that are handed over whole are taken together as well, as
far as they may be held. After the division, each reduction moves to where its tensor is made, since inductor joins
neighbours alone. Whole tensors are handed over as soon as the last of a group is there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from hookline.sites import _torch
from hookline.sites.compiled import op_schemas as ops

_VERSION: Final = "7"
"""Part of what the compiler knows graphs on the disk by: another for each change of what is done here."""
_SMALL: Final = 1 << 20
_SMALL_TOGETHER: Final = 64 << 20
"""Bytes at most, where there is no backward, of one tensor that is handed over whole together with others, and of all
of these."""
_HELD: Final = 64
_HELD_IN_GRAPHS: Final = 512 << 20
"""Whole tensors are held to be handed over together, where a backward keeps most of them anyway: one part in `_HELD` of
the memory of a GPU; with CUDA graphs, which share their memory with nothing else, at most so many bytes."""
_MOST_ROWS: Final = 1 << 18
"""One program adds up all rows of a tensor; of more, several should."""
_NOT_KEPT: Final = ("eager_input_vals", "val", "tensor_meta")
"""Of the notes on one operator in a graph, what does not hold for the one that takes its place."""


def arrange(find: Any, join: Any) -> None:
    """Arrange the graph that is being traced.

    ``find`` is the operator that finds statistics of a tensor by row, ``join`` the one that joins what was found:
    `_FIND` and `_JOIN` of observe/watch/graph.py.
    """

    def joint(graph: Any) -> bool:
        _arrange_joint(graph, find, join)
        return True

    _torch.lend_pass("joint_custom_pre_pass", _VERSION, joint)


def _arrange_joint(graph: Any, find: Any, join: Any) -> None:
    """Join the calls of ``sink`` of each side, before the graph is divided.

    What was found by row is joined in buffers; whole tensors are taken together in groups, as far as they may be held;
    what fits neither (open sizes, too many rows, small tensors) is handed over together at the end, unaltered.
    """
    has_backward = any(node.op == "placeholder" and _is_tangent(node) for node in graph.nodes)
    small = _small_sinks(graph)
    _move_late(graph, find, small, has_backward)
    sides = 0
    for calls in _sides(graph, find):
        by_row = [node for node in calls if _is_by_row(node, find)]
        joined = [node for node in by_row if 0 <= _num_rows(node) <= _MOST_ROWS]
        whole = [node for node in calls if _is_whole(node) and (has_backward or node in small)]
        groups = _held_groups([node for node in whole if _num_bytes_of(node) < math.inf])
        done = {*joined, *(node for some in groups for node in some)}
        rest = [node for node in calls if node not in done and (node in by_row or (node in whole and node in small))]
        if len(rest) > 1:
            groups.append(rest)
        sides += bool(joined or groups)
        if joined:
            _join_rows(graph, joined, join)
        for some in groups:
            _hand_over(graph, some)
    if sides:
        _Early.begin(find, sides)


class _Early:
    """Moves reductions to where tensors are made, in as many graphs as are to come: one for each side."""

    left = 0
    """How many are to come; for the process, as inductor's pass is."""

    @classmethod
    def begin(cls, find: Any, sides: int) -> None:
        if _torch.lend_pass("post_grad_custom_pre_pass", _VERSION, lambda graph: cls._arrange(graph, find)):
            cls.left = 0
        cls.left += sides

    @classmethod
    def _arrange(cls, graph: Any, find: Any) -> bool:
        if any(node.target is ops.SINK_ALL for node in graph.nodes):
            _arrange_side(graph, find)
            cls.left -= 1
        return cls.left <= 0


def _arrange_side(graph: Any, find: Any) -> None:
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if node.target is find]:
        made = node.args[0]
        if made.op != "placeholder":
            unpacked = [user for user in node.users if user.target is operator.getitem]
            _move_behind(made, [node, *sorted(unpacked, key=order.__getitem__)])
    for node in [node for node in graph.nodes if node.target is ops.SINK_ALL and node.args[2]]:
        last = max(node.args[2], key=order.__getitem__)
        if last.op != "placeholder" and last.target is not operator.getitem:
            last.append(node)


# -- what belongs together ------------------------------------------------------------------------------------


def _is_tangent(node: Any) -> bool:
    return "tangents" in str(node.target)


def _is_whole(node: Any) -> bool:
    """Return whether a call of ``sink`` hands over a tensor as it is, or no tensor and so counts a firing alone."""
    return bool(node.args[3] == 1)


def _is_by_row(node: Any, find: Any) -> bool:
    """Return whether a call of ``sink`` hands over what ``find`` has found by row."""
    return node.args[3] > 1 and all(_comes_from(find, part) for part in node.args[2])


def _comes_from(op: Any, node: Any) -> bool:
    return node.target is operator.getitem and node.args[0].target is op


def _small_sinks(graph: Any) -> frozenset[Any]:
    """Return the calls of ``sink`` that are handed whole tensors, so small that they can wait for the last of them."""
    found: set[Any] = set()
    left: float = _SMALL_TOGETHER
    for node in graph.nodes:
        if node.target is ops.SINK and _is_whole(node):
            size = sum(map(_hinted_bytes, node.args[2]))
            if size <= min(_SMALL, left):
                left -= size
                found.add(node)
    return frozenset(found)


def _hinted_bytes(node: Any) -> float:
    """Return the bytes of a tensor in a graph; of an open size as in the call that is being compiled."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return math.inf
    sizes = [size if isinstance(size, int) else getattr(size.node, "hint", None) for size in value.shape]
    return math.inf if None in sizes else math.prod(sizes) * value.element_size()


def _num_bytes_of(call: Any) -> float:
    """Return the bytes of the tensor that a call hands over whole; infinitely many if there is none of a known size."""
    value: Any = call.args[2][0].meta.get("val") if call.args[2] else None
    is_known = isinstance(value, Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    return math.prod(value.shape) * value.element_size() if is_known else math.inf


def _num_rows(call: Any) -> int:
    """Return how many rows a call hands over what was found in; -1 if that is open."""
    value = call.args[2][0].meta.get("val")
    return value.numel() if isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape) else -1


def _move_late(graph: Any, find: Any, small: frozenset[Any], has_backward: bool) -> None:
    """Put the calls of our operators, and what only unpacks them, behind the rest of the forward.

    They stay in front of the backward: the compiler moves an operator with effects that stands behind the first
    operator of the backward into the backward. And they stay in front of what writes to an input of the graph
    (``copy_``), which they may have to read first. Where there is no backward, nothing is kept for it, and large
    tensors are handed over where they are made.
    """
    tangents: set[Any] = set()
    late: dict[Any, None] = {}
    last: Any = None
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            tangents |= {node} if _is_tangent(node) else set()
        elif _writes(node) or not tangents.isdisjoint(inputs):
            break
        elif node.target is ops.SINK:
            if has_backward or node in small or all(_comes_from(find, part) for part in node.args[2]):
                late[node] = None
        elif node.target is find or (node.target is operator.getitem and inputs[0] in late):
            late[node] = None
        elif node.op == "call_function":
            last = node
    if last is not None:
        _move_behind(last, late)


def _move_behind(last: Any, nodes: Iterable[Any]) -> None:
    """Move nodes behind ``last``, in this order."""
    for node in nodes:
        last.append(node)
        last = node


def _writes(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _sides(graph: Any, find: Any) -> list[list[Any]]:
    """Return the calls of ``sink`` in the forward, and those in the backward, as far as they can be taken together.

    Between the first and the last of a side, nothing that is handed over changes: the graph is functional, but for what
    it writes to its inputs.
    """
    backward: set[Any] = set()
    sides: tuple[list[Any], list[Any]] = ([], [])
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if (node.op == "placeholder" and _is_tangent(node)) or not backward.isdisjoint(inputs):
            backward.add(node)
        if node.target is ops.SINK and (_is_whole(node) or _is_by_row(node, find)):
            sides[node in backward].append(node)
    return [side for side in sides if side]


def _held_groups(calls: list[Any]) -> list[list[Any]]:
    """Divide calls that hand over whole tensors into groups that do not hold too much memory."""
    most = _most_held(calls[0].args[2][0].meta["val"].device) if calls else 0
    groups: list[list[Any]] = []
    left = -1.0
    for node in calls:
        left -= _num_bytes_of(node)
        if left < 0:
            groups.append([])
            left = most - _num_bytes_of(node)
        groups[-1].append(node)
    return groups


def _most_held(device: torch.device) -> int:
    most = torch.cuda.get_device_properties(device).total_memory // _HELD if device.type == "cuda" else 1 << 30
    return min(most, _HELD_IN_GRAPHS) if _torch.records_graphs() else most


# -- one call in place of many --------------------------------------------------------------------------------


def _hand_over(graph: Any, calls: list[Any]) -> None:
    """Put one call of ``sink_all`` in place of these, where the last of them is; what several have is in it once."""
    places: dict[Any, int] = {}
    found: list[Any] = []
    shares = []
    for node in calls:
        own = tuple(node.args[2])
        if own not in places:
            places[own] = len(found)
            found += own
        shares.append(ops.Share(places[own], len(own), node.args[3]))
    _sink_all(graph, calls, shares, found, calls[-1])


def _join_rows(graph: Any, calls: list[Any], join: Any) -> None:
    """Join what was found by row in one buffer for each statistic; put one call of ``sink_all`` in place of these."""
    begins: dict[Any, int] = {}
    parts: list[Any] = []
    shares: list[ops.Share] = []
    rows = 0
    for node in calls:
        find, count = node.args[2][0].args[0], _num_rows(node)
        if find not in begins:
            begins[find] = rows
            rows += count
            parts += node.args[2]
        shares.append(ops.Share(begins[find], count, node.args[3], in_rows=True))
    kinds = len(calls[0].args[2])
    firsts = [part.meta["val"] for part in parts[:kinds]]
    with firsts[0].fake_mode:
        fakes = [first.new_empty([rows]) for first in firsts]
    last = joined = _put(graph, join, (parts, kinds), fakes, calls[-1], calls[-1])
    buffers = []
    for number, fake in enumerate(fakes):
        last = _put(graph, operator.getitem, (joined, number), fake, last, calls[-1])
        buffers.append(last)
    _sink_all(graph, calls, shares, buffers, last)


def _sink_all(graph: Any, calls: list[Any], shares: list[ops.Share], found: list[Any], after: Any) -> None:
    keys: dict[Any, int] = {}
    lines = [
        ops.line_of(keys.setdefault(node.args[0], len(keys)), share, node.args[1])
        for node, share in zip(calls, shares, strict=True)
    ]
    _put(graph, ops.SINK_ALL, (list(keys), "\n".join(lines), found), None, after, calls[-1])
    for node in calls:
        graph.erase_node(node)


def _put(graph: Any, target: Any, args: tuple[Any, ...], value: Any, after: Any, like: Any) -> Any:
    with graph.inserting_after(after):
        node = graph.call_function(target, args)
    # Notes say, for one, how the arguments lay when they were traced: without, the compiler chooses their strides.
    node.meta.update({name: note for name, note in like.meta.items() if name not in _NOT_KEPT}, val=value)
    return node
