"""attach_tensor, attach_node and saved_tensors: what a hook may return, what is refused, nesting, what is freed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers_sites import ignore
from helpers_threads import in_threads
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import hookline as hl

KINDS = ("pre", "post")


@pytest.fixture(autouse=True)
def _stack_is_left_as_it_was() -> Iterator[None]:
    """Every test here leaves torch's stack of scopes empty."""
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def leaf() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


# -- what a hook may return --------------------------------------------------------------------------------------

MISFITS = {
    "float": (1.0, "a float"),
    "shape": (torch.ones(2), r"\(2,\), torch.float32, on cpu, the gradient is \(3,\)"),
    "dtype": (torch.ones(3, dtype=torch.float64), "torch.float64"),
    "device": (torch.ones(3, device="meta"), "on meta"),
    "layout": (torch.ones(3).to_sparse(), "sparse"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_return_value_that_does_not_fit_is_an_error_that_names_the_hook(misfit: str) -> None:
    """And says what was returned and what would fit; an observer may return anything."""
    result, found = MISFITS[misfit]
    x = leaf()
    y = x.neg()
    for put in (
        lambda **options: hl.attach_tensor(x, lambda grad: result, name="mine", **options),
        lambda **options: hl.attach_node(y, lambda grads: result, name="mine", **options),
        lambda **options: hl.attach_node(y, lambda grads, _: (result,), on="post", name="mine", **options),
    ):
        with put(), pytest.raises(hl.errors.HookReturnError, match=f"hook 'mine' on 'mine': .*{found}"):
            y.sum().backward(retain_graph=True)
        with put(observe=True):
            y.sum().backward(retain_graph=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("result", [(), [torch.ones(3)] * 2, "ab"], ids=["empty", "too many", "str"])
def test_a_node_hook_returns_as_many_gradients_as_it_was_shown(kind: str, result: Any) -> None:
    """A bare tensor will do for one."""
    y = leaf().neg()
    hl.attach_node(y, lambda *grads: result, on=kind)
    with pytest.raises(hl.errors.HookReturnError, match=rf"node_{kind} hook .* on 'NegBackward0': .*tuple of 1, got"):
        y.sum().backward()


# -- where it sits -----------------------------------------------------------------------------------------------


def test_a_node_may_be_given_as_an_edge_or_a_tensor() -> None:
    """They all lead to the same place, in the order of attaching."""
    y = leaf() * 2
    log: list[Any] = []
    for index, what in enumerate((y.grad_fn, get_gradient_edge(y), y)):
        hl.attach_node(what, lambda grads, index=index: log.append(index))
    y.sum().backward()
    assert log == [0, 1, 2]


def test_a_param_grad_hook_on_several_leaves_is_called_for_each() -> None:
    """Each once, wherever it is listed; if one of them refuses, none has it."""
    model = nn.Linear(2, 2)
    seen = []
    handle = hl.attach_tensor([*model.parameters(), model.weight], seen.append, on="param_grad")
    assert handle.report().matched == 2
    model(torch.ones(1, 2)).sum().backward()
    assert {id(tensor) for tensor in seen} == {id(tensor) for tensor in model.parameters()}
    assert len(seen) == 2
    handle.remove()
    model.weight.requires_grad_(False)
    with pytest.raises(hl.errors.UnhookableError, match="at 1 needs no gradient"):
        hl.attach_tensor([model.bias, model.weight], seen.append, on="param_grad")
    assert not model.bias._post_accumulate_grad_hooks


def test_of_several_tensors_without_gradient_are_an_error_for_all_and_left_out_for_any() -> None:
    """Unless there are no others; a hook that is removed in mid-pass stays silent."""
    x, bare = leaf(), torch.ones(3)
    with pytest.raises(hl.errors.UnhookableError, match="at 1 needs no gradient"):
        hl.attach_tensor([x, bare, x, bare], ignore)
    assert not x._backward_hooks
    seen = []
    hl.attach_tensor([bare, x], seen.append, mode="any")
    x.sum().backward()
    assert len(seen) == 1
    with pytest.raises(hl.errors.UnhookableError, match="at 0 needs no gradient"):
        hl.attach_tensor([bare, bare], ignore, mode="any")
    x, together = leaf(), []
    y = x * 2
    handle = hl.attach_tensor([x, y], together.append)
    hl.attach_tensor(y, lambda grad: handle.remove())
    y.sum().backward()
    assert together == []


@pytest.mark.parametrize("given", [None, "weight", {"a": leaf()}, nn.Linear(1, 1), [leaf(), 3]], ids=repr)
def test_what_is_no_tensor_or_node_is_refused(given: Any) -> None:
    """With what came, and what to pass; also what needs no gradient, or computes where it should accumulate."""
    with pytest.raises(hl.errors.UnhookableError, match="attach_tensor takes"):
        hl.attach_tensor(given, ignore)
    for no_node in (given, torch.ones(2)):
        with pytest.raises(hl.errors.UnhookableError, match=r"takes a node.*pass the grad_fn of a tensor"):
            hl.attach_node(no_node, ignore)
    for kind in ("grad", "param_grad"):
        with pytest.raises(RuntimeError, match=r"needs no gradient.*requires_grad_\(\)"):
            hl.attach_tensor(torch.ones(2, 3), ignore, on=kind)
    with pytest.raises(hl.errors.UnhookableError, match=r"Only leaves accumulate.*on='grad'"):
        hl.attach_tensor(leaf() * 2, ignore, on="param_grad")


# -- saved tensors -----------------------------------------------------------------------------------------------


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
    return hl.saved_tensors(logs.pack, logs.unpack)


def test_a_saved_output_comes_without_history_and_with_the_same_memory() -> None:
    """torch hands over the output itself; computed inputs come detached as well, leaves as they are."""
    x, logs = leaf(), Logs()
    with scope(logs):
        y = x.exp()
        z = y.sin()
        x.sin()
    output, computed, given = logs.seen
    for tensor in (output, computed):
        assert tensor.grad_fn is None
        assert not tensor.requires_grad
        assert tensor.data_ptr() == y.data_ptr()
    assert given is x
    z.sum().backward()
    assert torch.allclose(x.grad, y.detach().cos() * y.detach())


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


# -- freed -------------------------------------------------------------------------------------------------------


class Token:
    """Something a hook holds."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing but reference counts frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def hook_holding(token: Token) -> Any:
    def hook(*grads: Any) -> None:
        token

    return hook


WAYS = {
    "computed": lambda x, y, z, hook: hl.attach_tensor(y, hook),
    "leaf": lambda x, y, z, hook: hl.attach_tensor(x, hook),
    "any": lambda x, y, z, hook: hl.attach_tensor([y, z], hook, mode="any"),
    "node pre": lambda x, y, z, hook: hl.attach_node(y.grad_fn, hook),
    "node post": lambda x, y, z, hook: hl.attach_node(y.grad_fn, hook, on="post"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backward", [False, True], ids=["dropped", "run"])
@pytest.mark.parametrize("removed", [False, True], ids=["on", "removed"])
@pytest.mark.usefixtures("no_collector")
def test_tensors_and_hook_go_with_the_graph_without_the_collector(way: str, backward: bool, removed: bool) -> None:
    """Whether the graph was run or not, the hook removed or not."""
    x, token = leaf(), Token()
    y = x.sin()
    z = y.exp()
    handle = WAYS[way](x, y, z, hook_holding(token))
    loss = (y * z).sum()
    if backward:
        loss.backward()
    if removed:
        handle.remove()
    references = [weakref.ref(one) for one in (x, y, z, token)]
    del x, y, z, token, handle, loss
    assert [reference() for reference in references] == [None] * 4


@pytest.mark.usefixtures("no_collector")
def test_a_leaf_whose_node_is_hooked_stays_until_the_hook_is_removed_and_no_longer() -> None:
    """With two hooks, until both are."""
    x = leaf()
    reference = weakref.ref(x)
    handles = [hl.attach_node(x, ignore, on=kind) for kind in ("pre", "pre", "post")]
    del x
    for handle in handles:
        assert reference() is not None
        handle.remove()
    assert reference() is None


@pytest.mark.parametrize("backward", [False, True], ids=["dropped", "run"])
@pytest.mark.parametrize("removed", [False, True], ids=["on", "removed"])
@pytest.mark.parametrize("operation", [torch.sin, torch.exp], ids=["input", "output"])
@pytest.mark.usefixtures("no_collector")
def test_graph_and_packing_functions_go_without_the_collector(backward: bool, removed: bool, operation: Any) -> None:
    """Also for a saved output that is packed as it is, where torch alone leaks for good."""
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


def test_removing_inside_the_block_stops_packing_at_once() -> None:
    """What was packed is still unpacked, what comes after is kept as it is; it is not entered again."""
    x, logs = leaf(), Logs("mine")
    with scope(logs) as handle:
        y = x.sin()
        handle.remove()
        handle.remove()
        z = y.exp()
        assert handle.packed == 1
    z.sum().backward()
    assert logs.log == ["pack mine", "unpack mine"]
    assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())
    with pytest.raises(hl.errors.ScopeError, match="were removed; make new ones"):
        handle.__enter__()


def test_no_count_is_lost_where_two_threads_unpack_at_once() -> None:
    """Autograd has threads of its own; a scope shows what it has done."""
    both, adding = threading.Event(), []

    class Slow(int):
        def __add__(self, other: int) -> int:
            adding.append(other)
            both.set() if len(adding) == 2 else both.wait(0.5)
            return int(self) + other

    with hl.saved_tensors(lambda tensor: tensor, lambda packed: packed) as scope:
        graphs = [leaf().sin() for _ in range(2)]
    scope.unpacked = Slow()
    in_threads(lambda number: graphs[number].sum().backward())
    assert repr(scope) == "<SavedTensors: packed 2, unpacked 2>"


def test_saved_tensors_are_used_as_a_block_and_of_functions() -> None:
    """Whatever else is an error of ours."""
    with pytest.raises(hl.errors.HookSignatureError, match="two functions, got an int"):
        hl.saved_tensors(3, lambda packed: packed)  # type: ignore[arg-type]
    with pytest.raises(hl.errors.ScopeError, match="not entered"):
        hl.saved_tensors(lambda tensor: tensor, lambda packed: packed).__exit__(None, None, None)
