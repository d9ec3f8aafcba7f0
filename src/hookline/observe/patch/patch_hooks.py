"""The hooks that carry edits: one on outputs, one on inputs.

Takes a bound `Edit` from ``patch``; torch's calls come by way of the ports of `hookline.sites`, eager or traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookline.observe.patch.main_tensor_edit import main_input, main_output, rebuilt
from hookline.observe.patch.misfits import place_of

if TYPE_CHECKING:
    from torch import nn

    from hookline.observe.patch.edit import Edit
    from hookline.sites.site import Site

__all__ = ["EditInput", "EditOutput"]


class EditOutput:
    """A forward hook."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any, *, site: Site) -> Any:
        """The output around the edited tensor."""
        main = main_output(output, place_of(site))
        return rebuilt(output, main, self.edit.apply(main, site), place_of(site))


class EditInput:
    """A forward pre-hook."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, site: Site) -> Any:
        """The arguments around the edited tensor."""
        where = place_of(site)
        main = main_input(args, kwargs, where)
        new = self.edit.apply(main, site)
        return rebuilt(args, main, new, where), rebuilt(kwargs, main, new, where)
