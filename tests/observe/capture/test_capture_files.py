"""``cache.save`` and ``Cache.load``: what was captured, as a safetensors file, read back without pickle."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_modules import Returns
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hookline as hl
from hookline.errors import CaptureError

Pair = namedtuple("Pair", "first second")


class Many(nn.Module):
    """Every structure that a file keeps, and tensors that no file takes as they are."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        whole = x * scale
        return {
            "tuple": (whole, [whole.t(), None]),  # one memory, twice
            "again": whole,
            "pair": Pair(whole[:, 1:], 3),
            0: {"flag": True, "text": "é", "real": math.inf},
            "types": [whole.bfloat16(), whole.long(), whole > 0, whole.double(), torch.complex(whole, whole)],
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
    """Equal to the last bit, with tuples for named tuples, and classes for objects."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple | list):
        kind = tuple if isinstance(one, tuple) else list
        return type(other) is kind and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, nn.Module):
        return repr(other) == "<Unseen torch.nn.modules.linear.Identity>"
    return one == other and type(one) is type(other)


def test_everything_comes_back(tmp_path):
    """Names in their order, steps, calls, structures, types and bits; of inputs and gradients too."""
    cache = captured(inputs=True, grads=True)
    back = hl.observe.Cache.load(cache.save(tmp_path / "run.safetensors"))
    assert back.names == cache.names == ("0", "1", "")
    for name in cache:
        for one, other in zip(cache[name].calls, back[name].calls, strict=True):
            assert (one.step, one.call) == (other.step, other.call)
            assert same(one.output, other.output)
            assert same(one.inputs, other.inputs)
            assert same(one.kwargs, other.kwargs)
            assert same(one.grads, other.grads)
            assert not any(tensor.requires_grad for tensor in other.inputs)
    assert back["0"].calls[0].grad is not None
    assert back.bytes >= cache.bytes  # in a file a view has memory of its own


def test_a_tensor_that_is_in_two_places_is_written_once(tmp_path):
    """And is one tensor again when it is read."""
    cache = captured()
    path = cache.save(tmp_path / "run.safetensors")
    output = hl.observe.Cache.load(path)["1"].calls[0].output
    assert output["again"] is output["tuple"][0]
    assert len(load_file(path)) == 2 * 11  # of each step: 0, and ten of 1; the model's are the same


def test_what_was_not_captured_is_not_in_the_file_either(tmp_path):
    """The errors say how to capture it; names that are missing, which there are."""
    back = hl.observe.Cache.load(captured().save(str(tmp_path / "run.safetensors")))
    with pytest.raises(CaptureError, match="inputs=True"):
        back["0"].calls[0].inputs
    with pytest.raises(CaptureError, match="grads=True"):
        back["0"].calls[0].grad
    with pytest.raises(hl.errors.NoMatchError, match="nearest: '0', '1', ''"):
        back["layers"]
    back.remove()


def test_a_value_that_was_overwritten_is_not_written(tmp_path):
    """Wrong numbers do not get into files either, and no half file is left."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with hl.capture(model, "0") as cache:
        model(torch.randn(2, 3))
    with pytest.raises(CaptureError, match="clone=True"):
        cache.save(tmp_path / "run.safetensors")
    assert list(tmp_path.iterdir()) == []


def damage(path: Path, about: Any) -> Path:
    save_file({"0": torch.ones(1)}, path, metadata={"hookline.capture": about})
    return path


BROKEN = {
    "not JSON": "{",
    "no sites": json.dumps({"version": 1}),
    "a tensor that is not there": json.dumps(
        {"version": 1, "sites": [{"name": "a", "calls": [{"step": 0, "call": 0, "output": ["tensor", "9"]}]}]}
    ),
    "an unknown kind": json.dumps(
        {"version": 1, "sites": [{"name": "a", "calls": [{"step": 0, "call": 0, "output": ["pickle", "9"]}]}]}
    ),
}


@pytest.mark.parametrize("about", BROKEN.values(), ids=BROKEN)
def test_a_damaged_file_says_so(tmp_path, about):
    with pytest.raises(CaptureError, match=r"run\.safetensors is damaged"):
        hl.observe.Cache.load(damage(tmp_path / "run.safetensors", about))


def test_other_files_are_refused(tmp_path):
    """Of another make, of another version, or none of this kind."""
    save_file({"0": torch.ones(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(CaptureError, match=r"was not written by Cache\.save\(\)"):
        hl.observe.Cache.load(tmp_path / "weights.safetensors")
    with pytest.raises(CaptureError, match="is of version 7"):
        hl.observe.Cache.load(damage(tmp_path / "new.safetensors", json.dumps({"version": 7})))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CaptureError, match="is no safetensors file"):
        hl.observe.Cache.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        hl.observe.Cache.load(tmp_path / "nowhere")


def saved(output: Any, path: Path, **options: Any) -> Path:
    """A file with that output in it."""
    model = nn.Sequential(Returns(lambda x: output))
    with hl.capture(model, "0", **options) as cache:
        model(torch.ones(1))
    return cache.save(path)


RING: list[Any] = [torch.ones(1)]
RING.append(RING)
REFUSED = {
    "sparse": (torch.ones(2, 2).to_sparse(), {}, r"output of '0' is a Tensor \(torch.sparse_coo\).*cannot hold"),
    "meta": (torch.ones(2, 2), {"device": "meta"}, "output of '0' is on the meta device"),
    "keys": ({object(): torch.ones(1)}, {}, r"output of '0' has keys such as <object.*Capture a module"),
    "complex128": (torch.zeros(2, dtype=torch.complex128), {}, r"complex128.*use index="),
    "itself": (RING, {}, "output of '0' contains itself"),
}


@pytest.mark.parametrize(("output", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_file_can_hold_says_where(tmp_path, output, options, message):
    """Tensors without numbers in one place, keys that are objects, types that the format does not have, rings."""
    with pytest.raises(CaptureError, match=message):
        saved(output, tmp_path / "run.safetensors", **options)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_torch_only_marks_as_conjugate_come_back(tmp_path):
    z = torch.view_as_complex(torch.randn(3, 2))
    back = hl.observe.Cache.load(saved([z, z.conj()], tmp_path / "run.safetensors"))["0"].output
    assert torch.equal(back[1], z.conj().resolve_conj())


def test_a_path_that_will_not_do_is_named(tmp_path):
    """A folder that is not there, a folder in the place of a file; also for reading."""
    with pytest.raises(CaptureError, match=r"run\.safetensors cannot be written: there is no folder .*none"):
        saved(torch.ones(1), tmp_path / "none" / "run.safetensors")
    with pytest.raises(CaptureError, match="is a folder: give the path of a file"):
        saved(torch.ones(1), tmp_path)
    with pytest.raises(CaptureError, match="is a folder: give the path of a file"):
        hl.observe.Cache.load(tmp_path)
