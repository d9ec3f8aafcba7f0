"""attach_tensor: gradients of one tensor and of several, leaves that accumulate, what is refused, what is freed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0, 3.0), dtype=torch.float32, requires_grad=True)


def ignore(grad: Any) -> None:
    """A hook that does nothing."""


# -- one tensor --------------------------------------------------------------------------------------------------


def test_an_edit_in_place_leaves_the_hook_with_the_value_before() -> None:
    """One that is attached after the edit sees the gradient of the value after it."""
    x = leaf()
    y = x * 1
    before, after = [], []
    hl.attach_tensor(y, before.append)
    y.mul_(3)
    hl.attach_tensor(y, after.append)
    y.sum().backward()
    assert before[0].tolist() == [3.0] * 3
    assert after[0].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (1.0, "a float, not a tensor"),
        ((torch.ones(3),), "a tuple, not a tensor"),
        (torch.ones(2), r"\(2,\), torch.float32, on cpu, the gradient is \(3,\), torch.float32, on cpu"),
        (torch.ones(3, dtype=torch.float64), "torch.float64"),
        (torch.ones(3, device="meta"), "on meta"),
        (torch.ones(3).to_sparse(), "sparse"),
    ],
    ids=["float", "tuple", "shape", "dtype", "device", "layout"],
)
def test_a_return_value_that_does_not_fit_is_an_error_that_names_the_hook(result: Any, found: str) -> None:
    """And says what was returned and what would fit; an observer may return anything."""
    x = leaf()
    with (
        hl.attach_tensor(x, lambda grad: result, name="mine"),
        pytest.raises(
            hl.errors.HookReturnError, match=f"grad hook 'mine' on 'mine': the return value is {found}|{found}"
        ),
    ):
        x.sum().backward()
    with hl.attach_tensor(x, lambda grad: result, observe=True):
        x.sum().backward()


# -- what is refused ---------------------------------------------------------------------------------------------


def test_a_tensor_that_needs_no_gradient_is_refused_with_the_remedy() -> None:
    """For both kinds."""
    for kind in ("grad", "param_grad"):
        with pytest.raises(hl.errors.UnhookableError, match=r"tensor \(2, 3\) needs no gradient.*requires_grad_\(\)"):
            hl.attach_tensor(torch.ones(2, 3), ignore, on=kind)
    with torch.no_grad():
        y = leaf() * 2
    with pytest.raises(RuntimeError, match="gradients enabled"):
        hl.attach_tensor(y, ignore)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "got a NoneType"),
        ("weight", "got a str"),
        ({"a": torch.ones(1)}, "got a dict"),
        (nn.Linear(1, 1), r"got a Linear; .*attach\(module, hook, on='param_grad'\)"),
        (nn.Sequential(nn.Linear(1, 1)), "got a Sequential"),
        ([torch.ones(1, requires_grad=True), 3, None], "the one at 1 is an int"),
    ],
    ids=["None", "str", "dict", "module", "iterable module", "in a list"],
)
def test_what_is_no_tensor_is_refused(given: Any, found: str) -> None:
    """The message says what came instead."""
    with pytest.raises(hl.errors.UnhookableError, match=found):
        hl.attach_tensor(given, ignore)


# -- leaves that accumulate --------------------------------------------------------------------------------------


def test_only_leaves_take_a_param_grad_hook() -> None:
    """The message says why, and what to use instead."""
    y = leaf() * 2
    with pytest.raises(hl.errors.UnhookableError, match=r"Only leaves accumulate.*MulBackward0.*on='grad'"):
        hl.attach_tensor(y, ignore, on="param_grad")


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
    with pytest.raises(hl.errors.UnhookableError, match="that at 1 needs no gradient"):
        hl.attach_tensor([model.bias, model.weight], seen.append, on="param_grad")
    assert not model.bias._post_accumulate_grad_hooks


# -- several tensors ---------------------------------------------------------------------------------------------


def test_tensors_without_gradient_are_an_error_for_all_and_left_out_for_any() -> None:
    """Unless there are no others."""
    x, bare = leaf(), torch.ones(3)
    with pytest.raises(hl.errors.UnhookableError, match="Of 4 tensors, that at 1 needs no gradient"):
        hl.attach_tensor([x, bare, x, bare], ignore)
    assert not x._backward_hooks
    seen = []
    hl.attach_tensor([bare, x], seen.append, mode="any")
    x.sum().backward()
    assert len(seen) == 1
    with pytest.raises(hl.errors.UnhookableError, match="that at 0 needs"):
        hl.attach_tensor([bare, bare], ignore, mode="any")


def test_a_hook_on_several_tensors_that_is_removed_in_mid_pass_stays_silent() -> None:
    """Even if some of the gradients were there already."""
    x = leaf()
    y = x * 2
    seen = []
    handle = hl.attach_tensor([x, y], seen.append)
    hl.attach_tensor(y, lambda grad: handle.remove())
    y.sum().backward()
    assert seen == []


# -- freed -------------------------------------------------------------------------------------------------------


class Token:
    """Something a hook holds."""


@pytest.fixture
def no_collector():
    """Nothing but reference counts frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def hook_holding(token: Token) -> Any:
    def hook(value: Any) -> None:
        token

    return hook


WAYS = {
    "computed": lambda x, y, z, hook: hl.attach_tensor(y, hook),
    "leaf": lambda x, y, z, hook: hl.attach_tensor(x, hook),
    "any": lambda x, y, z, hook: hl.attach_tensor([y, z], hook, mode="any"),
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
