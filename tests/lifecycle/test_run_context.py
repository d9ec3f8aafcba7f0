"""What a hook is shown: frozen, complete, and not waiting for the device before it has to."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from hookline.lifecycle.context import RunDataContext
from hookline.when import HookPoint

FIELDS = [
    *("hook_point", "epoch", "step", "model", "config", "loader", "batch_idx", "batch_data"),
    *("loss", "train_acc", "val_acc", "lr", "accumulated_grads", "prev_step_grads", "target_grad", "profiler"),
    "eval_metrics",
]


class Counted:
    """A figure that counts how often it is found out."""

    def __init__(self, value):
        self.value = value
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return self.value


def test_the_fields_are_those_of_the_source_and_only_the_first_two_are_required():
    """In the source's order; the rest is None, but for the profiler, which is one that times nothing."""
    assert [field.name for field in dataclasses.fields(RunDataContext)] == FIELDS
    ctx = RunDataContext(HookPoint.SNAPSHOT, 3)
    assert (ctx.hook_point, ctx.epoch) == (HookPoint.SNAPSHOT, 3)
    assert all(getattr(ctx, name) is None for name in FIELDS[2:] if name != "profiler")
    assert not ctx.profiler.enabled
    with pytest.raises(TypeError):
        RunDataContext(HookPoint.SNAPSHOT)


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_can_be_set(field):
    ctx = RunDataContext(HookPoint.SNAPSHOT, 0, loss=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(ctx, field, 2)


@pytest.mark.parametrize("field", ["loss", "train_acc", "val_acc"])
@pytest.mark.parametrize(
    "given",
    [0.5, torch.tensor(0.5), torch.tensor([[0.5]]), lambda: 0.5, lambda: torch.tensor(0.5)],
    ids=["a float", "a tensor", "a matrix", "a function of a float", "a function of a tensor"],
)
def test_a_figure_reads_as_a_float_however_it_was_given(field, given):
    """Numbers, tensors with or without dimensions, functions of either."""
    ctx = RunDataContext(HookPoint.POST_STEP, 0, **{field: given})
    assert getattr(ctx, field) == 0.5
    assert type(getattr(ctx, field)) is float
    assert ctx.raw(field) is given


def test_a_figure_is_found_out_when_it_is_read_and_only_once():
    """A context that nobody reads does not wait for the device."""
    loss = Counted(torch.tensor(2.0))
    ctx = RunDataContext(HookPoint.POST_STEP, 0, loss=loss)
    assert "loss" in repr(ctx)
    assert loss.asked == 0
    assert (ctx.loss, ctx.loss) == (2.0, 2.0)
    assert loss.asked == 1


def test_it_can_be_changed_into_another_and_pickled():
    ctx = RunDataContext(HookPoint.POST_STEP, 1, loss=torch.tensor(0.25), lr=0.1)
    other = dataclasses.replace(ctx, hook_point=HookPoint.SNAPSHOT)
    assert (other.hook_point, other.epoch, other.loss, other.lr) == (HookPoint.SNAPSHOT, 1, 0.25, 0.1)
    assert pickle.loads(pickle.dumps(ctx)).loss == 0.25


def test_a_class_derived_from_it_reads_the_same():
    """A dataclass with fields more, and an __init__ of its own making."""

    @dataclasses.dataclass(frozen=True, eq=False, repr=False)
    class More(RunDataContext):
        extra: int = 0

    ctx = More(HookPoint.POST_STEP, 2, loss=torch.tensor(0.5), extra=3)
    assert (ctx.epoch, ctx.loss, ctx.extra, ctx.val_acc) == (2, 0.5, 3, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ctx.loss = 1.0
