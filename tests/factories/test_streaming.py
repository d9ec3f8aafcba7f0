"""Outputs of inference mode, copied and reduced together: what is done for GPUs, here with the CPU in their place.

That the kernel reads many tensors in one launch is tested beside it; here, that every number arrives where it belongs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_threads import in_threads
from torch import Tensor, nn

from hookline.factories import activation_stats, nan_alarm
from hookline.factories import streaming_stats as streaming
from hookline.observe.watch.engine import StatsEngine
from hookline.sites import _torch

STATS = ["mean", "std", "norm", "min", "max", "absmax", "zero_fraction", "over:1", "nonfinite", "nan", "inf"]
SHAPE = (8, 1024)  # more numbers than are kept as small ones


class Batches:
    """How many tensors were reduced together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        real = StatsEngine.take_all

        def take_all(engine: StatsEngine, tensors: Any) -> None:
            self.sizes.append(len(tensors))
            real(engine, tensors)

        monkeypatch.setattr(StatsEngine, "take_all", take_all)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    """The CPU is taken for a device that works behind the host."""
    monkeypatch.setattr(streaming, "_READ_AT_ONCE", ())
    return Batches(monkeypatch)


def outputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(SHAPE, generator=generator).relu() * (1 + index) for index in range(count)]
    made[5][0, 0] = torch.nan
    made[6][0, :3] = -torch.inf
    return made


def run(hook: Any, modules: list[nn.Module], tensors: list[Tensor], *, mode: Any = torch.inference_mode) -> None:
    """Forwards in which each module gives out a tensor, which is changed in place right after."""
    with mode():
        for index in range(0, len(tensors), len(modules)):
            for module, tensor in zip(modules, tensors[index:], strict=False):
                output = tensor.clone()
                hook(module, (), output)
                output.fill_(99.0)


def test_copies_of_several_forwards_are_reduced_together_and_count_as_if_alone(batches: Batches) -> None:
    """Three modules, ten forwards: every statistic as by a hook that reduces each at once."""
    modules: list[nn.Module] = [nn.Identity() for _ in range(3)]
    together, alone = activation_stats({"stats": STATS}), activation_stats({"stats": STATS})
    run(together, modules, outputs(30))
    assert max(batches.sizes) == 12  # four forwards of three
    assert len(batches.sizes) == 2
    run(alone, modules, outputs(30), mode=torch.no_grad)
    assert together.to_metrics() == pytest.approx(alone.to_metrics(), rel=1e-6, nan_ok=True)
    assert sum(batches.sizes) == 27  # all but the first of each
    assert together.read()["Identity.2"]["fires"] == 10
    assert together.to_metrics()["Identity.2/nonfinite"] == 1


def test_what_is_held_ends_with_a_count_and_with_bytes(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a forward: of 4 MiB that may be held, and of so many copies."""
    modules, half = [nn.Identity() for _ in range(10)], torch.ones(1 << 17)
    hook = activation_stats({"stats": ["mean"]})
    run(hook, modules, [half] * 20)
    assert batches.sizes == [9]
    monkeypatch.setattr(streaming, "_MOST", 5)
    run(hook, modules, [half] * 10)
    assert batches.sizes == [9, 5, 5]
    assert [cells["fires"] for cells in hook.read().values()] == [3] * 10


def test_a_module_that_nothing_comes_back_to_keeps_nothing_waiting(batches: Batches) -> None:
    """The first to come, as an encoder is, begins no forward again; what comes after it is reduced all the same."""
    encoder, layer, hook = nn.Identity(), nn.Identity(), activation_stats({"stats": ["mean"]})
    run(hook, [encoder], [torch.ones(SHAPE)])
    run(hook, [layer], [torch.ones(SHAPE)] * 300)
    assert batches.sizes == [97, 100, 100]  # four times 25, taken for forwards
    assert hook.read()["Identity.1"]["fires"] == 300
    assert hook.forwards == 1


def test_what_is_too_large_is_reduced_at_once(batches: Batches) -> None:
    """Of 4 MiB that may be held, a tensor has one at most."""
    hook, module = activation_stats({"stats": ["mean"]}), nn.Identity()
    run(hook, [module], [torch.full(((1 << 18) + extra,), 2.0) for extra in (0, 0, 1)])
    assert batches.sizes == []
    assert hook._streaming._held[torch.device("cpu")].__len__() == 1
    assert hook.to_metrics() == {"Identity.0/mean": 2.0}


def test_reset_forgets_copies_too(batches: Batches) -> None:
    """What was held and not reduced does not come back."""
    hook, module = activation_stats({"stats": ["max"]}), nn.Identity()
    run(hook, [module], [torch.full(SHAPE, 7.0)] * 2)
    hook.reset()
    run(hook, [module], [torch.full(SHAPE, 3.0)])
    assert hook.to_metrics() == {"Identity.0/max": 3.0}


def test_nothing_is_copied_outside_of_inference_mode_or_per_unit(batches: Batches) -> None:
    """There torch tells of changes; and what is kept per unit is added up in the call."""
    for config, mode in (({}, torch.no_grad), ({"stats": ["dead_fraction"]}, torch.inference_mode)):
        hook, module = activation_stats(config), nn.Identity()
        run(hook, [module], [torch.ones(SHAPE)] * 3, mode=mode)
        assert not hook._streaming._held
        assert hook.to_metrics()


def test_two_threads_hold_copies_side_by_side(batches: Batches) -> None:
    """Every firing is in the sums."""
    hook, modules = activation_stats({"stats": ["mean"]}), [nn.Identity(), nn.Identity()]
    run(hook, modules, [torch.ones(SHAPE)] * 2)
    in_threads(lambda number: run(hook, modules[:: (1, -1)[number]], [torch.ones(SHAPE)] * 200))
    assert [cells["fires"] for cells in hook.read().values()] == [201, 201]
    assert hook.to_metrics() == {"Identity.0/mean": 1.0, "Identity.1/mean": 1.0}


def test_the_alarm_counts_copies(batches: Batches, caplog: pytest.LogCaptureFixture) -> None:
    """In metrics, which say what was not said yet; and at once if it is to raise."""
    module = nn.Identity()
    hook = nan_alarm()
    run(hook, [module], outputs(9))
    assert hook.to_metrics() == {"Identity.0/nonfinite": 2.0, "Identity.0/nan": 1.0, "Identity.0/inf": 3.0}
    assert [message.split(",")[0] for message in caplog.messages] == ["Identity.0 gave out 1 NaN and 3 infinities"]
    with pytest.raises(FloatingPointError, match="1 NaN and 0 infinities"):
        run(nan_alarm({"action": "raise"}), [module], outputs(9))


def test_what_first_fires_while_a_graph_is_recorded_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making rows, and a kernel ready, would spoil the recording; what has run before takes part in it."""
    hook, module, other = activation_stats({"stats": ["mean"]}), nn.Identity(), nn.Identity()
    run(hook, [other], [torch.ones(SHAPE)])
    monkeypatch.setattr(_torch, "capturing", lambda: True)
    run(hook, [module, other], [torch.full(SHAPE, 5.0)] * 2)
    monkeypatch.undo()
    assert hook.to_metrics() == {"Identity.0/mean": 3.0}
    run(hook, [module], [torch.full(SHAPE, 7.0)])
    assert hook.to_metrics() == {"Identity.0/mean": 3.0, "Identity.1/mean": 7.0}
