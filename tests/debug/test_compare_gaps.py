"""Nothing is blamed, or called the same, by what cannot tell: other models, other sketches, no noise, depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.debug.compare.compare import compare
from hookline.debug.compare.trace import trace

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))


def _layers(count: int = 8) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))


def _traced(model: nn.Module, to: Path, x: Tensor = X, times: int = 1, **options: Any) -> Path:
    options = {"kinds": ("input", "output"), "tensors": True, **options}
    with trace(model, to=to, **options), torch.no_grad():
        for _ in range(times):
            model(x)
    return to


def test_runs_of_other_models_are_said_to_be_such_and_nothing_is_blamed() -> None:
    """One name of many in common."""
    a = {f"a.{place}": torch.ones(2) for place in range(9)} | {"head": torch.ones(2)}
    b = {f"b.{place}": torch.ones(2) for place in range(9)} | {"head": torch.zeros(2)}
    found = compare(a, b)
    assert (found.ok, found.blame) == (False, None)
    assert "only 1 of 10 values of A, and 1 of 10 of B, have a partner" in found.summary
    assert compare(a, {"head": torch.zeros(2)}).blame == "head"  # all of B has a partner


def test_a_module_that_is_given_the_same_has_the_rounding_of_one_operation(tmp_path: Path) -> None:
    """Two channels are 5 % off in bfloat16, after layers that would have rounded by more."""
    right, wrong = _layers().bfloat16(), _layers().bfloat16()
    wrong[6].weight.data[:2] *= 1.05
    wrong[6].bias.data[:2] *= 1.05
    x = X.bfloat16()
    found = compare(_traced(right, tmp_path / "a", x), _traced(wrong, tmp_path / "b", x))
    (value,) = [value for value in found.values if value.site == "6" and value.kind == "output"]
    assert (found.ok, found.blame, value.verdict) == (False, None, "unsure")
    assert "it is given the same" in value.doubt
