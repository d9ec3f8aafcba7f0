"""``watch``: what it counts, when, and what it leaves alone."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_stats import assert_close, reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.lifecycle.run_phase import in_phase, phase
from hookline.observe.watch.stat_columns import DEFAULT_STATS


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(step: int = 0, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))


def of(metrics: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The statistics of one place."""
    return {
        name.removeprefix(f"{prefix}/"): value for name, value in metrics.items() if name.rpartition("/")[0] == prefix
    }


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


def test_the_model_itself_has_no_name_in_front():
    """As in profiles."""
    model = make_model()
    with hl.watch(model, None, on="forward") as watch:
        output = model(batch())
    assert_close(of(watch.to_metrics(), "forward"), reference([output], DEFAULT_STATS))


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


def test_a_reused_module_counts_every_call():
    """And a shared one under its first name."""
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    with hl.watch(model, "*", on="forward") as watch:
        model(batch())
    assert watch.report()["fired"] == {"forward": 1, "0/forward": 2, "1/forward": 1}


def test_shapes_may_change_and_be_empty():
    """Every batch counts by its numbers; an empty one is a firing without any."""
    model = make_model()
    seen, _ = seen_by_torch(model, ["0"])
    with hl.watch(model, "0", on="forward") as watch:
        for rows in (1, 7, 0, 3):
            model(batch(rows, rows))
    assert_close(of(watch.to_metrics(), "0/forward"), reference(seen["0/forward"], DEFAULT_STATS))
    assert watch.report()["fired"] == {"0/forward": 4}


class Shaped(nn.Module):
    """Gives out whatever it is told to make of its input."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.make(self.inner(x))


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
    model = Shaped(make)
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


def test_units_of_an_image_are_its_channels():
    """The second of four dimensions."""
    model = nn.Identity()
    image = torch.zeros(2, 3, 4, 5)
    image[:, 1] = 1.0
    with hl.watch(model, None, on="forward", stats=["dead_fraction"]) as watch:
        model(image)
    assert watch.to_metrics() == {"forward/dead_fraction": pytest.approx(2 / 3)}


def test_a_value_of_ones_own_can_be_counted_too():
    """By a name, without a kind."""
    with hl.watch(make_model(), on="param") as watch:
        watch.update("loss", torch.tensor(2.0))
        watch.update("loss", torch.tensor(4.0))
    assert of(watch.to_metrics(), "loss")["mean"] == 3.0
    with pytest.raises(hl.errors.OptionError, match="takes a tensor, got float"):
        watch.update("loss", 2.0)  # type: ignore[arg-type]


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


def test_under_autocast_half_precision_is_counted_in_float32():
    """bfloat16 outputs, sums that bfloat16 could not hold."""
    model = nn.Linear(64, 4096)
    with torch.autocast("cpu", torch.bfloat16), hl.watch(model, None) as watch:
        output = model(torch.randn(64, 64))
        output.float().sum().backward()
    assert output.dtype is torch.bfloat16
    assert_close(of(watch.to_metrics(), "forward"), reference([output], DEFAULT_STATS))


class Checkpointed(nn.Module):
    """Repeats its middle in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.last(self.first(x).relu()), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_counted_once(reentrant: bool):
    """Forward and backward, both ways of checkpointing."""
    model = Checkpointed(reentrant)
    with hl.watch(model, ["first", "last"], on=("forward", "backward")) as watch:
        for step in range(2):
            model(batch(step).requires_grad_()).sum().backward()
    assert watch.report()["fired"] == {"first/forward": 2, "last/forward": 2, "first/backward": 2, "last/backward": 2}


def test_an_output_changed_in_place_is_counted_as_it_was():
    """The next layer writes over it."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True))
    with hl.watch(model, "0", on="forward") as watch:
        model(batch())
    with torch.no_grad():
        assert_close(of(watch.to_metrics(), "0/forward"), reference([model[0](batch())], DEFAULT_STATS))


def test_gradient_accumulation_reads_parameters_once_per_optimizer_step():
    """When all micro-batches are in."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, "2", on=("backward", "param_grad"), optimizer=optimizer) as watch:
        for micro in range(3):
            model(batch(micro)).square().sum().backward()
        expected = model[2].weight.grad.clone()
        optimizer.step()
    assert_close(of(watch.to_metrics(), "2.weight/param_grad"), reference([expected], DEFAULT_STATS))
    assert watch.report()["fired"] == {"2/backward": 3, "2.weight/param_grad": 1, "2.bias/param_grad": 1}


def test_without_an_optimizer_parameters_are_read_after_each_backward():
    """Accumulated so far, as .grad then is."""
    model = make_model()
    with hl.watch(model, "0.weight", on="param_grad") as watch:
        model(batch(0)).sum().backward()
        first = model[0].weight.grad.clone()
        model(batch(1)).sum().backward()
    assert_close(of(watch.to_metrics(), "0.weight/param_grad"), reference([first, model[0].weight.grad], DEFAULT_STATS))


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


def test_nan_in_a_run_is_told_and_breaks_nothing():
    """Which module had it, and in how many firings."""
    model = make_model()
    with hl.watch(model, "#", on="forward") as watch:
        model(batch(0))
        poisoned = batch(1)
        poisoned[0, 0] = math.nan
        model(poisoned)
    metrics = watch.to_metrics()
    assert metrics["0/forward/nonfinite"] == 1.0
    assert metrics["0/forward/nan"] == 8.0
    assert math.isnan(metrics["0/forward/mean"])


# -- steps ---------------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.step()


def test_with_every_only_due_steps_are_counted_and_other_steps_carry_no_hooks():
    """Steps 0, 3 and 6 of 8; between them nothing is on the modules."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hl.watch(model, "#", every=3, optimizer=optimizer) as watch:
        train(model, optimizer, 1)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)
        train(model, optimizer, 7)
        assert watch.steps == 8
        fired = watch.report()["fired"]
    assert {place: count for place, count in fired.items() if not place.endswith("/param")} == {
        **{f"{name}/{kind}": 3 for name in "012" for kind in ("forward", "backward")},
        **{f"{name}.{key}/param_grad": 3 for name in "02" for key in ("weight", "bias")},
    }


def test_without_an_optimizer_a_step_is_a_forward_of_the_model():
    """Forwards in evaluation mode do not count once the model has trained."""
    model = make_model()
    with hl.watch(model, "#", on=("forward", "backward"), every=2) as watch:
        for step in range(5):
            model(batch(step)).sum().backward()
            model.eval()
            with torch.no_grad():
                model(batch(step))
            model.train()
        assert watch.step_is == "one forward of the model"
    assert watch.report()["fired"]["0/backward"] == 3
    assert watch.steps == 4


def test_a_model_that_only_evaluates_has_steps_too():
    """Every forward is one."""
    model = make_model().eval()
    with hl.watch(model, "0", on="forward", every=2) as watch, torch.no_grad():
        for step in range(5):
            model(batch(step))
    assert watch.report()["fired"] == {"0/forward": 3}


def test_steps_can_be_told_by_hand():
    """However many forwards a step has; gradients of parameters are read once at each."""
    model = make_model()
    grads = []
    with hl.watch(model, "0", on=("forward", "param_grad")) as watch:
        for step in range(3):
            model.zero_grad()
            model(batch(step)).sum().backward()
            model(batch(step))
            watch.step()
            grads.append(model[0].weight.grad.clone())
    assert watch.step_is == "watch.step()"
    assert watch.steps == 3
    assert watch.report()["fired"] == {"0/forward": 6, "0.weight/param_grad": 3, "0.bias/param_grad": 3}
    assert_close(of(watch.to_metrics(), "0.weight/param_grad"), reference(grads, DEFAULT_STATS))


def test_steps_are_made_by_one_side_only():
    """The optimizer, or the user; and with a scaler only the optimizer knows what is unscaled."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, optimizer=optimizer) as watch, pytest.raises(hl.errors.OptionError, match="not both"):
        watch.step()
    scaler = torch.amp.GradScaler("cpu")
    with hl.watch(model, scaler=scaler) as watch, pytest.raises(hl.errors.OptionError, match="give optimizer="):
        watch.step()


def test_a_warmup_begins_without_hooks():
    """They come on when the first step is due."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = hl.StepSchedule("burst", stride=4, burst_length=2, warmup=3)
    with hl.watch(model, "0", on="forward", every=schedule, optimizer=optimizer) as watch:
        hl.assert_no_hooks(model)
        train(model, optimizer, 10)
    assert watch.report()["fired"] == {"0/forward": 4}  # 4, 5, 8, 9


def test_two_optimizers_are_read_each_at_its_own_step():
    """In the steps that are due, both; a step is over when the last has made its own."""
    model = make_model()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))
    grads: dict[str, list[Tensor]] = {"0": [], "2": []}
    with hl.watch(model, "#", on="param_grad", optimizer=[first, second], every=2) as watch:
        for step in range(4):
            model.zero_grad()
            model(batch(step)).sum().backward()
            for name, seen in grads.items():
                seen += [model.get_submodule(name).weight.grad.clone()] if step % 2 == 0 else []
            first.step()
            second.step()
    assert watch.steps == 4
    for name, seen in grads.items():
        assert_close(of(watch.to_metrics(), f"{name}.weight/param_grad"), reference(seen, DEFAULT_STATS))


def test_a_closure_is_read_after_the_step_that_calls_it():
    """Its gradients are made in the middle of it."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    grads = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(len(grads))).square().sum()
        loss.backward()
        grads.append(model[0].weight.grad.clone())
        return loss

    with hl.watch(model, "0.weight", on="param_grad", optimizer=optimizer) as watch:
        optimizer.step(closure)
        optimizer.step(closure)
    assert_close(of(watch.to_metrics(), "0.weight/param_grad"), reference(grads, DEFAULT_STATS))


@pytest.mark.parametrize("reentrant", [False, True])
def test_without_an_optimizer_a_repeated_forward_is_no_step(reentrant: bool):
    """Whole model checkpointed, every second step: forwards, gradients and parameters of those steps, once each."""
    model = make_model()
    with hl.watch(model, "0", every=2) as watch:
        for step in range(6):
            checkpoint(model, batch(step).requires_grad_(), use_reentrant=reentrant).sum().backward()
    fired = watch.report()["fired"]
    assert watch.steps == 5
    assert (fired["0/forward"], fired["0/backward"]) == (3, 3)
    if not reentrant:  # there the model's own gradients come in the inner pass
        assert fired["0.weight/param_grad"] == 3


def test_reentrant_checkpoints_inside_do_not_have_parameters_read_early():
    """Once per backward pass, when it is over."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=True))

    model = Two()
    with hl.watch(model, "*", on="param_grad") as watch:
        for step in range(3):
            model(batch(step).requires_grad_()).sum().backward()
    assert set(watch.report()["fired"].values()) == {3}


def test_without_an_optimizer_steps_that_are_not_due_carry_no_hooks():
    """Neither on modules nor on parameters; one hook on the model tells when a step begins."""
    model = make_model()
    with hl.watch(model, "#", every=1000):
        for step in range(3):
            model(batch(step)).sum().backward()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        assert len(hl.attached(model)) == 1


def test_what_is_not_training_is_left_out_unless_asked_for():
    """Evaluation and interventions, as the loops tell, and whatever the user pauses for."""
    model = make_model()
    everything = {"train", "eval", "intervention"}
    with hl.watch(model, "0", on="forward") as watch, hl.watch(model, "0", on="forward", during=everything) as whole:
        model(batch())
        with in_phase("eval"):
            model(batch())
        with in_phase("intervention"):
            model(batch())
        with watch.paused():
            model(batch())
        model(batch())
    assert watch.report()["fired"] == {"0/forward": 2}
    assert whole.report()["fired"] == {"0/forward": 5}


# -- coming off, being told ----------------------------------------------------------------------------------


def test_a_watch_comes_off_without_a_trace_and_keeps_its_numbers():
    """Twice is no harm; an error in the block takes it off too."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = hl.watch(model, optimizer=optimizer)
    train(model, optimizer, 1)
    with pytest.raises(ZeroDivisionError), watch:
        1 / 0
    watch.remove()
    hl.assert_no_hooks(model)
    assert not optimizer._optimizer_step_pre_hooks
    assert of(watch.to_metrics(), "0/forward")["mean"]
    train(model, optimizer, 1)
    assert watch.report()["fired"]["0/forward"] == 1


def test_a_watch_that_saw_nothing_says_so_when_it_comes_off():
    """The model ran, its one watched module did not."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Idle()
    watch = hl.watch(model, "idle", on="forward")
    model(torch.ones(1, 2))
    with pytest.warns(hl.errors.HookNeverFired, match="'idle'"):
        watch.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hl.watch(model, "*", on="forward") as watch:
            model(torch.ones(1, 2))
    assert watch.report()["silent"] == {"idle/forward": "nothing came by"}


def test_an_output_without_a_tensor_is_a_warning_and_no_error():
    """Once, with what to do."""
    model = Shaped(lambda x: None)
    with hl.watch(model, None, on="forward") as watch:
        with pytest.warns(hl.HooklineWarning, match=r"no tensor in its output, a NoneType.*exclude="):
            model(batch())
        model(batch())
    assert watch.to_metrics() == {}


def test_a_tensor_that_cannot_be_read_does_not_cost_the_run():
    """A subclass that refuses everything: one warning, and the forward goes on."""

    class Stubborn(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (Tensor.amin, Tensor.detach):
                raise RuntimeError("not for you")
            return super().__torch_function__(func, types, args, kwargs or {})

    model = Shaped(lambda x: x.as_subclass(Stubborn))
    with hl.watch(model, None, on="forward") as watch:
        with pytest.warns(hl.HooklineWarning, match=r"could not be taken: RuntimeError: not for you.*exclude="):
            model(batch())
        model(batch())
    assert "not for you" in watch.report()["silent"]["forward"]


def test_transforms_of_torch_func_go_unwatched_and_undisturbed():
    """Their tensors have no numbers of their own."""
    model = make_model()
    with hl.watch(model, "#", on=("forward", "backward")) as watch:
        rows = torch.vmap(model)(batch())
        jacobian = torch.func.jacrev(model)(batch()[0])
        assert watch.to_metrics() == {}
        assert "has no numbers to look at" in watch.report()["silent"]["0/forward"]
        plain = model(batch())
    assert torch.allclose(rows, plain)
    assert jacobian.shape == (3, 6)
    assert "0/forward" not in watch.report()["silent"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"on": "forwards"}, hl.errors.OptionError, "unknown kind 'forwards'; did you mean 'forward'"),
        ({"on": ()}, hl.errors.OptionError, "no kind"),
        ({"stats": ["median"]}, hl.errors.OptionError, "Unknown statistic 'median'"),
        ({"every": 0}, hl.errors.OptionError, "every="),
        ({"during": "test"}, hl.errors.OptionError, "during="),
        ({"target": "layers.#"}, hl.errors.NoMatchError, "nearest"),
        ({"target": "0.wait", "on": "param"}, hl.errors.NoMatchError, "0.weight"),
        ({"optimizer": "adam"}, TypeError, "optimizer"),
        ({"optimizer": []}, hl.errors.OptionError, "optimizer= is an empty list"),
        ({"scaler": 1024.0}, hl.errors.OptionError, r"scaler= takes a torch.amp.GradScaler, got a float"),
    ],
)
def test_bad_input_is_an_error_and_leaves_nothing_behind(options: dict[str, Any], error: type[Exception], text: str):
    """Before anything is attached, or after everything is off again."""
    model = make_model()
    with pytest.raises(error, match=text):
        hl.watch(model, options.pop("target", "*"), **options)
    hl.assert_no_hooks(model)


def test_a_model_without_parameters_is_watched_all_the_same():
    """Nothing to say of them is no error, unless nothing else was asked for."""
    model = nn.Tanh()
    with hl.watch(model, None) as watch:
        model(torch.ones(2))
    assert watch.report()["fired"] == {"forward": 1, "backward": 0}
    with pytest.raises(hl.errors.NoMatchError):
        hl.watch(nn.Tanh(), None, on="param")


def test_it_prints_as_a_table():
    """One line per place, one column per statistic."""
    model = make_model()
    with hl.watch(model, "#", on="forward", stats=("mean", "std")) as watch:
        assert str(watch) == "nothing watched yet"
        assert repr(watch) == "nothing watched yet\non, .remove() takes it off"
        model(batch())
    head, *lines = str(watch).splitlines()
    assert repr(watch) == f"{watch}\noff"
    assert head.split() == ["mean", "std"]
    assert [line.split()[0] for line in lines] == ["0/forward", "1/forward", "2/forward"]


def test_a_copied_model_carries_no_watch():
    """Nor does a pickled one; a watch it keeps is one that saw nothing."""
    model = make_model()
    model.watch = hl.watch(model, "#")
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    for other in (twin, again):
        other(batch())
        hl.assert_no_hooks(other)
        assert other.watch.to_metrics() == {}
    model.watch.remove(quiet=True)


def test_replaced_parameters_are_followed():
    """What is at the name when it is read is what counts."""
    model = make_model()
    with hl.watch(model, "0.weight", on="param") as watch:
        model[0].weight = nn.Parameter(torch.full((8, 6), 2.0))
        assert watch.to_metrics()["0.weight/param/mean"] == 2.0


def test_a_watched_model_can_go():
    """The hooks keep nothing alive once the watch is off."""
    model = make_model()
    watch = hl.watch(model)
    F.mse_loss(model(batch()), torch.zeros(5, 3)).backward()
    watch.remove()
    gone = weakref.ref(model[0])
    del model, watch
    gc.collect()
    assert gone() is None


# -- what a reviewer found -----------------------------------------------------------------------------------


def test_thresholds_may_be_written_in_any_way():
    """6 and 6.0 are one, and long ones are told apart."""
    model = nn.Identity()
    stats = ["over:6.0", "over:6", "over:1e-7", "over:0.1234567", "over:0.1234568"]
    with hl.watch(model, None, on="forward", stats=stats) as watch:
        model(torch.tensor([0.12345675, 7.0]))
    assert watch.to_metrics() == {
        "forward/over:6": 0.5,
        "forward/over:1e-07": 1.0,
        "forward/over:0.1234567": 1.0,
        "forward/over:0.1234568": 0.5,
    }


def test_numbers_at_the_end_of_float64_break_nothing():
    """Whose squares are infinite."""
    model = nn.Identity()
    with hl.watch(model, None, on="forward") as watch:
        model(torch.tensor([1e200, 1e200], dtype=torch.float64))
    assert of(watch.to_metrics(), "forward")["mean"] == 1e200


def test_a_gradient_that_repeats_itself_is_not_written_out():
    """The gradient of a sum is one number, however many it stands for."""
    model = nn.Identity()
    x = torch.ones(1, 1).expand(1 << 20, 1 << 20)  # 4 TiB, if it were
    with hl.watch(model, None, on="forward", stats=("mean", "norm", "max", "over:0.5")) as watch:
        model(x)
    assert watch.to_metrics() == {
        "forward/mean": 1.0,
        "forward/norm": float(1 << 20),
        "forward/max": 1.0,
        "forward/over:0.5": 1.0,
    }


def test_first_forwards_in_many_threads_lose_nothing():
    """Rows are handed out once, whoever comes first."""
    from concurrent.futures import ThreadPoolExecutor

    for _ in range(30):
        model = nn.Sequential(*(nn.Identity() for _ in range(8)))
        with hl.watch(model, "#", on="forward") as watch, ThreadPoolExecutor(8) as pool:
            list(pool.map(model, map(batch, range(8))))
        assert watch.report()["fired"] == {f"{index}/forward": 8 for index in range(8)}
        assert len({row.number for place in watch._engine.places.values() for row in place.rows.values()}) == 8


def test_copies_of_a_watched_module_go_unwatched():
    """As DataParallel makes them: they carry the hooks of the original."""
    model = make_model()
    with hl.watch(model, "#", on=("forward", "backward")) as watch:
        twin = model[0]._replicate_for_data_parallel()
        twin.weight, twin.bias = model[0].weight, model[0].bias
        twin(batch()).sum().backward()
        model(batch()).sum().backward()
    assert watch.report()["fired"]["0/forward"] == 1


def test_a_scripted_part_is_no_obstacle():
    """Its parameters are read, its insides are left alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 2))
        watch = hl.watch(model)
    model(batch()).sum().backward()
    assert {"0.weight/param/mean", "0.weight/param_grad/mean", "1/forward/mean"} <= watch.to_metrics().keys()
    watch.remove()


def test_a_parameter_that_cannot_be_read_does_not_cost_the_step():
    """One warning, and the optimizer goes on."""

    class Grad(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.detach:
                raise RuntimeError("not for you")
            return super().__torch_function__(func, types, args, kwargs or {})

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, "0.weight", on="param_grad", optimizer=optimizer):
        model[0].weight.grad = torch.ones(8, 6).as_subclass(Grad)
        with pytest.warns(hl.HooklineWarning, match="not for you"):
            optimizer.step()


def test_a_glob_that_only_parameters_answer_to_watches_those():
    """With no word about kinds; asked for modules, it is an error."""
    model = make_model()
    with hl.watch(model, "*.weight") as watch:
        model(batch()).sum().backward()
    assert watch.report()["fired"].keys() == {
        f"{name}.weight/{kind}" for name in "02" for kind in ("param", "param_grad")
    }
    with pytest.raises(hl.errors.NoMatchError):
        hl.watch(model, "*.weight", on="forward")


def test_lazy_and_frozen_parameters_are_read_once_they_are_there():
    """What they are is looked at when they are read."""
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with hl.watch(model, "#", on=("forward", "param_grad")) as watch:
            model(batch()).sum().backward()
            model[1].requires_grad_(True)
            model(batch()).sum().backward()
    fired = watch.report()["fired"]
    assert (fired["0.weight/param_grad"], fired["1.weight/param_grad"]) == (2, 1)


def test_what_is_kept_per_unit_is_kept_of_parameters_and_own_values_too():
    """And scaled gradients are told as they would be without a scaler."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.ones_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hl.watch(model, None, stats=["histogram"], scaler=scaler, optimizer=optimizer) as watch:
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        watch.update("mine", torch.tensor([4.0]))
        metrics = watch.to_metrics()
    assert metrics == {
        "forward/histogram": {"2": 2},
        "backward/histogram": {"0": 2},
        "weight/param/histogram": {"0": 8},
        "weight/param_grad/histogram": {"0": 8},
        "mine/histogram": {"2": 1},
    }


def test_phases_left_in_another_order_do_not_stick():
    """As two threads do it."""
    one, other = in_phase("eval"), in_phase("intervention")
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert phase() == "intervention"
    other.__exit__(None, None, None)
    assert phase() == "train"


def test_memory_is_flat_over_many_steps():
    """Two thousand steps of all four kinds: nothing is kept of a step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hl.watch(model, optimizer=optimizer) as watch:
        train(model, optimizer, 200)
        gc.collect()
        before = len(gc.get_objects())
        train(model, optimizer, 2000)
        gc.collect()
        assert len(gc.get_objects()) - before < 100
        assert watch.steps == 2200
