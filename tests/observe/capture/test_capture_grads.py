"""Captured gradients: those autograd computes, in the structure of the output, each with its own call."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import hookline as hl
from hookline.errors import CaptureError


class Block(nn.Module):
    """Gives back a dict with a list in it; one of the tensors is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"main": y.tanh(), "more": [y * 2, None], "unused": y.exp(), "note": "text"}


class Uses(nn.Module):
    """A model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        out = self.seen = self.block(x)
        for tensor in (out["main"], out["more"][0]):
            tensor.retain_grad()
        return (out["main"] * 3 + out["more"][0].square()).sum()


class Reused(nn.Module):
    """One layer twice, with and without gradients, or inside of checkpoints."""

    def __init__(self, how: str = "twice") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "first without":
            with torch.no_grad():
                x = self.layer(x)
            return self.layer(x) * 2
        if self.how == "twice":
            return self.layer(self.layer(x) * 5) * 2
        reentrant = self.how.startswith("reentrant")
        x = checkpoint(self.layer, x, use_reentrant=reentrant)
        return (checkpoint(self.layer, x * 5, use_reentrant=reentrant) if self.how.endswith("twice") else x) * 2


def x() -> Tensor:
    return torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()


def grads_by_hand(model: nn.Module, layer: nn.Module) -> list[Tensor]:
    """The gradients of a layer's outputs by ``retain_grad``, call by call."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad and not torch._C._current_graph_task_id() + 1:
            output.retain_grad()
            outputs.append(output)

    with layer.register_forward_hook(keep):
        model(x()).sum().backward()
    return [output.grad for output in outputs if output.grad is not None]


def test_gradients_have_the_structure_of_the_output():
    """None stands where none came, and for what is no tensor."""
    model = Uses()
    with hl.capture(model, "block", grads=True) as cache:
        model(x()).backward()
    grad = cache["block"].grad
    assert list(grad) == ["main", "more", "unused", "note"]
    assert torch.equal(grad["main"], model.seen["main"].grad)
    assert torch.equal(grad["more"][0], model.seen["more"][0].grad)
    assert (grad["more"][1], grad["unused"], grad["note"]) == (None, None, None)


@pytest.mark.parametrize("how", ["twice", "first without"])
def test_each_call_has_its_own_gradient(how):
    """Also where only some of them are part of a graph."""
    model = Reused(how)
    expected = grads_by_hand(model, model.layer)
    with hl.capture(model, "layer", grads=True) as cache:
        for _ in range(2):
            model(x()).sum().backward()
    calls = cache["layer"].calls
    assert [call.step for call in calls] == [0, 0, 1, 1]
    for first in (0, 2):
        got = [call.grad for call in calls[first : first + 2] if call.grad is not None]
        assert len(got) == len(expected)
        assert all(map(torch.equal, got, expected))
    assert (calls[0].grad is None) is (how == "first without")


def test_several_backward_passes_are_told_apart():
    """``.grad`` asks which is meant; ``.grads`` has them all."""
    model = nn.Sequential(nn.Linear(3, 3))
    with hl.capture(model, "0", grads=True) as cache:
        loss = model(x()).sum()
        loss.backward(retain_graph=True)
        (loss * 2).backward()
    with pytest.raises(CaptureError, match=r"2 backward passes came through '0'.*\.calls\[i\]\.grads\[j\]"):
        cache["0"].grad
    assert [grad[0, 0].item() for grad in cache["0"].calls[0].grads] == [1.0, 2.0]


@pytest.mark.parametrize("how", ["kept", "kept twice"])
def test_checkpointed_calls_are_captured_once_with_their_gradients(how):
    """The repetition is not stored; outputs, inputs and gradients equal those of a run without checkpoints."""
    model = Reused(how)
    plain = Reused("twice" if how.endswith("twice") else "plain")
    if not how.endswith("twice"):
        plain.forward = lambda x: plain.layer(x) * 2
    expected = grads_by_hand(plain, plain.layer)
    with (
        hl.capture(model, "layer", grads=True, inputs=True) as cache,
        hl.capture(model, "layer") as outputs,
        set_checkpoint_early_stop(False),  # or the repetition ends before the hooks behind the layer
    ):
        for _ in range(2):
            model(x()).sum().backward()
    calls = cache["layer"].calls
    assert [call.step for call in calls] == ([0, 0, 1, 1] if how.endswith("twice") else [0, 1])
    assert [call.step for call in outputs["layer"].calls] == [call.step for call in calls]
    for index, call in enumerate(calls):
        assert torch.equal(call.grad, expected[index % len(expected)])
        assert torch.equal(call.output, model.layer(call.inputs[0]))


@pytest.mark.parametrize("how", ["reentrant", "reentrant twice"])
def test_gradients_of_reentrant_checkpoints_are_an_error(how):
    """They come to a repetition of the call, and nobody says of which; the call itself is captured once."""
    model = Reused(how)
    with hl.capture(model, "layer", grads=True) as cache:
        model(x()).sum().backward()
    assert len(cache["layer"].calls) == (2 if how.endswith("twice") else 1)
    with pytest.raises(CaptureError, match="use_reentrant=False"):
        cache["layer"].calls[0].grad


def test_clear_lets_the_memory_go_and_drops_late_gradients():
    """Also of calls that still wait for a gradient, and of calls that no gradient can come to."""
    model = nn.Sequential(nn.Linear(3, 3))
    with hl.capture(model, "0", grads=True, inputs=True, clone=True, detach=True) as cache:
        loss = model(x()).sum()
        with torch.no_grad():
            model(x())
        kept = [weakref.ref(call.output) for call in cache["0"].calls]
        cache.clear()
        gc.collect()
        assert [ref() for ref in kept] == [None, None]
        loss.backward()  # of a call that is forgotten
        assert len(cache) == 0
        model(x()).sum().backward()
    assert cache["0"].grad is not None


def _captured_once(*, backward: bool) -> tuple[list[weakref.ref[Any]], hl.observe.Cache]:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with hl.capture(model, "*", grads=True, inputs=True) as cache:
        loss = model(x()).sum()
        if backward:
            loss.backward()
        with torch.no_grad():
            model(x())
    return [weakref.ref(one) for one in (model, model[0], cache["0"].calls[0].output)], cache


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
def test_what_was_captured_with_gradients_ends_with_its_cache(backward):
    """Model and outputs die with the default options, and repeated captures leave no tensor behind."""
    counts = []
    for _ in range(3):
        refs, cache = _captured_once(backward=backward)
        gc.collect()
        assert refs[2]() is cache["0"].calls[0].output
        del cache
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3
        counts.append(sum(type(one) is Tensor for one in gc.get_objects()))
    assert counts[1] == counts[2]
