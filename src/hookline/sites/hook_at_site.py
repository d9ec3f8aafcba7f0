"""One hook at one site, with what it has done so far.

Takes its options from the `Attachment` it belongs to, sits in a `HookContainer` (for modules: a `ModuleHooks`), is
called by the torch_hooks."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from hookline.sites import _torch
from hookline.sites.kinds import MODULE
from hookline.sites.modules.call_context import open_contexts
from hookline.sites.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from hookline.hook_types import Hook
    from hookline.sites.kinds import Kind, SiteType
    from hookline.sites.modules.forward_counter import ForwardCounter

__all__ = ["Attachment", "HookAtSite", "HookContainer", "OrderGroup", "Summary", "next_order"]

next_order = itertools.count().__next__
"""One clock for attachments and calls: a gradient hook takes part in the calls that begin after it was attached."""


class OrderGroup(IntEnum):
    """When a hook's turn comes among the hooks of its site and kind."""

    RAW = 0
    """Observers that asked for what there was before any edit."""
    EDIT = 1
    """Hooks whose return value counts, in the order they were attached."""
    OBSERVE = 2
    """Observers of what downstream will see."""


class Summary(ABC):
    """What an observer leaves in compiled code in place of itself: small tensors, which the graph makes.

    The compiler joins that with whatever made the tensors; these are all that comes out.
    """

    number: int
    """Tells summaries that differ apart: in graphs, and in what the compiler keeps on disk."""

    make: Callable[[list[Tensor]], Found | None]
    """Gives what is found in the tensors of an output, or in its gradients; None for nothing. It is traced."""

    @abstractmethod
    def receive(self, items: Sequence[tuple[Any, list[Tensor], int]]) -> None:
        """The graph has come to it: for each module what was found, and the number of `Found`."""


Found: TypeAlias = "tuple[list[Tensor], int]"
"""What a graph has found, and a number known while it was traced that whoever receives it needs."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Attachment:
    """What one call of ``attach`` asked for, and the entries it made."""

    hook: Hook
    kind: Kind
    name: str
    order_group: OrderGroup
    site_type: SiteType = MODULE
    """What it is put on."""
    counters: dict[ForwardCounter, None] = field(default_factory=dict)
    """The models it was attached through: one, or for process-wide hooks each model as it is met."""
    prepend: bool = False
    with_kwargs: bool = False
    always_call: bool = False
    wants_site: bool = False
    profile: bool = False
    everywhere: bool = False
    context: int | None = None
    """For hooks that are for the calls of one context alone: its number."""
    may_edit: bool = True
    """Whether the return value can replace a gradient; if not, gradients are watched without touching the graph."""
    order: int = field(default_factory=next_order)
    entries: dict[HookAtSite, None] = field(default_factory=dict)
    clock: Callable[[], Any] | None = None
    """For gradient hooks that ask when the call's own part of the backward pass was over (``site.ended``)."""
    by_name: Callable[..., Any] | None = None
    """What calls the hook in code that is being compiled; set for hooks that become part of it, because they edit."""
    summary: Summary | None = None
    """For an observer that leaves a summary of what it is shown in compiled code, instead of being called there."""
    reads: str = "ako"
    """Which of arguments, keyword arguments and output the hook looks at: a compiled call shows it no others."""
    removed: bool = False
    on_remove: Callable[[Attachment], None] | None = None
    """Told when the hook comes off."""
    retired: int = 0
    """Firings on modules that are gone, and whose entries were let go."""
    versions_before: list[tuple[object, int]] | None = None
    """For a hook on the model itself: by which it is told later whether the model was trained
    (`parameter_versions`)."""
    turns: dict[str, tuple[int, int]] | None = None
    """For a hook that is called at each firing and runs at some: how often it ran at each site, and in which forward
    last."""

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Sorts the hooks of one site and kind: phase, everywhere first, then registration or its reverse."""
        return self.order_group, not self.everywhere, -self.order if self.prepend else self.order

    def members(self) -> list[HookAtSite]:
        """The entries as they are now: one whose module is collected goes, also while somebody looks through them."""
        return list(self.entries)

    def let_go(self, entry: HookAtSite) -> None:
        """The module of that entry is gone: of a process-wide hook only the count is kept."""
        if self.everywhere and entry in self.entries:
            del self.entries[entry]
            self.retired += entry.fired
            if entry.counter.model() is None:
                self.counters.pop(entry.counter, None)

    @property
    def simple(self) -> bool:
        """Whether the hook can be called straight, without looking at options."""
        plain = not (self.with_kwargs or self.wants_site or self.profile or self.always_call)
        return plain and self.context is None


class HookContainer:
    """What entries sit in; one per place that torch can be made to call us from."""

    __slots__ = ()

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; nothing happens if it is off already."""
        raise NotImplementedError

    def alive(self) -> bool:
        """Whether the place is still there."""
        return True

    def why_silent(self, entry: HookAtSite) -> str:
        """The likely reason why a hook never fired though its model ran."""
        raise NotImplementedError


class HookAtSite:
    """One hook on one module, function, tensor, …"""

    __slots__ = (
        "attachment",
        "container",
        "counter",
        "fired",
        "hook",
        "last_step",
        "name",
        "seconds",
        "simple",
        "step_at_attach",
    )

    def __init__(self, attachment: Attachment, name: str, container: Any, counter: ForwardCounter) -> None:
        self.attachment = attachment
        self.hook = attachment.hook
        self.simple = attachment.simple
        self.counter = counter
        self.step_at_attach = counter.step
        self.name = name
        self.container = container  # a HookContainer; which, its site_type decides
        self.fired = 0
        self.last_step = -1
        self.seconds = 0.0

    def due(self) -> bool:
        """Whether the call that is running here is any of the hook's business."""
        context = self.attachment.context
        return context is None or context in open_contexts()

    def count(self) -> None:
        """Note that the hook is about to run."""
        self.fired += 1
        self.last_step = self.counter.step

    def site(self, module: Any) -> Site:
        """This firing, for a hook that asked to know."""
        step, call = self.counter.moment(self)
        training, gradients = self.counter.mode()
        kind, again = self.attachment.kind, _torch.in_recomputation()
        return Site(self.name, module, kind, call, step, again, training=training, gradients=gradients)

    def call(self, module: Any, args: tuple[Any, ...], site: Any = None) -> Any:
        """Run the hook with whatever options it has; ``args`` are those of its kind after the module."""
        attachment = self.attachment
        options = {}
        if attachment.wants_site:
            options["site"] = site if site is not None else self.site(module)
        if not attachment.profile:
            return self.hook(module, *args, **options)
        start = time.perf_counter()
        try:
            return self.hook(module, *args, **options)
        finally:
            self.seconds += time.perf_counter() - start
