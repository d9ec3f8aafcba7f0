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


def test_pack_is_called_per_saved_tensor_and_unpack_per_use() -> None:
    """Inside the block alone; the counts are in the report."""
    x = leaf()
    logs = Logs()
    with scope(logs) as handle:
        y = (x * 2).sin() * x  # sin keeps one, the second product two
        assert handle.report().attached == 1
    z = y.exp()
    assert logs.log == ["pack"] * 3
    z.sum().backward(retain_graph=True)
    assert logs.log == ["pack"] * 3 + ["unpack"] * 3
    z.sum().backward()
    assert (handle.packed, handle.unpacked) == (3, 6)
    report = handle.report()
    assert (report.kind, report.matched, report.attached, report.fired) == ("saved_tensors", 1, 0, 3)
    assert report.name == "Logs.pack"


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


def test_functions_that_ask_are_told_their_site() -> None:
    """Which tensor it is, counted from 0."""
    packed, unpacked = [], []

    def pack(tensor: Tensor, *, site: hl.Site) -> Tensor:
        packed.append((site.name, site.kind, site.call))
        return tensor

    def unpack(tensor: Tensor, *, site: hl.Site) -> Tensor:
        unpacked.append((site.name, site.kind, site.call))
        return tensor

    with hl.saved_tensors(pack, unpack):
        y = leaf().sin().cos()
    y.sum().backward()
    assert packed == unpacked == [("saved tensors", hl.Kind.SAVED_TENSORS, call) for call in (0, 1)]


@pytest.mark.parametrize(
    ("pack", "unpack", "found"),
    [
        (lambda: None, same, r"hook\(tensor\)"),
        (same, lambda a, b: None, r"hook\(packed\)"),
        (same, None, "callable"),
        ("pack", same, "callable"),
    ],
    ids=["pack", "unpack", "no unpack", "no pack"],
)
def test_functions_that_do_not_fit_are_refused_at_once(pack: Any, unpack: Any, found: str) -> None:
    """Before anything is packed."""
    with pytest.raises(hl.errors.HookSignatureError, match=found):
        hl.saved_tensors(pack, unpack)


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


def test_an_error_in_the_block_or_in_pack_leaves_the_stack_clean() -> None:
    """It comes out as it is."""

    def fail(tensor: Tensor) -> None:
        raise ValueError("mine")

    def broken(x: Tensor) -> Tensor:
        raise ValueError("mine")

    for pack, operation in ((same, broken), (fail, torch.sin)):
        handle = hl.saved_tensors(pack, same)
        with pytest.raises(ValueError, match="mine"), handle:
            operation(leaf())
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert handle.report().attached == 0


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


def test_a_scope_is_open_in_the_thread_that_entered_it() -> None:
    """Others pack nothing, and may enter it themselves."""
    logs = Logs()
    with scope(logs) as handle:
        run_in_thread(lambda: leaf().sin())
        assert handle.packed == 0

        def inside() -> int:
            with handle:
                leaf().sin()
            return handle.packed

        assert run_in_thread(inside) == 1
        leaf().sin()
    assert handle.packed == 2


def test_a_backward_in_another_thread_unpacks() -> None:
    """Long after the block, and after the handle is gone."""
    x = leaf()
    logs = Logs()
    with scope(logs):
        y = x.sin()
    run_in_thread(lambda: y.sum().backward())
    assert logs.log == ["pack", "unpack"]


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
