"""Set what holds for the whole process while a run lasts: seeds, determinism, precision, threads, device, ranks.

`session` and the commands call it; `process_settings` restores everything afterwards.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from hookline.errors import OptionError
from hookline.messages import unknown_name_text

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_T = TypeVar("_T")
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

    from hookline.guard.torch_switches import TorchSwitches

    before = TorchSwitches()
    try:
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
            memory: Any = torch.utils.deterministic
            memory.fill_uninitialized_memory = False  # it would write every new tensor twice
        if matmul_precision is not None:
            torch.set_float32_matmul_precision(matmul_precision)
        yield
    finally:
        before.restore()


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
        raise OptionError(f"{name}: there is no such device here ({said}). cpu is always there.") from None
    return device


def dtype_of(name: str | None) -> Any:
    """Return the dtype of that name; None for None."""
    import torch

    if name is None:
        return None
    if name.removeprefix("torch.") not in _DTYPES:
        raise OptionError(f"{name}: parameters cannot be that.{unknown_name_text(name, _DTYPES)}")
    return getattr(torch, name.removeprefix("torch."))


# -- several processes, started by torchrun ---------------------------------------------------------------------


def launched_ranks() -> tuple[int, int]:
    """Return the rank of this process and how many there are, as torchrun says; ``(0, 1)`` without it."""
    values = [os.environ.get(name, "") for name in _VARIABLES]
    if not all(values) or not values[0].isdecimal() or not values[1].isdecimal():
        return 0, 1
    return int(values[0]), int(values[1])


def is_first_rank() -> bool:
    """Return whether this process is the one that prints and writes."""
    return launched_ranks()[0] == 0


def rank_prefix() -> str:
    """Return what lines of this process begin with, where another one prints for all."""
    return "hookline: " if is_first_rank() else f"hookline (rank {launched_ranks()[0]}): "


def local_device(name: str | None) -> str | None:
    """Return the device for this process: with several on a machine each takes the GPU of its number there."""
    import torch

    if launched_ranks()[1] == 1 or name not in (None, "cuda") or not torch.cuda.is_available():
        return name
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise OptionError(
            f"Process {local} of this machine has no GPU of its own: there are {torch.cuda.device_count()}. Next: "
            f"torchrun --nproc-per-node {torch.cuda.device_count()}, or --device cpu."
        )
    return f"cuda:{local}"


@contextmanager
def rank_group(device: Any) -> Iterator[None]:
    """Join the process group of all ranks while the block lasts: NCCL for a GPU, gloo for the CPU.

    One that is there already is used, and stays.
    """
    import torch
    from torch import distributed

    if launched_ranks()[1] == 1 or distributed.is_initialized():
        yield
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def from_rank_zero(make: Callable[[], _T], what: str) -> _T:
    """Return what `make` returns on rank 0, on every rank; raise its error on every rank."""
    if launched_ranks()[1] == 1:
        return make()
    from hookline.distributed.ranks import gather_objects, this_rank

    found: tuple[Any, Exception | None] = (None, None)
    if this_rank() == 0:
        try:
            found = (make(), None)
        except Exception as error:
            found = (None, error)
    value, raised = gather_objects(found, what=what)[0]
    if raised is not None:
        raise raised
    return value  # type: ignore[no-any-return]
