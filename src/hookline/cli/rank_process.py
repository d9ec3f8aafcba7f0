"""Be one of the processes that torchrun started: join their process group, choose a device, say what others did wrong.

`run_command` calls `rank_group` around everything that is trained, and `run_session` calls `from_rank_zero` for what
only one process may do. Without torchrun's variables each does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from hookline.errors import OptionError

__all__ = ["from_rank_zero", "is_first_rank", "launched_ranks", "local_device", "rank_group", "rank_prefix"]

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_T = TypeVar("_T")


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
    if launched_ranks()[1] == 1:
        yield
        return
    import torch
    from torch import distributed

    if distributed.is_initialized():
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
    from hookline.distributed.ranks import gather_objects, is_distributed, this_rank

    if not is_distributed():
        return make()
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
