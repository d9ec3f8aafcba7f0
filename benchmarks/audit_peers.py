"""Audit known diagnostics: train with and without each, used as its documentation says, and print which change the run.

    python benchmarks/audit_peers.py                 a line for each instrument whose package is installed
    python benchmarks/audit_peers.py --write         the same as the table of docs/audit.md
    python benchmarks/audit_peers.py --one NAME      one instrument, in this process, as JSON

Each runs in a process of its own, since some leave torch changed. The environment is that of `make bench-peers`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from contests import in_child, last_line
from debug_peers import msprobe_debugger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training_peers import offline_wandb

import hookline as hl

PAGE = Path(__file__).parent.parent / "docs" / "audit.md"
BEGIN, END = "<!-- instruments -->", "<!-- end of instruments -->"
STEPS = 20
USED_AT = 10
TIMEOUT = 300


class Instrument(NamedTuple):
    """Something that people look at a run with."""

    label: str
    package: str
    train: Callable[..., Any]
    """The training to audit; with an argument it puts the instrument on itself."""
    make: Callable[[], Any]
    """Makes the hook, in the child."""


# -- trainings -------------------------------------------------------------------------------------------------------


def parts() -> tuple[nn.Sequential, torch.optim.Optimizer, DataLoader[Any]]:
    """Dropout, BatchNorm, AdamW, a loader that shuffles; from the same seeds each time."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    x = torch.randn(160, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader


def by_hand() -> None:
    """A loop as everybody writes it; the audit puts the instrument on."""
    with_use([])


def with_use(uses: list[Callable[..., Any]]) -> None:
    """The same loop, which uses an instrument once, after step 10."""
    model, optimizer, loader = parts()
    step = 0
    for _ in range(STEPS // len(loader)):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            if step == USED_AT:
                for use in uses:
                    use(model, x, y)


def without_batch_norm(uses: list[Callable[..., Any]]) -> None:
    """The loop on a model with dropout alone, for instruments that do not take BatchNorm."""
    model, optimizer, loader = parts()
    model = nn.Sequential(*(layer for layer in model if not isinstance(layer, nn.BatchNorm1d)))
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if step == USED_AT // 2:
            for use in uses:
                use(model, x, y)


def by_lightning(callbacks: list[Any]) -> None:
    """Lightning's loop with callbacks."""
    import lightning

    net, _, loader = parts()

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
            max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(Module(), loader)


def by_ignite(finders: list[Any]) -> None:
    """Ignite's loop; a finder of learning rates runs before it."""
    from ignite.engine import create_supervised_trainer

    model, optimizer, loader = parts()
    trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
    for finder in finders:
        saved = {"model": model, "optimizer": optimizer}
        with finder.attach(trainer, to_save=saved, num_iter=10, end_lr=1.0) as searching:
            searching.run(loader)
    trainer.run(loader, max_epochs=STEPS // len(loader))


# -- instruments -----------------------------------------------------------------------------------------------------


def probe(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One forward, as the model is."""
    with torch.no_grad():
        model(x)


def careful_probe(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One forward in evaluation mode, and back."""
    model.eval()
    probe(model, x, y)
    model.train()


def guarded_probe(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The careless one inside `hl.rollback`."""
    with hl.rollback(model):
        probe(model, x, y)


def eigenvalues() -> Callable[..., Any]:
    """PyHessian's largest eigenvalue."""
    from pyhessian import hessian

    return lambda model, x, y: hessian(model, F.mse_loss, data=(x, y), cuda=False).eigenvalues(maxIter=5)


def curvature() -> Callable[..., Any]:
    """One product with curvlinops' Hessian."""
    from curvlinops import HessianLinearOperator

    def use(model: nn.Module, x: Tensor, y: Tensor) -> None:
        params = {name: one for name, one in model.named_parameters() if one.requires_grad}
        try:
            operator = HessianLinearOperator(model, nn.MSELoss(), params, [(x, y)], check_deterministic=False)
        except Exception:  # older versions take a list
            operator = HessianLinearOperator(
                model, nn.MSELoss(), list(params.values()), [(x, y)], check_deterministic=False
            )
        operator @ torch.ones(operator.shape[1])

    return use


def backpack_pass() -> Callable[..., Any]:
    """Gradients of each sample by BackPACK, in one pass more."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    def use(model: nn.Module, x: Tensor, y: Tensor) -> None:
        extended, loss = extend(model), extend(nn.MSELoss())
        with backpack(BatchGrad()):
            loss(extended(x), y).backward()
        for parameter in model.parameters():
            parameter.grad_batch = None

    return use


def forward_log() -> Callable[..., Any]:
    """torchlens' log of one forward."""
    import torchlens

    log = getattr(torchlens, "log_forward_pass", None) or torchlens.trace
    return lambda model, x, y: log(model, x)


def nnsight_trace() -> Callable[..., Any]:
    """One traced forward of nnsight."""
    from nnsight import NNsight

    def use(model: nn.Module, x: Tensor, y: Tensor) -> None:
        traced = NNsight(model)
        with traced.trace(x):
            traced[0].output.save()

    return use


def attributions() -> Callable[..., Any]:
    """Integrated gradients of captum."""
    from captum.attr import IntegratedGradients

    return lambda model, x, y: IntegratedGradients(model).attribute(x, target=0, n_steps=5)


def wandb_watch() -> Callable[..., Any]:
    """``wandb.watch`` of everything, at every step, offline."""
    run = offline_wandb()

    @contextmanager
    def watched(model: nn.Module) -> Iterator[None]:
        run.watch(model, log="all", log_freq=1)
        handle = model.register_forward_hook(lambda *_: run.log({"step": 1}))
        yield
        handle.remove()
        run.unwatch(model)

    return lambda model: watched(model)


def msprobe_statistics() -> Callable[..., Any]:
    """msprobe's statistics of modules (level L0)."""
    debugger = msprobe_debugger(Path(tempfile.mkdtemp()))

    @contextmanager
    def on(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        debugger.start(model=model)

        def end_step(*_: Any) -> None:
            debugger.stop()
            debugger.step()
            debugger.start(model=model)

        handle = optimizer.register_step_post_hook(end_step)
        yield
        handle.remove()
        debugger.stop()

    return lambda model, optimizer: on(model, optimizer)


def overflow_detector() -> Callable[..., Any]:
    """The detector of transformers."""
    from transformers.debug_utils import DebugUnderflowOverflow

    return lambda model: DebugUnderflowOverflow(model) and None


def drawing_callback() -> Any:
    """A callback that draws a random number."""
    import lightning

    class Drawing(lightning.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            torch.rand(())

    return Drawing()


def stats_monitor() -> Any:
    """Lightning's monitor of devices."""
    from lightning.pytorch.callbacks import Timer

    return Timer()


def rate_finder() -> Any:
    """The learning rate finder, with the rate that it found put back."""
    from lightning.pytorch.callbacks import LearningRateFinder

    class Finder(LearningRateFinder):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_fit_start(trainer, pl_module)
            pl_module.lr = 0.01
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01

    return Finder(num_training_steps=30)


def ignite_finder() -> Any:
    """Ignite's finder of learning rates."""
    from ignite.handlers import FastaiLRFinder

    return FastaiLRFinder()


def debug_mode() -> Any:
    """torch's DebugMode around the training."""
    from torch.utils._debug_mode import DebugMode

    return DebugMode


def flop_counter() -> Any:
    """torch's counter of operations around the training."""
    from torch.utils.flop_counter import FlopCounterMode

    return lambda: FlopCounterMode(display=False)


class Probing(hl.InterventionHook):
    """The careless forward, as an intervention."""

    hook_points = frozenset({hl.HookPoint.POST_STEP})
    step_schedule = hl.StepSchedule("stride", stride=10)

    def intervene(self, run_ctx: hl.RunDataContext, model_ctx: Any) -> dict[str, Any]:
        """Look."""
        return {"mean": model_ctx.model(torch.ones(4, 8)).mean()}


INSTRUMENTS = {
    "probe": Instrument("a forward by hand, in training mode", "torch", with_use, lambda: probe),
    "careful_probe": Instrument(
        "a forward by hand between `eval()` and `train()`", "torch", with_use, lambda: careful_probe
    ),
    "debug_mode": Instrument("torch's `DebugMode`", "torch", by_hand, debug_mode),
    "flops": Instrument("torch's `FlopCounterMode`", "torch", by_hand, flop_counter),
    "profiler": Instrument("`torch.profiler.profile`", "torch", by_hand, lambda: lambda: torch.profiler.profile()),
    "anomaly": Instrument(
        "`torch.autograd.detect_anomaly`", "torch", by_hand, lambda: lambda: torch.autograd.detect_anomaly()
    ),
    "pyhessian": Instrument("PyHessian, eigenvalues", "pyhessian", with_use, eigenvalues),
    "curvlinops": Instrument("curvlinops, H·v", "curvlinops-for-pytorch", with_use, curvature),
    "curvlinops_dropout": Instrument(
        "curvlinops, H·v, model without BatchNorm", "curvlinops-for-pytorch", without_batch_norm, curvature
    ),
    "backpack": Instrument("BackPACK, `BatchGrad` in an extra pass", "backpack-for-pytorch", with_use, backpack_pass),
    "torchlens": Instrument("torchlens, log of a forward", "torchlens", with_use, forward_log),
    "nnsight": Instrument("nnsight, `trace`", "nnsight", with_use, nnsight_trace),
    "captum": Instrument("captum, `IntegratedGradients`", "captum", with_use, attributions),
    "ignite": Instrument("ignite, `FastaiLRFinder`", "pytorch-ignite", by_ignite, ignite_finder),
    "rate_finder": Instrument(
        "Lightning, `LearningRateFinder`, the rate put back", "lightning", by_lightning, rate_finder
    ),
    "callback": Instrument(
        "Lightning, a callback that draws a random number", "lightning", by_lightning, drawing_callback
    ),
    "timer": Instrument("Lightning, `Timer`", "lightning", by_lightning, stats_monitor),
    "wandb": Instrument('`wandb.watch(log="all")`', "wandb", by_hand, wandb_watch),
    "msprobe": Instrument("msprobe, statistics of modules", "mindstudio-probe", by_hand, msprobe_statistics),
    "overflow": Instrument("transformers, `DebugUnderflowOverflow`", "transformers", by_hand, overflow_detector),
    "watch": Instrument("`hl.watch` of everything", "hookline", by_hand, lambda: lambda model: hl.watch(model)),
    "guarded": Instrument(
        "that forward in training mode, in `hl.rollback`", "hookline", with_use, lambda: guarded_probe
    ),
    "intervention": Instrument("that forward as an intervention", "hookline", by_hand, lambda: Probing),
}


# -- the table -------------------------------------------------------------------------------------------------------


def audit_one(name: str) -> dict[str, Any]:
    """Audit an instrument in this process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    one = INSTRUMENTS[name]
    return hl.audit(one.train, {name: one.make()}).to_dict()


def audited(name: str) -> tuple[str, str, str]:
    """Return the cells of an instrument: changed or not, where, what differs first."""
    try:
        found = in_child(__file__, "--one", name, limit=TIMEOUT, folder=tempfile.mkdtemp())
    except subprocess.TimeoutExpired:
        return "did not finish", "", ""
    except subprocess.CalledProcessError as error:
        return "failed", "", last_line(error)
    return cells(found)


def cells(found: dict[str, Any]) -> tuple[str, str, str]:
    """Return the cells of a result."""
    difference = found["difference"]
    if difference is None:
        left = found["left_behind"]
        return ("no", "", "") if left is None else ("leaves something behind", "", left["names"][0])
    names = difference["names"]
    if names[0].startswith("error"):
        return ("raises", f"step {difference['step']}", names[0].removeprefix("error: ").partition(":")[0])
    is_final = any(name.startswith("weight ") for name in found["end_differs"])
    where = "the start" if difference["step"] < 0 else f"step {difference['step']}"
    return ("**yes**" if is_final else "yes, not the weights"), where, names[0]


def table() -> str:
    """Audit all that is installed; return a table of what changes the run, and the names of what does not."""
    lines = [
        "| instrument | version | changes the run | first difference | what differs first |",
        "|---|---|---|---|---|",
    ]
    innocent: list[str] = []
    for name, one in INSTRUMENTS.items():
        try:
            version = hl.__version__ if one.package == "hookline" else importlib.metadata.version(one.package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: {one.package} is not installed", file=sys.stderr)
            continue
        changed, where, what = audited(name)
        print(name, changed, where, what, file=sys.stderr)
        if changed == "no":
            innocent.append(f"{one.label} ({version})")
        else:
            lines.append(f"| {one.label} | {version} | {changed} | {where} | {what} |")
    return "\n".join([*lines, "", f"Unchanged: {'; '.join(innocent)}.", ""])


def main() -> None:
    """Read the arguments, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=list(INSTRUMENTS))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.one:
        print("\n" + json.dumps(audit_one(options.one)))
        return
    found = table()
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{found}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    else:
        print(found)


if __name__ == "__main__":
    main()
