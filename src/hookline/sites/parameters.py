"""Hooks that run when a backward pass has accumulated into a parameter's ``.grad``.

Takes an attachment and a target from ``attach``, hands entries to one port per parameter. torch gives a leaf as many
post-accumulate hooks as one likes; ours is one, which keeps our order and is found again by ``attached``.

What a leaf's hooks refer to, Python's collector cannot see: with torch's own, a hook that refers to its parameter or
its model keeps them for good. So the port refers to the hooks weakly, and the module that owns the parameter keeps
them, in its table like any other.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.errors import NoMatchError, TargetError, UnhookableError
from hookline.sites import _torch
from hookline.sites.entry import Entry, Holder
from hookline.sites.handle import HookHandle
from hookline.sites.select import as_list, check_model, describe, name_matcher, named_modules, select
from hookline.sites.site import Site
from hookline.sites.table import LOCK, existing_table, root_of, sweep, table_of

if TYPE_CHECKING:
    from hookline.sites.entry import Attachment
    from hookline.sites.root import Root
    from hookline.types import Target

__all__ = [
    "NamedParameter",
    "ParameterPort",
    "fasten_parameters",
    "hook_leaf",
    "parameter_entries",
    "select_parameters",
]

_Owners: TypeAlias = Iterable[nn.Module]


class NamedParameter(NamedTuple):
    """A parameter, its dotted name, and the module it belongs to."""

    name: str
    parameter: Tensor
    module: nn.Module


class _LeafEntry(Entry):
    """One hook on one leaf; the modules that own the leaf keep it."""

    __slots__ = ("__weakref__", "owners")

    def __init__(self, attachment: Attachment, name: str, port: ParameterPort, root: Root, owners: _Owners) -> None:
        super().__init__(attachment, name, port, root)
        self.owners = tuple(map(weakref.ref, owners))

    def leaf_site(self) -> Site:
        """This firing, for a hook that asked to know."""
        module: Any = self.owners[0]() if self.owners else None
        step, call = self.root.moment(self)
        if step < 0:  # on an accelerator, the backward runs in a thread that never began a forward
            step = self.root.step
        return Site(self.name, module, self.attachment.kind, call, step)


class ParameterPort(Holder):
    """What torch calls when a leaf has its gradient; runs the hooks of ours on that leaf."""

    __slots__ = ("__weakref__", "_handle", "_kept", "_refs")

    def __init__(self, leaf: Tensor) -> None:
        self._refs: tuple[weakref.ref[_LeafEntry], ...] = ()
        self._kept: tuple[_LeafEntry, ...] = ()
        self._handle = leaf.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]

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
    def entries(self) -> tuple[_LeafEntry, ...]:
        """The hooks, in the order they run."""
        return tuple(entry for ref in self._refs if (entry := ref()) is not None)

    def add(self, entry: _LeafEntry) -> None:
        """Put a hook in its place; under LOCK."""
        self._hold((*self.entries, entry))
        for module in filter(None, (owner() for owner in entry.owners)):
            table_of(module).add(entry)

    def discard(self, entry: Entry) -> None:
        """Take a hook off; the last one takes the port along."""
        assert isinstance(entry, _LeafEntry)
        self._hold(other for other in self.entries if other is not entry)
        if not self._refs:
            self._handle.remove()
        for module in filter(None, (owner() for owner in entry.owners)):
            table = existing_table(module)
            if table is not None:
                table.discard(entry)

    def _hold(self, entries: Iterable[_LeafEntry]) -> None:
        ranked = sorted(entries, key=lambda entry: entry.attachment.rank)
        self._kept = tuple(entry for entry in ranked if not entry.owners)
        self._refs = tuple(map(weakref.ref, ranked))

    def alive(self) -> bool:
        """Whether the leaf is still there."""
        # A weak reference to the leaf itself would forbid torch.utils.swap_tensors.
        return self._handle.hooks_dict_ref() is not None


def hook_leaf(attachment: Attachment, name: str, leaf: Tensor, root: Root, owners: _Owners = ()) -> None:
    """Put an attachment on one leaf, for as long as one of its owners lives, or the leaf if it has none; under LOCK."""
    port = next((hook for hook in _torch.leaf_hooks_of(leaf) if isinstance(hook, ParameterPort)), None)
    if port is None:
        port = ParameterPort(leaf)
    # TorchScript modules keep no hooks.
    able = [module for module in owners if not isinstance(module, torch.jit.ScriptModule)]
    entry = _LeafEntry(attachment, name, port, root, able)
    attachment.entries[entry] = None
    port.add(entry)


def fasten_parameters(attachment: Attachment, model: nn.Module, chosen: list[NamedParameter]) -> HookHandle:
    """Put an attachment on all of those parameters, or, if one of them refuses, on none."""
    lazy = [item.name for item in chosen if is_lazy(item.parameter)]
    if lazy:
        raise UnhookableError(f"{_listed(lazy)}: lazy, so not there yet; attach after the first forward.")
    with LOCK:
        sweep()
        handle = HookHandle(attachment)
        try:
            attachment.roots[root_of(model)] = None
            _add_entries(attachment, model, chosen)
        except BaseException:
            handle.remove(quiet=True)
            raise
        return handle


def _add_entries(attachment: Attachment, model: nn.Module, chosen: list[NamedParameter]) -> None:
    (root,) = attachment.roots
    owners: dict[int, list[nn.Module]] = {id(item.parameter): [item.module] for item in chosen}
    for module in model.modules():
        for own in set(module._parameters.values()):
            known = owners.get(id(own), [module])
            if module is not known[0]:
                known.append(module)
    for name, parameter, _ in chosen:
        hook_leaf(attachment, name, parameter, root, owners[id(parameter)])


def parameter_entries(module: nn.Module) -> Iterator[Entry]:
    """The hooks of ours on the module's own parameters."""
    for hook in _torch.parameter_hooks_of(module):
        if isinstance(hook, ParameterPort):
            yield from hook.entries


def select_parameters(model: nn.Module, target: Target, *, exclude: Target = None) -> list[NamedParameter]:
    """The parameters that ``target`` means and that gradients come to, each once, in the model's own order.

    A name or a glob may name parameters (``"*.bias"``) or modules; a module, however it is selected, stands for
    all parameters below it. Every element of a list has to mean at least one that gradients come to.
    """
    check_model(model)
    everything = list(_named_parameters(model))
    names: set[str] = set()
    for item in as_list(target):
        found = _matching(model, everything, item)
        if not found:
            raise _no_match(model, everything, item)
        _trainable([each for each in everything if each.name in found])
        names |= found
    unwanted = _unwanted(model, everything, exclude)
    kept: dict[int, NamedParameter] = {}
    for each in everything:
        if each.name in names and id(each.parameter) not in unwanted:
            kept.setdefault(id(each.parameter), each)
    if not kept:
        raise NoMatchError(
            f"{'The model' if target is None else _described(target)} has parameters in this {type(model).__name__}, "
            f"but exclude={_described(exclude)} takes all of them away."
        )
    return _trainable(list(kept.values()))


def _named_parameters(model: nn.Module) -> Iterator[NamedParameter]:
    """Every name of every parameter."""
    for prefix, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield NamedParameter(f"{prefix}.{name}" if prefix else name, parameter, module)


def _matching(model: nn.Module, everything: list[NamedParameter], item: Any) -> set[str]:
    """The names of the parameters that one element of a target means."""
    if isinstance(item, Tensor):
        return {each.name for each in everything if each.parameter is item}
    found: set[str] = set()
    if isinstance(item, str | re.Pattern):
        matches = name_matcher(item)
        found = {each.name for each in everything if matches(each.name)}
    try:
        modules = {name for name, _ in select(model, item)}
    except NoMatchError:
        return found
    return found | {each.name for each in everything if _is_below(each.name, modules)}


def _is_below(name: str, modules: set[str]) -> bool:
    while name:
        name = name.rpartition(".")[0]
        if name in modules:
            return True
    return False


def _unwanted(model: nn.Module, everything: list[NamedParameter], exclude: Any) -> set[int]:
    """The ids of the parameters that ``exclude`` means, by any of their names; it may mean none."""
    if exclude is None or (isinstance(exclude, list) and not exclude):
        return set()
    names: set[str] = set().union(*(_matching(model, everything, item) for item in as_list(exclude)))
    return {id(each.parameter) for each in everything if each.name in names}


def _trainable(found: list[NamedParameter]) -> list[NamedParameter]:
    """Those that gradients come to; none is an error."""
    trainable = [item for item in found if item.parameter.requires_grad]
    if not trainable:
        raise UnhookableError(
            f"{_listed([item.name for item in found])}: no gradient is accumulated there, because requires_grad is "
            "False; set requires_grad_() first."
        )
    return trainable


def _no_match(model: nn.Module, everything: list[NamedParameter], item: Any) -> Exception:
    kind = type(model).__name__
    if isinstance(item, Tensor):
        return TargetError(f"{_described(item)} is not a parameter of this {kind}; it belongs to another model.")
    modules = {name for name, _ in named_modules(model)}
    if not isinstance(item, str | re.Pattern) or any(map(name_matcher(item), modules)):
        select(model, item)  # which knows best what to say when there is no such module
        return NoMatchError(f"{'The model' if item is None else describe(item)} has no parameter in this {kind}.")
    names = [each.name for each in everything] + sorted(modules - {""})
    text = item if isinstance(item, str) else item.pattern
    near = get_close_matches(text, names, n=4, cutoff=0.4) or names[:4]
    hint = f"nearest: {', '.join(map(repr, near))}" if near else "it has none"
    return NoMatchError(f"No parameter or module matches {describe(item)} in this {kind}; {hint}.")


def _described(target: Any) -> str:
    """The target as a user would write it; not all numbers of a tensor."""
    if isinstance(target, Tensor):
        return f"The given {type(target).__name__} of shape {tuple(target.shape)}"
    if isinstance(target, list | tuple):
        return "[" + ", ".join(map(_described, target)) + "]"
    return describe(target)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
