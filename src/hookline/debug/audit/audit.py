"""Audit hooks: train with and without them, compare bit for bit, name the step and the hook that changes the run.

Users and ``hookline audit`` call `audit`, which trains by `Trainings` and returns an `Audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

from hookline.debug.audit.train_once import (
    AuditedHook,
    Difference,
    Training,
    Trainings,
    audited_hooks,
    first_difference,
)
from hookline.errors import OptionError
from hookline.tables import ShownAsTable, Table

__all__ = ["Audit", "Culprit", "audit"]

_NEXT_REPEATABLE: Final = (
    "Next: let train_fn build its model, optimizer and data inside, and seed all that draws "
    "(torch, NumPy, Python, generators of its own); on a GPU, torch.use_deterministic_algorithms(True)."
)
_NEXT_LEFT_BEHIND: Final = (
    "What the hooks left in the process (a global hook, a patched function) stays on in later trainings, so that none "
    "can be blamed here. Next: audit them one at a time, each in a process of its own."
)

_NEXT_STATE: Final = (
    "Trained again with the same hooks the run did not differ: a hook keeps something from one training to the next, "
    "so none can be blamed. Next: give a function that makes the hook anew."
)


def audit(train_fn: Callable[..., Any], hooks: Any, *, steps: int | None = None, blame: bool = True) -> Audit:
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
        blame: Whether to find out which hook it is.

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
        return _compare(chosen, trainings, blame=blame)
    finally:
        trainings.set_back()


def _compare(hooks: list[AuditedHook], trainings: Trainings, *, blame: bool) -> Audit:
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
    if difference is not None and left_behind is None and blame:
        culprits = _find_culprits(hooks, difference, lambda some: plain.difference(trainings.train(some)))
        # One that counts over trainings looks like an interaction: it did it once, and none of the halves did.
        if any(one.is_interaction for one in culprits) and plain.difference(trainings.train(hooks)) is None:
            culprits, notes = [], [*notes, _NEXT_STATE]
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
    """The names: one, or those of an interaction."""
    difference: Difference
    """Where the run with these hooks alone first differs."""

    @property
    def is_interaction(self) -> bool:
        """Whether several hooks are needed."""
        return len(self.hooks) > 1


_Trial: TypeAlias = Callable[[Sequence[AuditedHook]], Difference | None]


def _find_culprits(hooks: Sequence[AuditedHook], whole: Difference, try_with: _Trial) -> list[Culprit]:
    """Return every culprit among ``hooks``, which change the run when all are on; the earliest step first.

    Args:
        hooks: All that were on.
        whole: Where the run with all of them differs.
        try_with: Trains with some of them, from the same start, and returns where that differs.
    """
    known: dict[tuple[str, ...], Difference | None] = {_names(hooks): whole}

    def differs(some: Sequence[AuditedHook]) -> Difference | None:
        if _names(some) not in known:
            known[_names(some)] = try_with(some) if some else None
        return known[_names(some)]

    left, found = list(hooks), []
    while left and differs(left) is not None:
        smallest = _smallest(left, differs)
        difference = differs(smallest)
        assert difference is not None
        found.append(Culprit(_names(smallest), difference))
        left = [hook for hook in left if hook not in smallest]
    return sorted(found, key=lambda culprit: culprit.difference.step)


def _smallest(hooks: list[AuditedHook], differs: _Trial) -> list[AuditedHook]:
    """Return a set that changes the run and of which none can be left out (delta debugging, after Zeller)."""
    parts = 2
    while len(hooks) > 1:
        pieces = [hooks[len(hooks) * i // parts : len(hooks) * (i + 1) // parts] for i in range(parts)]
        guilty = next((piece for piece in pieces if differs(piece) is not None), None)
        if guilty is not None:
            hooks, parts = guilty, 2
            continue
        rests = [[hook for hook in hooks if hook not in piece] for piece in pieces] if parts > 2 else []
        guilty = next((rest for rest in rests if differs(rest) is not None), None)
        if guilty is not None:
            hooks, parts = guilty, max(parts - 1, 2)
        elif parts >= len(hooks):
            break
        else:
            parts = min(2 * parts, len(hooks))
    return hooks


def _names(hooks: Sequence[AuditedHook]) -> tuple[str, ...]:
    return tuple(hook.name for hook in hooks)


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
        """``"same"``, ``"changed"``, ``"not repeatable"``, or ``"cannot be told"`` where a hook did not fire."""
        if self.not_repeatable is not None:
            return "not repeatable"
        if self.difference is not None or self.left_behind is not None:
            return "changed"
        return "cannot be told" if self.silent else "same"

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
            return (
                f"Cannot be told: of {on}, {', '.join(self.silent)} did not fire in {length}; the rest changes no bit."
            )
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
