"""Reference weights from what a run has left, from safetensors, and from torch."""

from __future__ import annotations

import torch
from helpers_analyses import token_experiment
from safetensors.torch import save_file

import hookline as hl
from hookline.lifecycle.managed_hooks import read_weights


def same(found, model) -> bool:
    wanted = model.state_dict()
    return all(torch.equal(found[name], value) for name, value in wanted.items()) and found.keys() >= wanted.keys()


def test_a_run_is_compared_with_the_end_of_the_one_before(tmp_path):
    """By its last checkpoint: the same run again ends at distance 0, and began at one over 0."""
    first = token_experiment()
    hl.epoch_loop(first, epochs=3, checkpoints=hl.Checkpoints(tmp_path / "checkpoints", every=1))
    last = max((tmp_path / "checkpoints").glob("*.pt"))
    assert same(read_weights(last), first.model)
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(["gradient_projection"], reference_weights=last, sinks=[sink])
    hl.epoch_loop(token_experiment(), epochs=3, manager=manager)
    distances = [record.metrics["gradient_projection/distance_to_reference"] for record in sink.records
                 if "gradient_projection/distance_to_reference" in record.metrics]  # fmt: skip
    assert distances[0] > 0.01
    assert distances[-1] == 0.0


def test_files_of_others(tmp_path):
    """Plain safetensors, a state dict, and one beside other things."""
    model = token_experiment().model
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pt")
    for name in ("weights.safetensors", "weights.pt", "checkpoint.pt"):
        assert same(read_weights(tmp_path / name), model)
