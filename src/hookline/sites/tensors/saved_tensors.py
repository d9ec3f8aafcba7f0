"""Hook what autograd keeps for the backward pass: one function packs it, one unpacks it again.

Users call `saved_tensors`, which returns a scope for a ``with`` statement. torch has a stack of such pairs per thread
and asks the innermost one; a scope of ours puts a `_Frame` on it each time it is entered.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, Self, TypeVar

from torch import Tensor

from hookline.errors import HookReturnError, ScopeError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.attach import new_attachment
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import AttachOptions, HookContainer
from hookline.sites.kinds import SAVED, Kind, SiteType
from hookline.sites.modules.module_hooks import LOCK
from hookline.sites.signature import check_hook, hook_name
from hookline.sites.tensors.graph_hooks import HookInGraph
from hookline.tables import OFF

if TYPE_CHECKING:
    from hookline.hook_types import Hook
    from hookline.sites.hook_at_site import Attachment, HookAtSite

_P = ParamSpec("_P")
_T = TypeVar("_T")

_UNPACK: Final = SiteType("scope", "saved_tensors", {Kind.SAVED_TENSORS: ("packed",)})


def saved_tensors(pack: Hook, unpack: Hook, *, name: str | None = None) -> SavedTensors:
    """Decide how tensors are kept for the backward pass.

    Recipe::

        def pack(tensor):  # indices and masks are kept as well
            return tensor.dtype, tensor.half() if tensor.is_floating_point() else tensor


        with hookline.saved_tensors(pack, lambda packed: packed[1].to(packed[0])) as scope:
            loss = model(x).square().mean()
        loss.backward()
        print(scope.packed, scope.unpacked)

    Args:
        pack: ``pack(tensor)``, called for each tensor that an operation inside the block keeps; it returns whatever
            is to be kept instead. A computed tensor comes detached, leaves come as they are; neither may be changed in
            place.
        unpack: ``unpack(packed)``, called with that for each use in a backward pass, wherever and in whatever
            thread it runs; it returns a tensor. Each of the two that declares a keyword-only ``site`` gets one.
        name: A name for reports; the name of ``pack`` by default.

    Of nested scopes, also torch's own, the innermost is asked. Nothing happens until the scope is entered.

    Raises:
        HookSignatureError: before anything is attached.
    """
    attachment = new_attachment(pack, Kind.SAVED_TENSORS, AttachOptions(name=name), site_type=SAVED)
    wants_site = check_hook(unpack, Kind.SAVED_TENSORS, site_type=_UNPACK)
    return SavedTensors(attachment, unpack, wants_site=wants_site)


class SavedTensors(HookHandle):
    """A pair of functions that pack and unpack what autograd keeps; made by `saved_tensors`.

    A scope can be entered again, also inside itself and in several threads at once, and decorates a function::

        @hookline.saved_tensors(pack, unpack)
        def forward(x): ...

    Leaving the block ends the packing; so does ``remove()``, at once, for good and in all threads. What was packed
    is unpacked whenever it is needed. Blocks have to be left in the reverse order of entering them, torch's own
    included; one that is not raises, stops packing, and takes nobody else's pair off torch's stack.
    """

    def __init__(self, attachment: Attachment, unpack: Hook, *, wants_site: bool) -> None:
        super().__init__(attachment)
        self._work = _Work(attachment, unpack, wants_site)
        self._open = _Open()

    def __enter__(self) -> Self:
        if self.removed:
            raise ScopeError(f"saved_tensors {self.name!r} was removed; make a new one.")
        frame = _Frame(self._work, _torch.innermost_saved_hooks())
        _torch.push_saved_hooks(frame.pack, frame.unpack)
        self._open.frames.append(frame)
        self._work.entered(1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._open.frames:
            raise ScopeError(f"saved_tensors {self.name!r} is left in a thread that has not entered it.")
        frame = self._open.frames.pop()
        frame.left = True
        self._work.entered(-1)
        if frame not in _pop_left():
            raise ScopeError(
                f"saved_tensors {self.name!r} is left while it is not the innermost scope: one that was entered after "
                "it is open, or has taken it off. Leave scopes in the reverse order of entering them."
            )

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Run the function inside the scope, until that is removed."""

        @functools.wraps(function)
        def scoped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if self.removed:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return scoped

    def _state(self) -> str:
        """Return whether it packs now: in a block that was entered, in whatever thread."""
        return super()._state() if self.removed or self._work.alive() else f"{OFF} until a `with` block enters it"

    @property
    def packed(self) -> int:
        """The number of tensors that were packed."""
        return self._work.entry.fired

    @property
    def unpacked(self) -> int:
        """The number of times one was unpacked."""
        return self._work.unpacked


class _Work(HookContainer):
    """The work of a scope; kept by the graphs that were made in it."""

    __slots__ = ("__weakref__", "_depth", "_unpack", "_wants_site", "attachment", "entry", "unpacked")

    def __init__(self, attachment: Attachment, unpack: Hook, wants_site: bool) -> None:
        self.attachment = attachment
        self.entry = HookInGraph(attachment, "saved tensors", self)
        self.unpacked = 0
        self._depth = 0
        self._unpack = unpack
        self._wants_site = wants_site

    def entered(self, change: int) -> None:
        """Add ``change`` to the number of blocks that have entered the scope."""
        with LOCK:
            self._depth += change

    def unpack(self, packed: Any) -> Tensor:
        """Call the user's function, and check that it gives a tensor."""
        self.unpacked += 1
        if self._wants_site:
            tensor = self._unpack(packed, site=self.entry.site_of(self.unpacked - 1))
        else:
            tensor = self._unpack(packed)
        if not isinstance(tensor, Tensor):
            raise HookReturnError(
                f"unpack function {hook_name(self._unpack)!r} of saved_tensors {self.attachment.name!r} must return "
                f"a tensor, but got {type_name(tensor)}."
            )
        return tensor

    def discard(self, entry: HookAtSite) -> None:
        """Do nothing: open frames see that the attachment is removed."""

    def alive(self) -> bool:
        """Return whether the scope is open, in any thread."""
        return self._depth > 0


class _Open(threading.local):
    """The frames of one scope that are on this thread's stack."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []


class _Past(NamedTuple):
    """A value packed while the scope was open, but off: as the scope around it would have it."""

    packed: Any
    unpack: Callable[[Any], Any] | None


class _Frame:
    """One entering of a scope: the pair on torch's stack."""

    __slots__ = ("_outer", "_work", "left")

    def __init__(self, work: _Work, outer: tuple[Any, Any] | None) -> None:
        self._work = work
        self._outer = outer
        self.left = False

    def pack(self, tensor: Tensor) -> Any:
        """Return what to keep of the tensor."""
        if not self.left and not self._work.attachment.removed:
            return self._work.entry.run(_without_history(tensor))
        if self._outer is None:
            return _Past(_without_history(tensor), None)
        pack, unpack = self._outer
        return _Past(pack(tensor), unpack)

    def unpack(self, packed: Any) -> Any:
        """Return the tensor again."""
        if type(packed) is not _Past:
            return self._work.unpack(packed)
        return packed.packed if packed.unpack is None else packed.unpack(packed.packed)


def _without_history(tensor: Tensor) -> Tensor:
    # torch hands an operation's own output over; kept as it is, it would keep the node that keeps it, for good.
    return tensor if tensor.grad_fn is None else tensor.detach()


def _pop_left() -> list[_Frame]:
    """Take off torch's stack what is on top and was left, now or, out of order, before."""
    popped: list[_Frame] = []
    while True:
        pair = _torch.innermost_saved_hooks()
        frame = getattr(pair[0], "__self__", None) if pair is not None else None
        if not isinstance(frame, _Frame) or not frame.left:
            return popped
        _torch.pop_saved_hooks()
        popped.append(frame)
