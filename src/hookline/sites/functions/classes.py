"""Custom ``autograd.Function`` classes, hooked behind their ``apply``.

Takes entries from ``attach_function``. Neither function modes nor the dispatcher see such a function as one thing. Its
``apply`` could be given another, but most people keep a reference (``relu = MyReLU.apply``), which would go on to the
old one. What that calls in turn is looked up in the bases of the class, by ``super()``: so while the class has hooks,
a base of ours stands between torch's own ``Function`` and the C++ one behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hookline.errors import UnhookableError
from hookline.sites import _torch
from hookline.sites.entry import Holder
from hookline.sites.functions.hooks import FunctionHooks
from hookline.sites.functions.mode import running_scopes
from hookline.sites.functions.quiet import QUIET, undisturbed

if TYPE_CHECKING:
    from hookline.sites.entry import Entry
    from hookline.sites.functions.names import Place

__all__ = ["FunctionClasses", "function_classes"]


class _Patch:
    """One class that has a base of ours for a while."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.entries: dict[Entry, None] = {}
        self.hooks: FunctionHooks | None = None
        self._base = self._make_base()
        try:
            place.func.__bases__ = (*place.func.__bases__, self._base)
        except TypeError as error:
            raise UnhookableError(f"{place.name} cannot be hooked: its bases cannot be changed ({error}).") from None

    def _make_base(self) -> type:
        hooked = self.place.func

        class Hooked(_torch.FunctionBase):
            """Stands before the C++ half of ``autograd.Function``."""

            @classmethod
            def apply(cls, *args: Any, **kwargs: Any) -> Any:
                run = super().apply  # type: ignore[misc]
                hooks = self.hooks if cls is hooked and not QUIET.on else None  # a subclass is another function
                if hooks is not None and hooks.scoped:
                    hooks = hooks.within(running_scopes())
                return run(*args, **kwargs) if hooks is None else hooks.call(run, args, kwargs)

        return Hooked

    def restore(self) -> None:
        """Give the class its own bases back; whatever else was done to them stays."""
        cls = self.place.func
        cls.__bases__ = tuple(base for base in cls.__bases__ if base is not self._base)

    def refresh(self) -> None:
        """Hooks have come or gone."""
        self.hooks = FunctionHooks(self.place.name, self.place.func, self.entries) if self.entries else None


class FunctionClasses(Holder):
    """All hooks on ``autograd.Function`` classes."""

    def __init__(self) -> None:
        self._patches: dict[Any, _Patch] = {}
        self._places: dict[Entry, _Patch] = {}

    def add(self, entry: Entry, place: Place) -> None:
        """Put a hook in its place."""
        patch = self._patches.get(place.func)
        if patch is None:
            patch = self._patches[place.func] = _Patch(place)
        entry.hook = undisturbed(entry.hook)
        patch.entries[entry] = None
        self._places[entry] = patch
        patch.refresh()

    def discard(self, entry: Entry) -> None:
        """Take a hook off; the last one gives the class its bases back."""
        patch = self._places.pop(entry, None)
        if patch is None:
            return
        del patch.entries[entry]
        patch.refresh()
        if not patch.entries:
            patch.restore()
            self._patches.pop(patch.place.func, None)

    def why_silent(self, entry: Entry) -> str:
        """What is known of functions that are never seen."""
        if entry.attachment.kind.is_gradient:
            return (
                "it was not applied, or no backward pass came through its outputs; reentrant checkpointing repeats a "
                "forward outside of the model's own (use_reentrant=False shows all)"
            )
        return "it was not applied in the forwards of the model"


function_classes: Final = FunctionClasses()
