"""``nan_alarm`` and ``steer``: what they say, and what they change."""

from __future__ import annotations

import pytest
import torch
from helpers_factories import PADDED, Named, Wrapped
from torch import Tensor, nn

import hookline as hl
from hookline.factories import nan_alarm, serving, steer
from hookline.tree import main_tensor


def bad(*, nan: int = 0, inf: int = 0, shape: tuple[int, ...] = (3, 4)) -> Tensor:
    tensor = torch.zeros(shape)
    tensor.view(-1)[:nan] = torch.nan
    tensor.view(-1)[nan : nan + inf] = -torch.inf
    return tensor


# -- nan_alarm -----------------------------------------------------------------------------------------------


def test_the_alarm_says_once_which_module_was_first(caplog: pytest.LogCaptureFixture) -> None:
    """One line per module, with counts, shape and the call; clean modules have none."""
    hook = nan_alarm({})
    clean, broken = nn.Identity(), nn.ReLU()
    for value in (bad(), bad(nan=2, inf=1), bad(nan=5)):
        hook(clean, (), bad())
        hook(broken, (), (value, None))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["ReLU.0 gave out 2 NaN and 1 infinities, in call 2"]
    assert hook.to_metrics() == {
        "Identity.0/nonfinite": 0.0, "Identity.0/nan": 0.0, "Identity.0/inf": 0.0,
        "ReLU.0/nonfinite": 2.0, "ReLU.0/nan": 7.0, "ReLU.0/inf": 1.0,
    }  # fmt: skip


def test_the_alarm_leaves_padding_alone(caplog: pytest.LogCaptureFixture) -> None:
    """NaN where a batch is padded alarms nobody; one in a real token does."""
    hook, module, x = nan_alarm(), nn.Identity(), torch.zeros(2, 3, 4)
    x[1, :2] = torch.nan
    with serving(PADDED):
        hook(module, (), x)
        assert not caplog.records
        x[1, 2, 0] = torch.nan
        hook(module, (), x)
    assert len(caplog.records) == 1


# -- steer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["tensor", "tuple", "dict", "dataclass", "list"])
def test_the_vector_is_added_inside_any_structure(make: str) -> None:
    """The main tensor is changed, everything beside it stays, and the type of the output is the same."""
    module, x = Wrapped(make), torch.randn(2, 3, 4)
    plain = module(x)
    with hl.attach(module, steer({"vector": [1.0, 0.0, 0.0, -1.0], "strength": 2.0})):
        steered = module(x)
    assert type(steered) is type(plain)
    assert torch.equal(main_tensor(steered), main_tensor(plain) + torch.tensor([2.0, 0.0, 0.0, -2.0]))
    if isinstance(steered, Named):
        assert steered.extras == {"k": 1}
        assert steered.loss == 0
    assert torch.equal(main_tensor(module(x)), main_tensor(plain))  # off again


def test_the_vector_takes_dtype_and_mode_of_the_output() -> None:
    """bfloat16 stays bfloat16; the hook of an inference mode serves in training, and gradients flow through it."""
    hook, module = steer({"vector": [1.0] * 4}), nn.Identity()
    module.register_forward_hook(hook)
    with torch.inference_mode():
        assert module(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    x = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    module(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_vector_of_another_width_is_an_error_that_says_both() -> None:
    """A single number would broadcast, and is refused as well."""
    for width in (3, 1):
        module = nn.Linear(4, 4)
        module.register_forward_hook(steer({"vector": [1.0] * width}))
        with pytest.raises(
            hl.errors.HookReturnError, match=rf"vector of shape \({width},\), but the output of 'Linear'.*4\)"
        ):
            module(torch.ones(2, 4))


def test_an_edit_that_observe_would_ignore_is_refused() -> None:
    """From code and from a spec; nothing is attached."""
    model = nn.Sequential(nn.Identity())
    spec = {"target_modules": ["0"], "hook_factory": "hookline.factories:steer", "config": {"vector": [1.0, 1.0]}}
    with pytest.raises(
        hl.errors.OptionError, match=r"steer edits values, and observe=True ignores .* Leave observe out"
    ):
        hl.attach(model, "0", steer({"vector": [1.0, 1.0]}), observe=True)
    with pytest.raises(hl.errors.OptionError, match="steer edits values"):
        hl.register_hooks(model, [spec | {"observe": True, "every": 2}])
    assert not model[0]._forward_hooks
    with hl.register_hooks(model, [spec | {"observe": False}]):
        assert model(torch.zeros(1, 2)).eq(1).all()
