"""The file of a checkpoint: what goes in comes out, damage is noticed, and nothing is run."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_warm import run_warm

import hookline as hl
from hookline.errors import CheckpointError
from hookline.lifecycle.checkpoint_file import read, write


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def through(tmp_path: Path, value: object) -> object:
    """Written and read back."""
    path = tmp_path / "it.pt"
    write(path, {"value": value})
    return read(path)["value"]


PLAIN = {
    "none": None,
    "truth": [True, False],
    "whole": [0, -1, 2**200, -(2**64), 2**5000],
    "float": [0.1, -0.0, 1e-320, math.inf, -math.inf],
    "text": "ü\n\x00 \ud800 \U0001f600",
    "nested": {"a": [1, (2, {"b": None})], "": []},
    "keys": {1: "one", None: 2, (1, "x"): 3, 2.5: 4, False: 5},
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "tuple": (1, (), ((2,),)),
    "sets": [{1, 2}, frozenset({"a"})],
    "deque": deque([1, 2, 3], maxlen=3),
    "counter": Counter("aab"),
    "ordered": OrderedDict(b=1, a=2),
    "default": defaultdict(list, {"a": [1]}),
    "dtype": [torch.bfloat16, torch.float8_e4m3fn],
    "device": torch.device("cuda:1"),
    "size": torch.Size([2, 3]),
    "complex": 1 + 2j,
    "range": range(1, 9, 2),
    "point": {hl.HookPoint.SNAPSHOT: hl.HookPoint.PRE_STEP},
    "path": Path("a/b"),
    "many floats": [0.1 * number for number in range(1000)],
    "many whole": list(range(-50, 50)),
    "many large": [2**70] * 40,
    "many truths": [True] * 40,
    "mixed": [1, 2.0] * 40,
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_value_comes_back_as_it_was(name, tmp_path):
    """Equal, of the same types, in the same order."""
    back = through(tmp_path, PLAIN[name])
    assert back == PLAIN[name]
    assert repr(back) == repr(PLAIN[name])


def test_nan_comes_back(tmp_path):
    """Alone, among few, among many."""
    back = through(tmp_path, [math.nan, [math.nan] * 3, [math.nan] * 100])
    assert math.isnan(back[0])
    assert all(map(math.isnan, [*back[1], *back[2]]))
    assert len(back[2]) == 100


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(10)[2:5],
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.float64),
        torch.tensor(5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.randn(2, dtype=torch.complex128),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.tensor([math.nan, math.inf]),
        torch.nn.Parameter(torch.randn(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_tensor_comes_back_to_the_last_bit(tensor, tmp_path):
    """Of every type, layout in memory and size."""
    back = through(tmp_path, tensor)
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert torch.equal(torch.nan_to_num(back), torch.nan_to_num(tensor.detach()))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.array(3, dtype=np.uint64),
        np.empty((0, 2)),
        np.array(["ab", "c"]),
        np.array([True]),
        np.arange(5)[::2],
        np.float32(1.5),
        np.int64(-3),
    ],
    ids=repr,
)
def test_an_array_comes_back(array, tmp_path):
    """Also one number of NumPy's."""
    back = through(tmp_path, array)
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_tied_tensors_are_written_once_and_views_by_themselves(tmp_path):
    """What shares memory in a model does not come twice, and shares it again; of a part, only the part is written."""
    weight = torch.randn(100, 100)
    path = tmp_path / "it.pt"
    size = write(path, {"a": weight, "b": weight.view(100, 100), "t": weight.t()})
    back = read(path)
    assert back["a"].data_ptr() == back["b"].data_ptr()
    assert torch.equal(back["t"], weight.t())
    assert size == path.stat().st_size < weight.nbytes + 5000
    assert write(path, {"row": weight[3]}) < 5000
    assert torch.equal(read(path)["row"], weight[3])


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (lambda: None, "function"),
        (object(), "object"),
        (torch.ones(2).as_subclass(type("Wrapped", (torch.Tensor,), {})), "Wrapped"),
        (torch.empty(2, device="meta"), "meta"),
        (np.array([object()]), "object"),
        (defaultdict(lambda: 1), "code"),
        (print, "builtin"),
    ],
    ids=[
        "function",
        "object",
        "tensor of another class",
        "meta",
        "array of objects",
        "default that is code",
        "builtin",
    ],
)
def test_what_cannot_be_saved_is_named_by_its_place(value, what, tmp_path):
    """And no file is left."""
    with pytest.raises(CheckpointError, match=rf"hooks\.mine\.3\.deep.*{what}"):
        write(tmp_path / "it.pt", {"hooks": {"mine": [1, 2, 3, {"deep": value}]}})
    assert names(tmp_path) == []


class Runs:
    """Pickled as a call of a function."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        return self.function, ("touched",)


@pytest.mark.parametrize("function", [os.mkdir, os.system, eval, np.load, torch.load], ids=lambda one: one.__name__)
def test_a_file_that_names_code_is_refused(function, tmp_path, monkeypatch):
    """With a checksum that fits: nothing is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hookline.lifecycle.checkpoint_file.to_savable", lambda tree: tree)
    write(tmp_path / "it.pt", {"value": Runs(function)})
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path / "it.pt")
    assert names(tmp_path) == ["it.pt"]


def test_a_flipped_bit_is_noticed_in_every_byte(tmp_path):
    """Of numbers, names, gaps, tables and the checksum itself."""
    path = tmp_path / "it.pt"
    write(path, {"weight": torch.randn(5, 5), "lr": 0.1, "list": [0.5] * 10})
    whole = path.read_bytes()
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"it\.pt"):
            read(path)
    path.write_bytes(whole)
    assert read(path)["lr"] == 0.1


@pytest.mark.parametrize("length", [0, 4, 8, 100, 0.5, 0.99])
def test_half_a_file_is_noticed(length, tmp_path):
    """A file that was cut off anywhere."""
    path = tmp_path / "it.pt"
    write(path, {"weight": torch.randn(50, 50)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(length * len(whole)) if isinstance(length, float) else length])
    with pytest.raises(CheckpointError):
        read(path)


def test_a_write_that_fails_leaves_the_file_before(tmp_path, monkeypatch):
    """And no half-written one beside it."""
    path = tmp_path / "it.pt"
    write(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(path, {"a": 2})
    assert read(path) == {"a": 1}
    assert names(tmp_path) == ["it.pt"]


def test_a_disk_that_is_full_is_named(tmp_path):
    """The system's error, and not what torch makes of it; the file before is whole."""
    write(tmp_path / "it.pt", {"a": 1})
    code = """if True:
        import resource, signal, sys, torch
        from pathlib import Path
        from hookline.lifecycle.checkpoint_file import write
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        write(Path(sys.argv[1]), {"a": torch.ones(2**20)})"""
    ended = run_warm([sys.executable, "-c", code, str(tmp_path / "it.pt")], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1] == "OSError: [Errno 27] File too large"
    assert read(tmp_path / "it.pt") == {"a": 1}
    assert names(tmp_path) == ["it.pt"]
