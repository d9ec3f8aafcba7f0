"""How far a slow sink is in a log: a small file beside it, so that nothing is delivered twice when a run goes on.

Written by the helper process after each batch, read by it when it begins, and by the run to say who is behind.
"""

from __future__ import annotations

import os
import re
import zlib
from contextlib import suppress
from pathlib import Path

from hookline.sinks.strict_json import dumps, loads

__all__ = ["position_path", "read_position", "write_position"]


def position_path(log: Path, sink: str) -> Path:
    """Where it is written."""
    return log.parent / f".{re.sub(r'[^A-Za-z0-9_-]+', '_', sink)}.position"


def read_position(log: Path, sink: str) -> int:
    """The number of the first record that the sink has not had; 0 if that was said of another log."""
    try:
        found = loads(position_path(log, sink).read_bytes())
        return int(found["number"]) if found["log"] == _mark(log) else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def write_position(log: Path, sink: str, number: int) -> None:
    """Keep it: wholly, or as it was."""
    path = position_path(log, sink)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(dumps({"number": number, "log": _mark(log)}))
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def _mark(log: Path) -> int:
    """Tells one log from another in its place: the first line has the time in it, and stays if the log is cut back."""
    with log.open("rb") as file:
        return zlib.crc32(file.readline(4096))
