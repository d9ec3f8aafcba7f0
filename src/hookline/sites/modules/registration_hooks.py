"""Run hooks when a submodule, parameter or buffer is about to be stored in a module, by torch's own verbs.

``attach`` and ``attach_everywhere`` call `register_with_torch`. torch knows such hooks for the whole process only, runs
them in the order they came, and walks them live: a hook that comes or goes while one of them runs makes torch raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hookline.errors import HookReturnError
from hookline.messages import type_name
from hookline.sites.hook_at_site import NO_MODEL, HookAtSite, HookContainer, OrderGroup
from hookline.sites.kinds import Kind

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hookline.sites.hook_at_site import Attachment

_VERBS: Final[dict[Kind, tuple[Callable[[Any], RemovableHandle], type]]] = {
    Kind.REGISTER_MODULE: (torch_module.register_module_module_registration_hook, nn.Module),
    Kind.REGISTER_PARAMETER: (torch_module.register_module_parameter_registration_hook, nn.Parameter),
    Kind.REGISTER_BUFFER: (torch_module.register_module_buffer_registration_hook, Tensor),
}
"""How to register each kind with torch, and what its hooks may put in place of what they were shown."""
_EVERYWHERE: Final[dict[Attachment, None]] = {}
"""The attachments that are for every module of the process."""


class _AnyModule(HookContainer):
    """Stands for every module; torch's handle takes the hook off."""

    def discard(self, entry: HookAtSite) -> None:
        """Do nothing."""


def register_with_torch(attachment: Attachment) -> None:
    """Have torch run the hook for the modules of its entries, until it is removed; for all, if it is for everywhere."""
    register, wanted = _VERBS[attachment.kind]

    def run(module: nn.Module, name: str, value: Any) -> Any:
        entry = next((entry for entry in attachment.members() if _is_about(entry, module)), None)
        if entry is None:
            return None
        entry.count()
        result = entry.call(module, (name, value))
        if result is None or attachment.order_group is OrderGroup.OBSERVE:
            return None
        if isinstance(result, wanted):
            return result
        raise HookReturnError(
            f"{attachment.kind.value} hook {attachment.name!r}, shown {name!r}, must return a {wanted.__name__} or "
            f"None, but got {type_name(result)}."
        )

    handle = register(run)
    if attachment.everywhere and not attachment.entries:
        attachment.entries[HookAtSite(attachment, "(every module)", _AnyModule(), NO_MODEL)] = None
        _EVERYWHERE[attachment] = None

    def unregister(_: Attachment) -> None:
        _EVERYWHERE.pop(attachment, None)
        handle.remove()

    attachment.on_remove = unregister


def _is_about(entry: HookAtSite, module: nn.Module) -> bool:
    return isinstance(entry.container, _AnyModule) or entry.container.module() is module


def registration_entries_everywhere() -> list[HookAtSite]:
    """Return the hooks on registrations in every module of the process."""
    return [entry for attachment in _EVERYWHERE for entry in attachment.entries]
