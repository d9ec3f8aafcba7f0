"""Call a function when this process ends, also where ``atexit`` is not called: in a child of ``multiprocessing``, or
when SIGTERM comes.

`Follow` and the session of a followed script use it, to write what hooks have returned. A child that was forked later
does not call it: the run is that of its parent.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any, Final

__all__ = ["at_process_end", "at_sigterm", "error_of_process"]

_BEFORE_OTHERS: Final = 1
"""Finalizers of a higher priority come first, and those without one may find queues closed."""
_MOST_SECONDS: Final = 10.0
"""To write everything after SIGTERM: torchrun waits for 30 s before it kills."""


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


def at_sigterm(act: Callable[[], None]) -> Callable[[], None]:
    """Call ``act`` when SIGTERM comes, then let it end the process; return a function that takes that back.

    Recipe: ``cancel = at_sigterm(run.close)``. torchrun ends all ranks so when one of them has died.

    Where the script has a handler of its own already, or this is not the main thread, nothing is done: the handler
    decides whether the process ends, and a process that ends as Python processes do is heard of in other ways.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return lambda: None
    process = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() == process:  # a child that was forked later has this too
            # The signal may have come within a flush, whose lock this thread holds: another one cannot block it.
            worker = threading.Thread(target=act, name="hookline-sigterm", daemon=True)
            worker.start()
            worker.join(_MOST_SECONDS)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)

    def cancel() -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return cancel
