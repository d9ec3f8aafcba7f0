"""Hooks on leaves: what torch calls when a backward pass has accumulated into a ``.grad``.

Takes leaves from ``parameters`` and ``tensors``. torch gives a leaf as many post-accumulate hooks as one likes; ours is
one torch_hook, which keeps our order and is found again by ``attached``.

What a leaf's hooks refer to, Python's collector cannot see: with torch's own, a hook that refers to its parameter or
its model keeps them for good. So the torch_hook refers to the hooks weakly, and the module that owns the parameter
keeps them, in its module_hooks like any other.

A hook is on a name, not on the tensor that happened to be there: FSDP2, ``load_state_dict(assign=True)`` and a plain
``module.weight = …`` put another parameter in its place. At the start of each forward of the model every hooked name
is looked at, which takes 0.2 µs, and the hooks move where it is another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.sites import _torch
from hookline.sites.hook_at_site import HookAtSite, HookContainer
from hookline.sites.modules.module_hooks import LOCK, existing_hooks, hooks_of_module
from hookline.sites.site_info import Site

if TYPE_CHECKING:
    from hookline.sites.hook_at_site import Attachment, ForwardCounter

__all__ = ["LeafHook", "hook_leaf", "parameter_entries"]

_Owners: TypeAlias = Iterable[tuple[nn.Module, str]]
"""The modules that have a leaf, and what each calls it."""
_Row: TypeAlias = "tuple[Callable[[], nn.Module | None], str, Callable[[], Any], _HookAtLeaf]"


class _HookAtLeaf(HookAtSite):
    """One hook on one leaf; the modules that own the leaf keep it."""

    __slots__ = ("__weakref__", "hooks", "owners", "places", "shard")

    def __init__(self, attachment: Attachment, name: str, counter: ForwardCounter, owners: _Owners) -> None:
        super().__init__(attachment, name, None, counter)
        self.places = tuple((weakref.ref(module), key) for module, key in owners)
        self.owners = tuple(dict.fromkeys(module for module, _ in self.places))
        self.shard: Callable[[], Any] | None = None
        """What FSDP2 knows of the parameter, if it is one of its."""
        self.hooks: Callable[[], Any] = lambda: None
        """The dictionary of the leaf's hooks, by which it is known: an id would be another leaf's after its death."""

    def sit_on(self, leaf: Tensor) -> None:
        """Go onto a leaf, and off the one before; under LOCK."""
        torch_hook = next((hook for hook in _torch.leaf_hooks_of(leaf) if isinstance(hook, LeafHook)), None)
        if torch_hook is None:
            torch_hook = LeafHook(leaf)
        if self.container is not None:
            self.container.let_go(self)
        self.container, self.hooks = torch_hook, torch_hook.hooks_of_leaf
        torch_hook.take(self)

    def row(self) -> _Row:
        """Where to look whether it still is the right leaf."""
        return (*self.places[0], self.hooks, self)

    def is_on(self, leaf: Tensor | None) -> bool:
        """Whether that is the leaf."""
        hooks = self.hooks()
        return leaf is not None and hooks is not None and _torch.leaf_hooks(leaf) is hooks

    def leaf_now(self, shards: _torch.Shards) -> Tensor | None:
        """What is at the hook's name by now; None if nothing is."""
        for owner, key in self.places:
            module = owner()
            leaf = None if module is None else module._parameters.get(key)
            if leaf is None:
                continue
            shard = shards.get((id(module), key))
            if shard is None:
                return leaf
            self.shard = weakref.ref(shard)  # the module itself shows the gathered parameter half of the time
            return _torch.sharded_parameter(shard)
        return None

    def leaf_site(self) -> Site:
        """This firing, for a hook that asked to know."""
        module: Any = self.owners[0]() if self.owners else None
        step, call = self.counter.moment(self)
        if step < 0:  # on an accelerator, the backward runs in a thread that never began a forward
            step = self.counter.step
        return Site(self.name, module, self.attachment.kind, call, step)


class LeafHook(HookContainer):
    """What torch calls when a leaf has its gradient; runs the hooks of ours on that leaf."""

    __slots__ = ("__weakref__", "_handle", "_kept", "_refs", "hooks_of_leaf")

    def __init__(self, leaf: Tensor) -> None:
        self._refs: tuple[weakref.ref[_HookAtLeaf], ...] = ()
        self._kept: tuple[_HookAtLeaf, ...] = ()
        self._handle = leaf.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]
        # A weak reference to the leaf itself would forbid torch.utils.swap_tensors; its hooks live as long as it does.
        self.hooks_of_leaf: Callable[[], Any] = self._handle.hooks_dict_ref

    def __call__(self, leaf: Tensor) -> None:
        entries = self.entries
        if not entries:
            self._handle.remove()  # the modules are gone that had the leaf; torch goes through a copy
        for entry in entries:
            entry.count()
            if entry.simple:
                entry.hook(leaf)
            else:
                entry.call(leaf, (), entry.leaf_site() if entry.attachment.wants_site else None)

    @property
    def entries(self) -> tuple[_HookAtLeaf, ...]:
        """The hooks, in the order they run."""
        return tuple(entry for ref in self._refs if (entry := ref()) is not None)

    def take(self, entry: _HookAtLeaf) -> None:
        """Put a hook in its place; under LOCK."""
        self._hold((*self.entries, entry))

    def let_go(self, entry: HookAtSite) -> None:
        """Take a hook off the leaf; the last one takes the torch_hook along."""
        self._hold(other for other in self.entries if other is not entry)
        if not self._refs:
            self._handle.remove()

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off the leaf and its modules."""
        assert isinstance(entry, _HookAtLeaf)
        self.let_go(entry)
        for module in filter(None, (owner() for owner in entry.owners)):
            module_hooks = existing_hooks(module)
            if module_hooks is not None:
                module_hooks.discard(entry)
        leaves = entry.counter.leaves
        if isinstance(leaves, _Leaves) and leaves.discard(entry):
            entry.counter.leaves = None

    def _hold(self, entries: Iterable[_HookAtLeaf]) -> None:
        ranked = sorted(entries, key=lambda entry: entry.attachment.rank)
        self._kept = tuple(entry for entry in ranked if not entry.owners)
        self._refs = tuple(map(weakref.ref, ranked))

    def alive(self) -> bool:
        """Whether the leaf is still there."""
        return self.hooks_of_leaf() is not None


class _Leaves:
    """The hooks that were put on parameters through one counter; called when a forward begins."""

    __slots__ = ("_entries", "_rows")

    def __init__(self) -> None:
        self._entries: dict[_HookAtLeaf, None] = {}
        self._rows: tuple[_Row, ...] | None = None
        """What to look at in each forward, made when hooks have come, gone or moved."""

    def __call__(self) -> None:
        """Have every hook follow its name, if another parameter is there now."""
        rows = self._rows
        if rows is None:
            with LOCK:
                rows = self._rows = tuple(entry.row() for entry in self._entries)
        lost = []
        for owner, key, hooks, entry in rows:
            module = owner()
            leaf = None if module is None else module._parameters.get(key)
            own = hooks()
            # not entry.is_on(leaf), without the call: this is done for every parameter at every forward.
            if leaf is None or own is None or _torch.leaf_hooks(leaf) is not own:
                shard = None if entry.shard is None else entry.shard()
                if shard is None or not entry.is_on(_torch.sharded_parameter(shard)):
                    lost.append(entry)
        if lost:
            self._follow(lost)

    def _follow(self, lost: list[_HookAtLeaf]) -> None:
        if _torch.in_functional_call():
            return
        with LOCK:
            shards = _torch.fsdp_shards()
            for entry in lost:
                leaf = entry.leaf_now(shards)
                if leaf is not None and not entry.is_on(leaf) and _is_trained(leaf) and entry in self._entries:
                    entry.sit_on(leaf)
                    self._rows = None

    def add(self, entry: _HookAtLeaf) -> None:
        """One more hook to look after; under LOCK."""
        self._entries[entry] = None
        self._rows = None

    def discard(self, entry: _HookAtLeaf) -> bool:
        """One less; whether that was the last; under LOCK."""
        self._entries.pop(entry, None)
        self._rows = None
        return not self._entries


def _is_trained(leaf: Tensor) -> bool:
    """Whether a hook can follow to it. One that takes no gradient may take one later, FSDP's views are gone soon."""
    return isinstance(leaf, nn.Parameter) and leaf.is_leaf and leaf.requires_grad and not is_lazy(leaf)


def hook_leaf(attachment: Attachment, name: str, leaf: Tensor, counter: ForwardCounter, owners: _Owners = ()) -> None:
    """Put an attachment on one leaf, for as long as one of its owners lives, or the leaf if it has none; under LOCK."""
    # TorchScript modules keep no hooks.
    able = [(module, key) for module, key in owners if not isinstance(module, torch.jit.ScriptModule)]
    entry = _HookAtLeaf(attachment, name, counter, able)
    entry.sit_on(leaf)
    attachment.entries[entry] = None
    for module in filter(None, (owner() for owner in entry.owners)):
        hooks_of_module(module).add(entry)
    if entry.places:
        if not isinstance(counter.leaves, _Leaves):
            counter.leaves = _Leaves()
        counter.leaves.add(entry)


def parameter_entries(module: nn.Module) -> Iterator[HookAtSite]:
    """The hooks of ours on the module's own parameters."""
    for hook in _torch.parameter_hooks_of(module):
        if isinstance(hook, LeafHook):
            yield from hook.entries
