"""``hl.capture``: names to what modules returned, of any structure, call by call, with errors that say what to do."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from helpers_capture import X, stack
from helpers_modules import Returns
from torch import Tensor, nn

import hookline as hl
from hookline.errors import CaptureError

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Record:
    hidden: Tensor
    note: str = "kept"


class Reused(nn.Module):
    """Calls one layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x


# -- what is kept --------------------------------------------------------------------------------------------


def test_outputs_are_kept_by_name_as_the_very_tensors():
    """What is in the cache is the object that a hand-written hook sees; the model itself has an empty name."""
    model, seen = stack(), {}
    for name, child in model.named_children():
        child.register_forward_hook(lambda module, args, output, name=name: seen.__setitem__(name, output))
    with hl.capture(model, "?") as cache, hl.capture(model, "*") as everything:
        output = model(X)
    assert list(cache) == list(cache.names) == ["a", "b", "c"]
    assert len(cache) == 3
    assert all(cache[name].output is seen[name] for name in seen)
    assert everything[""].output is output
    assert everything.names == ("a", "b", "c", "")  # in the order in which the calls ended


STRUCTURES: dict[str, Any] = {
    "tuple": lambda x: (x, x * 2, None),
    "list": lambda x: [x, [x * 2]],
    "dict": lambda x: {"a": x, "b": (x * 2, 3)},
    "named tuple": lambda x: Pair(x, x * 2),
    "torch's own": lambda x: x.max(dim=1),
    "dataclass": lambda x: Record(x * 3),
    "nothing": lambda x: None,
    "number": lambda x: 7,
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize("clone", [False, True])
def test_any_structure_comes_back_as_it_was(make, clone):
    """Types, keys and values of containers are those of the module; numbers and None are kept too."""
    model = nn.Sequential(Returns(make))
    with hl.capture(model, "0", clone=clone, inputs=True) as cache:
        given = model(X)
    kept = cache["0"].output
    assert type(kept) is type(given)
    assert flat(kept) == flat(given)
    assert (cache["0"].inputs[0] is X) is not clone


def flat(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [flat(item) for item in value]
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return {"hidden": flat(value.hidden), "note": value.note} if isinstance(value, Record) else value


def test_inputs_and_keyword_arguments_are_kept_on_request():
    model = nn.Sequential(Returns(lambda x: x + 1))
    with (
        hl.attach(model, "0", lambda module, args: (args[0] * 2,), on="forward_pre"),
        hl.capture(model, "0", inputs=True) as cache,
    ):
        model[0](X, scale=3)
    assert torch.equal(cache["0"].inputs[0], X * 2)
    assert cache["0"].kwargs == {"scale": 3}
    assert torch.equal(cache["0"].output, X * 2 + 1)


def test_a_module_called_several_times_has_several_calls():
    """``.output`` asks which is meant; ``.calls`` has step and number of each."""
    model = Reused()
    with hl.capture(model, "layer") as cache:
        model(X)
        last = model(X)
    calls = cache["layer"].calls
    assert [(call.step, call.call) for call in calls] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert calls[-1].output is last
    message = r"'layer' was called 6 times in 2 forwards of the model.*use \.calls\[i\]\.output with i from 0 to 5"
    with pytest.raises(CaptureError, match=message):
        cache["layer"].output


def test_shared_modules_and_wrapped_names_resolve():
    """A module is captured once; its other names, and raw names of wrappers, find it."""
    shared = nn.Sequential(OrderedDict(a=nn.Linear(3, 3)))
    shared.again = shared.a
    wrapped = nn.DataParallel(shared)
    with hl.capture(wrapped, "a") as cache:
        wrapped(X)
    assert cache["again"].calls[1].output is cache["a"].calls[1].output
    assert cache["module.a"].name == "a"


# -- never called --------------------------------------------------------------------------------------------


def test_a_module_that_was_not_called_says_why():
    """Before the first forward, after a forward without it, and for a container."""
    model = stack()
    model.spare = nn.Linear(1, 1)
    model.forward = lambda x: model.c(model.b(model.a(x)))
    cache = hl.capture(model, ["a", "spare"])
    with pytest.raises(CaptureError, match="Nothing was captured of 'a': the model has not run since"):
        cache["a"].output
    model(X)
    assert cache["a"].calls
    assert "spare" not in cache
    assert cache["spare"].calls == ()
    with pytest.raises(CaptureError, match="Nothing was captured of 'spare': nothing called it"):
        cache["spare"].output
    with pytest.warns(hl.errors.HookNeverFired, match="'spare'") as said:
        cache.remove()
    assert len(said) == 1


def test_a_call_that_raises_is_not_captured_and_does_not_mix_up_the_next():
    """Inputs belong to the output of their own call."""
    model = nn.Sequential(nn.Linear(3, 3))
    with hl.capture(model, "0", inputs=True, grads=True) as cache:
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5))
        model(X).sum().backward()
    assert cache["0"].inputs[0] is X
    assert torch.equal(cache["0"].grad, torch.ones(2, 3))


# -- stop ----------------------------------------------------------------------------------------------------


class Swallows(nn.Module):
    """A model that catches every exception of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.went_on = False

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.first(x)
        except Exception:
            self.went_on = True
        self.went_on = True
        return self.second(x)


@pytest.mark.parametrize("options", [{}, {"inputs": True}, {"clone": True}], ids=["plain", "inputs", "clone"])
def test_stop_ends_the_forward_after_the_last_target(options):
    """Modules behind it are not called, the rest of the block is skipped, nothing is raised."""
    model, ran = Swallows(), []
    model.second.register_forward_hook(lambda *args: ran.append("second"))
    with hl.capture(model, "first", stop=True, **options) as cache:
        model(X)
        ran.append("after")
    assert ran == []
    assert not model.went_on
    assert cache["first"].output.shape == (2, 3)
    hl.assert_no_hooks(model)


# -- bad input -----------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "index": ({"index": "last"}, r"index='last' holds 'last': give numbers, slices.*function from tensor"),
    "index of fractions": ({"index": torch.tensor([0.5])}, "holds <float32 of shape .*give numbers"),
    "index with a bool": ({"index": (True, 1)}, r"index=\(True, 1\) holds True"),
    "device": ({"device": "gpu"}, "device= is a device such as 'cpu'.*got 'gpu'"),
    "device that is not there": ({"device": "cuda:99"}, "torch sees . CUDA devices"),
    "scope": ({"scope": "thread"}, "scope= is 'context' or 'process', got 'thread'"),
    "stop with grads": ({"stop": True, "grads": True}, "stop=True ends the forward before there is a loss"),
}


@pytest.mark.parametrize("case", BAD)
def test_options_that_make_no_sense_are_errors_before_anything_is_attached(case):
    options, message = BAD[case]
    model = stack()
    with pytest.raises(hl.errors.OptionError, match=message):
        hl.capture(model, "a", **options)
    hl.assert_no_hooks(model)


def test_a_function_that_makes_no_tensor_of_one_is_an_error_in_the_call():
    model = stack()
    with (
        hl.capture(model, "a", index=lambda x: x.mean().item()),
        pytest.raises(hl.errors.CaptureError, match="made a float of the output of 'a'"),
    ):
        model(X)
