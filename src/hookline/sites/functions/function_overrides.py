"""Functions that no mode is shown, with something of ours in their place: operators, ``autograd.Function`` classes.

Takes entries from ``attach_function``, tells ``kernels`` and ``classes``, which stand in for such functions, the hooks
that a call is for. Hooks bound to a model are kept with it, by its `FunctionsOfModel`, and only known of here: one
that refers to its model does not keep it alive, and when the model is gone the function gets its own place back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from hookline.sites.functions.function_hooks import FunctionHooks
from hookline.sites.functions.function_mode import bound_hooks
from hookline.sites.functions.hooks_off import HOOKS_OFF, with_hooks_off
from hookline.sites.hook_at_site import NO_MODEL, HookContainer
from hookline.sites.modules.module_hooks import LOCK, ON_SWEEP

if TYPE_CHECKING:
    from hookline.sites.functions.function_mode import FunctionsOfModel
    from hookline.sites.functions.function_names import Place
    from hookline.sites.hook_at_site import Attachment, HookAtSite

__all__ = ["Override", "Overrides"]


class Override:
    """One such function while it has hooks."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.entries: dict[HookAtSite, None] = {}
        """Of hooks that are bound to no model."""
        self.bound: WeakSet[Attachment] = WeakSet()
        """The hooks that are bound to models."""
        self.armed = True
        """Whether the hooks count; not in a forked worker."""
        self.scoped = False
        """Whether there are any, or have been."""
        self._hooks: FunctionHooks | None = None

    def put_on(self) -> None:
        """Take the place of the function; all or nothing."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the function its place back."""
        raise NotImplementedError

    @property
    def unused(self) -> bool:
        """Whether there are no hooks left."""
        return not self.entries and not self.bound

    def refresh(self) -> None:
        """Hooks have come or gone."""
        self._hooks = FunctionHooks(self.place.name, self.place.func, self.entries) if self.entries else None

    def due(self) -> FunctionHooks | None:
        """The hooks that a call in this thread is for."""
        if HOOKS_OFF.on or not self.armed:
            return None
        hooks = self._hooks
        bound = bound_hooks(self.place.func) if self.scoped else None
        if bound is None or hooks is None:
            return hooks or bound
        return bound.beside(hooks)

    def hooks_on(self, func: Any) -> FunctionHooks | None:
        """The same for the function itself, in the middle of its call."""
        return self.due()


class Overrides(HookContainer):
    """All hooks on one sort of such functions."""

    def __init__(self, make: type[Override]) -> None:
        self._make = make
        self.overrides: dict[Any, Override] = {}
        self._places: dict[HookAtSite, Override] = {}
        # An attachment keeps its entries, and with them their ids.
        self._bound: WeakKeyDictionary[Attachment, dict[int, Override]] = WeakKeyDictionary()
        ON_SWEEP.append(self._drop_unused)

    def add(self, entry: HookAtSite, place: Place, scope: FunctionsOfModel) -> None:
        """Put a hook in its place; all or nothing."""
        override = self.overrides.get(place.func)
        if override is None:
            override = self._make(place)
            override.put_on()
            self.overrides[place.func] = override
        override.armed = True
        entry.hook = with_hooks_off(entry.hook)
        if scope.counter is NO_MODEL:
            override.entries[entry] = None
            self._places[entry] = override
            override.refresh()
        else:
            scope.keep(entry, place)
            override.bound.add(entry.attachment)
            override.scoped = True
            self._bound.setdefault(entry.attachment, {})[id(entry)] = override

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; the last one gives the function its place back."""
        override = self._places.pop(entry, None)
        if override is not None:
            del override.entries[entry]
            override.refresh()
        else:
            override = self._bound.get(entry.attachment, {}).pop(id(entry), None)
            if override is None:
                return
            override.bound.discard(entry.attachment)
            override.scoped = bool(override.bound)
        if override.unused:
            self._drop(override)

    def entries(self) -> tuple[HookAtSite, ...]:
        """The hooks that are bound to no model."""
        return tuple(self._places)

    def _drop(self, override: Override) -> None:
        override.restore()
        self.overrides.pop(override.place.func, None)

    def _drop_unused(self) -> None:
        """Models may have gone, and their hooks with them."""
        with LOCK:
            for override in [override for override in self.overrides.values() if override.unused]:
                self._drop(override)
