"""Attach hooks to an optimizer: around its step, and on saving and loading its state.

Users call `attach_optimizer`; ``attach_everywhere`` puts a hook on every optimizer. torch gets one torch hook of ours
per optimizer and kind, which runs the hooks in our order. These hold the `_OptimizerHooks`, so it goes with the
optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hookline.errors import HookReturnError, HookSignatureError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.attach import new_attachment
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import AttachOptions, ForwardCounter, HookAtSite, HookContainer, OrderGroup
from hookline.sites.kinds import OPTIMIZER, Kind
from hookline.sites.modules.module_hooks import LOCK, StaleHook
from hookline.sites.optimizers.optimizer_wrappers import checked_optimizer, takes_hooks, unwrap_optimizer
from hookline.sites.site_info import OptimizerSite

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hookline.hook_types import Hook
    from hookline.sites.hook_at_site import Attachment


def attach_optimizer(
    optimizer: Optimizer,
    hook: Hook,
    *,
    on: str | Kind = Kind.STEP_POST,
    prepend: bool = False,
    observe: bool = False,
    name: str | None = None,
    profile: bool = False,
) -> HookHandle:
    """Put a hook on an optimizer.

    Recipe::

        def hook(optimizer, args, kwargs, *, site):
            print(site.step, optimizer.param_groups[0]["lr"])


        with hookline.attach_optimizer(optimizer, hook, on="step_post"):
            loss.backward()
            optimizer.step()

    Args:
        optimizer: A ``torch.optim.Optimizer``, or a wrapper that keeps one (Accelerate's, Lightning's, DeepSpeed's):
            the hook is put on the one inside, is called with it, and fires for the steps that this one makes.
        hook: Called as its kind says: ``(optimizer, args, kwargs)`` around a step, where ``args[0]`` is the
            optimizer; ``(optimizer)`` or ``(optimizer, state_dict)`` on saving and loading. Where it declares a
            keyword-only ``site``, it gets an `OptimizerSite`.
        on: ``step_pre`` (may return ``(args, kwargs)`` for the step), ``step_post``, ``state_dict_pre``,
            ``state_dict_post`` and ``load_state_dict_pre`` (may return another state dict), or
            ``load_state_dict_post``.
        prepend: Run before the hooks of ours that are there already.
        observe: Ignore the return value, and run after all edits (``step_pre``).
        name: A name for reports; the function's own by default.
        profile: Measure what the hook costs, for ``handle.report().cost_us``.

    One step fires its hooks once, also where ``step`` calls ``super().step()``; a step that raises has no
    ``step_post``; a step that a ``GradScaler`` skips fires nothing, or is marked (`OptimizerSite.found_inf`).

    Raises:
        UnhookableError: if it is no optimizer, or wraps one in an attribute that is not known.
        KindError, OptionError, HookSignatureError: before anything is attached.
    """
    kind = Kind.parse(on, OPTIMIZER)
    if isinstance(hook, Optimizer) and callable(optimizer):
        raise HookSignatureError("The arguments are swapped: write attach_optimizer(optimizer, hook).")
    optimizer = checked_optimizer(optimizer)
    attachment = new_attachment(
        hook, kind, AttachOptions(prepend=prepend, observe=observe, name=name, profile=profile), site_type=OPTIMIZER
    )
    with LOCK:
        _drop_leftovers()
        table = _existing_hooks(optimizer)
        if table is None:
            table = _OptimizerHooks()
        entry = HookAtSite(attachment, type(optimizer).__name__, table, ForwardCounter())
        attachment.entries[entry] = None
        table.add(entry, optimizer)
        return HookHandle(attachment)


def hook_optimizers_everywhere(attachment: Attachment) -> HookHandle:
    """Put an attachment of a step kind on every optimizer there is and will be."""
    with LOCK:
        _drop_leftovers()
        _EVERYWHERE.add(attachment)
        return HookHandle(attachment)


def optimizer_entries(optimizer: Optimizer) -> Iterator[HookAtSite]:
    """Return the hooks of ours on the optimizer itself, or inside it; those on every optimizer are on none in
    particular.
    """
    optimizer = unwrap_optimizer(optimizer)
    table = _existing_hooks(optimizer) if takes_hooks(optimizer) else None
    if table is not None:
        yield from table.entries()


def optimizer_entries_everywhere() -> Iterator[HookAtSite]:
    """Return the hooks of ours on every optimizer."""
    return _EVERYWHERE.entries()


class _HooksByKind(HookContainer):
    """Hooks by kind, each kind in the order it runs."""

    __slots__ = ("_by_kind",)

    def __init__(self) -> None:
        self._by_kind: dict[Kind, tuple[HookAtSite, ...]] = {}

    @property
    def empty(self) -> bool:
        """Return whether there are none."""
        return not self._by_kind

    def entries(self) -> Iterator[HookAtSite]:
        """Return all of them."""
        for hooks in tuple(self._by_kind.values()):
            yield from hooks

    def own(self, kind: Kind) -> tuple[HookAtSite, ...]:
        """Return those of one kind."""
        return self._by_kind.get(kind, ())

    def _put(self, entry: HookAtSite) -> None:
        kind = entry.attachment.kind
        self._by_kind[kind] = _ranked(*self.own(kind), entry)

    def _take(self, entry: HookAtSite) -> None:
        kind = entry.attachment.kind
        kept = tuple(other for other in self.own(kind) if other is not entry)
        if kept:
            self._by_kind[kind] = kept
        else:
            self._by_kind.pop(kind, None)


class _OptimizerHooks(_HooksByKind):
    """All hooks of ours on one optimizer, and the handles of its torch hooks."""

    __slots__ = ("__weakref__", "_handles", "_settled", "step")

    def __init__(self) -> None:
        super().__init__()
        self.step = -1
        self._settled = -1  # the state of _EVERYWHERE that torch's hooks were brought in line with
        self._handles: dict[Kind, RemovableHandle] = {}
        _TABLES.add(self)

    def alive(self) -> bool:
        """Return whether the optimizer is still there: it owns the dictionaries that the handles point to."""
        return any(handle.hooks_dict_ref() is not None for handle in self._handles.values())

    # -- firing ----------------------------------------------------------------------------------------------

    def run(self, kind: Kind, optimizer: Optimizer, given: tuple[Any, ...]) -> Any:
        """Run the hooks of one kind; ``given`` are its arguments after the optimizer. What torch wants returned."""
        if kind in _STEP_KINDS:
            if _torch.is_inner_step(optimizer):
                return None
            self._begin(kind, optimizer)
        values = given
        for entry in self._due(kind):
            entry.count()
            site = self._site(kind, optimizer) if entry.attachment.wants_site else None
            result = entry.call(optimizer, values, site)
            if result is not None and kind in _EDITS and entry.attachment.order_group is OrderGroup.EDIT:
                values = _EDITS[kind](entry, optimizer, result)
        if values is given:
            return None
        return values if kind is Kind.STEP_PRE else values[0]

    def _due(self, kind: Kind) -> tuple[HookAtSite, ...]:
        """Return the hooks to run: the optimizer's own, and those on every optimizer."""
        everywhere = _EVERYWHERE.own(kind)
        return _ranked(*everywhere, *self.own(kind)) if everywhere else self.own(kind)

    def _begin(self, kind: Kind, optimizer: Optimizer) -> None:
        if kind is Kind.STEP_PRE:
            self.step += 1
        if self._settled != _EVERYWHERE.changes:
            with LOCK:
                self.fit(optimizer)
                self.tidy()

    def _site(self, kind: Kind, optimizer: Optimizer) -> OptimizerSite:
        found_inf = getattr(optimizer, "found_inf", None)
        return OptimizerSite(
            type(optimizer).__name__, optimizer, kind, self.step, found_inf if isinstance(found_inf, Tensor) else None
        )

    # -- coming and going, under LOCK ------------------------------------------------------------------------

    def add(self, entry: HookAtSite, optimizer: Optimizer) -> None:
        """Put a hook in its place."""
        self._put(entry)
        self.fit(optimizer)

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off, and torch's hook if it was the last."""
        self._take(entry)
        self.tidy()
        _drop_leftovers()

    def _needed(self) -> list[Kind]:
        """Return the kinds that torch has to call us for. Steps are counted whatever the kind of hook."""
        if self.empty and _EVERYWHERE.empty:
            return []
        return [kind for kind in OPTIMIZER.args if kind is Kind.STEP_PRE or self._due(kind)]

    def fit(self, optimizer: Optimizer) -> None:
        """Give the optimizer the torch hooks that it lacks."""
        self._settled = _EVERYWHERE.changes
        for kind in self._needed():
            hooks = _torch.optimizer_hooks(optimizer, kind)
            handle = self._handles.get(kind)
            if handle is not None and handle.id in hooks:
                continue
            if not self._due(kind) and _torch.being_walked(hooks):
                self._settled = -1  # only to count steps: that can wait until torch is through with its hooks
                continue
            self._handles[kind] = _REGISTER[kind](optimizer, _OptimizerTorchHook(self, kind))

    def tidy(self) -> None:
        """Take off the hooks in torch that nothing needs; one that cannot go yet does nothing, and goes with the next
        change.
        """
        needed = self._needed()
        if not needed:
            self.step = -1
        unneeded = [kind for kind in self._handles if kind not in needed]
        for kind in unneeded:
            if _take_off(self._handles[kind]):
                del self._handles[kind]
            else:
                _LEFTOVERS.add(self)
                self._settled = -1


class _OptimizerTorchHook:
    """Called by torch: one per optimizer and kind."""

    __slots__ = ("__weakref__", "_kind", "table")

    def __init__(self, table: _OptimizerHooks, kind: Kind) -> None:
        self.table = table
        self._kind = kind

    @_torch.untraced  # an optimizer imports the compiler anyhow
    def __call__(self, optimizer: Optimizer, *args: Any) -> Any:
        return self.table.run(self._kind, optimizer, args)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch leaves hooks out when it copies an optimizer; a subclass that does not, copies nothing that acts.
        return StaleHook, (True,)


class _OptimizersEverywhere(_HooksByKind):
    """The hooks on every optimizer, and the one global hook of torch that shows us each optimizer.

    They run in the optimizer's own hooks: torch would run global hooks after the optimizer's own ones when a step
    is over. At the global hook the optimizer's own are not yet under way, so hooks added there are in time.
    """

    __slots__ = ("_handle", "changes")

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        """How often one came or went."""
        self._handle: RemovableHandle | None = None

    def add(self, attachment: Attachment) -> None:
        """Put a hook in its place; under LOCK."""
        entry = HookAtSite(attachment, "(every optimizer)", self, ForwardCounter())
        attachment.entries[entry] = None
        self._put(entry)
        self.changes += 1
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._first_sight)

    @_torch.untraced
    def _first_sight(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.empty and _existing_hooks(optimizer) is None and not _torch.is_inner_step(optimizer):
            with LOCK:
                _OptimizerHooks().fit(optimizer)

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; the last one takes torch's hook, and those of optimizers that were there for it."""
        self._take(entry)
        self.changes += 1
        for table in tuple(_TABLES):
            table.tidy()
        _drop_leftovers()

    def tidy(self) -> None:
        """Let go of torch's hook if nothing needs it."""
        if self.empty and self._handle is not None and _take_off(self._handle):
            self._handle = None


def _existing_hooks(optimizer: Optimizer) -> _OptimizerHooks | None:
    """Return the hooks on an optimizer, found through whichever torch hook of ours it carries."""
    for kind in OPTIMIZER.args:
        for hook in tuple(_torch.optimizer_hooks(optimizer, kind).values()):
            if isinstance(hook, _OptimizerTorchHook):
                return hook.table
    return None


def _drop_leftovers() -> None:
    """Take off what could not go when it should have."""
    tables = tuple(_LEFTOVERS)
    _LEFTOVERS.clear()
    for table in tables:
        table.tidy()
    _EVERYWHERE.tidy()


def _take_off(handle: RemovableHandle) -> bool:
    """Take a torch hook off, unless torch is walking that very dictionary; return whether it is off."""
    hooks = handle.hooks_dict_ref()
    if hooks is not None and handle.id in hooks and _torch.being_walked(hooks):
        return False
    handle.remove()
    return True


def _ranked(*entries: HookAtSite) -> tuple[HookAtSite, ...]:
    return tuple(sorted(entries, key=lambda entry: entry.attachment.rank))


def _new_arguments(entry: HookAtSite, optimizer: Optimizer, result: Any) -> tuple[Any, ...]:
    """Return what a step_pre hook wants the step to be called with."""
    if isinstance(result, tuple) and len(result) == 2:
        args, kwargs = result
        if isinstance(args, tuple) and isinstance(kwargs, dict) and args and args[0] is optimizer:
            return result
    raise HookReturnError(
        f"step_pre hook {entry.attachment.name!r} on {type(optimizer).__name__} must return None or "
        f"(new_args, new_kwargs), a tuple that begins with the optimizer and a dict, but got {_shown(result)}."
    )


def _new_state(entry: HookAtSite, optimizer: Optimizer, result: Any) -> tuple[Any, ...]:
    """Return what a hook wants saved or loaded."""
    if isinstance(result, dict):
        return (result,)
    attachment = entry.attachment
    raise HookReturnError(
        f"{attachment.kind.value} hook {attachment.name!r} on {type(optimizer).__name__} must return None or a "
        f"state dict, but got {_shown(result)}."
    )


def _shown(value: Any) -> str:
    """Return a value in an error, without the numbers of the tensors that may be in it."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))}{',' if len(value) == 1 else ''})"
    return repr(value) if isinstance(value, int | float | str) else type_name(value)


_STEP_KINDS: Final = frozenset({Kind.STEP_PRE, Kind.STEP_POST})
_EDITS: Final[dict[Kind, Callable[[HookAtSite, Optimizer, Any], tuple[Any, ...]]]] = {
    Kind.STEP_PRE: _new_arguments,
    Kind.STATE_DICT_POST: _new_state,
    Kind.LOAD_STATE_DICT_PRE: _new_state,
}
"""The kinds whose hooks may return something, and what becomes of it."""
_REGISTER: Final[dict[Kind, Callable[[Optimizer, Any], RemovableHandle]]] = {
    Kind.STEP_PRE: Optimizer.register_step_pre_hook,
    Kind.STEP_POST: Optimizer.register_step_post_hook,
    Kind.STATE_DICT_PRE: Optimizer.register_state_dict_pre_hook,
    Kind.STATE_DICT_POST: Optimizer.register_state_dict_post_hook,
    Kind.LOAD_STATE_DICT_PRE: Optimizer.register_load_state_dict_pre_hook,
    Kind.LOAD_STATE_DICT_POST: Optimizer.register_load_state_dict_post_hook,
}
# Weak, because the torch hooks on the optimizer hold it.
_TABLES: Final[weakref.WeakSet[_OptimizerHooks]] = weakref.WeakSet()
_LEFTOVERS: Final[weakref.WeakSet[_OptimizerHooks]] = weakref.WeakSet()
_EVERYWHERE: Final = _OptimizersEverywhere()
