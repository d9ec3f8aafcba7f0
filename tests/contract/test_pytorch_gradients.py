"""PyTorch: whose gradients a backward hook reports, and that reporting them disturbs nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers_contract import EDITING, gradient_spy
from helpers_models import Fn, Scale, assert_same_grads, leaf, logger, mlp, twin
from torch import nn

import hookline as hl

GRADIENT_KINDS = ["backward_pre", "backward"]


@EDITING
def test_an_unused_input_gets_no_gradient(editing):
    """A leaf, and one that a layer made: .grad stays None, of that layer's weights too, and so is their grad_input."""
    a, b, producer, seen = leaf(4, 2), leaf(4, 2, seed=2), nn.Linear(3, 2), []
    module = Fn(lambda a, b, c: a * 2)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    module(a, b, producer(leaf(4, 3))).sum().backward()
    assert (b.grad, producer.weight.grad) == (None, None)
    [(grad_input, _)] = seen
    assert torch.equal(grad_input[0], torch.full((4, 2), 2.0))
    assert grad_input[1:] == (None, None)


@EDITING
@pytest.mark.parametrize("produced", [False, True], ids=["leaf", "non_leaf"])
def test_a_residual_input_reports_the_modules_own_share_and_an_edit_touches_that_alone(editing, produced):
    """For x + 5x the hook reports 5, its own share; the input gets 6, and 11, not 12, if the hook doubles its share."""
    module, seen, x = Scale(5.0), [], leaf(3)

    def hook(module, grad_input, grad_output):
        seen.append(grad_input[0])
        return (grad_input[0] * 2,) if editing else None

    hl.attach(module, hook, on="backward")
    hidden = x * 1 if produced else x
    (module(hidden) + hidden).sum().backward()
    assert torch.equal(seen[0], torch.full((3,), 5.0))
    assert torch.equal(x.grad, torch.full((3,), 11.0 if editing else 6.0))


@EDITING
def test_a_tensor_passed_to_two_modules_reports_each_ones_share(editing):
    """Two modules on one input report their own shares, the input gets the sum."""
    model, shares, x = nn.ModuleList([Scale(2.0), Scale(3.0)]), {}, leaf(2)

    def hook(module, grad_input, grad_output, *, site):
        shares[site.name] = grad_input[0].tolist()
        return grad_input if editing else None

    hl.attach(model, "#", hook, on="backward")
    hidden = x * 1
    (model[0](hidden) + model[1](hidden)).sum().backward()
    assert shares == {"0": [2.0, 2.0], "1": [3.0, 3.0]}
    assert x.grad.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("produced", [False, True], ids=["leaf", "non_leaf"])
@pytest.mark.parametrize("kind", GRADIENT_KINDS)
def test_observing_does_not_change_the_order_in_which_gradients_are_summed(kind, produced):
    """An input used three times in the module and twice beside it gets the same gradient to the last bit."""

    def run(hooked):
        generator = torch.Generator().manual_seed(5)
        factors = torch.randn(5, 1000, generator=generator) * torch.tensor([[1.0], [1e3], [1e-3], [1e5], [7.0]])
        x = torch.randn(1000, generator=generator, requires_grad=True)
        module, seen = Fn(lambda x: x * factors[0] + x * factors[1] + x * factors[2]), []
        if hooked:
            hl.attach(module, lambda *values: seen.append(values), on=kind, observe=True)
        hidden = x * 1 if produced else x
        before = hidden * factors[3]
        (before + module(hidden) + hidden * factors[4]).sum().backward()
        assert len(seen) == hooked
        return x.grad

    assert torch.equal(run(True), run(False))


INPLACE_SUCCESSORS = {
    "relu_": lambda out: nn.functional.relu(out, inplace=True),
    "add_": lambda out: out.add_(1),
    "setitem": lambda out: out.index_fill_(0, torch.tensor([0]), 0.0),
}


@EDITING
@pytest.mark.parametrize("successor", INPLACE_SUCCESSORS)
@pytest.mark.parametrize("kind", GRADIENT_KINDS)
def test_in_place_operations_on_a_hooked_output_stay_legal(kind, successor, editing):
    """Training with ReLU(inplace=True) or out.add_(1) behind a hooked Linear works, with the same gradients."""
    module, x, seen = nn.Linear(3, 2), leaf(4, 3), []
    reference, x_reference = copy.deepcopy(module), twin(x)

    def hook(module, *grads):
        seen.append(grads)
        return grads[0] if editing else None

    hl.attach(module, hook, on=kind)
    act = INPLACE_SUCCESSORS[successor]
    out, raw = module(x), reference(x_reference)
    raw.retain_grad()
    act(out).square().sum().backward()
    expected = raw * 1
    act(expected).square().sum().backward()
    assert torch.equal(x.grad, x_reference.grad)
    assert_same_grads(module, reference)
    assert len(seen) == 1
    assert torch.equal(seen[0][-1][0], raw.grad)


def test_a_module_that_works_in_place_on_its_input_reports_its_gradients():
    """ReLU(inplace=True) itself observed, behind a Linear: same gradients as without hooks, and reported."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    reference = nn.Sequential(copy.deepcopy(model[0]), nn.ReLU(), copy.deepcopy(model[2]))
    seen, x = [], leaf(6, 3)
    x_reference = twin(x)
    hidden = reference[0](x_reference)
    active = reference[1](hidden)
    hidden.retain_grad()
    active.retain_grad()
    reference[2](active).square().sum().backward()
    hl.attach(model, "1", gradient_spy(seen, editing=False), on="backward")
    model(x).square().sum().backward()
    assert_same_grads(model, reference)
    assert torch.equal(x.grad, x_reference.grad)
    [(grad_input, grad_output)] = seen
    assert torch.equal(grad_output[0], active.grad)
    assert torch.equal(grad_input[0], hidden.grad)


def test_an_edit_of_what_a_module_sends_to_an_input_that_it_changes_in_place_is_refused():
    """In the forward, with the module, the hook and the remedy: no gradient is edited halfway."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), leaf(6, 3)
    with (
        hl.attach(model, "1", lambda m, gi, go: (gi[0] * 4,), on="backward", name="four"),
        pytest.raises(hl.errors.UnhookableError, match=r"'four' on '1'.*in place.*observe=True"),
    ):
        model(x)
    module = Fn(lambda x: x.mul_(2))
    with (
        hl.attach(module, lambda m, gi, go: (gi[0] * 4,), on="backward"),
        pytest.raises(RuntimeError, match=r"HooklineGate.* modified inplace"),
    ):
        module(x * 1)


def test_an_in_place_operation_after_a_pass_through_module_stays_legal():
    """x goes through a module that returns it and is then changed in place: reported once, gradients right."""
    module, seen, x = Fn(lambda x: x), [], leaf(2)
    hl.attach(module, gradient_spy(seen, editing=False), on="backward")
    out = module(x * 3)
    out.mul_(5)
    out.sum().backward()
    assert x.grad.tolist() == [15.0, 15.0]
    [(grad_input, grad_output)] = seen
    assert grad_output[0].tolist() == [5.0, 5.0]
    assert grad_input[0].tolist() == [5.0, 5.0]


def test_an_edited_input_that_goes_out_again_cannot_be_changed_past_its_other_users():
    """The gradient of the other users would be wrong, so torch refuses it, as behind its own full backward hook."""
    module, x = Fn(lambda x: x), leaf(2)
    hl.attach(module, lambda m, gi, go: (gi[0] * 4,), on="backward")
    with pytest.raises(RuntimeError, match="HooklineGate"):
        module(x * 3).mul_(5)


@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "accumulating"])
def test_a_first_layer_has_the_parameter_gradients_of_this_backward(accumulate):
    """Without a gradient to its input, the hook still finds .grad of its weights as this backward leaves it."""
    model, found = mlp(), []
    x = leaf(4, 3).detach()

    def hook(module, grad_input, grad_output):
        assert grad_input == (None,)
        found.append((module.weight.grad.clone(), module.bias.grad.clone(), grad_output[0]))

    hl.attach(model, "0", hook, on="backward")
    for scale in (1.0, 10.0):
        if not accumulate:
            model.zero_grad()
        (model(x) * scale).sum().backward()
        weight, bias, grad_output = found[-1]
        assert torch.equal(weight, model[0].weight.grad)
        assert torch.equal(bias, model[0].bias.grad)
        if not accumulate:
            assert torch.equal(weight, grad_output.T @ x)
    assert len(found) == 2
    assert not torch.equal(found[0][0], found[1][0])


def test_every_layer_has_its_parameter_gradients_when_its_backward_hook_fires():
    """The same for layers in the middle, with a gradient to their inputs."""
    model, found = mlp(), {}

    def hook(module, grad_input, grad_output, *, site):
        found[site.name] = [parameter.grad.clone() for parameter in module.parameters()]

    hl.attach(model, "*", hook, on="backward")
    model(leaf(4, 3)).square().sum().backward()
    assert set(found) == {"", "0", "1", "2"}
    for name, grads in found.items():
        for grad, parameter in zip(grads, model.get_submodule(name).parameters(), strict=True):
            assert torch.equal(grad, parameter.grad), name


@EDITING
def test_a_reused_module_fires_once_per_call_with_that_calls_gradients(editing):
    """Called twice in one forward, it reports each call with its index and its own gradients."""
    model, seen, x = nn.Sequential(Scale(2.0), Scale(3.0)), [], leaf(2)
    model.append(model[0])

    def hook(module, grad_input, grad_output, *, site):
        seen.append((site.call, grad_input[0].tolist(), grad_output[0].tolist()))
        return grad_input if editing else None

    hl.attach(model, "0", hook, on="backward")
    model(x).sum().backward()
    assert seen == [(1, [2.0, 2.0], [1.0, 1.0]), (0, [12.0, 12.0], [6.0, 6.0])]
    assert x.grad.tolist() == [12.0, 12.0]


def test_a_shared_module_is_hooked_once_per_hook_under_any_of_its_names():
    """A glob that meets a module under two names hooks it once; either name alone selects it."""
    model, events = nn.Sequential(Scale(), nn.Tanh()), []
    model.append(model[0])
    with hl.attach(model, "*", lambda m, args, out, *, site: events.append((site.name, site.call))):
        model(torch.ones(1))
    assert events == [("0", 0), ("1", 0), ("0", 1), ("", 0)]
    for name in ("0", "2"):
        with hl.attach(model, name, logger(events := [], name)) as handle:
            model(torch.ones(1))
        assert events == [name, name]
        assert handle.report().matched == 1


@EDITING
def test_a_gradient_that_a_hook_kept_does_not_change_when_the_leaf_accumulates_more(editing):
    """What the hook was shown for a leaf input is not the memory of its .grad: a later backward leaves it alone."""
    module, seen, x = Scale(5.0), [], leaf(2)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    module(x).sum().backward()
    module(x).sum().backward()
    x.grad.zero_()
    assert [grad_input[0].tolist() for grad_input, _ in seen] == [[5.0, 5.0], [5.0, 5.0]]


@EDITING
def test_two_backward_passes_over_one_graph_both_fire_with_their_own_gradients(editing):
    """With retain_graph=True each backward fires the hook once, with the gradients of that pass."""
    module, seen, x = nn.Linear(3, 2), [], leaf(4, 3)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    output = module(x * 1)
    (output * 2).sum().backward(retain_graph=True)
    (output * 3).sum().backward()
    ones = torch.ones(4, 2)
    assert [grad_output[0].tolist() for _, grad_output in seen] == [(ones * 2).tolist(), (ones * 3).tolist()]
    first, second = (ones * 2) @ module.weight, (ones * 3) @ module.weight
    assert torch.equal(x.grad, first + second)
    assert torch.equal(seen[0][0][0], first)
    assert torch.equal(seen[1][0][0], second)


@EDITING
def test_a_backward_that_raised_half_way_leaves_the_next_one_right(editing):
    """An error in another hook ends the pass; the next backward over the graph fires the hook as if new."""
    model, seen, x = mlp(), [], leaf(4, 3)
    hl.attach(model, "2", gradient_spy(seen, editing=editing), on="backward")
    bomb = hl.attach(model, "1", lambda m, go: 1 / 0, on="backward_pre")
    output = model(x)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward(retain_graph=True)
    bomb.remove()
    seen.clear()
    (output * 2).sum().backward()
    [(grad_input, grad_output)] = seen
    assert torch.equal(grad_output[0], torch.full((4, 2), 2.0))
    assert torch.equal(grad_input[0], torch.full((4, 2), 2.0) @ model[2].weight)


def test_a_gradient_of_a_gradient_is_the_same_with_observers_on():
    """With create_graph=True the penalty's gradients are bit-identical, and the first pass fires once per module."""
    model, fired = mlp(), []
    reference, x = copy.deepcopy(model), leaf(4, 3)

    def penalty(model, x):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first_pass = len(fired)
        (grad.norm() - 1).square().backward()
        return first_pass

    hl.attach(model, "#", lambda m, gi, go: fired.append(gi[0].requires_grad), on="backward", observe=True)
    assert penalty(model, x) == 3
    assert fired[:3] == [True, True, True]
    x_reference = twin(x)
    penalty(reference, x_reference)
    # The last bias has no part in a gradient with respect to x.
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        same = parameter.grad is expected.grad or torch.equal(parameter.grad, expected.grad)
        assert same, name
    assert torch.equal(x.grad, x_reference.grad)


def test_an_edit_under_create_graph_is_differentiated_too():
    """Doubling the gradient of x³ gives 6x², whose gradient is 12x."""
    module, x = Fn(lambda x: x**3), torch.tensor([1.0, 2.0], requires_grad=True)
    hl.attach(module, lambda m, gi, go: (gi[0] * 2,), on="backward")
    (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert torch.equal(grad, 6 * x**2)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second, 12 * x)
