"""Train once from a fixed start, with some hooks on or with none, and keep a digest of the run after every step.

`audit` calls `Trainings.train`. Nothing is asked of a training but that it steps a ``torch.optim.Optimizer``: the first
forward of a module that an optimizer trains tells the model, or else the first step. Random streams and the switches of
torch are set back before every training, so that all of them begin alike.

`AuditedHook` is whatever people call a hook (lifecycle hooks, specs, functions of a model, context managers, torch
hooks); a fresh copy of it is put on at every training.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookline.errors import NoMatchError, OptionError
from hookline.guard.digest import SWITCH, RunDigest, changed, digest, run_digest
from hookline.guard.rng import RandomStates, kept_rng, restart_hook_stream
from hookline.guard.switches import TorchSwitches
from hookline.integrations.first_step import FirstStep, find_model, find_optimizers
from hookline.lifecycle.hook import TrainingHook
from hookline.messages import type_name
from hookline.observe.watch.step_alarm import StepAlarm
from hookline.observe.watch.watch import Watch
from hookline.phases import phase
from hookline.sites import _torch
from hookline.sites.functions.replaced_function import ReplacedFunction
from hookline.sites.handle import HandleSet, HookHandle
from hookline.tree import tensors_of

if TYPE_CHECKING:
    from hookline.integrations.first_step import FirstStep
    from hookline.lifecycle.manager import HookManager

__all__ = [
    "AuditedHook", "Difference", "Training", "Trainings", "audited_hooks", "did_nothing", "first_difference",
    "follow_with", "needed_arguments", "put_around", "put_on_model", "takes_hooks",
]  # fmt: skip

_Way = Literal["lifecycle", "specs", "model", "around", "forward"]
_SPEC_FILES: Final = (".json", ".toml", ".yaml", ".yml")
_LONGEST: Final = 40
_FORWARD_HOOK: Final = 3
"""How many arguments a torch forward hook takes: module, arguments, output."""


@dataclass(frozen=True)
class AuditedHook:
    """A hook by its name, and the way in which it is put on."""

    name: str
    given: Any
    way: _Way | None = None
    """None: the training puts it on itself."""

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
    named = hooks if isinstance(hooks, Mapping) else None
    if named is not None and "target_modules" in named:
        named, hooks = None, [hooks]  # one spec
    listed = list(named.items()) if named is not None else [("", one) for one in _as_list(hooks)]
    if not listed:
        raise OptionError("audit(train_fn, hooks) was given no hooks: name at least one.")
    found: list[AuditedHook] = []
    for name, given in listed:
        for each in [AuditedHook(name or _name_of(given), given)] if by_training else _known_hooks(name, given):
            found.append(AuditedHook(_unique(each.name, {one.name for one in found}), each.given, each.way))
    return found


def _as_list(hooks: Any) -> list[Any]:
    return list(hooks) if isinstance(hooks, Iterable) and not isinstance(hooks, str | nn.Module) else [hooks]


def _unique(name: str, taken: set[str]) -> str:
    number = 2
    while name in taken:
        base = name if number == 2 else name.rpartition(" ")[0]
        name, number = f"{base} {number}", number + 1
    return name


def _name_of(given: Any) -> str:
    if isinstance(given, str):
        return given
    named = getattr(given, "name", None)
    if isinstance(named, str) and named:
        return named
    if isinstance(given, Mapping):
        return str(given.get("name") or "spec")
    inner = getattr(given, "func", given)  # functools.partial
    if getattr(inner, "__name__", "") == "<lambda>":
        return f"lambda: {'.'.join(inner.__code__.co_names)}"[:_LONGEST]
    return str(getattr(inner, "__qualname__", None) or type(given).__name__).rpartition("<locals>.")[2]


# -- which way -------------------------------------------------------------------------------------------------


def _known_hooks(name: str, given: Any) -> list[AuditedHook]:
    if isinstance(given, str):
        return _named_hooks(name, given)
    return [AuditedHook(name or _name_of(given), given, _way_of(given))]


def _named_hooks(name: str, given: str) -> list[AuditedHook]:
    """Return what a string stands for: the specs of a file, an object of a module, a lifecycle hook or a group."""
    if given.endswith(_SPEC_FILES):
        from hookline.runs.documents import specs_of_file

        specs = specs_of_file(given)
        return [
            AuditedHook(str(spec.get("name") or f"{given}[{place}]"), spec, "specs") for place, spec in enumerate(specs)
        ]
    if ":" in given:
        from hookline.load import load_object

        return _known_hooks(name or given.rpartition(":")[2], load_object(given, wanted="a hook"))
    from hookline.lifecycle.registry import HookRegistry

    return [AuditedHook(one, one, "lifecycle") for one in HookRegistry.resolve([given])]


def _way_of(given: Any) -> _Way:
    from hookline.specs.hook_spec import HookSpec

    if isinstance(given, TrainingHook) or (isinstance(given, type) and issubclass(given, TrainingHook)):
        return "lifecycle"
    if isinstance(given, HookSpec | Mapping):
        return "specs"
    if isinstance(given, contextlib._GeneratorContextManager):
        raise OptionError(
            "A block made by @contextmanager can be entered once, and an audit trains several times: give the function "
            "that makes it, without calling it."
        )
    if isinstance(given, Watch | StepAlarm | HookHandle | HandleSet):
        raise OptionError(
            f"This {type(given).__name__} is on a model already, and an audit puts hooks on that of each training. "
            'Next: give the function that makes it: hooks={"watch": lambda model: hookline.watch(model)}.'
        )
    if isinstance(given, AbstractContextManager) and not isinstance(given, type):
        return "around"
    if not callable(given):
        raise OptionError(
            f"audit() cannot put {type_name(given)} on by itself. Next: give a function that does, "
            "hooks=[lambda model: …], or write train_fn(hooks) to get the hooks and put them on there."
        )
    return _way_of_function(given)


def _way_of_function(given: Callable[..., Any]) -> _Way:
    """Return the way by how many arguments a function needs."""
    count = needed_arguments(given)
    if count > _FORWARD_HOOK:
        raise OptionError(
            f"{_name_of(given)} needs {count} arguments. audit() calls functions of none (around the training), of one "
            "(the model) and of two (model, optimizer), and puts those of three on every module as forward hooks."
        )
    return "around" if count == 0 else "forward" if count == _FORWARD_HOOK else "model"


def needed_arguments(given: Callable[..., Any]) -> int:
    """Return how many positional arguments a function cannot do without."""
    try:
        parameters = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):  # some functions of C do not tell
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.default is one.empty and one.kind in kinds for one in parameters)


# -- put on ----------------------------------------------------------------------------------------------------


def put_around(hook: AuditedHook, stack: ExitStack) -> None:
    """Put on what goes around a whole training, before it begins."""
    if hook.way == "around":
        made = hook.fresh()
        _take_off_later(
            made() if not isinstance(made, AbstractContextManager) or isinstance(made, type) else made, stack
        )


def put_on_model(hook: AuditedHook, model: nn.Module, optimizer: Optimizer, stack: ExitStack) -> None:
    """Put on what goes on a model, before its first forward; ``stack`` takes it off."""
    if hook.way == "specs":
        from hookline.specs.apply_specs import close_hooks, hooks_of, register_hooks

        handles = register_hooks(model, [hook.given])
        stack.callback(lambda: close_hooks(hooks_of(handles)))
        stack.callback(handles.remove)
    elif hook.way == "forward":
        function = hook.fresh()
        for module in model.modules():
            stack.callback(module.register_forward_hook(function).remove)
    elif hook.way == "model":
        function = hook.fresh()
        _take_off_later(function(*(model, optimizer)[: max(1, needed_arguments(function))]), stack)


def _take_off_later(found: Any, stack: ExitStack) -> None:
    """Take off, at the end, what a function returned: a block, a handle, several of these; or nothing."""
    if isinstance(found, AbstractContextManager):
        stack.enter_context(found)
    elif isinstance(found, list | tuple):
        for each in found:
            _take_off_later(each, stack)
    else:
        for name in ("remove", "close"):
            if callable(getattr(found, name, None)):
                stack.callback(getattr(found, name))
                return


def _made(given: Any) -> TrainingHook:
    from hookline.lifecycle.registry import HookRegistry

    (made,) = HookRegistry.create([given]) if isinstance(given, str) else [given]
    return made() if isinstance(made, type) else made


def follow_with(hooks: list[AuditedHook], model: nn.Module, optimizer: Optimizer, first: FirstStep) -> Any:
    """Fire lifecycle hooks in the training from now on; return what follows it."""
    from hookline.integrations.follow import follow
    from hookline.integrations.snapshot_steps import can_count_steps
    from hookline.lifecycle.manager import HookManager

    with kept_rng():
        made = [_made(hook.fresh()) for hook in hooks]
    # A script is stopped long before its first epoch ends: hooks that can report by steps are asked after each.
    loop = "step" if can_count_steps(made) else "epoch"
    manager = HookManager(hooks=made, loop_type=loop, on_error="raise")  # without the hooks that every followed run has
    run = follow(model, optimizer, manager=manager, loader=first.loader, loop=loop, snapshot_every=1)
    first.hand_over(run)
    return run


# -- trainings --------------------------------------------------------------------------------------------------------

_BATCH: Final = "first input of the step"
_EXPLAINS: Final = (SWITCH, _BATCH)
_OF_TENSORS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The tables of hooks that a tensor has; ``vars`` does not list them."""


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


def first_difference(before: RunDigest, after: RunDigest, *, with_batch: bool = False) -> tuple[str, ...]:
    """Return the names of what differs between two states, in the order of the first; empty if nothing does.

    Two things explain a difference and are none themselves: a switch of torch, which instruments set while they look
    (anomaly detection), and the first input of a step. With hooks on that may be the sample of an instrument, so it is
    named only ``with_batch``.
    """
    names = tuple(name for name in changed(before, after) if with_batch or name != _BATCH)
    return names if any(not name.startswith(_EXPLAINS) for name in names) else ()


@dataclass(frozen=True)
class Training:
    """What was recorded of one training."""

    recorded: _StepRecorder
    error: Exception | None

    def difference(self, other: Training, *, with_batch: bool = False) -> Difference | None:
        """Return where ``other`` first differs from this one, an error that it raised included; None if nowhere."""
        found = self.recorded.difference(other.recorded, with_batch=with_batch)
        if other.error is None:
            return found
        step = len(other.recorded.states)
        if found is None or found.step >= step:
            return Difference(step, (f"error: {type(other.error).__name__}: {other.error}",))
        return found


class Trainings:
    """Train any number of times from the start at which this was made.

    Args:
        train_fn: What trains; called without arguments, or with the list of hooks.
        steps: After how many steps a training is stopped; None: not at all.
    """

    def __init__(self, train_fn: Callable[..., Any], *, steps: int | None) -> None:
        self._train_fn = train_fn
        self._steps = steps
        self._by_training = takes_hooks(train_fn)
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

    def train(self, hooks: Sequence[AuditedHook] = (), reference: Training | None = None) -> Training:
        """Train with ``hooks``; stop at the first step that differs from ``reference``, if that is given.

        An error is part of the result if there are hooks; without them it is raised.
        """
        self.count += 1
        self.set_back()
        stack = ExitStack()
        recorder = self._recorder(hooks, reference, stack)
        error: Exception | None = None
        try:
            with recorder:
                # What hooks do when they are taken off belongs to the run too, also where that was stopped.
                with suppress(_EnoughSteps), stack:
                    self._put_around(hooks, recorder, stack)
                    self._call_training(hooks)
                recorder.finish()
        except Exception as raised:
            if not hooks:
                raised.add_note("train_fn raised this without any hooks; audit() needs one that trains.")
                raise
            error = raised
        if error is None:
            self._check(recorder, hooks)
        return Training(recorder, error)

    def _call_training(self, hooks: Sequence[AuditedHook]) -> None:
        """Train; ``sys.exit()`` and ``sys.exit(0)`` are an end like any other, as in a script."""
        try:
            self._train_fn(*([[hook.fresh() for hook in hooks]] if self._by_training else ()))
        except SystemExit as left:
            if left.code not in (None, 0):
                raise OptionError(
                    f"The training called sys.exit({left.code!r}), which says that it failed. Next: run it without "
                    "audit(), and see why; let train_fn return where it is done."
                ) from left

    def _recorder(self, hooks: Sequence[AuditedHook], reference: Training | None, stack: ExitStack) -> _StepRecorder:
        def begin(model: nn.Module, optimizer: Optimizer) -> None:
            for hook in hooks:
                put_on_model(hook, model, optimizer, stack)

        return _StepRecorder(begin, steps=self._steps, reference=None if reference is None else reference.recorded)

    def _put_around(self, hooks: Sequence[AuditedHook], recorder: _StepRecorder, stack: ExitStack) -> None:
        """Put on what is there before the model is; lifecycle hooks begin at the first step, when all is known."""
        lifecycle = [hook for hook in hooks if hook.way == "lifecycle"]

        def begin(optimizer: Any, first: FirstStep) -> bool:
            if recorder.model is None:
                return False
            run = follow_with(lifecycle, recorder.model, optimizer, first)
            stack.callback(self._note_silent, run.manager)
            stack.push(run)
            return True

        if lifecycle:
            stack.callback(FirstStep(begin).remove)
        for hook in hooks:
            put_around(hook, stack)

    def _note_silent(self, manager: HookManager) -> None:
        for name in manager.hooks:
            (self.silent.add if did_nothing(manager, name) else self.silent.discard)(name)

    def _check(self, recorder: _StepRecorder, hooks: Sequence[AuditedHook]) -> None:
        if not recorder.states:
            raise OptionError(
                "train_fn made no step of a torch.optim.Optimizer in this process: there is nothing to compare. Next: "
                "let train_fn train, not only define how, and let it make its steps here."
            )
        if hooks and not self._by_training and not recorder.has_begun:
            raise OptionError(
                "No module has the parameters that the optimizer of train_fn trains: audit() cannot put hooks on one. "
                "Next: write train_fn(hooks), which gets the hooks and puts them on itself."
            )


def did_nothing(manager: HookManager, name: str) -> bool:
    """Return whether a hook has not fired, or has turned itself off because there was nothing to measure."""
    return not manager.hooks.fired[name] or bool(getattr(manager.hooks[name], "off", ""))


def takes_hooks(train_fn: Callable[..., Any]) -> bool:
    """Return whether a function needs an argument: the list of the hooks to train with."""
    return needed_arguments(train_fn) > 0


# -- following one training from outside ---------------------------------------------------------------------------


class _EnoughSteps(BaseException):
    """Ends a training after the steps that were asked for; no error, so that nothing handles it as one."""


def _told(original: Callable[..., None], replaced: ReplacedFunction[Any]) -> Callable[..., None]:
    def made(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for listener in replaced.listeners:
            listener(self)

    return made


_MAKING: Final[ReplacedFunction[Callable[[Optimizer], None]]] = ReplacedFunction(Optimizer, "__init__", _told)
"""Tells of every optimizer that is made."""


class _StepRecorder:
    """Keep the state of a run after every step, while the block lasts.

    Args:
        begin: Called with the model and the optimizer when both are known, before the first step.
        steps: After how many steps `_EnoughSteps` is raised; None: never.
        reference: The states of a training to compare with; at the first difference `_EnoughSteps` is raised.
    """

    def __init__(
        self,
        begin: Callable[[nn.Module, Optimizer], None],
        *,
        steps: int | None = None,
        reference: _StepRecorder | None = None,
    ) -> None:
        self._begin = begin
        self._steps = steps
        self._reference = reference
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._seen: WeakSet[nn.Module] = WeakSet()
        self._made: list[Optimizer] = []
        self._note_made = self._made.append
        self._batch: Any = None
        self.has_begun = False
        """Whether the model was found."""
        self._handles: list[Any] = []
        self.start: RunDigest = {}
        """Before hooks are put on."""
        self.states: list[RunDigest] = []
        """After each step."""
        self.end: RunDigest | None = None
        """After the training, when the hooks are off; None if it raised."""
        self.left: dict[str, Any] = {}
        """The switches and hooks of torch that are on then."""
        self._counts: Counter[Optimizer] = Counter()

    @property
    def model(self) -> nn.Module | None:
        """The model, once it was found."""
        return self._models[0] if self._models else None

    def __enter__(self) -> Self:
        _MAKING.add(self._note_made)
        self._handles = [
            register_module_forward_pre_hook(self._see_forward),
            register_optimizer_step_pre_hook(self._see_step),
            register_optimizer_step_post_hook(self._end_step),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        _MAKING.discard(self._note_made)
        for handle in self._handles:
            handle.remove()
        self._models, self._optimizers = [], []
        self._made.clear()
        self._counts.clear()

    def finish(self) -> None:
        """Take the state that is left when the training has ended or was stopped, and the hooks are off."""
        self.end = self._now()
        self.left = _left_on(self._models, self._optimizers)

    def difference(self, other: _StepRecorder, *, with_batch: bool = False) -> Difference | None:
        """Return where ``other`` first differs from this training; None if nowhere.

        Args:
            other: The other training.
            with_batch: Whether to name the first input of a step, too.
        """
        names = first_difference(self.start, other.start, with_batch=with_batch)
        if names:
            return Difference(-1, names)
        for step, (mine, theirs) in enumerate(zip(self.states, other.states, strict=False)):
            names = first_difference(mine, theirs, with_batch=with_batch)
            if names:
                return Difference(step, names)
        counts = len(self.states), len(other.states)
        if counts[0] != counts[1]:
            return Difference(min(counts), (f"number of steps ({counts[0]}, then {counts[1]})",))
        if self.end is None or other.end is None:
            return None
        names = first_difference(self.end, other.end, with_batch=with_batch)
        return Difference(counts[0] - 1, names, is_end=True) if names else None

    # -- while it trains ---------------------------------------------------------------------------------------

    def _see_forward(self, module: nn.Module, args: Any) -> None:
        # Compiled code would be guarded by what is read here, and compiled anew at every step.
        if torch.compiler.is_compiling() or phase() == "intervention":
            return
        if self._batch is None:
            self._batch = _digest_of_input(args)
        if self.has_begun or not module.training or module in self._seen:
            return
        self._seen.update(module.modules())  # those inside are called next, and looking takes a while
        # Of all objects that are alive, which takes 0.1 s, only where none was made in this training.
        for optimizer in self._made or find_optimizers([module]):
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
        self._batch = None
        if self._is_enough():
            raise _EnoughSteps

    def _is_enough(self) -> bool:
        count = len(self.states)
        if self._reference is not None:
            known: Sequence[RunDigest] = self._reference.states
            if count > len(known) or first_difference(known[count - 1], self.states[-1]):
                return True
        return self._steps is not None and count >= self._steps

    def _now(self) -> RunDigest:
        return run_digest(self._models, self._optimizers, {_BATCH: self._batch})


def _model_of(optimizer: Optimizer, called: Sequence[nn.Module]) -> nn.Module:
    """Return the module that has the parameters of ``optimizer``: among those that were called, or alive at all."""
    with suppress(NoMatchError):
        found = find_model(optimizer, called)
        if found.owned == found.of:
            return found.model
    return find_model(optimizer).model


def _left_on(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the switches of torch, and how many hooks each of its tables has: of the process, modules, parameters."""
    things: list[tuple[str, Any]] = [
        ("every module", sys.modules[nn.Module.__module__]),
        ("every optimizer", sys.modules[Optimizer.__module__]),
    ]
    for model in models:
        things += [(name or "the model", module) for name, module in model.named_modules()]
        things += model.named_parameters()
    things += [(type(optimizer).__name__, optimizer) for optimizer in optimizers]
    found: dict[str, Any] = {f"{SWITCH}{name}": value for name, value in TorchSwitches().values.items()}
    for where, thing in things:
        tables = _OF_TENSORS if isinstance(thing, Tensor) else [name for name in vars(thing) if name.endswith("_hooks")]
        for table in tables:
            if count := len(getattr(thing, table, None) or ()):
                found[f"{table.strip('_').replace('_', ' ')} on {where}"] = count
    return found


def _digest_of_input(values: Any) -> bytes | None:
    """Return one digest of all tensors in ``values``; None if there are none, or they stand for others."""
    if torch.compiler.is_compiling() or _torch.in_transform():
        return None
    found = [tensor for tensor in tensors_of(values) if _torch.has_numbers(tensor)]
    return digest(found) if found else None
