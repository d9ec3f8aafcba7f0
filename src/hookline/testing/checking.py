"""Check whether a hook keeps the promises of hooks, by training with it, many times, on a small model.

Authors of hooks call `check_hook` in their tests and get a `HookCheck`. Every check is a run that must come out as
another run did: with the hook and without it, in one piece and saved in the middle, with a new hook and a used one. The
model has what goes wrong easily, and is made anew for every run, from one seed; what the run leaves behind is compared
bit for bit.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookline.errors import HookCheckError, HooklineError, HooksLeftError
from hookline.guard.digest import RunDigest, changed, digest, run_digest
from hookline.guard.rng import RandomStates
from hookline.lifecycle import checkpoint_file
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.lifecycle.registry import HookRegistry, make_hook
from hookline.messages import listed, short_repr, type_name
from hookline.sinks.memory_sink import MemorySink
from hookline.sites.find import assert_no_hooks
from hookline.tables import ShownAsTable, Table
from hookline.training.experiment import Experiment
from hookline.training.loops import epoch_loop, step_loop
from hookline.when import HookPoint

_CHECKS: Final = {
    "declared": ("A manager takes the hook: its methods take what they are given, and its points exist", ""),
    "runs": (
        "The hook runs",
        "let it work on the models and at the points that it declares, or return None where it cannot",
    ),
    "fires": (
        "The hook is due at least once",
        "pass arguments by which its schedule begins earlier, or check_hook(…, num_steps=…) for longer runs",
    ),
    "inert": (
        "The run is the same with the hook and without, to the last bit, and no hook is left on the model",
        "work on copies, put modes back, draw from its own generator, remove in finish() what start() attached; "
        "or make it an InterventionHook: whatever that does is undone",
    ),
    "reset": ("A second run with the same hook gives the metrics of the first", "forget in reset() whatever was kept"),
    "state": (
        "A run that is saved and continues in another process gives the metrics of one that was not",
        "hand out in state_dict(), or get_state_tensors(), all that is kept between firings, and take it back",
    ),
}
"""Of each check, what is asked and what to do next."""
_LOOPS: Final = {"epoch": frozenset(HookPoint), "step": frozenset({HookPoint.POST_STEP, HookPoint.SNAPSHOT})}
"""The points that each loop fires."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold one promise of hooks that a hook does not keep.

    Recipe: ``[finding.check for finding in report.findings]``.
    """

    check: str
    """Which check: ``"inert"``, ``"state"``, …"""
    text: str
    """What was asked, what was found, what to do next."""


@dataclass(repr=False)
class HookCheck(ShownAsTable):
    """Hold what came of checking a hook; prints as a table.

    Recipe: ``print(hookline.testing.check_hook(MyHook))``.
    """

    hook: str
    """Its name."""
    passed: dict[str, str] = field(default_factory=dict)
    """The checks that found nothing, and what they asked."""
    findings: list[Finding] = field(default_factory=list)
    """What was found."""
    skipped: dict[str, str] = field(default_factory=dict)
    """The checks that could not be made, and why."""
    notes: list[str] = field(default_factory=list)
    """What is no fault, but worth knowing."""
    metrics: tuple[str, ...] = ()
    """The metrics that it returned, without its name."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def raise_if_any(self) -> None:
        """Raise all findings at once, as one error."""
        if self.findings:
            number = f"{len(self.findings)} finding" + ("s" if len(self.findings) > 1 else "")
            lines = [f"  {finding.check}: {finding.text}" for finding in self.findings]
            raise HookCheckError("\n".join([f"Hook {self.hook!r} has {number}.", *lines]))

    def _table(self) -> Table:
        rows = [("ok", check, asked) for check, asked in self.passed.items()]
        rows += [("found", finding.check, finding.text) for finding in self.findings]
        rows += [("skipped", check, why) for check, why in self.skipped.items()]
        rows += [("note", "", text) for text in self.notes]
        return Table(
            ("", "check", "what was asked"),
            rows,
            title=f"hook {self.hook!r}, metrics: {', '.join(self.metrics) or 'none'}",
        )


# -- a small run ------------------------------------------------------------------------------------------------------


_TOKENS: Final = 11
_CLASSES: Final = 3
_BATCH: Final = 6
_BATCHES: Final = 6
"""In one pass over the data."""
_SNAPSHOT_STEPS: Final = 5


class SmallModel(nn.Module):
    """Classify four tokens: embedding, attention, BatchNorm, dropout.

    Recipe: ``SmallModel()(torch.zeros(2, 4, dtype=torch.long)).shape`` is ``(2, 3)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)
        self.decoder = nn.Linear(16, _CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, 4) to (B, 3)
        """Return the logits."""
        x = self.embedding(tokens)
        x = (x + self.attention(x, x, x, need_weights=False)[0]).mean(1)
        logits: Tensor = self.decoder(self.dropout(self.act(self.norm(self.hidden(x)))))
        return logits


def small_experiment() -> Experiment:
    """Return an experiment: dropout and BatchNorm, AdamW, a scheduler, a loader that shuffles, an evaluation.

    Recipe: ``hookline.epoch_loop(hookline.testing.small_experiment(), epochs=2)``.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = SmallModel()
    data = torch.Generator().manual_seed(1)
    tokens = torch.randint(_TOKENS, (_BATCH * _BATCHES, 4), generator=data)
    dataset = TensorDataset(tokens, tokens.sum(1) % _CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def evaluate(model: nn.Module) -> dict[str, Tensor]:
        right = (model(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).float().mean()
        return {"train_acc": right, "val_acc": right}

    return Experiment(
        model,
        optimizer,
        DataLoader(dataset, batch_size=_BATCH, shuffle=True, generator=torch.Generator().manual_seed(2)),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.95),
        evaluate=evaluate,
        target_gradient=lambda model, step: {name: torch.ones_like(p) for name, p in model.named_parameters()},
    )


class SmallRun:
    """Run one of the loops, as far as it goes."""

    def __init__(self, loop: str, make: Callable[[], Experiment], steps: int) -> None:
        self.loop = loop
        self.make = make
        self._steps = max(steps, 2 * _BATCHES)
        self._epochs = max(4, -(-self._steps // _BATCHES))

    @property
    def length(self) -> str:
        """How long it is, in words."""
        return f"{self._epochs} epochs" if self.loop == "epoch" else f"{self._steps} steps"

    @property
    def _end(self) -> int:
        return self._epochs if self.loop == "epoch" else self._steps

    def whole(self, trial: Trial | None) -> Outcome:
        """Train from the beginning to the end."""
        experiment = self.make()
        self._go(experiment, trial, 0, self._end)
        return Outcome(left_by(experiment), trial.metrics if trial else {}, experiment.model)

    def in_two(self, first: Trial, make_second: Callable[[Trial], Trial]) -> Outcome:
        """Train some way with one manager, the rest with another that is made from it."""
        experiment = self.make()
        middle = self._end // 2
        self._go(experiment, first, 0, middle)
        second = make_second(first)
        self._go(experiment, second, middle, self._end)
        before, after = {} if second is first else first.metrics, second.metrics
        metrics = {name: before.get(name, []) + after.get(name, []) for name in {**before, **after}}
        return Outcome(left_by(experiment), metrics, experiment.model)

    def _go(self, experiment: Experiment, trial: Trial | None, first: int, end: int) -> None:
        manager = None if trial is None else trial.manager
        if self.loop == "epoch":
            epoch_loop(experiment, epochs=end, first_epoch=first, manager=manager, snapshot_every=1)
        else:
            step_loop(experiment, steps=end, first_step=first, manager=manager, snapshot_every=_SNAPSHOT_STEPS)


# -- what a run leaves behind ----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Hold what a run left behind."""

    left: RunDigest
    """Weights, optimizer, random streams and so on, to the last bit."""
    metrics: dict[str, list[Any]]
    """What the hook returned, by metric: when, and what."""
    model: nn.Module


class Trial:
    """Put a hook into a manager of its own."""

    def __init__(self, hook: TrainingHook, reference: Mapping[str, Tensor] | None = None) -> None:
        self.hook = hook
        self._sink = MemorySink()
        self.manager = HookManager(hooks=[hook], sinks=[self._sink], reference_weights=reference)

    @property
    def fired(self) -> int:
        """How often the hook was called."""
        return self.manager.hooks.fired[self.hook.name]

    @property
    def metrics(self) -> dict[str, list[Any]]:
        """What the hook returned, by metric: when, and what."""
        found: dict[str, list[Any]] = {}
        for record in self._sink.records:
            for key, value in record.metrics.items():
                hook, _, metric = key.partition(f"{self.hook.name}/")
                if not hook and metric:
                    steps = tuple(getattr(value, "steps", ()))
                    found.setdefault(metric, []).append((str(record.hook_point), record.epoch, steps, value))
        return found

    def forgotten(self) -> Trial:
        """Forget the metrics so far, and return this."""
        self._sink.clear()
        return self


@contextmanager
def kept_streams() -> Iterator[None]:
    """Restore the random streams after the block, as if nothing had been drawn."""
    states = RandomStates()
    try:
        yield
    finally:
        states.restore()


def left_by(experiment: Experiment) -> RunDigest:
    """Return the digest of weights, buffers, gradients, modes, optimizer, scheduler, switches and random streams."""
    generator = getattr(experiment.loader, "generator", None)
    others = {
        "scheduler": getattr(experiment.scheduler, "last_epoch", None),
        "random stream of the loader": None if generator is None else generator.get_state(),
    }
    return run_digest([experiment.model], [] if experiment.optimizer is None else [experiment.optimizer], others)


# -- the check -----------------------------------------------------------------------------------------------------


def check_hook(
    hook: Any,
    *,
    make_experiment: Callable[[], Experiment] = small_experiment,
    num_steps: int = 24,
    raises: bool = True,
    **options: Any,
) -> HookCheck:
    """Check whether a hook keeps the promises of hooks.

    Recipe::

        def test_my_hook():
            hookline.testing.check_hook(MyHook, window=5)

    It is trained with, in both loops where it takes part, for a second or two. Asked is that the run is the same with
    the hook and without, to the last bit; that it has valid points and fires; and that its metrics are the same when
    the run is saved in the middle and goes on elsewhere, and when it is reset.

    Args:
        hook: A class, an object (which is copied for every run), or a name of `HookRegistry`.
        make_experiment: What makes the experiment to train, always the same one: it has to seed random streams itself.
        num_steps: How many steps the runs have at least; more for a hook whose schedule begins late.
        raises: Whether findings are raised, all in one error, or just returned.
        options: Arguments of the hook.
    """
    with kept_streams():
        report = _Checker(_maker(hook, options), make_experiment, num_steps).check()
    if raises:
        report.raise_if_any()
    return report


def _maker(hook: Any, options: dict[str, Any]) -> Callable[[], TrainingHook]:
    """Return what makes the hook anew for every run."""
    if isinstance(hook, str):
        hook = HookRegistry.get(hook)
    if isinstance(hook, type) and issubclass(hook, TrainingHook):
        return lambda: make_hook(hook, options)
    if isinstance(hook, TrainingHook) and not options:
        return lambda: copy.deepcopy(hook)
    raise HookCheckError(
        f"check_hook() takes a class derived from TrainingHook and its arguments, or an object; got {type_name(hook)}"
        f"{' and ' + ', '.join(options) if options else ''}."
    )


class _Checker:
    """Check one hook, run after run."""

    def __init__(self, make: Callable[[], TrainingHook], experiment: Callable[[], Experiment], steps: int) -> None:
        self._make = make
        self._experiment = experiment
        self._steps = steps
        self._report = HookCheck(self._made().name)
        self._seen: dict[str, list[Any]] = {}
        self._fired: list[int] = []
        """How often it was called, in each loop in which it takes part."""

    def check(self) -> HookCheck:
        """Make all checks, and return what came of them."""
        try:
            self._trial()
        except HooklineError as error:
            self._find("declared", str(error).rstrip("."))
            return self._report
        for loop in _LOOPS:
            self._check_in(loop)
        if self._fired and not any(self._fired):
            self._find("fires", f"in runs of {self._steps} steps or more it was not")
        self._report.metrics = tuple(self._seen)
        for finding in self._report.findings:  # one loop may find what the other did not
            self._report.passed.pop(finding.check, None)
        return self._report

    def _made(self) -> TrainingHook:
        """Return the hook, new; one that begins with random numbers begins with the same."""
        with kept_streams():  # of a run that is under way
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
            return self._make()

    def _trial(self) -> Trial:
        hook = self._made()
        reference = None
        if hook.needs_reference_weights:
            with kept_streams():
                model = self._experiment().model
            reference = {name: value.detach() * 1.1 + 0.01 for name, value in model.named_parameters()}
        return Trial(hook, reference)

    def _check_in(self, loop: str) -> None:
        """Make all checks in one of the loops."""
        trial = self._trial()
        trial.manager.plan.use_loop(loop)
        if not trial.manager.plan.points or trial.manager.plan.will_not_fire(_LOOPS[loop]):
            self._report.skipped[f"{loop} loop"] = "it takes no part there"
            return
        run = SmallRun(loop, self._experiment, self._steps)
        alone = self._attempt("runs", run, lambda: run.whole(trial))
        if alone is None:
            return
        self._fired.append(trial.fired)
        self._seen |= alone.metrics
        self._check_inert(run, alone)
        steady = self._steady(run, alone)
        self._compare("reset", run, steady, lambda: run.whole(trial.forgotten()))
        # With the same object for both parts: a loader that is left and begun again may shuffle otherwise.
        parts = self._attempt("state", run, lambda: run.in_two(self._trial(), lambda first: first))
        if parts is not None:
            unbroken = {name: values for name, values in parts.metrics.items() if name in steady}
            self._compare("state", run, unbroken, lambda: run.in_two(self._trial(), self._resumed))

    # -- single checks ---------------------------------------------------------------------------------------

    def _check_inert(self, run: SmallRun, alone: Outcome) -> None:
        # Weights first: a name that every author knows, of all that differs at the end of a run.
        names = sorted(changed(run.whole(None).left, alone.left), key=lambda name: not name.startswith("weight "))
        if names:
            self._find("inert", f"after {run.length} in the {run.loop} loop {listed(names)} differ")
        try:
            assert_no_hooks(alone.model, foreign=True)
        except HooksLeftError as error:
            self._find("inert", f"after the {run.loop} loop: {str(error).splitlines()[0].rstrip('.')}")
        self._pass("inert")

    def _steady(self, run: SmallRun, alone: Outcome) -> dict[str, list[Any]]:
        """Return the metrics that the same run gives twice; others cannot be compared."""
        unsteady = _differing(alone.metrics, run.whole(self._trial()).metrics)
        note = f"{listed(unsteady)} differ from one run to the next that is the same (times? NumPy's random numbers?)."
        if unsteady and note not in self._report.notes:
            self._report.notes.append(note)
        return {name: values for name, values in alone.metrics.items() if name not in unsteady}

    def _compare(self, check: str, run: SmallRun, wanted: dict[str, list[Any]], act: Callable[[], Outcome]) -> None:
        outcome = self._attempt(check, run, act)
        if outcome is None:
            return
        found = {name: values for name, values in outcome.metrics.items() if name in wanted}
        names = _differing(wanted, found)
        if names:
            self._find(check, f"in the {run.loop} loop {_difference(names, wanted, found)}")
        self._pass(check)

    def _resumed(self, first: Trial) -> Trial:
        """Return the hook in another manager, from a file."""
        state = first.manager.state_dict()
        name = first.hook.name
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "hook.pt"
            checkpoint_file.write(path, {"hook": state["hooks"][name]})
            state["hooks"] = {name: checkpoint_file.read(path)["hook"]}
        second = self._trial()
        second.manager.load_state_dict(state)
        return second

    # -- the report ------------------------------------------------------------------------------------------

    def _attempt(self, check: str, run: SmallRun, act: Callable[[], Outcome]) -> Outcome | None:
        try:
            return act()
        except Exception as error:
            told = f"{type(error).__name__}: {error}".rstrip(".")
            self._find(check, f"in the {run.loop} loop it raised {told}")
            return None

    def _find(self, check: str, found: str) -> None:
        asked, after = _CHECKS[check]
        text = f"{asked}; {found}." + (f" Next: {after}." if after else "")
        self._report.findings.append(Finding(check, text))

    def _pass(self, check: str) -> None:
        """Note a check as passed, until a finding takes it out again."""
        self._report.passed[check] = _CHECKS[check][0]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of metrics that are not the same to the last bit."""
    first, second = ({name: digest(value) for name, value in metrics.items()} for metrics in (one, other))
    return changed(first, second)


def _difference(names: list[str], wanted: Mapping[str, list[Any]], found: Mapping[str, list[Any]]) -> str:
    """Return in words where the first of the metrics that differ does so."""
    name, more = names[0], f" ({len(names) - 1} more differ)" if len(names) > 1 else ""
    ones, others = wanted[name], found.get(name, [])
    for (*_, at, _, one), (*_, other) in zip(ones, others, strict=False):
        if digest(one) != digest(other):
            return f"{name!r} at {at} is {_short(other)}, and should be {_short(one)}{more}"
    return f"{name!r} came {len(others)} times, and should have come {len(ones)} times{more}"


def _short(value: Any) -> str:
    return short_repr(list(value) if isinstance(value, list) else value, 60)
