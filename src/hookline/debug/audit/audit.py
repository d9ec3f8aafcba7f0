"""Audit hooks: train with and without them, compare bit for bit, name the step and the hook that changes the run.

Users and ``hookline audit`` call `audit`, which trains by `Trainings` and returns an `Audit`. Nothing is asked of a
training but that it steps a ``torch.optim.Optimizer``: the first forward of a module that an optimizer trains tells the
model, or else the first step. Random streams and the switches of torch are set back before every training, so that all
of them begin alike. `AuditedHook` is whatever people call a hook (lifecycle hooks, functions of a model, context
managers); a fresh copy of it is put on at every training.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self, TypeAlias
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookline.errors import NoMatchError, OptionError
from hookline.guard.digest import SWITCH, RunDigest, changed, run_digest
from hookline.guard.guard import TorchSwitches
from hookline.guard.rng import RandomStates, kept_rng, restart_hook_stream
from hookline.integrations.follow import Follow, follow
from hookline.integrations.host_run import can_count_steps
from hookline.integrations.loop_events import FirstStep, find_model, find_optimizers
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.lifecycle.registry import HookRegistry
from hookline.messages import type_name
from hookline.phases import phase
from hookline.tables import ShownAsTable, Table

_NEXT_REPEATABLE: Final = (
    "Next: let train_fn build its model, optimizer and data inside, and seed all that draws "
    "(torch, NumPy, Python, its own generators); on a GPU, torch.use_deterministic_algorithms(True)."
)
_NEXT_LEFT_BEHIND: Final = (
    "What the hooks left in the process (a global hook, a patched function) stays on in later trainings, so that none "
    "can be blamed here. Next: audit them one at a time, each in a separate process."
)
_NEXT_STATE: Final = (
    "Trained again with the same hooks the run did not differ: a hook keeps something from one training to the next, "
    "so none can be blamed. Next: give a function that makes the hook anew."
)


def audit(train_fn: Callable[..., Any], hooks: Any, *, steps: int | None = None) -> Audit:
    """Train with and without hooks, and say whether and where they change the run, and which one does.

    Recipe::

        def train():
            torch.manual_seed(0)
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters())
            for x, y in batches():
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()


        print(hookline.audit(train, ["norms", lambda model: wandb.watch(model)], steps=20))

    After every step weights, buffers, gradients, modes, optimizer state, switches of torch and random streams (Python,
    NumPy, torch, every CUDA device) are compared to the last bit. First it is trained twice without hooks: what does
    not repeat by itself is said, and no hook is blamed for it. Then with all hooks, then without them once more. If the
    hooks change the run, halves of them are tried, each from the same start, until it is known which ones do.

    Args:
        train_fn: Trains, with steps of a ``torch.optim.Optimizer`` in this process. Without arguments, the audit puts
            the hooks on, before the model's first forward in training mode (lifecycle hooks: at the first step). With
            one argument, it gets the list of the hooks to train with, and puts them on itself: callbacks of a trainer.
        hooks: One, a list, or a dictionary by name. A lifecycle hook, its class or name, or a group of them
            (``"norms"``); a function of the model, or of model and optimizer, that puts something on and may return
            what takes it off; a function or class without arguments that does so, or makes a context manager, for
            around the training. Each training gets a copy.
        steps: After how many steps a training is stopped; None: at its own end.

    Returns:
        The result: ``ok``, ``first_step``, ``culprits``, and a table when printed.

    Raises:
        OptionError: there are no hooks, or ``train_fn`` makes no step that can be followed.
    """
    if steps is not None and steps < 1:
        raise OptionError(f"audit(steps=) takes a number of at least 1, got {steps}.")
    trainings = Trainings(train_fn, steps=steps)
    chosen = audited_hooks(hooks, by_training=trainings.by_training)
    try:
        return _compare(chosen, trainings)
    finally:
        trainings.set_back()


def _compare(hooks: list[AuditedHook], trainings: Trainings) -> Audit:
    plain = trainings.train()
    names, length = tuple(hook.name for hook in hooks), len(plain.states)
    unstable = plain.difference(trainings.train())
    if unstable is not None:
        return Audit(names, length, trainings.count, not_repeatable=unstable, notes=[_NEXT_REPEATABLE])
    hooked = trainings.train(hooks)
    difference = plain.difference(hooked)
    left_behind = plain.difference(trainings.train())
    notes = [_NEXT_LEFT_BEHIND] if left_behind is not None else []
    culprits = []
    if difference is not None and left_behind is None:
        culprits = _find_culprits(hooks, difference, lambda some: plain.difference(trainings.train(some)))
        # One that counts over trainings looks like several that act together: it did it once, and never again.
        if any(len(one.hooks) > 1 for one in culprits) and plain.difference(trainings.train(hooks)) is None:
            culprits, notes = [], [_NEXT_STATE]
    return Audit(
        names,
        length,
        trainings.count,
        difference,
        culprits,
        left_behind=left_behind,
        silent=tuple(sorted(trainings.silent)) if hooked.error is None else (),
        end_differs=_end_differs(plain, hooked),
        notes=notes,
    )


def _end_differs(plain: Training, hooked: Training) -> tuple[str, ...]:
    """Return what differs after the last step of both; nothing if one has not come so far."""
    if hooked.error is not None:
        return ()
    last = [one.end or one.states[-1] for one in (plain, hooked)]
    return first_difference(last[0], last[1])


# -- which hook it is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Culprit:
    """A hook that changes the run by itself; or several of which none can be left out: they change it together."""

    hooks: tuple[str, ...]
    """The names."""
    difference: Difference
    """Where the run with these hooks alone first differs."""


_Trial: TypeAlias = "Callable[[Sequence[AuditedHook]], Difference | None]"


def _find_culprits(hooks: Sequence[AuditedHook], difference: Difference, try_with: _Trial) -> list[Culprit]:
    """Return the culprits among ``hooks``, which together give the ``difference``; the earliest step first.

    One after the other is found and left out, from the same start, until the rest changes nothing.
    """
    left: Difference | None = difference
    found = []
    while left is not None:
        found.append(_smallest(hooks, left, try_with))
        hooks = [hook for hook in hooks if hook.name not in found[-1].hooks]
        left = try_with(hooks) if hooks else None
    return sorted(found, key=lambda culprit: culprit.difference.step)


def _smallest(hooks: Sequence[AuditedHook], difference: Difference, try_with: _Trial) -> Culprit:
    """Return a culprit of which none can be left out: by halves, and where no half changes the run, one by one."""
    middle = len(hooks) // 2
    for half in (hooks[:middle], hooks[middle:]) if middle else ():
        if (of_half := try_with(half)) is not None:
            return _smallest(half, of_half, try_with)
    for hook in hooks if len(hooks) > 2 else ():
        rest = [other for other in hooks if other is not hook]
        if (of_rest := try_with(rest)) is not None:
            hooks, difference = rest, of_rest
    return Culprit(tuple(hook.name for hook in hooks), difference)


# -- the result ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Audit(ShownAsTable):
    """What `hookline.audit` found; prints as a table.

    Recipe: ``assert hookline.audit(train, hooks).ok``.
    """

    hooks: tuple[str, ...]
    """The names of the hooks."""
    steps: int
    """How many steps each training made."""
    trainings: int
    """How often was trained."""
    difference: Difference | None = None
    """Where the run with all hooks first differs; None if it is the same to the last bit."""
    culprits: Sequence[Culprit] = ()
    """The hooks that change the run, alone or together; the earliest step first."""
    not_repeatable: Difference | None = None
    """Where two trainings without hooks differ; then nothing can be said of hooks."""
    left_behind: Difference | None = None
    """Where a training without hooks, made after they were taken off, differs from those before."""
    end_differs: tuple[str, ...] = ()
    """What differs when the trainings have ended: the final weights, say."""
    silent: tuple[str, ...] = ()
    """Lifecycle hooks that did not fire in these steps, or turned themselves off: nothing can be said of them."""
    notes: list[str] = field(default_factory=list)
    """What else is worth knowing."""

    @property
    def ok(self) -> bool:
        """Whether the run is the same with the hooks and without, to the last bit."""
        return self.verdict == "same"

    @property
    def verdict(self) -> str:
        """``"same"``, ``"changed"``, ``"not repeatable"``, or ``"undecided"`` where a hook did not fire."""
        if self.not_repeatable is not None:
            return "not repeatable"
        if self.difference is not None or self.left_behind is not None:
            return "changed"
        return "undecided" if self.silent else "same"

    @property
    def first_step(self) -> int | None:
        """The first step that differs, counted from 0; None if none does."""
        return None if self.difference is None else self.difference.step

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {"ok": self.ok, "verdict": self.verdict, **asdict(self)}

    def _table(self) -> Table:
        rows = [(name, *self._row(name)) for name in self.hooks] if self.not_repeatable is None else []
        header = ("hook", "finding", "differs first at", "what differs first")
        foot = list(self.notes)
        if self.silent:
            foot.append("Next, for hooks that did not fire: audit more steps, or give them what they need to measure.")
        return Table(header if rows else (), rows, title=self._headline(), foot=foot)

    def _headline(self) -> str:
        length = f"{self.steps} step{'s' * (self.steps != 1)}"
        if self.not_repeatable is not None:
            return f"Not repeatable: two trainings of {length} without hooks differ: {self.not_repeatable}."
        on = f"{len(self.hooks)} hook{'s' * (len(self.hooks) != 1)}"
        if self.difference is not None:
            return f"Changed: {length} with {on} differ from {length} without: {self.difference}."
        if self.left_behind is not None:
            return f"Changed: {on} left something behind; the training after them differs: {self.left_behind}."
        if self.silent:
            return f"Undecided: of {on}, {', '.join(self.silent)} did not fire in {length}; the rest changes no bit."
        return f"Same: {length} with and without {on} are the same to the last bit."

    def _row(self, name: str) -> tuple[str, str, str]:
        mine = next((one for one in self.culprits if name in one.hooks), None)
        if mine is None:
            unknown = self.verdict == "changed" and not self.culprits
            return "did not fire" if name in self.silent else "not known" if unknown else "changes nothing", "", ""
        others = " and ".join(other for other in mine.hooks if other != name)
        did = "raises" if mine.difference.first.startswith("error: ") else "changes the run"
        finding = f"{did}, only together with {others}" if others else did
        more = f" (and {len(mine.difference.names) - 1} more)" if len(mine.difference.names) > 1 else ""
        return finding, mine.difference.where, f"{mine.difference.first}{more}"


# -- hooks of every form ----------------------------------------------------------------------------------------------


_LONGEST: Final = 40


@dataclass(frozen=True)
class AuditedHook:
    """A hook by its name, and the way in which it is put on."""

    name: str
    given: Any
    way: Literal["lifecycle", "model", "around", "by the training"]

    def fresh(self) -> Any:
        """Return a copy without what an earlier training left in it; what cannot be copied, as it is."""
        try:
            return copy.deepcopy(self.given)
        except Exception:
            return self.given


def audited_hooks(hooks: Any, *, by_training: bool) -> list[AuditedHook]:
    """Return the hooks one by one, each with a name of its own.

    Args:
        hooks: One hook, several, or several by name.
        by_training: Whether the training puts them on; then they may be anything.
    """
    is_several = isinstance(hooks, Iterable) and not isinstance(hooks, str | nn.Module)
    listed = (
        hooks.items() if isinstance(hooks, Mapping) else [("", each) for each in (hooks if is_several else [hooks])]
    )
    found: list[AuditedHook] = []
    for name, given in listed:
        for one in HookRegistry.resolve([given]) if isinstance(given, str) and not by_training else [given]:
            way: Any = "by the training" if by_training else _way_of(one)
            found.append(AuditedHook(_unique(name or _name_of(one), {other.name for other in found}), one, way))
    if not found:
        raise OptionError("audit(train_fn, hooks) was given no hooks: name at least one.")
    return found


def _unique(name: str, taken: set[str]) -> str:
    numbered = (name if number == 1 else f"{name} {number}" for number in range(1, len(taken) + 2))
    return next(each for each in numbered if each not in taken)


def _name_of(given: Any) -> str:
    named = given if isinstance(given, str) else getattr(given, "name", None)
    if isinstance(named, str) and named:
        return named
    inner = getattr(given, "func", given)  # functools.partial
    if getattr(inner, "__name__", "") == "<lambda>":
        return f"lambda: {'.'.join(inner.__code__.co_names)}"[:_LONGEST]
    return str(getattr(inner, "__qualname__", None) or type(given).__name__).rpartition("<locals>.")[2]


def _way_of(given: Any) -> str:
    """Return how a hook is put on; of a function, by how many arguments it needs."""
    if isinstance(given, str | TrainingHook) or (isinstance(given, type) and issubclass(given, TrainingHook)):
        return "lifecycle"
    is_there = isinstance(given, AbstractContextManager) and not isinstance(given, type)
    if is_there or not callable(given):
        raise OptionError(
            f"audit() trains several times, and cannot put {type_name(given)} on each time. Next: give the function "
            "that makes it or puts it on, hooks=[lambda model: hookline.watch(model)], or write train_fn(hooks) to get "
            "the hooks and put them on there."
        )
    count = _needed_arguments(given)
    if count > 2:
        raise OptionError(
            f"{_name_of(given)} needs {count} arguments. audit() calls functions of none (around the training), of one "
            "(the model) and of two (model, optimizer). Next, for a torch hook: "
            "hooks=[lambda model: model.register_forward_hook(hook)]."
        )
    return "model" if count else "around"


def _needed_arguments(given: Callable[..., Any]) -> int:
    """Return how many positional arguments a function cannot do without."""
    try:
        parameters = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):  # some functions of C do not tell
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.default is one.empty and one.kind in kinds for one in parameters)


def _put_on(hook: AuditedHook, arguments: Sequence[Any], stack: ExitStack) -> None:
    """Call a function that puts something on, with as many arguments as it needs; ``stack`` takes that off."""
    function = hook.fresh()
    _take_off_later(function(*arguments[: _needed_arguments(function)]), stack)


def _take_off_later(found: Any, stack: ExitStack) -> None:
    """Take off, at the end, what a function returned: a block, a handle, several of these; or nothing."""
    if isinstance(found, AbstractContextManager):
        stack.enter_context(found)
    elif isinstance(found, list | tuple):
        for each in found:
            _take_off_later(each, stack)
    elif callable(getattr(found, "remove", None)):
        stack.callback(found.remove)


def _follow(hooks: list[AuditedHook], model: nn.Module, optimizer: Optimizer, first: FirstStep) -> Follow:
    """Fire lifecycle hooks in the training from now on; return what follows it."""
    with kept_rng():
        named = [hook.fresh() for hook in hooks]
        given = [each for one in named for each in (HookRegistry.create([one]) if isinstance(one, str) else [one])]
        made = [one() if isinstance(one, type) else one for one in given]
    # A script is stopped long before its first epoch ends: hooks that can report by steps are asked after each.
    loop = "step" if can_count_steps(made) else "epoch"
    manager = HookManager(hooks=made, loop_type=loop, on_error="raise")  # without the hooks that every followed run has
    run = follow(model, optimizer, manager=manager, loader=first.loader, loop=loop, snapshot_every=1)
    first.hand_over(run)
    return run


# -- trainings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where a training first differs from another."""

    step: int
    """The first step after which something differs, counted from 0; -1: before the first step."""
    names: tuple[str, ...]
    """What differs there, causes first: ``"random stream of torch"``, ``"weight 0.bias"``, …"""
    is_end: bool = False
    """Whether all steps are the same, and only what is left after the last differs."""

    @property
    def first(self) -> str:
        """What differs first."""
        return self.names[0]

    @property
    def where(self) -> str:
        """The step in words."""
        if self.is_end:
            return "the end"
        return "the start" if self.step < 0 else f"step {self.step}"

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{self.first}{more}, at {self.where}"


def first_difference(before: RunDigest, after: RunDigest) -> tuple[str, ...]:
    """Return the names of what differs between two states, causes first; empty if nothing does.

    A switch of torch explains a difference and is none itself: instruments set some while they look.
    """
    names = tuple(changed(before, after))
    return names if any(not name.startswith(SWITCH) for name in names) else ()


class Trainings:
    """Train any number of times from the start at which this was made.

    Args:
        train_fn: What trains; called without arguments, or with the list of hooks.
        steps: After how many steps a training is stopped; None: not at all.
    """

    def __init__(self, train_fn: Callable[..., Any], *, steps: int | None) -> None:
        self._train_fn = train_fn
        self._steps = steps
        self.by_training = _needed_arguments(train_fn) > 0
        """Whether the training takes the list of hooks, and puts them on itself."""
        if torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]  # streams that begin later could not be set back
        self._streams = RandomStates()
        self._switches = TorchSwitches()
        self.count = 0
        """How often was trained."""
        self.silent: set[str] = set()
        """Lifecycle hooks that did not fire when they were last on."""

    def set_back(self) -> None:
        """Set random streams and switches back to the start."""
        self._switches.restore()
        self._streams.restore()
        restart_hook_stream()

    def train(self, hooks: Sequence[AuditedHook] = ()) -> Training:
        """Train with ``hooks``. An error is part of the result if there are hooks; without them it is raised."""
        self.count += 1
        self.set_back()
        stack = ExitStack()

        def put_on_model(model: nn.Module, optimizer: Optimizer) -> None:
            for hook in hooks:
                if hook.way == "model":
                    _put_on(hook, (model, optimizer), stack)

        training = Training(put_on_model, self._steps)
        try:
            with training:
                # What hooks do when they are taken off belongs to the run too, also where that was stopped.
                with suppress(_EnoughSteps), stack:
                    self._put_around(hooks, training, stack)
                    self._call_training(hooks)
                training.finish()
        except Exception as raised:
            if not hooks:
                raised.add_note("train_fn raised this without any hooks; audit() needs one that trains.")
                raise
            training.error = raised
        if training.error is None:
            self._check(training, hooks)
        return training

    def _call_training(self, hooks: Sequence[AuditedHook]) -> None:
        try:
            self._train_fn(*([[hook.fresh() for hook in hooks]] if self.by_training else ()))
        except SystemExit as left:
            raise OptionError("The training called sys.exit(). Next: let train_fn return where it is done.") from left

    def _put_around(self, hooks: Sequence[AuditedHook], training: Training, stack: ExitStack) -> None:
        """Put on what is there before the model is; lifecycle hooks begin at the first step, when all is known."""
        lifecycle = [hook for hook in hooks if hook.way == "lifecycle"]

        def begin(optimizer: Any, first: FirstStep) -> bool:
            if training.model is None:
                return False
            run = _follow(lifecycle, training.model, optimizer, first)
            stack.callback(self._note_silent, run.manager)
            stack.push(run)
            return True

        if lifecycle:
            stack.callback(FirstStep(begin).remove)
        for hook in hooks:
            if hook.way == "around":
                _put_on(hook, (), stack)

    def _note_silent(self, manager: HookManager) -> None:
        for name in manager.hooks:
            (self.silent.add if did_nothing(manager, name) else self.silent.discard)(name)

    def _check(self, training: Training, hooks: Sequence[AuditedHook]) -> None:
        if not training.states:
            raise OptionError(
                "train_fn made no step of a torch.optim.Optimizer in this process: there is nothing to compare. Next: "
                "let train_fn train, not only define how, and let it make its steps here."
            )
        if hooks and not self.by_training and not training.has_begun:
            raise OptionError(
                "No module has the parameters that the optimizer of train_fn trains: audit() cannot put hooks on one. "
                "Next: write train_fn(hooks), which gets the hooks and puts them on itself."
            )


def did_nothing(manager: HookManager, name: str) -> bool:
    """Return whether a hook has not fired, or has turned itself off because there was nothing to measure."""
    return not manager.hooks.fired[name] or bool(getattr(manager.hooks[name], "off", ""))


# -- following one training from outside ---------------------------------------------------------------------------


class _EnoughSteps(BaseException):
    """Ends a training after the steps that were asked for; no error, so that nothing handles it as one."""


class Training:
    """One training, and the state of its run after every step; notes them while the block lasts.

    Args:
        begin: Called with the model and the optimizer when both are known, before the first step.
        steps: After how many steps `_EnoughSteps` is raised; None: never.
    """

    def __init__(self, begin: Callable[[nn.Module, Optimizer], None], steps: int | None) -> None:
        self._begin = begin
        self._steps = steps
        self.error: Exception | None = None
        """What it raised."""
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._seen: WeakSet[nn.Module] = WeakSet()
        self.has_begun = False
        """Whether the model was found."""
        self._handles: list[Any] = []
        self.start: RunDigest = {}
        """Before hooks are put on."""
        self.states: list[RunDigest] = []
        """After each step."""
        self.end: RunDigest | None = None
        """After the training, when the hooks are off; None if it raised."""
        self._counts: Counter[Optimizer] = Counter()

    @property
    def model(self) -> nn.Module | None:
        """The model, once it was found."""
        return self._models[0] if self._models else None

    def __enter__(self) -> Self:
        self._handles = [
            register_module_forward_pre_hook(self._see_forward),
            register_optimizer_step_pre_hook(self._see_step),
            register_optimizer_step_post_hook(self._end_step),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._models, self._optimizers = [], []
        self._counts.clear()

    def finish(self) -> None:
        """Take the state that is left when the training has ended or was stopped, and the hooks are off."""
        self.end = self._now()

    def difference(self, other: Training) -> Difference | None:
        """Return where ``other`` first differs from this one, an error that it raised included; None if nowhere."""
        names = first_difference(self.start, other.start)
        if names:
            return Difference(-1, names)
        for step, (mine, theirs) in enumerate(zip(self.states, other.states, strict=False)):
            names = first_difference(mine, theirs)
            if names:
                return Difference(step, names)
        counts = len(self.states), len(other.states)
        if other.error is not None:
            return Difference(counts[1], (f"error: {type(other.error).__name__}: {other.error}",))
        if counts[0] != counts[1]:
            return Difference(min(counts), (f"number of steps ({counts[0]}, then {counts[1]})",))
        names = () if self.end is None or other.end is None else first_difference(self.end, other.end)
        return Difference(counts[0] - 1, names, is_end=True) if names else None

    # -- while it trains ---------------------------------------------------------------------------------------

    def _see_forward(self, module: nn.Module, args: Any) -> None:
        # Compiled code would be guarded by what is read here, and compiled anew at every step.
        if torch.compiler.is_compiling() or phase() == "intervention":
            return
        if self.has_begun or not module.training or module in self._seen:
            return
        self._seen.update(module.modules())  # those inside are called next, and looking takes a while
        for optimizer in find_optimizers([module]):
            with suppress(NoMatchError):
                find_model(optimizer, [module])
                self._start(optimizer, _model_of(optimizer, [module]))
                return

    def _see_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if phase() == "intervention" or optimizer in self._optimizers:
            return
        with suppress(NoMatchError):
            model = _model_of(optimizer, list(self._seen))
            if self.has_begun:
                self._add_model(model)
            else:
                self._start(optimizer, model)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def _start(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.has_begun = True
        self._add_model(model)
        self._optimizers.append(optimizer)
        self.start = self._now()
        self._begin(model, optimizer)

    def _add_model(self, model: nn.Module) -> None:
        if not any(model is inner for known in self._models for inner in known.modules()):
            self._models.append(model)

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if phase() == "intervention":
            return
        # Of several optimizers, the one that has made most steps counts: the first may be there for a warm-up alone.
        self._counts[optimizer] += 1
        if self._counts[optimizer] <= len(self.states):
            return
        self.states.append(self._now())
        if len(self.states) == self._steps:
            raise _EnoughSteps

    def _now(self) -> RunDigest:
        return run_digest(self._models, self._optimizers)


def _model_of(optimizer: Optimizer, called: Sequence[nn.Module]) -> nn.Module:
    """Return the module that has the parameters of ``optimizer``: among those that were called, or alive at all."""
    with suppress(NoMatchError):
        found = find_model(optimizer, called)
        if found.owned == found.of:
            return found.model
    return find_model(optimizer).model
