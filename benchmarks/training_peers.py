"""Rows about instruments of training beside ours: do they change the run they look at, and what do they cost?

Takes instruments as their documentation shows them, hands `Row`s to ``rows``. Each trains a small network with dropout,
BatchNorm and AdamW twice from one seed, with the instrument and without, in the loop that the instrument belongs to;
the share of seeds whose final weights differ in any bit is the figure. The cost is that of a training step while
`wandb.watch` or ours looks at every parameter and gradient. Every instrument runs in a process of its own::

    python benchmarks/training_peers.py wandb_watch 10    what one instrument changes over ten seeds, as JSON

What there is to compare with, and how to install it, is in ``peers.txt``; what is not installed is listed as that.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row, interleave, ratios, spread, trial, typical
from models import Shape
from subject import Setting
from threads import NOTHING, in_child, installed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from watching import Training

import hookline as hl

__all__ = ["training_peers"]

SHAPE = Shape("transformer", 2, 128, 4, 1000, 8, 64)
COST = "watch_cost"
EPOCHS = 2


@dataclass(frozen=True, slots=True)
class Instrument:
    """Something that looks at a training run."""

    label: str
    package: str
    weights: Callable[[int, bool], list[Tensor]]
    """Takes a seed, and whether the instrument is used; hands back the final weights."""
    at_most: float | None = None


def training_peers(setting: Setting) -> Iterator[Row]:
    """A row per instrument, and one for the cost of a watch."""
    for name, instrument in INSTRUMENTS.items():
        result, words = _in_child(name, instrument.package, setting.rounds(10))
        changed = NOTHING if result is None else spread(result["changed"])
        same = NOTHING if result is None else spread(result["same"])
        if result is not None:
            words = f"{sum(result['changed']):.0f} of {len(result['changed'])} runs changed{words}"
        yield Row(
            f"final weights changed, {instrument.label}",
            "runs whose final weights differ in any bit from the run without it",
            "all runs, one for each seed; A/A: the run without it, twice",
            f"MLP with BatchNorm and dropout, AdamW, {EPOCHS} epochs of 8 batches",
            changed,
            same,
            words,
            at_most=instrument.at_most if result is not None else None,
        )
    yield _cost(setting)


def _cost(setting: Setting) -> Row:
    samples, words = _in_child(COST, "wandb", setting.rounds(20))
    ratio = same = NOTHING
    if samples is not None:
        ratio = spread(ratios(samples, "ours", "theirs", beyond="bare"))
        same = spread(ratios(samples, "ours again", "ours", beyond="bare"))
        bare, ours, theirs = (typical(samples, name) for name in ("bare", "ours", "theirs"))
        words = f"step ×{ours / bare:.2f} / ×{theirs / bare:.2f} of {bare * 1e3:.1f} ms{words}"
    return Row(
        "watch of parameters and gradients, against wandb.watch",
        '`hl.watch(model, on=("param", "param_grad"))` and its metrics, every step, beyond the bare step',
        '`wandb.watch(model, log="all", log_freq=1)` and its histograms, every step, offline, beyond the bare step',
        f"{SHAPE}, AdamW",
        ratio,
        same,
        words,
        at_most=1.0 if samples is not None else None,
    )


def _in_child(name: str, package: str, rounds: int) -> tuple[Any, str]:
    """What the child found, or None; and what to say of the package."""
    if not installed(package):
        return None, f"{package} is not installed"
    try:
        found = in_child(name, rounds, script=__file__)
    except subprocess.TimeoutExpired:
        return None, "did not finish"
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return None, f"failed: {last[:120].replace('|', '/')}"
    return found, "" if package == "hookline" else f"; {package} {importlib.metadata.version(package)}"


# -- in the child ----------------------------------------------------------------------------------------------------


def changes(name: str, seeds: int) -> dict[str, list[float]]:
    """For each seed whether the instrument changed the weights, and whether nothing did."""
    weights = INSTRUMENTS[name].weights
    changed, same = [], []
    for seed in range(seeds):
        bare = weights(seed, False)
        changed.append(_differ(bare, weights(seed, True)))
        same.append(_differ(bare, weights(seed, False)))
    return {"changed": changed, "same": same}


def _differ(one: list[Tensor], other: list[Tensor]) -> float:
    return float(any(not torch.equal(a, b) for a, b in zip(one, other, strict=True)))


def parts(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer, DataLoader[Any]]:
    """What is trained."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    x = torch.randn(128, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader


def trained_by_hand(seed: int, hooked: Callable[[nn.Module], AbstractContextManager[object]], after_step: Any) -> Any:
    """A loop as everybody writes it."""
    model, optimizer, loader = parts(seed)
    with hooked(model):
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                after_step(model, x)
    return [p.detach().clone() for p in model.parameters()]


def probe(seed: int, used: bool) -> list[Tensor]:
    """A forward of one's own for statistics, in training mode, once a step, its outputs caught by torch's hooks."""

    @contextmanager
    def caught(model: nn.Module) -> Iterator[None]:
        handle = model.register_forward_hook(lambda module, args, output: output.mean())
        yield
        handle.remove()

    def look(model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            model(x)

    found: list[Tensor] = trained_by_hand(seed, caught if used else nullcontext, look if used else lambda *_: None)
    return found


def hl_loop(hook: type[hl.TrainingHook]) -> Callable[[int, bool], list[Tensor]]:
    """Our loop with a hook."""

    def weights(seed: int, used: bool) -> list[Tensor]:
        model, optimizer, loader = parts(seed)
        manager = hl.HookManager(hooks=[hook] if used else [])
        hl.epoch_loop(hl.Experiment(model, optimizer, loader), epochs=EPOCHS, manager=manager)
        return [p.detach().clone() for p in model.parameters()]

    return weights


class Draws(hl.TrainingHook):
    """An observer that draws a random number."""

    hook_points = frozenset({hl.HookPoint.POST_STEP})

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        return {"drawn": torch.rand(())}


class Probes(hl.InterventionHook):
    """The same forward in training mode, and an epoch of training that is undone."""

    hook_points = frozenset({hl.HookPoint.SNAPSHOT})

    def intervene(self, run_ctx: hl.RunDataContext, model_ctx: Any) -> dict[str, Any]:
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        return {"mean": model_ctx.model(torch.ones(4, 8)).mean()}


def watched(seed: int, used: bool) -> list[Tensor]:
    """`hl.watch` of everything."""
    found: list[Tensor] = trained_by_hand(seed, hl.watch if used else nullcontext, lambda *_: None)
    return found


def wandb_watched(seed: int, used: bool) -> list[Tensor]:
    """`wandb.watch` of everything, offline."""
    run = _offline()

    @contextmanager
    def on(model: nn.Module) -> Iterator[None]:
        run.watch(model, log="all", log_freq=1)
        yield
        run.unwatch(model)

    log = (lambda model, x: run.log({"step": 1})) if used else lambda *_: None
    found: list[Tensor] = trained_by_hand(seed, on if used else nullcontext, log)
    return found


@functools.cache
def _offline() -> Any:
    """Return the one run of this process, that sends nothing anywhere; beginning one takes seconds."""
    import wandb

    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    return wandb.init(mode="offline", dir=tempfile.mkdtemp(), project="benchmark", settings=settings)


def lightning_loop(make: Callable[[], Any]) -> Callable[[int, bool], list[Tensor]]:
    """Lightning's loop with a callback."""

    def weights(seed: int, used: bool) -> list[Tensor]:
        import lightning

        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        net, _, loader = parts(seed)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.lr = net, 0.01

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return F.mse_loss(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=self.lr)

        with tempfile.TemporaryDirectory() as folder:
            trainer = lightning.Trainer(
                max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False,
                enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                callbacks=[make()] if used else [],
            )  # fmt: skip
            trainer.fit(Module(), loader)
        return [p.detach().clone() for p in net.parameters()]

    return weights


def drawing_callback() -> Any:
    """A callback that draws a random number."""
    import lightning

    class Callback(lightning.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            torch.rand(())

    return Callback()


def rate_finder() -> Any:
    """The learning rate finder, with the rate that it found put back."""
    from lightning.pytorch.callbacks import LearningRateFinder

    class Callback(LearningRateFinder):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_fit_start(trainer, pl_module)
            pl_module.lr = 0.01
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01

    return Callback(num_training_steps=30)


INSTRUMENTS = {
    "observer": Instrument("hookline, an observer that draws a random number", "hookline", hl_loop(Draws), 0.0),
    "intervention": Instrument("hookline, an intervention that trains an epoch", "hookline", hl_loop(Probes), 0.0),
    "watch": Instrument("`hl.watch` of everything", "hookline", watched, 0.0),
    "probe": Instrument("a forward of one's own with plain hooks", "torch", probe),
    "wandb_watch": Instrument('`wandb.watch(log="all")`', "wandb", wandb_watched),
    "callback": Instrument(
        "a Lightning callback that draws a random number", "lightning", lightning_loop(drawing_callback)
    ),
    "rate_finder": Instrument(
        "Lightning's `LearningRateFinder`, the rate put back", "lightning", lightning_loop(rate_finder)
    ),
}


def watch_cost(rounds: int) -> dict[str, list[float]]:
    """The times of a step: bare, watched by us, watched by wandb."""
    torch.backends.mkldnn.enabled = False
    training = Training(SHAPE, Setting(torch.device("cpu")))
    run = _offline()
    current: list[hl.observe.Watch] = []

    @contextmanager
    def ours() -> Iterator[None]:
        with hl.watch(training.model, on=("param", "param_grad"), optimizer=training.optimizer) as watch:
            current.append(watch)
            yield
            current.clear()

    @contextmanager
    def theirs() -> Iterator[None]:
        run.watch(training.model, log="all", log_freq=1)
        yield
        run.unwatch(training.model)

    def step() -> None:
        training.step()
        if current:
            current[0].to_metrics(reset=True)

    def logged() -> None:
        training.step()
        run.log({"step": 1})

    samples = interleave(
        [
            trial("bare", step, inner=2),
            trial("ours", step, inner=2, hooked=ours),
            trial("ours again", step, inner=2, hooked=ours),
            trial("theirs", logged, inner=2, hooked=theirs),
        ],
        rounds,
    )
    return dict(samples)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked, number = sys.argv[1], int(sys.argv[2])
    print(json.dumps(watch_cost(number) if asked == COST else changes(asked, number)))
