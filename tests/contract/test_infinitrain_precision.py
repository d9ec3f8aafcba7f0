"""InfiniTrain: its precision checker, with what its document promises and its code does not keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.debug.precision.precision_checker import PrecisionChecker, PrecisionConfig


class Poisoned(nn.Module):
    """Adds ``value`` to one entry."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        mask = torch.zeros_like(x)
        mask[0, 0] = self.value
        return x + mask


def poisoned(value):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Poisoned(value), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("form", ["simple", "md5"])
@pytest.mark.parametrize(("value", "counts"), [(float("nan"), (1, 0)), (float("inf"), (0, 1))])
def test_a_bad_value_flags_the_layer_that_made_it_and_those_after_it(form, value, counts, tmp_path):
    """NaN and infinity, in both formats; layers before are clean, statistics are of finite values."""
    model = poisoned(value)
    with PrecisionChecker(model, f"level=1,path={tmp_path},format={form}") as checker:
        model(torch.ones(2, 3))
    flagged = [record.name for record in checker.errors]
    after = ["3", "4", "Sequential"] if counts[0] else []  # tanh of infinity is 1
    assert flagged == ["2", *after]
    record = checker.errors[0]
    assert (record.nan, record.inf) == counts
    lines = next(tmp_path.rglob("*.log")).read_text().splitlines()
    assert [line.endswith(" <- ERROR") for line in lines] == [r.name in flagged for r in checker.records]
    bad = lines[2]
    assert f"[NaN:{counts[0]} Inf:{counts[1]}]" in bad
    if form == "simple":
        with torch.no_grad():
            finite = torch.tanh(model[0](torch.ones(2, 3))).flatten()[1:]
        assert f"min={finite.min():.6g} max={finite.max():.6g} mean={finite.double().mean():.6g}" in bad


def test_counters_begin_anew_and_files_of_the_second_iteration_replace_those_of_the_first(tmp_path):
    """The same block three times in an iteration; index 0 is in the name, as the source's guide says."""
    block = nn.Linear(2, 2)
    model = nn.ModuleDict({"Block": block})
    indices = []
    with PrecisionChecker(model, f"level=1,path={tmp_path},save_tensors=true") as checker:
        for iteration in range(2):
            checker.reset_counters()
            outputs = [block(torch.full((1, 2), float(iteration * 3 + call))) for call in range(3)]
            indices.append([record.index for record in checker.records])
    assert indices == [[0, 1, 2], [0, 1, 2]]
    files = {path.name: np.load(path) for path in tmp_path.rglob("*.npy")}
    assert sorted(files) == ["Block_0_forward.npy", "Block_1_forward.npy", "Block_2_forward.npy"]
    for call, output in enumerate(outputs):
        assert np.array_equal(files[f"Block_{call}_forward.npy"], output.detach().numpy())


def test_the_config_string_is_read_exactly_and_mistakes_raise():
    """An unknown key, an item without '=' and a level that does not exist are errors."""
    config = PrecisionChecker(nn.Identity(), "level=1,path=x,format=md5,save_tensors=true").config
    assert config == PrecisionConfig(level=1, path="x", format="md5", save_tensors="npy")
    for wrong in ("level=1,colour=red", "level=1,verbose", "level=7"):
        with pytest.raises(hl.HooklineError):
            PrecisionChecker(nn.Identity(), wrong)


def test_level_0_installs_nothing(tmp_path):
    """No hook on the model or the process, no file."""
    model = poisoned(0.0)
    with PrecisionChecker(model, f"level=0,path={tmp_path}") as checker:
        checker.register_for_module(model[0])
        hl.assert_no_hooks(model, foreign=True)
        assert hl.attached() == []
        model(torch.ones(2, 3)).sum().backward()
    assert not checker.records
    assert list(tmp_path.iterdir()) == []
