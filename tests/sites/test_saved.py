"""saved_tensors: what is packed and unpacked, nesting, removal, threads, what is freed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers_waiting import PATIENCE
from torch import Tensor, nn

import hookline as hl


@pytest.fixture(autouse=True)
def _stack_is_left_as_it_was() -> Iterator[None]:
    """Every test here leaves torch's stack empty."""
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0, 3.0), dtype=torch.float32, requires_grad=True)


def same(value: Any) -> Any:
    return value


class Logs:
    """A pair of functions that note what they are given."""

    def __init__(self, name: str = "", log: list[str] | None = None) -> None:
        self.name = name
        self.log = [] if log is None else log
        self.seen: list[Tensor] = []

    def pack(self, tensor: Tensor) -> tuple[str, Tensor]:
        self.log.append(f"pack {self.name}".strip())
        self.seen.append(tensor)
        return self.name, tensor

    def unpack(self, packed: tuple[str, Tensor]) -> Tensor:
        assert packed[0] == self.name
        self.log.append(f"unpack {self.name}".strip())
        return packed[1]


def scope(logs: Logs) -> hl.sites.SavedTensors:
    return hl.saved_tensors(logs.pack, logs.unpack, name=logs.name or None)


# -- packing and unpacking ---------------------------------------------------------------------------------------


def test_a_saved_output_comes_without_history_and_with_the_same_memory() -> None:
    """torch hands over the output itself; computed inputs come detached as well, leaves as they are."""
    x = leaf()
    logs = Logs()
    with scope(logs):
        y = x.exp()
        z = y.sin()
        x.sin()
    output, computed, given = logs.seen
    assert output.grad_fn is None
    assert not output.requires_grad
    assert output.data_ptr() == y.data_ptr()
    assert computed.grad_fn is None
    assert computed.data_ptr() == y.data_ptr()
    assert given is x
    z.sum().backward()
    assert torch.allclose(x.grad, y.detach().cos() * y.detach())


def test_the_recipe_of_the_docstring_takes_tensors_of_every_sort() -> None:
    """An embedding keeps its indices, dropout its mask; numbers lose bits, and nothing else happens."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()

    def pack(tensor: Tensor) -> Any:
        return tensor.dtype, tensor.half() if tensor.is_floating_point() else tensor

    assert "tensor.dtype, tensor.half() if tensor.is_floating_point() else tensor" in str(hl.saved_tensors.__doc__)
    with hl.saved_tensors(pack, lambda packed: packed[1].to(packed[0])) as scope:
        loss = model(torch.tensor([[1, 4]])).square().mean()
    loss.backward()
    assert scope.packed == scope.unpacked > 3
    assert all(p.grad is not None and p.grad.dtype is torch.float64 for p in model.parameters())


@pytest.mark.parametrize("result", [None, 3, "tensor", [torch.ones(3)]], ids=repr)
def test_an_unpack_function_has_to_return_a_tensor(result: Any) -> None:
    """The error names it and its scope."""

    def bad(packed: Any) -> Any:
        return result

    with hl.saved_tensors(same, bad, name="mine"):
        y = leaf().sin()
    with pytest.raises(
        hl.errors.HookReturnError, match=rf"bad' of saved_tensors 'mine'.*got an? {type(result).__name__}"
    ):
        y.sum().backward()


# -- nesting -----------------------------------------------------------------------------------------------------


def test_nested_scopes_use_the_innermost() -> None:
    """And each tensor is unpacked by the scope that packed it."""
    log: list[str] = []
    x = leaf()
    with scope(Logs("outer", log)):
        a = x.sin()
        with scope(Logs("inner", log)):
            b = a.cos()
        c = b.sin()
    c.sum().backward()
    assert log == ["pack outer", "pack inner", "pack outer", "unpack outer", "unpack inner", "unpack outer"]


def test_a_scope_can_be_entered_again_and_inside_itself() -> None:
    """It packs while it is open, and counts on."""
    logs = Logs()
    handle = scope(logs)
    leaf().sin()
    for _ in range(2):
        with handle:
            leaf().sin()
            with handle:
                leaf().sin()
            leaf().sin()
            assert handle.report().attached == 1
        leaf().sin()
        assert handle.report().attached == 0
    assert handle.packed == 6


def test_a_scope_decorates_a_function_until_it_is_removed() -> None:
    """Name, arguments, result and recursion included."""
    handle = hl.saved_tensors(same, same)

    @handle
    def apply(x: Tensor, *, times: int) -> Tensor:
        return x if times == 0 else apply(x.sin(), times=times - 1)

    assert apply.__name__ == "apply"
    apply(leaf(), times=3)
    assert handle.packed == 3
    handle.remove()
    assert torch.equal(apply(leaf(), times=1), leaf().sin())
    assert handle.packed == 3


# -- leaving -----------------------------------------------------------------------------------------------------


def test_leaving_a_scope_that_is_not_open_is_an_error() -> None:
    """And takes nothing off."""
    handle, other = scope(Logs()), scope(Logs("other"))
    with other:
        with pytest.raises(hl.HooklineError, match="was not entered"):
            handle.__exit__(None, None, None)
        leaf().sin()
    assert other.packed == 1


# -- removal -----------------------------------------------------------------------------------------------------


def test_removing_inside_the_block_stops_packing_at_once() -> None:
    """What was packed is still unpacked, what comes after is kept as it is."""
    x = leaf()
    logs = Logs()
    with scope(logs) as handle:
        y = x.sin()
        handle.remove()
        handle.remove()
        z = y.exp()
        assert handle.report().attached == 0
    z.sum().backward()
    assert logs.log == ["pack", "unpack"]
    assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())
    assert handle.removed


def test_a_removed_scope_is_not_entered_again() -> None:
    """The message says what to do."""
    handle = scope(Logs("mine"))
    handle.remove()
    with pytest.raises(hl.errors.ScopeError, match="'mine' was removed; make a new one"):
        handle.__enter__()


# -- threads -----------------------------------------------------------------------------------------------------


def run_in_thread(function: Any) -> Any:
    """What the function gives, or its error, in another thread."""
    result: list[Any] = []

    def target() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    return result[0]


def test_removal_reaches_all_threads() -> None:
    """At once."""
    handle = scope(Logs())
    entered, removed = threading.Event(), threading.Event()

    def inside() -> int:
        with handle:
            entered.set()
            removed.wait(PATIENCE)
            leaf().sin()
        return handle.packed

    def outside() -> None:
        entered.wait(PATIENCE)
        handle.remove()
        removed.set()

    other = threading.Thread(target=outside)
    other.start()
    assert run_in_thread(inside) == 0
    other.join()


# -- freed -------------------------------------------------------------------------------------------------------


class Token:
    """Something a function holds."""


@pytest.mark.parametrize("backward", [False, True], ids=["dropped", "run"])
@pytest.mark.parametrize("removed", [False, True], ids=["on", "removed"])
@pytest.mark.parametrize("operation", [torch.sin, torch.exp], ids=["input", "output"])
def test_graph_and_functions_go_without_the_collector(backward: bool, removed: bool, operation: Any) -> None:
    """Also for a saved output that is packed as it is, where torch alone leaks for good."""
    gc.collect()
    gc.disable()
    try:
        x, token = leaf(), Token()

        def keep(value: Any, token: Token = token) -> Any:
            return value

        with hl.saved_tensors(keep, keep) as handle:
            if removed:
                handle.remove()
            y = operation(x)
        if backward:
            y.sum().backward()
        references = [weakref.ref(one) for one in (x, y, token)]
        del x, y, token, handle, keep
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
