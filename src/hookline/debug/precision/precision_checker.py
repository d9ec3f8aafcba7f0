"""Check what flows through the modules and functions of a model, forward and backward: `PrecisionChecker`.

Users make one. It attaches observers (`attach_everywhere`, `attach_function`), measures each tensor, and writes a line
of each. Options come from keywords or from a string ``level=1,path=x,format=md5``; what is not understood is an error
that says what is. Files are ``PATH/TIME/precision_check_rank_0.log`` and ``rank_0/NAME.npy``; nothing is created before
the first line. Measuring waits for the device, and changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn

from hookline.distributed.ranks import first_of_ranks, this_rank
from hookline.errors import NonFiniteError, OptionError, TargetError
from hookline.factories.factory_hook import checked, read_options
from hookline.guard.digest import dense
from hookline.messages import type_name
from hookline.sites.attach import attach
from hookline.sites.everywhere import attach_everywhere
from hookline.sites.functions.attach_function import attach_function
from hookline.sites.functions.function_names import find_places
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import FunctionSite, Site
from hookline.sites.wrappers import clean_modules
from hookline.tables import OFF, ON
from hookline.tree import leaves

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hookline.hook_types import Hook

_KEPT: Final = 100_000
"""Records kept in memory; a record is about 400 bytes."""
_FUNCTIONS: Final = "torch.*"
"""The functions of level 2: those of torch that a forward calls by name."""
_QUESTIONS: Final = [
    *("*.__get__", "*.size", "*.stride", "*.dim", "*.numel", "*.is_*", "*.item", "*.tolist", "*.data_ptr"),
    *("*.__len__", "*.__bool__", "*.__repr__", "*.__format__", "*.__hash__", "*.get_device", "*.element_size"),
]
"""Functions that only ask a tensor something; each would write a line of the same tensor once more."""
_OWN_CHECKS: Final = ("check_nan", "check_inf", "abort_on_error")


class PrecisionChecker:
    """Check what flows through a model, and write a line for each tensor.

    Recipe::

        with hookline.PrecisionChecker(model, "level=1,path=checks,format=simple") as checker:
            for iteration, batch in enumerate(batches):
                checker.set_iteration(iteration)
                train_step(batch)
        print(checker.errors, checker.folder)

    Level 1 checks the outputs of every module and the gradients that arrive at them. Level 2 also checks what the
    functions of torch take and give, in the forward and in the backward. Level 0 attaches nothing and writes nothing.
    Each tensor is copied to the host: this is a tool to look with, not one to leave on. The run keeps every bit.

    Args:
        model: The model; None: every module that is called in this process.
        config: ``level=1,path=x,format=md5,save_tensors=true``.
        options: The same keys as keywords; they go before ``config``.

    Raises:
        OptionError: for an unknown key, an item without ``=``, a value that does not fit.
        NonFiniteError: from a forward or backward, with ``abort_on_error``.
    """

    def __init__(self, model: nn.Module | None = None, config: str = "", **options: Any) -> None:
        if isinstance(model, str):
            raise TargetError(f"The first argument is the model; write PrecisionChecker(config={model!r}).")
        if model is not None and not isinstance(model, nn.Module):
            raise TargetError(f"PrecisionChecker takes a torch.nn.Module, got {type_name(model)}.")
        self.config = PrecisionConfig.make(_pairs(config) | options)
        """The options."""
        self._model = None if model is None else weakref.ref(model)
        self._context = PrecisionContext()
        self._lock = threading.Lock()
        self._busy = threading.local()
        self._counters: dict[tuple[str, str], int] = defaultdict(int)
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._manual: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._files = PrecisionFiles(self.config.path, save=self.config.save_tensors)
        self._general = HandleSet()
        self._function_outputs = HandleSet()
        self._own = HandleSet()
        self.records: deque[PrecisionRecord] = deque(maxlen=_KEPT)
        """The tensors checked since `reset_counters`, at most 100,000."""
        self.errors: list[PrecisionRecord] = []
        """Those with NaN or infinity since the checker was made."""
        self.init()

    # -- on and off --------------------------------------------------------------------------------------------

    def init(self) -> None:
        """Attach the hooks of the level; called again, also after `remove`, the hooks are on once."""
        self._general.remove(quiet=True)
        model = None if self._model is None else self._model()
        attach_to_all: Any = attach_everywhere if model is None else partial(attach, model, "*")
        if self.config.level >= 1:
            self._general = HandleSet(
                [
                    attach_to_all(self._see_outputs, observe=True, name="PrecisionChecker"),
                    attach_to_all(self._see_gradients, on="backward_pre", observe=True, name="PrecisionChecker"),
                ]
            )
        if self.config.level >= 2:
            handles = self._function_handles(_FUNCTIONS, "", model, self.config)
            self._general = HandleSet([*self._general, *handles])
            self._function_outputs = HandleSet(handles[1:2])

    def register_for_module(self, module: nn.Module, name: str = "", **checks: bool) -> HandleSet:
        """Check one module with options of its own: its outputs, and the gradients of its inputs.

        Args:
            module: The module; the hooks of the level leave it alone from now on.
            name: Its name in the lines; its name in the model, or its class, if empty.
            checks: ``check_nan``, ``check_inf``, ``abort_on_error``.
        """
        config = self._with(checks)
        handles = HandleSet()
        if self.config.level:
            if name:
                self._names[module] = name

            def outputs(called: nn.Module, args: Any, output: Any, *, site: Site) -> None:
                self._of_module(called, site, "forward", output, config)

            def gradients(called: nn.Module, grad_input: Any, grad_output: Any, *, site: Site) -> None:
                self._of_module(called, site, "backward", grad_input, config)

            options: dict[str, Any] = {"observe": True, "name": "PrecisionChecker"}
            handles = HandleSet(
                [attach(module, outputs, **options), attach(module, gradients, on="backward", **options)]
            )
            self._manual.add(module)
            self._own = HandleSet([*self._own, *handles])
        return handles

    def register_for_function(self, function: Any, name: str = "", **checks: bool) -> HandleSet:
        """Check functions with options of their own: what they take and give, forward and, but for operators, backward.

        Args:
            function: As for `attach_function`: a function of torch, an operator, a subclass of
                ``torch.autograd.Function``, a glob over their names.
            name: The name in the lines; the function's own if empty.
            checks: ``check_nan``, ``check_inf``, ``abort_on_error``.
        """
        config = self._with(checks)
        handles = HandleSet()
        if self.config.level:
            model = None if self._model is None else self._model()
            handles = HandleSet(self._function_handles(function, name, model, config))
            self._own = HandleSet([*self._own, *handles])
        return handles

    def remove(self, *, quiet: bool = False) -> None:
        """Take all hooks off and close the log; may be repeated.

        Warn, unless ``quiet``, if level 2 has seen no function although the model ran (in compiled code, say).
        """
        self._function_outputs.remove(quiet=quiet)
        self._general.remove(quiet=True)
        self._own.remove(quiet=True)
        self._manual.clear()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove(quiet=exc_info[0] is not None)

    # -- where the run stands ----------------------------------------------------------------------------------

    def set_gas(self, gas: int) -> None:
        """Say which micro-batch of a gradient accumulation runs now: ``[GAS-gas]``."""
        self._context.change(gas=gas)

    def set_layer(self, layer: int | None) -> None:
        """Say which layer runs now: ``[L-layer]``; None goes back to the number in the module's name."""
        self._context.change(layer=layer)

    def set_layer_name(self, name: str) -> None:
        """Say what the layer that runs now is called; an empty name says nothing."""
        self._context.change(layer_name=name)

    def set_iteration(self, iteration: int | None) -> None:
        """Say which iteration begins: ``[I-iteration]``; the counters begin anew."""
        self._context.change(iteration=iteration)
        self.reset_counters()

    def reset(self) -> None:
        """Forget micro-batch, layer, layer name and iteration of this thread."""
        self._context.change(gas=0, layer=None, layer_name="", iteration=None)

    def reset_counters(self) -> None:
        """Count calls from 0 again, as each iteration should: its files then replace those of the one before."""
        with self._lock:
            self._counters.clear()
            self.records.clear()

    def build_name_map(self, root: nn.Module) -> dict[str, nn.Module]:
        """Name modules by their path in ``root`` from now on, and return the names; ``root`` itself has none."""
        found = {name: module for name, module in clean_modules(root) if name}
        for name, module in found.items():
            self._names[module] = name
        return found

    @property
    def folder(self) -> Path | None:
        """The folder with the log and the tensors; None before the first line."""
        return self._files.folder

    # -- hooks -------------------------------------------------------------------------------------------------

    def _see_outputs(self, module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
        if module not in self._manual:
            self._of_module(module, site, "forward", output, self.config)

    def _see_gradients(self, module: nn.Module, grad_output: Any, *, site: Site) -> None:
        if module not in self._manual:
            self._of_module(module, site, "backward", grad_output, self.config)

    def _of_module(self, module: nn.Module, site: Site, stage: str, value: Any, config: PrecisionConfig) -> None:
        if not site.recompute:  # it repeats a forward that has been checked
            name = self._names.get(module) or site.name or type(module).__name__
            self._check(name, stage, value, config)

    def _function_handles(
        self, function: Any, name: str, model: nn.Module | None, config: PrecisionConfig
    ) -> list[RemovableHandle]:
        """Attach to functions, for what they take, give, are sent and send on, in this order."""

        def see(stage: str, place: int) -> Hook:
            def hook(fn: FunctionSite, *given: Any) -> None:
                if not fn.recompute:
                    called = name or fn.name
                    self._check(f"{fn.module}@{called}" if fn.module else called, stage, given[place], config)

            return hook

        hooks = {"forward_pre": see("forward_input", 0), "forward": see("forward", 1)}
        if not any(place.is_operator for place in find_places(function)):  # which have no gradients
            hooks |= {"backward_pre": see("backward", 0), "backward": see("backward_input", 0)}
        handles = HandleSet()
        try:
            for kind, hook in hooks.items():
                handles.add(
                    attach_function(
                        function,
                        hook,
                        on=kind,
                        within=model,
                        exclude=_QUESTIONS if function == _FUNCTIONS else None,
                        observe=True,
                        name="PrecisionChecker",
                    )
                )
        except BaseException:
            handles.remove(quiet=True)
            raise
        return list(handles)

    # -- checking ----------------------------------------------------------------------------------------------

    def _with(self, checks: Mapping[str, bool]) -> PrecisionConfig:
        unknown = [key for key in checks if key not in _OWN_CHECKS]
        if unknown:
            raise OptionError(f"One module or function has the options {', '.join(_OWN_CHECKS)}, not {unknown[0]!r}.")
        return dataclasses.replace(self.config, **{key: checked(key, value, bool) for key, value in checks.items()})

    def _check(self, name: str, stage: str, value: Any, config: PrecisionConfig) -> None:
        """Write a line for each tensor in ``value``; raise after the last if one is bad and that was asked for."""
        # Numbered by their places, so that a gradient that is None moves no other.
        tensors = [(place, leaf) for place, (_, leaf) in enumerate(leaves(value)) if isinstance(leaf, Tensor)]
        if not tensors or getattr(self._busy, "now", False):  # at level 2, what is called here would be checked too
            return
        with self._lock:
            index = self._counters[name, stage]
            self._counters[name, stage] += 1
        self._busy.now = True
        try:
            with torch.no_grad():
                found = [self._checked(name, stage, index, *each, config) for each in tensors]
        finally:
            self._busy.now = False
        bad = next((record for record in found if record is not None and record.is_error), None)
        if bad is not None and config.abort_on_error:
            raise NonFiniteError(f"Precision check failed, aborting! {bad} (all lines: {self.folder})")

    def _checked(
        self, name: str, stage: str, index: int, number: int, tensor: Tensor, config: PrecisionConfig
    ) -> PrecisionRecord | None:
        plain = local_copy(tensor)
        if plain is None:
            return None
        numbers = measure(plain)
        hashed = config.format == "md5"
        record = PrecisionRecord(
            name=name,
            stage=stage,
            index=index,
            tensor=number,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(plain.shape),
            numbers=f"md5={hash_of(plain, config.md5_tolerance)}" if hashed else numbers_text(numbers, plain),
            nan=numbers.nan,
            inf=numbers.inf,
            is_error=bool((config.check_nan and numbers.nan) or (config.check_inf and numbers.inf)),
            context=self._context.state.text(_layer_in(name)),
        )
        self._keep(record, plain)
        return record

    def _keep(self, record: PrecisionRecord, plain: Tensor) -> None:
        self._files.write(str(record), record.stem, plain)
        with self._lock:
            self.records.append(record)
            if record.is_error and len(self.errors) < _KEPT:
                self.errors.append(record)

    def __repr__(self) -> str:
        state = ON if any(not handle.removed for handle in (*self._general, *self._own)) else OFF
        return f"<PrecisionChecker level {self.config.level}, {len(self.errors)} errors, in {self.folder}; {state}>"


def _layer_in(name: str) -> int | None:
    """Return the first part of the name that is a number: 3 for ``model.layers.3.mlp``."""
    return next((int(part) for part in name.partition("@")[0].split(".") if part.isdigit()), None)


# -- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """The options of a precision check.

    >>> PrecisionConfig.make({"level": "2", "format": "md5", "md5_tolerance": "1e-3"}).level
    2
    """

    level: Literal[0, 1, 2] = 1
    """0: nothing; 1: the outputs of modules and their gradients; 2: also what functions take and give."""
    path: str = "./log_precision_check"
    """The folder; each check makes one of its own in it, named by the time."""
    format: Literal["simple", "md5"] = "simple"
    """``simple`` (minimum, maximum, mean, first values) or ``md5`` (a hash of the numbers)."""
    save_tensors: bool = False
    """Whether each tensor is written to an ``.npy`` file."""
    md5_tolerance: float = 0.0
    """Above 0, the hash is of the numbers rounded to multiples of this; 0: of every bit."""
    check_nan: bool = True
    """Whether a NaN is an error."""
    check_inf: bool = True
    """Whether an infinity is an error."""
    abort_on_error: bool = False
    """Whether an error raises `NonFiniteError`, after its line is written."""

    def __post_init__(self) -> None:
        if self.md5_tolerance < 0 or isinstance(self.level, bool):
            got = f"level={self.level!r}, md5_tolerance={self.md5_tolerance!r}"
            raise OptionError(f"PrecisionChecker: level is 0, 1 or 2, md5_tolerance a number of 0 or more; got {got}.")

    @classmethod
    def make(cls, given: Mapping[str, Any]) -> Self:
        """Return the options that ``given`` names."""
        return read_options("PrecisionChecker", cls, {key: _typed(key, value) for key, value in given.items()})


def _pairs(text: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise OptionError(f"config is a string such as 'level=1,format=md5', got {type_name(text)}; or give keywords.")
    found: dict[str, Any] = {}
    for item in text.split(",") if text.strip() else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise OptionError(f"{item.strip()!r} in the config {text!r} has no '='; write key=value,key=value.")
        if key in found:
            raise OptionError(f"The config {text!r} gives {key!r} twice; keep one.")
        found[key] = value
    return found


_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}


def _typed(key: str, value: Any) -> Any:
    """Return the text of an option in its type; one that does not fit as it is, to be refused."""
    if key == "path" and isinstance(value, Path):
        return str(value)
    if not isinstance(value, str) or key in ("path", "format"):
        return value
    if key in ("level", "md5_tolerance"):
        with suppress(ValueError):
            return int(value) if key == "level" else float(value)
    return _FLAGS.get(value.lower(), value)


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
            "[PrecisionCheck] no more lines and tensors are written to %s, because of %s; the run continues, and the "
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
