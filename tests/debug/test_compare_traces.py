"""Traces on disk: estimates without tensors, folders of ranks, broken files, decode beside prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_compared import IDS, gpt2
from torch import Tensor, nn

from hookline.debug.compare import trace as trace_module
from hookline.debug.compare.compare import compare
from hookline.debug.compare.trace import trace
from hookline.errors import CompareError
from hookline.when import StepSchedule


def _traced(model: nn.Module, to: Path, run: Any = None, **options: Any) -> Path:
    options = {"kinds": ("input", "output"), "exclude": "*.attn_dropout", **options}
    with trace(model, to=to, **options) as running, torch.no_grad():
        model(IDS) if run is None else run(model, running)
    return to


def _wrong_norm() -> Any:
    model = gpt2()
    model.transformer.h[4].ln_2.eps = 1e-4
    return model


def test_fingerprints_alone_find_the_module_and_say_that_errors_are_estimates(tmp_path: Path) -> None:
    """And bfloat16 is still rounding."""
    a = _traced(gpt2(), tmp_path / "a")
    found = compare(a, _traced(_wrong_norm(), tmp_path / "b"))
    assert [blame.module for blame in found.blamed] == ["transformer.h.4.ln_2"]
    assert found.is_estimate
    assert "estimates from fingerprints" in found.summary
    assert compare(a, _traced(gpt2().bfloat16(), tmp_path / "c")).ok


class Net(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def _rank_traces(to: Path, monkeypatch: pytest.MonkeyPatch, models: list[nn.Module], **options: Any) -> Path:
    """A trace with a folder for each model, as ranks would write it."""
    monkeypatch.setattr(trace_module, "rank_count", lambda: len(models))
    for rank, model in enumerate(models):
        monkeypatch.setattr(trace_module, "this_rank", lambda rank=rank: rank)
        with trace(model, to=to, kinds=("input", "output", "parameter"), tensors=True, **options), torch.no_grad():
            model(torch.ones(2, 8) + rank)
    return to


def test_one_rank_with_other_weights_is_found_with_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameter of that rank is blamed; nothing of the other rank differs."""
    a = _rank_traces(tmp_path / "a", monkeypatch, [Net(), Net()])
    other = Net()
    other.layers[1].weight.data[3, 4] += 0.5
    found = compare(a, _rank_traces(tmp_path / "b", monkeypatch, [Net(), other]))
    assert [blame.module for blame in found.blamed] == ["layers.1"]
    assert found.first is not None
    assert (found.first.rank, found.first.site, found.first.where) == (1, "layers.1.weight", "[3, 4]")
    assert all(value.is_same for value in found.values if value.rank == 0)
    assert "rank 1" in found.summary


def test_one_rank_and_two_are_compared_through_dims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of the first layer on two ranks are its output on one."""

    class Half(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            whole = Net().layers[0]
            self.layers = nn.ModuleList([nn.Linear(8, 4)])
            self.layers[0].load_state_dict({key: value.chunk(2)[rank] for key, value in whole.state_dict().items()})

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)  # type: ignore[no-any-return]

    monkeypatch.setattr(trace_module, "rank_count", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(trace_module, "this_rank", lambda rank=rank: rank)
        _traced(half := Half(rank), tmp_path / "two", lambda model, _: model(torch.ones(2, 8)), targets="layers.#",
                kinds="output", tensors=True)  # fmt: skip
        assert half.layers[0].weight.shape == (4, 8)
    monkeypatch.setattr(trace_module, "rank_count", lambda: 1)
    monkeypatch.setattr(trace_module, "this_rank", lambda: 0)
    one = _traced(Net(), tmp_path / "one", lambda model, _: model(torch.ones(2, 8)), targets="layers.0",
                  kinds="output", tensors=True)  # fmt: skip
    found = compare(one, tmp_path / "two", dims="b d[tp]")
    assert found.ok
    assert "2 ranks (b d[tp])" in found.values[0].how


def test_steps_that_do_not_meet_are_told(tmp_path: Path) -> None:
    """One step beside one other is compared, and said; two steps beside one other cannot be."""

    def traced(name: str, steps: int, first: int = 0) -> Path:
        schedule = StepSchedule(warmup=first)
        return _traced(Net(), tmp_path / name, lambda model, _: [model(torch.ones(2, 8)) for _ in range(steps)],
                       every=schedule)  # fmt: skip

    one, late, two = traced("one", 1), traced("late", 6, first=5), traced("two", 2)
    found = compare(one, late)
    assert found.ok
    assert found.notes == ["Steps 0 of A are compared with steps 5 of B, in this order."]
    with pytest.raises(CompareError, match=r"A has steps \[0, 1\], B has \[5\]"):
        compare(two, late)
    assert any("only in A" in line for line in compare(two, one).missing)
