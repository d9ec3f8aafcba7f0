"""The batch and torch's switches: undone, or named."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookline.guard.guard import _SWITCHES, rollback


@dataclass
class _Pair:
    x: Any
    y: Any


def _x() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


BATCHES = {
    "a tensor": lambda: _x(),
    "a tuple": lambda: (_x(), _x()),
    "nested": lambda: {"a": [_x(), {"b": (_x(),)}]},
    "a dataclass": lambda: _Pair(_x(), {"more": _x()}),
    "a mapping of its own class": lambda: UserDict({"input_ids": _x()}),
    "arrays": lambda: [_x().numpy().copy(), np.arange(3)],
    "a view": lambda: (_x()[:, 1:],),
}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor | np.ndarray):
        return [value]
    if isinstance(value, _Pair | UserDict):
        value = vars(value)
    items = value.values() if isinstance(value, dict) else value
    return [leaf for item in items for leaf in _leaves(item)]


def _through_counter(leaf: Any) -> None:
    leaf[...] = 9


def _behind_its_back(leaf: Any) -> None:
    (leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf)[...] = 9


@pytest.mark.product(
    kind=sorted(BATCHES), write=[_through_counter, _behind_its_back], scope=["reads", "grads", "trains"]
)
def test_what_was_written_into_a_batch_is_undone(kind, write, scope):
    """However the batch is built, however it was written, and whatever the scope; the objects are the same."""
    batch = BATCHES[kind]()
    before, objects = [leaf.tolist() for leaf in _leaves(batch)], [id(leaf) for leaf in _leaves(batch)]
    with rollback(nn.Linear(3, 1), batch=batch, scope=scope):
        for leaf in _leaves(batch):
            write(leaf)
    assert [id(leaf) for leaf in _leaves(batch)] == objects
    assert [leaf.tolist() for leaf in _leaves(batch)] == before


@pytest.mark.parametrize("kind", ["nested", "a dataclass"])
def test_what_was_put_into_a_batch_in_place_of_something_is_out_again(kind):
    """Another tensor under the same name."""
    batch = BATCHES[kind]()
    objects = [id(leaf) for leaf in _leaves(batch)]
    with rollback(nn.Linear(3, 1), batch=batch):
        if isinstance(batch, dict):
            batch["a"][0] = torch.zeros(1)
        else:
            batch.x = torch.zeros(1)
    assert [id(leaf) for leaf in _leaves(batch)] == objects


# -- switches -------------------------------------------------------------------------------------------------------

TURNS: dict[str, Any] = {
    "grad mode": lambda: torch.set_grad_enabled(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "autocast on cpu": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast on cuda": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    "autocast blocks": lambda: torch.autocast_increment_nesting(),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "anomaly detection": lambda: torch.set_anomaly_enabled(True, False),
    "float32 precision": lambda: torch.set_float32_matmul_precision("medium"),
    "half-precision reductions": lambda: setattr(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "swapping parameters on conversion": lambda: torch.__future__.set_swap_module_params_on_conversion(True),
    "overwriting parameters on conversion": lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
    "cudnn.enabled": lambda: torch._C._set_cudnn_enabled(False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "mkldnn.enabled": lambda: torch.backends.mkldnn.set_flags(False),
    "mkldnn.deterministic": lambda: torch._C._set_mkldnn_deterministic(True),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "memory-efficient attention": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "plain attention": lambda: torch.backends.cuda.enable_math_sdp(False),
    "cudnn attention": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "deterministic fill": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "autograd's threads": lambda: torch._C._set_multithreading_enabled(False),
}


@pytest.mark.parametrize("name", sorted(TURNS))
def test_a_switch_that_was_left_moved_is_set_back_and_named(name):
    """Each by itself; what it says is read by torch's own function."""
    ask = _SWITCHES[name][0]
    torch.backends.mkldnn.set_flags(True)  # as torch begins, whatever ran in this process before
    before = ask()
    with rollback(nn.Linear(2, 1)) as receipt:
        TURNS[name]()
        assert ask() != before
    assert ask() == before
    assert name in receipt.touched
