"""Write the log and the tensors of a precision check: ``PATH/TIME/precision_check_rank_0.log``, ``rank_0/NAME.npy``.

`PrecisionChecker` makes one `PrecisionFiles`, and a `PrecisionRecord` for each tensor: a line of the log, which carries
the moment of the run (`PrecisionContext`). Nothing is created before the first line.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np
from torch import Tensor

from hookline.debug.precision.tensor_numbers import as_numpy
from hookline.distributed.ranks import first_of_ranks, this_rank

__all__ = ["PrecisionContext", "PrecisionFiles", "PrecisionRecord", "PrecisionState"]

logger = logging.getLogger(__name__)

_NUMBERS: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Counts the checks of this process by their path: the nth check of each rank has one folder."""


class PrecisionFiles:
    """The folder of one check."""

    def __init__(self, path: str, *, save: bool) -> None:
        self._path = Path(path)
        self._save = save
        self._log: IO[str] | None = None
        self._lock = threading.Lock()
        self.folder: Path | None = None
        """Where this check writes; None before its first line."""
        self._has_failed = False

    def write(self, line: str, stem: str, plain: Tensor) -> None:
        """Write the line of a tensor, and the tensor if that was asked for; a full disk ends the files, not the run."""
        if self._has_failed:
            return
        is_first = self.folder is None
        try:
            self._write_line(line)
            self._write_tensor(stem, plain)
        except OSError as error:
            if is_first:  # a path that never worked is a mistake, and nothing is lost yet
                raise
            self._has_failed = True
            logger.warning(
                "[PrecisionCheck] no more lines and tensors are written to %s, because of %s; the run goes on, and the "
                "records are kept in memory. Next: make room there, or give another path=",
                self.folder,
                error,
            )
        else:
            if is_first:
                logger.info("[PrecisionCheck] Output: %s", self.folder)

    def _write_line(self, text: str) -> None:
        """Append a line, and flush it: a process that is killed leaves all lines but the last."""
        with self._lock:
            if self._log is None:
                self._log = (self._made_folder() / f"precision_check_rank_{this_rank()}.log").open(
                    "a", encoding="utf-8"
                )
            self._log.write(f"{text}\n")
            self._log.flush()

    def _write_tensor(self, stem: str, plain: Tensor) -> None:
        """Write a tensor, if that was asked for, in the place of an older one of that name."""
        if not self._save:
            return
        with self._lock:
            folder = self._made_folder() / f"rank_{this_rank()}"
            folder.mkdir(exist_ok=True)
        beside = folder / f"{stem}.{os.getpid()}.{threading.get_ident()}.part"
        try:
            with beside.open("wb") as file:  # a path would get another ending
                np.save(file, as_numpy(plain), allow_pickle=False)
            beside.replace(folder / f"{stem}.npy")
        finally:
            beside.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the log; a later line opens it again."""
        with self._lock:
            if self._log is not None:
                self._log.close()
                self._log = None

    def _made_folder(self) -> Path:
        """Return the folder, made at the first call; the rank that comes first names it for all."""
        if self.folder is None:
            number = next(_NUMBERS[str(self._path)])
            now = datetime.now().strftime("%Y%m%d_%H%M%S")
            self.folder = _new_folder(self._path / first_of_ranks(f"precision/{self._path}/{number}", now))
        return self.folder


def _new_folder(wanted: Path) -> Path:
    """Return the folder ``wanted``, or the first of ``wanted_2``, … in which this rank has no log yet."""
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}_{number}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _log_in(folder).open("x").close()
        except FileExistsError:
            number += 1
        else:
            return folder


def _log_in(folder: Path) -> Path:
    return folder / f"precision_check_rank_{this_rank()}.log"


# -- one line of the log ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PrecisionState:
    """Where a run stands: micro-batch, layer, the layer's name, iteration."""

    gas: int = 0
    """The micro-batch of a gradient accumulation."""
    layer: int | None = None
    """The layer; None: the first number in the name of the module."""
    layer_name: str = ""
    iteration: int | None = None

    def text(self, layer: int | None) -> str:
        """Return the beginning of a line; ``layer`` is the one that the module's name tells."""
        number = self.layer if self.layer is not None else layer
        parts = [] if self.iteration is None else [f"[I-{self.iteration}]"]
        parts += [f"[GAS-{self.gas}]", f"[L-{0 if number is None else number}]"]
        return " ".join([*parts, self.layer_name] if self.layer_name else parts)


class PrecisionContext:
    """The state of each thread; one that has set nothing (autograd's, on CUDA) is where the last one that has is."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._last = PrecisionState()

    @property
    def state(self) -> PrecisionState:
        """The state that counts in this thread."""
        state: PrecisionState = getattr(self._of_thread, "state", self._last)
        return state

    def change(self, **values: Any) -> None:
        """Set some fields for this thread."""
        state = getattr(self._of_thread, "state", None)
        if state is None:
            state = self._of_thread.state = PrecisionState()
        for name, value in values.items():
            setattr(state, name, value)
        self._last = state


@dataclass(frozen=True, slots=True)
class PrecisionRecord:
    """One tensor, as it was checked."""

    name: str
    """The module, or ``module@function``."""
    stage: str
    """``forward`` (outputs), ``backward`` (gradients), ``forward_input`` and ``backward_input`` (of functions)."""
    index: int
    """Which call of this name and stage since the counters were reset, from 0."""
    tensor: int
    """Its place among what the call gave, from 0."""
    dtype: str
    shape: tuple[int, ...]
    numbers: str
    """``min=… max=… mean=… […]``, or ``md5=…``."""
    nan: int
    inf: int
    is_error: bool
    context: str
    """``[GAS-0] [L-3]``, before it the iteration if one is set, behind it the layer's name."""

    @property
    def stem(self) -> str:
        """The name of its file, without the ending: ``layers.0.mlp_0_forward``; of further tensors with ``_t1``, …"""
        return f"{quote(self.name, safe='@')}_{self.index}_{self.stage}" + (f"_t{self.tensor}" if self.tensor else "")

    def __str__(self) -> str:
        shape = f"({','.join(map(str, self.shape))})"
        bad = f" [NaN:{self.nan} Inf:{self.inf}]" if self.nan or self.inf else ""
        return (
            f"{self.context} {self.name}_{self.index}_{self.stage} tensor[{self.tensor}]: dtype={self.dtype} "
            f"shape={shape} {self.numbers}{bad}{' <- ERROR' if self.is_error else ''}"
        )
