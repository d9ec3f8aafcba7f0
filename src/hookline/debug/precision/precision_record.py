"""Read the options of a precision check, measure one tensor for it, and write its log and tensors.

`PrecisionChecker` calls it. Options come from keywords or from a string ``level=1,path=x,format=md5``; what is not
understood is an error that says what is. Files are ``PATH/TIME/precision_check_rank_0.log`` and ``rank_0/NAME.npy``;
nothing is created before the first line. Measuring waits for the device, and changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Self
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from hookline.distributed.ranks import first_of_ranks, this_rank
from hookline.errors import OptionError
from hookline.guard.digest import dense
from hookline.messages import did_you_mean, type_name

__all__ = [
    "PrecisionConfig", "PrecisionContext", "PrecisionFiles", "PrecisionRecord", "PrecisionState", "TensorNumbers",
    "as_numpy", "hash_of", "local_copy", "measure", "numbers_text",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """The options of a precision check.

    >>> PrecisionConfig.make("level=2,format=md5,md5_tolerance=1e-3", {}).level
    2
    """

    level: int = 1
    """0: nothing; 1: the outputs of modules and their gradients; 2: also what functions take and give."""
    path: str = "./log_precision_check"
    """The folder; each check makes one of its own in it, named by the time."""
    format: str = "simple"
    """``simple`` (minimum, maximum, mean, first values) or ``md5`` (a hash of the numbers)."""
    save_tensors: str = ""
    """``npy``: write each tensor to a file; empty: none. ``true`` means ``npy``."""
    md5_tolerance: float = 0.0
    """Above 0, the hash is of the numbers rounded to multiples of this; 0: of every bit."""
    check_nan: bool = True
    """Whether a NaN is an error."""
    check_inf: bool = True
    """Whether an infinity is an error."""
    abort_on_error: bool = False
    """Whether an error raises `NonFiniteError`, after its line is written."""

    @classmethod
    def make(cls, config: str | Mapping[str, Any] | PrecisionConfig | None, options: Mapping[str, Any]) -> Self:
        """Return what ``config`` says, with the keywords ``options`` in front of it."""
        if isinstance(config, PrecisionConfig):
            given: dict[str, Any] = dataclasses.asdict(config)
        elif isinstance(config, str):
            given = _pairs(config)
        elif config is None or isinstance(config, Mapping):
            given = dict(config or {})
        else:
            raise OptionError(f"config is a string such as 'level=1,format=md5', or a dict; got {type_name(config)}.")
        given |= options
        for key in given:
            _check_key(key)
        values: dict[str, Any] = {key: _read(key, value) for key, value in given.items()}
        return cls(**values)


def _pairs(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in text.split(",") if text.strip() else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise OptionError(
                f"{item.strip()!r} in the config {text!r} has no '='; write key=value,key=value with the keys "
                f"{', '.join(_WORDS)}."
            )
        if key in found:
            raise OptionError(f"The config {text!r} gives {key!r} twice; keep one.")
        _check_key(key)
        found[key] = value
    return found


def _check_key(key: str) -> None:
    if key not in _WORDS:
        raise OptionError(
            f"A precision check has no {key!r}.{did_you_mean(key, _WORDS)} The keys: {', '.join(_WORDS)}."
        )


_FLAG: Final = {"true": True, "1": True, "false": False, "0": False}
_CHOICES: Final[dict[str, dict[str, Any]]] = {
    "level": {"0": 0, "1": 1, "2": 2},
    "format": {"simple": "simple", "md5": "md5"},
    "save_tensors": {"npy": "npy", "true": "npy", "1": "npy", "false": "", "0": "", "": "", "none": ""},
    "check_nan": _FLAG,
    "check_inf": _FLAG,
    "abort_on_error": _FLAG,
}
"""What may be written for a key, in lower case, and what it means."""
_WORDS: Final = {
    "level": "0 (off), 1 (modules) or 2 (modules and functions)",
    "path": "a folder",
    "format": "'simple' or 'md5'",
    "save_tensors": "true (or 'npy') or false",
    "md5_tolerance": "a number of 0 or more",
    "check_nan": "true or false",
    "check_inf": "true or false",
    "abort_on_error": "true or false",
}
"""Each key, and what its value is."""


def _read(key: str, value: Any) -> Any:
    """Return what a value of that key means; raise if it means nothing."""
    if key == "path" and isinstance(value, str | Path) and str(value):
        return str(value)
    if key == "md5_tolerance" and isinstance(value, str | int | float) and not isinstance(value, bool):
        with suppress(ValueError):
            if 0 <= float(value) < math.inf:
                return float(value)
    text = str(value).lower()
    if text in _CHOICES.get(key, {}):
        return _CHOICES[key][text]
    raise OptionError(f"{key} is {_WORDS[key]}, got {value!r}.")


# -- one tensor -------------------------------------------------------------------------------------------------------

FIRST: Final = 6
"""How many values a line shows."""
_NUMPY_HAS: Final = (
    *(torch.float64, torch.float32, torch.float16, torch.complex128, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
)


class TensorNumbers(NamedTuple):
    """The numbers of one tensor; minimum, maximum and mean are those of its finite values, 0 if it is empty."""

    minimum: float = 0
    maximum: float = 0
    mean: float = 0.0
    nan: int = 0
    inf: int = 0


def local_copy(tensor: Tensor) -> Tensor | None:
    """Return the tensor's numbers as a plain tensor on the host; None if it has none (fake, meta, in a transform)."""
    plain = dense(tensor)
    return None if plain is None else plain.cpu().contiguous()


def measure(plain: Tensor) -> TensorNumbers:
    """Return the numbers of a tensor that `local_copy` gave."""
    flat = _flat_numbers(plain)
    if not flat.size:
        return TensorNumbers()
    if flat.dtype.kind in "iub":
        whole = flat.astype(np.uint8) if flat.dtype.kind == "b" else flat
        return TensorNumbers(int(whole.min()), int(whole.max()), float(np.mean(whole, dtype=np.float64)))
    kept = flat[np.isfinite(flat)]
    nan = int(np.isnan(flat).sum())
    bad = nan, flat.size - kept.size - nan
    if not kept.size:
        return TensorNumbers(math.nan, math.nan, math.nan, *bad)
    mean = float(np.sum(kept.astype(np.float64) / kept.size))  # divided first: the sum of large values may overflow
    return TensorNumbers(float(kept.min()), float(kept.max()), mean, *bad)


def numbers_text(numbers: TensorNumbers, plain: Tensor) -> str:
    """Return numbers and the first values of a tensor as a line of the log shows them."""
    first = [_short(value) for value in as_numpy(plain.reshape(-1)[:FIRST]).tolist()]
    more = ["..."] if plain.numel() > FIRST else []
    least, most, mean = map(_short, numbers[:3])
    return f"min={least} max={most} mean={mean} [{', '.join([*first, *more])}]"


def hash_of(plain: Tensor, tolerance: float = 0.0) -> str:
    """Return the md5 of the numbers of a tensor that `local_copy` gave.

    With ``tolerance`` 0 it is the md5 of its bytes. Above that, of the values rounded to multiples of ``tolerance``, in
    float64: then tensors of several dtypes that hold nearly the same values have one hash.
    """
    if not tolerance:
        return hashlib.md5(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), usedforsecurity=False).hexdigest()
    flat = _flat_numbers(plain).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.rint(flat / tolerance) + 0.0  # -0.0 becomes 0.0
    rounded[np.isnan(flat)] = np.nan  # one of the many bit patterns of NaN
    return hashlib.md5(rounded.tobytes(), usedforsecurity=False).hexdigest()


def as_numpy(plain: Tensor) -> np.ndarray[Any, Any]:
    """Return an array with the same numbers; dtypes that numpy lacks (bfloat16, float8, …) become wider ones."""
    if plain.dtype in _NUMPY_HAS:
        array: np.ndarray[Any, Any] = plain.numpy()
        return array
    wider = torch.complex64 if plain.is_complex() else torch.float32 if plain.is_floating_point() else torch.int64
    return plain.to(wider).numpy()


def _flat_numbers(plain: Tensor) -> np.ndarray[Any, Any]:
    """Return all numbers in one row; a complex one counts as two."""
    array = as_numpy(plain).reshape(-1)
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def _short(value: Any) -> str:
    return format(value, ".6g") if isinstance(value, float) else str(value)


# -- the files --------------------------------------------------------------------------------------------------------

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
        """Write the line of a tensor, and the tensor if that was asked for, in the place of an older one.

        Each line is flushed: a process that is killed leaves all but the last. A full disk ends the files, not the run.
        """
        with self._lock:
            is_first = self.folder is None
            try:
                if not self._has_failed:
                    self._write(line, stem, plain)
            except OSError as error:
                if is_first:  # a path that never worked is a mistake, and nothing is lost yet
                    raise
                self._fail(error)

    def _write(self, line: str, stem: str, plain: Tensor) -> None:
        if self._log is None:
            self._log = self._open()
        self._log.write(f"{line}\n")
        self._log.flush()
        if self._save and self.folder is not None:
            folder = self.folder / f"rank_{this_rank()}"
            folder.mkdir(exist_ok=True)
            np.save(folder / f"{stem}.npy", as_numpy(plain), allow_pickle=False)

    def _fail(self, error: OSError) -> None:
        """Write nothing more, and say so."""
        self._has_failed = True
        log, self._log = self._log, None
        if log is not None:
            with suppress(OSError):  # it tries to write the line once more
                log.close()
        logger.warning(
            "[PrecisionCheck] no more lines and tensors are written to %s, because of %s; the run goes on, and the "
            "records are kept in memory. Next: make room there, or give another path=",
            self.folder,
            error,
        )

    def close(self) -> None:
        """Close the log; a later line opens it again."""
        with self._lock:
            if self._log is not None:
                self._log.close()
                self._log = None

    def _open(self) -> IO[str]:
        """Open the log; the first time, make the folder, which the rank that comes first names for all."""
        name = f"precision_check_rank_{this_rank()}.log"
        if self.folder is not None:
            return (self.folder / name).open("a", encoding="utf-8")
        number = next(_NUMBERS[str(self._path)])
        now = datetime.now().strftime("%Y%m%d_%H%M%S")
        wanted = self._path / first_of_ranks(f"precision/{self._path}/{number}", now)
        for number in itertools.count(1):  # a check of the same second has the first
            folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}_{number}")
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                log = (folder / name).open("x", encoding="utf-8")
                break
        self.folder = folder
        logger.info("[PrecisionCheck] Output: %s", folder)
        return log


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
