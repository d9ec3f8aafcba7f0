"""Seeds, determinism, device and precision: what holds for the whole process while a run lasts.

Used by `run`; everything is put back afterwards.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from hookline.cli.load_object import nearest_text
from hookline.errors import OptionError

__all__ = ["device_of", "dtype_of", "process_settings", "seed_everything"]

_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")


def seed_everything(seed: int) -> None:
    """Start the random streams of torch, NumPy and Python at the same place."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of every device


@contextmanager
def process_settings(*, deterministic: bool, matmul_precision: str | None) -> Iterator[None]:
    """Kernels that give the same result each time, where torch has them; float32 products as exact as asked.

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


def device_of(name: str | None) -> Any:
    """The device of that name; without one the GPU if there is one."""
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
    """The dtype of that name; None is none."""
    import torch

    if name is None:
        return None
    if name.removeprefix("torch.") not in _DTYPES:
        raise OptionError(f"--dtype {name}: parameters cannot be that.{nearest_text(name, _DTYPES)}")
    return getattr(torch, name.removeprefix("torch."))
