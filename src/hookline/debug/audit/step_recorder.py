"""Follow one training from outside: learn its model and optimizers, keep a digest of the run after every step.

`train_once` puts a `StepRecorder` around a training. Nothing is asked of the training but that it steps a
``torch.optim.Optimizer``: the first forward of a module that an optimizer trains tells the model, or else the first
step. The recorder reads and never writes, with hooks and without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Self
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookline.debug.audit.run_state import (
    Difference,
    RunState,
    first_difference,
    left_on,
    run_state,
    tensor_digests,
)
from hookline.errors import NoMatchError
from hookline.integrations.model_of_optimizer import find_model, find_optimizers
from hookline.phases import phase
from hookline.sites.functions.replaced_function import ReplacedFunction

__all__ = ["EnoughSteps", "StepRecorder"]


class EnoughSteps(BaseException):
    """Ends a training after the steps that were asked for; no error, so that nothing handles it as one."""


def _told(original: Callable[..., None], replaced: ReplacedFunction[Any]) -> Callable[..., None]:
    def made(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for listener in replaced.listeners:
            listener(self)

    return made


_MAKING: Final[ReplacedFunction[Callable[[Optimizer], None]]] = ReplacedFunction(Optimizer, "__init__", _told)
"""Tells of every optimizer that is made."""


class StepRecorder:
    """Keep the state of a run after every step, while the block lasts.

    Args:
        begin: Called with the model and the optimizer when both are known, before the first step.
        steps: After how many steps `EnoughSteps` is raised; None: never.
        reference: The states of a training to compare with; at the first difference `EnoughSteps` is raised.
    """

    def __init__(
        self,
        begin: Callable[[nn.Module, Optimizer], None],
        *,
        steps: int | None = None,
        reference: StepRecorder | None = None,
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
        self.start: RunState = {}
        """Before hooks are put on."""
        self.states: list[RunState] = []
        """After each step."""
        self.end: RunState | None = None
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
        self.left = left_on(self._models, self._optimizers)

    def difference(self, other: StepRecorder, *, with_batch: bool = False) -> Difference | None:
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
            self._batch = tensor_digests(args)
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
            raise EnoughSteps

    def _is_enough(self) -> bool:
        count = len(self.states)
        if self._reference is not None:
            known: Sequence[RunState] = self._reference.states
            if count > len(known) or first_difference(known[count - 1], self.states[-1]):
                return True
        return self._steps is not None and count >= self._steps

    def _now(self) -> RunState:
        return run_state(self._models, self._optimizers, self._batch)


def _model_of(optimizer: Optimizer, called: Sequence[nn.Module]) -> nn.Module:
    """Return the module that has the parameters of ``optimizer``: among those that were called, or alive at all."""
    with suppress(NoMatchError):
        found = find_model(optimizer, called)
        if found.owned == found.of:
            return found.model
    return find_model(optimizer).model
