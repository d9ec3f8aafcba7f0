"""Call a function when this process ends, also where ``atexit`` is not called: in a child of ``multiprocessing``.

`Follow` and the session of a followed script use it, to write what hooks have returned. A child that was forked later
does not call it: the run is that of its parent.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

from hookline.sites.functions.replaced_function import ReplacedFunction

__all__ = ["ExitNoted", "at_process_end", "error_of_process"]

_BEFORE_OTHERS = 1
"""Finalizers of a higher priority come first, and those without one may find queues closed."""


def at_process_end(act: Callable[[], None]) -> Callable[[], None]:
    """Call ``act`` at the end of this process; return a function that takes that back.

    Recipe: ``cancel = at_process_end(run.close)``.

    What is registered last is called first.
    """
    process = os.getpid()

    def end() -> None:
        if os.getpid() == process:
            act()

    atexit.register(end)
    # A child that multiprocessing has forked ends by os._exit(), which atexit does not hear of.
    finalize = Finalize(None, end, exitpriority=_BEFORE_OTHERS) if parent_process() is not None else None

    def cancel() -> None:
        atexit.unregister(end)
        if finalize is not None:
            finalize.cancel()

    return cancel


def error_of_process() -> BaseException | None:
    """Return the error that is ending this process; None if it ends well."""
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return None if isinstance(error, SystemExit) else error


class ExitNoted:
    """Note with which code ``sys.exit`` was called: at the end of a process nobody tells.

    Recipe: ``noted = ExitNoted(lambda: run.step)``; at the end of the process ``noted.failure()``, then
    ``noted.remove()``.

    Args:
        position: Returns how far the run is. If it has gone on since, the exit was caught, and does not count.
    """

    def __init__(self, position: Callable[[], int]) -> None:
        self._position = position
        self._noted: tuple[Any, int] | None = None
        _EXIT.add(self)

    def note(self, code: Any) -> None:
        """Note a call."""
        self._noted = code, self._position()

    def failure(self) -> SystemExit | None:
        """Return the exit that ends this process, if its code is not 0."""
        if self._noted is None or self._noted[1] != self._position() or self._noted[0] in (None, 0):
            return None
        return SystemExit(self._noted[0])

    def remove(self) -> None:
        """Note nothing more, and give ``sys`` its own function back; may be called again."""
        _EXIT.discard(self)


def _make_exit(original: Any, replaced: ReplacedFunction[ExitNoted]) -> Any:
    def exit(code: Any = None, /) -> Any:
        for noted in replaced.listeners:
            noted.note(code)
        return original(code)

    return exit


_EXIT: ReplacedFunction[ExitNoted] = ReplacedFunction(sys, "exit", _make_exit)
