"""What hookline takes for granted of torch.compile beyond its public promises; fails when a version changes it."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict

import pytest
import torch
from torch import nn

from hookline.sites import _torch


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


def test_compiled_code_minds_a_forward_of_ones_own(compiler):
    """A ``forward`` on the module itself does not fit what was compiled without; there are two graphs at most."""
    model = _Own()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.zeros(1, 1))
    for _ in range(3):
        model.inner.__dict__["forward"] = types.MethodType(nn.Linear.forward, model.inner)
        compiled(torch.zeros(1, 1))
        assert len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(_Own.forward.__code__)) == 2
        del model.inner.__dict__["forward"]
        compiled(torch.zeros(1, 1))
        assert len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(_Own.forward.__code__)) == 2


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("kind", [float, object, _torch.Unchanging])
def test_guards_skip_a_module_whose_hooks_are_numbers(compiler, kind):
    """And whose dictionaries have not changed: what they look at in such a hook must never change, too."""
    double = types.new_class("Double", (kind,))
    double.__call__ = lambda self, module, args, output: output * self.factor
    hook = double()
    hook.factor = 2
    model = _Own()
    model.inner.register_forward_hook(hook)
    with compiler.config.patch(use_recursive_dict_tags_for_guards=True):
        torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(1, 1))
    (entry,) = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(_Own.forward.__code__)
    (whole,) = [line for line in str(entry.guard_manager).splitlines() if "source=L['self'], " in line]
    assert ("tag_safe=(True" in whole) is issubclass(kind, float)


def test_hooks_are_put_in_order_by_insertion_too(monkeypatch):
    """What guards of torch 2.11 go by; moving one to an end of an OrderedDict leaves that as it was."""
    hooks = OrderedDict({1: "ours", 2: "theirs", 3: "others"})
    hooks.move_to_end(1)
    assert list(dict.keys(hooks)) == [1, 2, 3]
    monkeypatch.setattr(_torch, "_BEFORE_2_13", True)
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys.modules.get("torch._dynamo"))
    _torch.place(hooks, 2, last=True)
    assert list(dict.keys(hooks)) == list(hooks) == [3, 1, 2]
    _torch.place(hooks, 1, last=False)
    assert list(dict.keys(hooks)) == list(hooks) == [1, 3, 2]


def test_every_change_of_a_plain_dictionary_gives_it_another_version():
    """Also of the attributes of an object, by code that the interpreter has specialized; reading gives none."""
    version = _torch.dict_version
    assert version is not None

    class Holder:
        pass

    holder, plain = Holder(), {"a": 1, "b": 2}
    holder.number = -1
    attributes = vars(holder)

    def write(value: int) -> None:
        holder.number = value

    for number in range(100):
        before = version(attributes)
        assert version(attributes) == before
        write(number)
        assert version(attributes) != before
    changes = [
        lambda: plain.update(a=3),
        lambda: plain.pop("b"),
        lambda: plain.setdefault("c", 5),
        lambda: plain.__setitem__("d", 6),
        lambda: plain.__delitem__("d"),
        plain.popitem,
        plain.clear,
    ]
    for change in changes:
        before = version(plain)
        assert (list(plain.items()), version(plain))[1] == before
        change()
        assert version(plain) != before


def test_one_call_tells_whether_any_tensor_has_another_layout():
    """Or flag; in the same memory and with the same counter. It says yes again when they are back."""
    tensors = [nn.Parameter(torch.zeros(4, 4)), torch.zeros(2, 1), torch.zeros(3, dtype=torch.float64)]
    check = _torch.layout_check(tensors)
    assert check is not None
    assert check()
    with torch.no_grad():
        assert check()
    for index, change in (
        (0, lambda data: data.view(2, 8)),
        (0, lambda data: data.t()),
        (1, lambda data: data.as_strided((2, 1), (1, 7))),
        (2, lambda data: data.view(torch.int64)),
    ):
        tensor, data = tensors[index], tensors[index].data
        tensor.data = change(data)
        assert not check()
        tensor.data = data
        assert check()
    for flag in (False, True):
        tensors[0].requires_grad_(flag)
        assert check() is flag
    assert _torch.layout_check([]) is None
