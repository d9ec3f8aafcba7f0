"""Hooks on operators: kernels overridden while a hook is on, given back after, and nothing else touched."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_functions import KINDS, LEVELS, Around, fresh, label, overridden_kernels, patched_classes, sin_product
from helpers_waiting import PATIENCE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hookline as hl
from hookline.sites import _torch
from hookline.sites._torch import TRANSFORMS
from hookline.sites.functions.operator_kernels import _Said

aten = torch.ops.aten


def hooks_of_module(operator: str) -> str:
    """Who is registered for what, as the dispatcher tells."""
    return torch._C._dispatch_dump_table(operator)


def nothing(fn: Any, *tensors: Any) -> None:
    """Watches."""


# -- given and given back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["aten::mm", "aten::add.Tensor", "aten::relu_", "aten::linear", "hookline_test::sin_product"]
)
def test_the_kernels_are_as_before_when_the_last_hook_is_gone(name: str, kind: str) -> None:
    """The table of the dispatcher is the same text, after one hook and after two that overlap."""
    before = hooks_of_module(name)
    with hl.attach_function(name, nothing, on=kind):
        assert hooks_of_module(name) != before
        with hl.attach_function(name, nothing, on=kind):
            pass
        assert hooks_of_module(name) != before
    assert hooks_of_module(name) == before


def test_other_operators_are_untouched() -> None:
    """Of all operators the table of one changes, and of that one the rows of the CPU and the one before transforms."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    before = {name: hooks_of_module(name) for name in names}
    with hl.attach_function("aten.mm.default", nothing):
        changed = {name for name in names if hooks_of_module(name) != before[name]}
        rows = set(hooks_of_module("aten::mm").splitlines()) - set(before["aten::mm"].splitlines())
    assert changed == {"aten::mm"}
    assert {row.split(":")[0].strip() for row in rows} == {"CPU", "AutogradCPU", TRANSFORMS}
    assert {name for name in names if hooks_of_module(name) != before[name]} == set()


@pytest.mark.product(1, kind=KINDS, error=[ValueError, KeyboardInterrupt])
def test_an_error_in_a_hook_leaves_the_kernels_in_order(kind: str, error: type[BaseException]) -> None:
    """The next call works, hooked and not."""
    failing = [True]

    def hook(fn: Any, *tensors: Any) -> None:
        if failing:
            raise error("mine")

    before = hooks_of_module("aten::atan2")
    with hl.attach_function(aten.atan2.default, hook, on=kind) as handle:
        with pytest.raises(error, match="mine"):
            torch.atan2(fresh(2), fresh(2)).sum().backward()
        failing.clear()
        torch.atan2(fresh(2), fresh(2)).sum().backward()
        assert handle.report().fired == 2
    assert hooks_of_module("aten::atan2") == before
    assert torch.atan2(torch.ones(1), torch.ones(1)).item() == pytest.approx(torch.pi / 4)


def test_an_error_in_the_operator_is_the_operators_own() -> None:
    """Message and type as without hooks, in the forward kinds and the backward kinds."""
    with pytest.raises(RuntimeError) as plain:
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    with (
        hl.attach_function("aten.mm", nothing),
        hl.attach_function("aten.mm", nothing, on="backward"),
        pytest.raises(RuntimeError) as hooked,
    ):
        torch.mm(torch.ones(2, 3, requires_grad=True), torch.ones(2, 3))
    assert str(hooked.value) == str(plain.value)


def test_removed_by_its_own_hook_in_the_middle_of_the_kernel() -> None:
    """The call that is under way ends well, and the kernel is back."""
    before = hooks_of_module("aten::exp")

    def once(fn: Any, inputs: Any) -> None:
        handle.remove()

    handle = hl.attach_function(aten.exp.default, once, on="forward_pre")
    assert torch.equal(torch.exp(torch.zeros(2)), torch.ones(2))
    assert hooks_of_module("aten::exp") == before
    assert torch.equal(torch.exp(torch.zeros(2)), torch.ones(2))


def test_a_few_hundred_cycles_leave_the_dispatcher_as_it_was() -> None:
    """No kernel, no library and no growing list of either."""
    before = hooks_of_module("aten::mm"), len(torch.library._impls)
    for _ in range(300):
        hl.attach_function(aten.mm.default, nothing).remove()
    assert (hooks_of_module("aten::mm"), len(torch.library._impls)) == before


@pytest.mark.parametrize("within", [False, True], ids=["anywhere", "within"])
def test_hooks_come_and_go_while_other_threads_run_the_operator(within: bool) -> None:
    """A thread may wait for the interpreter inside of a kernel that is taken off: torch must not free it there."""
    model, stop, errors = Around(torch.mm), threading.Event(), []
    matrix = torch.ones(8, 8)

    def work() -> None:
        try:
            while not stop.is_set():
                (model if within else torch.mm)(matrix, matrix)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    before = hooks_of_module("aten::mm")
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2
    try:
        while time.monotonic() < deadline and not errors:
            handle = hl.attach_function(aten.mm.default, nothing, within=model if within else None)
            handle.remove(quiet=True)
            assert hooks_of_module("aten::mm") == before
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["operator", "class"])
def test_a_model_that_its_own_hook_refers_to_is_not_kept_alive(level: str, kind: str) -> None:
    """The hook is kept with the model; when that is gone, the next hook to come or go gives the kernel back."""
    target, run, _ = LEVELS[level]

    def hooked_model() -> weakref.ref[nn.Module]:
        model, fired = Around(run), []
        hl.attach_function(target, lambda fn, *tensors: fired.append(model), on=kind, within=model)
        model(fresh(2, 2), fresh(2, 2)).sum().backward()
        assert fired == [model]
        return weakref.ref(model)

    before = overridden_kernels()
    reference = hooked_model()
    gc.collect()
    assert reference() is None
    hl.attach(nn.Identity(), lambda module, args, output: None).remove()
    assert overridden_kernels() == before
    assert patched_classes() == []


def test_hooks_of_several_models_and_of_none_each_see_their_own_calls() -> None:
    """In the order of attachment, process-wide ones first; one model within the other counts for both."""
    log: list[str] = []
    inner = Around(torch.atan2)
    outer = Around(lambda a, b: inner(a, b))
    outer.inner = inner
    handles = [
        hl.attach_function(aten.atan2.default, lambda fn, i, o, who=who: log.append(who), within=model)
        for who, model in (("inner", inner), ("outer", outer), ("any", None))
    ]
    for call, seen in ((torch.atan2, "any"), (inner, "any inner"), (outer, "any inner outer"), (inner, "any inner")):
        log.clear()
        call(torch.ones(2), torch.ones(2))
        assert " ".join(log) == seen
    handles[2].remove()
    log.clear()
    outer(torch.ones(2), torch.ones(2))
    assert log == ["inner", "outer"]
    for handle in handles[:2]:
        handle.remove()


def test_beside_an_override_of_somebody_else() -> None:
    """A kernel that another library has put there is what we call, and what is there again afterwards."""
    calls: list[int] = []
    library = torch.library.Library("hookline_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: calls.append(1) or x * 2, "CPU")
    with hl.attach_function("hookline_test.twice", nothing) as handle:
        assert torch.ops.hookline_test.twice(torch.ones(1)).item() == 2
    assert torch.ops.hookline_test.twice(torch.ones(1)).item() == 2
    assert calls == [1, 1]
    assert handle.report().fired == 1
    library._destroy()


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


def test_operators_that_make_tensors_are_seen_without_inputs() -> None:
    """zeros takes no tensors and gives one."""
    seen: list[Any] = []
    with hl.attach_function("aten.zeros.default", lambda fn, i, o: seen.append((len(i), len(o)))):
        torch.zeros(2)
    assert seen == [(0, 1)]


def test_out_overloads_are_seen_under_their_own_name() -> None:
    """torch.mm(a, b, out=c) is aten.mm.out, and fills the caller's tensor."""
    seen: list[str] = []
    a, c = torch.eye(2), torch.zeros(2, 2)
    with hl.attach_function("aten.mm", lambda fn, i, o: seen.append(fn.name)):
        result = torch.mm(a, a, out=c)
    assert seen == ["aten.mm.out"]
    assert result is c
    assert torch.equal(c, a)


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


def test_an_operator_that_changes_its_input_gives_that_input_back() -> None:
    """y = x.relu_() is x itself, hooked or not."""
    x = torch.randn(3)
    with hl.attach_function("aten.relu_", nothing), hl.attach_function("aten.relu_", nothing, on="backward"):
        assert x.relu_() is x
        h = fresh(3) * 1
        assert h.relu_() is h


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


def test_every_thread_counts_without_within_and_only_the_models_with_it() -> None:
    """Operators are the process's: bare hooks see all threads, hooks within a model its forwards in any thread."""
    model, bare, scoped = Around(torch.exp), [], []

    def work() -> None:
        model(torch.ones(1))
        torch.exp(torch.ones(1))

    with (
        hl.attach_function(aten.exp.default, lambda fn, i, o: bare.append(1)),
        hl.attach_function(aten.exp.default, lambda fn, i, o: scoped.append(1), within=model),
    ):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(bare), len(scoped)) == (6, 3)


def test_edits_on_an_operator_below_a_hooked_function() -> None:
    """Both levels edit one call: the operator's edit is inside the function's."""
    with (
        hl.attach_function("aten.exp.default", lambda fn, i, o: o[0] * 10),
        hl.attach_function(torch.exp, lambda fn, i, o: o[0] + 1),
    ):
        x = torch.zeros(1, requires_grad=True)
        y = torch.exp(x)
        y.backward()
    assert y.item() == 11.0
    assert x.grad.item() == 10.0


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


def test_operators_on_meta_tensors_run_and_go_unseen() -> None:
    """There is nothing to be seen in them: only devices that compute have their kernels overridden."""
    with hl.attach_function("aten.mm.default", nothing) as handle:
        assert torch.mm(torch.ones(2, 3, device="meta"), torch.ones(3, 2, device="meta")).shape == (2, 2)
    assert handle.report().fired == 0


# -- forks and workers -------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forked_process_hooks_on_operators_do_nothing() -> None:
    """The child runs the operator unhooked; the parent goes on as before."""
    events: list[int] = []
    with hl.attach_function("aten.exp.default", lambda fn, i, o: events.append(os.getpid()) or o[0] * 100):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                value = torch.exp(torch.zeros(1)).item()
                os.write(writer, f"{value} {len(events)}".encode())
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        told = os.read(reader, 100).decode()
        os.close(reader)
        assert told == "1.0 0"
        assert torch.exp(torch.zeros(1)).item() == 100.0
    assert events == [os.getpid()]


class _Doubled(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.exp(torch.zeros(2)) * index


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("target", ["aten.exp.default", "torch.exp", "*", "aten.mul.Tensor"])
def test_data_loader_workers_run_beside_hooks(target: str) -> None:
    """Two forked workers deliver what they deliver without hooks."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    dataset = _Doubled()
    expected = [dataset[index] for index in range(8)]
    with hl.attach_function(target, lambda fn, i, o: None):
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=PATIENCE
        )
        got = [row for batch in loader for row in batch]
    assert all(map(torch.equal, got, expected))


def test_the_warning_about_compiled_code_points_at_the_line_that_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at a file of ours."""
    monkeypatch.setattr(_torch, "has_compiled", lambda: True)
    monkeypatch.setattr(_Said, "compiling", False)
    with pytest.warns(hl.HooklineWarning, match="Code has been compiled") as warned:
        hl.attach_function("aten.exp.default", nothing).remove()
    assert warned[0].filename == __file__


# -- compiled code, in processes of their own ------------------------------------------------------------------


def in_process(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(_PREAMBLE) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


_PREAMBLE = """
    import warnings
    import torch, torch.nn as nn, torch.nn.functional as F
    import hookline as hl
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    expected = model(x)
    def told(caught):
        return [w for w in caught if issubclass(w.category, hl.HooklineWarning)
                and not issubclass(w.category, hl.errors.HookNeverFired)]
"""


@pytest.mark.slow
def test_compiled_code_beside_hooks_runs_and_says_once_that_operators_do_not_fire() -> None:
    """Hooks on operators before and after compiling, hooks on functions with and without a match, fullgraph."""
    printed = in_process("""
        fired = []
        note = lambda fn, i, o: fired.append(fn.name)
        # a hook on an operator, then a compiled call: one warning, then silence
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle = hl.attach_function("aten.addmm", note)
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            out = compiled(x)
            out.sum().backward()
            again = hl.attach_function("aten.mm", note)
            other = torch.compile(nn.Linear(3, 3), backend="aot_eager", fullgraph=True)
            other(x).sum().backward()
            third = hl.attach_function("aten.gelu", note)
            handle.remove(quiet=True); again.remove(quiet=True); third.remove(quiet=True)
        torch.testing.assert_close(out, expected)
        print("warned", len(told(caught)))
        # functions: no match, bare and within
        for within in (None, model):
            with hl.attach_function(torch.softmax, note, within=within):
                torch.testing.assert_close(compiled(x), expected)
        # functions: a match, before and after the first compiled call
        torch.compiler.reset()
        for within in (None, model):
            with hl.attach_function("*.linear", note, within=within):
                fresh = torch.compile(model, backend="aot_eager", fullgraph=True)
                torch.testing.assert_close(fresh(x), expected)
                torch.testing.assert_close(compiled(x), expected)
            torch.testing.assert_close(fresh(x), expected)
        # and eager code is hooked as ever
        fired.clear()
        with hl.attach_function("*.linear", note):
            model(x)
        print("eager", len(fired))
        print("modes", torch._C._len_torch_function_stack())
    """)
    assert printed.split("\n")[:3] == ["warned 1", "eager 2", "modes 0"]


@pytest.mark.slow
def test_a_hook_on_an_operator_after_compiling_is_told_at_once() -> None:
    """The model was compiled before, and its code may never come back to the operator."""
    printed = in_process("""
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with hl.attach_function("aten.addmm", lambda fn, i, o: None):
                torch.testing.assert_close(compiled(x), expected)
            with hl.attach_function("aten.mm", lambda fn, i, o: None):
                pass
        print("warned", len(told(caught)))
    """)
    assert printed.strip() == "warned 1"


def test_importing_hookline_and_attaching_to_functions_compiles_and_imports_no_compiler() -> None:
    """A hook on a function or an operator does not load torch._dynamo."""
    printed = in_process("""
        import sys
        loaded = "torch._dynamo" in sys.modules
        with hl.attach_function("*.linear", lambda fn, i, o: None):
            with hl.attach_function("aten.mm", lambda fn, i, o: None):
                model(x)
        print(loaded, "torch._dynamo" in sys.modules)
    """)
    assert printed.strip() == "False False"


def test_attaching_to_all_operators_takes_a_moment_and_comes_off() -> None:
    """Three thousand of them; afterwards none is overridden."""
    before = overridden_kernels()
    with hl.attach_function("aten.*", nothing) as handle:
        assert len(handle.names) > 2000
        assert len(overridden_kernels() - before) > 3000
    assert overridden_kernels() == before


def test_kernels_that_work_in_several_threads_do_not_wait_for_the_interpreter() -> None:
    """Each thread allocates with ``empty``; a Python kernel in its place would wait for a thread that waits for it."""
    code = (
        "import torch, hookline as hl\n"
        "torch.set_num_threads(2)\n"
        "q, k, v = (torch.randn(4, 8, 128, 64, requires_grad=True) for _ in range(3))\n"
        "attend = torch.nn.functional.scaled_dot_product_attention\n"
        "with hl.attach_function('aten.*', lambda fn, inputs, outputs: None, observe=True) as handle:\n"
        "    for _ in range(3):\n"
        "        attend(q, k, v, is_causal=True).sum().backward()\n"
        "print(handle.report().fired > 50)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_what_may_not_be_overridden_is_refused_alone_and_left_out_of_globs() -> None:
    """By name it is an error that says so; a glob takes the others."""
    for name in ("aten.empty", "aten.detach", "aten.set_"):
        with pytest.raises(hl.errors.UnhookableError, match="no kernel here that Python may stand in for"):
            hl.attach_function(name, nothing)
    handle = hl.attach_function("aten.e*", nothing)
    assert not [name for name in handle.names if name.startswith("aten.empty")]
    assert "aten.exp.default" in handle.names
    handle.remove(quiet=True)
