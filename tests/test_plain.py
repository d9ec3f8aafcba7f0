"""Values as JSON has them: whatever a configuration or a result holds, strict JSON can be written of it."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from torch import nn

from hookline.plain import to_plain


class Colour(Enum):
    RED = 1


class Mode(StrEnum):
    FAST = "fast"


@dataclass
class Config:
    folder: Path
    inner: Any = None


class Model(BaseModel):
    lr: float = math.inf


class Plain:
    def __init__(self) -> None:
        self.seen, self._hidden = (1, 2), 3


def make() -> None:
    """A function of a configuration."""


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ([None, True, 3, 1.5, "ü"], [None, True, 3, 1.5, "ü"]),
        ([math.nan, -math.inf], ["nan", "-inf"]),
        ({1: (2, {3})}, {"1": [2, [3]]}),
        ({"b", "a"}, ["a", "b"]),
        (torch.tensor([[1.0, math.nan]], requires_grad=True), [[1.0, "nan"]]),
        ([np.float32(0.5), np.int64(2), np.arange(2)], [0.5, 2, [0, 1]]),
        ([Colour.RED, Mode.FAST], [1, "fast"]),
        (Config(Path("runs"), Config(Path("x"))), {"folder": "runs", "inner": {"folder": "x", "inner": None}}),
        (Model(), {"lr": "inf"}),
        (argparse.Namespace(lr=0.1), {"lr": 0.1}),
        (Plain(), {"seen": [1, 2]}),
        ([torch.float32, torch.device("cpu")], ["torch.float32", "cpu"]),
        ([make, nn.Linear], [f"{__name__}.make", "torch.nn.modules.linear.Linear"]),
        (object(), "object"),
        (b"x", "b'x'"),
    ],
)
def test_a_value_is_what_strict_json_can_hold(value: Any, plain: Any) -> None:
    found = to_plain(value)
    assert found == plain
    assert json.loads(json.dumps(found, allow_nan=False)) == plain


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(2, device="meta"), torch.eye(2).to_sparse(), nn.UninitializedParameter()],
    ids=["meta", "sparse", "lazy"],
)
def test_a_tensor_that_no_list_can_hold_is_text(tensor: torch.Tensor) -> None:
    """A configuration that holds a model on meta can be written."""
    assert to_plain({"weight": tensor}) == {"weight": str(tensor)}


def test_a_container_that_holds_itself_has_an_end() -> None:
    """In a mark, not in an error: a run is not to end by what is written about it."""
    ring: list[Any] = [1]
    ring.append(ring)
    assert "…" in json.dumps(to_plain(ring), ensure_ascii=False)
