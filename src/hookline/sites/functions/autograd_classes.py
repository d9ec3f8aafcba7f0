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
from hookline.sites.functions.function_hooks import why_left_alone
from hookline.sites.functions.function_mode import not_called
from hookline.sites.functions.function_overrides import Override, Overrides

if TYPE_CHECKING:
    from hookline.sites.functions.function_names import Place
    from hookline.sites.hook_at_site import HookAtSite

__all__ = ["FunctionClasses", "function_classes"]


class Patch(Override):
    """One class that has a base of ours for a while."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._base = self._make_base()

    def put_on(self) -> None:
        """Have our base stand behind the others."""
        cls = self.place.func
        try:
            cls.__bases__ = (*cls.__bases__, self._base)
        except TypeError as error:
            raise UnhookableError(
                f"{self.place.name} cannot be hooked: its bases cannot be changed ({error})."
            ) from None

    def _make_base(self) -> type:
        hooked = self.place.func

        class Hooked(_torch.FunctionBase):
            """Stands before the C++ half of ``autograd.Function``."""

            @classmethod
            def apply(cls, *args: Any, **kwargs: Any) -> Any:
                run = super().apply  # type: ignore[misc]
                hooks = self.due() if cls is hooked else None  # a subclass is another function
                return run(*args, **kwargs) if hooks is None else hooks.call(run, args, kwargs, self.hooks_on)

        return Hooked

    def restore(self) -> None:
        """Give the class its own bases back; whatever else was done to them stays."""
        cls = self.place.func
        cls.__bases__ = tuple(base for base in cls.__bases__ if base is not self._base)


class FunctionClasses(Overrides):
    """All hooks on ``autograd.Function`` classes."""

    def __init__(self) -> None:
        super().__init__(Patch)

    def why_silent(self, entry: HookAtSite) -> str:
        """What is known of functions that are never seen."""
        known = not_called(entry) or why_left_alone(entry)
        if known is not None:
            return known
        if entry.attachment.kind.is_gradient:
            return (
                "it was not applied, or no backward pass came through its outputs; reentrant checkpointing repeats a "
                "forward outside of the model's own (use_reentrant=False shows all)"
            )
        return "it was not applied in the forwards of the model"


function_classes: Final = FunctionClasses()
