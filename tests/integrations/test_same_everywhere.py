"""A hook written once: its metrics, a watch's and a built-in analysis's are equal in every host, to the last bit.

One model, one dataset, one seed; each host trains it in its own way. A host is a function in `HOSTS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_hosts import metrics_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

import hookline as hl
from hookline.cli.main import main
from hookline.sinks import MemorySink

POINTS = hl.HookPoint
EPOCHS, STEPS = 3, 6
Found = tuple[dict[Any, Any], dict[str, Tensor]]


class Network(nn.Module):
    """What every host can train: keywords in, a dictionary with the loss out. No dropout: hosts draw differently."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class EveryPoint(hl.TrainingHook):
    """Reports at every point: losses, gradients of the step, of the step before, their mean; a sum over all steps."""

    hook_points = set(POINTS)
    needs_grads = needs_prev_step_grads = True

    def __init__(self) -> None:
        self.total = 0.0

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        found: dict[str, Any] = {"step": ctx.step, "epoch": ctx.epoch, "weight": ctx.model.layers[0].weight.norm()}
        if ctx.hook_point is POINTS.PRE_STEP:
            found |= {"previous": _length(ctx.prev_step_grads), "batch": ctx.batch_data["x"].sum()}
        elif ctx.hook_point is POINTS.POST_STEP:
            self.total += ctx.loss
            gradients = {name: p.grad for name, p in ctx.model.named_parameters()}
            found |= {"loss": ctx.loss, "total": self.total, "gradient": _length(gradients), "index": ctx.batch_idx}
        elif ctx.hook_point is not POINTS.PRE_EPOCH:
            found |= {"loss": ctx.loss, "mean": _length(ctx.accumulated_grads)}
        return found


class Ahead(hl.InterventionHook):
    """Perturbs the weights along the gradient of the batch, and trains an epoch: numbers of a run that never was."""

    hook_points = {POINTS.POST_STEP, POINTS.SNAPSHOT}
    step_schedule = hl.StepSchedule("stride", stride=4)

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, Any]:
        if run_ctx.hook_point is POINTS.SNAPSHOT:
            model_ctx.run_training_epoch()
            return {"weight": model_ctx.model.layers[0].weight.norm()}
        gradient = model_ctx.compute_batch_gradients()
        model_ctx.apply_perturbation(gradient, -0.1)
        return {"loss": model_ctx.batch_loss()}


def _length(gradients: Any) -> Tensor:
    squares = (grad.double().square().sum() for grad in gradients.values() if grad is not None)
    return sum(squares, torch.zeros((), dtype=torch.float64)).sqrt()


class Training:
    """The same model, optimizer and data for each host."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        data = torch.Generator().manual_seed(1)
        x, y = torch.randn(8 * STEPS, 6, generator=data), torch.randint(3, (8 * STEPS,), generator=data)
        self.data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]

    @property
    def loader(self) -> DataLoader[Any]:
        """Batches of eight, in order."""
        return DataLoader(self.data, batch_size=8)


class Parts(Training):
    """The same hooks for each host."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = MemorySink()
        self.watch = hl.watch(self.model, optimizer=self.optimizer, every=2)
        self.hooks = [EveryPoint(), Ahead(), "norms", self.watch]

    @contextmanager
    def found(self) -> Iterator[list[Found]]:
        """Return metrics and weights in a list, when the block is over."""
        result: list[Found] = []
        yield result
        self.watch.remove()
        result.append((metrics_of(self.sink), {name: v.clone() for name, v in self.model.state_dict().items()}))


def by_epoch_loop(parts: Parts, folder: Path) -> None:
    """The loop of hookline."""
    names = [hook for hook in parts.hooks if isinstance(hook, str)]
    objects = [hook for hook in parts.hooks if not isinstance(hook, str)]
    experiment = hl.Experiment(parts.model, parts.optimizer, parts.loader)
    hl.epoch_loop(
        experiment, epochs=EPOCHS, manager=hl.HookManager(["training_metrics", *names], objects, [parts.sink])
    )


def by_trainer(parts: Parts, folder: Path) -> None:
    """The Trainer of Hugging Face."""
    import transformers

    from hookline.integrations.transformers import HooklineCallback

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(parts.data)

    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=8, num_train_epochs=EPOCHS, max_grad_norm=0.0, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.ConstantLR(parts.optimizer, factor=1.0)
    callback = HooklineCallback(parts.hooks, sinks=[parts.sink])
    InOrder(
        parts.model, args, train_dataset=parts.data, optimizers=(parts.optimizer, constant), callbacks=[callback]
    ).train()


def by_accelerate(parts: Parts, folder: Path) -> None:
    """A loop that Accelerate has prepared."""
    import accelerate

    from hookline.integrations.accelerate import follow

    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(parts.model, parts.optimizer, parts.loader)
    with follow(
        accelerator, model, optimizer, parts.hooks, loader=loader, sinks=[parts.sink],
        loss_fn=lambda model, batch: model(**batch)["loss"],
    ):  # fmt: skip
        for _ in range(EPOCHS):
            for batch in loader:
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()


def by_bare_loop(parts: Parts, folder: Path) -> None:
    """A loop of one's own, followed by one line before it."""
    loader = parts.loader
    with hl.follow(
        parts.model, parts.optimizer, parts.hooks, loader=loader, sinks=[parts.sink],
        loss_fn=lambda model, batch: model(**batch)["loss"],
    ):  # fmt: skip
        for _ in range(EPOCHS):
            for batch in loader:
                parts.model(**batch)["loss"].backward()
                parts.optimizer.step()
                parts.optimizer.zero_grad()


def by_lightning(parts: Parts, folder: Path) -> None:
    """The Trainer of Lightning."""
    import lightning

    from hookline.integrations.lightning import HooklineCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = parts.model.layers

        def training_step(self, batch: Any) -> Tensor:
            loss: Tensor = parts.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return parts.optimizer

    callback = HooklineCallback(parts.hooks, sinks=[parts.sink])
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Module(), parts.loader)


def by_fabric(parts: Parts, folder: Path) -> None:
    """A loop with Lightning Fabric."""
    import lightning

    from hookline.integrations.fabric import FabricCallback

    loss_fn = lambda model, batch: model(**batch)["loss"]  # noqa: E731
    callback = FabricCallback(parts.hooks, sinks=[parts.sink], loss_fn=loss_fn)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, callbacks=[callback])
    model, optimizer = fabric.setup(parts.model, parts.optimizer)
    loader = fabric.setup_dataloaders(parts.loader)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(model(**batch)["loss"])
            optimizer.step()
    callback.close()


HOSTS: dict[str, Callable[[Parts, Path], None]] = {
    "bare loop": by_bare_loop,
    "trainer": by_trainer,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "fabric": by_fabric,
}


def _run(host: Callable[[Parts, Path], None], folder: Path) -> Found:
    parts = Parts()
    with parts.found() as found:
        host(parts, folder)
    return found[0]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The metrics and weights of the epoch loop."""
    return _run(by_epoch_loop, tmp_path_factory.mktemp("loop"))


def test_the_reference_has_every_kind_of_metric(expected: Found) -> None:
    """The comparison is of something: all five points, every step, a watch, an analysis, an intervention."""
    metrics, _ = expected
    assert {point for _, point, _ in metrics} == {point.name for point in POINTS}
    assert [step for name, _, step in metrics if name == "EveryPoint/total"] == list(range(EPOCHS * STEPS))
    kinds = {name.split("/")[0] for name, _, _ in metrics}
    assert kinds == {"EveryPoint", "Ahead", "norms", "training_metrics", "watch"}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning with a new torch
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize("host", HOSTS)
def test_metrics_and_weights_are_equal_in_every_host(host: str, expected: Found, tmp_path: Path) -> None:
    """Every metric of every hook at every step, and every weight at the end, bit for bit."""
    metrics, weights = _run(HOSTS[host], tmp_path)
    wanted, wanted_weights = expected
    assert metrics.keys() == wanted.keys()
    assert {key: value for key, value in metrics.items() if value != wanted[key]} == {}
    assert all(torch.equal(weights[name], wanted_weights[name]) for name in wanted_weights)


SCRIPT = """
import sys
sys.path[:0] = FOLDERS
import torch
from test_same_everywhere import EPOCHS, Training

training = Training()
loader = training.loader
for _ in range(EPOCHS):
    for batch in loader:
        training.model(**batch)["loss"].backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
torch.save(training.model.state_dict(), sys.argv[1])
"""


def test_a_script_that_knows_nothing_of_hooks_gives_the_same(expected: Found, tmp_path: Path) -> None:
    """``hookline run -- python train.py`` with the hooks of this file: metrics from its log, weights that it saves."""
    here = Path(__file__)
    (tmp_path / "train.py").write_text(SCRIPT.replace("FOLDERS", repr([str(here.parent), str(here.parent.parent)])))
    command = [sys.executable, "train.py", "weights.pt"]
    assert main(["run", "--hooks", "norms", f"{here}:EveryPoint", "--no-report", "--", *command]) == 0
    sink = MemorySink()
    hl.records.replay(tmp_path / "runs" / "train" / "script", sink)
    kinds = ("EveryPoint", "norms", "training_metrics")
    found, wanted = (
        {key: value for key, value in metrics.items() if key[0].split("/")[0] in kinds}
        for metrics in (metrics_of(sink), expected[0])
    )
    del wanted["norms/grad_norm", "POST_STEP", 0]  # hooks begin when the optimizer steps: that backward is over
    assert found.keys() == wanted.keys()
    assert {key: value for key, value in found.items() if value != wanted[key]} == {}
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in expected[1].items())
