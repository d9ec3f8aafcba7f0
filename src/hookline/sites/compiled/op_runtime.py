"""What happens when a compiled graph comes to one of our operators: the hooks run, those that are on at that moment.

Takes the calls of the operators (`ops`), finds the table by its key, runs entries as the ports do.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.errors import HookReturnError, UnhookableError
from hookline.sites import _torch
from hookline.sites.compiled import op_schemas as ops
from hookline.sites.compiled.compiled_gradients import GRADIENTS, What
from hookline.sites.compiled.table_keys import table_with
from hookline.sites.compiled.value_layout import rebuild
from hookline.sites.gradients.gradient_names import checked
from hookline.sites.hook_at_site import Phase, next_order
from hookline.sites.modules.call_context import open_scopes
from hookline.sites.modules.torch_hooks import run_one_post, run_one_pre
from hookline.sites.site import Site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from hookline.hook_types import Grads
    from hookline.sites.hook_at_site import Entry, Summary
    from hookline.sites.modules.forward_counter import Root
    from hookline.sites.modules.module_hooks import Table

__all__: list[str] = []

_EDIT: Final = Phase.EDIT


@dataclass(slots=True)
class _Mark:
    """A call of a module in the forward, as its gradients have to know it."""

    order: int
    moments: dict[Root, tuple[int, int]]
    scopes: frozenset[int]

    def concerns(self, entry: Entry) -> bool:
        """Whether the hook was on when the call began, and the call is its business."""
        attachment = entry.attachment
        return attachment.order < self.order and (attachment.scope is None or attachment.scope in self.scopes)


_MARKS: Final[OrderedDict[int, _Mark]] = OrderedDict()
_NUMBERS: Final = itertools.count()
_KEPT_MARKS: Final = 1 << 14
"""A forward whose backward never comes leaves its marks; more calls than this are not under way at once."""


def _nothing(*args: Any) -> None:
    return None


def _token(*args: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@ops.behind(ops.BEGIN, _token)
def _begin(key: Tensor, serial: int, gradients: bool) -> Tensor:
    table = table_with(key)
    if table is not None and table.root is not None:
        table.root.begin(gradients)
    return _token()


_VARIES: Final = frozenset("TIFs")
_ONLY_OUTPUT: Final = "((){}T)"


class _Shown:
    """What a graph has noted about one place where observers are due, or a hook that edits has run."""

    __slots__ = ("_constant", "_layout", "_steps", "grad", "place", "slot")

    def __init__(self, text: str) -> None:
        _, self.slot, self._steps, place, grad, self._layout = text.split("|", 5)
        self.place = int(place)
        self._constant = None if _VARIES & set(self._layout) or not self._layout else rebuild(self._layout, [], (), ())
        """For hooks that look at nothing."""
        self.grad = grad == "g"
        """Whether gradients were enabled around the call: inside a compiled forward they never are."""

    def entries(self, table: Table) -> tuple[Entry, ...]:
        """The hooks that are due, as the table is now."""
        port = table.port_called(self.slot)
        return () if port is None else port.group(self._steps, self.place)

    def stepper(self, table: Table) -> Entry | None:
        """The hook that edits at this place, or is handed a summary."""
        port = table.port_called(self.slot)
        return None if port is None else port.stepper(self._steps, self.place)

    def values(self, tensors: list[Tensor], numbers: Sequence[int], reals: Sequence[Tensor]) -> Any:
        """Arguments, keyword arguments, and after the forward the output."""
        if self._constant is not None:
            return self._constant
        if self._layout == _ONLY_OUTPUT:
            return (), {}, tensors[0]
        return rebuild(self._layout, tensors, numbers, reals)


_shown: Final = functools.lru_cache(maxsize=4096)(_Shown)


@ops.behind(ops.FIRE, _nothing)
def _fire(key: Tensor, what: str, tensors: list[Tensor]) -> None:
    _fire_with(key, what, tensors, (), ())


@ops.behind(ops.FIRE_WITH, _nothing)
def _fire_with(key: Tensor, what: str, tensors: list[Tensor], numbers: Sequence[int], reals: Sequence[Tensor]) -> None:
    table = table_with(key)
    shown = _shown(what)
    entries = shown.entries(table) if table is not None else ()
    module = table.module() if table is not None else None
    if not entries or module is None:
        return
    if not torch.is_inference_mode_enabled() or all(entry.attachment.phase is not _EDIT for entry in entries):
        _show(shown, entries, module, [tensor.detach().clone() for tensor in tensors], numbers, reals)
        return
    with torch.inference_mode(False):  # what is made in it does not know whether it was changed
        copies = [tensor.detach().clone() for tensor in tensors]
    with _torch.counting_changes():
        _show(shown, entries, module, copies, numbers, reals)


def _show(
    shown: _Shown,
    entries: tuple[Entry, ...],
    module: nn.Module,
    copies: list[Tensor],
    numbers: Sequence[int],
    reals: Sequence[Tensor],
) -> None:
    values = shown.values(copies, numbers, reals)
    grad = torch.is_grad_enabled()
    if grad is shown.grad:
        _run_all(entries, module, values, copies)
        return
    _torch.set_grad_enabled(shown.grad)
    try:
        _run_all(entries, module, values, copies)
    finally:
        _torch.set_grad_enabled(grad)


def _run_all(entries: tuple[Entry, ...], module: nn.Module, values: tuple[Any, ...], copies: list[Tensor]) -> None:
    for entry in entries:
        watched = copies if entry.attachment.phase is _EDIT else ()
        versions = [copy._version for copy in watched]  # 1 to begin with, if what was copied is of inference mode
        if len(values) == 3:
            run_one_post(entry, module, *values)
        else:
            run_one_pre(entry, module, *values)
        if watched and [copy._version for copy in watched] != versions:
            raise _changed_in_place(entry)


def _changed_in_place(entry: Entry) -> HookReturnError:
    attachment = entry.attachment
    return HookReturnError(
        f"{attachment.kind.value} hook {attachment.name!r} on {entry.name!r} changed its tensors in place, in compiled "
        "code: it was shown copies, so the change is lost. Have it return the new value instead."
    )


@ops.behind(ops.COUNT, _nothing)
def _count(key: Tensor, what: str) -> None:
    table = table_with(key)
    entry = _shown(what).stepper(table) if table is not None else None
    if entry is not None:
        entry.count()


@ops.behind(ops.SINK, _nothing)
def _sink(key: Tensor, what: str, found: list[Tensor], each: int) -> None:
    _sinks([key], what, found, [len(found)], [each])


@ops.behind(ops.SINKS, _nothing)
def _sinks(keys: list[Tensor], what: str, found: list[Tensor], numbers: list[int], each: list[int]) -> None:
    """``what`` has a line for each; of ``found``, each has as many as ``numbers`` says."""
    received: dict[Summary, list[tuple[nn.Module, list[Tensor], int]]] = {}
    begin = 0
    for key, made_for, number, size in zip(keys, _lines(what), numbers, each, strict=True):
        end = begin + number
        table = table_with(key)
        module = table.module() if table is not None else None
        if table is not None and module is not None:
            for entry in made_for.entries(table):
                summary = entry.attachment.summary
                if summary is not None:
                    entry.count()
                    received.setdefault(summary, []).append((module, found[begin:end], size))
        begin = end
    for summary, items in received.items():
        summary.receive(items)


class _MadeFor:
    """Which hooks a summary in a graph is for."""

    __slots__ = ("_gradients", "_shown")

    def __init__(self, text: str) -> None:
        kind, _, number = text.partition(" ")
        self._gradients = int(number.partition("|")[0]) if kind == GRADIENTS else None
        self._shown = None if kind == GRADIENTS else _Shown(text)

    def entries(self, table: Table) -> Sequence[Entry]:
        """Those that are on by now."""
        if self._shown is None:
            return [entry for entry in table.backward_pre if _number_of(entry) == self._gradients]
        entry = self._shown.stepper(table)
        return () if entry is None or entry.attachment.removed else (entry,)


@functools.lru_cache(maxsize=1024)
def _lines(what: str) -> list[_MadeFor]:
    return [_MadeFor(line) for line in what.split("\n")]


def _number_of(entry: Entry) -> int | None:
    return None if entry.attachment.summary is None else entry.attachment.summary.number


@ops.behind(ops.MARK, _token)
def _mark(key: Tensor, serial: int) -> Tensor:
    number = next(_NUMBERS)
    table = table_with(key)
    if table is not None:
        if _torch.graph_task_id() == -1:
            table.calls_seen += 1
        _MARKS[number] = _Mark(next_order(), table.gradient_moments(), open_scopes())
        if len(_MARKS) > _KEPT_MARKS:
            _MARKS.popitem(last=False)
    return torch.tensor(number, device="cpu")


_what: Final = functools.lru_cache(maxsize=4096)(What)


@ops.behind(ops.GRADS, _token)
def _watch(key: Tensor, mark: Tensor, what: str, after: Tensor | None, tensors: list[Tensor]) -> Tensor:
    _run(key, mark, _what(what), tensors)
    return _token()


def _fake_edit(key: Tensor, mark: Tensor, what: str, after: Tensor | None, tensors: list[Tensor]) -> list[Tensor]:
    return [*(torch.empty_like(tensor) for tensor in tensors[: _what(what).count]), _token()]


@ops.behind(ops.EDIT, _fake_edit)
def _edit(key: Tensor, mark: Tensor, what: str, after: Tensor | None, tensors: list[Tensor]) -> list[Tensor]:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UnhookableError(
            "A gradient hook that edits cannot be differentiated in compiled code, and this backward is "
            "(create_graph=True): its second derivatives would be lost. Use observe=True, or run the model eagerly."
        )
    new = [grad for grad in _run(key, mark, _what(what), tensors) if grad is not None]
    return [*(_laid_out(grad, like) for grad, like in zip(new, tensors, strict=False)), _token()]


def _laid_out(grad: Tensor, like: Tensor) -> Tensor:
    """As the graph expects it: memory of its own, laid out like the gradient that went in."""
    return torch.empty_like(like).copy_(grad)


def _run(key: Tensor, mark: Tensor, what: What, tensors: list[Tensor]) -> Grads:
    grads, more = what.spread([tensor.detach().clone() for tensor in tensors])
    table = table_with(key)
    module = table.module() if table is not None else None
    if table is None or module is None:
        return grads
    noted = _MARKS.get(int(mark))
    for entry in table.backward_pre if what.is_pre else table.backward:
        if (noted is not None and not noted.concerns(entry)) or entry.attachment.summary is not None:
            continue
        entry.count()
        if entry.simple:
            result = entry.hook(module, grads, *more)
        else:
            result = entry.call(module, (grads, *more), _site(entry, module, noted, what))
        if result is not None and entry.attachment.phase is _EDIT:
            grads = checked(result, grads, entry)
    return grads


def _site(entry: Entry, module: Any, noted: _Mark | None, what: What) -> Site | None:
    if not entry.attachment.wants_site:
        return None
    step, call = noted.moments.get(entry.root, (-1, 0)) if noted is not None else (-1, 0)
    mode = entry.root.training_now()
    return Site(entry.name, module, entry.attachment.kind, call, step, False, *what.names, training=mode)
