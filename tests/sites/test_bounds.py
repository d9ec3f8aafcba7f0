"""clip_gradients and freeze: what they bound, in every precision, and that they can be seen."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def run_backward(model: nn.Module) -> None:
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1.0, 1e-3])
def test_a_norm_is_bounded_in_every_precision(dtype: torch.dtype, bound: float) -> None:
    """Gradients whose norm does not fit into their own precision come out scaled, not zeroed or unbounded."""
    layer = nn.Linear(8, 8, bias=False).to(dtype)
    with hl.clip_gradients(layer, norm=bound):
        layer.weight.backward(torch.full((8, 8), 3e4, dtype=dtype))
    norm = layer.weight.grad.double().norm().item()
    assert norm == pytest.approx(bound, rel=2 * torch.finfo(dtype).eps + 1e-6)


@pytest.mark.parametrize("limit", [{"value": 0.5}, {"norm": 0.5}])
def test_sparse_gradients_are_bounded_and_stay_sparse(limit: dict[str, float]) -> None:
    """An embedding with sparse gradients takes both bounds."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    with hl.clip_gradients(model, "0", **limit):
        (model(torch.tensor([1, 1, 2])) * 100).sum().backward()
    grad = model[0].weight.grad
    assert grad.is_sparse
    assert grad.to_dense().abs().max() <= 0.5
    assert grad.to_dense().abs().max() > 0


@pytest.mark.parametrize("bound", [0, -1.0, float("nan"), "a"])
def test_a_bound_that_is_none_is_refused(bound: object) -> None:
    """Before anything is attached."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="above 0"):
        hl.clip_gradients(model, value=bound)
    hl.assert_no_hooks(model, foreign=True)


# -- seen ----------------------------------------------------------------------------------------------------


def test_hooks_on_parameters_are_seen() -> None:
    """find names them and assert_no_hooks minds them, until they are removed; foreign ones are foreign."""
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.freeze(model, "0"):
        assert "freeze (param_grad)" in repr(hl.find(model))
        with pytest.raises(hl.errors.HooksLeftError, match="freeze"):
            hl.assert_no_hooks(model)
    hl.assert_no_hooks(model, foreign=True)
    model[0].weight.register_post_accumulate_grad_hook(print)
    hl.assert_no_hooks(model)
    with pytest.raises(hl.errors.HooksLeftError, match="print"):
        hl.assert_no_hooks(model, foreign=True)


def test_freeze_gives_a_handle_with_a_receipt() -> None:
    """One handle, found by attached, that counts each parameter's gradients and says which they are."""
    model = make_model()
    handle = hl.freeze(model, "0")
    assert isinstance(handle, hl.HookHandle)
    assert hl.attached(model) == [handle]
    assert hl.attached(model[2]) == []
    assert repr(handle) == "<HookHandle freeze param_grad on 2 parameters, fired 0; on, .remove() takes it off>"
    run_backward(model)
    run_backward(model)
    report = handle.report()
    assert (report.name, report.kind, report.matched, report.attached) == ("freeze", "param_grad", 2, 2)
    assert {site.name: (site.fired, site.last_step) for site in report.sites} == {"0.weight": (2, 1), "0.bias": (2, 1)}
    handle.remove()
    assert handle.report().attached == 0
    hl.assert_no_hooks(model, foreign=True)


def test_clip_gives_a_set_of_two_handles_with_receipts() -> None:
    """One on the parameters and one on the modules, both found by attached."""
    model = make_model()
    handles = hl.clip_gradients(model, "0", value=1.0)
    assert isinstance(handles, hl.HandleSet)
    assert hl.attached(model) == list(handles)
    run_backward(model)
    on_parameters, on_modules = handles.report()
    assert (on_parameters.kind, on_parameters.matched, on_parameters.fired) == ("param_grad", 2, 2)
    assert (on_modules.kind, on_modules.matched, on_modules.fired) == ("backward", 1, 1)
    with pytest.raises(
        hl.errors.HooksLeftError, match=r"0: clip_gradients \(param_grad\); 0: clip_gradients \(backward\)"
    ):
        hl.assert_no_hooks(model)
    handles.remove()
    assert hl.attached(model) == []
    hl.assert_no_hooks(model, foreign=True)


def test_a_weight_that_two_modules_share_is_hooked_once() -> None:
    """Under its first name, though both modules are named, and both are seen to carry it."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    with hl.freeze(model, "#") as handle:
        run_backward(model)
        assert model[0].weight.grad is None
        assert handle.names == ("0.weight",)
        assert handle.report().fired == 1
        assert hl.attached(model[1]) == [handle]
    hl.assert_no_hooks(model, foreign=True)


@pytest.mark.parametrize("switch", [hl.freeze, lambda *args: hl.clip_gradients(*args, norm=1.0)])
def test_a_module_without_trainable_parameters_is_no_error(switch) -> None:
    """Nothing to freeze or to bound is frozen and bounded."""
    model = make_model()
    model[0].requires_grad_(False)
    for target in ("0", "1"):
        with switch(model, target):
            run_backward(model)
    hl.assert_no_hooks(model, foreign=True)


def test_removing_clip_before_a_backward_warns_unless_it_is_to_be_quiet() -> None:
    """Of the handle on the modules, whose forward ran; a freeze that had nothing to do is no news."""
    model = make_model()
    handles = hl.clip_gradients(model, "0", value=1.0)
    model(torch.ones(1, 2))
    with pytest.warns(hl.errors.HookNeverFired, match="clip_gradients"):
        handles.remove()
    for switch in (lambda: hl.clip_gradients(model, "0", value=1.0), lambda: hl.freeze(model, "0")):
        handle = switch()
        model(torch.ones(1, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            handle.remove(quiet=True)
    hl.assert_no_hooks(model, foreign=True)


# -- all or nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", [hl.freeze, lambda *args: hl.clip_gradients(*args, norm=1.0)])
def test_a_lazy_layer_is_refused_and_nothing_else_is_touched(switch) -> None:
    """The error names the parameters and what to do; gradients that were there are still there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls lazy modules experimental
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    model[0].weight.grad = torch.ones(2, 2)
    with pytest.raises(hl.errors.UnhookableError, match=r"'1.weight', '1.bias': lazy.*after the first forward"):
        switch(model, "*")
    assert model[0].weight.grad is not None
    hl.assert_no_hooks(model)
    hl.assert_no_hooks(model[0], foreign=True)


def test_freezing_drops_the_gradients_that_are_there() -> None:
    """So that a step right after it moves nothing."""
    model = make_model()
    run_backward(model)
    with hl.freeze(model, "0"):
        assert model[0].weight.grad is None
        assert model[2].weight.grad is not None


def test_hooks_on_the_same_gradient_run_in_the_order_they_were_attached() -> None:
    """A hook before the clip sees what came, one after it what is left, one after the freeze none."""
    layer, seen = nn.Linear(2, 1, bias=False), []

    def look(parameter: Tensor) -> None:
        seen.append(None if parameter.grad is None else parameter.grad.abs().max().item())

    with (
        hl.attach(layer, look, on="param_grad"),
        hl.clip_gradients(layer, value=0.5),
        hl.attach(layer, look, on="param_grad"),
        hl.freeze(layer),
        hl.attach(layer, look, on="param_grad"),
    ):
        layer(torch.full((1, 2), 3.0)).sum().backward()
    assert seen == [3.0, 0.5, None]
