"""Attach ``param_grad`` hooks to parameters: select them, and run the hooks when a gradient has been accumulated.

``attach`` and ``specs`` call `attach_to_parameters`, ``attach_tensor`` calls `hook_leaf`;
``watch`` and ``trace`` only select. torch takes any number of post-accumulate hooks on a leaf; ours is one `LeafHook`,
which keeps our order and is found again by ``attached`` and ``debug.diagnose``.

Python's garbage collector cannot see what a leaf's hooks refer to: with torch's own, a hook that refers to its
parameter or its model keeps them for good. So a `LeafHook` refers to the hooks weakly, and the module that owns the
parameter keeps them, in its `ModuleHooks` like any other.

A hook is on a name, not on the tensor that happened to be there: FSDP2, ``load_state_dict(assign=True)`` and a plain
``module.weight = …`` put another parameter in its place. At the start of each forward of the model every hooked name is
looked at, and the hooks move where it is another.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.errors import NoMatchError, TargetError, UnhookableError
from hookline.messages import listed, nearest_names
from hookline.sites import _torch
from hookline.sites.handle import HookHandle, attaching
from hookline.sites.hook_at_site import HookAtSite, HookContainer, Site
from hookline.sites.module_hooks import LOCK, counter_of, existing_hooks, hooks_of_module
from hookline.sites.targets import (
    as_list,
    check_model,
    clean_pattern,
    describe,
    excluded,
    name_matcher,
    named_modules,
    select,
)
from hookline.sites.wrappers import unwrap, walk

if TYPE_CHECKING:
    from hookline.hook_types import Target
    from hookline.sites.hook_at_site import Attachment, ForwardCounter

_Owners: TypeAlias = Iterable[tuple[nn.Module, str]]
"""The modules that have a leaf, and what each calls it."""


class _HookAtLeaf(HookAtSite):
    """One hook on one leaf; the modules that own the leaf keep it."""

    __slots__ = ("__weakref__", "owners", "places", "shard")

    container: LeafHook

    def __init__(
        self, attachment: Attachment, name: str, leaf: Tensor, counter: ForwardCounter, owners: _Owners
    ) -> None:
        super().__init__(attachment, name, LeafHook.of(leaf), counter)
        self.places = tuple((weakref.ref(module), key) for module, key in owners)
        self.owners = tuple(dict.fromkeys(module for module, _ in self.places))
        self.shard: Callable[[], Any] = lambda: None
        """What FSDP2 knows of the parameter, if it is one of its."""
        self.container.take(self)

    def move(self, leaf: Tensor) -> None:
        """Go onto another leaf; under LOCK."""
        self.container.let_go(self)
        self.container = LeafHook.of(leaf)
        self.container.take(self)

    def is_on(self, leaf: Tensor | None) -> bool:
        """Return whether that is the leaf, known by its dictionary: an id would be another's after its death."""
        hooks = self.container.hooks_of_leaf()
        return leaf is not None and hooks is not None and _torch.leaf_hooks(leaf) is hooks

    def is_in_place(self) -> bool:
        """Return whether the hook's name still means its leaf."""
        owner, key = self.places[0]
        module, shard = owner(), self.shard()
        if module is not None and self.is_on(module._parameters.get(key)):
            return True
        return shard is not None and self.is_on(_torch.sharded_parameter(shard))

    def leaf_now(self, shards: _torch.Shards) -> Tensor | None:
        """Return the parameter that has the hook's name now; None if none has.

        ``shards`` are what FSDP2 knows of its parameters, by module and key.
        """
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
        """Return the `Site` of this firing, for a hook that declares one."""
        module: Any = self.owners[0]() if self.owners else None
        step, call = self.counter.moment(self)
        if step < 0:  # on an accelerator, the backward runs in a thread that never began a forward
            step = self.counter.step
        return Site(self.name, module, self.attachment.kind, call, step)


class LeafHook(HookContainer):
    """Called by torch when a leaf has its gradient; runs the hooks of ours on that leaf.

    It keeps strongly only hooks without an owner (``_kept``); see the head of this file.
    """

    __slots__ = ("__weakref__", "_handle", "_kept", "_refs", "hooks_of_leaf")

    def __init__(self, leaf: Tensor) -> None:
        self._refs: tuple[weakref.ref[_HookAtLeaf], ...] = ()
        self._kept: tuple[_HookAtLeaf, ...] = ()
        self._handle = leaf.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]
        # A weak reference to the leaf itself would forbid torch.utils.swap_tensors; its hooks live as long as it does.
        self.hooks_of_leaf: Callable[[], Any] = self._handle.hooks_dict_ref

    @classmethod
    def of(cls, leaf: Tensor) -> LeafHook:
        """Return the one on that leaf; under LOCK."""
        return next((hook for hook in _torch.leaf_hooks_of(leaf) if isinstance(hook, cls)), None) or cls(leaf)

    def __call__(self, leaf: Tensor) -> None:
        entries = self.entries
        if not entries:
            self._handle.remove()  # the modules are gone that had the leaf; torch goes through a copy
        for entry in entries:
            entry.count()
            entry.call(leaf, (), entry.leaf_site() if entry.attachment.wants_site else None)

    @property
    def entries(self) -> tuple[_HookAtLeaf, ...]:
        """The hooks, in the order they run."""
        return tuple(entry for ref in self._refs if (entry := ref()) is not None)

    def take(self, entry: _HookAtLeaf) -> None:
        """Put a hook in its place; under LOCK."""
        self._hold((*self.entries, entry))

    def let_go(self, entry: HookAtSite) -> None:
        """Take a hook off the leaf; the last one takes this off too."""
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
        if isinstance(leaves, _Leaves):
            leaves.pop(entry, None)
            entry.counter.leaves = leaves or None

    def _hold(self, entries: Iterable[_HookAtLeaf]) -> None:
        ranked = sorted(entries, key=lambda entry: entry.rank)
        self._kept = tuple(entry for entry in ranked if not entry.owners)
        self._refs = tuple(map(weakref.ref, ranked))


class _Leaves(dict[_HookAtLeaf, None]):
    """The hooks that were put on parameters through one counter; called when a forward begins."""

    def __call__(self) -> None:
        """Move every hook whose name has another parameter now."""
        lost = [entry for entry in tuple(self) if not entry.is_in_place()]
        if not lost or _torch.in_functional_call():
            return
        with LOCK:
            shards = _torch.fsdp_shards()
            for entry in lost:
                leaf = entry.leaf_now(shards)
                if leaf is not None and not entry.is_on(leaf) and _is_trained(leaf) and entry in self:
                    entry.move(leaf)


def _is_trained(leaf: Tensor) -> bool:
    """Return whether a hook can move to that leaf now.

    Not to one that takes no gradient: if it takes one later, the hook moves then. Nor to FSDP's views, which are gone
    soon.
    """
    return isinstance(leaf, nn.Parameter) and leaf.is_leaf and leaf.requires_grad and not is_lazy(leaf)


def hook_leaf(attachment: Attachment, name: str, leaf: Tensor, counter: ForwardCounter, owners: _Owners = ()) -> None:
    """Put an attachment on one leaf, while one of its owners lives, or, without owners, the leaf; under LOCK."""
    # TorchScript modules keep no hooks.
    able = [(module, key) for module, key in owners if not isinstance(module, torch.jit.ScriptModule)]
    entry = _HookAtLeaf(attachment, name, leaf, counter, able)
    for module in filter(None, (owner() for owner in entry.owners)):
        hooks_of_module(module).add(entry)
    if entry.places:
        if not isinstance(counter.leaves, _Leaves):
            counter.leaves = _Leaves()
        counter.leaves[entry] = None


def parameter_entries(module: nn.Module) -> Iterator[HookAtSite]:
    """Return the hooks of ours on the module's own parameters."""
    for hook in _torch.parameter_hooks_of(module):
        if isinstance(hook, LeafHook):
            yield from hook.entries


class NamedParameter(NamedTuple):
    """A parameter, its dotted name, and the module it belongs to."""

    name: str
    parameter: Tensor
    module: nn.Module


def attach_to_parameters(attachment: Attachment, model: nn.Module, chosen: list[NamedParameter]) -> HookHandle:
    """Put an attachment on all of those parameters, or, if one of them refuses, on none."""
    lazy = [item.name for item in chosen if is_lazy(item.parameter)]
    if lazy:
        raise UnhookableError(f"{listed(lazy)}: lazy, so not there yet; attach after the first forward.")
    with attaching(attachment) as handle:
        if chosen:  # on none, there is nothing to count for, and `attached` would not find what counts
            _add_entries(attachment, model, chosen)
    return handle


def _add_entries(attachment: Attachment, model: nn.Module, chosen: list[NamedParameter]) -> None:
    counter = counter_of(unwrap(model), attachment.kind)
    counter.serve(attachment)
    # The place it was named after comes first: what is put there later is what the hook follows.
    owners = {id(item.parameter): {(item.module, item.name.rpartition(".")[2]): None} for item in chosen}
    for module in model.modules():
        for key, own in module._parameters.items():
            if id(own) in owners:
                owners[id(own)][module, key] = None
    shards = _torch.fsdp_shards()
    for name, parameter, module in chosen:
        shard = shards.get((id(module), name.rpartition(".")[2]))
        leaf = parameter if shard is None else _torch.sharded_parameter(shard)
        hook_leaf(attachment, name, leaf, counter, owners[id(parameter)])


def select_parameters(
    model: nn.Module, target: Target, *, exclude: Target = None, trained: bool = True
) -> list[NamedParameter]:
    """Return the parameters that ``target`` means, each once, in the model's own order.

    A name or a glob may name parameters (``"*.bias"``) or modules; a module, however it is selected, stands for
    all parameters below it. Every element of a list has to mean at least one; with ``trained``, at least one that
    gradients come to, and those that they do not come to are left out.
    """
    check_model(model)
    everything = named_parameters(model)
    names: set[str] = set()
    for item in as_list(target):
        found = _matching(model, everything, item)
        if not found:
            raise _no_match(model, everything, item)
        if trained:
            _trainable([each for each in everything if each.name in found])
        names |= found
    excluded_names = {name for item in excluded(exclude) for name in _matching(model, everything, item)}
    unwanted = {id(each.parameter) for each in everything if each.name in excluded_names}  # by any of its names
    kept: dict[int, NamedParameter] = {}
    for each in everything:
        if each.name in names and id(each.parameter) not in unwanted:
            kept.setdefault(id(each.parameter), each)
    if not kept:
        what = "The model" if target is None else describe(target)
        raise NoMatchError(f"{what} has parameters, but exclude={describe(exclude)} takes all of them away.")
    return _trainable(list(kept.values())) if trained else list(kept.values())


def named_parameters(model: nn.Module) -> list[NamedParameter]:
    """Return every name of every parameter."""
    return [
        NamedParameter(f"{name}.{key}" if name else key, parameter, module)
        for name, module, *_ in walk(model)
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def _matching(model: nn.Module, everything: list[NamedParameter], item: Any) -> set[str]:
    """Return the names of the parameters that one element of a target means."""
    if isinstance(item, Tensor):
        return {each.name for each in everything if each.parameter is item}
    found: set[str] = set()
    if isinstance(item, str | re.Pattern):
        names = [each.name for each in everything]
        found = set(filter(name_matcher(clean_pattern(model, item, names)), names))
    try:
        modules = {name for name, _ in select(model, item)}
    except NoMatchError:
        return found
    return found | {each.name for each in everything if is_below(each.name, modules)}


def is_below(name: str, modules: Container[str]) -> bool:
    """Return whether a parameter of that name belongs to one of the modules, or to one inside."""
    while name:
        name = name.rpartition(".")[0]
        if name in modules:
            return True
    return False


def _trainable(found: list[NamedParameter]) -> list[NamedParameter]:
    """Return those that gradients come to; none is an error."""
    trainable = [item for item in found if item.parameter.requires_grad]
    if not trainable:
        raise UnhookableError(
            f"{listed([item.name for item in found])}: no gradient is accumulated there, because requires_grad is "
            "False; set requires_grad_() first."
        )
    return trainable


def _no_match(model: nn.Module, everything: list[NamedParameter], item: Any) -> Exception:
    kind = type(unwrap(model)).__name__
    if isinstance(item, Tensor):
        return TargetError(f"T{describe(item)[1:]} is not a parameter of this {kind}; it belongs to another model.")
    try:
        select(model, item)
        return NoMatchError(f"{'The model' if item is None else describe(item)} has no parameter in this {kind}.")
    except NoMatchError as error:
        if not isinstance(item, str | re.Pattern):
            return error  # it knows best what to say when there is no such module
    names = [each.name for each in everything] + sorted({name for name, _ in named_modules(model)} - {""})
    text = item if isinstance(item, str) else item.pattern
    near = nearest_names(text, names)
    hint = f"nearest: {', '.join(map(repr, near))}" if near else "it has none"
    return NoMatchError(f"No parameter or module matches {describe(item)} in this {kind}; {hint}.")
