"""The experiments that come with hookline: what they are made of, that they learn, and that a seed decides all."""

from __future__ import annotations

import importlib
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.guard.digest import changed, digest
from hookline.lifecycle.registry import register_built_ins
from hookline.runs.find import EMBEDDED
from hookline.testing.checking import left_by
from hookline.training import mod_arithmetic
from hookline.training.mod_arithmetic import ModArithmetic, arranged

SMALL = mod_arithmetic.Config(epochs=3, p=23, batch_size=32, width=16, heads=2)


@pytest.fixture(autouse=True)
def _built_ins():
    """Their hook sets name built-in hooks."""
    register_built_ins()


def made(strategy: str = "random", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return ModArithmetic(SMALL, strategy)


def train(experiment: Any, manager: hl.HookManager | None = None) -> hl.training.LoopResult:
    return hl.epoch_loop(experiment, epochs=experiment.config.epochs, manager=manager)


def test_they_are_found_by_name():
    """Each path leads to an experiment of that name, and looking at the names imports no torch."""
    for name, path in EMBEDDED.items():
        module, _, attribute = path.partition(":")
        cls = getattr(importlib.import_module(module), attribute)
        assert issubclass(cls, hl.Experiment)
        assert cls.name == name
    code = "import sys, hookline.runs.find; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fourier_of_mod_arithmetic_counts_five_frequencies():
    """As many as a model of this size learns; by itself the hook asks for more than each of them has."""
    p = mod_arithmetic.Config().p
    angles = 2 * np.pi * np.arange(p)[:, None] * np.array([2, 11, 17, 26, 29]) / p
    model = nn.Sequential(nn.Embedding(p, 10))
    model[0].weight.data = torch.tensor(np.concatenate([np.cos(angles), np.sin(angles)], 1), dtype=torch.float32)
    ctx = hl.RunDataContext(hl.HookPoint.POST_EPOCH, 0, model=model)
    fourier = hl.HookRegistry.get("fourier")
    assert fourier(**ModArithmetic.hook_config["fourier"]).compute(ctx)["newly_acquired_freqs"] == [2, 11, 17, 26, 29]
    assert fourier().compute(ctx)["n_significant_freqs"] == 0


@pytest.mark.parametrize("strategy", ["random", "stride", "fixed_random"])
def test_one_seed_gives_one_run(strategy):
    """Bit for bit; another seed gives another."""
    left = []
    for seed in (3, 3, 4):
        experiment = made(strategy, seed)
        train(experiment)
        left.append(left_by(experiment))
    assert changed(left[0], left[1]) == []
    assert changed(left[0], left[2]) != []


def test_live_metrics_exist():
    """What the live column shows comes from the hooks of its group."""
    sink = hl.sinks.MemorySink()
    observed = made()
    reference = {name: torch.zeros_like(value) for name, value in observed.model.named_parameters()}
    train(observed, hl.HookManager(ModArithmetic.hook_sets["observers"], sinks=[sink], reference_weights=reference))
    shown = {key for labels in ModArithmetic.live_metrics.values() for key in labels.values()}
    assert shown <= set(sink.latest)
    assert any(key.startswith("stats/") for key in sink.latest)


def test_strategies_share_split_and_first_weights():
    """With one seed they differ in the order of the training data alone."""
    all_made = [made(strategy) for strategy in ModArithmetic.strategies]
    first = all_made[0]
    for other in all_made[1:]:
        assert digest(first.model.state_dict()) == digest(other.model.state_dict())
        assert torch.equal(first.val_set.tensors[0], other.val_set.tensors[0])
        assert sorted(rows_of(first)) == sorted(rows_of(other))
        assert rows_of(first) != rows_of(other)


def rows_of(experiment: Any) -> list[tuple[Any, ...]]:
    inputs, targets = experiment.train_set.tensors
    return [(*row, target) for row, target in zip(inputs.flatten(1).tolist(), targets.tolist(), strict=True)]


def test_the_orders_are_what_they_say():
    """Strides of ⌊√p⌋ through the first token; answers from 0 up; one shuffle for all epochs; another in each."""
    p = 10
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))[torch.randperm(p * p)]

    def tokens(rows: Tensor) -> list[int]:
        return list(dict.fromkeys(rows[:, 0].tolist()))

    assert tokens(arranged(pairs, p, "stride")) == [0, 3, 6, 9, 1, 4, 7, 2, 5, 8]
    sums = (arranged(pairs, p, "target").sum(1) % p).tolist()
    assert sums == sorted(sums)
    assert torch.equal(arranged(pairs, p, "random"), pairs)
    for strategy, same in (("stride", True), ("fixed_random", True), ("random", False)):
        loader = made(strategy).loader
        one, two = ([batch[0].tolist() for batch in loader] for _ in range(2))
        assert (one == two) is same


def test_training_and_validation_pairs_are_all_pairs_and_the_answers_are_right():
    """None twice."""
    experiment = made()
    inputs = torch.cat([experiment.train_set.tensors[0], experiment.val_set.tensors[0]])
    targets = torch.cat([experiment.train_set.tensors[1], experiment.val_set.tensors[1]])
    assert len({tuple(row) for row in inputs.tolist()}) == 23**2 == len(inputs)
    assert torch.equal(inputs.sum(1) % 23, targets)


def test_the_target_gradient_is_that_of_the_other_pairs():
    """By parameter, as autograd has it."""
    experiment = made()
    found = experiment.target_gradient(experiment.model, 0)
    inputs, targets = experiment.val_set.tensors
    nn.functional.cross_entropy(experiment.model(inputs), targets).backward()
    assert {name: p.grad for name, p in experiment.model.named_parameters()}.keys() == found.keys()
    for name, parameter in experiment.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.slow
def test_mod_arithmetic_learns_by_heart_then_finds_the_rule():
    """As shipped, for two thirds of its epochs: on the way it knows the training pairs far better than the others."""
    torch.manual_seed(199)
    experiment = ModArithmetic()
    ahead: list[float] = []
    experiment.on_epoch_end = lambda epoch, metrics: ahead.append(float(metrics["train_acc"] - metrics["val_acc"]))
    result = hl.epoch_loop(experiment, epochs=66, eval_every=5, snapshot_every=0)
    assert max(ahead) > 0.3
    assert result.metrics["train_acc"] > 0.95
    assert result.metrics["val_acc"] > 0.8  # chance is 1 in 59


def test_a_strategy_that_is_none_is_told():
    with pytest.raises(hl.errors.OptionError, match=r"mod_arithmetic has no strategy 'loud'; it has random"):
        ModArithmetic(None, "loud")


def test_the_experiment_of_the_page_runs_from_a_file(tmp_path, monkeypatch):
    """What docs/experiments.md shows is made as the command line makes it, and finds the slope that is in its data."""
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "line.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    cls = importlib.import_module("line").Line
    torch.manual_seed(0)
    line = cls(cls.config_class(), "clean")
    result = hl.epoch_loop(line, epochs=line.config.epochs, manager=hl.HookManager(cls.hook_sets["minimal"]))
    assert result.metrics["slope"] == pytest.approx(3.0, abs=0.05)
