"""Outputs that are not plain tensors of real numbers, and models of very many modules: no observer stops a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline import factories

OBSERVERS = ("activation_stats", "nan_alarm", "export")
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")


def ones(**options: Any) -> Tensor:
    return torch.ones(3, 4, **options)


ODD = {
    "float8": lambda: ones().to(torch.float8_e4m3fn),
    "complex": lambda: ones(dtype=torch.complex64),
    "bool": lambda: ones(dtype=torch.bool),
    "uint16": lambda: ones(dtype=torch.uint16),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(ones(), 0.1, 0, torch.quint8),
    "meta": lambda: ones(device="meta"),
    "nested": lambda: torch.nested.nested_tensor([ones(), ones()[:1]]),
    "jagged": lambda: torch.nested.nested_tensor([ones(), ones()[:1]], layout=torch.jagged),
    "expanded": lambda: torch.ones(1, 4).expand(3, 4),
    "single": lambda: torch.tensor(1.0),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", OBSERVERS)
def test_no_output_stops_a_run(name: str, kind: str, tmp_path: Path) -> None:
    """In the call, in metrics and in close(); in inference mode and out of it."""
    hook = getattr(factories, name)({"folder": str(tmp_path)} if name == "export" else {})
    module, output = nn.Identity(), ODD[kind]()
    module.register_forward_hook(hook)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            module(output)
            module(output)
    hook.close()
    metrics = hook.to_metrics()
    if name == "activation_stats":
        assert metrics.get("Identity.0/mean") == (None if kind == "meta" else 1.0)
    if name == "export":
        assert metrics["written_tensors"] == (4 if kind in ("float8", "bool", "expanded", "single") else 0)
        assert metrics["written_tensors"] + metrics["unread"] == 4
        assert metrics["errors"] == 0
