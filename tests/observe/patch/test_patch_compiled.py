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
INDICES = {
    "all": None,
    "last": LAST,
    "ellipsis and number": (..., -1, slice(None)),
    "places": (slice(None), [0, 2]),
    "number and places": (1, [0, 2]),
    "mask": torch.tensor([[True, False, True], [False, False, True]]),
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


@pytest.mark.parametrize("index", INDICES)
@torch.no_grad()  # half of what compiling takes is the backward, which the test before this one compares
def test_parts_are_edited_in_compiled_code(index):
    """Attached before the first call; every kind of index stays in the graph."""
    model, x = made()
    compiled = _compiled(model)
    for edit in (hl.edits.scale(3.0), hl.edits.ablate()):
        with hl.patch(model, {"layers.1": edit}, index=INDICES[index]):
            assert torch.equal(compiled(x), model(x))
    assert torch.equal(compiled(x), model(x))


def test_gradients_go_through_masks_and_lists_of_places():
    """Both kinds of index in one graph, by edits that leave a gradient and by one that cuts it; as in eager code."""
    model, x = made()
    vector = V.clone().requires_grad_()
    edits = {
        "layers.0": hl.edits.scale(3.0, index=INDICES["mask"]),
        "layers.1": hl.edits.steer(vector, 2.0, index=INDICES["places"]),
        "layers.2": hl.edits.ablate(index=INDICES["places"]),
    }
    compiled, inputs = _compiled(model), [vector, *model.parameters()]
    with hl.patch(model, edits):
        found, expected = (torch.autograd.grad(run(x).square().sum(), inputs) for run in (compiled, model))
    plain = torch.autograd.grad(model(x).square().sum(), inputs[1:])
    assert all(map(torch.equal, found, expected))
    assert not any(map(torch.equal, found[1:3], plain[:2]))  # they do go through the edits
    assert _graphs() == 1


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


def test_each_site_needs_one_graph_however_often_it_is_patched():
    """A sweep over sites compiles once for each, and none the second time, nor afterwards."""
    model, x = made()
    compiled = _compiled(model)
    compiled(x)
    for _ in range(2):
        for layer in range(3):
            with hl.patch(model, {f"layers.{layer}": hl.edits.ablate(index=LAST)}):
                assert torch.equal(compiled(x), model(x))
    compiled(x)
    assert _graphs() == 4


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


def test_sizes_that_are_kept_open_are_edited_too():
    model, _ = made()
    compiled = _compiled(model, dynamic=True)
    with hl.patch(
        model, {"layers.1": hl.edits.steer(V, index=LAST), "layers.2": hl.edits.ablate(index=(0, slice(0, 2)))}
    ):
        for length in (3, 5, 8):
            x = torch.randn(2, length, 4)
            assert torch.equal(compiled(x), model(x))
    assert _graphs() == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_edits_work_without_gradients(mode):
    model, x = made()
    compiled = _compiled(model)
    with mode(), hl.patch(model, {"layers.#": hl.edits.steer(V, index=LAST)}):
        assert torch.equal(compiled(x), model(x))


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


MISFITS = {
    "a vector": (
        hl.edits.steer(torch.ones(5)),
        r"vector of shape \(5,\), but the output of 'layers.1' has shape \(2, 3, 4\)",
    ),
    "a mask": (
        hl.edits.ablate(index=torch.ones(2, 2) > 0),
        r"mask of shape \(2, 2\), but the output of 'layers.1' has shape",
    ),
    "None": (lambda h: None, "returned NoneType, but the output of 'layers.1' is a tensor"),
    "whole": (lambda h: h[0], r"shape \(3, 4\), but the output of 'layers.1' has shape \(2, 3, 4\). Return"),
}


@pytest.mark.parametrize(("case", "dynamic"), [*((case, None) for case in MISFITS), ("a vector", True)])
def test_what_does_not_fit_is_said_while_compiling(case, dynamic):
    """In the words of the eager error; torch wraps it in one of its own, a RuntimeError too."""
    edit, message = MISFITS[case]
    model, x = made()
    patched = hl.patch(model, {"layers.1": edit})
    with pytest.raises(RuntimeError, match=message):
        _compiled(model, dynamic=dynamic)(x)
    patched.remove(quiet=True)


def test_a_position_outside_is_an_error_in_compiled_code():
    """torch's own, since the graph is the same for all positions."""
    model, x = made()
    compiled = _compiled(model)
    with hl.patch(model, {"layers.1": hl.edits.ablate(index=(0, 2))}):
        compiled(x)
    with (
        hl.patch(model, {"layers.1": hl.edits.ablate(index=(0, 3))}),
        pytest.raises(IndexError, match="3 is out of bounds"),
    ):
        compiled(x)


def test_an_exported_program_has_the_edits():
    """They are part of what is exported, and stay there."""
    model, x = made(Stack)
    with hl.patch(model, {"layers.1": hl.edits.ablate(2.0)}):
        exported = torch.export.export(model, (x,))
        expected = model(x)
    assert torch.equal(exported.module()(x), expected)
