"""Call a function when SIGTERM is about to end this process, which ``atexit`` does not hear of.

The session of a followed script uses it: torchrun ends all ranks by SIGTERM when one of them has died.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

__all__ = ["at_sigterm"]

_MOST_SECONDS: Final = 10.0
"""torchrun waits for 30 s before it kills."""


def at_sigterm(act: Callable[[], None]) -> Callable[[], None]:
    """Call ``act`` when SIGTERM comes, then let it end the process; return a function that takes that back.

    Recipe: ``cancel = at_sigterm(run.close)``.

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
