"""Define the handles that every attachment returns: they report what it did, and take it off.

An `Attachment` is what one call of a verb asked for (head of ``hook_at_site``). Each verb that puts on a hook makes a
`HookHandle`: ``attach.attach_to_modules`` by itself, ``parameters``, ``tensors``, ``optimizers``, ``everywhere`` and
``attach_function`` by `attaching`. ``find.attached`` makes another one for each attachment that it lists. Products with
several hooks (``specs``, ``watch``, ``patch``, ``trace``, …) make a `HandleSet`, or derive from it. Users call
``remove()`` and ``report()``, and use handles in ``with`` blocks.

All that a `HookHandle` knows is in its `Attachment`, so two handles on one attachment are equal; a copied handle is one
that is off. ``debug.diagnose``, ``specs``, ``engines`` and ``guard.snapshot`` read ``_attachment`` as well.
`SavedTensors` (``tensors``) is a `Handle` without an attachment. Removing a hook holds `LOCK` of ``module_hooks``, and
has to work twice, inside a hook, and while the interpreter ends. A new thing that an attachment puts somewhere is taken
away in ``HookContainer.discard`` of its site type, or in ``Attachment.on_remove``: `HookHandle.remove` calls both.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch.utils.hooks import RemovableHandle

from hookline.sites.hook_at_site import ON_NO_MODEL, Attachment, close_context
from hookline.sites.kinds import Kind
from hookline.sites.module_hooks import LOCK, release_counters
from hookline.sites.receipt import Receipt, Receipts, receipt_of, warn_if_never_fired
from hookline.tables import OFF, ON

_NO_HOOKS: OrderedDict[int, Any] = OrderedDict()


class Handle(RemovableHandle):
    """Base of all handles: a ``with`` block that removes."""

    # These stand in for torch's own __init__, which changes its class to count ids, so that Python drops its caches of
    # attributes. torch's code wants a dictionary to point at: here an empty one.
    id = -1
    hooks_dict_ref = weakref.ref(_NO_HOOKS)
    extra_dict_ref = ()

    def remove(self, *, quiet: bool = False) -> None:
        """Take off; warn, unless ``quiet``, of hooks that never fired although their model ran."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove(quiet=exc_info[0] is not None)  # after an error, a hook that never ran is to be expected


class HookHandle(Handle):
    """One hook on one or many modules, functions, tensors, …

    Recipe::

        with hookline.attach(model, "layers.#", hook) as handle:
            model(x)
            print(handle.report())

    ``remove()`` counts from the next firing on, also between a forward and its backward, from inside a hook or from
    another thread, and may be called again. The handle keeps neither the model nor its modules alive, and
    letting go of it removes nothing.
    """

    _is_ending = staticmethod(sys.is_finalizing)
    """An attribute of the class, since the names of this module may be gone while the interpreter ends."""

    def __init__(self, attachment: Attachment) -> None:
        self.id = attachment.order
        self._attachment = attachment

    def remove(self, *, quiet: bool = False) -> None:
        """Take the hook off; warn, unless ``quiet``, if it never fired although its model ran."""
        if self._is_ending():  # Python closes a generator in the middle of its ``with`` block; all hooks go anyway
            return
        attachment = self._attachment
        with LOCK:
            if attachment.removed:
                return
            attachment.removed = True
            if attachment.on_remove is not None:
                attachment.on_remove(attachment)
            entries = attachment.members()
            for entry in reversed(entries):
                entry.container.discard(entry)
            release_counters(attachment)
            if attachment.context is not None:
                close_context(attachment.context)
        if not quiet and not all(entry.fired for entry in entries):
            warn_if_never_fired(attachment)

    def report(self) -> Receipt:
        """Return what was matched and attached, how often it fired, when last."""
        return receipt_of(self._attachment)

    @property
    def name(self) -> str:
        """The hook's name."""
        return self._attachment.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules, functions, … that carry the hook."""
        return tuple(entry.name for entry in self._attachment.members())

    @property
    def removed(self) -> bool:
        """Return whether the hook is off."""
        return self._attachment.removed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HookHandle) and other._attachment is self._attachment

    def __hash__(self) -> int:
        return hash(id(self._attachment))

    def __repr__(self) -> str:
        return f"<HookHandle {self.report()}; {self._state()}>"

    def _state(self) -> str:
        """Return whether the hook is on, and how to take it off."""
        return OFF if self.removed else ON

    def _repr_html_(self) -> str:
        return self.report()._table().with_state(self._state()).html()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or unpickled model carries none of our hooks, so a handle it keeps is one that is off.
        return _removed_handle, (self.name, self._attachment.kind.value)


@contextmanager
def attaching(attachment: Attachment) -> Iterator[HookHandle]:
    """Hold `LOCK` while an attachment is put on its sites; if one of them refuses, take it off the others.

    One that is ``everywhere`` is listed in `ON_NO_MODEL`.
    """
    handle = HookHandle(attachment)
    with LOCK:
        try:
            yield handle
        except BaseException:
            handle.remove(quiet=True)
            raise
        if attachment.everywhere:
            ON_NO_MODEL.add(attachment)


class HandleSet(Handle):
    """Several handles that come off together, the last one first.

    Recipe::

        with hookline.HandleSet([hookline.attach(a, hook), hookline.attach(b, hook)]):
            ...
    """

    def __init__(self, handles: Iterable[RemovableHandle] = ()) -> None:
        self._handles = list(handles)
        self._on = bool(self._handles)

    def add(self, handle: RemovableHandle) -> None:
        """Take one more handle in."""
        self._handles.append(handle)
        self._on = True

    def remove(self, *, quiet: bool = False) -> None:
        """Remove every handle; one that raises does not keep the others on, its error comes at the end."""
        self._on = False
        errors: list[BaseException] = []
        for handle in reversed(self._handles):
            try:
                if isinstance(handle, Handle):
                    handle.remove(quiet=quiet)
                else:
                    handle.remove()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def report(self) -> Receipts:
        """Return the receipts of those handles that keep one: a tuple that prints as a table."""
        return Receipts(handle.report() for handle in self._handles if isinstance(handle, HookHandle))

    def __iter__(self) -> Iterator[RemovableHandle]:
        return iter(tuple(self._handles))

    def __len__(self) -> int:
        return len(self._handles)

    def __getitem__(self, index: int) -> RemovableHandle:
        return self._handles[index]

    def __repr__(self) -> str:
        return f"<HandleSet of {len(self._handles)}; {self._state()}>"

    def _state(self) -> str:
        """Return whether the handles are on, and how to take them off."""
        return ON if self._on else OFF

    def _repr_html_(self) -> str:
        return self.report()._table().with_state(self._state()).html()

    def __reduce__(self) -> tuple[Any, ...]:
        return HandleSet, ()


def _removed_handle(name: str, kind: str) -> HookHandle:
    return HookHandle(Attachment(print, Kind(kind), name, removed=True))
