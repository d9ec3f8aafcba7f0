"""Name, write and clear the files of the general dumper: ``DIR/EXPERIMENT/step=0___rank=0___dump_index=1___name=x.pt``.

`Dumper` calls this. A file holds ``{"value", "meta"}``; read it with ``torch.load(path, weights_only=True)``.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import torch
from torch import Tensor

from hookline.distributed.ranks import gather_objects, this_rank
from hookline.files import replace_file

__all__ = ["DumpFiles", "file_name", "host_copy"]

logger = logging.getLogger(__name__)

_LONGEST: Final = 240
"""Most file systems take 255 bytes."""


class DumpFiles:
    """The folder of one experiment, decided at its first file."""

    def __init__(self) -> None:
        self.folder: Path | None = None

    def write(self, root: str, experiment: str | None, clear: bool, name: str, content: dict[str, Any]) -> Path | None:
        """Write one file and return it; None if that failed, which is logged and ends nothing."""
        if self.folder is None:
            self.folder = _folder(Path(root), experiment, clear)
        path = self.folder / name
        try:
            replace_file(path, lambda draft: torch.save(content, draft))
        except Exception as error:  # a value that cannot be pickled, a full disk: the run is not to end by its dump
            logger.warning("could not write %s: %r", path, error)
            return None
        return path


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy on the host: what the model writes into the tensor later does not show, and a view is no more than
    its own numbers. Of a distributed tensor, copy the part of this rank.
    """
    own = tensor.detach()
    own = own.to_local() if hasattr(own, "to_local") else own
    copied = own.to("cpu", copy=True)
    return copied.contiguous() if copied.layout is torch.strided else copied


def file_name(tags: Mapping[str, Any]) -> str:
    """Return the name of a file with these tags; letters that no file may have are written as %2F and the like."""
    text = "___".join(f"{key}={quote(str(value), safe=' ,[]()')}" for key, value in tags.items())
    return f"{text[:_LONGEST]}.pt"


def _folder(root: Path, experiment: str | None, clear: bool) -> Path:
    """Return the folder of the experiment, the same on all ranks; with ``clear``, delete what earlier dumps left."""
    if experiment is None:
        now = datetime.now(UTC)
        # random.Random(): the run's own random numbers stay as they are.
        drawn = random.Random().randrange(1000)
        mine = f"dump_{now.strftime('%Y%m%d_%H%M%S')}_{now.microsecond // 1000:03d}{drawn:03d}"
        experiment = gather_objects(mine, what="name of a dump")[0]
    folder = root / experiment
    if clear:
        if this_rank() == 0:
            for old in {folder, *root.glob("dump_*")}:
                if _is_dump(old):
                    shutil.rmtree(old)
        gather_objects(None, what="clearing earlier dumps")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_dump(folder: Path) -> bool:
    """Return whether a folder has nothing but dumps in it: what somebody else put there is not ours to delete."""
    return folder.is_dir() and all(path.name.startswith("step=") for path in folder.iterdir())
