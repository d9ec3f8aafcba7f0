"""Hooks on operators and on classes: which calls they see, in which scope, and that nothing is left of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_functions import KINDS, Around, fresh, nothing, sin_product
from helpers_waiting import PATIENCE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hookline as hl

aten = torch.ops.aten


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
        z = torch.where(y > 0, y, 0.0).clone()
        z[0] = 1.0
        loss = F.cross_entropy(y, torch.tensor([0, 1, 2] * 2)) + z.max(1).values.mean() + y.view(-1).norm()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [loss.detach(), *(p.detach().clone() for p in parts.parameters()), torch.get_rng_state()]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


def test_a_training_run_with_hooks_on_all_operators_keeps_its_bits_and_every_call_is_seen_once() -> None:
    """As many calls of each as torch's own dispatch mode counts, forward and backward together."""
    with _Recorder() as recorder:
        expected = workload()
    seen: Counter[Any] = Counter()

    def read(fn: hl.sites.FunctionSite, inputs: Any, outputs: Any) -> None:
        seen[fn.func] += 1
        for tensor in (*inputs, *outputs):
            tensor.detach().float().square().mean()  # operators of the hook's own, which go unseen

    with hl.attach_function("aten.*", nothing, on="forward_pre"), hl.attach_function("aten.*", read, observe=True):
        found = workload()
    assert all(map(torch.equal, found, expected))
    assert seen == Counter({op: count for op, count in recorder.seen.items() if op.namespace == "aten"})


def test_a_call_is_told_apart_from_those_of_the_backward_pass() -> None:
    """A product of two matrices runs mm once forward and twice backward; fn says which is which."""
    a, b, seen = fresh(2, 3), fresh(3, 4), []
    with hl.attach_function("aten.mm.default", lambda fn, i, o: seen.append((fn.in_backward, fn.recompute))):
        (a @ b).sum().backward()
    assert seen == [(False, False), (True, False), (True, False)]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_inputs_and_outputs_may_be_replaced_in_every_gradient_mode(mode: Any) -> None:
    """Also those of a custom operator, by whichever of its names it is called."""
    a, b = torch.full((2,), 2.0), torch.full((2,), torch.pi / 2)
    with (
        hl.attach_function(sin_product, lambda fn, inputs: (inputs[0] * 3, inputs[1]), on="forward_pre"),
        hl.attach_function(sin_product, lambda fn, inputs, outputs: outputs[0] + 1),
        mode(),
    ):
        packet = torch.ops.hookline_test.sin_product
        assert [run(a, b).tolist() for run in (sin_product, packet, packet.default)] == [[7.0, 7.0]] * 3


def test_the_wiring_of_gradient_hooks_is_not_seen() -> None:
    """An edit of gradients has the inputs of a module go in as aliases: no operator of the model's."""
    model, seen = nn.Sequential(nn.Tanh(), nn.Bilinear(3, 3, 2)), []
    model.forward = lambda x: model[1](model[0](x), x)

    def run() -> list[str]:
        seen.clear()
        with hl.attach_function("aten.*", lambda fn, i, o: seen.append(fn.name), within=model):
            model(fresh(2, 3)).sum().backward()
        return list(seen)

    plain = run()
    with hl.attach(model, "#", lambda module, grads, _: grads, on="backward"):
        assert run() == plain


@pytest.mark.parametrize("kind", KINDS[2:])
def test_gradient_hooks_on_operators_are_refused(kind: str) -> None:
    """With what to hook instead, and before anything is attached; a list with one operator in it too."""
    for target in ("aten.mm", [torch.tanh, sin_product]):
        with pytest.raises(hl.errors.KindError, match=r"below autograd.*Hook the function"):
            hl.attach_function(target, nothing, on=kind)
    assert hl.attached() == []


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


def test_hooks_load_no_compiler_and_compiled_code_beside_them_says_once_that_they_do_not_fire() -> None:
    """On functions and operators, on before it is compiled and after; eager code is hooked as ever."""
    command = [sys.executable, "-c", textwrap.dedent(_COMPILED)]  # not a warm one, which has the compiler
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.split() == ["False", "1", "torch.nn.functional.linear"], done.stderr


_COMPILED = """
    import sys, warnings
    import torch
    from torch import nn
    import hookline as hl

    model, x, fired = nn.Sequential(nn.Linear(3, 4), nn.GELU()), torch.ones(5, 3), []
    note = lambda fn, i, o: fired.append(fn.name)
    with hl.attach_function(["*.linear", "aten.addmm"], note):
        expected = model(x)
    print("torch._dynamo" in sys.modules)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for target in ("aten.addmm", "*.linear"):
            for within in (None, model):
                handle = hl.attach_function(target, note, within=within)
                torch.testing.assert_close(compiled(x), expected)
                handle.remove(quiet=True)
    print(len([one for one in caught if issubclass(one.category, hl.HooklineWarning)]))
    fired.clear()
    with hl.attach_function("*.linear", note):
        model(x)
    print(*fired)
"""
