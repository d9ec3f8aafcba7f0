"""Waiting for events in tests.

A time-out here is a safety net against a hang, never a measure of speed: on a busy machine everything takes ten times
as long, and a test must still pass. Speed is measured in `benchmarks/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0
"""Seconds to wait for a process, an answer or an event before a test fails. Less than the time-out of one test."""


def until(claim: Callable[[], Any], what: str = "the claim holds", pause: float = 0.005) -> Any:
    """Wait until `claim` returns something true, and return it. Fail with `what` after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not (found := claim()):
        assert time.monotonic() < deadline, f"not within {PATIENCE:.0f} s: {what}"
        time.sleep(pause)
    return found
