"""Run the hooks that are on when a compiled graph comes to one of our operators.

torch calls these functions: those with ``@ops.behind`` are what an operator of ``op_schemas`` does when the graph runs
(``enter`` and ``leave`` are in ``compiled_gradients``). ``attach`` imports the file to have them there. Each finds the
`ModuleHooks` of its module by the key, which is a tensor (``module_hooks.hooks_with_key``), and runs its *entries*:
each is a `HookAtSite`, one hook at one site (``hook_at_site``). `fire_gradients` runs those on gradients.

The operators come with texts that are written while the compiler traces; change both ends together:

- `_Shown` reads the six fields of ``fire``, ``count`` and a ``sink`` of the forward, which ``trace_hooks`` writes in
  `_fire`, `_edit` and `_summarize`. The layout in it is of ``value_layout``.
- `What` reads that of ``grads`` and ``edit``, and `_receiving` that of a ``sink`` of the backward; both are written by
  ``compiled_gradients._TracedCall``.
- `op_schemas.read_line` reads that of ``sink_all``, which ``graph_passes`` writes.

Graphs on the disk have these texts: raise the ``_VERSION`` of ``compiled_gradients`` with a change of the second, and
that of ``graph_passes`` with one of the third. The head of ``op_schemas`` says what a new operator needs. Tests:
tests/sites/compiled.

The compiled program uses its memory again. So a hook is handed copies; a `Summary` gets the tensors themselves, and may
not keep them. Where a forward hook changes its copies in place, `_fire` raises, since the change is lost, unless the
hook has ``observe=True``. Hooks come and go while a graph stays, so the hooks that are on now are looked up at each
call; `_Receivers` are kept until `HookChanges.count` has changed.
"""

from __future__ import annotations

import contextlib
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
from hookline.sites.compiled.op_schemas import Summary
from hookline.sites.compiled.value_layout import rebuild
from hookline.sites.gradients import fire_gradients
from hookline.sites.hook_at_site import next_order, open_contexts
from hookline.sites.module_hooks import HookChanges, ModuleHooks, hooks_with_key, run_one_post, run_one_pre

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from hookline.hook_types import Grads
    from hookline.sites.gradients import Moments
    from hookline.sites.hook_at_site import HookAtSite


@dataclass(slots=True)
class _NotedCall:
    """A call of a module in the forward, as its gradients have to know it."""

    order: int
    moments: Moments
    contexts: frozenset[int]


_NOTED: Final[OrderedDict[int, _NotedCall]] = OrderedDict()
"""By the number that ``note`` returned, which goes to ``grads`` and ``edit`` in the backward."""
_NUMBERS: Final = itertools.count()
_KEPT: Final = 1 << 14
"""How many calls are kept noted, the oldest go: a forward whose backward never comes would leave its calls there."""


_NO_CONTEXT: Final = contextlib.nullcontext()


def _nothing(*args: Any) -> None:
    return None


def _token(*args: Any) -> Tensor:
    """Return a tensor without meaning: an operator that takes in that of another one comes after it."""
    return torch.empty((), dtype=torch.int64, device="cpu")


@ops.behind(ops.BEGIN, _token)
def _begin(key: Tensor, serial: int, gradients: bool) -> Tensor:
    module_hooks: ModuleHooks | None = hooks_with_key(key)
    if module_hooks is not None:
        module_hooks.begin_forward(gradients)
    return _token()


_ONLY_OUTPUT: Final = "('(','builtins:tuple',('(','builtins:tuple',),('{','builtins:dict',),'T',)"
"""The layout that most observers read, as `describe` writes it: no arguments, and one tensor as the output."""


class _Shown:
    """One step of a compiled call, read from its text: a group of observers, a hook that edits, or a summary.

    ``trace_hooks`` writes the text: serial number, name of the slot, letters of its steps, number of the step, "g" with
    gradients on, layout (empty for all but observers). The layout is last, as it may contain "|". Name and letters find
    the `Slot` of now (`ModuleHooks.slot_for`), the number its step.
    """

    __slots__ = ("_layout", "_place", "_slot", "_steps", "grad")

    def __init__(self, text: str) -> None:
        _, self._slot, steps, place, grad, self._layout = text.split("|", 5)
        self._steps, self._place = f"{steps}/", int(place)
        self.grad = grad == "g"
        """Whether gradients were enabled around the call: inside a compiled forward they never are."""

    def entries(self, module_hooks: ModuleHooks) -> tuple[HookAtSite, ...]:
        """Return the observers that are on now."""
        slot = module_hooks.slot_for(self._slot, self._steps)
        if slot is None:
            return ()
        if slot is module_hooks.replaced:
            return tuple(entry for entry in slot.groups[self._place] if not entry.attachment.removed)
        return slot.groups[self._place]

    def hook_at(self, module_hooks: ModuleHooks) -> HookAtSite | None:
        """Return the hook that edits at this place, or is handed a summary."""
        slot = module_hooks.slot_for(self._slot, self._steps)
        return None if slot is None else slot.steps[self._place]

    def values(self, tensors: list[Tensor], numbers: Sequence[int], reals: Sequence[Tensor]) -> Any:
        """Return arguments, keyword arguments, and after the forward the output."""
        if not tensors and not numbers and not reals:
            return _without_parts(self._layout)
        if self._layout == _ONLY_OUTPUT:
            return (), {}, tensors[0]
        return rebuild(self._layout, tensors, numbers, reals)


_shown: Final = functools.lru_cache(maxsize=4096)(_Shown)


@functools.lru_cache(maxsize=1024)
def _without_parts(layout: str) -> Any:
    """Return the values of a call of which hooks look at nothing that varies."""
    return rebuild(layout, [], (), ())


@ops.behind(ops.FIRE, _nothing)
def _fire(key: Tensor, what: str, tensors: list[Tensor], numbers: Sequence[int], reals: Sequence[Tensor]) -> None:
    module_hooks: ModuleHooks | None = hooks_with_key(key)
    shown = _shown(what)
    entries = shown.entries(module_hooks) if module_hooks is not None else ()
    module = module_hooks.module() if module_hooks is not None else None
    if not entries or module is None:
        return
    may_edit = bool(tensors) and any(not entry.attachment.options.observe for entry in entries)
    counting = torch.is_inference_mode_enabled() and may_edit
    with torch.inference_mode(False) if counting else _NO_CONTEXT:  # tensors of inference mode have no version
        copies = [tensor.detach().clone() for tensor in tensors]
    values = shown.values(copies, numbers, reals)
    run_one = run_one_post if len(values) == 3 else run_one_pre
    with (
        _torch.counting_changes() if counting else _NO_CONTEXT,
        _NO_CONTEXT if torch.is_grad_enabled() is shown.grad else torch.set_grad_enabled(shown.grad),
    ):
        for entry in entries:
            versions = [copy._version for copy in copies] if may_edit else []
            run_one(entry, module, *values)
            if may_edit and [copy._version for copy in copies] != versions and not entry.attachment.options.observe:
                raise HookReturnError(
                    f"{entry.attachment.kind.value} hook {entry.attachment.name!r} on {entry.name!r} changed its "
                    "tensors in place, in compiled code: it was shown copies, so the change is lost. Have it return "
                    "the new value instead."
                )


@ops.behind(ops.COUNT, _nothing)
def _count(key: Tensor, what: str) -> None:
    module_hooks: ModuleHooks | None = hooks_with_key(key)
    entry = _shown(what).hook_at(module_hooks) if module_hooks is not None else None
    if entry is not None:
        entry.count()


@ops.behind(ops.SINK, _nothing)
def _sink(key: Tensor, what: str, found: list[Tensor], each: int) -> None:
    _sink_all([key], ops.line_of(0, ops.Share(0, len(found), each), what), found)


def _receiving(key: Tensor, text: str) -> Iterator[tuple[HookAtSite, Summary, nn.Module]]:
    """Yield the hooks that are on now and that a summary in a graph is for, each with its `Summary` and module."""
    module_hooks: ModuleHooks | None = hooks_with_key(key)
    module = module_hooks.module() if module_hooks is not None else None
    if module_hooks is None or module is None:
        return
    number = None
    if text.startswith(GRADIENTS):
        number = int(text.removeprefix(GRADIENTS).partition("|")[0])
        entries: Sequence[HookAtSite | None] = module_hooks.backward_pre
    else:
        entries = (_shown(text).hook_at(module_hooks),)
    for entry in entries:
        summary = None if entry is None or entry.attachment.removed else entry.attachment.summary
        if entry is not None and summary is not None and number in (None, summary.number):
            yield entry, summary, module


class _Receivers:
    """The hooks behind one operator and what takes its tensors, worked out once until hooks come or go."""

    def __init__(self, keys: list[Tensor], what: str) -> None:
        self.changes = HookChanges.count
        self._keys = keys  # kept, so that their ids stay theirs
        self.entries: list[HookAtSite] = []
        by_summary: dict[Summary, list[tuple[str, Any, ops.Share]]] = {}
        for line in what.split("\n"):
            number, share, text = ops.read_line(line)
            for entry, summary, module in _receiving(keys[number], text):
                self.entries.append(entry)
                by_summary.setdefault(summary, []).append((entry.name, module, share))
        self.takes = [summary.prepare(sites) for summary, sites in by_summary.items()]


@ops.behind(ops.SINK_ALL, _nothing)
def _sink_all(keys: list[Tensor], what: str, found: list[Tensor]) -> None:
    """Hand over what several sites have found; ``what`` has a line for each (``ops.read_line``)."""
    module_hooks: ModuleHooks | None = hooks_with_key(keys[0])
    known: dict[Any, _Receivers] = {} if module_hooks is None else module_hooks.receivers
    at = (what, *map(id, keys))
    receivers = known.get(at)
    if receivers is None or receivers.changes != HookChanges.count:
        if len(known) >= _GRAPHS:
            known.clear()
        receivers = known[at] = _Receivers(list(keys), what)
    for entry in receivers.entries:
        entry.count()
    for take in receivers.takes:
        take(found)


_GRAPHS: Final = 64
"""For so many operators of a model receivers are remembered; more come only where something goes wrong."""


@ops.behind(ops.NOTE, _token)
def _note(key: Tensor, serial: int) -> Tensor:
    # The serial number is not read: it keeps the compiler from taking two calls for one.
    number = next(_NUMBERS)
    module_hooks: ModuleHooks | None = hooks_with_key(key)
    if module_hooks is not None:
        if _torch.graph_task_id() == -1:
            module_hooks.calls_seen += 1
        _NOTED[number] = _NotedCall(next_order(), module_hooks.gradient_moments(), open_contexts())
        if len(_NOTED) > _KEPT:
            _NOTED.popitem(last=False)
    return torch.tensor(number, device="cpu")


_what: Final = functools.lru_cache(maxsize=4096)(What)


@ops.behind(ops.GRADS, _token)
def _watch(key: Tensor, note: Tensor, what: str, after: Tensor | None, tensors: list[Tensor]) -> Tensor:
    _run(key, note, _what(what), tensors)
    return _token()


def _fake_edit(key: Tensor, note: Tensor, what: str, after: Tensor | None, tensors: list[Tensor]) -> list[Tensor]:
    return [*(torch.empty_like(tensor) for tensor in tensors[: _what(what).count]), _token()]


@ops.behind(ops.EDIT, _fake_edit)
def _edit(key: Tensor, note: Tensor, what: str, after: Tensor | None, tensors: list[Tensor]) -> list[Tensor]:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UnhookableError(
            "A gradient hook that edits cannot be differentiated in compiled code, and this backward is "
            "(create_graph=True): its second derivatives would be lost. Use observe=True, or run the model eagerly."
        )
    new = [grad for grad in _run(key, note, _what(what), tensors) if grad is not None]
    # As the graph expects them: in memory of their own, laid out like the gradients that went in.
    return [*(torch.empty_like(like).copy_(grad) for grad, like in zip(new, tensors, strict=False)), _token()]


def _run(key: Tensor, note: Tensor, what: What, tensors: list[Tensor]) -> Grads:
    grads, more = what.spread([tensor.detach().clone() for tensor in tensors])
    module_hooks: ModuleHooks | None = hooks_with_key(key)
    module = module_hooks.module() if module_hooks is not None else None
    if module_hooks is None or module is None:
        return grads
    entries = module_hooks.backward_pre if what.is_pre else module_hooks.backward
    called = tuple(entry for entry in entries if entry.attachment.summary is None)
    noted = _NOTED.get(int(note)) or _NotedCall(next_order(), {}, frozenset())
    return fire_gradients(noted, called, module, grads, more, *what.names)
