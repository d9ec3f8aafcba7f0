"""`HooklineCallback` for Lightning's Trainer, `FabricCallback`, and the entry points that give them to every script."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_follow import Counting
from helpers_follow import Seen as SeenAnywhere
from helpers_hosts import metrics_of
from helpers_ranks import run_ranks
from helpers_training import nested_differences
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline.cli.main import main
from hookline.errors import OptionError

L = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import TensorBoardLogger  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

from hookline.integrations.fabric import FabricCallback  # noqa: E402
from hookline.integrations.lightning import HooklineCallback  # noqa: E402

POINTS = hl.HookPoint


@pytest.fixture(autouse=True)
def lightning_is_quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        warnings.filterwarnings("ignore", message=".*(isinstance|LeafSpec|litlogger).*")
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


class Net(L.LightningModule):
    """Dropout, BatchNorm, AdamW and a scheduler; logs in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)]
        self.net = nn.Sequential(*layers)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Manual(Net):
    """Steps two optimizers itself."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss if batch_idx % 2 else None  # Lightning asks for none here

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.net[0].parameters()), torch.optim.SGD(self.net[4].parameters(), lr=0.1)]


class Seen(SeenAnywhere):
    """Notes every point, and draws random numbers."""

    name = "seen"

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        super().compute(ctx)
        return {"norm": ctx.model.net[0].weight.detach().norm()}


class Nudge(Seen):
    """The negative control: an observer that writes to the model."""

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        with torch.no_grad():
            ctx.model.net[0].weight[0, 0] += 1e-7
        return super().compute(ctx)


class TrainsAnEpoch(hl.InterventionHook):
    name = "trains"
    hook_points = set(POINTS)
    step_schedule = hl.StepSchedule("stride", stride=3)

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, float]:
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        return {"loss": float(model_ctx.batch_loss(next(iter(model_ctx.get_shuffled_loader()))))}


def _data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    data = TensorDataset(torch.randn(28, 6), torch.randint(3, (28,)))
    return DataLoader(data, 4, shuffle=True), DataLoader(data, 14)


def fit(
    folder: Path,
    hooks: Any = (),
    *,
    module: type = Net,
    checkpoint: Any = None,
    sinks: Any = None,
    report_to: str = "sinks",
    **options: Any,
) -> tuple[dict[str, Any], Any]:
    """Fit, with a callback if there are hooks; return everything that is left, and the callback."""
    torch.manual_seed(0)
    net, loaders = module(), _data()
    callback = HooklineCallback(list(hooks), sinks=sinks or [], report_to=report_to) if hooks else None
    own = options.pop("callbacks", [])
    trainer = L.Trainer(
        default_root_dir=folder, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*([] if callback is None else [callback]), *own],
        **{"max_epochs": 3, "logger": False, "enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(net, *loaders, ckpt_path=checkpoint)
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    left = {"net": net.state_dict(), "optimizers": optimizers, "random": torch.get_rng_state()}
    left["logged"] = dict(trainer.callback_metrics)
    return left, callback


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    "validated within": {"val_check_interval": 3},
    "manual": {"module": Manual},
}


@pytest.mark.parametrize("case", RUNS)
def test_the_run_is_the_same_to_the_last_bit(case: str, tmp_path: Path) -> None:
    options = RUNS[case]
    plain, _ = fit(tmp_path, **options)
    hooks = [Seen(), "norms", *([] if case == "manual" else [TrainsAnEpoch()])]
    hooked, callback = fit(tmp_path, hooks, **options)
    assert nested_differences(hooked, plain) == []
    assert callback.manager.hooks.fired["seen"] >= 27
    assert case == "manual" or callback.manager.hooks.fired["trains"] > 8
    nudged, _ = fit(tmp_path, [Nudge()], **options)
    assert nested_differences(nudged, plain) != []


def test_a_watch_counts_training_and_not_validation(tmp_path: Path) -> None:
    counts: list[int] = []

    class WithWatch(Net):
        def on_train_start(self) -> None:
            self.watch = hl.watch(self.net, "0", optimizer=self.optimizers().optimizer)

        def on_train_end(self) -> None:
            counts.append(self.watch.steps)
            self.watch.remove()

    fit(tmp_path, [Seen()], module=WithWatch, max_epochs=1)
    assert counts == [7]


@pytest.mark.parametrize("every", [5, 7], ids=["within an epoch", "after an epoch"])
def test_hooks_go_on_from_lightnings_own_checkpoint(every: int, tmp_path: Path) -> None:
    _, callback = fit(tmp_path, _stateful(), max_epochs=2)
    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=every, save_top_k=-1, filename="{step}")
    short = {"max_epochs": 2, "max_steps": every, "enable_checkpointing": True, "callbacks": [saving]}
    fit(tmp_path, _stateful(), **short)
    (file,) = (tmp_path / "saved").glob("*.ckpt")
    _, resumed = fit(tmp_path, _stateful(), max_epochs=2, checkpoint=str(file))
    ours, theirs = resumed.manager.get_hook("counting"), callback.manager.get_hook("counting")
    assert (ours.count, resumed.manager.global_step) == (theirs.count, callback.manager.global_step) == (16, 13)


def _stateful() -> list[Any]:
    return [Counting(), "norms"]


def test_metrics_go_to_the_run_that_the_trainer_has_open(tmp_path: Path) -> None:
    memory, board = hl.sinks.MemorySink(), TensorBoardLogger(tmp_path, "board")
    fit(tmp_path, [Seen()], sinks=[memory], report_to="trainer", max_epochs=1, logger=board)
    board.finalize("success")
    assert len(list(Path(board.log_dir).glob("events.out.tfevents*"))) == 1  # no second run is opened
    events = EventAccumulator(board.log_dir).Reload()
    read = {(event.step, round(event.value, 5)) for event in events.Scalars("seen/norm")}
    told = {key: value for key, value in metrics_of(memory).items() if key[0] == "seen/norm"}
    assert read >= {(step, round(float(value), 5)) for (_, point, step), value in told.items() if point == "POST_STEP"}
    assert len({step for step, _ in read}) == 7
    assert "val_loss" in events.Tags()["scalars"]


def test_a_trainer_takes_one_callback() -> None:
    first, second = HooklineCallback([Counting()], sinks=[]), HooklineCallback(["norms"], sinks=[])
    with pytest.raises(RuntimeError, match="more than one stateful callback"):  # Lightning's own
        L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[first, second])
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[first])
    trainer.callbacks.append(second)  # as configure_callbacks() of a module may do
    with pytest.raises(OptionError, match="2 HooklineCallbacks"):
        first.on_train_start(trainer, Net())


def _fabric_loop(folder: Path, callbacks: Any, *, epochs: int = 3, state: Any = None, save: bool = False) -> Any:
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator="cpu", devices=1, callbacks=callbacks)
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)]
    model = nn.Sequential(*layers)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(_data()[0])
    everything = {"model": model, "optimizer": optimizer}
    if callbacks:
        everything["hooks"] = callbacks[0]
    if state is not None:
        fabric.load(state, everything)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    if save:
        fabric.save(folder / "state.ckpt", everything)
    return [model.module.state_dict(), optimizer.state_dict(), torch.get_rng_state()]


def test_hooks_go_on_from_a_checkpoint_of_fabric(tmp_path: Path) -> None:
    first = FabricCallback([Counting()])
    _fabric_loop(tmp_path, [first], epochs=2, save=True)
    first.close()
    second = FabricCallback([Counting()])
    _fabric_loop(tmp_path, [second], epochs=1, state=tmp_path / "state.ckpt")
    second.close()
    assert second.manager.get_hook("counting").count == 24
    assert (second.run.epoch, second.run.step) == (3, 20)


# -- run files and scripts ---------------------------------------------------------------------------------------


SCRIPT = """
import logging, sys, warnings
warnings.simplefilter("ignore")
import lightning, torch
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    validation_step = training_step
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.1)

torch.manual_seed(0)
net, loader = Net(), torch.utils.data.DataLoader(torch.randn(28, 4), 4, shuffle=True)
off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
lightning.Trainer(max_epochs=2, accelerator="cpu", **off).fit(net, loader, loader)
torch.save(net.state_dict(), sys.argv[1])
"""


def test_a_script_with_a_trainer_is_followed_by_its_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(SCRIPT)
    command = [sys.executable, "net.py"]
    assert main(["run", "--hooks", "norms", "--no-report", "--", *command, "hooked.pt"]) == 0
    assert subprocess.run([*command, "plain.pt"], check=False).returncode == 0
    assert "net/script finished: 14 steps" in capfd.readouterr().err
    hooked, plain = (torch.load(name, weights_only=True) for name in ("hooked.pt", "plain.pt"))
    assert nested_differences(hooked, plain) == []
    lines = [json.loads(line) for line in Path("runs/net/script/records.jsonl").read_text().splitlines()]
    metrics = [line.get("metrics", {}) for line in lines]
    assert sum(len(one.get("training_metrics/loss", [])) for one in metrics) == 14
    assert sum("norms/total_norm" in one for one in metrics) == 3


# -- two processes -------------------------------------------------------------------------------------------------


def _fit_by_ranks(folder: str) -> dict[str, Any]:
    from lightning.fabric.plugins.environments import LightningEnvironment

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"strategy": "ddp", "devices": 2, "plugins": [LightningEnvironment()], "max_epochs": 2}
    plain, _ = fit(Path(folder), **options)
    memory = hl.sinks.MemorySink()
    hooked, callback = fit(Path(folder), [Seen(), "norms"], sinks=[memory], **options)
    records = len(memory.records)
    fired = dict(callback.manager.hooks.fired)
    return {"differences": nested_differences(hooked, plain), "records": records, "fired": fired}


def test_two_processes_under_ddp_stay_the_same_and_one_writes(tmp_path: Path) -> None:
    first, second = run_ranks(_fit_by_ranks, str(tmp_path), ranks=2)
    assert first["differences"] == second["differences"] == []
    assert first["fired"] == second["fired"]
    assert first["fired"]["seen"] == 2 * (3 + 2 * 4)
    assert first["records"] > 0
    assert second["records"] == 0
