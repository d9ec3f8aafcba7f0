"""Source 002 (PyTorch): torch's semantics where torch is right, and what it promises where it is not.

Each test is one module-level scenario of S3 in ACCEPTANCE.md, or a rule of DESIGN.md §4 and §5 about modules.
Compiled models, tensors, graph nodes and optimizers have files of their own.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import warnings
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

import hookline as hl

FORWARD_KINDS = ["forward_pre", "forward"]
GRADIENT_KINDS = ["backward_pre", "backward"]
RUN_KINDS = [*FORWARD_KINDS, *GRADIENT_KINDS, "full_backward"]
STATE_KINDS = ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
HOOK_DICTS = [
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
]
GLOBAL_DICTS = [
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_hooks_always_called",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
]
EDITING = pytest.mark.parametrize("editing", [False, True], ids=["observing", "editing"])


class Scale(nn.Module):
    """Multiplies by a number; a stand-in for any module whose arithmetic is easy to follow."""

    def __init__(self, factor=5.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Args(nn.Module):
    """Returns the arguments it was called with."""

    def forward(self, *args, **kwargs):
        return args, kwargs


class Broken(nn.Module):
    """A forward that ends with the given exception."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, *args, **kwargs):
        raise self.error


class Fn(nn.Module):
    """A module around any function, so that a test can say in one line what its forward does."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class FrozenPair:
    first: torch.Tensor
    second: torch.Tensor


class NamedPair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class PairOutput(ModelOutput):
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None


def leaf(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def twin(tensor):
    return tensor.detach().clone().requires_grad_()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def logger(events, label):
    def hook(*_):
        events.append(label)

    return hook


def gradient_spy(seen, *, editing=False):
    """A backward hook that keeps what it is shown; as an editor it returns its gradients unchanged."""
    if editing:

        def hook(module, grad_input, grad_output):
            seen.append((grad_input, grad_output))
            return grad_input
    else:

        def hook(module, grad_input, grad_output):
            seen.append((grad_input, grad_output))

    return hook


def assert_same_grads(model, reference):
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), expected in pairs:
        assert torch.equal(parameter.grad, expected.grad), name


def assert_untouched(model):
    """Every hook dictionary of every module is empty, and nothing else of ours is on the instance."""
    plain = vars(nn.Linear(1, 1))
    for name, module in model.named_modules():
        for attribute in HOOK_DICTS:
            assert not getattr(module, attribute), (name, attribute)
        assert module._is_full_backward_hook == plain["_is_full_backward_hook"], name
        assert "_call_impl" not in vars(module), name
        assert "forward" not in vars(module), name
    for attribute in GLOBAL_DICTS:
        assert not getattr(torch_module, attribute), attribute


# -- order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", ["backward", "full_backward"])
def test_global_and_local_hooks_of_every_kind_fire_in_the_documented_order(backward):
    """G.pre, L.pre (prepended first), G.post, L.post; in the backward G.bpre, L.bpre, G.bwd, L.bwd."""
    module, events = nn.Linear(3, 2), []
    kinds = {"pre": "forward_pre", "post": "forward", "bpre": "backward_pre", "bwd": backward}
    for short, kind in kinds.items():
        hl.attach(module, logger(events, f"L.{short}"), on=kind)
        hl.attach(module, logger(events, f"L.{short} prepended"), on=kind, prepend=True)
    everywhere = hl.HandleSet()
    for short, kind in kinds.items():
        everywhere.add(hl.attach_everywhere(logger(events, f"G.{short}"), on=kind))
        everywhere.add(hl.attach_everywhere(logger(events, f"G.{short} prepended"), on=kind, prepend=True))
    with everywhere:
        module(leaf(4, 3)).sum().backward()
    expected = []
    for short in kinds:
        expected += [f"G.{short} prepended", f"G.{short}", f"L.{short} prepended", f"L.{short}"]
    assert events == expected


def test_everywhere_hooks_within_a_model_go_first_and_stay_inside_it():
    """attach_everywhere(within=model) runs before module hooks and does not reach other modules."""
    model, other, events = mlp(), nn.Linear(3, 2), []
    hl.attach(model[0], logger(events, "local"))
    with hl.attach_everywhere(logger(events, "everywhere"), within=model):
        model(leaf(4, 3))
        other(leaf(4, 3))
    assert events == ["everywhere", "local", "everywhere", "everywhere", "everywhere"]


@pytest.mark.parametrize("kind", RUN_KINDS)
def test_prepended_hooks_go_first_and_the_last_prepended_is_the_very_first(kind):
    """prepend=True puts a hook before its own kind's earlier ones, prepended or not, as in torch."""
    module, events = nn.Linear(3, 2), []
    for label, prepend in [("a", False), ("b", True), ("c", True), ("d", False)]:
        hl.attach(module, logger(events, label), on=kind, prepend=prepend)
    module(leaf(4, 3)).sum().backward()
    assert events == ["c", "b", "a", "d"]


@pytest.mark.parametrize("kind", RUN_KINDS)
def test_observers_run_after_edits_however_they_were_registered(kind):
    """Raw observers, then edits, then observers: registration order and prepend count inside each only."""
    module, events = nn.Linear(3, 2), []
    hl.attach(module, logger(events, "observe"), on=kind, observe=True)
    hl.attach(module, logger(events, "edit"), on=kind)
    hl.attach(module, logger(events, "raw"), on=kind, observe=True, sees="raw")
    hl.attach(module, logger(events, "observe first"), on=kind, observe=True, prepend=True)
    hl.attach(module, logger(events, "edit first"), on=kind, prepend=True)
    module(leaf(4, 3)).sum().backward()
    assert events == ["raw", "edit first", "edit", "observe first", "observe"]


def test_forward_observers_see_what_downstream_sees_and_raw_ones_what_there_was():
    """An observer attached before an edit sees the edited value; sees="raw" the unedited one."""
    module, seen, x = Scale(5.0), {}, torch.ones(2)
    hl.attach(module, lambda m, args: seen.update(pre=args[0]), on="forward_pre", observe=True)
    hl.attach(module, lambda m, args: seen.update(raw_pre=args[0]), on="forward_pre", observe=True, sees="raw")
    hl.attach(module, lambda m, args, out: seen.update(post=out), observe=True)
    hl.attach(module, lambda m, args, out: seen.update(raw_post=out), observe=True, sees="raw")
    hl.attach(module, lambda m, args: args[0] + 1, on="forward_pre")
    hl.attach(module, lambda m, args, out: out * 100)
    output = module(x)
    assert torch.equal(seen["raw_pre"], x)
    assert torch.equal(seen["pre"], x + 1)
    assert torch.equal(seen["raw_post"], (x + 1) * 5)
    assert seen["post"] is output
    assert torch.equal(output, (x + 1) * 500)


def test_gradient_observers_see_edited_gradients_and_raw_ones_what_came():
    """The same for gradients: backward_pre edits reach the backward, backward edits reach upstream."""
    module, seen, x = Scale(5.0), {}, leaf(2)
    hl.attach(module, lambda m, go: seen.update(pre=go[0]), on="backward_pre", observe=True)
    hl.attach(module, lambda m, go: seen.update(raw_pre=go[0]), on="backward_pre", observe=True, sees="raw")
    hl.attach(module, lambda m, gi, go: seen.update(post=(gi[0], go[0])), on="backward", observe=True)
    hl.attach(module, lambda m, gi, go: seen.update(raw=(gi[0], go[0])), on="backward", observe=True, sees="raw")
    hl.attach(module, lambda m, go: (go[0] * 2,), on="backward_pre")
    hl.attach(module, lambda m, gi, go: (gi[0] * 100,), on="backward")
    module(x).sum().backward()
    one = torch.ones(2)
    assert torch.equal(seen["raw_pre"], one)
    assert torch.equal(seen["pre"], 2 * one)
    assert torch.equal(seen["raw"][0], 10 * one)
    assert torch.equal(seen["raw"][1], 2 * one)
    assert torch.equal(seen["post"][0], 1000 * one)
    assert torch.equal(seen["post"][1], 2 * one)
    assert torch.equal(x.grad, 1000 * one)


# -- beside other people's hooks --------------------------------------------------------------------------


@pytest.mark.parametrize("foreign_first", [True, False], ids=["foreign_first", "foreign_last"])
@pytest.mark.parametrize("prepend", [False, True], ids=["appended", "prepended"])
@pytest.mark.parametrize("through", ["model", "child"])
def test_our_edits_run_before_foreign_hooks_and_our_observers_after(foreign_first, prepend, through):
    """Whoever came first, and wherever torch was asked to put theirs: ours edit first and observe last.

    Places among pre-hooks are looked after as the model begins; for a child that is called by itself, one call late.
    """
    model, events = nn.Sequential(Scale(), Scale()), []
    child = model[0]

    def foreign():
        child.register_forward_pre_hook(logger(events, "foreign pre"), prepend=prepend)
        child.register_forward_hook(logger(events, "foreign post"), prepend=prepend)

    if foreign_first:
        foreign()
    for short, kind in (("pre", "forward_pre"), ("post", "forward")):
        hl.attach(model, "0", logger(events, f"our {short} observer"), on=kind, observe=True)
        hl.attach(model, "0", logger(events, f"our {short} edit"), on=kind)
    if not foreign_first:
        foreign()
    if through == "child":
        child(torch.ones(2))
        events.clear()
    (model if through == "model" else child)(torch.ones(2))
    assert events == [
        "our pre edit",
        "foreign pre",
        "our pre observer",
        "our post edit",
        "foreign post",
        "our post observer",
    ]


@pytest.mark.parametrize("kind", FORWARD_KINDS)
def test_an_observer_on_the_model_itself_sees_a_foreign_edit_registered_later(kind):
    """The same on the root, in its first call; before the forward, torch has its list in hand, so one call late."""
    module, seen = Scale(1.0), []
    hl.attach(module, lambda m, args, *output: seen.append((output or args)[0]), on=kind, observe=True)
    if kind == "forward_pre":
        module.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    else:
        module.register_forward_hook(lambda m, args, output: output + 1)
    for _ in range(2):
        module(torch.zeros(2))
    first = [0.0, 0.0] if kind == "forward_pre" else [1.0, 1.0]
    assert [value.tolist() for value in seen] == [first, [1.0, 1.0]]


def test_a_foreign_capture_hook_sees_an_ablation_of_ours_attached_late():
    """A permanent capture hook, as transformers keeps them, shows the value after our later edit."""
    model, captured = mlp(), []
    model[0].register_forward_hook(lambda m, args, output: captured.append(output))
    with hl.attach(model, "0", lambda m, args, output: torch.zeros_like(output)):
        model(leaf(4, 3))
    model(leaf(4, 3))
    assert torch.equal(captured[0], torch.zeros(4, 5))
    assert not torch.equal(captured[1], torch.zeros(4, 5))


@EDITING
def test_gradients_of_an_output_that_a_foreign_hook_replaces_are_those_of_the_replacement(editing):
    """A foreign edit of the output, registered after ours, is part of the module as downstream sees it."""
    module, seen, x = Scale(5.0), [], leaf(2)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    module.register_forward_hook(lambda m, args, output: output * 3)
    (module(x) * 2).sum().backward()
    [(grad_input, grad_output)] = seen
    assert torch.equal(grad_output[0], torch.full((2,), 2.0))
    assert torch.equal(grad_input[0], torch.full((2,), 30.0))
    assert torch.equal(x.grad, torch.full((2,), 30.0))


@EDITING
def test_torchs_own_backward_hooks_on_the_same_module_keep_working(editing):
    """A native full backward hook and ours report the same gradients, and ours leave it where it was."""
    module, seen, native, x = nn.Linear(3, 2), [], [], leaf(4, 3)
    handle = hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    module.register_full_backward_hook(lambda m, gi, go: native.append((gi, go)))
    module(x).square().sum().backward()
    assert len(seen) == len(native) == 1
    for ours, theirs in zip(seen[0], native[0], strict=True):
        assert len(ours) == len(theirs) == 1
        assert torch.equal(ours[0], theirs[0])
    handle.remove()
    module(x).square().sum().backward()
    assert (len(seen), len(native)) == (1, 2)


def test_only_our_own_hooks_are_taken_off():
    """Removing ours leaves every foreign hook in every dictionary of the module."""
    module = nn.Linear(3, 2)
    module.register_forward_pre_hook(lambda m, args: None, with_kwargs=False)
    module.register_forward_hook(lambda m, args, kwargs, out: None, with_kwargs=True, always_call=True)
    module.register_full_backward_pre_hook(lambda m, go: None)
    module.register_full_backward_hook(lambda m, gi, go: None)
    module.register_state_dict_pre_hook(lambda m, prefix, keep_vars: None)
    module.register_state_dict_post_hook(lambda m, sd, prefix, metadata: None)
    module.register_load_state_dict_pre_hook(lambda *args: None)
    module.register_load_state_dict_post_hook(lambda m, keys: None)
    before = {name: dict(getattr(module, name)) for name in HOOK_DICTS}
    handles = hl.HandleSet(hl.attach(module, lambda *_: None, on=kind) for kind in RUN_KINDS + STATE_KINDS)
    assert {name: dict(getattr(module, name)) for name in HOOK_DICTS} != before
    handles.remove()
    assert {name: dict(getattr(module, name)) for name in HOOK_DICTS} == before
    assert module._is_full_backward_hook is True
    hl.assert_no_hooks(module)


# -- return values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "args"),
    [
        (7, (7,)),
        ([1, 2], ([1, 2],)),
        ((1, 2), (1, 2)),
        ((), ()),
        (None, ("x",)),
        (0, (0,)),
    ],
    ids=["value", "list", "tuple", "empty", "none", "falsy"],
)
def test_what_a_pre_hook_returns_becomes_the_arguments(returned, args):
    """A value is wrapped, a list is one argument, a tuple is the arguments, () is none, None leaves them."""
    module, native = Args(), Args()
    hl.attach(module, lambda m, args: returned, on="forward_pre")
    native.register_forward_pre_hook(lambda m, args: returned)
    assert module("x", key=1) == (args, {"key": 1}) == native("x", key=1)


def test_a_pre_hook_with_kwargs_replaces_both():
    """With with_kwargs it is shown both and returns (args, kwargs); later hooks see them."""
    module, seen = Args(), []
    hl.attach(module, lambda m, args, kwargs: ((1, 2), {"b": 3}), on="forward_pre", with_kwargs=True)
    hl.attach(module, lambda m, args, kwargs: seen.append((args, kwargs)), on="forward_pre", with_kwargs=True)
    hl.attach(module, lambda m, args, kwargs, out: seen.append((args, kwargs)), with_kwargs=True)
    assert module("x", key=1) == ((1, 2), {"b": 3})
    assert seen == [((1, 2), {"b": 3})] * 2


@pytest.mark.parametrize("bad", [7, (1,), [(), {}], ((), {}, 3), ("args", {}), ((), ["kwargs"])], ids=repr)
def test_a_bad_return_of_a_pre_hook_with_kwargs_raises_and_names_the_hook(bad):
    """Anything but (tuple, dict) is a RuntimeError that names the hook and the module."""
    model = nn.Sequential(Args())
    hl.attach(model, "0", lambda m, args, kwargs: bad, on="forward_pre", with_kwargs=True, name="my_culprit")
    with pytest.raises(RuntimeError, match=r"my_culprit.*'0'") as caught:
        model("x")
    assert isinstance(caught.value, hl.errors.HookReturnError)


def test_a_forward_hook_replaces_the_output_unless_it_returns_none():
    """Falsy outputs count; None keeps what there was; each hook sees the previous one's value."""
    module, seen = Args(), []
    hl.attach(module, lambda m, args, output: 0)
    hl.attach(module, lambda m, args, output: seen.append(output))
    assert module("x") == 0
    assert seen == [0]


def test_hooks_without_kwargs_never_see_them():
    """A kwargs-only call gives a plain hook args == ()."""
    module, seen = Args(), []
    hl.attach(module, lambda m, args: seen.append(args), on="forward_pre")
    hl.attach(module, lambda m, args, output: seen.append(args))
    module(key=1)
    assert seen == [(), ()]


@pytest.mark.parametrize("kind", GRADIENT_KINDS)
@pytest.mark.parametrize(
    "bad",
    [
        lambda grads: (),
        lambda grads: (*grads, *grads),
        lambda grads: "junk",
        lambda grads: ("junk",),
        lambda grads: (grads[0][:1],),
        lambda grads: (grads[0].double(),),
    ],
    ids=["too_few", "too_many", "string", "not_a_tensor", "shape", "dtype"],
)
def test_gradients_that_do_not_fit_raise_and_name_the_hook(kind, bad):
    """Wrong count, type, shape or dtype of returned gradients is a RuntimeError that names the hook."""
    module = nn.Linear(3, 2)
    hl.attach(module, lambda m, *grads: bad(grads[0]), on=kind, name="my_culprit")
    with pytest.raises(RuntimeError, match="my_culprit") as caught:
        module(leaf(4, 3)).sum().backward()
    assert isinstance(caught.value, hl.errors.HookReturnError)


def test_edits_of_grad_output_reach_parameters_and_upstream_and_edits_of_grad_input_only_upstream():
    """backward_pre edits change the module's own gradients too; backward edits leave its parameters alone."""
    for kind, weight_factor in (("backward_pre", 4), ("backward", 1)):
        module, x = nn.Linear(3, 2), leaf(4, 3)
        reference, x_reference = copy.deepcopy(module), twin(x)
        hl.attach(module, lambda m, *grads: tuple(g * 4 for g in grads[0]), on=kind)
        module(x).sum().backward()
        reference(x_reference).sum().backward()
        assert torch.equal(x.grad, x_reference.grad * 4)
        assert torch.equal(module.weight.grad, reference.weight.grad * weight_factor)
        assert torch.equal(module.bias.grad, reference.bias.grad * weight_factor)


def test_gradient_edits_of_several_inputs_and_outputs_each_reach_their_own():
    """With two inputs and two outputs, each returned gradient goes to its own tensor."""
    module = Fn(lambda a, b: (a * 2, b * 3))
    a, b = leaf(2), leaf(2, seed=2)
    hl.attach(module, lambda m, go: (go[0] * 10, go[1] * 100), on="backward_pre")
    hl.attach(module, lambda m, gi, go: (gi[0] + 1, gi[1] + 2), on="backward")
    first, second = module(a, b)
    (first + second).sum().backward()
    assert torch.equal(a.grad, torch.full((2,), 21.0))
    assert torch.equal(b.grad, torch.full((2,), 302.0))


def test_none_in_place_of_a_gradient_cuts_it():
    """A backward hook that returns (None,) lets nothing through: an optimizer step moves nothing upstream."""
    model = mlp()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hl.attach(model, "2", lambda m, gi, go: (None,), on="backward")
    model(leaf(4, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]


# -- outputs and inputs of any structure ------------------------------------------------------------------

STRUCTURES = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"first": a, "second": b},
    "namedtuple": NamedPair,
    "dataclass": Pair,
    "frozen_dataclass": FrozenPair,
    "model_output": lambda a, b: PairOutput(first=a, second=b),
    "nested_tuple": lambda a, b: (a, (b, "text")),
    "nested_mix": lambda a, b: {"x": [a], "y": ({"z": b}, None)},
}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


@EDITING
@pytest.mark.parametrize("structure", STRUCTURES)
def test_backward_hooks_yield_the_gradient_of_each_tensor_of_a_structured_output(structure, editing):
    """Whatever holds the outputs, each of its tensors has its gradient reported, and its type is kept."""
    make, seen, pre, x = STRUCTURES[structure], [], [], leaf(2)
    module = Fn(lambda x: make(x * 2, x * 3))
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    hl.attach(module, lambda m, grad_output: pre.append(grad_output), on="backward_pre")
    output = module(x)
    assert type(output) is type(make(x, x))
    first, second = tensors_in(output)
    assert torch.equal(first, x * 2)
    assert torch.equal(second, x * 3)
    (first * 10 + second * 100).sum().backward()
    [(grad_input, grad_output)] = seen
    grads = [grad for grad in grad_output if grad is not None]
    assert [grad.tolist() for grad in grads] == [[10.0, 10.0], [100.0, 100.0]]
    assert [grad.tolist() for grad in grad_input] == [[320.0, 320.0]]
    assert [grad.tolist() for grad in x.grad] == [320.0, 320.0]
    assert [grad for grad in pre[0] if grad is not None] == grads


@EDITING
@pytest.mark.parametrize("structure", STRUCTURES)
def test_an_output_that_the_loss_does_not_use_has_no_gradient_and_does_not_silence_the_other(structure, editing):
    """If only one of two outputs is used, the hook fires once, with None for the other."""
    make, seen, x = STRUCTURES[structure], [], leaf(2)
    module = Fn(lambda x: make(x * 2, x * 3))
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    _, second = tensors_in(module(x))
    second.sum().backward()
    [(grad_input, grad_output)] = seen
    assert grad_output[0] is None
    assert [grad.tolist() for grad in grad_output if grad is not None] == [[1.0, 1.0]]
    assert [grad.tolist() for grad in grad_input] == [[3.0, 3.0]]


def test_a_hook_is_told_which_tensor_each_gradient_belongs_to():
    """site.inputs and site.outputs name the gradients: positions, keys and paths."""
    names = []

    def hook(module, grad_input, grad_output, *, site):
        names.append((site.inputs, site.outputs))
        assert len(site.inputs) == len(grad_input)
        assert len(site.outputs) == len(grad_output)

    module = Fn(lambda x, *, mask: {"logits": x * mask, "extra": (x,)})
    hl.attach(module, hook, on="backward")
    module(leaf(2), mask=leaf(2, seed=2))["logits"].sum().backward()
    assert names == [(("0", "mask"), ("logits", "extra.0"))]


@EDITING
@pytest.mark.parametrize("produced", [False, True], ids=["leaf", "non_leaf"])
def test_a_kwargs_only_call_reports_the_gradients_of_its_inputs(editing, produced):
    """Keyword inputs are inputs: each has its gradient, in the order of the call."""
    a, b, seen = leaf(2), leaf(2, seed=2), []
    module = Fn(lambda *, a, b: a * 2 + b * 3)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    given = {"a": a * 1, "b": b * 1} if produced else {"a": a, "b": b}
    module(**given).sum().backward()
    [(grad_input, grad_output)] = seen
    assert [grad.tolist() for grad in grad_input] == [[2.0, 2.0], [3.0, 3.0]]
    assert [grad.tolist() for grad in grad_output] == [[1.0, 1.0]]
    assert (a.grad.tolist(), b.grad.tolist()) == ([2.0, 2.0], [3.0, 3.0])


@EDITING
@pytest.mark.parametrize("produced", [False, True], ids=["leaf", "non_leaf"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_inputs_inside_containers_report_their_gradients(structure, editing, produced):
    """A container as argument: its tensors' gradients are reported, and the forward is given its type."""
    a, b, seen, types = leaf(2), leaf(2, seed=2), [], []

    def forward(box):
        types.append(type(box))
        first, second = tensors_in(box)
        return first * 2 + second * 3

    module = Fn(forward)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    box = STRUCTURES[structure](a * 1, b * 1) if produced else STRUCTURES[structure](a, b)
    module(box).sum().backward()
    assert types == [type(box)]
    assert [grad.tolist() for grad in seen[0][0] if grad is not None] == [[2.0, 2.0], [3.0, 3.0]]
    assert (a.grad.tolist(), b.grad.tolist()) == ([2.0, 2.0], [3.0, 3.0])


def test_everywhere_gradient_hooks_see_a_kwargs_only_call_from_the_first_one_on():
    """A process-wide backward hook reports the very first call of a module, kwargs included."""
    a, b, seen = leaf(2), leaf(2, seed=2), []
    module = Fn(lambda *, a, b: a * 2 + b * 3)
    with hl.attach_everywhere(gradient_spy(seen), on="backward"):
        module(a=a, b=b).sum().backward()
    [(grad_input, _)] = seen
    assert [grad.tolist() for grad in grad_input] == [[2.0, 2.0], [3.0, 3.0]]


# -- gradients that disturb nothing -----------------------------------------------------------------------


@EDITING
def test_an_unused_leaf_input_keeps_its_grad_none(editing):
    """b goes in and is not used: b.grad is None after the backward, and its entry of grad_input is None."""
    a, b, seen = leaf(2), leaf(2, seed=2), []
    module = Fn(lambda a, b: a * 2)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    module(a, b).sum().backward()
    assert b.grad is None
    [(grad_input, _)] = seen
    assert torch.equal(grad_input[0], torch.full((2,), 2.0))
    assert grad_input[1] is None


@EDITING
def test_an_unused_non_leaf_input_leaves_its_producer_without_a_gradient(editing):
    """The same for an input that a layer made: that layer's parameters keep grad None."""
    producer, seen = nn.Linear(3, 2), []
    module = Fn(lambda a, b: a * 2)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    module(leaf(4, 2), producer(leaf(4, 3))).sum().backward()
    assert producer.weight.grad is None
    assert seen[0][0][1] is None


@EDITING
@pytest.mark.parametrize("produced", [False, True], ids=["leaf", "non_leaf"])
def test_a_residual_input_reports_the_modules_own_share(editing, produced):
    """For x + 5x the hook reports 5, its own share, and the input still ends up with 6."""
    module, seen, x = Scale(5.0), [], leaf(3)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    hidden = x * 1 if produced else x
    (module(hidden) + hidden).sum().backward()
    [(grad_input, _)] = seen
    assert torch.equal(grad_input[0], torch.full((3,), 5.0))
    assert torch.equal(x.grad, torch.full((3,), 6.0))


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


@EDITING
def test_an_edit_of_a_residual_input_touches_the_modules_share_alone(editing):
    """Doubling grad_input of the module in x + 5x gives 11, not 12: the skip path is not the module's."""
    module, x = Scale(5.0), leaf(3)
    hl.attach(module, lambda m, gi, go: (gi[0] * 2,) if editing else None, on="backward")
    hidden = x * 1
    (module(hidden) + hidden).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 11.0 if editing else 6.0))


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


@EDITING
@pytest.mark.parametrize("structure", STRUCTURES)
def test_in_place_operations_on_one_of_several_outputs_stay_legal_and_are_reported(structure, editing):
    """out[0].mul_(2) on a hooked module's output: gradients as without the hook, and all of them reported."""
    make, seen, x = STRUCTURES[structure], [], leaf(2)
    module = Fn(lambda x: make(x * 2, x * 3))
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    first, second = tensors_in(module(x))
    first.mul_(7)
    (first * 10 + second * 100).sum().backward()
    assert x.grad.tolist() == [440.0, 440.0]
    [(grad_input, grad_output)] = seen
    grads = [grad.tolist() for grad in grad_output if grad is not None]
    assert grads == [[70.0, 70.0], [100.0, 100.0]]
    assert [grad.tolist() for grad in grad_input] == [[440.0, 440.0]]


@EDITING
def test_a_module_that_works_in_place_on_its_input_reports_its_gradients(editing):
    """ReLU(inplace=True) itself hooked, behind a Linear: same gradients as without hooks, and reported."""
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
    hl.attach(model, "1", gradient_spy(seen, editing=editing), on="backward")
    model(x).square().sum().backward()
    assert_same_grads(model, reference)
    assert torch.equal(x.grad, x_reference.grad)
    [(grad_input, grad_output)] = seen
    assert torch.equal(grad_output[0], active.grad)
    assert torch.equal(grad_input[0], hidden.grad)


def test_an_edit_reaches_upstream_of_a_module_that_works_in_place():
    """Four times grad_input of a hooked ReLU(inplace=True) is four times the gradients of the layer before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    reference, x = copy.deepcopy(model), leaf(6, 3)
    hl.attach(model, "1", lambda m, gi, go: (gi[0] * 4,), on="backward")
    model(x).sum().backward()
    reference(twin(x)).sum().backward()
    assert torch.equal(model[0].weight.grad, reference[0].weight.grad * 4)
    assert torch.equal(model[2].weight.grad, reference[2].weight.grad)


@EDITING
def test_an_in_place_operation_after_a_pass_through_module_stays_legal(editing):
    """x goes through a module that returns it and is then changed in place: reported once, gradients right."""
    module, seen, x = Fn(lambda x: x), [], leaf(2)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    out = module(x * 3)
    out.mul_(5)
    out.sum().backward()
    assert x.grad.tolist() == [15.0, 15.0]
    [(grad_input, grad_output)] = seen
    assert grad_output[0].tolist() == [5.0, 5.0]
    assert grad_input[0].tolist() == [5.0, 5.0]


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


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_under_checkpointing_the_recomputed_forward_is_marked(use_reentrant):
    """Each logical forward has one firing that is no recompute; the repeated one says so on its site."""
    model, x, marks = mlp(), leaf(4, 3), []

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = model

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=use_reentrant) * 1

    outer = Checkpointed()
    hl.attach(outer, "block.0", lambda m, args, out, *, site: marks.append((site.step, site.recompute)))
    for _ in range(2):
        outer(x).sum().backward()
    assert marks == [(0, False), (0, True), (1, False), (1, True)]


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_a_checkpointed_model_counts_its_recompute_as_no_new_step(use_reentrant):
    """If the hooked model itself is checkpointed, its second forward belongs to the step of the first."""
    model, x, moments = mlp(), leaf(4, 3), []
    handle = hl.attach(model, "0", lambda m, args, out, *, site: moments.append((site.step, site.recompute)))
    for _ in range(2):
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert moments == [(0, False), (0, True), (1, False), (1, True)]
    assert handle.report().last_step == 1


@EDITING
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_under_checkpointing_gradient_hooks_fire_once_with_the_right_gradients(use_reentrant, editing):
    """Backward hooks inside a checkpointed block fire once per backward, and all gradients stay the same."""
    model, x, seen = mlp(), leaf(4, 3), []
    reference, x_reference = copy.deepcopy(model), twin(x)

    def hook(module, grad_input, grad_output, *, site):
        grads = [parameter.grad.clone() for parameter in module.parameters()]
        seen.append((site.name, grad_input[0], grad_output[0], grads))
        return grad_input if editing else None

    hl.attach(model, "#", hook, on="backward")
    checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
    hidden = [x_reference]
    for layer in reference:
        hidden.append(layer(hidden[-1]))
        hidden[-1].retain_grad()
    hidden[-1].square().sum().backward()
    assert [name for name, *_ in seen] == ["2", "1", "0"]
    for name, grad_input, grad_output, grads in seen:
        assert torch.equal(grad_input, hidden[int(name)].grad), name
        assert torch.equal(grad_output, hidden[int(name) + 1].grad), name
        for grad, parameter in zip(grads, reference[int(name)].parameters(), strict=True):
            assert torch.equal(grad, parameter.grad), name
    assert_same_grads(model, reference)
    assert torch.equal(x.grad, x_reference.grad)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_under_checkpointing_gradient_hooks_carry_the_index_of_the_logical_call(use_reentrant):
    """A block that is checkpointed twice in one forward meets its backward as call 1, then call 0.

    Reentrant checkpointing only builds a graph when it repeats the forward, and numbers the calls as it does.
    """
    calls, x = [], leaf(2)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Scale(2.0)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=use_reentrant)
            return x

    model = Twice()

    def hook(module, grad_input, grad_output, *, site):
        calls.append((site.step, site.call, grad_output[0].tolist()))

    hl.attach(model, "block", hook, on="backward")
    for _ in range(2):
        model(x).sum().backward()
    first, second = (0, 1) if use_reentrant else (1, 0)
    expected = [(first, [1.0, 1.0]), (second, [2.0, 2.0])]
    assert calls == [(step, *rest) for step in range(2) for rest in expected]


# -- hooks that run however the call ends -----------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("observe", [False, True])
def test_always_call_hooks_run_when_the_forward_raises(error, observe):
    """Each runs once, with output None, whatever the exception, which then goes on as it was."""
    module, seen = Broken(error), []
    for label in "ab":
        hl.attach(
            module, lambda m, args, out, at=label: seen.append((at, args, out)), always_call=True, observe=observe
        )
    hl.attach(module, lambda m, args, out: seen.append("plain"))
    with pytest.raises(type(error)) as caught:
        module(1)
    assert caught.value is error
    assert seen == [("a", (1,), None), ("b", (1,), None)]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("origin", ["our_pre", "our_post", "foreign_pre", "foreign_post"])
def test_always_call_hooks_run_when_another_hook_raises(error, origin):
    """Ours or foreign, before or after the forward: those that had no turn yet run, those that had do not again."""
    module, seen = Scale(5.0), []

    def raiser(*_):
        raise error

    hl.attach(module, lambda m, args, out: seen.append(("first", out)), always_call=True)
    if origin == "our_pre":
        hl.attach(module, raiser, on="forward_pre")
    elif origin == "our_post":
        hl.attach(module, raiser)
    elif origin == "foreign_pre":
        module.register_forward_pre_hook(raiser)
    else:
        module.register_forward_hook(raiser)
    hl.attach(module, lambda m, args, out: seen.append(("last", out)), always_call=True, observe=True)
    with pytest.raises(type(error)) as caught:
        module(2.0)
    assert caught.value is error
    output = 10.0 if origin.endswith("post") else None
    assert seen == [("first", output), ("last", output)]


def test_an_always_call_observer_alone_sees_the_output_when_a_foreign_hook_raises():
    """The forward has come back, so output is its value, with no other hook of ours on the module."""
    module, seen = Scale(5.0), []
    hl.attach(module, lambda m, args, out: seen.append(out), always_call=True, observe=True)
    module.register_forward_hook(lambda m, args, out: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(2.0)
    assert seen == [10.0]


def test_always_call_hooks_see_the_arguments_and_output_so_far():
    """As in torch: edited arguments when the forward raises, the edited output when a later hook does."""
    ours, native = [], []
    for seen, attach in (
        (ours, lambda module, hook, **options: hl.attach(module, hook, **options)),
        (native, lambda module, hook, **options: module.register_forward_hook(hook, **options)),
    ):
        broken, scale = Broken(ValueError("boom")), Scale(5.0)
        if seen is ours:
            hl.attach(broken, lambda m, args: (args[0] + 1,), on="forward_pre")
        else:
            broken.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        attach(broken, lambda m, args, out, seen=seen: seen.append((args, out)), always_call=True)
        with pytest.raises(ValueError, match="boom"):
            broken(1)
        attach(scale, lambda m, args, out: out + 1)
        attach(scale, lambda m, args, out: 1 / 0)
        attach(scale, lambda m, args, out, seen=seen: seen.append((args, out)), always_call=True)
        with pytest.raises(ZeroDivisionError):
            scale(2.0)
    assert native == [((2,), None), ((2.0,), 11.0)]
    assert ours == native


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=repr)
def test_an_error_inside_an_always_call_hook_is_a_warning_and_hides_nothing(error):
    """It is reported with the hook's name; the other cleanups still run and the original exception goes on."""
    module, seen = Broken(error), []
    hl.attach(module, lambda m, args, out: 1 / 0, always_call=True, name="bad_cleanup")
    hl.attach(module, lambda m, args, out: seen.append("ran"), always_call=True)
    with (
        pytest.warns(hl.HooklineWarning, match=r"bad_cleanup.*ZeroDivisionError"),
        pytest.raises(type(error)) as caught,
    ):
        module(1)
    assert caught.value is error
    assert seen == ["ran"]


def test_warnings_turned_into_errors_do_not_hide_the_original_exception():
    """Also under -W error: what the forward raised is what the caller gets."""
    module, error, seen = Broken(ValueError("boom")), None, []
    hl.attach(module, lambda m, args, out: 1 / 0, always_call=True)
    hl.attach(module, lambda m, args, out: seen.append("ran"), always_call=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            module(1)
        except Exception as caught:
            error = caught
    assert error is module.error
    assert seen == ["ran"]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=repr)
def test_always_call_hooks_with_kwargs_get_them_on_the_error_path_too(error):
    """A with_kwargs cleanup is called with the keyword arguments, on the module or on everything."""
    module, seen = Broken(error), []

    def cleanup(m, args, kwargs, output):
        seen.append((args, kwargs, output))

    hl.attach(module, cleanup, always_call=True, with_kwargs=True)
    with pytest.raises(type(error)):
        module(1, key=2)
    assert seen == [((1,), {"key": 2}, None)]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=repr)
def test_everywhere_always_call_hooks_with_kwargs_run_from_the_very_first_call(error):
    """A process-wide cleanup runs, with kwargs, also when the first call of a module is the one that raises."""
    module, seen = Broken(error), []
    with hl.attach_everywhere(
        lambda m, args, kwargs, output: seen.append((args, kwargs, output)), always_call=True, with_kwargs=True
    ):
        for _ in range(2):
            with pytest.raises(type(error)):
                module(1, key=2)
    assert seen == [((1,), {"key": 2}, None)] * 2


def test_always_call_hooks_run_for_the_whole_chain_of_callers():
    """A child's interrupt runs the child's cleanup, then its parents', once each."""
    model, seen = nn.Sequential(nn.Sequential(Broken(KeyboardInterrupt()))), []
    hl.attach(model, "*", lambda m, args, out, *, site: seen.append(site.name), always_call=True)
    with pytest.raises(KeyboardInterrupt):
        model(1)
    assert seen == ["0.0", "0", ""]


def test_always_call_hooks_run_once_and_edit_when_nothing_raises():
    """In a call that goes well it is an ordinary forward hook: one firing, and its return value counts."""
    module, seen = Scale(5.0), []

    def hook(m, args, output):
        seen.append(output)
        return output + 1

    handle = hl.attach(module, hook, always_call=True)
    assert module(2.0) == 11.0
    assert seen == [10.0]
    assert handle.report().fired == 1


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=repr)
def test_a_direct_forward_stays_silent_with_always_call_hooks_on(error):
    """module.forward(x) runs no cleanup, whether it raises or not, also while an outer call is under way."""
    broken, fine, seen = Broken(error), Scale(5.0), []
    for module in (broken, fine):
        hl.attach(module, lambda m, args, out: seen.append(out), always_call=True)
    assert fine.forward(2.0) == 10.0
    with pytest.raises(type(error)):
        broken.forward(1)
    outer = Fn(lambda x: broken.forward(x))
    with pytest.raises(type(error)):
        outer(1)
    assert seen == []


def test_an_always_call_hook_may_remove_itself_and_add_others_on_the_error_path():
    """The error path uses a snapshot too: the added one begins with the next call."""
    module, seen = Broken(ValueError("boom")), []

    def first(m, args, out):
        seen.append("first")
        handle.remove()
        hl.attach(module, logger(seen, "added"), always_call=True)

    handle = hl.attach(module, first, always_call=True)
    hl.attach(module, logger(seen, "second"), always_call=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            module(1)
    assert seen == ["first", "second", "second", "added"]


def test_a_shallow_copy_of_a_module_with_an_always_call_hook_runs_its_own_forward():
    """copy.copy (and a DataParallel replica) shares hooks, as in torch, but computes with its own parameters."""
    module = nn.Linear(3, 2)
    with hl.attach(module, lambda m, args, out: None, always_call=True):
        replica = copy.copy(module)
        replica.__dict__["_parameters"] = {name: p * 0 for name, p in module._parameters.items()}
        assert torch.equal(replica(leaf(4, 3)), torch.zeros(4, 2))


def test_so_it_does_where_something_was_compiled():
    """Then hooked modules carry a mark, which a shallow copy takes along."""
    module = nn.Linear(3, 2)
    with hl.attach(module, lambda m, args, out: None, always_call=True):
        torch.compile(nn.Linear(3, 2), backend="aot_eager")(leaf(4, 3))
        module(leaf(4, 3))
        assert "forward" in vars(module)
        replica = copy.copy(module)
        replica.__dict__["_parameters"] = {name: p * 0 for name, p in module._parameters.items()}
        assert torch.equal(replica(leaf(4, 3)), torch.zeros(4, 2))
        assert "forward" in vars(module)


# -- coming and going -------------------------------------------------------------------------------------


def all_kinds(model, target="*"):
    """A hook of every kind and option on the named modules."""
    handles = [hl.attach(model, target, lambda *_: None, on=kind) for kind in RUN_KINDS + STATE_KINDS]
    options = [{"with_kwargs": True}, {"always_call": True}, {"observe": True}, {"prepend": True}]
    handles += [hl.attach(model, target, lambda *_: None, **option) for option in options]
    return hl.HandleSet(handles)


def test_nothing_is_left_when_every_hook_is_removed():
    """After removal every hook dictionary, flag and global registry is as in a model never touched."""
    model, x = mlp(), leaf(4, 3)
    handles = all_kinds(model)
    everywhere = hl.HandleSet(hl.attach_everywhere(lambda *_: None, on=kind) for kind in RUN_KINDS)
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    everywhere.remove()
    handles.remove()
    assert_untouched(model)
    hl.assert_no_hooks(model, foreign=True)
    assert hl.attached(model) == []


def test_removal_between_forward_and_backward_leaves_nothing_either():
    """The graph of a call made under hooks runs on, and the model is clean before and after it."""
    model, x = mlp(), leaf(4, 3)
    reference, x_reference = copy.deepcopy(model), twin(x)
    handles = all_kinds(model)
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    model.zero_grad()
    x.grad = None
    output = model(x)
    handles.remove()
    assert_untouched(model)
    output.square().sum().backward()
    reference(x_reference).square().sum().backward()
    assert_same_grads(model, reference)
    assert torch.equal(x.grad, x_reference.grad)
    assert_untouched(model)


@pytest.mark.parametrize("kind", RUN_KINDS + STATE_KINDS)
def test_a_handle_works_as_a_context_manager_also_when_the_body_raises(kind):
    """Leaving the block takes the hook off, once; remove() afterwards does nothing."""
    module = nn.Linear(3, 2)
    handle = hl.attach(module, lambda *_: None, on=kind)

    def body():
        with handle as entered:
            assert entered is handle
            assert not handle.removed
            raise ValueError("body")

    with pytest.raises(ValueError, match="body"):
        body()
    assert handle.removed
    handle.remove()
    assert_untouched(module)


def test_attachment_is_all_or_nothing_when_a_module_refuses():
    """If torch refuses one of many modules, none keeps the hook, and the error comes through."""
    model = mlp()
    legacy = model[2].register_backward_hook(lambda m, gi, go: None)
    with pytest.raises(RuntimeError):
        hl.attach(model, "*", lambda m, gi, go: None, on="full_backward")
    legacy.remove()
    model[2]._is_full_backward_hook = None  # torch's own flag, which it never takes back
    assert_untouched(model)
    assert hl.attached(model) == []


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"target": ["0", "nowhere"]}, KeyError),
        ({"target": []}, ValueError),
        ({"target": nn.Linear(1, 1)}, ValueError),
        ({"on": "forwards"}, ValueError),
        ({"on": "backward", "always_call": True}, ValueError),
        ({"on": "backward", "with_kwargs": True}, ValueError),
        ({"on": "state_dict_pre", "observe": True}, ValueError),
        ({"sees": "raw"}, ValueError),
        ({"hook": "not callable"}, TypeError),
        ({"hook": lambda only_one: None}, TypeError),
    ],
    ids=lambda value: "" if isinstance(value, type) else "_".join(value),
)
def test_a_wrong_request_raises_before_anything_is_attached(wrong, error):
    """One bad target of a list, kind, option or hook: the builtin one would guess, ours too, and no hooks."""
    model = mlp()
    request = {"target": "*", "hook": lambda *_: None, "on": "forward", **wrong}
    with pytest.raises(error) as caught:
        hl.attach(model, request.pop("target"), request.pop("hook"), **request)
    assert isinstance(caught.value, hl.HooklineError)
    assert_untouched(model)


@pytest.mark.parametrize("kind", ["register_backward_hook", "backward_hook"])
def test_the_legacy_backward_hook_is_refused_with_a_pointer(kind):
    """The deprecated kind is an error whose message says on='backward'."""
    with pytest.raises(hl.errors.KindError, match="on='backward'"):
        hl.attach(mlp(), lambda m, gi, go: None, on=kind)


@pytest.mark.parametrize("alias", ["forward_post", "backward_post"])
def test_the_source_names_of_the_post_kinds_are_aliases(alias):
    """forward_post is forward and backward_post is backward."""
    handle = hl.attach(mlp(), lambda *_: None, on=alias)
    assert handle.report().kind == alias.removesuffix("_post")
    handle.remove()


def test_a_forgotten_graph_lets_go_of_the_module_and_its_hooks():
    """Outputs, graph and model gone, nothing of ours keeps the module alive, with hooks still attached."""
    model = mlp()
    for kind in GRADIENT_KINDS:
        hl.attach(model, "*", lambda *_: None, on=kind)
    output = model(leaf(4, 3))
    output.sum().backward()
    last = weakref.ref(model[2])
    del model, output
    gc.collect()
    assert last() is None


def test_hooks_on_everything_reach_the_children_of_a_transformer_layer_in_eval():
    """The fused inference path would skip them; with a process-wide hook they are called and seen."""
    layer, names = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), []
    handle = hl.attach_everywhere(lambda m, args, out, *, site: names.append(site.name))
    with torch.no_grad():
        layer(torch.randn(1, 3, 8))
    handle.remove()  # without a warning: nobody who hooks everything waits for the out_proj that torch never calls
    assert {"self_attn", "linear1", "linear2", "norm1", "norm2"} <= set(names)
    assert names[-1] == ""


# -- copies -----------------------------------------------------------------------------------------------


@pytest.fixture
def local_hook():
    """A hook that no pickle could carry, with what it counted."""
    events = []
    return logger(events, "fired"), events


def round_trip_pickle(model):
    return pickle.loads(pickle.dumps(model))


def round_trip_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = pytest.mark.parametrize("make", [copy.deepcopy, round_trip_pickle, round_trip_save])


@COPIES
@pytest.mark.parametrize("kind", RUN_KINDS + STATE_KINDS)
def test_a_copy_made_while_a_hook_is_attached_is_clean(make, kind, local_hook):
    """deepcopy, pickle and torch.save work with local hooks on; the copy has none, the original keeps its own."""
    hook, events = local_hook
    model, x = mlp(), leaf(4, 3)
    handle = hl.attach(model, "*", hook, on=kind)
    copied = make(model)
    assert hl.attached(copied) == []
    copied(x).sum().backward()
    copied.load_state_dict(copied.state_dict())
    assert events == []
    hl.assert_no_hooks(copied, foreign=True)
    assert_untouched(copied)
    assert hl.attached(model) == [handle]
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    assert len(events) == 4
    handle.remove()
    assert_untouched(model)
    copied(x)
    assert len(events) == 4


@COPIES
def test_a_copy_made_under_an_always_call_hook_runs_its_own_forward_and_no_cleanup(make):
    """The copy computes with its own weights, and its errors run no hook of the original's."""
    model, seen, x = mlp(), [], leaf(4, 3)
    hl.attach(model, "*", lambda m, args, out: seen.append(m), always_call=True)
    copied = make(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(copied(x), torch.zeros(4, 2))
    with pytest.raises(RuntimeError):
        copied(leaf(4, 99))
    assert seen == []
    again = make(copied)
    assert torch.equal(again(x), torch.zeros(4, 2))


@COPIES
def test_a_copy_keeps_the_hooks_of_others_and_saves_and_loads_beside_them(make):
    """A foreign state hook next to ours comes along, as in torch, and state_dict() of the copy works."""
    model = mlp()
    for kind in STATE_KINDS:
        hl.attach(model, kind_hook, on=kind)
    model.register_state_dict_pre_hook(kind_hook)
    model.register_state_dict_post_hook(kind_hook)
    model.register_load_state_dict_pre_hook(kind_hook)
    model.register_load_state_dict_post_hook(kind_hook)
    copied = make(model)
    FOREIGN.clear()
    copied.load_state_dict(copied.state_dict())
    assert len(FOREIGN) == 4
    copied.load_state_dict(copied.state_dict())
    assert len(FOREIGN) == 8


FOREIGN = []


def kind_hook(*args):
    """A module-level hook, which a pickle can carry."""
    FOREIGN.append(args)


@COPIES
def test_a_model_is_copied_after_detaching_exactly_as_one_never_hooked(make):
    """Hooks of every kind, a run, removal: the copy equals the original and carries nothing."""
    model, x = mlp(), leaf(4, 3)
    handles = all_kinds(model)
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    handles.remove()
    copied = make(model)
    assert_untouched(copied)
    assert torch.equal(copied(x), model(x))


@COPIES
def test_hooks_can_be_attached_to_a_copy_at_once(make):
    """A copy of a hooked model takes hooks of every kind of its own, which fire there alone."""
    model, ours, theirs, x = mlp(), [], [], leaf(4, 3)
    for kind in RUN_KINDS:
        hl.attach(model, "0", logger(ours, kind), on=kind)
    copied = make(model)
    for kind in RUN_KINDS:
        hl.attach(copied, "0", logger(theirs, kind), on=kind)
    copied(x).sum().backward()
    assert ours == []
    assert sorted(theirs) == sorted(RUN_KINDS)


@COPIES
@pytest.mark.parametrize("switch", ["freeze", "clip"])
def test_a_model_is_copied_without_warnings_while_gradients_are_frozen_or_clipped(make, switch):
    """hl.freeze and hl.clip_gradients do not stand in the way of copies either, which are free of them."""
    model, x = mlp(), leaf(4, 3)
    handles = hl.freeze(model, "0") if switch == "freeze" else hl.clip_gradients(model, "0", value=1e-6)
    copied = make(model)
    (copied(x) * 10).sum().backward()
    handles.remove()
    reference = mlp()
    (reference(twin(x)) * 10).sum().backward()
    assert_same_grads(copied, reference)


# -- clipping and freezing --------------------------------------------------------------------------------


def reference_grads(model, x, scale=100.0):
    clone, x = copy.deepcopy(model), twin(x)
    clone.zero_grad()
    (clone(x) * scale).sum().backward()
    return clone, x


def test_clipping_by_value_bounds_parameters_and_grad_input_of_the_named_module_alone():
    """Both .grad of its parameters and what it sends upstream are within ±value; later layers are untouched."""
    model, x = mlp(), leaf(4, 3)
    reference, _ = reference_grads(model, x)
    sent = []
    with hl.clip_gradients(model, "2", value=0.5):
        hl.attach(model, "2", lambda m, gi, go: sent.append(gi[0]), on="backward", observe=True)
        (model(x) * 100).sum().backward()
    assert torch.equal(model[2].weight.grad, reference[2].weight.grad.clamp(-0.5, 0.5))
    assert torch.equal(model[2].bias.grad, reference[2].bias.grad.clamp(-0.5, 0.5))
    unclipped = torch.full((4, 2), 100.0) @ model[2].weight
    assert unclipped.abs().max() > 0.5
    assert torch.equal(sent[0], unclipped.clamp(-0.5, 0.5))
    # The layer below gets the bounded gradient and is not bounded itself.
    hidden = model[1](model[0](x)).detach()
    expected = (unclipped.clamp(-0.5, 0.5) * (1 - hidden**2)).sum(0)
    torch.testing.assert_close(model[0].bias.grad, expected)


def test_clipping_by_norm_scales_what_is_above_and_leaves_the_rest_bit_identical():
    """A gradient above the norm is scaled down to it; one within it is not touched."""
    model, x = mlp(), leaf(4, 3)
    reference, x_reference = reference_grads(model, x)
    with hl.clip_gradients(model, "0", norm=1.0):
        (model(x) * 100).sum().backward()
    for parameter, before in zip(model[0].parameters(), reference[0].parameters(), strict=True):
        assert before.grad.norm() > 1
        torch.testing.assert_close(parameter.grad, before.grad / before.grad.norm())
    torch.testing.assert_close(x.grad, x_reference.grad / x_reference.grad.norm())
    for parameter, before in zip(model[2].parameters(), reference[2].parameters(), strict=True):
        assert torch.equal(parameter.grad, before.grad)
    model.zero_grad()
    x.grad = None
    reference, x_reference = reference_grads(model, x, scale=1e-3)
    with hl.clip_gradients(model, "0", norm=1.0):
        (model(x) * 1e-3).sum().backward()
    assert_same_grads(model, reference)
    assert torch.equal(x.grad, x_reference.grad)


@pytest.mark.parametrize("bounds", [{}, {"value": 1.0, "norm": 1.0}, {"value": 0.0}, {"norm": -1.0}], ids=repr)
def test_clipping_needs_one_positive_bound(bounds):
    """Neither, both, or a bound that is not positive: a ValueError, and nothing on the model."""
    model = mlp()
    with pytest.raises(ValueError, match="clip_gradients") as caught:
        hl.clip_gradients(model, "*", **bounds)
    assert isinstance(caught.value, hl.HooklineError)
    assert_untouched(model)


def test_clipping_is_all_or_nothing():
    """If a module cannot take the hook, the parameters of the others are not clipped either."""
    model, x = mlp(), leaf(4, 3)
    reference, _ = reference_grads(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model[1] = torch.jit.script(model[1])
    with pytest.raises(hl.errors.UnhookableError):
        hl.clip_gradients(model, ["0", "1"], value=1e-3)
    (model(x) * 100).sum().backward()
    assert_same_grads(model, reference)
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    ],
    ids=["sgd", "adamw"],
)
def test_freezing_keeps_the_named_parameters_and_leaves_gradients_upstream_alone(optimizer):
    """Through momentum and weight decay the frozen layer does not move, and all others get the same gradients."""
    model, x = mlp(), leaf(4, 3)
    reference, x_reference = copy.deepcopy(model), twin(x)
    stepper = optimizer(model.parameters())
    model(x).square().sum().backward()
    reference(x_reference).square().sum().backward()
    stepper.step()  # momentum is in place before the freeze
    reference.load_state_dict(model.state_dict())
    frozen = [parameter.detach().clone() for parameter in model[2].parameters()]
    with hl.freeze(model, "2"):
        stepper.step()
        assert all(torch.equal(p, old) for p, old in zip(model[2].parameters(), frozen, strict=True))
        reference.load_state_dict(model.state_dict())
        stepper.zero_grad()
        reference.zero_grad()
        x.grad = x_reference.grad = None
        model(x).square().sum().backward()
        reference(x_reference).square().sum().backward()
        assert all(parameter.grad is None for parameter in model[2].parameters())
        assert_same_grads(model[0], reference[0])
        assert torch.equal(x.grad, x_reference.grad)
        stepper.step()
    assert all(torch.equal(p, old) for p, old in zip(model[2].parameters(), frozen, strict=True))
    assert not torch.equal(model[0].weight, reference[0].weight)
    stepper.zero_grad()
    model(x).square().sum().backward()
    stepper.step()
    assert not torch.equal(model[2].weight, frozen[0])


def test_clip_and_freeze_leave_nothing_behind():
    """Their handles take everything off again, parameters' hooks included."""
    model, x = mlp(), leaf(4, 3)
    with hl.clip_gradients(model, "*", value=1.0), hl.freeze(model, "0"):
        model(x).sum().backward()
    assert_untouched(model)
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


# -- saving and loading -----------------------------------------------------------------------------------


def test_state_dict_hooks_run_parents_first_before_and_children_first_after():
    """Pre hooks go down the tree, post hooks come up it, on saving and on loading."""
    model, events = nn.Sequential(nn.Sequential(nn.Linear(2, 2))), []
    for kind in STATE_KINDS:

        def hook(module, *args, site):
            events.append((site.kind.value, site.name))

        hl.attach(model, "*", hook, on=kind)
    model.load_state_dict(model.state_dict())
    down, up = ["", "0", "0.0"], ["0.0", "0", ""]
    assert events == [
        *[("state_dict_pre", name) for name in down],
        *[("state_dict_post", name) for name in up],
        *[("load_state_dict_pre", name) for name in down],
        *[("load_state_dict_post", name) for name in up],
    ]


def test_state_dict_hooks_get_torchs_arguments():
    """Each kind is called with what torch hands over; the dictionaries are the real ones and may be changed."""
    model, seen = nn.Sequential(nn.Linear(2, 2)), {}
    hl.attach(model, "0", lambda m, prefix, keep_vars: seen.update(pre=(prefix, keep_vars)), on="state_dict_pre")

    def post(module, state_dict, prefix, local_metadata):
        seen["post"] = sorted(state_dict), prefix, local_metadata
        state_dict[prefix + "extra"] = torch.ones(1)

    def load_pre(module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        seen["load_pre"] = prefix, strict, missing, unexpected, errors
        state_dict.pop(prefix + "extra")

    hl.attach(model, "0", post, on="state_dict_post")
    hl.attach(model, "0", load_pre, on="load_state_dict_pre")
    hl.attach(model, "0", lambda m, keys: seen.update(load_post=list(keys.missing_keys)), on="load_state_dict_post")
    state = model.state_dict(keep_vars=True)
    assert torch.equal(state["0.extra"], torch.ones(1))
    model.load_state_dict(state)
    assert seen == {
        "pre": ("0.", True),
        "post": (["0.bias", "0.weight"], "0.", {"version": 1}),
        "load_pre": ("0.", True, [], [], []),
        "load_post": [],
    }


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_bound_methods_are_state_dict_hooks_of_every_kind(kind):
    """A bound method works (torch's state_dict post hook raises AttributeError for one)."""

    class Owner:
        def __init__(self):
            self.calls = 0

        def hook(self, *args):
            self.calls += 1

    owner, model = Owner(), mlp()
    with hl.attach(model, "*", owner.hook, on=kind):
        model.load_state_dict(model.state_dict())
    assert owner.calls == 4
    model.load_state_dict(model.state_dict())
    assert owner.calls == 4


@pytest.mark.parametrize("kind", STATE_KINDS)
@pytest.mark.parametrize("foreign", [None, "before", "after", "both"])
def test_a_state_dict_hook_may_remove_itself_while_firing(kind, foreign):
    """torch walks these hooks live and dies of it; ours go off, the others run, and nothing of ours is left."""
    module, events = nn.Linear(2, 2), []
    register = getattr(module, f"register_{kind}_hook")
    if foreign in ("before", "both"):
        register(logger(events, "before"))

    def once(*args):
        events.append("once")
        handle.remove()

    handle = hl.attach(module, once, on=kind)
    if foreign in ("after", "both"):
        register(logger(events, "after"))
    for _ in range(2):
        module.load_state_dict(module.state_dict())
    others = [label for label in ("before", "after") if foreign in (label, "both")]
    assert sorted(events) == sorted(["once", *others, *others])
    hl.assert_no_hooks(module)


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_state_dict_hooks_may_add_and_remove_each_other_while_firing(kind):
    """The current call uses a snapshot: the removed one still runs, the added one begins next time."""
    module, events = nn.Linear(2, 2), []

    def first(*args):
        events.append("first")
        later.remove()
        if events.count("first") == 1:
            hl.attach(module, logger(events, "added"), on=kind)

    hl.attach(module, first, on=kind)
    later = hl.attach(module, logger(events, "later"), on=kind)
    for _ in range(2):
        module.load_state_dict(module.state_dict())
    assert events == ["first", "later", "first", "added"]


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_the_return_value_of_a_state_dict_hook_is_ignored(kind):
    """Return values edit only where the kind edits: torch's error for these is no concern of the hook."""
    model = mlp()
    with hl.attach(model, "*", lambda *args: "junk", on=kind) as handle:
        model.load_state_dict(model.state_dict())
        assert handle.report().fired == 4


@pytest.mark.parametrize("key", ["missing_keys", "unexpected_keys"])
def test_clearing_the_incompatible_keys_in_a_load_hook_suppresses_the_strict_error(key):
    """load_state_dict raises without the hook, and goes through with it."""
    model = nn.Sequential(nn.Linear(2, 2))
    state = model.state_dict()
    if key == "missing_keys":
        del state["0.bias"]
    else:
        state["0.other"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"0\."):
        model.load_state_dict(state)
    cleared = []

    def clear(module, incompatible_keys):
        keys = getattr(incompatible_keys, key)
        cleared.extend(keys)
        keys.clear()

    with hl.attach(model, clear, on="load_state_dict_post"):
        model.load_state_dict(state)
    assert cleared == (["0.bias"] if key == "missing_keys" else ["0.other"])
    with pytest.raises(RuntimeError, match=r"0\."):
        model.load_state_dict(state)


# -- torch's own full backward hook -----------------------------------------------------------------------


def test_full_backward_is_torchs_own_with_its_arguments_and_its_edits():
    """on="full_backward" reports and edits exactly as register_full_backward_hook does."""
    ours, native, x = nn.Linear(3, 2), [], leaf(4, 3)
    reference, x_reference, seen = copy.deepcopy(ours), twin(x), []

    def spy(into):
        def hook(module, grad_input, grad_output):
            into.append((grad_input, grad_output))
            return tuple(grad * 2 for grad in grad_input)

        return hook

    hl.attach(ours, spy(seen), on="full_backward")
    reference.register_full_backward_hook(spy(native))
    ours(x).square().sum().backward()
    reference(x_reference).square().sum().backward()
    for mine, theirs in zip(seen[0], native[0], strict=True):
        assert torch.equal(mine[0], theirs[0])
    assert torch.equal(x.grad, x_reference.grad)
    assert_same_grads(ours, reference)


def test_full_backward_edits_chain_and_observers_see_the_last():
    """Two editors compose in order; an observer among them returns nothing and sees the result."""
    module, seen, x = Scale(5.0), [], leaf(2)
    hl.attach(module, lambda m, gi, go: seen.append(gi[0].tolist()), on="full_backward", observe=True)
    hl.attach(module, lambda m, gi, go: (gi[0] * 2,), on="full_backward")
    hl.attach(module, lambda m, gi, go: (gi[0] + 1,), on="full_backward")
    module(x).sum().backward()
    assert seen == [[11.0, 11.0]]
    assert x.grad.tolist() == [11.0, 11.0]


def test_full_backward_leaves_room_for_other_backward_hooks_after_removal():
    """torch keeps a flag for ever that forbids mixing; ours takes it back with the last hook."""
    module = nn.Linear(3, 2)
    hl.attach(module, lambda m, gi, go: None, on="full_backward").remove()
    assert_untouched(module)
    module.register_backward_hook(lambda m, gi, go: None)
    assert module._is_full_backward_hook is False
