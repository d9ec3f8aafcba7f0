"""Write a file as a whole: a reader finds the old content or the new one, never half of it.

Called for pages, ``run.json``, the file of a flight recorder, positions of sinks, and files of tensors, which others
write to a draft.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["draft_of", "replace_file"]


def replace_file(path: Path, content: str | bytes) -> None:
    """Write ``content`` beside ``path``, text as UTF-8, and put it in the place of the file that is there.

    Recipe: ``replace_file(Path("runs/x/run.json"), json.dumps(facts))``. The folder has to be there. If writing fails,
    the old file stays as it is, and nothing is left beside it.
    """
    with draft_of(path) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield where to write what takes the place of ``path`` at the end of the block, unless that raises.

    Recipe: ``with draft_of(path) as draft: save_file(tensors, draft)``.
    """
    # The process and the thread: two that write the same file at once have a draft each, and the last one wins.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
