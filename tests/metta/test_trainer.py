"""TrainTool.invoke and Trainer: policy made, hooks attached, trained, reported, cleared."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import hookline as hl


def make_policy() -> hl.metta.PolicyAutoBuilder:
    """Two components."""
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    return hl.metta.PolicyAutoBuilder(OrderedDict(actor_mlp=actor, critic_head=nn.Linear(4, 1)))


def make_data(batches: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """In a fixed order."""
    data = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, generator=data), torch.randn(8, 1, generator=data)) for _ in range(batches)]


def test_without_policy_or_data_there_is_nothing_to_train():
    """Both are named."""
    for options in ({}, {"policy": make_policy()}, {"data": make_data()}):
        with pytest.raises(hl.errors.OptionError, match=r"policy=.*data="):
            hl.metta.TrainTool(**options).invoke()


def test_any_model_is_taken_by_its_dotted_names():
    """One that is no policy; it is trained itself, not a copy."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    before = model[0].weight.clone()
    tool = hl.metta.TrainTool(policy=model, data=make_data())
    tool.add_training_hook("1", hl.metta.attach_relu_activation_hooks())
    trainer = tool.invoke()
    assert "activations/relu/1/0" in trainer.metrics[0]
    assert not torch.equal(before, model[0].weight)
    hl.assert_no_hooks(model, foreign=True)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_however_training_ends_the_hooks_come_off_and_sinks_are_flushed(error):
    """It comes out as it is."""

    class Flushed(hl.sinks.MemorySink):
        flushes = 0

        def flush(self):
            self.flushes += 1

    def loss(model, batch):
        model(batch[0])
        raise error

    policy, sink = make_policy(), Flushed()
    tool = hl.metta.TrainTool(policy=policy, data=make_data(), loss=loss, sinks=[sink])
    tool.add_training_hook("actor_mlp", hl.metta.attach_relu_activation_hooks())
    with pytest.raises(error):
        tool.invoke()
    hl.assert_no_hooks(policy, foreign=True)
    assert tool._active_policy_hooks == []
    assert sink.flushes == 1
