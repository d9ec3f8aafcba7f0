"""The families "statistics" and "dispatch": numbers of every layer at every step, and the firing of lifecycle hooks.

``bench_peers`` runs the contests of `STATISTICS` and `DISPATCH`. Which instruments change the run that they look at is
another question, which ``audit_peers`` answers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from contests import Contest, Work, take_turns
from measure import Samples, interleave, trial
from models import Shape
from subject import Setting
from torch import nn
from watching import BOTH, Training, by_hand

import hookline as hl
from hookline import HookPoint, RunDataContext

__all__ = ["DISPATCH", "SHAPE", "STATISTICS", "offline_wandb", "quiet"]

SHAPE = Shape("transformer", 2, 128, 4, 1000, 8, 64)
PARAMETERS, LAYERS, NORMS = "statistics of parameters", "statistics of layers", "norms of parameters"
MODULES = "`hl.watch` on all leaves but embeddings, outputs and gradients, nine statistics, every step"
TEN, ONE = "ten hooks, none due", "one hook that does nothing"
BATCH = 200

Hooked = Callable[[], AbstractContextManager[object]]


# -- statistics ------------------------------------------------------------------------------------------------------


def stepping(step: Callable[[], object], ours: Hooked, theirs: Hooked, rounds: int, after: Any = None) -> Samples:
    """Time a step: bare, with ours twice, with theirs; ``after`` is what theirs does at the end of a step."""
    theirs_step = step if after is None else lambda: (step(), after())
    named: dict[str, tuple[Callable[[], object], Hooked]] = {
        "bare": (step, nullcontext),
        "ours": (step, ours),
        "ours again": (step, ours),
        "theirs": (theirs_step, theirs),
    }
    return dict(interleave([trial(name, call, inner=2, hooked=on) for name, (call, on) in named.items()], rounds))


def quiet() -> None:
    """Let one thread compute, without oneDNN, which makes small layers slow on some machines."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def against_wandb(rounds: int) -> dict[str, Samples | str]:
    """Look at every parameter and gradient, every step."""
    quiet()
    training, run = Training(SHAPE, Setting(torch.device("cpu"))), offline_wandb()
    current: list[Any] = []

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
        for watch in current:
            watch.to_metrics(reset=True)

    return {PARAMETERS: stepping(step, ours, theirs, rounds, after=lambda: run.log({"step": 1}))}


def offline_wandb() -> Any:
    """Return a run of wandb that sends nothing."""
    import wandb

    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    return wandb.init(mode="offline", dir=tempfile.mkdtemp(), project="benchmark", settings=settings)


def against_cockpit(rounds: int) -> dict[str, Samples | str]:
    """Take norms of parameters and gradients of a network that BackPACK knows, every step."""
    quiet()
    from backpack import extend
    from cockpit import Cockpit, quantities

    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (nn.Linear(256, 256), nn.ReLU())]
    model, lossfunc = extend(nn.Sequential(*layers)), extend(nn.MSELoss())
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.randn(64, 256)
    always = lambda step: True  # noqa: E731
    looks = [quantities.GradNorm(always), quantities.Distance(always)]
    cockpit, numbers, used = Cockpit(model.parameters(), quantities=looks), itertools.count(), [False]
    watches: list[Any] = []

    def step() -> None:
        optimizer.zero_grad()
        output = model(x)
        loss = lossfunc(output, x)
        if used[0]:
            losses = F.mse_loss(output, x, reduction="none").mean(1)
            info = {"batch_size": 64, "individual_losses": losses, "loss": loss, "optimizer": optimizer}
            with cockpit(next(numbers), info=info):
                loss.backward(create_graph=False)
        else:
            loss.backward()
        optimizer.step()
        for watch in watches:
            watch.to_metrics(reset=True)

    @contextmanager
    def theirs() -> Iterator[None]:
        used[0] = True
        yield
        used[0] = False

    @contextmanager
    def ours() -> Iterator[None]:
        with hl.watch(model, on=("param", "param_grad"), stats="norm", optimizer=optimizer) as watch:
            watches.append(watch)
            yield
            watches.clear()

    return {NORMS: stepping(step, ours, theirs, rounds)}


def against_hand_written(rounds: int, *, fetch: bool) -> dict[str, Samples | str]:
    """Six statistics of outputs and gradients of every leaf."""
    quiet()
    training = Training(SHAPE, Setting(torch.device("cpu")))
    theirs = lambda: by_hand(training.model, fetch=fetch)  # noqa: E731
    return {LAYERS: stepping(training.step, training.watched(on=BOTH), theirs, rounds)}


def _hand_written(label: str, words: str, *, fetch: bool) -> Contest:
    work = Work(
        f"what {MODULES}, adds to a step", f"what torch's hooks with six statistics, {words}, add", f"{SHAPE}, AdamW",
        why="it computes six statistics, ours nine",
    )  # fmt: skip
    return Contest(label, "torch", partial(against_hand_written, fetch=fetch), {LAYERS: work}, rounds=20)


STATISTICS: dict[str, Contest] = {
    "wandb": Contest("wandb.watch", "wandb", against_wandb, {PARAMETERS: Work(
        'what `hl.watch(model, on=("param", "param_grad"))` and its metrics add to a step',
        'what `wandb.watch(model, log="all", log_freq=1)`, offline, adds', f"{SHAPE}, AdamW",
        why="it draws one histogram of each tensor; ours computes nine statistics")}, rounds=20),
    "cockpit": Contest("cockpit", "cockpit-for-pytorch", against_cockpit, {NORMS: Work(
        'what `hl.watch(model, on=("param", "param_grad"), stats="norm")` and its metrics add to a step',
        "what `GradNorm` and `Distance` at every step add, with the losses that it asks for",
        "MLP: 8 Linear layers, d 256, batch 64, AdamW",
        why="it takes one norm of each tensor and keeps it; ours also hands out named metrics at every step")},
        rounds=20),
    "item": _hand_written("hand-written, `.item()`", "each fetched by `.item()`", fetch=True),
    "operations": _hand_written("hand-written, no `.item()`", "left on the device", fetch=False),
}  # fmt: skip


# -- dispatch of lifecycle hooks -------------------------------------------------------------------------------------


def against(make: Callable[[int, bool], Callable[[], object]], rounds: int) -> dict[str, Samples | str]:
    """Time firings; ``make`` takes a number of hooks, and whether they are due, and returns the firing."""
    quiet()
    context = partial(RunDataContext, HookPoint.POST_STEP, 0)
    ten, one = hl.HookManager(hooks=[*_scheduled()]), hl.HookManager(hooks=[Nothing()])
    for manager in (ten, one):
        manager.advance_step()
        manager.advance_step()

    def samples(ours: hl.HookManager, theirs: Callable[[], object]) -> Samples:
        calls = {"ours": lambda: ours.fire(HookPoint.POST_STEP, context), "theirs": theirs}
        return take_turns(calls, rounds, inner=3, batch=BATCH)

    return {TEN: samples(ten, make(10, False)), ONE: samples(one, make(1, True))}


class Nothing(hl.TrainingHook):
    """Do nothing at the end of a step."""

    hook_points = frozenset({HookPoint.POST_STEP})
    pure = True

    def compute(self, ctx: RunDataContext) -> dict[str, float]:
        """Return no metric."""
        return {}


def _scheduled() -> Iterator[hl.TrainingHook]:
    for number in range(10):
        hook = Nothing()
        hook.name = f"hook{number}"
        hook.step_schedule = hl.StepSchedule("stride", stride=10**9)
        yield hook


def lightning_firing(count: int, due: bool) -> Callable[[], object]:
    """Lightning: callbacks look at the step themselves."""
    import lightning
    from lightning.pytorch.trainer.call import _call_callback_hooks

    class Callback(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not due and batch_idx % 10**9 == 0:
                raise AssertionError

    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, barebones=False, default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    trainer.callbacks = [Callback() for _ in range(count)]
    trainer.strategy.connect(lightning.LightningModule())
    return lambda: _call_callback_hooks(trainer, "on_train_batch_end", None, None, 2)


def ignite_firing(count: int, due: bool) -> Callable[[], object]:
    """Ignite: handlers with a filter of their own."""
    from ignite.engine import Engine, Events

    engine = Engine(lambda engine, batch: None)
    engine.state.iteration = 2
    event = Events.ITERATION_COMPLETED if due else Events.ITERATION_COMPLETED(every=10**9)
    for _ in range(count):
        engine.add_event_handler(event, lambda engine: None)
    return lambda: engine.fire_event(Events.ITERATION_COMPLETED)


def torchtnt_firing(count: int, due: bool) -> Callable[[], object]:
    """Torchtnt: callbacks look at the step themselves."""
    from torchtnt.framework._callback_handler import CallbackHandler
    from torchtnt.framework.callback import Callback

    class Looking(Callback):
        def on_train_step_end(self, state: Any, unit: Any) -> None:
            if not due and unit.step % 10**9 == 0:
                raise AssertionError

    handler, unit = CallbackHandler([Looking() for _ in range(count)]), types.SimpleNamespace(step=2)
    return lambda: handler.on_train_step_end(None, unit)


def composer_firing(count: int, due: bool) -> Callable[[], object]:
    """Composer: callbacks look at the step themselves."""
    _leave_out_what_does_not_load()
    from composer.core import Callback, Engine, Event, State
    from composer.devices import DeviceCPU
    from composer.loggers import Logger

    class Looking(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            if not due and state.timestamp.batch.value % 10**9 == 1:
                raise AssertionError

    state = State(
        nn.Linear(1, 1), 0, "run", DeviceCPU(), max_duration="1ep", callbacks=[Looking() for _ in range(count)]
    )
    state.set_dataloader([0], "train")
    engine = Engine(state=state, logger=Logger(state=state))
    return lambda: engine.run_event(Event.BATCH_END)


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answer imports of torchvision and of Mosaic's command line with modules whose names are empty classes.

    Composer imports both at its top. The torchvision that the package index has does not load beside torch for CPU.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ("torchvision", "mcli"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        def empty(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = empty  # type: ignore[attr-defined]


def _leave_out_what_does_not_load() -> None:
    if not any(isinstance(finder, _Empty) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Empty())


WHY_FIRE = "it calls a method; ours also keeps the hook's failures and time apart from the run, and makes a context"


def _dispatch(label: str, package: str, make: Callable[[int, bool], Callable[[], object]], words: str) -> Contest:
    ten = Work("`fire` at a step at which none of ten scheduled hooks is due", words, "no model", beyond=False,
               why="its callbacks ask themselves; ours asks once which step is due next")  # fmt: skip
    one = Work("`fire` with one pure hook that does nothing", "the same with one that does nothing", "no model",
               beyond=False, why=WHY_FIRE)  # fmt: skip
    return Contest(label, package, partial(against, make), {TEN: ten, ONE: one})


DISPATCH: dict[str, Contest] = {
    "torchtnt": _dispatch("torchtnt", "torchtnt", torchtnt_firing, "`on_train_step_end`, ten callbacks that ask"),
    "ignite": _dispatch("ignite", "pytorch-ignite", ignite_firing, "`fire_event`, ten handlers with `every=10**9`"),
    "lightning": _dispatch("Lightning", "lightning", lightning_firing, "`on_train_batch_end`, ten callbacks that ask"),
    "composer": _dispatch("Composer", "mosaicml", composer_firing, "`Event.BATCH_END`, ten callbacks that ask"),
}
