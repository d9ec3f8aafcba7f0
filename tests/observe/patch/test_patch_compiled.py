"""Edits in compiled code: one graph, the same numbers, put on and taken off at any time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers_patch import Stack, made
from torch import nn
from torch._dynamo.utils import counters

import hookline as hl

V = torch.tensor([1.0, -2.0, 0.5, 3.0])
LAST = (slice(None), -1)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """The compiler starts anew and counts from zero; tiny tensors are not worth a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.set_num_threads(threads)


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def _compiled(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, **{"backend": "aot_eager", "fullgraph": True, **options})


EDITS = {
    "ablate": hl.edits.ablate(),
    "scale": hl.edits.scale(0.25),
    "scale units": hl.edits.scale(V),
    "steer": hl.edits.steer(V, 2.0),
    "steer in another dtype": hl.edits.steer(V.double(), torch.tensor(2.0)),
    "replace": hl.edits.replace(V),
    "swap": hl.edits.swap({f"layers.{index}": torch.ones(2, 3, 4) for index in range(3)}),
    "mean": hl.edits.mean_ablate({f"layers.{index}": torch.ones(9, 4) for index in range(3)}),
    "a function": lambda h: torch.sin(h),
    "a module": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", EDITS)
def test_compiled_and_eager_agree(name):
    """Output and gradients, in one graph, attached after the first call and taken off again."""
    model, x = made()
    compiled = _compiled(model)
    plain = compiled(x)
    with hl.patch(model, {"layers.#": EDITS[name]}) as patched:
        expected, found = model(x), compiled(x)
        assert patched.report()[0].fired == 6
        assert torch.equal(found, expected)
        inputs = list(model.head.parameters()) if name in _CUTS else list(model.parameters())
        grads = [torch.autograd.grad(output.square().sum(), inputs) for output in (found, expected)]
        assert all(map(torch.equal, *grads))
    assert torch.equal(compiled(x), plain)
    assert not counters["graph_break"]


_CUTS = ("ablate", "replace", "swap", "mean")


@torch.no_grad()
def test_sweeps_need_no_graph_of_their_own():
    """Other vectors, strengths, positions and masks run in the graph of the first, or of the second."""
    model, _ = made()
    x = torch.randn(2, 12, 4)
    compiled = _compiled(model)
    sweeps = [
        [hl.edits.steer(torch.randn(4), float(k)) for k in range(12)],
        [hl.edits.scale(k / 10) for k in range(12)],
        [hl.edits.scale(k) for k in range(12)],
        [hl.edits.steer(V, k) for k in range(-6, 6)],
        [hl.edits.ablate(k / 4) for k in range(12)],
        [hl.edits.ablate(k, index=0) for k in range(12)],
        [hl.edits.scale(2, index=(slice(None), [start, start + 1])) for start in range(11)],
        [hl.edits.steer(V, index=(slice(None), position)) for position in range(-12, 12)],
        [hl.edits.ablate(index=torch.rand(2, 12) > 0.5) for _ in range(12)],
        [hl.edits.swap({"layers.1": torch.randn(2, 12, 4)}, index=(0, position)) for position in range(12)],
    ]
    for edits in sweeps:
        before = _graphs()
        for edit in edits:
            with hl.patch(model, {"layers.1": edit}):
                assert torch.equal(compiled(x), model(x))
        assert _graphs() - before <= 2, edits[0]
        torch._dynamo.reset()  # torch allows eight graphs for one function


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vector_is_trained_through_compiled_code(dtype):
    """It gets the gradient of the eager run, and its steps count without compiling again."""
    model, x = made()
    compiled = _compiled(model)
    vector = V.clone().to(dtype).requires_grad_()
    optimizer = torch.optim.SGD([vector], lr=0.1)
    with hl.patch(model, {"layers.1": hl.edits.steer(vector, 2.0, index=LAST)}):
        for _ in range(3):
            grads = [torch.autograd.grad(run(x).square().sum(), vector)[0] for run in (model, compiled)]
            assert torch.equal(*grads)
            vector.grad = grads[1]
            optimizer.step()
    assert grads[0].dtype == dtype
    assert _graphs() == 1


@pytest.mark.full
def test_inductor_does_the_same():
    """Within the error that compiling has anyway: put on, trained through, taken off."""
    model, x = made()
    compiled = _compiled(model, backend="inductor")
    plain = compiled(x)
    vector = V.clone().requires_grad_()
    with hl.patch(
        model, {"layers.1": hl.edits.steer(vector, 2.0, index=LAST), "layers.0": hl.edits.ablate(index=(0, 1))}
    ):
        expected, found = model(x), compiled(x)
        torch.testing.assert_close(found, expected)
        inputs = [vector, model.layers[0].mlp.weight]
        grads = [torch.autograd.grad(output.square().sum(), inputs) for output in (expected, found)]
        torch.testing.assert_close(*grads)
    assert torch.equal(compiled(x), plain)


def test_a_scope_of_ones_own_is_refused():
    """Whose call it is, compiled code does not know."""
    model, x = made()
    patched = hl.patch(model, {"layers.1": hl.edits.ablate()}, scope="context")
    with pytest.raises(RuntimeError, match=r"'ablate' edits, and has scope='context'"):
        _compiled(model)(x)
    patched.remove(quiet=True)


def test_an_exported_program_has_the_edits():
    """They are part of what is exported, and stay there."""
    model, x = made(Stack)
    with hl.patch(model, {"layers.1": hl.edits.ablate(2.0)}):
        exported = torch.export.export(model, (x,))
        expected = model(x)
    assert torch.equal(exported.module()(x), expected)
