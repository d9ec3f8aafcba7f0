"""Use everything in one run: hooks as data, trackers, an observer, an intervention and four sinks, on one model.

A small transformer learns modular addition. A list of specs, as in a JSON file, puts a hook on every MLP. A tracker
counts how often its ReLUs are on, a watch keeps statistics. An observer measures how far the weights have moved. An
intervention trains an epoch ahead, which is undone. All metrics go to a record log, and from there to memory, a CSV
file, a JSONL file and the screen. The last line compares the run with one without hooks.

Run: python examples/all_together.py
"""

from __future__ import annotations

import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline.training.mod_arithmetic import Config, ModArithmetic

CONFIG = Config(epochs=6, snapshot_every=5, p=31, width=32, batch_size=64)

SPECS: list[dict[str, Any]] = [
    {
        "name": "share_above",
        "target_modules": ["layers.#.mlp"],
        "hook_factory": "__main__:share_above",  # "my_package.hooks:share_above", in a file of settings
        "config": {"threshold": 0.2},
        "observe": True,
        "every": 5,
    }
]


def share_above(config: dict[str, Any]) -> Any:
    """A factory for specs: its hook records how much of an output is over a threshold."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        hl.record("share_above", (output > config["threshold"]).float().mean())

    return hook


class Distance(hl.TrainingHook):
    """An observer: how far the weights are from where they began."""

    name = "distance"
    hook_points = frozenset({hl.HookPoint.POST_EPOCH})
    pure = True  # draws no random number

    def start(self, model: nn.Module) -> None:
        self.first = [p.detach().clone() for p in model.parameters()]

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Tensor]:
        assert ctx.model is not None
        moved = zip(ctx.model.parameters(), self.first, strict=True)
        return {"from_start": torch.stack([(p.detach() - q).norm() for p, q in moved]).norm()}


class EpochAhead(hl.InterventionHook):
    """An intervention: how the gradient changes by one more epoch in another order; the run knows nothing of it."""

    name = "epoch_ahead"
    hook_points = frozenset({hl.HookPoint.SNAPSHOT})

    def intervene(self, run_ctx: hl.RunDataContext, model_ctx: hl.ModelDataContext) -> dict[str, Tensor]:
        before = model_ctx.compute_batch_gradients(next(iter(model_ctx.get_shuffled_loader())))
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        after = model_ctx.compute_batch_gradients(next(iter(model_ctx.get_shuffled_loader())))
        return {"decoder_gradient_ratio": after["decoder.weight"].norm() / before["decoder.weight"].norm()}


def experiment() -> ModArithmetic:
    """The same one every time."""
    torch.manual_seed(0)
    return ModArithmetic(CONFIG, "stride")


def train(folder: Path, memory: hl.sinks.MemorySink) -> tuple[ModArithmetic, hl.HookManager]:
    """Train with everything on."""
    made = experiment()
    relu = hl.metta.ComponentContext()
    count = hl.metta.attach_relu_activation_hooks()("mlp", relu)
    watch = hl.watch(made.model, ["layers.#.mlp", "decoder"], on=("forward", "backward"))
    sinks = [
        memory,
        hl.sinks.CSVSink(folder / "run.csv"),
        hl.sinks.JSONLSink(folder / "run.jsonl"),
        hl.sinks.ConsoleSink(),
    ]
    hooks = [relu.model_metrics["relu_activation_state"], watch, Distance(), EpochAhead()]
    manager = hl.HookManager(hooks=hooks, sinks=sinks, log=folder / "records.jsonl")
    with (
        manager,
        hl.register_hooks(made.model, SPECS),
        hl.attach(made.model, "layers.0.mlp.1", count, observe=True),
        watch,
    ):
        hl.epoch_loop(made, epochs=CONFIG.epochs, manager=manager, run_context={"strategy": "stride"})
    hl.assert_no_hooks(made.model)
    return made, manager


def main() -> None:
    """Train with hooks and without, and say what there is."""
    memory = hl.sinks.MemorySink()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hooked, manager = train(folder, memory)
        print(manager.plan, end="\n\n")
        with (folder / "run.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
        log = (folder / "records.jsonl").read_text().splitlines()
        print(
            f"run.csv: {len(rows)} rows, {len(rows[0])} columns; run.jsonl: {len(lines)} lines; log: {len(log)} lines"
        )
    by_step = memory.series("share_above")[0][1]
    print(f"share_above of epoch 0, by step: {dict(zip(by_step.steps, [round(v, 3) for v in by_step], strict=True))}")
    units = [value for name, value in memory.latest.items() if "activations/relu" in name]
    print(f"{sum(value == 0 for value in units)} of {len(units)} units of the MLP were never on in the last epoch")
    for key, cost in manager.hooks.costs().items():
        print(f"{key}: {cost['count']} times, {cost['mean_ms']:.2f} ms each")
    plain = experiment()
    hl.epoch_loop(plain, epochs=CONFIG.epochs)
    pairs = zip(plain.model.state_dict().values(), hooked.model.state_dict().values(), strict=True)
    print(f"weights as without hooks, to the last bit: {all(torch.equal(a, b) for a, b in pairs)}")


if __name__ == "__main__":
    main()
