"""Undo what an intervention did to a run, whether it finished, raised or was interrupted.

`HookManager.fire` saves once per firing and runs every intervention in a ``protecting`` block; users call `rollback`.
Both go through `Guard`, which keeps a `Snapshot` of the run and fills in a `GuardReceipt` for each block.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, get_args
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hookline.errors import GuardError, OptionError
from hookline.guard.snapshot import ALL, BUFFERS, NOTHING, Snapshot, Where, first_names, raise_if_lost, roots_of
from hookline.guard.switches import TorchSwitches, interrupts_deferred
from hookline.guard.walk import StateChange
from hookline.messages import suggest
from hookline.tables import ShownAsTable, Table

__all__ = ["SCOPES", "Guard", "GuardReceipt", "rollback"]

SCOPES: Final = ("reads", "grads", "trains")
"""What an intervention may declare to change, the narrowest first."""

_FORBIDDEN: Final = {
    "reads": frozenset({"parameter", "gradient", "other gradient", "state"}),
    "grads": frozenset({"parameter", "gradient", "state"}),  # gradients that are parked, and written nevertheless
    "trains": frozenset[str](),
}
_HOST_MEMORY: Final[WeakKeyDictionary[nn.Module, dict[Any, list[Tensor]]]] = WeakKeyDictionary()
"""The memory for copies on the host that the latest `rollback` of each model has used: to get it anew takes a process
up to ten times as long as to copy. On other devices torch keeps what is free itself."""
_MAX_ROWS: Final = 20
"""How many names of what was touched a receipt shows."""


@dataclass(slots=True, repr=False)
class GuardReceipt(ShownAsTable):
    """The changes of one intervention, and which were put back; filled in when its block ends."""

    hook: str
    """Its name."""
    scope: str
    """The scope it declared."""
    touched: tuple[str, ...] = ()
    """What it changed, as far as counters and identities tell: ``model.0.weight``, ``optimizer.param_groups[0].lr``."""
    restored: tuple[str, ...] = ()
    """What of that was put back: all of it, unless the declared scope was exceeded."""
    seconds: float = 0.0
    """How long it took, without saving and restoring."""
    saved_bytes: int = 0
    """How many bytes were copied before it."""

    def _table(self) -> Table:
        title = (
            f"{self.hook} (scope {self.scope}): touched {len(self.touched)}, put back {len(self.restored)}, "
            f"{1e3 * self.seconds:.2f} ms, {self.saved_bytes / 1e6:,.1f} MB saved"
        )
        restored = set(self.restored)
        rows = [(name, "yes" if name in restored else "no") for name in self.touched]
        header, rest = ("touched", "put back"), " more; all of them are in .touched"
        return Table(header, rows, title=title, most=_MAX_ROWS, rest=rest) if rows else Table(title=title)


class _Block(NamedTuple):
    """A protected block that has begun and is not undone yet."""

    receipt: GuardReceipt
    began: float
    switches: TorchSwitches


class Guard:
    """Save a run, and put it back after each intervention.

    Recipe::

        guard = Guard(model, optimizer, scheduler, loader=loader)
        guard.save(["trains"])
        with guard.protecting("my_hook") as receipt:
            ...  # train, perturb, raise: everything is put back
        guard.release()

    ``where`` the copies go: ``"device"``, ``"host"`` (pinned memory), or ``"auto"``, which is the device if they fit.
    ``strict`` copies everything whatever the interventions declare, and compares byte by byte.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        loader: Any = None,
        where: Where = "auto",
        strict: bool = False,
    ) -> None:
        if where not in get_args(Where):
            raise OptionError(f"where= is one of {', '.join(map(repr, get_args(Where)))}; got {where!r}.")
        self._snapshot = Snapshot(roots_of(model, optimizer, scheduler, scaler, loader), where)
        self._observed: Snapshot | None = None
        """Without copies, for `check_observers`."""
        self._strict = strict
        self._saved_scope: str | None = None
        self._blocks: list[_Block] = []
        """Those in each other, the outermost first."""
        self.num_saves = 0
        """How often `save` was called."""
        self.last_bytes = 0
        """How many bytes the latest save copied."""

    @property
    def gradients(self) -> dict[Tensor, Tensor]:
        """The run's gradients as they were saved, also while they are parked, by their parameter."""
        return self._snapshot.gradients

    def save(self, scopes: Iterable[str] = ("trains",), *, batch: Any = None) -> None:
        """Save what interventions of these ``scopes`` may change; the widest decides.

        The tensors and arrays of ``batch``, in containers or objects, are saved whatever the scopes.
        """
        names = [scopes] if isinstance(scopes, str) else list(scopes)
        widest = max(map(_check_scope, names), key=SCOPES.index, default="reads")
        saved = "trains" if self._strict else widest
        with interrupts_deferred():
            self._saved_scope = None
            copied = ALL if saved == "trains" else BUFFERS
            if saved == "grads" and self._snapshot.has_buckets:
                copied |= {"gradient"}
            self._snapshot.take(copied, batch=batch)
            self._saved_scope = saved
        self.num_saves += 1
        self.last_bytes = self._snapshot.nbytes

    @contextmanager
    def protecting(self, name: str, scope: str = "trains") -> Iterator[GuardReceipt]:
        """Undo at its end whatever happens in the block of hook ``name``; pass on the exception that ended it.

        Raise `GuardError` if the block changed what its ``scope`` does not allow, after all that can be put back was.
        """
        self._check_saved(name, _check_scope(scope))
        receipt = GuardReceipt(name, scope, saved_bytes=self.last_bytes)
        block = _Block(receipt, time.perf_counter(), TorchSwitches())
        self._blocks.append(block)
        try:
            try:
                if scope == "grads":
                    self._snapshot.park_gradients()
                yield receipt
            except BaseException as error:
                self._end(block, error)
                raise
            self._end(block)
        except KeyboardInterrupt:
            self._end(block)  # one that came at the end of the block, before interrupts were deferred
            raise

    def _check_saved(self, name: str, scope: str) -> None:
        if self._saved_scope is None:
            raise GuardError(f"{name!r} is to be protected, and nothing is saved. Next: call save() before.")
        if SCOPES.index(scope) > SCOPES.index(self._saved_scope):
            raise GuardError(
                f"{name!r} declares scope={scope!r}, and only what {self._saved_scope!r} may change was saved. "
                f"Next: save([{scope!r}])."
            )

    @interrupts_deferred()
    def _end(self, block: _Block, cause: BaseException | None = None) -> None:
        """Put everything back, unless it was; raise where something cannot be, or the scope forbids a change."""
        if block not in self._blocks:
            return
        block.receipt.seconds = time.perf_counter() - block.began
        try:
            forbidden = self._restore(block.receipt, block.switches)
        finally:
            self._blocks.remove(block)
        if forbidden:
            raise GuardError(_forbidden_message(block.receipt, forbidden)) from cause

    def _restore(self, receipt: GuardReceipt, switches: TorchSwitches) -> list[StateChange]:
        bytewise = self._strict and receipt.scope != "trains"
        changes, lost = self._snapshot.restore(bytewise=bytewise)
        if receipt.scope == "grads":  # which computes some; those that were there are parked
            changes = [each for each in changes if "gradient" not in each.kind or not each.has_copy]
        changes += [StateChange("switch", name) for name in switches.restore()]
        lost |= switches.lost
        forbidden = [change for change in changes if change.kind in _FORBIDDEN[receipt.scope]]
        missing = {*lost, *(change.name for change in forbidden if not change.has_copy)}
        receipt.touched = tuple(dict.fromkeys(change.name for change in changes))
        receipt.restored = tuple(name for name in receipt.touched if name not in missing)
        raise_if_lost(f"Hook {receipt.hook!r}", lost)
        return forbidden

    @interrupts_deferred()
    def release(self) -> None:
        """Let go of what was saved; keep the memory for the next firing.

        Put it back before, where an interrupt has come between a block and its end.
        """
        for block in reversed(self._blocks):
            self._end(block)
        self._saved_scope = None
        self._snapshot.forget()

    @contextmanager
    def check_observers(self, name: str, *, random: bool = True, batch: Any = None) -> Iterator[None]:
        """Raise if the block changes a parameter, buffer, gradient, mode, switch, ``batch`` or ``random`` stream.

        Counters and identities tell, so nothing is copied or put back, and what they cannot see is not seen. An
        exception of the block's own goes on as it is.
        """
        if self._observed is None:
            self._observed = Snapshot(self._snapshot.roots)
        self._observed.take(NOTHING, random=random, batch=batch)
        switches = TorchSwitches()
        try:
            yield
            changed = [change.name for change in self._observed.changes()] + switches.changed()
        finally:
            self._observed.forget()
        if changed:
            raise GuardError(
                f"Hook {name!r} observes, and changed {first_names(changed)}. "
                "Next: make it an intervention, which is undone."
            )


@contextmanager
def rollback(
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    *,
    loader: Any = None,
    batch: Any = None,
    scope: str = "trains",
    where: Where = "auto",
) -> Iterator[GuardReceipt]:
    """Undo everything that the block does to a run.

    Recipe::

        with hookline.rollback(model, optimizer) as receipt:
            for batch in more_batches:
                train_step(model, optimizer, batch)
            reached = evaluate(model)
        print(reached, receipt.touched)

    Parameters, buffers, gradients, the optimizer's state and learning rates, modes, hooks, attributes and random
    streams come back, whether the block ends well or not, each the same object as before; so does what was written
    into a ``batch``, but not what was written into the dataset of ``loader``. ``scope="reads"`` or ``"grads"`` copy
    less and hold the block to that; `Guard` says ``where`` the copies go.
    """
    guard = Guard(model, optimizer, scheduler, scaler, loader=loader, where=where)
    snapshot = guard._snapshot
    snapshot.pool.free |= _HOST_MEMORY.pop(model, {})
    guard.save([scope], batch=batch)
    try:
        with guard.protecting("rollback", scope) as receipt:
            yield receipt
    finally:
        guard.release()
        snapshot.forget(everything=True)
        _HOST_MEMORY[model] = {key: free for key, free in snapshot.pool.free.items() if key[0].type == "cpu"}


def _check_scope(scope: str) -> str:
    if scope not in SCOPES:
        meant = suggest(scope, SCOPES) or "."
        raise OptionError(f"scope= is one of {', '.join(map(repr, SCOPES))}, got {scope!r}{meant}")
    return scope


def _forbidden_message(receipt: GuardReceipt, forbidden: list[StateChange]) -> str:
    """Return the text of the error about changes that the declared scope does not allow."""
    lost = [change.name for change in forbidden if change.name not in receipt.restored]
    fate = f"No copy was taken of {first_names(lost)}: the run cannot go on." if lost else "All of it was put back."
    only_grads = receipt.scope == "reads" and all("gradient" in change.kind for change in forbidden)
    wider = "scope='grads' or 'trains'" if only_grads else "scope='trains'"
    return (
        f"Hook {receipt.hook!r} declares scope={receipt.scope!r}, and changed "
        f"{first_names([change.name for change in forbidden])}. {fate} "
        f"Next: declare {wider}."
    )
