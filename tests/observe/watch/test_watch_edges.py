"""A watch that comes off, of models and tensors that are odd, with options that make no sense."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers_modules import Returns
from helpers_stats import batch, make_model, of, train
from torch import Tensor, nn

import hookline as hl

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
    model = Returns(lambda x: None, 6, 4)
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

    model = Returns(lambda x: x.as_subclass(Stubborn), 6, 4)
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


def test_what_is_no_optimizer_leaves_no_hook_on_the_others_or_the_model():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for product, given in ((hl.watch, [optimizer, model]), (hl.debug.alarm, model)):
        with pytest.raises(hl.errors.UnhookableError, match="takes a torch"):
            product(model, optimizer=given)
    assert not optimizer._optimizer_step_pre_hooks
    hl.assert_no_hooks(model)


# -- odd models and threads ----------------------------------------------------------------------------------


def test_a_parameter_that_cannot_be_read_does_not_cost_the_step():
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
