"""The graph of a loss: which parameters it reaches, where it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.debug import graph


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.side, self.idle, self.head = (nn.Linear(2, 2) for _ in range(4))
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x))
        out: Tensor = self.head(x + self.side(x).detach())
        return out


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.inner(x)
        return out


def test_parameters_are_named_and_those_without_a_path_are_listed() -> None:
    """From the loss alone."""
    model = Net()
    found = graph(model(torch.ones(1, 2)).sum(), model)
    assert found.reached == ["body.weight", "body.bias", "head.weight"]
    assert found.unused == ["side.weight", "side.bias", "idle.weight", "idle.bias"]
    assert found.frozen == ["head.bias"]
    assert [line.split() for line in str(found).splitlines()][5] == ["side.weight", "not", "reached"]


def test_a_function_finds_where_the_graph_is_cut() -> None:
    """``detach()`` in the model's own forward; the hooks are off afterwards."""
    model = Net()
    found = graph(lambda: model(torch.ones(1, 2)).sum(), model)
    assert found.detached == {"": "it calls Tensor.detach on a tensor that needs a gradient"}
    hl.assert_no_hooks(model, foreign=True)


def test_no_grad_inside_of_a_module_is_found_even_if_nothing_is_left_of_the_graph() -> None:
    """The error says which modules cut it."""
    model = nn.Sequential(nn.Linear(2, 2), Frozen())
    with pytest.raises(ValueError, match=r"cut: 1\.inner its outputs need no gradient.*no_grad"):
        graph(lambda: model(torch.ones(1, 2)).sum(), model)
    hl.assert_no_hooks(model, foreign=True)
    bridged = nn.Sequential(nn.Linear(2, 2), Frozen(), nn.Linear(2, 2))
    found = graph(lambda: bridged(torch.ones(1, 2)).sum(), bridged)
    assert set(found.detached) == {"1", "1.inner"}
    assert found.unused == ["0.weight", "0.bias", "1.inner.weight", "1.inner.bias"]


def test_a_function_that_is_called_leaves_the_run_as_it_was() -> None:
    """Dropout draws and BatchNorm counts in it; streams and buffers are put back, and move if it is called plainly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(8, 4)

    def state() -> list[Tensor]:
        return [torch.get_rng_state(), *(each.detach().clone() for each in (*model.parameters(), *model.buffers()))]

    before = state()
    graph(lambda: model(x).sum(), model)
    assert all(map(torch.equal, before, state()))
    model(x)  # the negative control
    assert not all(map(torch.equal, before, state()))
