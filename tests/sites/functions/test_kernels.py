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
from typing import Any

import pytest
import torch
from helpers_functions import (
    KINDS,
    LEVELS,
    Around,
    fresh,
    nothing,
    overridden_kernels,
    patched_classes,
)
from helpers_waiting import PATIENCE
from helpers_warm import run_warm
from torch import Tensor, nn

import hookline as hl
from hookline.sites import _torch
from hookline.sites._torch import TRANSFORMS

aten = torch.ops.aten


def hooks_of_module(operator: str) -> str:
    """Who is registered for what, as the dispatcher tells."""
    return torch._C._dispatch_dump_table(operator)


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
@pytest.mark.full
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
    done = run_warm([sys.executable, "-c", code], capture_output=True, text=True)
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


def test_an_operator_that_cannot_be_hooked_wholly_has_its_kernels_back(monkeypatch):
    """Here the second kernel cannot be overridden."""
    original, calls = _torch.override_kernel, []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            raise RuntimeError("no more")
        return original(*args)

    monkeypatch.setattr(_torch, "override_kernel", fails)
    with pytest.raises(RuntimeError, match="no more"):
        hl.attach_function(aten.mul.Tensor, nothing)
    assert not overridden_kernels()
