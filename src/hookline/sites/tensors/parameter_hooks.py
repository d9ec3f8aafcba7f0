"""Which parameters a target means, and putting ``param_grad`` hooks on them.

Takes an attachment and a target from ``attach``, hands the parameters to ``leaves``, where the hooks sit.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.errors import NoMatchError, TargetError, UnhookableError
from hookline.messages import nearest_names
from hookline.sites import _torch
from hookline.sites.handle import HookHandle
from hookline.sites.modules.module_hooks import LOCK, counter_of, sweep
from hookline.sites.targets import as_list, check_model, describe, named_modules, select, spelled_matcher
from hookline.sites.tensors.leaf_hooks import hook_leaf
from hookline.sites.wrappers import Place, parameter_place, unwrap, walk

if TYPE_CHECKING:
    from hookline.hook_types import Target
    from hookline.sites.hook_at_site import Attachment

__all__ = [
    "NamedParameter",
    "attach_to_parameters",
    "select_parameters",
]


class NamedParameter(NamedTuple):
    """A parameter, its dotted name, and the module it belongs to."""

    name: str
    parameter: Tensor
    module: nn.Module


def attach_to_parameters(attachment: Attachment, model: nn.Module, chosen: list[NamedParameter]) -> HookHandle:
    """Put an attachment on all of those parameters, or, if one of them refuses, on none."""
    lazy = [item.name for item in chosen if is_lazy(item.parameter)]
    if lazy:
        raise UnhookableError(f"{_listed(lazy)}: lazy, so not there yet; attach after the first forward.")
    with LOCK:
        sweep()
        handle = HookHandle(attachment)
        try:
            if chosen:  # on none, there is nothing to count for, and `attached` would not find what counts
                attachment.counters[counter_of(unwrap(model))] = None
                _add_entries(attachment, model, chosen)
        except BaseException:
            handle.remove(quiet=True)
            raise
        return handle


def _add_entries(attachment: Attachment, model: nn.Module, chosen: list[NamedParameter]) -> None:
    (counter,) = attachment.counters
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
    """The parameters that ``target`` means, each once, in the model's own order.

    A name or a glob may name parameters (``"*.bias"``) or modules; a module, however it is selected, stands for
    all parameters below it. Every element of a list has to mean at least one; with ``trained``, at least one that
    gradients come to, and those that they do not come to are left out.
    """
    check_model(model)
    everything, places = _named_parameters(model)
    names: set[str] = set()
    for item in as_list(target):
        found = _matching(model, everything, places, item)
        if not found:
            raise _no_match(model, everything, item)
        if trained:
            _trainable([each for each in everything if each.name in found])
        names |= found
    unwanted = _unwanted(model, everything, places, exclude)
    kept: dict[int, NamedParameter] = {}
    for each in everything:
        if each.name in names and id(each.parameter) not in unwanted:
            kept.setdefault(id(each.parameter), each)
    if not kept:
        raise NoMatchError(
            f"{'The model' if target is None else _described(target)} has parameters in this {_kind(model)}, "
            f"but exclude={_described(exclude)} takes all of them away."
        )
    return _trainable(list(kept.values())) if trained else list(kept.values())


def _named_parameters(model: nn.Module) -> tuple[list[NamedParameter], list[Place]]:
    """Every name of every parameter, and the places of all modules and parameters."""
    found: list[NamedParameter] = []
    places: list[Place] = []
    for place in walk(model):
        places.append(place)
        for key, parameter in place[1]._parameters.items():
            if parameter is not None:
                places.append(parameter_place(place, key, parameter))
                found.append(NamedParameter(places[-1][0], parameter, place[1]))
    return found, places


def _matching(model: nn.Module, everything: list[NamedParameter], places: list[Place], item: Any) -> set[str]:
    """The names of the parameters that one element of a target means."""
    if isinstance(item, Tensor):
        return {each.name for each in everything if each.parameter is item}
    found: set[str] = set()
    if isinstance(item, str | re.Pattern):
        matches = spelled_matcher(item, places)
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


def _unwanted(model: nn.Module, everything: list[NamedParameter], places: list[Place], exclude: Any) -> set[int]:
    """The ids of the parameters that ``exclude`` means, by any of their names; it may mean none."""
    if exclude is None or (isinstance(exclude, list) and not exclude):
        return set()
    names: set[str] = set().union(*(_matching(model, everything, places, item) for item in as_list(exclude)))
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
    kind = _kind(model)
    if isinstance(item, Tensor):
        return TargetError(f"{_described(item)} is not a parameter of this {kind}; it belongs to another model.")
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


def _kind(model: nn.Module) -> str:
    return type(unwrap(model)).__name__


def _described(target: Any) -> str:
    """The target as a user would write it; not all numbers of a tensor."""
    if isinstance(target, Tensor):
        return f"The given {type(target).__name__} of shape {tuple(target.shape)}"
    if isinstance(target, list | tuple):
        return "[" + ", ".join(map(_described, target)) + "]"
    return describe(target)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
