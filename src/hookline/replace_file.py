"""Write a file as a whole: a reader finds the old content or the new one, never half of it.

Called for pages, ``run.json``, the file of a flight recorder, positions of sinks, and what an export is known by.
Files of tensors have writers of their own, which work in the same way.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, content: str | bytes) -> None:
    """Write ``content`` beside ``path``, text as UTF-8, and put it in the place of the file that is there.

    Recipe: ``replace_file(Path("runs/x/run.json"), json.dumps(facts))``. The folder has to be there. If writing fails,
    the old file stays as it is, and nothing is left beside it.
    """
    # The process and the thread: two that write the same file at once have a draft each, and the last one wins.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
