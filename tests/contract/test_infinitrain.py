"""InfiniTrain: hooks on modules and functions that observe, in a fixed order; its precision checker."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers_models import Fn, assert_same_grads, leaf, logger, mlp, twin
from torch import nn

import hookline as hl
from hookline.debug.precision.precision_checker import PrecisionChecker, PrecisionConfig

FORWARD_KINDS = ["forward_pre", "forward"]
BACKWARD_KINDS = ["backward_pre", "backward", "full_backward"]
GRADIENT_KINDS = ["backward_pre", "backward"]
RUN_KINDS = FORWARD_KINDS + BACKWARD_KINDS


class Reuse(nn.Module):
    """One block, called three times in a row."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return x


# -- order, and taking off --------------------------------------------------------------------------------


@pytest.mark.parametrize("editing", [False, True], ids=["observing", "editing"])
@pytest.mark.parametrize("given", ["leaf", "non_leaf", "data"])
def test_nested_modules_open_and_close_like_brackets(given, editing):
    """A parent's backward begins before its children's and ends after them, whatever its input needs."""
    model, events = mlp(), []

    def editor(label):
        def hook(module, grads, *_):
            events.append(label)
            return grads

        return hook

    make = editor if editing else lambda label: logger(events, label)
    for name in ("", "0", "1", "2"):
        module = model.get_submodule(name)
        hl.attach(module, make(f"pre {name}"), on="backward_pre")
        hl.attach(module, make(f"post {name}"), on="backward")
    x = leaf(4, 3).requires_grad_(given != "data")
    model(x * 1 if given == "non_leaf" else x).sum().backward()
    assert events == ["pre ", "pre 2", "post 2", "pre 1", "post 1", "pre 0", "post 0", "post "]


def test_basic_module_hooks():
    """The source's own test: all four kinds on a module that returns its input, each fired once."""
    module, events, kinds = nn.Identity(), [], FORWARD_KINDS + GRADIENT_KINDS
    for kind in kinds:
        hl.attach(module, logger(events, kind), on=kind)
    output = module(leaf(2, 3))
    assert output.shape == (2, 3)
    output.sum().backward()
    assert events == kinds


# -- calling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUN_KINDS)
def test_calling_forward_directly_fires_nothing(kind):
    """module.forward(x) is silent for every kind, also in its backward pass; module(x) is not."""
    module, events = nn.Linear(3, 2), []
    hl.attach(module, logger(events, kind), on=kind)
    module.forward(leaf(4, 3)).sum().backward()
    assert events == []
    module(leaf(4, 3)).sum().backward()
    assert events == [kind]


def test_under_no_grad_only_forward_hooks_fire():
    """Under no_grad and inference_mode forward hooks fire, and a later, unrelated backward fires nothing."""
    model, events = mlp(), []
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        hl.attach(model[0], logger(events, kind), on=kind)
    with torch.no_grad():
        assert not model(leaf(4, 3)).requires_grad
    assert events == ["forward_pre", "forward"]
    with torch.inference_mode():
        model(leaf(4, 3))
    assert events == ["forward_pre", "forward"] * 2
    model[2](leaf(4, 5)).sum().backward()
    assert events == ["forward_pre", "forward"] * 2


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_block_called_three_times_numbers_its_calls_anew_in_each_iteration(kind):
    """The calls of a reused block carry 0, 1, 2 in each iteration; the backward meets them last first."""
    model, calls = Reuse(), []

    def hook(module, *values, site):
        calls.append((site.name, site.step, site.call))

    hl.attach(model, "block", hook, on=kind)
    for _ in range(2):
        model(leaf(4, 4)).sum().backward()
    order = [0, 1, 2] if kind == "forward" else [2, 1, 0]
    assert calls == [("block", step, call) for step in range(2) for call in order]


# -- whose gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", [None, "same"], ids=["observing", "editing"])
def test_a_pass_through_module_reports_itself_once_and_not_its_producer(returns):
    """Hooks on a module that returns its input fire once, for it; the producer's hook fires once, for the producer."""
    model, events = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 2)), []

    def hook(module, grad_input, grad_output, *, site):
        events.append((site.name, grad_input[0], grad_output[0]))
        return grad_input if returns else None

    hl.attach(model, ["0", "1"], hook, on="backward")
    model(leaf(4, 3)).sum().backward()
    assert [name for name, _, _ in events] == ["1", "0"]
    through = torch.ones(4, 2) @ model[2].weight
    assert torch.equal(events[0][1], through)
    assert torch.equal(events[0][2], through)
    assert torch.equal(events[1][2], through)
    assert torch.equal(events[1][1], through @ model[0].weight)


@pytest.mark.parametrize("returns", [None, "same"], ids=["observing", "editing"])
def test_a_two_op_module_reports_gradients_of_its_own_inputs_and_outputs(returns):
    """For Linear then tanh, grad_input belongs to the module's input, without weights; grad_output to its output."""
    module, x, seen = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), leaf(4, 3), []
    reference, x_reference = copy.deepcopy(module), twin(x)

    def hook(module, grad_input, grad_output):
        seen.append((grad_input, grad_output))
        return grad_input if returns else None

    hl.attach(module, hook, on="backward_post")
    upstream = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    module(x).backward(upstream)
    reference(x_reference).backward(upstream)
    [(grad_input, grad_output)] = seen
    assert len(grad_input) == len(grad_output) == 1
    assert torch.equal(grad_input[0], x_reference.grad)
    assert torch.equal(grad_output[0], upstream)
    assert torch.equal(x.grad, x_reference.grad)
    assert_same_grads(module, reference)


@pytest.mark.parametrize("kind", FORWARD_KINDS)
def test_a_hook_that_takes_kwargs_may_be_removed_in_the_middle_of_a_call(kind):
    """Options are kept with the hook: a with_kwargs hook removed by an earlier one still gets its kwargs."""
    seen = []

    def remover(*_):
        if seen:
            later.remove()

    module = Fn(lambda x, *, by: x * by)
    hl.attach(module, remover, on=kind)
    later = hl.attach(module, lambda module, args, kwargs, *_: seen.append(kwargs["by"]), on=kind, with_kwargs=True)
    for by in (2.0, 3.0, 4.0):
        module(leaf(4, 3), by=by)
    assert seen == [2.0, 3.0]


# -- functions --------------------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    """A function of one's own."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * b, grad * a


FUNCTIONS = {
    "function": (torch.mul, torch.mul),
    "name": ("torch.atan2", torch.atan2),
    "class": (Twice, lambda a, b: Twice.apply(a, b)),
}
each_function = pytest.mark.parametrize("what", FUNCTIONS)


@each_function
def test_function_hooks_of_each_kind_get_what_the_source_documents(what):
    """The function first; then inputs, outputs, the gradients of outputs once all are summed, those of inputs."""
    target, run = FUNCTIONS[what]
    seen, a, b = {}, leaf(4, 3), leaf(4, 3, seed=2)

    def note(kind):
        return lambda func, *values: seen.setdefault(kind, []).append((func, *values)) and None

    kinds = ("forward_pre", "forward_post", "backward_pre", "backward_post")
    with hl.HandleSet(hl.attach_function(target, note(kind), on=kind) for kind in kinds) as handles:
        output = run(a, b)
        (output + 2 * output).sum().backward()
    assert all(isinstance(handle, hl.HookHandle) for handle in handles)
    ((func, inputs),) = seen["forward_pre"]
    assert isinstance(func, hl.sites.FunctionSite)
    assert [one is other for one, other in zip(inputs, (a, b), strict=True)] == [True, True]
    ((_, inputs, outputs),) = seen["forward_post"]
    assert [one is other for one, other in zip(inputs, (a, b), strict=True)] == [True, True]
    assert [torch.equal(one, output) for one in outputs] == [True]
    ((_, grad_outputs),) = seen["backward_pre"]
    assert [torch.equal(grad, torch.full((4, 3), 3.0)) for grad in grad_outputs] == [True]
    ((_, grad_inputs, grad_outputs),) = seen["backward_post"]
    assert [torch.equal(grad, torch.full((4, 3), 3.0)) for grad in grad_outputs] == [True]
    for grad, leaf_of_it in zip(grad_inputs, (a, b), strict=True):
        torch.testing.assert_close(grad, leaf_of_it.grad)


@each_function
def test_module_and_function_hooks_open_and_close_like_brackets(what):
    """module pre, function pre, function post, module post; the same in the backward pass."""
    target, run = FUNCTIONS[what]
    module, events = Fn(run), []
    kinds = ("forward_pre", "forward_post", "backward_pre", "backward_post")
    handles = [hl.attach_function(target, logger(events, f"function {kind}"), on=kind) for kind in kinds]
    handles += [hl.attach(module, logger(events, f"module {kind}"), on=kind) for kind in kinds]
    with hl.HandleSet(handles):
        output = module(leaf(4, 3), leaf(4, 3) * 2)
        assert events == ["module forward_pre", "function forward_pre", "function forward_post", "module forward_post"]
        output.sum().backward()
    assert events[4:] == [
        "module backward_pre",
        "function backward_pre",
        "function backward_post",
        "module backward_post",
    ]


@each_function
def test_under_no_grad_only_the_forward_hooks_of_functions_fire(what):
    target, run = FUNCTIONS[what]
    events = []
    kinds = FORWARD_KINDS + GRADIENT_KINDS
    with hl.HandleSet(hl.attach_function(target, logger(events, kind), on=kind) for kind in kinds):
        with torch.no_grad():
            run(leaf(4, 3), leaf(4, 3))
        assert events == FORWARD_KINDS
        leaf(4, 3).sum().backward()
    assert events == FORWARD_KINDS


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_calls_of_a_function_are_numbered_anew_in_each_iteration(kind):
    """The same function three times per forward, two forwards: 0, 1, 2 in each, with the path of its module."""
    model, calls = Reuse(), []
    with hl.attach_function(
        "torch.nn.functional.linear", lambda fn, *_: calls.append((fn.module, fn.step, fn.call)), on=kind, within=model
    ):
        for _ in range(2):
            model(leaf(4, 4)).sum().backward()
    order = [0, 1, 2] if kind == "forward" else [2, 1, 0]
    assert calls == [("block", step, call) for step in range(2) for call in order]


def poisoned(value):
    """A model whose third layer adds ``value`` to one entry."""

    def poison(x):
        mask = torch.zeros_like(x)
        mask[0, 0] = value
        return x + mask

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Fn(poison), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("form", ["simple", "md5"])
@pytest.mark.parametrize(("value", "counts"), [(float("nan"), (1, 0)), (float("inf"), (0, 1))])
def test_a_bad_value_flags_the_layer_that_made_it_and_those_after_it(form, value, counts, tmp_path):
    """NaN and infinity, in both formats; layers before are clean, statistics are of finite values."""
    model = poisoned(value)
    with PrecisionChecker(model, f"level=1,path={tmp_path},format={form}") as checker:
        model(torch.ones(2, 3))
    flagged = [record.name for record in checker.errors]
    after = ["3", "4", "Sequential"] if counts[0] else []  # tanh of infinity is 1
    assert flagged == ["2", *after]
    record = checker.errors[0]
    assert (record.nan, record.inf) == counts
    lines = next(tmp_path.rglob("*.log")).read_text().splitlines()
    assert [line.endswith(" <- ERROR") for line in lines] == [r.name in flagged for r in checker.records]
    bad = lines[2]
    assert f"[NaN:{counts[0]} Inf:{counts[1]}]" in bad
    if form == "simple":
        with torch.no_grad():
            finite = torch.tanh(model[0](torch.ones(2, 3))).flatten()[1:]
        assert f"min={finite.min():.6g} max={finite.max():.6g} mean={finite.double().mean():.6g}" in bad


def test_counters_begin_anew_and_files_of_the_second_iteration_replace_those_of_the_first(tmp_path):
    """The same block three times in an iteration; index 0 is in the name, as the source's guide says."""
    block = nn.Linear(2, 2)
    model = nn.ModuleDict({"Block": block})
    indices = []
    with PrecisionChecker(model, f"level=1,path={tmp_path},save_tensors=true") as checker:
        for iteration in range(2):
            checker.reset_counters()
            outputs = [block(torch.full((1, 2), float(iteration * 3 + call))) for call in range(3)]
            indices.append([record.index for record in checker.records])
    assert indices == [[0, 1, 2], [0, 1, 2]]
    files = {path.name: np.load(path) for path in tmp_path.rglob("*.npy")}
    assert sorted(files) == ["Block_0_forward.npy", "Block_1_forward.npy", "Block_2_forward.npy"]
    for call, output in enumerate(outputs):
        assert np.array_equal(files[f"Block_{call}_forward.npy"], output.detach().numpy())


def test_the_config_string_is_read_exactly_and_mistakes_raise():
    """An unknown key, an item without '=' and a level that does not exist are errors."""
    config = PrecisionChecker(nn.Identity(), "level=1,path=x,format=md5,save_tensors=true").config
    assert config == PrecisionConfig(level=1, path="x", format="md5", save_tensors=True)
    for wrong in ("level=1,colour=red", "level=1,verbose", "level=7"):
        with pytest.raises(hl.HooklineError):
            PrecisionChecker(nn.Identity(), wrong)


def test_level_0_installs_nothing(tmp_path):
    """No hook on the model or the process, no file."""
    model = poisoned(0.0)
    with PrecisionChecker(model, f"level=0,path={tmp_path}") as checker:
        checker.register_for_module(model[0])
        hl.assert_no_hooks(model, foreign=True)
        assert hl.attached() == []
        model(torch.ones(2, 3)).sum().backward()
    assert not checker.records
    assert list(tmp_path.iterdir()) == []
