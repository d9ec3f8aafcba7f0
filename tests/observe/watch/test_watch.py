"""``watch``: what it counts, and when it comes off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_modules import Returns
from helpers_stats import assert_close, batch, make_model, of, reference
from torch import Tensor, nn

import hookline as hl
from hookline.observe.watch.row import DEFAULT_STATS


def seen_by_torch(model: nn.Module, names: list[str]) -> tuple[dict[str, list[Tensor]], list[Any]]:
    """Outputs and their gradients, kept by hooks of torch's own."""
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            seen.setdefault(f"{name}/forward", []).append(output.detach().clone())
            if output.requires_grad:
                output.register_hook(lambda grad: seen.setdefault(f"{name}/backward", []).append(grad.detach().clone()))

        return hook

    return seen, [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]


# -- numbers -------------------------------------------------------------------------------------------------


def test_outputs_gradients_and_parameters_have_the_statistics_of_a_reference():
    """Three steps, all four kinds, every default statistic."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, _ = seen_by_torch(model, ["0", "1", "2"])
    grads: dict[str, list[Tensor]] = {}
    with hl.watch(model, "#", optimizer=optimizer) as watch:
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).square().sum().backward()
            for name, parameter in model.named_parameters():
                grads.setdefault(f"{name}/param_grad", []).append(parameter.grad.clone())
            optimizer.step()
        metrics = watch.to_metrics()
    values = {f"{name}/param": [parameter] for name, parameter in model.named_parameters()}
    expected = {**seen, **grads, **values}
    assert {name.rpartition("/")[0] for name in metrics} == set(expected)
    for place, tensors in expected.items():
        assert_close(of(metrics, place), reference(tensors, DEFAULT_STATS))


def test_reset_begins_anew_and_keeps_watching():
    """Parameters are told as they are, whatever was reset."""
    model = make_model()
    with hl.watch(model, "0", on=("forward", "param")) as watch:
        model(batch(0))
        first = watch.to_metrics(reset=True)
        assert of(watch.to_metrics(), "0/forward") == {}
        assert of(watch.to_metrics(), "0.weight/param") == of(first, "0.weight/param")
        output = model[0](batch(1))
        assert_close(of(watch.to_metrics(), "0/forward"), reference([output], DEFAULT_STATS))


@pytest.mark.parametrize(
    ("make", "main"),
    [
        (lambda x: (x, x.sum()), lambda out: out[0]),
        (lambda x: {"loss": x.sum(), "logits": x}, lambda out: out["logits"]),
        (lambda x: [x.argmax(-1), {"deep": (x,)}], lambda out: out[1]["deep"][0]),
        (lambda x: x.argmax(-1), lambda out: out),
        (lambda x: x > 0, lambda out: out),
        (lambda x: x.sum(), lambda out: out),
    ],
)
def test_of_a_structure_the_main_tensor_is_watched(make: Any, main: Any):
    """The first with more than one real number; integers and booleans too, if there is nothing else."""
    model = Returns(make, 6, 4)
    with hl.watch(model, None, on="forward") as watch:
        output = model(batch())
    assert_close(of(watch.to_metrics(), "forward"), reference([main(output)], DEFAULT_STATS))


def test_thresholds_units_and_histograms_are_there_when_asked_for():
    """Shares over a magnitude, units that were never anything but zero, counts by binary exponent."""
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0], [0.0, -1.0]]))
    with hl.watch(model, "1", on="forward", stats=("over:2", "dead_fraction", "histogram", "mean")) as watch:
        model(torch.tensor([[1.0, 1.0], [2.0, 0.5]]))
        found = of(watch.to_metrics(), "1/forward")
        assert found["over:2"] == 1 / 8
        assert found["dead_fraction"] == 0.5
        assert found["histogram"] == {"zero": 4, "0": 2, "1": 2}
        model(torch.tensor([[-4.0, 0.0]]))
        assert of(watch.to_metrics(), "1/forward")["dead_fraction"] == 0.25
        watch.reset()
        assert of(watch.to_metrics(), "1/forward") == {}


# -- circumstances -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_outputs_are_still_watched(mode: Any):
    """A watch that began inside inference mode goes on outside of it, and the other way round."""
    model = make_model()
    outputs = []
    with mode(), hl.watch(model, "2", on=("forward", "backward"), during=("train", "eval")) as watch:
        outputs.append(model(batch(0)))
        with torch.inference_mode(False), torch.enable_grad():
            outputs.append(model(batch(1)))
        watch.reset()
        outputs = [model(batch(2))]
        metrics = watch.to_metrics()
    assert_close(of(metrics, "2/forward"), reference(outputs, DEFAULT_STATS))


def scaled_run(scaler: Any, watch_scaler: bool, fused: bool = False) -> dict[str, Any]:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    watched = {"scaler": scaler} if watch_scaler else {}
    with hl.watch(model, "#", on=("backward", "param_grad"), optimizer=optimizer, **watched) as watch:
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(model(batch(step)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return watch.to_metrics()


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_leaves_the_numbers_as_they_would_be_without_it(fused: bool):
    """Of activations, if the watch is told of it, and of parameters anyway: the optimizer's step has them unscaled."""
    plain = scaled_run(torch.amp.GradScaler("cpu", enabled=False), True, fused)
    scaled = scaled_run(torch.amp.GradScaler("cpu", init_scale=1024.0), True, fused)
    assert scaled == pytest.approx(plain, rel=1e-5)
    untold = scaled_run(torch.amp.GradScaler("cpu", init_scale=1024.0), False, fused)
    assert untold["2/backward/norm"] == pytest.approx(1024 * plain["2/backward/norm"], rel=1e-5)
    assert untold["2.weight/param_grad/norm"] == pytest.approx(plain["2.weight/param_grad/norm"], rel=1e-5)
