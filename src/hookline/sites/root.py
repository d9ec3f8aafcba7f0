"""The model a hook was attached through: which of its forwards is running, and which call of a module this is.

Takes a tick from the root module's first pre-hook, hands step and call numbers to sites and receipts.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import nn

    from hookline.sites.table import Table

__all__ = ["Root"]


class _Pass(threading.local):
    """The forward that this thread is in; two threads on one model count apart."""

    step: int

    def __init__(self) -> None:
        self.step = -1
        self.calls: dict[Any, int] = {}


class Root:
    """One per module that hooks were attached through, for as long as one of them is on."""

    __slots__ = ("_counter", "_pass", "model", "observed", "step", "users")

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model: Callable[[], nn.Module | None] = weakref.ref(model) if model is not None else lambda: None
        """The module, unless it is gone."""
        self.step = -1
        """The newest forward of any thread."""
        self.users = 0
        """How many attachments go through this root."""
        self.observed: set[Table] = set()
        """Tables with hooks that have to stay last among their module's."""
        self._counter = itertools.count()
        self._pass = _Pass()

    def begin(self) -> None:
        """A forward of the root begins in this thread."""
        current = self._pass
        current.step = self.step = next(self._counter)
        current.calls = {}
        for table in tuple(self.observed):
            table.keep_last()

    def moment(self, key: Hashable) -> tuple[int, int]:
        """The step of this thread and how often ``key`` came by in it before; counts it."""
        current = self._pass
        call = current.calls.get(key, 0)
        current.calls[key] = call + 1
        return current.step, call
