"""List sites and hooks without changing any: ``find``, ``attached`` and ``assert_no_hooks``.

Users call these. ``hookline find`` and the server call `find`; `doctor` (``debug.diagnose``) and the guard's snapshot
call `attached`; `check_hook` (``testing``) calls `assert_no_hooks`. They read the hooks of modules, parameters and
optimizers, and `attached` also those on no model in particular; hooks on tensors and graph nodes are in no list.
`assert_no_hooks` changes one thing: it drops what a copy has kept in the place of our hooks, which does nothing
(`Inert` of ``module_hooks``).

A new place that can have hooks has to be read in three functions. `places_in` yields modules and parts of attention,
`own_entries` our hooks on one of these: `doctor` calls both, so it and the fixture ``no_leaked_hooks``, which asks
``debug.diagnose``, list them. `_attachments` finds what `attached` returns, and by that the guard takes off what an
intervention has left. Hooks of others are found by `_foreign_hooks`, and by ``debug.diagnose`` for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from torch.optim import Optimizer

from hookline.errors import HooksLeftError
from hookline.messages import counted
from hookline.sites import _torch
from hookline.sites.attention import hooked_parts
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import ON_NO_MODEL, Site
from hookline.sites.module_hooks import LOCK, Slot, drop_inert, existing_hooks
from hookline.sites.optimizers import optimizer_entries, unwrap_optimizer
from hookline.sites.parameters import LeafHook, parameter_entries
from hookline.sites.roles import Layers, with_role
from hookline.sites.signature import hook_name
from hookline.sites.targets import check_model, select
from hookline.sites.wrappers import walk
from hookline.tables import THE_MODEL, ShownAsTable, Table

if TYPE_CHECKING:
    from torch import nn

    from hookline.hook_types import Target
    from hookline.sites.hook_at_site import Attachment, HookAtSite


class Sites(ShownAsTable, tuple[Site, ...]):
    """The sites a target matches; a tuple that prints as a table.

    Recipe: ``print(hookline.find(model, "layers.#"))``.
    """

    __slots__ = ()

    @overload
    def __getitem__(self, index: SupportsIndex) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> Sites: ...
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Sites(found) if isinstance(index, slice) else found

    @property
    def names(self) -> list[str]:
        """The dotted names."""
        return [site.name for site in self]

    def hooks(self, site: Site) -> list[str]:
        """Return the hooks on that module: ours by name, other people's by where their code lives."""
        return _hooks_on(site.module)

    def _table(self) -> Table:
        rows = [
            (site.name or THE_MODEL, site.type, f"{site.num_parameters:,}", ", ".join(self.hooks(site)))
            for site in self
        ]
        return Table(("name", "type", "parameters", "hooks"), rows, numbers=(2,), foot=(_counted(self.names),))


def find(
    model: nn.Module, target: Target = "*", *, exclude: Target = None, role: str | None = None, layer: Layers = None
) -> Sites:
    """Return the modules that ``attach`` would hook, without hooking them.

    Recipe::

        print(hookline.find(model, "layers.#.mlp"))
        print(hookline.find(model, role="mlp", layer=-1))

    The same grammar and the same errors as ``attach``; the table shows each module's type, how many parameters
    it holds, and which hooks are on it, by whomever.
    """
    return Sites(
        [
            Site(name, module)
            for name, module in select(model, with_role(target, role, "*", layer=layer), exclude=exclude)
        ]
    )


def attached(where: nn.Module | Optimizer | None = None) -> list[HookHandle]:
    """Return the handles of every hook of ours on a model and its modules, or on an optimizer, oldest first.

    Recipe::

        for handle in hookline.attached(model):
            print(handle)
            handle.remove()

    Without an argument, those that are on no model or optimizer in particular: on functions, operators and classes
    without ``within=``, whichever thread has put them on, and ``attach_everywhere``. Hooks on tensors and graph nodes
    go with these, and are in no list.
    """
    found = {attachment.order: attachment for attachment in _attachments(where)}
    return [HookHandle(found[order]) for order in sorted(found)]


def _attachments(where: Any) -> Iterator[Attachment]:
    if where is None:
        with LOCK:
            yield from [attachment for attachment in ON_NO_MODEL if not attachment.removed]
    elif isinstance(unwrap_optimizer(where), Optimizer):
        yield from (entry.attachment for entry in optimizer_entries(where))
    else:
        check_model(where)
        for module in where.modules():
            yield from (entry.attachment for entry in own_entries(module))
            hooks = existing_hooks(module)
            if hooks is not None and hooks.counter is not None:
                yield from tuple(hooks.counter.users)  # whatever became of what they were on


def assert_no_hooks(model: nn.Module, *, foreign: bool = False) -> None:
    """Raise unless the model is free of hooks of ours; with ``foreign``, of anybody's.

    Recipe::

        handle.remove()
        hookline.assert_no_hooks(model)

    What a copied or unpickled model has kept of our hooks is cleared away first: it does nothing.
    """
    check_model(model)
    left: list[str] = []
    for name, place in places_in(model):
        drop_inert(place)
        hooks = _hooks_on(place) if foreign else _own_hooks(place)
        owner, colon, part = name.partition(":")
        left += [f"{owner or THE_MODEL}{colon}{part}: {text}" for text in hooks]
    if left:
        shown = "; ".join(left[:8]) + (f"; and {len(left) - 8} more" if len(left) > 8 else "")
        are = f"{counted(len(left), 'hook')} {'is' if len(left) == 1 else 'are'}"
        ours = "for handle in hookline.attached(model): handle.remove()"
        raise HooksLeftError(f"{are} still attached: {shown}. Ours come off by: {ours}")


def places_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of a model with its name, and the parts of its attention that have hooks; a shared one once."""
    seen: set[int] = set()
    for name, module, *_ in walk(model):
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module
            yield from ((f"{name}:{part}", place) for part, place in hooked_parts(module).items())


def _hooks_on(module: nn.Module) -> list[str]:
    return [*_own_hooks(module), *_foreign_hooks(module)]


def own_entries(module: nn.Module) -> Iterator[HookAtSite]:
    """Yield the hooks of ours on a module, around its whole call, and on its parameters."""
    module_hooks = existing_hooks(module)
    if module_hooks is not None:
        yield from module_hooks.entries()
        if module_hooks.around is not None:
            yield from module_hooks.around.entries()
    yield from parameter_entries(module)


def _own_hooks(module: nn.Module) -> list[str]:
    texts = [f"{entry.attachment.name} ({entry.attachment.kind.value})" for entry in own_entries(module)]
    return list(dict.fromkeys(texts))  # one that sits on several parameters is said once


def _foreign_hooks(module: nn.Module) -> Iterator[str]:
    hooks = [(attribute.strip("_").removesuffix("_hooks"), hook) for attribute, _, hook in _torch.hooks_of(module)]
    hooks += [("parameter", hook) for hook in _torch.parameter_hooks_of(module)]
    for where, hook in hooks:
        if not isinstance(hook, Slot | LeafHook):
            home = getattr(hook, "__module__", None) or type(hook).__module__
            yield f"foreign {home}.{hook_name(hook)} ({where})"


def _counted(names: list[str]) -> str:
    """Return how many modules there are, counted as error messages count them: those of the model, not itself."""
    inside = len([name for name in names if name])
    modules = counted(inside, "module")
    return modules if inside == len(names) else f"the model and {modules}"
