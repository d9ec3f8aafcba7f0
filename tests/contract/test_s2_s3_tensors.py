"""Sources 001 and 002 below the module: tensors, leaves that accumulate, graph nodes, saved tensors, recomputation.

Each test is one scenario of S2 and S3 in ACCEPTANCE.md, or one statement of SPEC.md 2.3, 3.2 and 3.5. Where torch has
the same hook and is right, the same scenario runs with torch's own, and both have to tell the same story.
"""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import hookline as hl

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
KINDS = ["grad", "pre", "post", "param_grad"]
COMPUTED = pytest.mark.parametrize("computed", [False, True], ids=["leaf", "computed"])

PLACES = pytest.mark.parametrize(
    ("kind", "computed"),
    [(kind, computed) for kind in ("grad", "pre", "post") for computed in (False, True)] + [("param_grad", False)],
    ids=lambda value: {False: "leaf", True: "computed"}.get(value, value),
)
"""Every kind of hook, on a leaf and on a computed tensor; only leaves accumulate."""


class Cube(torch.autograd.Function):
    """A function of one's own, which keeps its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Block(nn.Module):
    """Modules, a function of torch, an operator and a function of one's own, once each."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return Cube.apply(self.drop(torch.tanh(self.linear(x))))


class Stack(nn.Module):
    """Two blocks, each of them checkpointed, or neither."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def leaf(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def twin(tensor):
    return tensor.detach().clone().requires_grad_()


def logger(events, label):
    """A hook for any kind that notes its label and returns nothing."""

    def hook(*_):
        events.append(label)

    return hook


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


# -- S2: hooks on leaves that accumulate ------------------------------------------------------------------


@pytest.mark.parametrize("through", ["attach", "attach_tensor"])
def test_post_accumulate_hooks_on_a_parameter_used_twice_each_fire_once_per_backward_with_the_sum(through):
    """Two registrations both fire, each once per backward, and `.grad` is the finished sum, also when it grows."""
    model, x, seen, expected = nn.Linear(3, 3), leaf(4, 3), [], []
    reference = copy.deepcopy(model)
    for label in "ab":

        def hook(parameter, label=label):
            seen.append((label, parameter is model.weight, parameter.grad.clone()))

        if through == "attach":
            hl.attach(model, "weight", hook, on="param_grad")
        else:
            hl.attach_tensor(model.weight, hook, on="param_grad")
    for _ in range(2):
        model(model(x)).sum().backward()
        reference(reference(x)).sum().backward()
        expected.append(reference.weight.grad.clone())
    assert [(label, same) for label, same, _ in seen] == [("a", True), ("b", True)] * 2
    for (_, _, grad), wanted in zip(seen, [expected[0], expected[0], expected[1], expected[1]], strict=True):
        assert torch.equal(grad, wanted)


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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: leaf(3) * 2, "leaves accumulate"),
        (lambda: torch.ones(3), "no gradient"),
        (lambda: leaf(3).detach(), "no gradient"),
    ],
    ids=["computed", "no_grad", "detached"],
)
def test_a_post_accumulate_hook_where_nothing_accumulates_is_refused_and_says_why(make, reason):
    """torch refuses the same tensors; ours is a TypeError and a RuntimeError that gives the reason."""
    with pytest.raises(RuntimeError):
        make().register_post_accumulate_grad_hook(print)
    with pytest.raises(hl.errors.UnhookableError, match=reason):
        hl.attach_tensor(make(), lambda tensor: None, on="param_grad")


def test_a_post_accumulate_hook_on_frozen_parameters_alone_is_refused_and_names_them():
    """attach(..., on="param_grad") on what needs no gradient says which parameters and what to set."""
    model = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(hl.errors.UnhookableError, match=r"'weight'.*requires_grad"):
        hl.attach(model, "*", lambda parameter: None, on="param_grad")
    hl.assert_no_hooks(model)


def test_a_post_accumulate_hook_does_not_fire_for_gradients_that_are_only_computed():
    """autograd.grad accumulates nothing, so nothing fires; as in torch."""
    weight, ours, torchs = leaf(3), [], []
    weight.register_post_accumulate_grad_hook(logger(torchs, "fired"))
    hl.attach_tensor(weight, logger(ours, "fired"), on="param_grad")
    torch.autograd.grad((weight**2).sum(), weight)
    assert ours == torchs == []
    (weight**2).sum().backward()
    assert ours == torchs == ["fired"]


def test_what_a_post_accumulate_hook_returns_is_ignored():
    """torch raises for anything but None; ours has nothing to replace, so a lambda may return what it likes."""
    weight = leaf(3)
    weight.register_post_accumulate_grad_hook(lambda parameter: 1)
    with pytest.raises((RuntimeError, TypeError)):
        (weight**2).sum().backward()
    weight, seen = leaf(3), []
    hl.attach_tensor(weight, lambda parameter: seen.append(1) or parameter * 100, on="param_grad")
    (weight**2).sum().backward()
    assert torch.equal(weight.grad, 2 * weight.detach())
    assert seen == [1]


def test_an_optimizer_in_post_accumulate_hooks_frees_gradients_as_they_come():
    """Torch's recipe for a step in the backward: same weights as the plain optimizer, and no gradient is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    plain = copy.deepcopy(model)
    optimizers = {parameter: torch.optim.Adam([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hl.attach(model, "*", step, on="param_grad")
    optimizer, x = torch.optim.Adam(plain.parameters(), lr=0.1), leaf(4, 3)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.zero_grad()
        plain(x).square().sum().backward()
        optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_pre_accumulate_hook_gets_the_incoming_gradient_and_may_replace_it():
    """Source 001's pre-accumulate hook: on="grad" of a leaf sees this pass's gradient, before it is added."""
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


# -- S3: order ----------------------------------------------------------------------------------------------


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


@BOTH
def test_hooks_of_one_kind_run_in_registration_order_and_each_sees_the_edit_before_it(put):
    """Edits chain: the second hook is shown what the first returned, for tensors and for nodes."""
    tensor, loss = tensor_or_leaf(computed=True)
    shown, kept = [], []
    for factor in (2, 3):

        def scale(grad, factor=factor):
            shown.append(("grad", factor, grad[0].item()))
            return grad * factor

        def scale_all(grads, factor=factor):
            shown.append(("pre", factor, grads[0][0].item()))
            return (grads[0] * factor,)

        kept += [put(tensor, scale, "grad"), put(tensor, scale_all, "pre")]
    loss.backward()
    base = (2 * tensor.detach())[0].item()
    assert [label[:2] for label in shown] == [("grad", 2), ("grad", 3), ("pre", 2), ("pre", 3)]
    assert [value for *_, value in shown] == pytest.approx([base, 2 * base, 6 * base, 12 * base])


@pytest.mark.parametrize("kind", ["grad", "pre", "post"])
def test_observers_of_tensors_and_nodes_run_after_edits_and_see_what_goes_on(kind):
    """DESIGN.md §5: an observer attached before an editor sees the edited gradient, and its return is ignored."""
    x = leaf(3)
    tensor, seen = x * 5, []
    first = (lambda grad: grad) if kind == "grad" else (lambda grads: grads[0])

    def observer(*grads):
        seen.append(first(grads[0]).clone())
        return "nonsense"

    def editor(*grads):
        return grads[0] * 7 if kind == "grad" else tuple(None if g is None else g * 7 for g in grads[0])

    by_hookline(tensor, observer, kind, observe=True)
    by_hookline(tensor, editor, kind)
    tensor.sum().backward()
    assert seen[0].tolist() == ([35.0] * 3 if kind == "post" else [7.0] * 3)
    assert x.grad.tolist() == [35.0] * 3


@pytest.mark.parametrize(
    ("library", "order"),
    [
        ("torch", [("backward_pre", 1.0), ("tensor", 2.0)]),
        ("hookline", [("tensor", 1.0), ("backward_pre", 1.0)]),
    ],
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


def test_a_leaf_that_a_removed_node_hook_held_is_freed():
    """The node is held for the hook's sake alone: after removal the leaf goes as if it had never been hooked."""
    weight = leaf(3)
    gone = weakref.ref(weight)
    handle = hl.attach_node(weight, lambda grads: None)
    (weight**2).sum().backward()
    handle.remove()
    del weight
    gc.collect()
    assert gone() is None


# -- S3: tensors --------------------------------------------------------------------------------------------


@COMPUTED
def test_a_tensor_hook_gets_the_gradient_and_its_return_value_goes_on(computed):
    """The gradient is torch's own; what is returned replaces it for everything upstream."""
    results = {}
    for put in (by_torch, by_hookline):
        tensor, loss = tensor_or_leaf(computed)
        seen = []
        put(tensor, lambda grad, seen=seen: seen.append(grad.clone()) or grad * 3, "grad")
        (grad,) = torch.autograd.grad(loss, tensor, retain_graph=True)
        tensor.retain_grad()
        loss.backward()
        results[put] = (*seen, grad, tensor.grad)
        assert len(seen) == 2
    for ours, torchs in zip(results[by_hookline], results[by_torch], strict=True):
        assert torch.equal(ours, torchs)


def test_a_tensor_hook_on_what_needs_no_gradient_is_refused_and_says_why():
    """torch: "cannot register a hook on a tensor that doesn't require gradient"; ours adds the remedy."""
    for tensor in (torch.ones(3), leaf(3).detach()):
        with pytest.raises(RuntimeError):
            tensor.register_hook(print)
        with pytest.raises(hl.errors.UnhookableError, match=r"no gradient.*requires_grad_\(\)"):
            hl.attach_tensor(tensor, lambda grad: None)
    with torch.no_grad():
        tensor = leaf(3) * 2
    with pytest.raises(RuntimeError, match="no gradient"):
        hl.attach_tensor(tensor, lambda grad: None)


@pytest.mark.parametrize(
    "bad",
    [3.0, "x", torch.ones(2), torch.ones(3, dtype=torch.float64), (torch.ones(3),)],
    ids=["number", "text", "shape", "dtype", "tuple"],
)
def test_a_tensor_hook_that_returns_what_does_not_fit_raises_and_is_named(bad):
    """torch raises too, for the type in C++ words; ours says which hook it was."""

    def returns_nonsense(grad):
        return bad

    for put in (by_torch, by_hookline):
        tensor, loss = tensor_or_leaf(computed=True)
        put(tensor, returns_nonsense, "grad")
        with pytest.raises((RuntimeError, TypeError)) as caught:
            loss.backward()
        if put is by_hookline:
            assert isinstance(caught.value, hl.errors.HookReturnError)
            assert "returns_nonsense" in str(caught.value)


@BOTH
def test_a_tensor_hook_on_the_unused_sibling_of_a_split_receives_none(put):
    """Only the first part is used; the hook on the second is called, with None."""
    x, seen = leaf(4), []
    first, second = x.split(2)
    put(first, lambda grad: seen.append(("first", grad.tolist())), "grad")
    put(second, lambda grad: seen.append(("second", grad)), "grad")
    first.sum().backward()
    assert sorted(seen) == [("first", [1.0, 1.0]), ("second", None)]
    assert x.grad.tolist() == [1.0, 1.0, 0.0, 0.0]


@BOTH
def test_a_tensor_changed_in_place_after_registration_leaves_the_hook_with_the_value_before(put):
    """The hook sees the gradient of the version it was put on."""
    x, seen = leaf(3), []
    tensor = x * 1
    put(tensor, lambda grad: seen.append(("before", grad.tolist())), "grad")
    tensor.mul_(5)
    put(tensor, lambda grad: seen.append(("after", grad.tolist())), "grad")
    tensor.sum().backward()
    assert seen == [("after", [1.0] * 3), ("before", [5.0] * 3)]


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


@PLACES
def test_a_hook_removed_between_forward_and_backward_does_not_fire_and_removal_can_be_repeated(kind, computed):
    """Removal is immediate for every kind; a neighbour stays."""
    tensor, loss = tensor_or_leaf(computed)
    events = []
    gone, _ = by_hookline(tensor, logger(events, "gone"), kind)
    by_hookline(tensor, logger(events, "stays"), kind)
    gone.remove()
    gone.remove()
    loss.backward()
    assert events == ["stays"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_added_between_forward_and_backward_fires_in_the_coming_pass(kind):
    """These hooks belong to the tensor and not to a call, so, unlike a module's, they need no new forward."""
    tensor, loss = tensor_or_leaf(computed=False)
    events = []
    by_hookline(tensor, logger(events, "fired"), kind)
    loss.backward(retain_graph=True)
    by_hookline(tensor, logger(events, "late"), kind)
    loss.backward()
    assert events == ["fired", "fired", "late"]


@PLACES
def test_hooks_that_come_and_go_while_one_fires_do_not_affect_the_pass(kind, computed):
    """The pass uses a snapshot: what is removed still has its turn, what is added begins with the next."""
    tensor, loss = tensor_or_leaf(computed)
    events, handles = [], {}

    def meddle(*_):
        events.append("meddle")
        if "later" in handles:
            handles.pop("later").remove()
            handles.pop("itself").remove()
            by_hookline(tensor, logger(events, "added"), kind)

    handles["itself"], _ = by_hookline(tensor, meddle, kind)
    handles["later"], _ = by_hookline(tensor, logger(events, "later"), kind)
    loss.backward(retain_graph=True)
    assert events == ["meddle", "later"]
    loss.backward()
    assert events == ["meddle", "later", "added"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_is_a_context_manager_that_takes_the_hook_off_also_when_the_body_raises(kind):
    """After the block the pass is silent, and torch's own dictionaries on the leaf are empty."""
    weight, events = leaf(3), []

    def body():
        with by_hookline(weight, logger(events, "fired"), kind)[0]:
            (weight**2).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    (weight**2).sum().backward()
    assert events == ["fired"]
    assert not weight._backward_hooks
    assert not weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_a_backward_hook_comes_out_and_leaves_accumulated_gradients_in_place(kind):
    """As in torch: what had accumulated before the hook raised stays, and the next pass is right."""
    x, late = leaf(3), leaf(3, seed=2)
    handles = []

    def fail(*_):
        raise ZeroDivisionError("from the hook")

    handles.append(by_hookline(x, fail, kind)[0])
    hidden = x * 2  # the node of `late` is newer, so the engine runs it first
    loss = (hidden + late * 3).sum()
    with pytest.raises(ZeroDivisionError, match="from the hook"):
        loss.backward()
    assert late.grad.tolist() == [3.0] * 3
    handles[0].remove()
    x.grad = late.grad = None
    (x * 2 + late * 3).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert late.grad.tolist() == [3.0] * 3


def test_copies_and_files_of_a_hooked_model_carry_no_hook_and_give_no_warning(recwarn):
    """deepcopy, torch.save and a pickled tensor drop tensor and post-accumulate hooks silently."""
    model, events = nn.Linear(3, 3), []
    hl.attach(model, "*", logger(events, "param_grad"), on="param_grad")
    hl.attach_tensor(model.weight, logger(events, "grad"))
    duplicate = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for other in (duplicate, loaded):
        other(leaf(2, 3)).sum().backward()
        hl.assert_no_hooks(other, foreign=True)
    assert events == []
    assert not recwarn.list
    model(leaf(2, 3)).sum().backward()
    assert Counter(events) == {"param_grad": 2, "grad": 1}


def test_neither_hook_nor_handle_keeps_a_graph_alive():
    """A forgotten tensor goes at once, without the collector, with its hooks on and their handles kept."""
    gc.disable()
    try:
        x = leaf(3)
        tensor = x * 2
        gone = weakref.ref(x)  # which the graph of `tensor` holds
        handles = [
            hl.attach_tensor(tensor, lambda grad: None),
            hl.attach_node(tensor, lambda grads: None),
            hl.attach_tensor([tensor, x], lambda grads: None),
        ]
        del tensor, x
        assert gone() is None
        assert len(handles) == 3
    finally:
        gc.enable()


@BOTH
def test_a_backward_that_is_told_its_inputs_fires_the_hooks_of_those_alone(put):
    """backward(inputs=[a]) leaves b's gradient, and its hooks, out."""
    a, b, events = leaf(3), leaf(3, seed=2), []
    kept = [put(t, logger(events, (name, kind)), kind) for name, t in (("a", a), ("b", b)) for kind in KINDS]
    (a * b).sum().backward(inputs=[a])
    assert len(kept) == 8
    assert events == [("a", "grad"), ("a", "pre"), ("a", "param_grad"), ("a", "post")]
    assert b.grad is None


@BOTH
@pytest.mark.parametrize("kind", ["grad", "pre", "post"])
def test_a_hook_put_on_upstream_in_the_middle_of_a_pass_still_fires_in_it(put, kind):
    """The pass has not come by there yet."""
    x, events, kept = leaf(3), [], []
    middle = x * 2
    last = middle * 3
    put(last, lambda grad: kept.append(put(middle, logger(events, kind), kind)), "grad")
    last.sum().backward()
    assert events == [kind]


@BOTH
def test_a_sparse_gradient_comes_to_hooks_as_it_is(put):
    """An embedding with sparse=True hands its weight a sparse gradient, and so to every hook on it."""
    table, layouts, kept = nn.Embedding(5, 2, sparse=True), [], []
    kept += [put(table.weight, lambda grad: layouts.append(grad.layout), "grad")]
    kept += [put(table.weight, lambda grads: layouts.append(grads[0].layout), "pre")]
    kept += [put(table.weight, lambda parameter: layouts.append(parameter.grad.layout), "param_grad")]
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert layouts == [torch.sparse_coo] * 3
    assert len(kept) == 3


# -- S3: several tensors together -------------------------------------------------------------------------


def multi_by_torch(tensors, hook, mode):
    return register_multi_grad_hook(tensors, hook, mode=mode)


def multi_by_hookline(tensors, hook, mode):
    return hl.attach_tensor(tensors, hook, mode=mode)


BOTH_MULTI = pytest.mark.parametrize("put", [multi_by_torch, multi_by_hookline], ids=["torch", "hookline"])


@BOTH_MULTI
def test_a_hook_on_all_of_several_tensors_waits_for_those_the_pass_reaches(put):
    """Called once per pass, with the gradients in the given order and None for what this pass does not reach."""
    a, b, unused, seen = leaf(2), leaf(2, seed=2), leaf(2, seed=3), []
    product = a * b
    handle = put([a, product, unused, b], lambda grads: seen.append(tuple(grads)), "all")
    for _ in range(2):
        product.sum().backward(retain_graph=True)
    handle.remove()
    product.sum().backward()
    assert len(seen) == 2
    for grads in seen:
        assert torch.equal(grads[0], b.detach())
        assert torch.equal(grads[1], torch.ones(2))
        assert grads[2] is None
        assert torch.equal(grads[3], a.detach())


@BOTH_MULTI
def test_a_hook_on_any_of_several_tensors_gets_the_first_gradient_alone(put):
    """The one nearest the loss comes first; those that need no gradient are left out."""
    x, seen = leaf(2), []
    middle = x * 2
    last = middle * 3
    handle = put([x, middle, torch.ones(2), last], lambda grad: seen.append(grad.tolist()), "any")
    (last * 5).sum().backward(retain_graph=True)
    assert seen == [[5.0, 5.0]]
    middle.sum().backward(retain_graph=True)
    assert seen == [[5.0, 5.0], [1.0, 1.0]]
    handle.remove()
    last.sum().backward()
    assert len(seen) == 2


@BOTH_MULTI
def test_a_pass_inside_a_pass_is_a_pass_of_its_own(put):
    """A hook that runs another backward: the inner pass brings one gradient, the outer both."""
    a, b, seen = leaf(2), leaf(2, seed=2), []
    product = a * b

    def backward_again(grad):
        with torch.enable_grad():
            (a * 5).sum().backward()

    product.register_hook(backward_again)
    put([a, b], lambda grads: seen.append([grad is not None for grad in grads]), "all")
    product.sum().backward()
    assert seen == [[True, False], [True, True]]


def test_gradients_that_are_only_computed_reach_a_hook_on_several_leaves():
    """torch refuses autograd.grad there; ours is shown what was asked for, and None for the rest."""
    a, b, seen = leaf(2), leaf(2, seed=2), []
    with hl.attach_tensor([a, b], lambda grads: seen.append([grad is not None for grad in grads])):
        torch.autograd.grad((a * b).sum(), [a, b])
        torch.autograd.grad((a * b).sum(), [a])
    assert seen == [[True, True], [True, False]]


@pytest.mark.parametrize("mode", ["all", "any"])
def test_several_tensors_of_which_none_can_have_a_gradient_are_refused(mode):
    """For "all", one is enough, and the message says which; torch has a bare AssertionError."""
    with pytest.raises(hl.errors.UnhookableError, match="no gradient"):
        hl.attach_tensor([torch.ones(2), torch.ones(2)], lambda grads: None, mode=mode)
    if mode == "all":
        with pytest.raises(hl.errors.UnhookableError, match="position"):
            hl.attach_tensor([leaf(2), torch.ones(2)], lambda grads: None)


def test_a_bad_mode_is_a_value_error_that_names_both():
    """As in torch, but it says what there is."""
    with pytest.raises(ValueError, match="mode"):
        register_multi_grad_hook([leaf(2)], print, mode="some")
    with pytest.raises(ValueError, match=r"'all' or 'any'.*'some'"):
        hl.attach_tensor([leaf(2)], lambda grads: None, mode="some")


# -- S3: nodes ----------------------------------------------------------------------------------------------


@BOTH
def test_node_hooks_get_and_give_the_gradients_of_the_node(put):
    """pre: (grad_outputs); post: (grad_inputs, grad_outputs); tuples returned replace the first."""
    a, b, seen, kept = leaf(3), leaf(3, seed=2), [], []
    product = a * b

    def pre(grad_outputs):
        seen.append(("pre", [grad.tolist() for grad in grad_outputs]))
        return (grad_outputs[0] * 2,)

    def post(grad_inputs, grad_outputs):
        seen.append(("post", [grad.tolist() for grad in (*grad_inputs, *grad_outputs)]))
        return (grad_inputs[0] * 10, None)

    kept += [put(product, pre, "pre"), put(product, post, "post")]
    product.sum().backward()
    two = [2.0] * 3
    assert seen == [("pre", [[1.0] * 3]), ("post", [(2 * b).tolist(), (2 * a).tolist(), two])]
    torch.testing.assert_close(a.grad, 20 * b.detach())
    assert b.grad is None


@BOTH
def test_the_post_hook_of_a_leafs_node_has_no_grad_inputs(put):
    """AccumulateGrad is where gradients end: grad_inputs is the empty tuple."""
    weight, seen = leaf(3), []
    kept = put(weight, lambda grad_inputs, grad_outputs: seen.append((grad_inputs, len(grad_outputs))), "post")
    (weight * 2).sum().backward()
    assert seen == [((), 1)]
    assert kept


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_node_hooks_that_return_a_wrong_number_or_type_raise_and_are_named(kind):
    """torch wants tuples of the exact length too; ours says which hook it was."""

    def returns_too_many(*grads):
        return (*grads[0], *grads[0])

    def returns_text(*grads):
        return "nonsense"

    for hook in (returns_too_many, returns_text):
        for put in (by_torch, by_hookline):
            tensor, loss = tensor_or_leaf(computed=True)
            kept = put(tensor, hook, kind)
            with pytest.raises((RuntimeError, TypeError)) as caught:
                loss.backward()
            assert kept
            if put is by_hookline:
                assert isinstance(caught.value, hl.errors.HookReturnError)
                assert hook.__name__ in str(caught.value)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_node_that_already_ran_is_refused_with_the_way_out(kind):
    """What it kept is freed, so no hook there would ever fire; with retain_graph=True it can run again."""
    _, loss = tensor_or_leaf(computed=True)
    node = loss.grad_fn.next_functions[0][0]
    loss.backward(retain_graph=True)
    hl.attach_node(node, lambda *grads: None, on=kind).remove()
    loss.backward()
    with pytest.raises(hl.errors.UnhookableError, match="retain_graph"):
        hl.attach_node(node, lambda *grads: None, on=kind)


@pytest.mark.parametrize("given", [None, 3, nn.Linear(1, 1), torch.ones(2)], ids=["None", "int", "module", "no_grad"])
def test_what_has_no_node_is_refused(given):
    """A leaf's own grad_fn is None: the error says to pass the tensor."""
    with pytest.raises(hl.errors.UnhookableError):
        hl.attach_node(given, lambda grads: None)


# -- S2, S3: saved tensors --------------------------------------------------------------------------------


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


def test_a_saved_output_is_packed_without_history_and_shares_its_memory():
    """exp keeps its own result: pack gets it detached, with the same storage, so that no cycle keeps the graph."""
    seen = []
    with hl.saved_tensors(lambda tensor: seen.append(tensor) or tensor, lambda packed: packed):
        output = leaf(3).exp()
    (saved,) = seen
    assert saved.grad_fn is None
    assert not saved.requires_grad
    assert saved.data_ptr() == output.data_ptr()
    output.sum().backward()


def test_the_input_and_the_weight_of_a_linear_are_packed():
    """What autograd keeps of a Linear: the input, and the transposed weight."""
    model, x, shapes = nn.Linear(3, 2), leaf(4, 3), []
    with hl.saved_tensors(lambda tensor: shapes.append(tuple(tensor.shape)) or tensor, lambda packed: packed):
        model(x)
    assert sorted(shapes) == [(3, 2), (4, 3)]


def test_unpack_is_called_once_per_use_and_its_tensor_is_what_the_backward_uses():
    """Two passes over one graph unpack twice; doubling the saved factor doubles the gradient."""
    x, calls = leaf(3), []
    with hl.saved_tensors(lambda tensor: tensor, lambda packed: calls.append(1) or packed * 2) as scope:
        loss = (x * x.detach()).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert scope.packed == 1
    assert scope.unpacked == len(calls) == 2
    torch.testing.assert_close(x.grad, 4 * x.detach())


def test_nested_scopes_use_the_innermost_and_then_the_outer_again():
    """Also with torch's own pair inside ours and ours inside torch's."""
    x, events = leaf(3), []

    def pair(label):
        return (lambda tensor: events.append(label) or tensor), (lambda packed: packed)

    with hl.saved_tensors(*pair("outer")):
        a = x.exp()
        with saved_tensors_hooks(*pair("torch")):
            b = x.exp()
            with hl.saved_tensors(*pair("inner")):
                c = x.exp()
            d = x.exp()
        e = x.exp()
    f = x.exp()
    assert events == ["outer", "torch", "inner", "torch", "outer"]
    (a + b + c + d + e + f).sum().backward()


def test_leaving_scopes_out_of_order_is_an_error_and_spares_the_inner_one():
    """torch would silently pop the wrong pair; ours raises, and the scope that is still open goes on packing."""
    events = []
    outer = hl.saved_tensors(lambda tensor: events.append("outer") or tensor, lambda packed: packed)
    inner = hl.saved_tensors(lambda tensor: events.append("inner") or tensor, lambda packed: packed)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(hl.errors.ScopeError, match="reverse order"):
        outer.__exit__(None, None, None)
    leaf(3).exp()
    assert events == ["inner"]
    inner.__exit__(None, None, None)
    leaf(3).exp()
    assert events == ["inner"]


@pytest.mark.parametrize(
    "pair",
    [(None, lambda p: p), (lambda t: t, None), (lambda: 0, lambda p: p)],
    ids=["no_pack", "no_unpack", "no_argument"],
)
def test_both_functions_of_a_saved_tensor_scope_are_required_and_checked(pair):
    """Refused when the scope is made, not in the middle of a forward."""
    with pytest.raises(hl.errors.HookSignatureError):
        hl.saved_tensors(*pair)


def test_nothing_is_packed_without_gradients():
    """no_grad and inference mode keep nothing, so there is nothing to pack."""
    calls = []
    with hl.saved_tensors(lambda tensor: calls.append(1) or tensor, lambda packed: packed):
        with torch.no_grad():
            leaf(3).exp()
        with torch.inference_mode():
            torch.ones(3).exp()
    assert calls == []


def test_a_pack_function_that_works_in_place_is_stopped():
    """Changing the tensor would change the forward: an error, as in torch."""
    for scope in (saved_tensors_hooks, hl.saved_tensors):
        with pytest.raises(RuntimeError), scope(lambda tensor: tensor.mul_(2), lambda packed: packed):
            leaf(3).exp().sum().backward()


def test_an_unpack_function_has_to_return_a_tensor():
    """The error names the function."""

    def unpacks_nothing(packed):
        return None

    with hl.saved_tensors(lambda tensor: tensor, unpacks_nothing):
        loss = leaf(3).exp().sum()
    with pytest.raises(hl.errors.HookReturnError, match="unpacks_nothing"):
        loss.backward()


def test_a_removed_scope_stops_packing_at_once_and_still_unpacks():
    """remove() inside the block: later tensors are kept as they are; those that were packed come back unpacked."""
    x, unpacked = leaf(3), []
    with hl.saved_tensors(lambda tensor: tensor, lambda packed: unpacked.append(1) or packed) as scope:
        first = x.exp()
        scope.remove()
        scope.remove()
        second = x.exp()
    (first + second).sum().backward()
    assert scope.packed == 1
    assert unpacked == [1]
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())


@REENTRANT
def test_saved_tensor_hooks_around_a_checkpoint_leave_its_gradients_alone(use_reentrant):
    """Checkpointing has a pair of its own inside; gradients equal those of the plain model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    plain, x, y = copy.deepcopy(model), leaf(4, 3), leaf(4, 3)
    with hl.saved_tensors(lambda tensor: tensor.clone(), lambda packed: packed) as scope:
        loss = checkpoint(model, x * 1, use_reentrant=use_reentrant).square().sum()
    loss.backward()
    plain(y * 1).square().sum().backward()
    assert scope.packed > 0
    assert torch.equal(x.grad, y.grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


# -- S3: activation checkpointing ---------------------------------------------------------------------------

COUNTED = {
    "module": lambda model, hook: hl.attach(model, "blocks.#", lambda m, args, out, *, site: hook(site)),
    "leaf module": lambda model, hook: hl.attach(model, nn.Linear, lambda m, args, out, *, site: hook(site)),
    "module pre": lambda model, hook: hl.attach(
        model, "blocks.#", lambda m, args, *, site: hook(site), on="forward_pre"
    ),
    "function": lambda model, hook: hl.attach_function(torch.tanh, lambda fn, i, o: hook(fn), within=model),
    "function pre": lambda model, hook: hl.attach_function(
        torch.tanh, lambda fn, i: hook(fn), within=model, on="forward_pre"
    ),
    "operator": lambda model, hook: hl.attach_function("aten.addmm", lambda fn, i, o: hook(fn), within=model),
    "operator anywhere": lambda model, hook: hl.attach_function("aten.addmm", lambda fn, i, o: hook(fn)),
    "own function anywhere": lambda model, hook: hl.attach_function(Cube, lambda fn, i, o: hook(fn)),
    "own function": lambda model, hook: hl.attach_function(Cube, lambda fn, i, o: hook(fn), within=model),
}


@REENTRANT
@pytest.mark.parametrize("put", COUNTED.values(), ids=COUNTED.keys())
def test_a_counter_that_leaves_recomputes_out_counts_each_logical_forward_once(put, use_reentrant):
    """Whatever of the repetition is seen is marked: what is not has the counts of the plain model."""
    counts = {}
    for mode in (None, use_reentrant):
        marks, model = [], Stack(mode)
        with put(model, lambda site, marks=marks: marks.append(site.recompute)):
            for _ in range(2):
                model(leaf(4, 3)).sum().backward()
        counts[mode] = Counter(marks)
    assert counts[None] == {False: 4}
    assert counts[use_reentrant][False] == 4


@REENTRANT
@pytest.mark.parametrize("name", ["module", "leaf module", "module pre", "operator anywhere", "own function anywhere"])
def test_every_repetition_of_a_forward_is_seen_and_marked(name, use_reentrant):
    """Modules, operators and functions of one's own fire in the backward too; there, each repeats one call."""
    marks, model = [], Stack(use_reentrant)
    with COUNTED[name](model, lambda site: marks.append(site.recompute)):
        for _ in range(2):
            with set_checkpoint_early_stop(False):  # or the last module of a block need not finish
                model(leaf(4, 3)).sum().backward()
    assert marks == [False, False, True, True] * 2


@REENTRANT
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("put", COUNTED.values(), ids=COUNTED.keys())
def test_a_forward_that_no_backward_follows_has_no_recompute(put, use_reentrant):
    """Under no_grad nothing is repeated, so nothing is marked."""
    marks, model = [], Stack(use_reentrant)
    with put(model, lambda site: marks.append(site.recompute)), torch.no_grad():
        model(leaf(4, 3))
    assert marks == [False, False]


@REENTRANT
def test_a_checkpoint_inside_a_checkpoint_marks_every_repetition(use_reentrant):
    """One logical call of the innermost module is unmarked, however often it is repeated."""
    marks, inner = [], nn.Linear(3, 3)
    middle = nn.Sequential(inner, nn.Tanh())

    def outer(x):
        return checkpoint(middle, x, use_reentrant=use_reentrant) * 2

    with hl.attach(inner, lambda m, args, out, *, site: marks.append(site.recompute)):
        checkpoint(outer, leaf(4, 3), use_reentrant=use_reentrant).sum().backward()
    assert marks.count(False) == 1
    assert marks.count(True) >= 1


def test_a_module_called_in_a_plain_backward_pass_is_no_recompute():
    """site.recompute says that checkpointing repeats a forward; a backward may call a module for the first time."""
    inner, marks = nn.Linear(2, 2), []

    class Learned(torch.autograd.Function):
        """Sends a gradient on that a network makes of it."""

        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return inner(grad)

    with hl.attach(inner, lambda m, args, out, *, site: marks.append(site.recompute)):
        Learned.apply(leaf(2, 2)).sum().backward()
    assert marks == [False]


@REENTRANT
def test_the_operators_of_a_checkpointed_backward_are_no_recompute(use_reentrant):
    """Of aten.mm in x @ w: one call in the forward, one that repeats it, and two that the backward itself makes."""
    weight, x, marks = leaf(3, 3), leaf(2, 3, seed=2), []
    with hl.attach_function("aten.mm", lambda fn, i, o: marks.append((fn.recompute, fn.in_backward))):
        checkpoint(lambda x: (x @ weight).tanh(), x, use_reentrant=use_reentrant).sum().backward()
    assert marks == [(False, False), (True, True), (False, True), (False, True)]


@REENTRANT
@pytest.mark.parametrize("target", [torch.tanh, "aten.addmm", Cube], ids=["function", "operator", "own function"])
def test_gradient_hooks_of_functions_in_a_checkpointed_model_fire_once_per_call_or_say_why_not(target, use_reentrant):
    """DESIGN.md promise 3: as often as in the plain model; if not, the warning on removal speaks of checkpointing."""
    fired = {}
    for mode in (None, use_reentrant):
        model, seen = Stack(mode), []
        handle = hl.attach_function(target, logger(seen, "fired"), on="backward", within=model, name="counter")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model(leaf(4, 3)).sum().backward()
            handle.remove()
        fired[mode] = len(seen)
    assert fired[None] == 2
    if fired[use_reentrant] != 2:
        assert any("checkpoint" in str(warning.message) for warning in told), [str(one.message) for one in told]


@REENTRANT
def test_a_function_called_inside_and_outside_a_checkpoint_reports_the_gradients_it_is_documented_to(use_reentrant):
    """Reentrant checkpointing computes gradients in a repetition that function hooks do not see; the other shows it."""
    seen = []

    class Both(Stack):
        def forward(self, x):
            return torch.tanh(super().forward(x))

    model = Both(use_reentrant)
    handle = hl.attach_function(torch.tanh, logger(seen, "fired"), on="backward", within=model, name="counter")
    model(leaf(4, 3)).sum().backward()
    handle.remove()
    assert len(seen) == (1 if use_reentrant else 3)


@REENTRANT
def test_tensor_hooks_put_on_inside_a_checkpointed_block_fire_once_per_backward(use_reentrant):
    """An activation's gradient is one, though the block that attaches runs twice, and it is the plain model's."""
    grads = {}
    for mode in (None, use_reentrant):
        torch.manual_seed(0)
        model, seen = Stack(mode).eval(), []

        def note(module, args, output, seen=seen):
            if output.requires_grad:
                hl.attach_tensor(output, lambda grad: seen.append(grad.clone()))

        with hl.attach(model, "blocks.#.linear", note):
            model(leaf(4, 3)).sum().backward()
        grads[mode] = seen
    assert len(grads[None]) == len(grads[use_reentrant]) == 2
    assert all(torch.equal(a, b) for a, b in zip(grads[None], grads[use_reentrant], strict=True))


@REENTRANT
def test_post_accumulate_hooks_fire_once_per_backward_under_checkpointing(use_reentrant):
    """With the gradients of the plain model, dropout included."""
    results = {}
    for mode in (None, use_reentrant):
        torch.manual_seed(0)
        model, seen = Stack(mode), {}
        names = {parameter: name for name, parameter in model.named_parameters()}

        def note(parameter, names=names, seen=seen):
            seen.setdefault(names[parameter], []).append(parameter.grad.clone())

        with hl.attach(model, "*", note, on="param_grad"):
            model(leaf(4, 3)).sum().backward()
        results[mode] = seen
    assert results[None].keys() == results[use_reentrant].keys()
    for name, (grad,) in results[None].items():
        (other,) = results[use_reentrant][name]
        assert torch.equal(grad, other), name


# -- S2: observe-only, and off ------------------------------------------------------------------------------


def test_observers_of_tensors_nodes_and_leaves_that_return_values_change_nothing():
    """observe=True ignores return values: gradients are bit-identical to a pass without hooks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    plain, x, y, fired = copy.deepcopy(model), leaf(4, 3), leaf(4, 3), []

    def observer(*values):
        fired.append(1)
        return 12345

    hidden = model[0](x)
    for kind in ("grad", "pre", "post"):
        by_hookline(hidden, observer, kind, observe=True)
        by_hookline(x, observer, kind, observe=True)
    hl.attach_tensor([hidden, x], observer)
    hl.attach(model, "*", observer, on="param_grad")
    model[2](model[1](hidden)).square().sum().backward()
    plain(y).square().sum().backward()
    assert len(fired) == 6 + 1 + 4
    assert torch.equal(x.grad, y.grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_under_no_grad_nothing_is_left_that_a_later_backward_would_fire():
    """A forward under no_grad has no tensors to hook; hooks on leaves wait, and an unrelated backward is silent."""
    model, other, events = nn.Linear(3, 2), nn.Linear(3, 2), []
    with hl.attach(model, "*", logger(events, "param_grad"), on="param_grad") as handle:
        with torch.no_grad():
            model(leaf(4, 3))
        other(leaf(4, 3)).sum().backward()
        assert events == []
        handle.remove(quiet=True)


def test_nothing_is_left_when_every_hook_is_removed():
    """Parameters, their torch dictionaries, and the model itself are as before."""
    model, handles = nn.Linear(3, 2), hl.HandleSet()
    x = leaf(4, 3)
    handles.add(hl.attach(model, "*", lambda parameter: None, on="param_grad"))
    for parameter in model.parameters():
        for kind in ("grad", "pre", "post", "param_grad"):
            handles.add(by_hookline(parameter, lambda *grads: None, kind)[0])
    model(x).sum().backward()
    handles.remove()
    handles.remove()
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    hl.assert_no_hooks(model, foreign=True)
    assert hl.attached(model) == []


def test_receipts_count_what_fired():
    """Every attachment, whatever it sits on, says how often it fired."""
    weight, loss = tensor_or_leaf(computed=False)
    handles = [by_hookline(weight, lambda *grads: None, kind)[0] for kind in ("grad", "pre", "post", "param_grad")]
    handles.append(hl.attach_tensor([weight, loss], lambda grads: None))
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert [handle.report().fired for handle in handles] == [3] * 5
    assert all(isinstance(handle, torch.utils.hooks.RemovableHandle) for handle in handles)
