"""What hookline takes for granted of torch beyond its public promises; fails when a version changes it.

One part per private name in ``sites/_torch.py``: that it exists, and that it behaves as the code relies on.
"""

from __future__ import annotations

import ast
import copy
import gc
import inspect
import math
import pathlib
import sys
import threading
import types
import weakref
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from helpers_waiting import PATIENCE
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

import hookline
from hookline.sites import _torch
from hookline.sites.kinds import OPTIMIZER


def node_of(tensor: torch.Tensor):
    return tensor.grad_fn


# -- sequence numbers ----------------------------------------------------------------------------------------


def test_the_sequence_number_is_that_of_the_next_node():
    """The number read before an operation is the number its node gets, and it grows by one with each."""
    x = torch.ones(1, requires_grad=True)
    before = _torch.sequence_number()
    y = x * 2
    assert _torch.sequence_number_of(node_of(y)) == before
    z = y + 1
    assert _torch.sequence_number_of(node_of(z)) == before + 1
    assert _torch.sequence_number() == before + 2


def test_reading_the_sequence_number_uses_none_up():
    """It is a look, not a draw."""
    assert _torch.sequence_number() == _torch.sequence_number()


def test_the_accumulator_of_a_leaf_has_a_huge_number():
    """Leaves accumulate as soon as they can, so their number is beyond any that is counted."""
    x = torch.ones(1, requires_grad=True)
    ((accumulator, _),) = node_of(x * 2).next_functions[:1]
    assert type(accumulator).__name__ == "AccumulateGrad"
    assert accumulator._sequence_nr() >= _torch._LEAF_SEQUENCE
    assert _torch._LEAF_SEQUENCE > 2**61


def test_ready_nodes_run_in_falling_order_of_their_numbers():
    """Of several branches that are ready, the youngest node runs first."""
    x = torch.ones(1, requires_grad=True)
    branches = [x * (i + 2) for i in range(5)]
    total = torch.stack(branches).sum()
    ran = []
    for index, branch in enumerate(branches):
        node_of(branch).register_hook(lambda gi, go, index=index: ran.append(index))
    total.backward()
    assert ran == [4, 3, 2, 1, 0]


def test_parameters_have_their_gradients_before_an_older_node_runs():
    """When the producer of a module's input has its turn, the module's parameters are accumulated."""
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True) * 2
    seen = []
    x.register_hook(lambda grad: seen.append(layer.weight.grad is not None and layer.bias.grad is not None))
    layer(x).sum().backward()
    assert seen == [True]


def test_a_tensor_hook_sees_the_complete_gradient():
    """It fires once, when every user of the tensor has sent its share."""
    x = torch.ones(1, requires_grad=True) * 1
    seen = []
    x.register_hook(lambda grad: seen.append(grad.item()))
    (x * 2 + x * 3 + x).sum().backward()
    assert seen == [6]


def test_tensor_hooks_run_in_the_order_they_came():
    """The reason for one tap per tensor."""
    x = torch.ones(1, requires_grad=True) * 1
    log = []
    x.register_hook(lambda grad: log.append("first"))
    x.register_hook(lambda grad: log.append("second"))
    x.sum().backward()
    assert log == ["first", "second"]


def test_numbers_are_counted_per_thread():
    """Another thread begins its own count: numbers compare within a thread only."""
    numbers = []
    thread = threading.Thread(target=lambda: numbers.append(_torch.sequence_number()))
    for _ in range(3):
        torch.ones(1, requires_grad=True) * 2
    thread.start()
    thread.join()
    assert numbers[0] < _torch.sequence_number()


# -- nodes ---------------------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    """A function written in Python."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("make", [lambda x: x * 2, Double.apply, lambda x: x.view_as(x), lambda x: x.unbind()[0]])
def test_metadata_is_a_dictionary_that_lives_as_long_as_the_node(make):
    """What is kept there is found again through any wrapper of the same node."""
    y = make(torch.ones(1, requires_grad=True))
    node_of(y).metadata["hookline.test"] = marker = object()
    gc.collect()
    assert node_of(y).metadata["hookline.test"] is marker
    ((node, _),) = node_of(y * 3).next_functions[:1]
    assert node.metadata["hookline.test"] is marker


@pytest.mark.parametrize("make", [lambda x: x * 2, Double.apply])
def test_a_node_is_found_again_as_an_equal_key(make):
    """The same node reached twice is the same dictionary key."""
    y = make(torch.ones(1, requires_grad=True))
    assert {node_of(y): 1}[node_of(y * 3).next_functions[0][0]] == 1


@pytest.mark.parametrize("make", [lambda x: x * 2, Double.apply])
def test_a_node_hook_gets_what_the_node_sends_and_got(make):
    """``grad_inputs`` line up with ``next_functions``."""
    x = torch.ones(1, requires_grad=True)
    y = make(x)
    seen = []
    node_of(y).register_hook(lambda gi, go: seen.append((gi[0].item(), go[0].item())))
    (y * 5).sum().backward()
    assert len(node_of(y).next_functions) >= 1
    assert seen == [(10, 5)]


def test_boundary_finds_the_nodes_that_lead_to_an_input():
    """Only nodes of the call are walked, and each hit comes with its slot and number."""
    x = torch.ones(2, requires_grad=True) * 1
    other = torch.ones(2, requires_grad=True)
    since = _torch.sequence_number()
    a = x * other
    b = other + a.exp() * x
    found = _torch.boundary([node_of(b)], {node_of(x): {0: 7}}, since)
    assert {(type(node).__name__, *hits) for node, hits in found} == {
        ("MulBackward0", (0, 7)),
        ("MulBackward0", (1, 7)),
    }
    assert _torch.boundary([node_of(b)], {node_of(x): {0: 7}}, _torch.sequence_number()) == []
    assert _torch.boundary([node_of(b)], {node_of(x): {1: 7}}, since) == []


# -- the engine ----------------------------------------------------------------------------------------------


def test_the_task_id_is_minus_one_outside_and_another_in_each_backward():
    """It tells whether, and which, backward pass is running in this thread."""
    assert _torch.graph_task_id() == -1
    ids = []
    for _ in range(2):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: ids.append(_torch.graph_task_id()))
        (x * 2).backward()
    assert -1 not in ids
    assert ids[0] != ids[1]
    assert _torch.graph_task_id() == -1


def test_a_backward_inside_a_backward_has_its_own_task_id():
    """Reentrant passes are told apart, and the outer one comes back."""
    ids = []

    def inner(grad: torch.Tensor) -> None:
        ids.append(_torch.graph_task_id())
        y = torch.ones(1, requires_grad=True)
        y.register_hook(lambda grad: ids.append(_torch.graph_task_id()))
        with torch.enable_grad():
            (y * 2).backward()
        ids.append(_torch.graph_task_id())

    x = torch.ones(1, requires_grad=True)
    x.register_hook(inner)
    (x * 2).backward()
    assert ids[0] == ids[2] != ids[1]


def test_a_queued_callback_runs_when_everything_is_accumulated():
    """It comes after the last accumulation, before backward() returns."""
    x = torch.ones(1, requires_grad=True)
    y = torch.ones(1, requires_grad=True)
    log = []

    def queue(grad: torch.Tensor) -> None:
        _torch.queue_end_of_backward(lambda: log.append((x.grad is not None, y.grad is not None)))

    z = x * 2 + y
    z.register_hook(queue)
    (z * y).backward()
    assert log == [(True, True)]


def test_a_queued_callback_is_dropped_by_a_backward_that_raises():
    """Nothing that was queued runs later, and the engine lets go of it."""

    class Callback:
        ran = 0

        def __call__(self) -> None:
            Callback.ran += 1

    callback = Callback()
    reference = weakref.ref(callback)

    def fail(grad: torch.Tensor) -> None:
        _torch.queue_end_of_backward(reference())
        raise ValueError("mine")

    x = torch.ones(1, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(ValueError, match="mine"):
        (x * 2).backward()
    (torch.ones(1, requires_grad=True) * 2).backward()
    assert Callback.ran == 0
    del callback
    gc.collect()
    assert reference() is None


def test_queueing_outside_of_a_backward_is_an_error():
    """Callbacks belong to a running pass."""
    with pytest.raises(RuntimeError):
        _torch.queue_end_of_backward(lambda: None)


# -- modules -------------------------------------------------------------------------------------------------


def test_a_call_looks_its_implementation_up_on_the_instance():
    """An attribute of that name wraps the whole call, hooks included."""
    model = nn.Identity()
    log = []
    model.register_forward_hook(lambda *args: log.append("hook"))

    def wrapped(*args: object, **kwargs: object) -> object:
        log.append("before")
        result = type(model)._call_impl(model, *args, **kwargs)
        log.append("after")
        return result

    vars(model)[_torch.CALL_IMPL] = wrapped
    model(torch.ones(1))
    assert log == ["before", "hook", "after"]
    del vars(model)[_torch.CALL_IMPL]
    model.forward(torch.ones(1))
    assert log == ["before", "hook", "after"]


def test_every_hook_dictionary_exists_and_none_is_missing():
    """A new dictionary of hooks in torch's Module would be one that find() does not look into."""
    module = nn.Identity()
    known = set(_torch.HOOK_DICTS) | {name for extras in _torch.HOOK_DICTS.values() for name in extras}
    there = {name for name, value in vars(module).items() if name.endswith("_hooks") or isinstance(value, OrderedDict)}
    assert {name for name in there if "hook" in name} == known


def test_hook_dictionaries_are_ordered_dictionaries():
    """They can be reordered in place."""
    module = nn.Identity()
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        assert isinstance(getattr(module, name), OrderedDict)


@pytest.mark.parametrize(
    ("attribute", "register", "options"),
    [
        ("_forward_pre_hooks", "register_forward_pre_hook", {"with_kwargs": True}),
        ("_forward_hooks", "register_forward_hook", {"with_kwargs": True}),
    ],
)
def test_add_torch_hook_does_what_torchs_own_registration_does(attribute, register, options):
    """Same dictionaries, same keys, same values; dropping leaves nothing."""

    def hook(*args: object) -> None:
        """Does nothing."""

    theirs, ours = nn.Identity(), nn.Identity()
    handle = getattr(theirs, register)(hook, **options)
    hook_id = _torch.add_torch_hook(ours, attribute, hook, first=False)
    assert hook_id > handle.id
    assert RemovableHandle.next_id > hook_id
    for name in (attribute, *_torch.HOOK_DICTS[attribute]):
        assert list(getattr(theirs, name).values()) == list(getattr(ours, name).values())
        assert list(getattr(ours, name)) in ([hook_id], [])
    _torch.drop_hook(ours, attribute, hook_id)
    for name in (attribute, *_torch.HOOK_DICTS[attribute]):
        assert not getattr(ours, name)
    _torch.drop_hook(ours, attribute, hook_id)


def test_a_torch_hook_is_placed_first_or_last():
    """Either end of the queue, whatever is there."""
    module = nn.Identity()
    module.register_forward_hook(print)
    last = _torch.add_torch_hook(module, "_forward_hooks", len, first=False)
    first = _torch.add_torch_hook(module, "_forward_hooks", repr, first=True)
    ids = list(module._forward_hooks)
    assert ids[0] == first
    assert ids[-1] == last
    _torch.place_first(module._forward_hooks, last)
    assert next(iter(module._forward_hooks)) == last
    _torch.place_last(module._forward_hooks, last)
    assert list(module._forward_hooks)[-1] == last


def test_hooks_of_lists_every_dictionary_and_unwraps():
    """What was registered comes out, also where torch keeps it in a wrapper."""

    def hook(*args: object) -> None:
        """Does nothing."""

    module = nn.Identity()
    module.register_forward_pre_hook(hook)
    module.register_forward_hook(hook)
    module.register_full_backward_pre_hook(hook)
    module.register_full_backward_hook(hook)
    module.register_state_dict_pre_hook(hook)
    module.register_state_dict_post_hook(hook)
    module.register_load_state_dict_pre_hook(hook)
    module.register_load_state_dict_post_hook(hook)
    found = list(_torch.hooks_of(module))
    assert [attribute for attribute, _, _ in found] == list(_torch.HOOK_DICTS)
    assert all(each is hook for _, _, each in found)


def test_a_full_backward_hook_sets_a_flag_that_stays():
    """torch never takes it back, so we do."""
    module = nn.Identity()
    assert getattr(module, _torch.FULL_BACKWARD_FLAG) is None
    module.register_full_backward_hook(lambda *args: None).remove()
    assert getattr(module, _torch.FULL_BACKWARD_FLAG) is True


def test_a_module_without_hooks_calls_its_forward_straight():
    """torch's own fast path: nothing between the call and the forward."""
    frames = []

    class Looks(nn.Module):
        def forward(self) -> None:
            frame = sys._getframe(1)
            frames.append(frame.f_code.co_name)

    model = Looks()
    model()
    handle = hookline.attach(model, lambda *args: None)
    model()
    handle.remove()
    model()
    assert frames == ["_call_impl", "inner", "_call_impl"]


def test_the_keyword_arguments_are_a_variable_of_the_caller_of_a_global_pre_hook():
    """torch hands a global pre-hook no keywords, but they are there, and changing them changes the call."""
    seen = []

    def outer(module: nn.Module, args: object) -> None:
        middle()

    def middle() -> None:
        # Called at the depth at which ``everywhere`` calls it.
        kwargs = _torch.kwargs_of_call()
        seen.append(dict(kwargs))
        kwargs["b"] = 3

    class Takes(nn.Module):
        def forward(self, *, a: int, b: int) -> tuple[int, int]:
            return a, b

    handle = torch_module.register_module_forward_pre_hook(outer)
    try:
        assert Takes()(a=1, b=2) == (1, 3)
    finally:
        handle.remove()
    assert seen == [{"a": 1, "b": 2}]


def test_in_run_is_true_inside_a_call_or_a_backward_and_false_outside():
    """With and without hooks, in the forward, in a hook, and while gradients flow."""
    seen = []

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(_torch.in_run())
            return x * 1

    model = Asks()
    assert not _torch.in_run()
    model(torch.ones(1))
    model.register_forward_hook(lambda *args: seen.append(_torch.in_run()))
    output = model(torch.ones(1, requires_grad=True))
    assert seen == [True, True, True]
    assert not _torch.in_run()
    output.register_hook(lambda grad: seen.append(_torch.in_run()))
    output.backward()
    assert seen == [True, True, True, True]
    assert not _torch.in_run()


def test_the_caller_of_an_instances_implementation_is_that_instance():
    """What stands in for ``_call_impl`` can tell a shallow copy, which shares it, from the original."""
    seen = []

    def guard(*args: object, **kwargs: object) -> None:
        seen.append(_torch.caller())

    model = nn.Identity()
    vars(model)[_torch.CALL_IMPL] = guard
    twin = copy.copy(model)
    model(torch.ones(1))
    twin(torch.ones(1))
    assert seen[0] is model
    assert seen[1] is twin


def test_the_same_keyword_dictionary_goes_from_pre_hook_to_post_hook():
    """What a pre-hook returns as kwargs is the very object that a post-hook gets."""

    class Marked(dict):
        """Carries something along."""

    model = nn.Identity()
    seen = []
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, Marked(kwargs)), with_kwargs=True)
    model.register_forward_hook(lambda module, args, kwargs, output: seen.append(type(kwargs)), with_kwargs=True)
    model(torch.ones(1))
    assert seen == [Marked]


def test_forward_hooks_are_taken_as_a_snapshot_but_state_hooks_are_walked_live():
    """Why a state hook of ours may not leave in the middle of a walk."""
    model = nn.Identity()
    handles = []
    handles.append(model.register_forward_hook(lambda *args: handles[0].remove()))
    model.register_forward_hook(lambda *args: None)
    model(torch.ones(1))
    state = []
    state.append(model.register_state_dict_pre_hook(lambda *args: state[0].remove()))
    model.register_state_dict_pre_hook(lambda *args: None)
    with pytest.raises(RuntimeError, match="mutated during iteration"):
        model.state_dict()


def test_the_state_hook_dictionary_marks_public_hooks_by_an_attribute():
    """A bound method would not take it, a port does."""

    class Marks:
        def __call__(self, *args: object) -> None:
            """Does nothing."""

    hook = Marks()
    nn.Identity().register_state_dict_post_hook(hook)
    assert hook._from_public_api is True


# -- graph nodes and what they save ------------------------------------------------------------------------------


def test_the_engine_tells_which_nodes_the_running_pass_comes_to():
    """Only those that this backward reaches; it refuses leaves inside of autograd.grad()."""
    x = torch.ones(2, requires_grad=True)
    used, unused = x.sin(), x.cos()
    told = []
    used.register_hook(lambda grad: told.extend(map(_torch.will_execute, (node_of(used), node_of(unused)))))
    used.sum().backward(retain_graph=True)
    assert told == [True, False]
    leaf = torch.autograd.graph.get_gradient_edge(x).node
    used.register_hook(lambda grad: told.append(_torch.will_execute(leaf)))
    used.sum().backward(retain_graph=True)
    assert told[-1] is True
    with pytest.raises(RuntimeError, match="leaf node"):
        torch.autograd.grad(used.sum(), x)


def test_a_handle_of_torchs_leads_to_the_hooks_beside_its_own():
    """For tensors and for nodes, before and after; one dictionary each, until the graph is gone."""
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    for register in (x.register_hook, y.register_hook, node_of(y).register_prehook, node_of(y).register_hook):
        register(len)
        handle = register(print)
        assert _torch.hooks_beside(handle) == [len, print]
    del y, register
    assert _torch.hooks_beside(handle) == []


def test_changing_a_tensor_in_place_leaves_its_hooks_with_the_old_value():
    """The tensor has a new dictionary, so a port is not found again where it no longer belongs."""
    y = torch.ones(2, requires_grad=True) * 2
    y.register_hook(len)
    y.mul_(2)
    assert _torch.hooks_beside(y.register_hook(print)) == [print]


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize(
    "operation",
    [
        torch.sin,
        torch.exp,
        _Keeps.apply,
        lambda x: torch.index_put(x, (torch.tensor([0]),), torch.ones(1)),
        lambda x: torch.nn.functional.nll_loss(x[None], torch.tensor([0])),  # saves a weight that is not given
    ],
    ids=["input", "output", "custom", "list", "optional"],
)
def test_what_a_node_saved_is_there_until_a_backward_frees_it(operation):
    """Also where the graph is retained."""
    y = operation(torch.ones(3, requires_grad=True))
    assert _torch.keeps_saved(node_of(y)) is True
    y.sum().backward(retain_graph=True)
    assert _torch.keeps_saved(node_of(y)) is True
    y.sum().backward()
    assert _torch.keeps_saved(node_of(y)) is False


def test_a_node_that_saved_nothing_says_so():
    """Before and after."""
    y = torch.ones(3, requires_grad=True) + 1
    assert _torch.keeps_saved(node_of(y)) is None
    y.sum().backward()
    assert _torch.keeps_saved(node_of(y)) is None


@pytest.mark.parametrize("packed", [0, None])
def test_asking_what_a_node_saved_unpacks_nothing(packed):
    """Whatever it was packed into, and also after it was freed."""
    asked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed, lambda value: asked.append(value)):
        y = torch.ones(3, requires_grad=True).sin()
    assert _torch.keeps_saved(node_of(y)) is True
    assert asked == []


def test_the_stack_of_hooks_on_saved_tensors_can_be_looked_at_pushed_and_popped():
    """The innermost pair comes back as it was pushed; the stack belongs to the thread."""
    assert _torch.innermost_saved_hooks() is None
    _torch.push_saved_hooks(repr, str)
    try:
        assert _torch.innermost_saved_hooks() == (repr, str)
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(_torch.innermost_saved_hooks()))
        thread.start()
        thread.join()
        assert elsewhere == [None]
    finally:
        _torch.pop_saved_hooks()
    assert _torch.innermost_saved_hooks() is None


def test_torch_hands_a_saved_output_over_with_the_node_that_keeps_it():
    """Why we detach it: a pack function that gives it back makes a ring that nobody sees."""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or 0, lambda value: value):
        y = torch.ones(3, requires_grad=True).exp()
    assert seen[0] is y


def test_a_leafs_accumulating_node_is_made_anew_when_nobody_holds_it():
    """Without its hooks, which is why we hold it."""
    x = torch.ones(2, requires_grad=True)
    fired = []
    torch.autograd.graph.get_gradient_edge(x).node.register_hook(lambda *grads: fired.append(1))
    x.sum().backward()
    assert fired == []


# -- optimizers ----------------------------------------------------------------------------------------------


def make_optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return kind([weight], lr=0.1)


OPTIMIZER_KINDS = [kind.value for kind in OPTIMIZER.args]


def test_every_hook_dictionary_of_an_optimizer_is_known():
    """One per kind, in order of registration, filled by the public call; a new one would be a kind we lack."""
    optimizer = make_optimizer()
    there = {name for name in vars(optimizer) if name.endswith("_hooks")}
    assert there == {f"_optimizer_{kind}_hooks" for kind in OPTIMIZER_KINDS}
    for kind in OPTIMIZER_KINDS:
        handle = getattr(optimizer, f"register_{kind}_hook")(print)
        hooks = _torch.optimizer_hooks(optimizer, kind)
        assert isinstance(hooks, OrderedDict)
        assert hooks == {handle.id: print}
        assert handle.hooks_dict_ref() is hooks
        assert _torch.takes_optimizer_hooks(optimizer, kind)
    assert not _torch.takes_optimizer_hooks(object.__new__(torch.optim.SGD), "step_pre")


@pytest.mark.parametrize("kind", ["step_pre", "step_post"])
def test_an_inner_step_is_told_from_an_outer_one(kind):
    """torch wraps the step of each class in the same code, which has the optimizer in a variable."""

    class Calls(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    other = make_optimizer()  # also makes torch wrap the parent's step
    optimizer = make_optimizer(Calls)
    seen = []
    getattr(optimizer, f"register_{kind}_hook")(lambda opt, args, kwargs: seen.append(_torch.is_inner_step(opt)))
    getattr(other, f"register_{kind}_hook")(lambda opt, args, kwargs: seen.append(_torch.is_inner_step(opt)))
    other.step()
    assert seen == [False]
    seen.clear()
    optimizer.step(lambda: other.step() or 0.0)
    assert sorted(seen) == [False, False, True]  # outer, inner, and the other's
    assert not _torch.is_inner_step(optimizer)


@pytest.mark.parametrize("kind", OPTIMIZER_KINDS)
def test_an_optimizers_hooks_are_walked_live_and_the_walk_is_seen(kind):
    """Until the last one has its turn; a hook that leaves before that makes torch fail."""
    optimizer = make_optimizer()
    hooks = _torch.optimizer_hooks(optimizer, kind)
    register = getattr(optimizer, f"register_{kind}_hook")
    seen = []

    def run() -> None:
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())

    first = register(lambda *args: seen.append(_torch.being_walked(hooks)))
    second = register(lambda *args: seen.append(_torch.being_walked(hooks)))
    run()
    assert seen == [True, False]
    assert not _torch.being_walked(hooks)
    first.remove()
    second.remove()
    leaving = register(lambda *args: leaving.remove())
    run()  # alone, it may go
    leaving = register(lambda *args: leaving.remove())
    register(lambda *args: None)
    with pytest.raises(RuntimeError, match="mutated during iteration"):
        run()


def test_a_walk_in_another_thread_is_seen():
    """All threads' stacks are looked at."""
    optimizer = make_optimizer()
    entered, leave = threading.Event(), threading.Event()

    def wait(*args: object) -> None:
        entered.set()
        assert leave.wait(PATIENCE)

    optimizer.register_step_post_hook(wait)
    optimizer.register_step_post_hook(lambda *args: None)
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    assert entered.wait(PATIENCE)
    walked = _torch.being_walked(_torch.optimizer_hooks(optimizer, "step_post"))
    leave.set()
    thread.join()
    assert walked
    assert not _torch.being_walked(_torch.optimizer_hooks(optimizer, "step_post"))


def test_an_optimizers_own_pre_hooks_are_not_begun_when_a_global_one_runs():
    """What a global pre-hook registers on the optimizer runs in the same step."""
    optimizer = make_optimizer()
    log = []
    optimizer.register_step_pre_hook(lambda *args: log.append("own"))

    def first_sight(opt, args, kwargs) -> None:
        opt.register_step_pre_hook(lambda *args: log.append("pre"))
        opt.register_step_post_hook(lambda *args: log.append("post"))

    handle = register_optimizer_step_pre_hook(first_sight)
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert log == ["own", "pre", "post"]


def test_what_is_untraced_runs_as_it_is_in_a_compiled_function():
    """Methods too; the compiler would not know what to do with a stack."""

    class Looks:
        @_torch.untraced
        def __call__(self) -> str:
            return sys._getframe(0).f_code.co_name

    looks = Looks()
    assert looks() == "__call__"
    compiled = torch.compile(lambda x: (x + 1, looks()), backend="eager")
    try:
        assert compiled(torch.ones(1))[1] == "__call__"
    finally:
        torch._dynamo.reset()


# -- the one file --------------------------------------------------------------------------------------------


def test_private_names_of_torch_are_imported_in_one_file_only():
    """No other file of the package imports from ``torch._C`` or another private module of torch."""
    root = pathlib.Path(hookline.__file__).parent
    offenders = []
    for path in root.rglob("*.py"):
        if path.name == "_torch.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                offenders += [f"{path.name}: {name}" for name in names if name.startswith("_")]
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                private = node.attr.startswith("_") and node.attr != "__version__"
                offenders += [f"{path.name}: torch.{node.attr}"] if private else []
    assert offenders == []


def test_tensors_without_numbers_of_their_own_are_told_apart():
    """Those that stand for others in a transform, and fake ones; parameters and other subclasses have numbers."""
    found = []

    def note(x):
        found.append(_torch.has_numbers(x))
        return x.sum()

    torch.vmap(note)(torch.ones(2, 2))
    torch.func.grad(note)(torch.ones(2))
    with torch._subclasses.FakeTensorMode():
        note(torch.ones(2))
    own = torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {}))
    for ordinary in (torch.ones(2), nn.Parameter(torch.ones(2)), own):
        note(ordinary)
    assert found == [False, False, False, True, True, True]


def test_every_name_of_the_file_is_used_and_documented():
    """The file holds what is needed and says why."""
    source = inspect.getsource(_torch)
    assert _torch.__doc__ is not None
    assert "test_torch_contract" in source
    for name in _torch.__all__:
        value = getattr(_torch, name)
        assert not inspect.isfunction(value) or value.__doc__, name


# -- functions and operators -------------------------------------------------------------------------------


def test_a_number_beside_a_tensor_is_kept_marked_in_the_node_of_a_product():
    """The only place where Python can get hold of a tensor that counts as a number; ``set_`` keeps the mark."""
    marked = _torch._marked_numbers()[float].data.set_(torch.tensor(0.1, dtype=torch.float64))
    assert torch.result_type(torch.arange(3), marked) is torch.float32
    assert torch.result_type(torch.arange(3), torch.tensor(0.1, dtype=torch.float64)) is torch.float64
    assert marked.item() == 0.1
    assert _torch._marked_numbers()[float].item() == 1.0


def test_a_kernel_can_be_overridden_and_put_back():
    """What ran before runs again, and torch's list of Python kernels is as it was."""
    x = torch.randn(3, 3)
    before = set(torch.library._impls)
    calls = []

    def make(original):
        def kernel(keys, *args):
            calls.append(args)
            return original(keys, *args)

        return kernel

    restore = _torch.override_kernel(torch.ops.aten.mm.default, "CPU", make)
    assert restore is not None
    expected = x @ x
    assert torch.equal(torch.mm(x, x), expected)
    assert len(calls) == 2
    restore()
    assert torch.equal(torch.mm(x, x), expected)
    assert len(calls) == 2
    assert set(torch.library._impls) == before


def test_an_operator_without_a_kernel_is_told():
    """An operator of another backend has nothing to override here."""
    torch.library.define("hookline_test::bare", "(Tensor x) -> Tensor")
    assert _torch.override_kernel(torch.ops.hookline_test.bare.default, "CPU", lambda original: original) is None


class _Plain(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _modes():
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def test_a_mode_slips_under_others_and_is_lifted_out_again():
    """The bottom is index 0; others keep their order, and their ``with`` blocks take off their own."""
    ours, first, second = _Plain(), _Plain(), _Plain()
    with first:
        with second:
            _torch.slip_mode_under(ours)
            assert _modes() == [ours, first, second]
        assert _modes() == [ours, first]
        assert not _torch.pop_mode(ours)
        assert _torch.lift_mode(ours)
        assert not _torch.lift_mode(ours)
        assert _modes() == [first]
    assert _modes() == []


def test_a_default_device_keeps_the_lowest_place():
    """``torch.set_default_device`` looks for its own mode at the very bottom, and raises if it is not there."""
    ours = _Plain()
    torch.set_default_device("cpu")
    try:
        _torch.slip_mode_under(ours)
        assert _modes()[1:] == [ours]
    finally:
        torch.set_default_device(None)
        _torch.lift_mode(ours)
    assert _modes() == []


def test_the_running_modules_are_found_on_the_stack():
    """Innermost and outermost, and none outside of a forward."""
    found = []

    class Inner(nn.Module):
        def forward(self, x):
            found.append((_torch.running_module(), *_torch.running_modules()))
            return x

    inner = Inner()
    outer = nn.Sequential(nn.Sequential(inner))
    outer(torch.ones(1))
    assert found == [(inner, inner, outer)]
    assert _torch.running_module() is None
    assert _torch.running_modules() == (None, None)


def test_what_a_function_mode_is_shown_is_known():
    """Factories, native functions and Python functions that ask for modes; not any other."""
    assert torch.ones in _torch.factories()
    assert _torch.is_native("relu_", torch.relu_)
    assert _torch.is_native("gelu", torch.nn.functional.gelu)
    assert _torch.handles_modes(torch.nn.functional.softmax)
    assert not _torch.handles_modes(test_what_a_function_mode_is_shown_is_known)
    assert not _torch.is_native("sin", math.sin)


def test_fake_tensors_are_tracing():
    """Under a fake mode, and only there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not _torch.is_tracing()
    with FakeTensorMode():
        assert _torch.is_tracing()


# -- torch.compile -------------------------------------------------------------------------------------------


@pytest.fixture
def compiler():
    """The compiler, fresh."""
    dynamo = pytest.importorskip("torch._dynamo")
    dynamo.reset()
    yield dynamo
    dynamo.reset()


def test_a_marked_function_is_called_while_tracing_and_its_answer_is_a_constant(compiler):
    """Once for a graph, with what is known then."""
    calls = []

    @_torch.constant_while_tracing
    def answer(cls: type) -> int:
        calls.append(cls)
        return len(calls)

    compiled = torch.compile(lambda x: x + answer(type(x)), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == compiled(torch.zeros(1)).item() == 1
    assert calls == [torch.Tensor]


def test_a_function_left_to_python_is_not_compiled_by_itself_but_inlined(compiler):
    """Called by code that is not compiled, it runs as it is; called in code that is, it is part of it."""
    ran = []

    def note(x):
        ran.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    def callee(x):
        return note(x)

    _torch.leave_to_python(callee)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(callee, backend=backend)(torch.zeros(1))
    assert graphs == []
    assert ran == [False]
    inlined = torch.compile(lambda x: callee(x) * 2 if True else x, backend=backend)
    ran.clear()
    inlined(torch.zeros(1))
    assert len(graphs) == 1


def test_compiled_code_is_told_by_classes_and_minds_a_forward_of_ones_own(compiler):
    """The guards name the class of each module that is met, and a ``forward`` on the module itself does not fit."""
    model = _Own()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.zeros(1, 1))
    (text,) = _torch.guards_of(_Own.forward.__code__)
    assert str(id(_Own)) in text
    for _ in range(3):
        model.inner.__dict__["forward"] = types.MethodType(nn.Linear.forward, model.inner)
        compiled(torch.zeros(1, 1))
        assert len(_torch.guards_of(_Own.forward.__code__)) == 2
        del model.inner.__dict__["forward"]
        compiled(torch.zeros(1, 1))
        assert len(_torch.guards_of(_Own.forward.__code__)) == 2


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_compiled_code_can_be_forgotten(compiler):
    """One code object at a time."""
    torch.compile(_Own(), backend="eager")(torch.zeros(1, 1))
    assert _Own.forward.__code__ in _torch.compiled_code()
    _torch.forget_compiled(_Own.forward.__code__)
    assert _Own.forward.__code__ not in _torch.compiled_code()


def test_compilations_are_announced(compiler):
    """Before anything is traced, also after a reset, until that is ended; and then torch has its own list again."""
    seen = []
    told = _torch.Compilations(lambda: seen.append("begin"))
    told.start()
    assert told.is_on()
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))
    assert seen == ["begin"]
    compiler.reset()
    assert told.is_on()
    told.stop()
    told.stop()
    assert type(sys.modules["torch._dynamo.callback"].callback_handler.start_callbacks) is list
    torch.compile(lambda x: x + 2, backend="eager")(torch.zeros(1))
    assert seen == ["begin"]


def test_a_module_knows_that_it_was_compiled(compiler):
    """By ``module.compile()``; a wrapper is another matter."""
    model = nn.Linear(1, 1)
    assert not _torch.is_compiled(model)
    model.compile(backend="eager")
    assert _torch.is_compiled(model)


def test_a_compilation_has_a_name(compiler):
    """While it is under way, and only then."""
    seen = []

    @_torch.constant_while_tracing
    def note() -> int:
        seen.append(_torch.compilation())
        return 0

    torch.compile(lambda x: x + note(), backend="eager")(torch.zeros(1))
    assert seen[0] is not None
    assert _torch.compilation() is None


def test_a_kernel_for_autograd_finds_autograd_at_work_and_can_be_passed():
    """Kernels below it do not."""
    library = torch.library.Library("hookline_contract", "DEF")
    library.define("probe(Tensor x, bool past) -> ()")
    found = []

    def differentiate() -> bool:
        leaf = torch.ones(1, requires_grad=True)
        return (leaf * 3).grad_fn is not None

    def at_autograd(x, past):
        found.append(("at", differentiate()))
        if past:
            _torch.below_autograd(torch.ops.hookline_contract.probe.default, (x, past))

    library.impl("probe", at_autograd, "Autograd")
    library.impl("probe", lambda x, past: found.append(("below", differentiate())), "CompositeExplicitAutograd")
    torch.ops.hookline_contract.probe(torch.zeros(1), True)
    assert found == [("at", True), ("below", False)]
    library._destroy()


def test_exporting_is_told_from_compiling(compiler):
    """torch 2.11 answers yes to both, if asked in traced code."""
    seen = []

    @_torch.constant_while_tracing
    def note() -> int:
        seen.append(_torch.exporting())
        return 0

    class Model(nn.Module):
        def forward(self, x):
            return x + note()

    torch.compile(Model(), backend="eager")(torch.zeros(1))
    torch.export.export(Model(), (torch.zeros(1),), strict=True)
    assert seen[0] is False
    assert seen[-1] is True


def test_nothing_is_captured_where_there_is_no_graph():
    """And an ordinary module replays none."""
    assert not _torch.capturing()
    assert not _torch.replays_graph(nn.Linear(1, 1))


def test_hooks_are_put_in_order_by_insertion_too(monkeypatch):
    """What guards of torch 2.11 go by; moving one to an end of an OrderedDict leaves that as it was."""
    hooks = OrderedDict({1: "ours", 2: "theirs", 3: "others"})
    hooks.move_to_end(1)
    assert list(dict.keys(hooks)) == [1, 2, 3]
    monkeypatch.setattr(_torch, "_GUARDS_GO_BY_INSERTION", True)
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys.modules.get("torch._dynamo"))
    _torch.place_last(hooks, 2)
    assert list(dict.keys(hooks)) == list(hooks) == [3, 1, 2]
    _torch.place_first(hooks, 1)
    assert list(dict.keys(hooks)) == list(hooks) == [1, 3, 2]


# -- what observers ask ---------------------------------------------------------------------------------------


def test_a_leaf_has_one_dictionary_of_hooks_for_as_long_as_it_lives():
    """None before the first hook; the same object afterwards, which a handle refers to weakly."""
    leaf = nn.Parameter(torch.ones(2))
    assert _torch.leaf_hooks(leaf) is None
    handle = leaf.register_post_accumulate_grad_hook(lambda leaf: None)
    hooks = _torch.leaf_hooks(leaf)
    assert handle.hooks_dict_ref() is hooks
    handle.remove()
    leaf.register_post_accumulate_grad_hook(lambda leaf: None)
    assert _torch.leaf_hooks(leaf) is hooks


def test_tensors_inside_transforms_are_told():
    """Under vmap and grad, not outside."""
    told = []

    def function(x):
        told.append(_torch.is_wrapped(x))
        return x.sum()

    torch.vmap(function)(torch.ones(2, 2))
    torch.func.grad(function)(torch.ones(2))
    assert told == [True, True]
    assert not _torch.is_wrapped(torch.ones(1))


def test_a_scaler_has_its_scale_on_the_device():
    """Unread, once it has scaled something; none if it is switched off."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert _torch.scale_of(scaler) is None
    scaler.scale(torch.ones(()))
    assert _torch.scale_of(scaler) == 8.0
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(torch.ones(()))
    assert _torch.scale_of(off) is None


def test_calls_under_way_are_counted():
    """Of the module itself, in this thread."""

    class Nested(nn.Module):
        def forward(self, depth):
            counts.append(_torch.times_running(self))
            return self(depth - 1) if depth else depth

    counts = []
    module = Nested()
    module.register_forward_hook(lambda *args: None)  # without hooks torch calls forward straight
    module(2)
    assert counts == [1, 2, 3]
    assert _torch.times_running(module) == 0


def test_changes_can_be_counted_behind_a_dispatch_mode_in_inference_mode():
    """There torch counts none (the control), and a copy of what inference mode made does not begin at 0."""
    counts = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            for counting in (nullcontext, _torch.counting_changes):
                before = copied._version
                with counting():
                    copied.add_(1)
                    assert torch.is_inference_mode_enabled()
                counts.append(copied._version - before)
            return function(*args, **(kwargs or {}))

    copied = torch.ones(2).clone()
    with torch.inference_mode():
        with Mode():
            torch.neg(torch.ones(2))
        made = torch.ones(2)
        with torch.inference_mode(False):
            counts.append(made.detach().clone()._version)
    assert counts == [0, 1, 0, 1, 1]


def test_tensors_end_to_end_are_a_vector_of_their_own():
    """Whatever their shapes and strides; kinds of numbers are brought together."""
    given = [torch.arange(6.0).view(2, 3).t(), torch.ones(2, dtype=torch.float64), torch.tensor(7.0)]
    found = _torch.flat(given)
    assert found.tolist() == [0, 3, 1, 4, 2, 5, 1, 1, 7]
    found.zero_()
    assert given[0].sum() == 15


def test_the_backward_hooks_of_one_call_are_a_variable_of_torchs_frame():
    """A forward hook finds them, with a list of pre-hooks that is the call's own."""
    found = []

    def hook(*args: object) -> None:
        found.append(_torch.backward_hooks_of_call())

    module = nn.Sigmoid()
    module.register_forward_hook(hook)
    x = torch.zeros(1, requires_grad=True)
    module(x)
    module.register_full_backward_pre_hook(lambda *args: None)
    module(x)
    module(x)
    assert found[0] is None
    assert [type(each) for each in found[1:]] == [torch.utils.hooks.BackwardHook] * 2
    assert isinstance(found[1].user_pre_hooks, list)
    assert found[1].user_pre_hooks is not found[2].user_pre_hooks


@pytest.mark.parametrize("where", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_torch_says_which_modules_it_calls_backward_hooks_for(where, monkeypatch):
    """Those with hooks of their own; with global ones, all."""
    flag = "_global_is_full_backward_hook"  # torch never takes it back
    monkeypatch.setattr(torch_module, flag, getattr(torch_module, flag))
    module, other = nn.Sigmoid(), nn.Sigmoid()
    handle = getattr(module, where)(lambda *args: None)
    assert _torch.has_backward_hooks(module)
    assert not _torch.has_backward_hooks(other)
    handle.remove()
    assert not _torch.has_backward_hooks(module)
    with getattr(torch_module, where.replace("register_", "register_module_"))(lambda *args: None):
        assert _torch.has_backward_hooks(other)
