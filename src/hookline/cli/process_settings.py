"""Set what holds for the whole process while a run lasts: seeds, determinism, precision, threads, device.

`run_command` and `run_session` call it; `process_settings` restores everything afterwards.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from hookline.errors import OptionError
from hookline.messages import unknown_name_text

__all__ = ["choose_threads", "device_of", "dtype_of", "process_settings", "seed_everything"]

_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")
_SMALL: Final = 1_000_000
"""Parameters below which one thread is taken. On two cores with a load of 10, a step of digits (6k parameters) took
38 ms with one thread and 92 ms with two, one of mod_arithmetic (57k) 57 and 215 ms, of a MLP of 1.1M 103 and 251 ms."""


def seed_everything(seed: int) -> None:
    """Seed the random streams of torch, NumPy and Python."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of every device


@contextmanager
def process_settings(*, deterministic: bool, matmul_precision: str | None) -> Iterator[None]:
    """Make torch take deterministic kernels where it has any, and multiply float32 as exactly as asked.

    Costs nothing on the CPU; on a GPU some kernels are slower, and an operation without such a kernel warns and runs.
    """
    import torch

    memory: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        memory.fill_uninitialized_memory,
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
    )
    try:
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
            memory.fill_uninitialized_memory = False  # it would write every new tensor twice
        if matmul_precision is not None:
            torch.set_float32_matmul_precision(matmul_precision)
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[2], before[3]
        memory.fill_uninitialized_memory = before[4]
        torch.set_float32_matmul_precision(before[5])
        torch.set_num_threads(before[6])


def choose_threads(asked: int | None, parameters: int, *, on_cpu: bool, recorded: int | None = None) -> tuple[int, str]:
    """Set the number of torch threads; return it, and a sentence where it is not torch's own or has changed.

    The first of these counts: ``--threads``, the variable OMP_NUM_THREADS, what the run that is resumed had, one for a
    small model on the CPU, torch's own number.

    Args:
        asked: ``--threads``.
        parameters: How many the model has.
        on_cpu: Whether it is trained on the CPU.
        recorded: What ``run.json`` says, of a run that is resumed. Another number may change the last bits of sums.
    """
    import torch

    own = torch.get_num_threads()
    by_environment = own if os.environ.get("OMP_NUM_THREADS") else None
    small = 1 if on_cpu and parameters < _SMALL else None
    number = next(one for one in (asked, by_environment, recorded, small, own) if one is not None)
    torch.set_num_threads(number)
    if recorded is not None and number != recorded:
        return number, f"{_threads(number)}, and {recorded} before: results may differ in their last bits."
    if number == own or asked is not None:
        return number, ""
    if recorded is not None:
        return number, f"{_threads(number)}, as before; set OMP_NUM_THREADS or --threads N to change"
    size = f"{parameters / 1000:.0f}k" if parameters >= 1000 else str(parameters)
    return 1, f"1 thread: a model of {size} parameters is faster so; set OMP_NUM_THREADS or --threads N to change"


def _threads(number: int) -> str:
    return f"{number} thread{'s' * (number > 1)}"


def device_of(name: str | None) -> Any:
    """Return the device of that name; without one the GPU if there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        said = str(error).strip().partition("\n")[0].rstrip(".")
        raise OptionError(f"--device {name}: there is no such device here ({said}). cpu is always there.") from None
    return device


def dtype_of(name: str | None) -> Any:
    """Return the dtype of that name; None for None."""
    import torch

    if name is None:
        return None
    if name.removeprefix("torch.") not in _DTYPES:
        raise OptionError(f"--dtype {name}: parameters cannot be that.{unknown_name_text(name, _DTYPES)}")
    return getattr(torch, name.removeprefix("torch."))
