"""The graph of a loss: names of modules and parameters, what is not reached, where it is cut."""

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
    """From the loss alone; nodes that read a parameter have the name of its module."""
    model = Net()
    found = graph(model(torch.ones(1, 2)).sum(), model)
    assert found.reached == ["body.bias", "body.weight", "head.weight"]
    assert found.unused == ["side.weight", "side.bias", "idle.weight", "idle.bias"]
    assert found.frozen == ["head.bias"]
    assert found.root.name == "SumBackward0"
    assert {node.module for node in found.nodes} == {"", "body", "head"}
    text = str(found).splitlines()
    assert text[0] == "SumBackward0"
    assert any(line.endswith("AddmmBackward0  [body]") for line in text)
    assert "not reached: side.weight" in text
    assert "frozen: head.bias" in text


def test_a_function_names_every_node_and_finds_where_the_graph_is_cut() -> None:
    """``detach()`` in the model's own forward; the hooks are off afterwards."""
    model = Net()
    found = graph(lambda: model(torch.ones(1, 2)).sum(), model)
    assert found.detached == {"": "it calls Tensor.detach on a tensor that needs a gradient"}
    names = {node.name: node.module for node in found.nodes if not node.is_leaf and node.name != "AddmmBackward0"}
    assert names == {"SumBackward0": "", "AddBackward0": "", "TanhBackward0": "", "TBackward0": names["TBackward0"]}
    assert {node.module for node in found.nodes if node.name == "AddmmBackward0"} == {"body", "head"}
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


def test_shared_parts_are_written_once_and_deep_graphs_are_no_trouble() -> None:
    """A tied weight has one name; a chain of 5,000 nodes is walked without recursion."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    found = graph(model(torch.ones(1, 2)).sum(), model)
    assert found.reached == ["0.weight"]
    assert found.unused == []
    x = torch.ones(1, requires_grad=True)
    y = x
    for _ in range(5000):
        y = y + 0
    deep = graph(y.sum())
    assert len(deep.nodes) == 5002
    assert str(deep).splitlines()[-1] == "… and 4802 more lines"
    z = x * 2
    assert sum("(see above)" in line for line in str(graph((z + z).sum())).splitlines()) == 1


def test_wrappers_do_not_show_in_names_and_wrong_arguments_are_said() -> None:
    """A compiled model has the names of the model."""
    model = Net()
    wrapped = torch.compile(model, backend="eager")
    assert graph(model(torch.ones(1, 2)).sum(), wrapped).reached == ["body.bias", "body.weight", "head.weight"]
    with pytest.raises(ValueError, match="a tensor without a graph; was it computed under"):
        graph(torch.ones(1), model)
    with pytest.raises(ValueError, match="got an int"):
        graph(lambda: 3, model)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="got a str"):
        graph(torch.ones(1), "model")  # type: ignore[arg-type]


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
