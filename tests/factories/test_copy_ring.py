"""Small outputs that are copied into slots and reduced many at a time; the CPU stands for a GPU, without a kernel.

That prepared launches find the numbers of float64 is tested with the kernel; here, that every number arrives though
the output is changed right after.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.factories import activation_stats
from hookline.factories import streaming_stats as streaming
from hookline.factories.streaming_stats import CopyRing
from hookline.observe.watch.engine import StatsEngine
from hookline.observe.watch.pending import Streams
from hookline.sites import _torch

STATS = ["mean", "std", "norm", "min", "max", "absmax", "zero_fraction", "over:1", "nonfinite", "nan", "inf"]
CPU = torch.device("cpu")


@pytest.fixture
def behind_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a device that works behind the host."""
    monkeypatch.setattr(streaming, "_READ_AT_ONCE", ())


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


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(4, 1, 16, generator=generator) for _ in range(count)]
    made[5][0, 0, 0], made[6][1, 0, :3] = torch.nan, torch.inf
    return made


def reference(model: Layered, given: list[Tensor]) -> dict[str, Tensor]:
    """What the layers give out, in one tensor for each."""
    found: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for x in given:
            for number, layer in enumerate(model.layers):
                x = layer.forward(x)  # which calls no hooks
                found.setdefault(f"layers.{number}", []).append(x.double().flatten())
                x = x.relu()
    return {name: torch.cat(each) for name, each in found.items()}


def decode(call: Any, given: list[Tensor]) -> None:
    with torch.inference_mode():
        for x in given:
            call(x)


def check(hook: Any, want: dict[str, Tensor]) -> None:
    """Compare with float64, of finite numbers where there are others."""
    found = hook.to_metrics()
    assert {name.rpartition("/")[0] for name in found} == set(want)
    for name, numbers in want.items():
        bad = ~numbers.isfinite()
        assert found[f"{name}/nan"] == numbers.isnan().sum()
        assert found[f"{name}/inf"] == numbers.isinf().sum()
        if not bad.any():
            assert found[f"{name}/mean"] == pytest.approx(numbers.mean().item(), rel=1e-6, abs=1e-7)
            assert found[f"{name}/std"] == pytest.approx(numbers.std(correction=0).item(), rel=1e-6)
            assert found[f"{name}/absmax"] == numbers.abs().max()


@pytest.mark.usefixtures("behind_the_host")
def test_reading_reduces_what_waits_and_reset_drops_it() -> None:
    """Numbers are complete at any moment, and begin anew."""
    model, hook = Layered(), activation_stats({"stats": STATS})
    given = [x.nan_to_num(0.5, 0.5, 0.5) for x in inputs(13)]
    with hl.attach(model, "layers.#", hook, observe=True):
        for count in range(1, 11):
            decode(model, given[count - 1 : count])
            check(hook, reference(model, given[:count]))
        hook.reset()
        decode(model, given[:2])
        hook.reset()
        decode(model, given[10:])
    check(hook, reference(model, given[10:]))


def ring_of(monkeypatch: pytest.MonkeyPatch, limit: int) -> tuple[CopyRing, StatsEngine]:
    monkeypatch.setattr(streaming, "limit_of", lambda device: limit * streaming._SHARE)
    monkeypatch.setattr(streaming, "_SMALL_SHARE", 1)
    engine = activation_stats({"stats": STATS})._streaming.engine
    return CopyRing(engine, CPU), engine


class _TwoStreams(Streams):
    """Stands for a device whose current stream changes."""

    def __init__(self) -> None:
        self.current = 1
        self.now = lambda: self.current
        self.done: list[tuple[str, int]] = []

    def on(self, number: int) -> Any:
        if number != self.current:
            self.done.append(("on", number))
        return super().on(number)

    def join(self, number: int) -> None:
        self.done.append(("join", number))


def test_copies_of_another_stream_are_reduced_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes then waits for that, and lies in other memory."""
    ring, engine = ring_of(monkeypatch, 1 << 20)
    streams = ring._streams = _TwoStreams()
    ring._stream = 1
    for value in (1.0, 2.0):
        ring.keep("a", torch.full((16,), value))
    first = ring._modules["a"].slots[0].view.data_ptr()
    streams.current = 2
    assert [ring.keep("a", torch.full((16,), 4.0)) for _ in range(2)] == [False, True]
    assert streams.done == [("on", 1), ("join", 1)]
    assert first != ring._modules["a"].slots[0].view.data_ptr()
    ring.flush()
    assert sum(cells["sum"] for cells in engine.read().values()) == 16 * 6


def test_nothing_is_kept_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would be made again at each replay, and no reduction would know."""
    ring, _ = ring_of(monkeypatch, 1 << 20)
    ring._streams = _TwoStreams()
    ring._stream = 1
    assert [ring.keep("a", torch.ones(4)) for _ in range(2)] == [False, True]
    monkeypatch.setattr(_torch, "capturing", lambda: True)
    assert not ring.keep("a", torch.ones(4))
    ring.flush()
    assert len(ring) == 1
