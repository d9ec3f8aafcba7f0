"""Run hooks when a submodule, parameter or buffer is about to be stored in a module.

``attach`` and ``attach_everywhere`` call this. torch knows such hooks for the whole process only: one of
ours per kind is registered with it while anybody needs it, and asks the module's own module_hooks for the hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hookline.errors import HookReturnError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import ForwardCounter, HookAtSite, HookContainer, OrderGroup
from hookline.sites.kinds import Kind
from hookline.sites.modules.module_hooks import LOCK, ON_SWEEP, existing_hooks, sweep

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hookline.sites.hook_at_site import Attachment

_WHAT: Final[dict[Kind, tuple[Callable[[Any], RemovableHandle], type]]] = {
    Kind.REGISTER_MODULE: (torch_module.register_module_module_registration_hook, nn.Module),
    Kind.REGISTER_PARAMETER: (torch_module.register_module_parameter_registration_hook, nn.Parameter),
    Kind.REGISTER_BUFFER: (torch_module.register_module_buffer_registration_hook, Tensor),
}
"""How to register each kind with torch, and what its hooks may put in place of what they were shown."""


class _Registrations(HookContainer):
    """One kind, for the whole process."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._register, self._type = _WHAT[kind]
        self._users: WeakSet[Attachment] = WeakSet()
        """Weak, as an attachment that is not removed goes with its modules."""
        self.everywhere: tuple[HookAtSite, ...] = ()
        self._handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, name: str, value: Any) -> Any:
        given = value
        for entry in self._entries(module):
            entry.count()
            result = entry.call(module, (name, value))
            if result is not None and entry.attachment.order_group is OrderGroup.EDIT:
                value = self._checked(result, entry, name)
        if not self._users:
            self.clear()
        return None if value is given else value

    def _entries(self, module: nn.Module) -> tuple[HookAtSite, ...]:
        module_hooks = existing_hooks(module)
        hooks = () if module_hooks is None else module_hooks.hooks_of_kind(self._kind)
        if not hooks or not self.everywhere:
            return hooks or self.everywhere
        return tuple(sorted((*self.everywhere, *hooks), key=_rank))

    def _checked(self, result: Any, entry: HookAtSite, name: str) -> Any:
        if isinstance(result, self._type):
            return result
        raise HookReturnError(
            f"{self._kind.value} hook {entry.attachment.name!r}, shown {name!r}, must return a {self._type.__name__} "
            f"or None, but got {type_name(result)}."
        )

    # -- coming and going, under LOCK --------------------------------------------------------------------

    def hold(self, attachment: Attachment) -> None:
        """Let torch call us for one more attachment."""
        attachment.on_remove = self._release
        self._users.add(attachment)
        if self._handle is None:
            self._handle = self._register(self)
            ON_SWEEP.append(self.clear)

    def _release(self, attachment: Attachment) -> None:
        self._users.discard(attachment)
        self.clear()

    def clear(self) -> None:
        """Take our hook off torch, unless it is needed, or torch is walking its dictionary, which it does live.

        Then it goes at the end of our call, if that is the last of the walk, or else when the next hook comes or goes.
        """
        if self._handle is None or self._users:
            return
        with LOCK:
            handle = self._handle
            if handle is not None and not self._users and not _torch.being_walked(handle.hooks_dict_ref() or {}):
                handle.remove()
                self._handle = None
                ON_SWEEP.remove(self.clear)

    def add_everywhere(self, attachment: Attachment) -> None:
        """Add a hook for every module of the process."""
        entry = HookAtSite(attachment, "(every module)", self, ForwardCounter())
        attachment.entries[entry] = None
        self.everywhere = tuple(sorted((*self.everywhere, entry), key=_rank))
        self.hold(attachment)

    def discard(self, entry: HookAtSite) -> None:
        """Take a process-wide hook off."""
        self.everywhere = tuple(other for other in self.everywhere if other is not entry)


def hold_registrations(attachment: Attachment) -> None:
    """Let torch call us for as long as the attachment, whose entries sit in `ModuleHooks`, is on."""
    _REGISTRATIONS[attachment.kind].hold(attachment)


def registration_entries_everywhere() -> list[HookAtSite]:
    """Return the hooks on registrations in every module of the process."""
    return [entry for each in _REGISTRATIONS.values() for entry in each.everywhere]


def hook_registrations_everywhere(attachment: Attachment) -> HookHandle:
    """Put an attachment on every module there is and will be."""
    with LOCK:
        sweep()
        _REGISTRATIONS[attachment.kind].add_everywhere(attachment)
        return HookHandle(attachment)


def _rank(entry: HookAtSite) -> tuple[int, bool, int]:
    return entry.attachment.rank


_REGISTRATIONS: Final = {kind: _Registrations(kind) for kind in _WHAT}
