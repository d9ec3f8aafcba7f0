"""``cache.save`` and ``Cache.load``: what was captured, as a file, read back without running any code of it."""

from __future__ import annotations

import copy
import math
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_modules import Returns
from torch import Tensor, nn

import hookline as hl
from hookline import checkpoint_file
from hookline.errors import CaptureError

Pair = namedtuple("Pair", "first second")


class Many(nn.Module):
    """Every structure that a file keeps, and tensors that share memory."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        whole = x * scale
        return {
            "tuple": (whole, [whole.t(), None]),  # one memory, twice
            "pair": Pair(whole[:, 1:], 3),
            0: {"flag": True, "text": "é", "real": math.inf},
            "types": [whole.bfloat16(), whole.long(), whole > 0, whole.double(), torch.complex(whole, whole)],
            "conjugate": torch.complex(whole, whole).conj(),
            "empty": torch.empty(0, 3),
            "scalar": whole.sum(),
            "object": nn.Identity(),
        }


def captured(**options: Any) -> hl.observe.Cache:
    model = nn.Sequential(nn.Linear(3, 3), Many())
    torch.manual_seed(0)
    with hl.capture(model, "*", **options) as cache:
        for _ in range(2):
            model(torch.randn(4, 3))["scalar"].backward()
    return cache


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, with tuples for named tuples, and texts for objects."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple | list):
        kind = tuple if isinstance(one, tuple) else list
        return type(other) is kind and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, nn.Module):
        return other == "<torch.nn.modules.linear.Identity>"
    return one == other and type(one) is type(other)


WAYS = {
    "file": lambda cache, path: hl.observe.Cache.load(cache.save(path)),
    "copy": lambda cache, path: copy.copy(cache),
    "deep": lambda cache, path: copy.deepcopy({"the": cache})["the"],
    "pickle": lambda cache, path: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("way", WAYS)
def test_everything_comes_back(tmp_path, way):
    """Names in their order, steps, calls, structures, types and bits; of inputs and gradients too. It captures no more.

    A plain copy has the same memory.
    """
    cache = captured(inputs=True, grads=True)
    back = WAYS[way](cache, tmp_path / "run.cache")
    assert back.names == cache.names == ("0", "1", "")
    for name in cache:
        for one, other in zip(cache[name].calls, back[name].calls, strict=True):
            assert (one.step, one.call) == (other.step, other.call)
            assert same(one.output, other.output)
            assert same(one.inputs, other.inputs)
            assert same(one.kwargs, other.kwargs)
            assert same(one.grads, other.grads)
            assert not any(tensor.requires_grad for tensor in other.inputs)
    one, other = cache["0"].calls[0].grad, back["0"].calls[0].grad
    assert (one.data_ptr() == other.data_ptr()) is (way == "copy")
    with pytest.raises(CaptureError, match="closed"):
        back.__enter__()


def _another(path: Path) -> None:
    checkpoint_file.write(path, {"weights": torch.ones(1)})


OTHERS = {"text": lambda path: path.write_text("hello"), "another": _another, "folder": Path.mkdir, "none": str}


@pytest.mark.parametrize("case", OTHERS)
def test_other_files_are_refused(tmp_path, case):
    """Of another make, a folder, or none at all."""
    OTHERS[case](tmp_path / "run.cache")
    with pytest.raises(CaptureError, match=r"Cache\.save\(\)"):
        hl.observe.Cache.load(tmp_path / "run.cache")


REFUSED = {
    "meta": (torch.ones(2, 2), {"device": "meta"}, r"0\.0\.output.*meta.*index="),
    "keys": ({object(): torch.ones(1)}, {}, r"0\.0\.output\.key <object"),
}


@pytest.mark.parametrize(("output", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_file_can_hold_says_where(tmp_path, output, options, message):
    """Tensors without numbers, keys that are objects."""
    model = nn.Sequential(Returns(lambda x: output))
    with hl.capture(model, "0", **options) as cache:
        model(torch.ones(1))
    with pytest.raises(CaptureError, match=message):
        cache.save(tmp_path / "run.cache")
    assert list(tmp_path.iterdir()) == []
