"""InfiniTrain and PyTorch below the module: tensors, leaves that accumulate, graph nodes, saved tensors.

Where torch has the same hook and is right, the same scenario runs with torch's own, with the same outcome.
"""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from helpers_contract import Cube
from helpers_models import leaf, logger
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

import hookline as hl

KINDS = ["grad", "pre", "post", "param_grad"]


def tensor_or_leaf(computed):
    """A tensor to hook, and the loss that reaches it: computed, or a leaf."""
    tensor = leaf(3) * 2 if computed else leaf(3)
    return tensor, (tensor**2).sum()


def by_torch(tensor, hook, kind):
    """Put a hook on with torch alone; its handle, and what has to be kept for it to fire."""
    if kind == "grad":
        return tensor.register_hook(hook), None
    if kind == "param_grad":
        return tensor.register_post_accumulate_grad_hook(hook), None
    node = get_gradient_edge(tensor).node
    return (node.register_prehook if kind == "pre" else node.register_hook)(hook), node


def by_hookline(tensor, hook, kind, **options):
    if kind in ("grad", "param_grad"):
        return hl.attach_tensor(tensor, hook, on=kind, **options), None
    return hl.attach_node(tensor, hook, on=kind, **options), None


BOTH = pytest.mark.parametrize("put", [by_torch, by_hookline], ids=["torch", "hookline"])


# -- hooks on leaves that accumulate ----------------------------------------------------------------------


def test_post_accumulate_hooks_fire_as_often_and_at_the_same_moments_as_torchs_own():
    """Shared weights, an unused parameter, several passes: torch's hook and ours note the same events."""
    model, x, ours, torchs = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]), leaf(4, 3), [], []
    names = {parameter: name for name, parameter in model.named_parameters()}

    def note(into):
        return lambda parameter: into.append((names[parameter], parameter.grad.clone()))

    for parameter in names:
        parameter.register_post_accumulate_grad_hook(note(torchs))
    hl.attach(model, "*", note(ours), on="param_grad")
    for _ in range(2):
        model[0](model[1](model[0](x))).square().sum().backward()
    assert [name for name, _ in ours] == [name for name, _ in torchs]
    assert Counter(name for name, _ in ours) == {"0.weight": 2, "0.bias": 2, "1.weight": 2, "1.bias": 2}
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, torchs, strict=True))


def test_a_pre_accumulate_hook_gets_the_incoming_gradient_and_may_replace_it():
    """InfiniTrain's pre-accumulate hook: on="grad" of a leaf sees this pass's gradient, before it is added."""
    weight, seen = leaf(3), []
    weight.grad = torch.full((3,), 10.0)

    def halve(grad):
        seen.append((grad.clone(), weight.grad.clone()))
        return grad / 2

    hl.attach_tensor(weight, halve)
    (weight * 4).sum().backward()
    ((grad, before),) = seen
    assert torch.equal(grad, torch.full((3,), 4.0))
    assert torch.equal(before, torch.full((3,), 10.0))
    assert torch.equal(weight.grad, torch.full((3,), 12.0))


def test_a_pre_accumulate_hook_may_bypass_the_accumulation():
    """A node pre hook that takes the gradient away leaves `.grad` as it was, as in torch."""
    for put in (by_torch, by_hookline):
        weight = leaf(3)
        weight.grad = torch.full((3,), 10.0)
        _, kept = put(weight, lambda grads: (None,), "pre")
        (weight * 4).sum().backward()
        assert torch.equal(weight.grad, torch.full((3,), 10.0)), (put, kept)


# -- order ------------------------------------------------------------------------------------------------


@BOTH
def test_the_order_around_a_leaf_is_tensor_node_pre_accumulate_post_accumulate_node_post(put):
    """Registered backwards on purpose; `.grad` is there from the post-accumulate hook on."""
    weight, events, kept = leaf(3), [], []

    def note(label):
        def hook(*_):
            events.append((label, weight.grad is not None))

        return hook

    for label, kind in [("node post", "post"), ("post-accumulate", "param_grad"), ("node pre", "pre")]:
        kept.append(put(weight, note(label), kind))
    kept += [put(weight, note("tensor 1"), "grad"), put(weight, note("tensor 2"), "grad")]
    (weight**2).sum().backward()
    assert events == [
        ("tensor 1", False),
        ("tensor 2", False),
        ("node pre", False),
        ("post-accumulate", True),
        ("node post", True),
    ]


@BOTH
@pytest.mark.parametrize("retain", ["first", "last"])
def test_the_order_around_a_computed_tensor_is_tensor_retain_grad_node_pre_node_post(put, retain):
    """retain_grad comes after all tensor hooks, whenever it was asked for, and keeps the edited gradient."""
    x, events, kept = leaf(3), [], []
    tensor = x * 2
    if retain == "first":
        tensor.retain_grad()

    def note(label):
        def hook(*_):
            events.append((label, None if tensor.grad is None else tensor.grad.tolist()))

        return hook

    def edit(grad):
        events.append(("edit", tensor.grad))
        return grad * 10

    kept += [put(tensor, note("node post"), "post"), put(tensor, note("node pre"), "pre")]
    kept += [put(tensor, edit, "grad"), put(tensor, note("tensor"), "grad")]
    hl.attach_tensor(x, note("upstream")) if put is by_hookline else x.register_hook(note("upstream"))
    if retain == "last":
        tensor.retain_grad()
    tensor.sum().backward()
    ten = [10.0] * 3
    assert events == [("edit", None), ("tensor", None), ("node pre", ten), ("node post", ten), ("upstream", ten)]
    assert x.grad.tolist() == [20.0] * 3


@pytest.mark.parametrize(
    ("library", "order"),
    [("torch", [("backward_pre", 1.0), ("tensor", 2.0)]), ("hookline", [("tensor", 1.0), ("backward_pre", 1.0)])],
)
def test_a_tensor_hook_put_on_in_a_forward_hook_comes_as_documented_beside_the_modules_backward_pre(library, order):
    """In torch it hangs on a tensor inside of the module's own node, in hookline on the output itself (sources.md)."""
    module, events = nn.Linear(2, 2), []

    def note(grad):
        events.append(("tensor", grad[0, 0].item()))

    def double(module, grad_output):
        events.append(("backward_pre", grad_output[0][0, 0].item()))
        return (grad_output[0] * 2,)

    if library == "torch":
        module.register_forward_hook(lambda m, args, output: output.register_hook(note) and None)
        module.register_full_backward_pre_hook(double)
    else:
        hl.attach(module, lambda m, args, output: hl.attach_tensor(output, note) and None)
        hl.attach(module, double, on="backward_pre")
    module(leaf(1, 2)).sum().backward()
    assert events == order


def test_a_node_hook_on_a_leaf_survives_the_collection_of_the_node_object():
    """torch forgets it with the node, which nobody holds; ours fires in every pass until it is removed."""
    weight, torchs, ours = leaf(3), [], []
    get_gradient_edge(weight).node.register_hook(logger(torchs, "fired"))
    gc.collect()
    (weight**2).sum().backward()
    assert torchs == []
    handles = [
        hl.attach_node(weight, logger(ours, "pre"), on="pre"),
        hl.attach_node(get_gradient_edge(weight), logger(ours, "post"), on="post"),
    ]
    for _ in range(2):
        gc.collect()
        (weight**2).sum().backward()
    assert ours == ["pre", "post"] * 2
    for handle in handles:
        handle.remove()
    (weight**2).sum().backward()
    assert len(ours) == 4


# -- tensors ----------------------------------------------------------------------------------------------


@BOTH
def test_a_tensor_hook_fires_for_autograd_grad_and_a_node_hook_there_does_not(put):
    """A gradient that is only asked for passes the tensor's hooks; its node need not run."""
    tensor, loss = tensor_or_leaf(computed=True)
    events = []
    kept = [put(tensor, logger(events, kind), kind) for kind in ("grad", "pre", "post")]
    (grad,) = torch.autograd.grad(loss, tensor)
    assert len(kept) == 3
    assert events == ["grad"]
    assert torch.equal(grad, 2 * tensor.detach())


@BOTH
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kind", ["grad", "pre", "post"])
def test_hooks_run_with_gradients_off_unless_the_pass_builds_a_graph(put, create_graph, kind):
    """So a hook may compute without growing a graph, and takes part in a double backward."""
    x, modes = leaf(3), []
    tensor = x * 2
    kept = put(tensor, lambda *_: modes.append(torch.is_grad_enabled()), kind)
    torch.autograd.grad((tensor**2).sum(), x, create_graph=create_graph)
    assert modes == [create_graph]
    assert kept


@BOTH
def test_an_edit_of_a_tensor_hook_takes_part_in_a_double_backward(put):
    """y = x³ gives 3·3x² through the hook; its derivative, 18x, meets the tensor and so the hook once more: 54x."""
    x = leaf(3)
    tensor = x * 1
    put(tensor, lambda grad: grad * 3, "grad")
    (first,) = torch.autograd.grad((tensor**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 9 * x**2)
    torch.testing.assert_close(second, 54 * x)


@BOTH
def test_a_backward_that_is_told_its_inputs_fires_the_hooks_of_those_alone(put):
    """backward(inputs=[a]) leaves b's gradient, and its hooks, out."""
    a, b, events = leaf(3), leaf(3, seed=2), []
    kept = [put(t, logger(events, (name, kind)), kind) for name, t in (("a", a), ("b", b)) for kind in KINDS]
    (a * b).sum().backward(inputs=[a])
    assert len(kept) == 8
    assert events == [("a", "grad"), ("a", "pre"), ("a", "param_grad"), ("a", "post")]
    assert b.grad is None


def linear_model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


SAVING = {
    "square": lambda x: (x * x).sum(),
    "exp": lambda x: x.exp().sum(),
    "linear": lambda x: linear_model()(x).sum(),
    "norm": lambda x: nn.functional.layer_norm(x, (3,)).square().sum(),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]).sum(),
    "own function": lambda x: Cube.apply(x).sum(),
    "in place": lambda x: torch.relu_(x * 2).sum(),
    "cross entropy": lambda x: nn.functional.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
}


@pytest.mark.parametrize("function", SAVING.values(), ids=SAVING.keys())
def test_pack_and_unpack_are_called_for_the_same_tensors_as_torchs_own(function):
    """Per saved tensor one pack, per use one unpack: torch's pair and ours see the same list, in order."""
    seen = {}
    for scope in (saved_tensors_hooks, hl.saved_tensors):
        packed, unpacked = [], []

        def pack(tensor, packed=packed):
            packed.append(tensor.detach().clone())
            return len(packed) - 1, tensor.detach()

        def unpack(kept, unpacked=unpacked):
            unpacked.append(kept[0])
            return kept[1]

        x = leaf(4, 3)
        with scope(pack, unpack):
            loss = function(x)
        assert not unpacked
        loss.backward()
        seen[scope] = packed, unpacked, x.grad
    (packed, unpacked, grad), (torch_packed, torch_unpacked, torch_grad) = (
        seen[hl.saved_tensors],
        seen[saved_tensors_hooks],
    )
    assert packed
    assert unpacked == torch_unpacked
    assert len(packed) == len(torch_packed)
    assert all(torch.equal(a, b) for a, b in zip(packed, torch_packed, strict=True))
    plain = leaf(4, 3)
    function(plain).backward()
    assert torch.equal(grad, torch_grad)
    assert torch.equal(grad, plain.grad)
