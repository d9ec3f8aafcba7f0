"""``activation_stats``: the numbers are those of torch, by module, whatever calls it and however."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers_factories import PADDED, Wrapped
from helpers_threads import in_threads
from torch import Tensor, nn

import hookline as hl
from hookline.factories import activation_stats, serving, streaming_stats
from hookline.observe.watch import engine
from hookline.observe.watch.row import Layout, reduce_on_device
from hookline.sites.compiled.op_schemas import Share

STATS = ["mean", "std", "rms", "min", "max", "absmax", "zero_fraction", "nan", "inf"]


def expected(tensor: Tensor) -> dict[str, float]:
    numbers = tensor.double()
    return {
        "mean": numbers.mean().item(),
        "std": numbers.std(correction=0).item(),
        "rms": numbers.square().mean().sqrt().item(),
        "min": numbers.min().item(),
        "max": numbers.max().item(),
        "absmax": numbers.abs().max().item(),
        "zero_fraction": (numbers == 0).double().mean().item(),
        "nan": 0.0,
        "inf": 0.0,
    }


def of(metrics: dict[str, float], module: str) -> dict[str, float]:
    return {name.removeprefix(f"{module}/"): value for name, value in metrics.items() if name.startswith(f"{module}/")}


def test_statistics_are_those_of_torch_for_each_module_of_one_hook() -> None:
    """One object on three modules keeps them apart, over several calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    hook = activation_stats({"stats": STATS})
    seen: dict[str, list[Tensor]] = {"0": [], "1": [], "2": []}
    with hl.attach(model, "*", hook), torch.no_grad():
        for _ in range(3):
            x = torch.randn(7, 4)
            model(x)
            for name, module in model.named_children():
                x = module.forward(x)
                seen[name].append(x)
    metrics = hook.to_metrics()
    for name, tensors in seen.items():
        assert of(metrics, name) == pytest.approx(expected(torch.cat(tensors)), rel=1e-5, abs=1e-7)
    assert of(metrics, "Sequential") == pytest.approx(of(metrics, "2"))  # the model itself has no name


@pytest.mark.parametrize("make", ["tensor", "tuple", "dict", "dataclass", "list"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_main_tensor_is_found_in_any_structure_and_mode(make: str, mode: type) -> None:
    """Tuple, dict, dataclass and list, called by plain torch with three arguments."""
    module = Wrapped(make)
    hook = activation_stats({"stats": STATS})
    module.register_forward_hook(hook)
    x = torch.randn(2, 3, 4)
    with mode():
        module(x)
        want = expected(module.inner.forward(x))
    assert of(hook.to_metrics(), "Wrapped.0") == pytest.approx(want, rel=1e-5, abs=1e-7)


def test_modules_are_named_by_what_they_say_of_themselves() -> None:
    """Without a site: prefix, then layer_id, then the class and a count; each module has its own."""
    hook = activation_stats({"stats": ["mean"]})
    modules = [nn.Identity() for _ in range(5)]
    modules[1].prefix = "model.layers.1"
    modules[2].layer_id = 7
    modules[4].layer_id = 7  # of another stack
    for _ in range(2):
        for module in modules:
            hook(module, (), torch.ones(2))
    names = [name.removesuffix("/mean") for name in hook.to_metrics()]
    assert names == ["Identity.0", "model.layers.1", "Identity.7", "Identity.1", "Identity.7.0"]


def test_padding_is_not_counted() -> None:
    """Of a batch that is padded on the left, only real tokens count; NaN in the padding is nothing."""
    x = torch.randn(2, 3, 4)
    real = torch.cat([x[0], x[1, 2:]])
    x[1, :2] = torch.nan
    for output in (x, x.flatten(0, 1)):
        hook = activation_stats({"stats": STATS})
        with serving(PADDED):
            hook(nn.Identity(), (), output)
        assert of(hook.to_metrics(), "Identity.0") == pytest.approx(expected(real), rel=1e-5)
    hook = activation_stats({"stats": STATS})
    hook(nn.Identity(), (), x)
    assert hook.to_metrics()["Identity.0/nan"] == 8  # the control: nobody said what is padding


def test_the_sum_of_a_pair_is_looked_at_if_asked_for() -> None:
    """(hidden, residual) counts as their sum with add_residual, and as hidden without."""
    pair = (torch.full((2, 4), 1.0), torch.full((2, 4), 2.0))
    for asked, mean in ((True, 3.0), (False, 1.0)):
        hook = activation_stats({"stats": ["mean"], "add_residual": asked})
        hook(nn.Identity(), (), pair)
        assert hook.to_metrics() == {"Identity.0/mean": mean}


def test_two_threads_lose_nothing() -> None:
    """Two threads call one hook on one module; every firing is in the sums."""
    hook, module = activation_stats({"stats": ["mean", "max", "norm"]}), nn.Identity()
    tensor = torch.ones(3)

    in_threads(lambda _: [hook(module, (), tensor) for _ in range(500)])
    cells = hook.read()["Identity.0"]
    assert (cells["fires"], cells["count"], cells["sum"]) == (1000, 3000, 3000)
    assert hook.to_metrics()["Identity.0/norm"] == pytest.approx(3**0.5)


def test_tables_are_logged_when_they_are_due_and_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five forwards, each of a second, leave tables after the second, the fourth and the last."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    model = nn.Sequential(nn.Identity(), nn.Identity())
    hook = activation_stats({"stats": ["max", "nan"], "log_every": 2})
    with caplog.at_level(logging.INFO, "hookline.factories"), hl.attach(model, "#", hook):
        for value in range(5):
            clock[0] = float(value)
            model(torch.tensor([float(value), torch.inf if value == 4 else 0.0]))
        hook.close()
        hook.close()
    texts = [record.getMessage().splitlines() for record in caplog.records]
    assert [text[0] for text in texts] == ["2 forwards", "4 forwards", "5 forwards"]
    assert [text[-1].split()[:2] for text in texts] == [["1", "1"], ["1", "3"], ["1", "inf"]]


class Layered(nn.Module):
    """Three layers whose outputs the next one changes in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu_()
        return x


class KernelOnCpu:
    """Stands for the kernel of a GPU, and keeps how many tensors each launch had."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.launches: list[int] = []

    def prepare(self, items: list[Any]) -> Any:
        return lambda: self.take(items)

    def take(self, items: list[Any]) -> None:
        self.launches.append(len(items))
        for tensor, row, scale in items:
            row.merge_tensor(reduce_on_device(tensor, self.layout, scale))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> KernelOnCpu:
    """The CPU is taken for a device that works behind the host."""
    kernel = KernelOnCpu(Layout.of(tuple(STATS)))
    monkeypatch.setattr(streaming_stats, "_READ_AT_ONCE", ())
    monkeypatch.setattr(engine, "_READ_ON_HOST", ())

    def kernel_of(self: Any, device: torch.device) -> KernelOnCpu:
        return self._kernels.setdefault(device, kernel)

    monkeypatch.setattr(engine.StatsEngine, "kernel", kernel_of)
    return kernel


def test_outputs_behind_the_host_count_as_they_were_in_the_call(kernel: KernelOnCpu) -> None:
    """They are changed in place right after; from the second forward on, those of one are reduced together."""
    model, hook = Layered(), activation_stats({"stats": STATS})
    given, seen = torch.randn(9, 4, 1, 16, generator=torch.Generator().manual_seed(1)), []
    with hl.attach(model, "layers.#", hook, observe=True), torch.inference_mode():
        for x in given:
            model(x)
            for layer in model.layers:
                seen.append(layer.forward(x))
                x = seen[-1].relu()
    for number in range(3):
        want = expected(torch.cat(seen[number::3]))
        assert of(hook.to_metrics(), f"layers.{number}") == pytest.approx(want, rel=1e-5, abs=1e-7)
    assert kernel.launches == [1] * 3 + [3] * 8
    hook.reset()
    assert hook.read()["layers.0"]["count"] == 0


def test_outputs_of_compiled_code_are_reduced_in_one_launch(kernel: KernelOnCpu) -> None:
    """Before it goes on, as it uses their memory again."""
    model, hook = Layered(), activation_stats({"stats": STATS})
    outputs = [torch.randn(4, 16) for _ in model.layers]
    hook.prepare([(f"layers.{n}", layer, Share(n, 1, 1)) for n, layer in enumerate(model.layers)])(outputs)
    assert kernel.launches == [3]
    assert of(hook.to_metrics(), "layers.2") == pytest.approx(expected(outputs[2]), rel=1e-5, abs=1e-7)
