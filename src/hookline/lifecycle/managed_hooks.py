"""Hold the hooks of a manager: when each is due, how it has fared so far, and what is told to all of them.

`HookManager.hooks` is a `ManagedHooks`. The loops start and finish the hooks by it, users read receipts, errors and
costs; the manager reports to it each call of a hook, and enters `on_device` around each firing.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hookline.distributed.ranks import rank_names
from hookline.error_policy import ErrorPolicy, error_text, warn_user
from hookline.errors import GuardError, Hint, RankError
from hookline.guard.rng import kept_rng
from hookline.lifecycle.plan import Plan, PlannedHook
from hookline.tree import copied, map_tensors

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.hook import TrainingHook
    from hookline.lifecycle.ranks import OneProcess

__all__ = ["FiringReceipt", "ManagedHooks"]

logger = logging.getLogger("hookline.lifecycle.firing")

_CPU: Final = torch.device("cpu")
_NOTHING: Final[AbstractContextManager[None]] = nullcontext()
_CONSEQUENCES: Final = {"warn": "stays on and the run goes on", "disable": "is switched off and the run goes on"}


class FiringReceipt(NamedTuple):
    """Say what one hook did in one firing.

    Recipe: ``manager.fire(point, ctx, model_ctx)``; then ``manager.hooks.receipts[0].touched``.
    """

    hook: str
    """Its name."""
    scope: str
    """``"observes"``, or what the intervention declared."""
    seconds: float
    """How long it took, saving and putting back not included."""
    touched: tuple[str, ...] = ()
    """What an intervention is known to have changed."""
    restored: tuple[str, ...] = ()
    """What was put back."""
    saved_bytes: int = 0
    """How much had been copied, for it and the other interventions of the firing."""
    error: str = ""
    """What it raised, if it did."""


class ManagedHooks(dict[str, "TrainingHook"]):
    """All hooks of a manager by name, in the order they were given; random numbers that they draw here do not count.

    Recipe: ``manager.hooks["norms"]``, ``manager.hooks.errors``, ``manager.hooks.costs()``.
    """

    def __init__(
        self, hooks: Mapping[str, TrainingHook], loop_type: str | None = None, on_error: str = "raise", *, offload: bool
    ) -> None:
        super().__init__(hooks)
        # A hook that breaks what it declared may have changed the run: going on would hide it.
        self.policy = ErrorPolicy(on_error, logger, _CONSEQUENCES, always_raise=(GuardError,))
        """What follows when a hook raises."""
        self.plan = Plan(self, loop_type)
        self.fired: Counter[str] = Counter()
        """The number of calls of each hook."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """The time of the calls of each hook."""
        self.receipts: Sequence[FiringReceipt] = ()
        """What each hook did in the last firing: what it touched, what was put back, how long it took."""
        self._excluded: dict[str, str] = {}
        self.offloads = offload
        """Whether tensors of hooks wait on the CPU between firings."""
        # The devices are remembered here, not taken from the model: some points are fired without one.
        self._homes: WeakKeyDictionary[TrainingHook, list[torch.device]] = WeakKeyDictionary()
        self._brought: list[TrainingHook] = []
        self._depth = 0

    # -- how they fare ---------------------------------------------------------------------------------------

    @property
    def errors(self) -> dict[str, int]:
        """The number of errors of each hook."""
        return dict(self.policy.counts)

    def costs(self) -> dict[str, dict[str, float]]:
        """Return ``count``, ``total_ms`` and ``mean_ms`` of each hook's calls, by the clock of the host."""
        spent = {name: (count, 1e3 * self.seconds[name]) for name, count in self.fired.items()}
        return {name: {"count": n, "total_ms": ms, "mean_ms": ms / n} for name, (n, ms) in spent.items()}

    def exclude(self, reasons: dict[str, str]) -> None:
        """Leave out the hooks in `reasons`, and those that are switched off; take in all others."""
        self._excluded = reasons
        self._replan()

    def _replan(self) -> None:
        self.plan.make({**self._excluded, **self.policy.why_disabled()})

    # -- errors ----------------------------------------------------------------------------------------------

    def goes_on_after(self, error: BaseException, planned: PlannedHook, place: str) -> bool:
        """Count the error of a hook at `place`, and keep a warning of it; return whether the firing goes on."""
        name, policy = planned.name, self.policy
        if not policy.handle(name, error):
            note = f"Raised by the hook {name!r} at {place}."
            if isinstance(error, Exception) and note not in getattr(error, "__notes__", ()):
                error.add_note(note)  # the traceback of a class of analyses names neither hook nor step
            return False
        if name in policy.disabled:
            self._replan()
        else:
            undone = "what it did is undone, " if planned.intervenes else ""
            sentence = (
                f"Hook {name!r} raised {error_text(error).rstrip('.')}; {undone}it stays on, and the run goes on."
            )
            policy.warn_later(name, sentence, hint=Hint.LATER_FAILURES)
        return True

    def settle(self, ranks: OneProcess, raised: BaseException | None = None) -> None:
        """Do on every rank what the error policy says about hooks that failed on any rank, once all know of it."""
        policy, failures, ranks.failures = self.policy, ranks.failures, {}
        for hook, texts in failures.items():
            error = RankError(f"Hook {hook!r} raised {texts[min(texts)]} on {rank_names([*texts])}.", ranks=(*texts,))
            if policy.on_error == "raise":
                ranks.agreed_error = raised or error
                raise ranks.agreed_error
            if policy.on_error == "disable":
                policy.disabled.add(hook)
            elif ranks.rank not in texts:
                policy.counts[hook] += 1
            policy.warn_later(f"{hook} on other ranks", str(error))
        if failures:
            self._replan()
            policy.warn_pending()

    # -- what is told to all of them -------------------------------------------------------------------------

    def start(self, model: nn.Module, ranks: OneProcess) -> None:
        """Tell every hook that training begins, or goes on; the loops of hookline do.

        What the error policy says of one that raises on any rank is done on all of them: one that cannot be started, as
        the model has no such module, is no reason to lose the others.
        """
        policy = self.policy
        failed: dict[str, Exception] = {}
        ranks.together("starting the hooks", lambda: failed.update(self._start_each(model)))
        for name, error in failed.items():
            text = error_text(error).rstrip(".")
            policy.count(name, error, "in start(model)")  # no traceback: most often the model has no such module
            if policy.on_error == "disable":
                policy.disabled.add(name)
            policy.warn_later(f"start of {name}", f"Hook {name!r} could not be started: {text}; the run goes on.")
            ranks.hold(name, f"{text} in start(model)")
        if policy.on_error != "raise" and not ranks.is_single:
            ranks.reduce({}, "hooks that cannot start")
            self.settle(ranks)
        if failed:
            self._replan()
            policy.warn_pending()

    def _start_each(self, model: nn.Module) -> dict[str, Exception]:
        """Call ``start`` of every hook; return the errors that the run goes on after."""
        failed = {}
        with kept_rng():
            for name, hook in self.items():
                try:
                    hook.start(model)
                except Exception as error:
                    error.add_note(f"Raised by the hook {name!r} when training began, in start(model).")
                    if not self.policy.can_continue(error):
                        raise
                    failed[name] = error
        return failed

    def finish(self) -> None:
        """Tell every hook that training is over, the last first, also when another raises; the loops of hookline do."""
        with kept_rng(), ExitStack() as stack:
            for hook in self.values():
                stack.callback(hook.finish)

    def set_run_context(self, context: Mapping[str, Any]) -> None:
        """Call ``set_run_context`` of every hook."""
        with kept_rng():
            for hook in self.values():
                hook.set_run_context(**context)

    def reset(self) -> None:
        """Call ``reset`` of every hook: another run begins."""
        self.receipts = ()
        with kept_rng(), self.on_device(self.values()):
            for hook in self.values():
                hook.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state of every hook, with tensors on the device where a resumed run must find them."""
        with kept_rng(), self.on_device(self.values()):
            return {name: copied(hook.state_dict()) for name, hook in self.items()}

    def load_state_dict(self, states: Mapping[str, Any], disabled: Iterable[str]) -> None:
        """Load the states of hooks that are in `states`, and switch off those that are `disabled`."""
        unknown = [name for name in states if name not in self]
        if unknown:
            warn_user(f"The state of hooks that are not here is passed over: {', '.join(map(repr, unknown))}.")
        with kept_rng(), self.on_device(self.values()):
            for name, hook in self.items():
                if name in states:
                    hook.load_state_dict(copied(states[name]))
        self.policy.disabled = set(disabled) & set(self)
        self._replan()

    # -- tensors that wait on the CPU ------------------------------------------------------------------------

    def on_device(self, hooks: Iterable[TrainingHook]) -> AbstractContextManager[None]:
        """Return a context in which the tensors of `hooks` are where they were; after the outermost, on the CPU."""
        return self._moved(hooks) if self.offloads else _NOTHING

    @contextmanager
    def _moved(self, hooks: Iterable[TrainingHook]) -> Iterator[None]:
        self._depth += 1
        try:
            for hook in hooks:
                self._brought.append(hook)
                homes = self._homes.pop(hook, None)
                if homes is not None:
                    hook.set_state_tensors(map_tensors(hook.get_state_tensors(), partial(_back, iter(homes))))
            yield
        finally:
            self._depth -= 1
            while self._brought and not self._depth:
                self._send(self._brought.pop())

    def _send(self, hook: TrainingHook) -> None:
        homes: list[torch.device] = []
        moved = map_tensors(hook.get_state_tensors(), partial(_away, homes))
        if any(home != _CPU for home in homes):
            self._homes[hook] = homes
            hook.set_state_tensors(moved)


def _away(homes: list[torch.device], _: str, tensor: Tensor) -> Tensor:
    homes.append(tensor.device)
    return tensor.to(_CPU)


def _back(homes: Iterator[torch.device], _: str, tensor: Tensor) -> Tensor:
    return tensor.to(next(homes, tensor.device))
