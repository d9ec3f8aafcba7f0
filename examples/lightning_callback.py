"""Put hooks into a Lightning ``Trainer``: one callback. Needs ``pip install 'hookline[lightning]'``."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl

warnings.filterwarnings("ignore")  # Lightning's own: about torch, about the number of workers

import lightning  # noqa: E402

from hookline.integrations.lightning import HooklineCallback  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    """A module as anyone writes it; it knows nothing of hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> None:
        """Log the accuracy; hooks see it as ``ctx.eval_metrics["val_acc"]``."""
        self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class OneMoreEpoch(hl.InterventionHook):
    """Train one more epoch in another order, and report how far it leads; everything is put back."""

    hook_points = frozenset({hl.HookPoint.POST_EPOCH})

    def intervene(self, run_ctx: hl.RunDataContext, model_ctx: hl.ModelDataContext) -> dict[str, Any]:
        """Measure how far the weights would move."""
        before = model_ctx.model.net[0].weight.detach().clone()
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        accuracy = run_ctx.eval_metrics["val_acc"] if run_ctx.eval_metrics else None
        return {"moved": (model_ctx.model.net[0].weight - before).norm(), "val_acc": accuracy}


def fit(callbacks: list[Any]) -> nn.Module:
    """Fit for four epochs; two batches make a step."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    module = Net()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            default_root_dir=folder, max_epochs=4, accumulate_grad_batches=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, 32, shuffle=True), DataLoader(data, 256))
    return module


if __name__ == "__main__":
    sink = hl.sinks.MemorySink()
    hooked = fit([HooklineCallback([OneMoreEpoch, "norms"], sinks=[sink])])
    for (epoch, moved), (_, accuracy) in zip(
        sink.series("OneMoreEpoch/moved"), sink.series("OneMoreEpoch/val_acc"), strict=True
    ):
        print(f"epoch {epoch}: val_acc {accuracy:.3f}, one more epoch would move the first layer by {moved:.3f}")
    same = all(torch.equal(a, b) for a, b in zip(hooked.parameters(), fit([]).parameters(), strict=True))
    print(f"the same weights as without hooks, to the last bit: {same}")
