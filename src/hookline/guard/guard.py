"""What an intervention did is taken back, whether it finished, raised or was interrupted.

Takes the objects of a run from whoever fires hooks, who saves once for a firing and puts every intervention into a
``protecting`` block; hands back a `Receipt` for each. `rollback` is the same for use by hand.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, get_args

import torch
from torch import Tensor

from hookline.errors import GuardError, OptionError
from hookline.guard.data_check import DataWatch
from hookline.guard.interrupts import undisturbed
from hookline.guard.snapshot import Change, Snapshot, roots_of, unrestored
from hookline.guard.tensor_copies import Where
from hookline.guard.torch_switches import Switches
from hookline.messages import nearest_names
from hookline.tables import Table

__all__ = ["SCOPES", "Guard", "Receipt"]

SCOPES: Final = ("reads", "grads", "trains")
"""What an intervention may declare to change, the narrowest first."""

_FORBIDDEN: Final = {
    "reads": frozenset({"parameter", "gradient", "other gradient", "state"}),
    "grads": frozenset({"parameter", "gradient", "state"}),  # gradients that are put away, and written nevertheless
    "trains": frozenset[str](),
}
_MAX_ROWS: Final = 20
"""How many names of what was touched a receipt shows."""
_SAVED: Final = {"reads": "buffers", "grads": "buffers", "trains": "all"}


@dataclass(slots=True)
class Receipt:
    """What one intervention did, and what was done about it; filled in when its block is over."""

    hook: str
    """Its name."""
    scope: str
    """What it had declared."""
    touched: tuple[str, ...] = ()
    """What it changed, as far as counters and identities tell: ``model.0.weight``, ``optimizer.param_groups[0].lr``."""
    restored: tuple[str, ...] = ()
    """What of that was put back; all of it, but after a broken declaration."""
    seconds: float = 0.0
    """How long it took, without saving and restoring."""
    saved_bytes: int = 0
    """How much was copied before it."""

    def __repr__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        title = (
            f"{self.hook} (scope {self.scope}): touched {len(self.touched)}, put back {len(self.restored)}, "
            f"{1e3 * self.seconds:.2f} ms, {self.saved_bytes / 1e6:,.1f} MB saved"
        )
        back = set(self.restored)
        rows = [(name, "yes" if name in back else "no") for name in self.touched[:_MAX_ROWS]]
        more = len(self.touched) - len(rows)
        foot = (f"… and {more:,} more; all of them are in .touched",) if more else ()
        return Table(("touched", "put back"), rows, title=title, foot=foot) if rows else Table(title=title)


class Guard:
    """Saves a run, and puts it back after each intervention.

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
        self._loader = loader
        self._watch: DataWatch | None = None
        self._looking: Snapshot | None = None
        self._strict = strict
        self._saved: str | None = None
        self._copies_gradients = False
        self._is_back = True
        self.num_saves = 0
        """How often `save` was called."""
        self.last_bytes = 0
        """How much the latest save copied."""

    @property
    def devices(self) -> dict[torch.device, torch.device]:
        """For each device that has something of the run, where the copies of that are."""
        return self._snapshot.devices

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The run's gradients as they were saved, also while they are parked, by the way to their parameter."""
        return self._snapshot.gradients

    def save(self, scopes: Iterable[str] = ("trains",), *, batch: Any = None) -> None:
        """Save what interventions of these scopes may change; the widest decides.

        The tensors and arrays of a ``batch``, however it is built, are saved whatever the scopes.
        """
        names = [scopes] if isinstance(scopes, str) else list(scopes)
        widest = max(map(_checked, names), key=SCOPES.index, default="reads")
        saved = "trains" if self._strict else widest
        with undisturbed():
            self._saved = None
            self._copies_gradients = saved == "trains" or (saved == "grads" and self._snapshot.has_buckets)
            self._snapshot.take(_SAVED[saved], gradients=self._copies_gradients, batch=batch)
            self._watch = DataWatch(self._loader)
            self._saved = saved
        self.num_saves += 1
        self.last_bytes = self._snapshot.nbytes

    @contextmanager
    def protecting(self, name: str, scope: str = "trains") -> Iterator[Receipt]:
        """Whatever happens in the block is undone at its end; the exception that ended it goes on.

        A `GuardError` names what was changed against the declaration, after everything was put back that could be.
        """
        self._check_saved(name, _checked(scope))
        receipt = Receipt(name, scope, saved_bytes=self.last_bytes)
        switches = Switches()
        began = time.perf_counter()
        try:
            if scope == "grads":
                self._snapshot.park_gradients()
            yield receipt
        except BaseException as error:
            broken = self._end(receipt, began, switches)
            if broken:
                raise GuardError(self._complaint(receipt, broken)) from error
            raise
        broken = self._end(receipt, began, switches)
        if broken:
            raise GuardError(self._complaint(receipt, broken))

    def _check_saved(self, name: str, scope: str) -> None:
        if self._saved is None:
            raise GuardError(f"{name!r} is to be protected, and nothing is saved. Next: call save() before.")
        if SCOPES.index(scope) > SCOPES.index(self._saved):
            raise GuardError(
                f"{name!r} declares scope={scope!r}, and only what {self._saved!r} may change was saved. "
                f"Next: save([{scope!r}])."
            )

    def _end(self, receipt: Receipt, began: float, switches: Switches) -> list[Change]:
        """Put everything back; what was changed against the declaration.

        An interrupt that comes before the handler is in place finds the restore undone: then it is begun again.
        """
        receipt.seconds, self._is_back = time.perf_counter() - began, False
        try:
            return self._put_back(receipt, switches)
        except KeyboardInterrupt:
            if not self._is_back:
                self._put_back(receipt, switches)
            raise

    def _put_back(self, receipt: Receipt, switches: Switches) -> list[Change]:
        with undisturbed():
            bytewise = self._strict and receipt.scope != "trains"
            if not bytewise:
                self._snapshot.begin_restore()
            changes = self._snapshot.changes(bytewise=bytewise)
            if receipt.scope == "grads":
                allowed = ("gradient", "other gradient") if self._copies_gradients else ("other gradient",)
                changes = [change for change in changes if change.kind not in allowed]
            stuck = self._snapshot.restore(looked=True, own_stream=False)
            changes += [Change("switch", name) for name in switches.restore()]
            stuck |= switches.stuck
            if self._watch is not None:
                stuck |= dict.fromkeys(self._watch.written(), "part of the data, which are not copied")
            broken = [change for change in changes if change.kind in _FORBIDDEN[receipt.scope]]
            left = {*stuck, *(() if self._saved == "trains" else self._unrestored(broken))}
            receipt.touched = tuple(dict.fromkeys(change.name for change in changes))
            receipt.restored = tuple(name for name in receipt.touched if name not in left)
            self._is_back = True
        if stuck:
            raise GuardError(unrestored(f"Hook {receipt.hook!r}", stuck))
        return broken

    def _unrestored(self, broken: list[Change]) -> Iterator[str]:
        """The names of tensors that were written and of which there was no copy."""
        known = set(self._snapshot.names)
        for change in broken:
            if change.kind == "gradient" or (change.kind != "other gradient" and change.name in known):
                yield change.name

    def _complaint(self, receipt: Receipt, broken: list[Change]) -> str:
        names = [change.name for change in broken]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        lost = [name for name in names if name not in receipt.restored]
        fate = (
            f"No copy was taken of {lost[0]}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}, "
            "so the run cannot go on as if nothing had happened."
            if lost
            else "All of it was put back."
        )
        return (
            f"Hook {receipt.hook!r} declares scope={receipt.scope!r}, and changed {shown}. {fate} "
            f"Next: declare {_next_scope(receipt.scope, broken)}."
        )

    def release(self) -> None:
        """The firing is over; the memory stays for the next."""
        self._saved = self._watch = None
        self._snapshot.forget()

    @contextmanager
    def check_observers(self, name: str, *, random: bool = True, batch: Any = None) -> Iterator[None]:
        """Raise if the block changes a parameter, buffer, gradient, mode, switch, ``batch`` or ``random`` stream.

        Told by counters and identities, so nothing is copied, and what they cannot see is not seen. Nothing is put
        back, and an exception of the block's own goes on as it is.
        """
        if self._looking is None:
            self._looking = Snapshot(self._snapshot.roots)
        self._looking.take("nothing", gradients=False, random=random, batch=batch)
        switches = Switches()
        try:
            yield
            changes = self._looking.changes(random=random)
            changes += [Change("switch", switch) for switch in switches.changed()]
        finally:
            self._looking.forget()
        if changes:
            names = [change.name for change in changes]
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise GuardError(
                f"Hook {name!r} observes, and changed {shown}. Next: make it an intervention, which is undone."
            )


def _checked(scope: str) -> str:
    if scope not in SCOPES:
        near = nearest_names(str(scope), SCOPES)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise OptionError(f"scope= is one of {', '.join(map(repr, SCOPES))}, got {scope!r}{meant}")
    return scope


def _next_scope(scope: str, broken: list[Change]) -> str:
    only_grads = scope == "reads" and all("gradient" in change.kind for change in broken)
    return "scope='grads' or 'trains'" if only_grads else "scope='trains'"
