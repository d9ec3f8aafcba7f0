"""Attach ``param_grad`` hooks to parameters: select them, and run the hooks when a gradient has been accumulated.

``attach`` and ``specs`` call `attach_to_parameters`, ``tensors`` calls `hook_leaf`. ``attach``, ``specs``, ``watch``
and debug/compare/trace.py select by `select_parameters`; ``freeze`` in ``attach`` by `named_parameters` and `is_below`.
``find`` lists by `parameter_entries`. Which modules a target means is asked of ``targets``.

torch takes any number of post-accumulate hooks on a leaf. Ours is one `LeafHook`, which runs the hooks of ours on that
leaf in our order; ``find`` and debug/diagnose/doctor.py know by its class which hooks are ours. Each hook in it is an
*entry*, a `_HookAtLeaf`: one hook at one site, of an `Attachment`, which is one call of a verb (``hook_at_site``).

Python's garbage collector cannot see what a leaf's hooks refer to: with torch's own, a hook that refers to its
parameter or its model keeps them for good. So a `LeafHook` refers to its entries weakly, and the modules that own the
parameter keep them, in their `ModuleHooks` like any other. The row of `PARAM_GRAD` in ``module_hooks._KIND_ROWS`` keeps
that on the module. A leaf that no module owns keeps its entries itself.

A hook is on a name, not on the tensor that happened to be there: FSDP2, ``load_state_dict(assign=True)`` and a plain
``module.weight = …`` put another parameter in its place. At the start of each forward of the model its `ForwardCounter`
calls `_follow`, which looks at every hooked name and moves the hooks where it is another. Entries come, move and go
under ``LOCK``; firing takes no lock. Tests: tests/sites/test_parameters.py, and for FSDP2 test_fsdp_order.py there.
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
from hookline.sites import _torch, targets
from hookline.sites.handle import HookHandle, attaching
from hookline.sites.hook_at_site import HookAtSite, HookContainer, Site
from hookline.sites.kinds import Kind
from hookline.sites.module_hooks import LOCK, counter_of, existing_hooks, hooks_of_module
from hookline.sites.wrappers import unwrap, walk

if TYPE_CHECKING:
    from hookline.hook_types import Target
    from hookline.sites.hook_at_site import Attachment, ForwardCounter

_Owners: TypeAlias = Iterable[tuple[nn.Module, str]]
"""The modules that have a leaf, and what each calls it."""


class _HookAtLeaf(HookAtSite):
    """One hook on one leaf; the modules that own the leaf keep it."""

    __slots__ = ("__weakref__", "owners", "places")

    container: LeafHook

    def __init__(
        self, attachment: Attachment, name: str, leaf: Tensor, counter: ForwardCounter, owners: _Owners
    ) -> None:
        self.places = tuple((weakref.ref(module), key) for module, key in owners)
        self.owners = tuple(dict.fromkeys(module for module, _ in self.places))
        super().__init__(attachment, name, LeafHook.of(leaf), counter)  # from here on `_follow` of a forward finds it
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

    def leaf_now(self, shards: _torch.Shards) -> Tensor | None:
        """Return the parameter that has the hook's name now; None if none has.

        Where FSDP2 manages it, that is one of ``shards``: the module shows the gathered one half of the time.
        """
        for owner, key in self.places:
            module = owner()
            leaf = None if module is None else module._parameters.get(key)
            if leaf is not None:
                return shards.get((id(module), key), leaf)
        return None

    def site(self, module: Any) -> Site:
        """Return the `Site` of this firing, in the module that the hook is named after; torch calls with the leaf."""
        owner: Any = self.owners[0]() if self.owners else None
        step, call = self.counter.moment(self)
        if step < 0:  # on an accelerator, the backward runs in a thread that never began a forward
            step = self.counter.step
        return Site(self.name, owner, self.attachment.kind, call, step)


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
            entry.call(leaf, ())

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

    def _hold(self, entries: Iterable[_HookAtLeaf]) -> None:
        ranked = sorted(entries, key=lambda entry: entry.rank)
        self._kept = tuple(entry for entry in ranked if not entry.owners)
        self._refs = tuple(map(weakref.ref, ranked))


def _follow(counter: ForwardCounter) -> None:
    """Move every hook whose name has another parameter now; called when a forward begins."""
    attachments = [attachment for attachment in tuple(counter.users) if attachment.kind is Kind.PARAM_GRAD]
    entries = [entry for attachment in attachments for entry in attachment.members() if isinstance(entry, _HookAtLeaf)]
    moved = [entry for entry in entries if not entry.is_on(entry.leaf_now({}))]
    shards = _torch.fsdp_shards() if moved else {}  # which goes through all parameters of the process
    now = [(entry, entry.leaf_now(shards)) for entry in moved]
    lost = [(entry, leaf) for entry, leaf in now if leaf is not None and not entry.is_on(leaf)]
    if not lost or _torch.in_functional_call():
        return
    with LOCK:
        for entry, leaf in lost:
            if _is_trained(leaf) and not entry.is_on(leaf) and not entry.attachment.removed:
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
        counter.follow = _follow


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
        leaf = shards.get((id(module), name.rpartition(".")[2]), parameter)
        hook_leaf(attachment, name, leaf, counter, owners[id(parameter)])


def select_parameters(
    model: nn.Module, target: Target, *, exclude: Target = None, trained: bool = True
) -> list[NamedParameter]:
    """Return the parameters that ``target`` means, each once, in the model's own order.

    A name or a glob may name parameters (``"*.bias"``) or modules; a module, however it is selected, stands for
    all parameters below it. Every element of a list has to mean at least one; with ``trained``, at least one that
    gradients come to, and those that they do not come to are left out.
    """
    targets.check_model(model)
    everything = named_parameters(model)
    names: set[str] = set()
    for item in targets.as_list(target):
        found = _matching(model, everything, item)
        if not found:
            raise _no_match(model, everything, item)
        if trained:
            _trainable([each for each in everything if each.name in found])
        names |= found
    excluded_names = {name for item in targets.excluded(exclude) for name in _matching(model, everything, item)}
    unwanted = {id(each.parameter) for each in everything if each.name in excluded_names}  # by any of its names
    kept: dict[int, NamedParameter] = {}
    for each in everything:
        if each.name in names and id(each.parameter) not in unwanted:
            kept.setdefault(id(each.parameter), each)
    if not kept:
        what = "The model" if target is None else targets.describe(target)
        raise NoMatchError(f"{what} has parameters, but exclude={targets.describe(exclude)} takes all of them away.")
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
        found = set(filter(targets.name_matcher(targets.clean_pattern(model, item, names)), names))
    try:
        modules = {name for name, _ in targets.select(model, item)}
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
    asked = "The model" if item is None else targets.describe(item)
    if isinstance(item, Tensor):
        return TargetError(f"T{asked[1:]} is not a parameter of this {kind}; it belongs to another model.")
    try:
        targets.select(model, item)
        return NoMatchError(f"{asked} has no parameter in this {kind}.")
    except NoMatchError as error:
        if not isinstance(item, str | re.Pattern):
            return error  # it knows best what to say when there is no such module
    names = [each.name for each in everything] + sorted({name for name, _ in targets.named_modules(model)} - {""})
    text = item if isinstance(item, str) else item.pattern
    near = nearest_names(text, names)
    hint = f"nearest: {', '.join(map(repr, near))}" if near else "it has none"
    return NoMatchError(f"No parameter or module matches {asked} in this {kind}; {hint}.")
