"""Hooks on operators: which calls they see, with which arguments, and that no bit of a run changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_functions import (
    KINDS,
    fresh,
    label,
    nothing,
    sin_product,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hookline as hl

aten = torch.ops.aten


# -- what is seen ------------------------------------------------------------------------------------------


def workload() -> list[Tensor]:
    """Most of what a training run calls, numbers for tensors and fills and casts among it, from one seed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 3)
    )
    embedding, conv = nn.Embedding(5, 4), nn.Conv1d(4, 4, 3, padding=1)
    attention, lstm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LSTM(4, 4, batch_first=True)
    parts = nn.ModuleList([model, embedding, conv, attention, lstm])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        h = embedding(torch.tensor([[0, 1], [2, 3], [4, 1]]))
        h = lstm(attention(h, h, h)[0])[0]
        h = h + conv(h.transpose(1, 2)).transpose(1, 2)
        h = h * 2 + F.scaled_dot_product_attention(h, h, h).softmax(-1) / 3 - 1
        y = model(h.reshape(-1, 4))
        y = torch.cat([y, y.to(torch.float64).to(torch.float32)], 0)
        z = torch.where(y > 0, y, 0.0).clone()
        z[0] = 1.0
        z = z.masked_fill(z > 1e9, 0.0)
        loss = F.cross_entropy(y, torch.tensor([0, 1, 2] * 4)) + z.max(1).values.mean() + y.view(-1).norm()
        loss = loss + torch.einsum("ij,kj->ik", y, y).abs().mean() + 1
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert repr(h)
    nn.Parameter(h.detach())
    h.detach().numpy()
    return [loss.detach(), *(p.detach().clone() for p in parts.parameters()), torch.get_rng_state()]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


def used_operators() -> list[Any]:
    """The operators of the workload, as torch's own dispatch mode sees them, and some that it takes apart."""
    with _Recorder() as recorder:
        workload()
    apart = [aten.linear.default, aten.dropout.default, aten.lstm.input, aten.to.dtype, aten.reshape.default]
    apart += [aten.layer_norm.default, aten.cross_entropy_loss.default, aten._convolution.default, aten.item.default]
    return sorted({*recorder.seen, *apart}, key=str)


@pytest.mark.parametrize("kinds", [KINDS[:2], KINDS[2:]], ids=["forward", "backward"])
def test_hooking_any_one_operator_of_a_training_run_changes_no_bit_of_it(kinds: tuple[str, ...]) -> None:
    """Each of the operators that the run uses, one at a time; an error counts as a difference."""
    expected = workload()
    operators = used_operators()
    assert len(operators) > 80
    wrong, fired = {}, 0
    for operator in operators:
        if str(operator).startswith(("aten.detach", "aten.alias", "aten.empty", "aten.set_")):
            continue  # see test_parameters_and_subclasses_can_be_made_while_an_operator_is_hooked
        handles = hl.HandleSet(hl.attach_function(operator, nothing, on=kind, observe=True) for kind in kinds)
        try:
            if not all(map(torch.equal, workload(), expected)):
                wrong[str(operator)] = "other bits"
        except Exception as error:
            wrong[str(operator)] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        finally:
            handles.remove(quiet=True)
        fired += all(receipt.fired for receipt in handles.report())
    assert wrong == {}
    assert fired > (80 if "forward" in kinds else 25)


def test_every_call_of_an_operator_is_seen_once() -> None:
    """As many as torch's own dispatch mode counts, forward and backward together, of those that no kernel calls."""
    with _Recorder() as recorder:
        workload()
    for operator in (aten.addmm.default, aten.mm.default, aten.native_layer_norm.default, aten.embedding.default):
        with hl.attach_function(operator, nothing) as handle:
            workload()
        assert handle.report().fired == recorder.seen[operator] > 0, operator


def test_numbers_that_stand_for_tensors_stay_numbers_to_the_operator() -> None:
    """x * 2.5 keeps its dtype, for integers and half precision too, hooked or not; so does its gradient."""
    operators = [aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.mul_.Tensor, aten.add_.Tensor]

    def run() -> list[Tensor]:
        found = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool):
            x = torch.ones(3, dtype=dtype)
            found += [x * 2, x * 2.5, x * True, x + 1, 1 - x.int(), x / 2, x * torch.tensor(2.5, dtype=torch.float64)]
            found.append(2 * x + 1)
            if dtype.is_floating_point:
                y = x.clone().requires_grad_()
                (y * 2.5 + 1).sum().backward()
                found += [y.grad, x.clone().mul_(2).add_(1)]
        return found

    expected = run()
    with hl.HandleSet([hl.attach_function(operators, nothing, on=kind) for kind in KINDS]) as handles:
        hooked = run()
    assert [tensor.dtype for tensor in hooked] == [tensor.dtype for tensor in expected]
    assert all(map(torch.equal, hooked, expected))
    assert all(receipt.fired > 0 for receipt in handles.report())


@pytest.mark.parametrize("operator", [aten.detach.default, aten.alias.default, aten.view.default], ids=label)
def test_parameters_and_subclasses_can_be_made_while_an_operator_is_hooked(operator: Any) -> None:
    """torch wraps the result of detach and alias in another Python object: a hook is refused, or not in the way."""

    class Tagged(Tensor):
        pass

    try:
        handle = hl.attach_function(operator, nothing)
    except hl.errors.UnhookableError:
        assert operator is not aten.view.default
        handle = hl.HandleSet()
    with handle:
        assert isinstance(nn.Parameter(torch.ones(2)), nn.Parameter)
        assert type(torch.ones(2).as_subclass(Tagged)) is Tagged
        assert nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
        x = torch.ones(2, requires_grad=True)
        assert x.detach().requires_grad is False
        assert x.data.requires_grad is False


def test_operators_of_the_backward_pass_are_seen_and_marked() -> None:
    """A product of two matrices runs mm once forward and twice backward; fn says which is which."""
    a, b, seen = fresh(2, 3), fresh(3, 4), []
    with hl.attach_function("aten.mm.default", lambda fn, i, o: seen.append((fn.in_backward, fn.recompute))):
        (a @ b).sum().backward()
    assert seen == [(False, False), (True, False), (True, False)]


def test_gradient_hooks_on_an_operator_that_the_backward_pass_uses_fire_for_the_forward_call_alone() -> None:
    """The mm of the backward pass has no gradient of its own, unless one is asked for."""
    a, b, seen = fresh(2, 3), fresh(3, 4), []
    with hl.attach_function("aten.mm.default", lambda fn, gi, go: seen.append(fn.in_backward), on="backward"):
        (a @ b).sum().backward()
    assert seen == [False]


def test_in_inference_mode_the_forward_kinds_fire_once() -> None:
    """There the autograd level is passed by; edits count."""
    events: list[str] = []
    handles = [
        hl.attach_function("aten.exp.default", lambda fn, *_, kind=kind: events.append(kind), on=kind) for kind in KINDS
    ]
    handles.append(hl.attach_function("aten.exp.default", lambda fn, i, o: o[0] * 3))
    with hl.HandleSet(handles), torch.inference_mode():
        assert torch.exp(torch.zeros(1)).item() == 3.0
    assert events == ["forward_pre", "forward"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_kernels_call_among_themselves_does_no_harm(kind: str) -> None:
    """A convolution calls transpose, unsqueeze and others below autograd, where there is no graph to watch."""
    conv = nn.Conv1d(2, 3, 2)
    x = fresh(1, 2, 5)

    def run() -> list[Tensor]:
        return list(torch.autograd.grad(conv(x).square().sum(), [x, conv.weight]))

    expected = run()
    inner = [aten._convolution.default, aten.unsqueeze.default, aten.squeeze.dim, aten.view.default, aten.select.int]
    inner += [aten.transpose.int, aten.mkldnn_convolution.default, aten.as_strided.default, aten.expand.default]
    for operator in inner:
        with hl.attach_function(operator, nothing, on=kind):
            assert all(map(torch.equal, run(), expected)), operator


def test_lists_of_tensors_go_in_and_out() -> None:
    """aten.cat takes a list, aten.split gives one, aten._foreach_add_ changes one."""
    seen: list[Any] = []
    parts = [torch.ones(2), torch.ones(2)]
    with hl.attach_function(
        ["aten.cat.default", "aten.split.Tensor", "aten._foreach_add_.Scalar"],
        lambda fn, i, o: seen.append((fn.name, len(i), len(o))),
    ):
        torch.cat(parts).split(1)
        torch._foreach_add_(parts, 1.0)
    assert [item[:2] for item in seen] == [
        ("aten.cat.default", 2),
        ("aten.split.Tensor", 1),
        ("aten._foreach_add_.Scalar", 2),
    ]
    assert [item[2] for item in seen[:2]] == [1, 4]
    assert parts[0].tolist() == [2.0, 2.0]


def test_default_arguments_and_keywords_arrive_as_without_hooks() -> None:
    """An operator with keyword-only arguments and defaults, called in all ways."""
    library = torch.library.Library("hookline_test", "FRAGMENT")
    library.define("affine(Tensor x, float scale=2.0, *, float shift=0.5, bool negate=False) -> Tensor")

    def affine(x: Tensor, scale: float = 2.0, *, shift: float = 0.5, negate: bool = False) -> Tensor:
        return (x * scale + shift) * (-1 if negate else 1)

    library.impl("affine", affine, "CPU")
    x = torch.ones(1)

    def run() -> list[float]:
        op = torch.ops.hookline_test.affine
        return [op(x).item(), op(x, 3.0).item(), op(x, shift=1.0).item(), op(x, 3.0, negate=True, shift=1.0).item()]

    expected = run()
    try:
        with hl.attach_function("hookline_test.affine", nothing) as handle:
            assert run() == expected == [2.5, 3.5, 3.0, -4.0]
        assert handle.report().fired == 4
    finally:
        library._destroy()


def test_a_custom_operator_in_all_its_ways_of_being_called() -> None:
    """The decorated function, the packet, the overload; under grad, no_grad and inference mode."""
    a, b, seen = fresh(2), fresh(2, seed=1), []
    with hl.attach_function(sin_product, lambda fn, i, o: seen.append(fn.name)):
        for run in (sin_product, torch.ops.hookline_test.sin_product, torch.ops.hookline_test.sin_product.default):
            run(a, b)
            with torch.no_grad():
                run(a, b)
            with torch.inference_mode():
                run(a.detach(), b.detach())
    assert seen == ["hookline_test.sin_product.default"] * 9


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
        lambda model, x: torch.func.jvp(model, (x,), (x,)),
        lambda model, x: torch.func.grad(lambda x: torch.func.grad(lambda x: model(x).sin().sum())(x).sum())(x),
    ],
    ids=["grad", "jvp", "grad of grad"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, in its forward mode
def test_a_transform_of_torch_func_calls_an_operator_once(run: Any) -> None:
    """Each transform takes the call through the autograd level once more; it is one call all the same."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), fresh(5, 3, requires_grad=False)
    with hl.attach_function("aten.addmm.default", nothing) as handle:
        run(model, x)
    assert handle.report().fired == 2
