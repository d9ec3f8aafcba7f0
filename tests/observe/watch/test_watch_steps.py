"""What a step of a watch is, which steps and phases count, and that a saved watch goes on where it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_stats import assert_close, batch, make_model, of, reference, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.observe.watch.row import DEFAULT_STATS
from hookline.phases import in_phase

# -- steps ---------------------------------------------------------------------------------------------------


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


def test_an_optimizer_that_was_not_given_makes_the_steps_too():
    """Until its first step each forward is one; between steps that are due nothing is on the modules."""
    model, others = make_model(), make_model()
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, others))
    grads = []
    with hl.watch(model, "#", every=2) as watch:
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(3):
                model(batch(3 * step + micro)).square().sum().backward()
            train(others, other, 1)  # holds no parameter of the model
            grads += [model[0].weight.grad.clone()] if step % 2 == 0 else []
            optimizer.step()
            has_hooks = any(module._forward_hooks for module in model)
            assert has_hooks is (step % 2 == 1)
        assert (watch.steps, watch.report()["step"]) == (4, "the optimizer's step")
        report = watch.report()
    assert (report["fired"]["0/forward"], report["fired"]["0/backward"]) == (2 + 3, 2 + 3)
    assert_close(of(watch.to_metrics(), "0.weight/param_grad"), reference(grads, DEFAULT_STATS))
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("given", [True, False])
def test_of_several_optimizers_each_is_read_at_its_own_step_and_the_last_ends_it(given: bool):
    """In the steps that are due, both; whether they were given, or met: then the one that was met last ends a step."""
    model = make_model()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))
    grads: dict[str, list[Tensor]] = {"0": [], "2": []}
    with hl.watch(model, "#", every=2, optimizer=[first, second] if given else None) as watch:
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


def test_without_an_optimizer_a_step_is_a_forward_and_gradients_are_those_that_are_there():
    """As parameters are; ``every=`` holds in training too."""
    model = make_model()
    with hl.watch(model, "0", on=("forward", "param_grad"), every=2) as watch:
        for step in range(4):
            model(batch(step)).sum().backward()
            found = of(watch.to_metrics(), "0.weight/param_grad")
            assert_close(found, reference([model[0].weight.grad], DEFAULT_STATS))
    assert (watch.steps, watch.report()["fired"]["0/forward"]) == (3, 2)


def test_gradients_that_no_optimizer_holds_are_told_as_they_are():
    """Those it holds are read at its steps, and stay when gradients are gone; so in a resumed watch."""
    model = make_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    watch, resumed = (hl.watch(model, "*.weight", on="param_grad") for _ in range(2))
    with watch, resumed:
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step)).sum().backward()
            optimizer.step()
        resumed.load_state_dict(watch.state_dict())
        grad = model[2].weight.grad
        for each in (watch, resumed):
            assert_close(of(each.to_metrics(), "2.weight/param_grad"), reference([grad], DEFAULT_STATS))
            assert each.report()["fired"]["0.weight/param_grad"] == 2
        model.zero_grad()
        for each in (watch, resumed):
            assert each.report()["fired"] == {"0.weight/param_grad": 2, "2.weight/param_grad": 0}


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
    assert watch.report()["step"] == "watch.step()"
    assert watch.steps == 3
    assert watch.report()["fired"] == {"0/forward": 6, "0.weight/param_grad": 3, "0.bias/param_grad": 3}
    assert_close(of(watch.to_metrics(), "0.weight/param_grad"), reference(grads, DEFAULT_STATS))


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
def test_a_repeated_forward_is_counted_once(reentrant: bool):
    """Whole model checkpointed, every second step: forwards, gradients and parameters of those steps, once each."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, "0", every=2) as watch:
        for step in range(6):
            checkpoint(model, batch(step).requires_grad_(), use_reentrant=reentrant).sum().backward()
            optimizer.step()
    fired = watch.report()["fired"]
    assert watch.steps == 6
    assert (fired["0/forward"], fired["0/backward"], fired["0.weight/param_grad"]) == (3, 3, 3)


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


# -- saved and loaded ----------------------------------------------------------------------------------------

_HOW: dict[str, dict[str, Any]] = {
    "forwards": {},
    "every third": {"every": 3},
    "by unit": {"stats": ("mean", "dead_fraction", "histogram")},
    "optimizer": {"optimizer": True, "on": ("forward", "backward", "param", "param_grad"), "every": 2},
}


def _made(how: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, hl.observe.Watch]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {**how, **({"optimizer": optimizer} if "optimizer" in how else {})}
    return model, optimizer, hl.watch(model, "#", **options)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train, with an evaluation before, which is left out where it is known that there was training."""
    with torch.no_grad():
        model(batch(99))
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", _HOW)
def test_a_watch_goes_on_from_its_state(name: str) -> None:
    """In another process, so to say: the metrics are those of the watch that was never saved."""
    model, optimizer, whole = _made(_HOW[name])
    _steps(model, optimizer, range(5))
    looked = whole.steps_since_look
    assert looked is not None
    state, weights = whole.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    _steps(model, optimizer, range(5, 11))

    for is_loaded in (True, False):  # False is the negative control
        model, optimizer, resumed = _made(_HOW[name])
        model.load_state_dict(weights)
        if is_loaded:
            resumed.load_state_dict(state)
        assert (resumed.steps_since_look == looked) is is_loaded
        _steps(model, optimizer, range(5, 11))
        assert (resumed.to_metrics() == whole.to_metrics()) is is_loaded
        assert resumed.report()["left_out"] == whole.report()["left_out"] or not is_loaded
        assert (resumed.steps == whole.steps) is is_loaded
        resumed.remove()
    whole.remove()
