"""saved_tensors: what is packed and unpacked, nesting, leaving out of order, removal, threads, what is freed."""

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
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

import hookline as hl
from hookline.sites._torch import innermost_saved_hooks, pop_saved_hooks


@pytest.fixture(autouse=True)
def _stack_is_left_as_it_was() -> Iterator[None]:
    """Every test here leaves torch's stack empty."""
    yield
    left = []
    while (pair := innermost_saved_hooks()) is not None:
        left.append(pair)
        pop_saved_hooks()
    assert left == []


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


def test_what_unpack_gives_is_what_the_backward_uses() -> None:
    """Here, half precision and a number in its place."""
    x = leaf()
    with hl.saved_tensors(lambda tensor: tensor.half(), lambda packed: packed.float() * 10):
        y = x * x
    y.sum().backward()
    assert x.grad.tolist() == [20.0, 40.0, 60.0]


def test_packed_may_be_anything() -> None:
    """A name, say, under which the tensor is kept elsewhere; None too."""
    shelf: dict[Any, Tensor] = {}
    for key in ("tensor", 7, None):
        x = leaf()

        def pack(tensor: Tensor, key: Any = key) -> Any:
            shelf[key] = tensor
            return key

        with hl.saved_tensors(pack, shelf.__getitem__):
            y = x.sin()
        y.sum().backward()
        assert torch.equal(x.grad, x.detach().cos())


def test_packing_is_differentiated_through_twice() -> None:
    """Detached or not, the second derivative is the same."""

    def second_derivative(x: Tensor) -> Tensor:
        y = (x * 2).exp().sin().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]

    x = leaf(0.1, 0.2)
    with hl.saved_tensors(same, same) as handle:
        packed = second_derivative(x)
    assert handle.unpacked > 3
    assert torch.equal(packed, second_derivative(x))


def test_nothing_is_packed_without_gradients() -> None:
    """Under no_grad and in inference mode nothing is kept."""
    logs = Logs()
    with scope(logs), torch.no_grad():
        leaf().sin()
    with scope(logs), torch.inference_mode():
        torch.ones(3).sin()
    assert logs.log == []


def test_a_pack_function_that_changes_its_tensor_is_stopped_by_torch() -> None:
    """In place, that is."""
    with (
        hl.saved_tensors(lambda tensor: tensor.mul_(2), same),
        pytest.raises(RuntimeError, match="in place"),
    ):
        (leaf() * 1).sin()


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


def test_scopes_nest_with_torchs_own() -> None:
    """Either way around."""
    log: list[str] = []
    ours, theirs = Logs("ours", log), Logs("theirs", log)
    with saved_tensors_hooks(theirs.pack, theirs.unpack), scope(ours):
        leaf().sin()
    with scope(ours), saved_tensors_hooks(theirs.pack, theirs.unpack):
        leaf().sin()
    assert log == ["pack ours", "pack theirs"]


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


def test_leaving_scopes_out_of_order_is_an_error_and_takes_nobody_else_off() -> None:
    """The one that is left packs no more, the one inside it stays, and both are gone when that one is left."""
    log: list[str] = []
    around, outer, inner = (scope(Logs(name, log)) for name in ("around", "outer", "inner"))
    with around:
        outer.__enter__()
        inner.__enter__()
        with pytest.raises(RuntimeError, match=r"'outer' is left while it is not the innermost.*reverse order"):
            outer.__exit__(None, None, None)
        leaf().sin()
        inner.__exit__(None, None, None)
        leaf().sin()
    leaf().sin()
    assert log == ["pack inner", "pack around"]
    assert outer.report().attached == 0


def test_leaving_out_of_order_spares_torchs_own_pair() -> None:
    """Which stays on top until torch takes it off; ours below it then hands on to the scope around."""
    log: list[str] = []
    ours, theirs = scope(Logs("ours", log)), Logs("theirs", log)
    around = scope(Logs("around", log))
    with around:
        ours.__enter__()
        with saved_tensors_hooks(theirs.pack, theirs.unpack):
            with pytest.raises(hl.HooklineError, match="reverse order"):
                ours.__exit__(None, None, None)
            leaf().sin()
        y = leaf().sin()
    y.sum().backward()
    assert log == ["pack theirs", "pack around", "unpack around"]


def test_a_scope_that_torch_took_off_says_so_and_spares_what_is_there() -> None:
    """torch pops whatever is on top when one of its own is left out of order."""
    log: list[str] = []
    ours, logs = scope(Logs("ours", log)), Logs("theirs", log)
    theirs = saved_tensors_hooks(logs.pack, logs.unpack)
    theirs.__enter__()
    ours.__enter__()
    theirs.__exit__()
    with pytest.raises(hl.HooklineError, match="has taken it off"):
        ours.__exit__(None, None, None)
    leaf().sin()
    assert log == ["pack theirs"]
    pop_saved_hooks()


def test_leaving_a_scope_that_is_not_open_is_an_error() -> None:
    """And takes nothing off."""
    handle, other = scope(Logs()), scope(Logs("other"))
    with other:
        with pytest.raises(hl.HooklineError, match="has not entered"):
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
        assert innermost_saved_hooks() is None
        assert handle.report().attached == 0


def test_where_torch_refuses_such_hooks_a_scope_is_not_entered() -> None:
    """torch's message comes out, and the scope can be used later."""
    handle = hl.saved_tensors(same, same)
    with disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        handle.__enter__()
    assert handle.report().attached == 0
    with handle:
        leaf().sin()
    assert handle.packed == 1


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


@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "torch's"])
def test_a_scope_around_a_removed_one_packs_in_its_place(foreign: bool) -> None:
    """As if the inner one were not there."""
    log: list[str] = []
    outer = Logs("outer", log)
    around = saved_tensors_hooks(outer.pack, outer.unpack) if foreign else scope(outer)
    x = leaf()
    with around, scope(Logs("inner", log)) as inner:
        y = x.sin()
        inner.remove()
        z = y.cos()
    z.sum().backward()
    assert log == ["pack inner", "pack outer", "unpack outer", "unpack inner"]


def test_pack_may_remove_its_own_scope() -> None:
    """It packs that one tensor."""
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        handle.remove()
        return tensor

    with hl.saved_tensors(pack, same) as handle:
        y = leaf().sin().cos()
    y.sum().backward()
    assert len(packed) == handle.unpacked == 1


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


def test_a_scope_is_left_in_the_thread_that_entered_it() -> None:
    """Another one is told, and disturbs nothing."""
    with scope(Logs("mine")) as handle:
        error = run_in_thread(lambda: handle.__exit__(None, None, None))
        assert isinstance(error, hl.HooklineError)
        assert "thread" in str(error)
        leaf().sin()
    assert handle.packed == 1


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
