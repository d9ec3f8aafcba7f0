"""Runs that end early, other settings of fingerprints, noise runs that measure nothing, one module in another dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.cli.main import main


class Doubled(nn.Linear):
    """Computes in another order: the same but for rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x[..., :8], self.weight[:, :8]) + nn.functional.linear(
            x[..., 8:], self.weight[:, 8:]
        )


def model() -> nn.Sequential:
    """Six layers, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())))


def traced(net: nn.Module, to: Path, *, steps: int = 1, tensors: bool = True, **options: Any) -> Path:
    """One forward for each step."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with hl.trace(net, to=to, kinds=("input", "output"), tensors=tensors, **options), torch.no_grad():
        for _ in range(steps):
            net(x.to(next(net.parameters()).dtype))
    return to


def test_a_run_that_ended_early_is_not_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever run it is; the exit status is that of runs that differ. For a page that cannot be written it is 2."""
    a, b = traced(model(), tmp_path / "a", steps=3), traced(model(), tmp_path / "b")
    for pair in ((a, b), (b, a)):
        found = hl.compare(*pair)
        assert (found.ok, found.blamed) == (False, [])
        assert "The runs differ: Only some steps: [1, 2] are only in" in found.summary
    assert main(["compare", str(a), str(b)]) == 1
    capsys.readouterr()
    same = traced(model(), tmp_path / "c")
    assert (
        main(["compare", str(b), str(same), "--html", str(tmp_path / "a" / "rank_0" / "records.jsonl" / "page.html")])
        == 2
    )
    out, err = capsys.readouterr()
    assert "Nothing differs." in out
    assert "the page cannot be written" in err


def test_a_noise_run_that_is_equal_to_the_bit_measures_nothing(tmp_path: Path) -> None:
    """A repeated run neither lowers the floor below the modelled one nor below that of a float64 run."""
    a, again = traced(model(), tmp_path / "a"), traced(model(), tmp_path / "again")
    exact = traced(model().double(), tmp_path / "exact")
    other = model()
    for place in (0, 2, 4):
        other[place].__class__ = Doubled  # type: ignore[assignment]
    b = traced(other, tmp_path / "b")
    assert hl.compare(a, b, noise=again).ok
    floors = [
        [value.floor for value in hl.compare(a, b, noise=noise).values] for noise in ([exact], [exact, again], [again])
    ]
    assert floors[0] == floors[1] != floors[2]


def test_one_module_in_another_dtype_is_no_rounding(tmp_path: Path) -> None:
    """The runs differ, with its name; a whole run in bfloat16 is the same up to rounding."""

    def wrapped() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(each) for each in model()))

    a = traced(wrapped(), tmp_path / "a")
    assert hl.compare(a, traced(wrapped().bfloat16(), tmp_path / "half")).ok
    other: Any = wrapped()
    inner = other[2][0]
    inner.bfloat16()
    inner.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    other[2].register_forward_hook(lambda module, args, output: output.float())
    found = hl.compare(a, traced(other, tmp_path / "b"))
    assert (found.ok, found.blamed) == (False, [])
    assert "only 2.0 is bfloat16 in B where A has float32" in found.summary
