"""What hookline takes for granted of torch beyond its public promises; fails when a version changes it.

One part per private name in ``sites/_torch.py``: that it exists, and that it behaves as the code relies on.
"""

from __future__ import annotations

import ast
import copy
import gc
import inspect
import pathlib
import sys
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

import hookline
from hookline.sites import _torch


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
def test_add_port_does_what_torchs_own_registration_does(attribute, register, options):
    """Same dictionaries, same keys, same values; dropping leaves nothing."""

    def hook(*args: object) -> None:
        """Does nothing."""

    theirs, ours = nn.Identity(), nn.Identity()
    handle = getattr(theirs, register)(hook, **options)
    hook_id = _torch.add_port(ours, attribute, hook, first=False)
    assert hook_id > handle.id
    assert RemovableHandle.next_id > hook_id
    for name in (attribute, *_torch.HOOK_DICTS[attribute]):
        assert list(getattr(theirs, name).values()) == list(getattr(ours, name).values())
        assert list(getattr(ours, name)) in ([hook_id], [])
    _torch.drop_hook(ours, attribute, hook_id)
    for name in (attribute, *_torch.HOOK_DICTS[attribute]):
        assert not getattr(ours, name)
    _torch.drop_hook(ours, attribute, hook_id)


def test_a_port_is_placed_first_or_last():
    """Either end of the queue, whatever is there."""
    module = nn.Identity()
    module.register_forward_hook(print)
    last = _torch.add_port(module, "_forward_hooks", len, first=False)
    first = _torch.add_port(module, "_forward_hooks", repr, first=True)
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
                offenders += [f"{path.name}: torch.{node.attr}"] if node.attr.startswith("_") else []
    assert offenders == []


def test_every_name_of_the_file_is_used_and_documented():
    """The file holds what is needed and says why."""
    source = inspect.getsource(_torch)
    assert _torch.__doc__ is not None
    assert "test_torch_contract" in source
    for name in _torch.__all__:
        value = getattr(_torch, name)
        assert not inspect.isfunction(value) or value.__doc__, name
