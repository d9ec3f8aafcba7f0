"""One count per pass, however many hooks feed the same tracker.

Asked by the hooks of ``tracker_hooks`` and ``fisher_hook``. Somebody may register a tracker twice for a component;
two hooks then fire in each call, one after the other, and the second has to notice. Hooks are told apart, not counted,
so that any of them may come off and the others go on. Modules are told apart too: policies that share a tracker may
have components of the same name.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Any, Final

from torch import Tensor, nn

from hookline.sites import _torch
from hookline.sites.kinds import Kind
from hookline.sites.modules.module_hooks import existing_hooks

__all__ = ["begin_turn", "is_first_in_backward", "is_first_in_forward"]


class _Turns:
    """Who has shown one tracker what."""

    def __init__(self) -> None:
        self.last: dict[Hashable, tuple[Any, int]] = {}
        """By place and thread: the output that was counted last, and the hook that counted it."""
        self.passes: OrderedDict[int, dict[Hashable, dict[int, int]]] = OrderedDict()
        """By backward pass and place: how often each hook has fired."""


_TURNS: Final[weakref.WeakKeyDictionary[Any, _Turns]] = weakref.WeakKeyDictionary()
_MOST_THREADS: Final = 4096
_MOST_PASSES: Final = 64
"""More than that are not under way at once."""


def begin_turn(tracker: Any, component: str, module: nn.Module, hook: object) -> None:
    """The hook fires: what it counted itself belongs to an earlier call, though it may be the very same tensor."""
    turns, place = _of(tracker).last, _place(component, module)
    last = turns.get(place)
    if last is not None and last[1] == id(hook):
        del turns[place]


def is_first_in_forward(tracker: Any, component: str, module: nn.Module, hook: object, output: Tensor) -> bool:
    """Whether no other hook has shown the tracker this output in this call; `begin_turn` comes before."""
    turns, place = _of(tracker).last, _place(component, module)
    last = turns.get(place)
    if last is not None and _is(last[0], output) and _is_on(module, last[1], hook):
        return False
    if len(turns) > _MOST_THREADS:
        turns.clear()  # threads come and go
    # With a weak reference around, a parameter could not be swapped; it lives long, so its id will do.
    turns[place] = id(output) if isinstance(output, nn.Parameter) else weakref.ref(output), id(hook)
    return True


def _place(component: str, module: nn.Module) -> Hashable:
    # Two policies may have a component of that name, and two threads on one model take turns of their own.
    return component, id(module), threading.get_ident()


def _is_on(module: nn.Module, other: int, hook: object) -> bool:
    """Whether the other hook is on the module still; one that came off cannot have been at this call."""
    table = existing_hooks(module)
    ours = () if table is None else table.hooks_of_kind(Kind.FORWARD)
    on = {id(entry.hook) for entry in ours} | {id(each) for each in module._forward_hooks.values()}
    return other in on or id(hook) not in on  # a replica of DataParallel does not show who is on it


def is_first_in_backward(tracker: Any, place: Hashable, hook: object) -> bool:
    """Whether no other hook has fired as often at this place in this backward pass: its first, second, … time.

    A component that was called several times fires several times. Gradients themselves are no good as a sign: a weak
    reference to what becomes a ``.grad`` would forbid ``torch.utils.swap_tensors``.
    """
    task = _torch.graph_task_id()
    if task == -1:
        return True  # called by hand
    passes = _of(tracker).passes
    fired = passes.setdefault(task, {}).setdefault(place, defaultdict(int))
    fired[id(hook)] += 1
    while len(passes) > _MOST_PASSES:
        passes.popitem(last=False)
    return all(count < fired[id(hook)] for other, count in fired.items() if other != id(hook))


def _of(tracker: Any) -> _Turns:
    turns = _TURNS.get(tracker)
    return _TURNS.setdefault(tracker, _Turns()) if turns is None else turns


def _is(last: Any, output: Tensor) -> bool:
    return last == id(output) if isinstance(last, int) else last() is output
