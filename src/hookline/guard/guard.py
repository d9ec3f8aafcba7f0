"""Undo what an intervention did to a run, whether it finished, raised or was interrupted.

`HookManager` (lifecycle/manager.py) saves once per firing and runs every intervention in a ``protecting`` block. The
loops (training/run.py) make the `Guard` of a run and keep it. `ModelDataContext` makes one for other loops.
``find_bad_operations`` uses a `Guard` directly. Users, ``replay_check``, ``bisect`` (debug/compare/bisect_runs.py) and
the loops, for the gradients of a target, call `rollback`. A `Guard` has a `Snapshot` of the run (guard/snapshot.py). Of
each block it has the `TorchSwitches` and a `GuardReceipt`, which it fills in at the end.

To change: a scope is in `SCOPES`, `_FORBIDDEN`, `Guard.save`, `Guard.protecting`, ``Guard._restore`` and
`_forbidden_message` here, in ``Scope`` of lifecycle/hook.py, in ``_SCOPES`` of lifecycle/registry.py and in
docs/guard.md. The kinds of changes in `_FORBIDDEN` are those of `StateChange` (guard/walk.py, which says where else
they are). A new switch of torch is an entry of `_SWITCHES`, or of a table of sites/_torch.py that is in it, a turn in
``TURNS`` of tests/guard/test_guard_data.py, and a word in the row "switches of torch" of docs/guard.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hookline.errors import GuardError, OptionError
from hookline.guard.snapshot import ALL, BUFFERS, Snapshot, interrupts_deferred, raise_if_lost, roots_of
from hookline.guard.walk import StateChange
from hookline.messages import listed, suggest
from hookline.sites import _torch


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _set_autocast(device: str, before: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device, before[0])
    torch.set_autocast_dtype(device, before[1])


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _leave_inference_mode(before: bool) -> None:
    raise RuntimeError("only the block that began it can end it")


_SWITCHES: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]] = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (_torch.default_device, torch.set_default_device),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "number of threads between operators": (torch.get_num_interop_threads, torch.set_num_interop_threads),
    "autocast on cpu": (partial(_autocast, "cpu"), partial(_set_autocast, "cpu")),
    "autocast on cuda": (partial(_autocast, "cuda"), partial(_set_autocast, "cuda")),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "autocast blocks": (_torch.autocast_nesting, _torch.set_autocast_nesting),
    "deterministic algorithms": (
        _deterministic,
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    ),
    "anomaly detection": (_anomalies, lambda before: torch.set_anomaly_enabled(*before)),
    "float32 precision": (_torch.precision, _torch.set_precision),
    "half-precision reductions": (_torch.reductions, _torch.set_reductions),
    **_torch.KERNEL_SWITCHES,
    **_torch.CONVERSION_SWITCHES,
    "inference mode": (torch.is_inference_mode_enabled, _leave_inference_mode),
}
"""How to read each, and how to set it. A value is compared by ``==`` and digested (`guard.digest`), so it has to be a
plain value, or a tuple of these: of other objects `digest` sees the class alone. The names are in errors and audits."""


class TorchSwitches:
    """The switches of torch, of the thread and the process, as they are when this is made.

    They decide how the run computes: ``torch.set_num_threads`` alone alters the bits of later sums. `Guard`, the audit,
    `run_digest` and `find_bad_operations` read them. The head of this file says what a new switch needs.
    """

    def __init__(self) -> None:
        self.values = {name: read() for name, (read, _) in _SWITCHES.items()}
        """The switches by name."""
        self.lost: dict[str, str] = {}
        """The switches that `restore` could not set back, and why."""

    def restore(self) -> list[str]:
        """Set back the switches that differ, and return their names."""
        changed = [name for name, (read, _) in _SWITCHES.items() if read() != self.values[name]]
        for name in changed:
            try:
                _SWITCHES[name][1](self.values[name])
            except RuntimeError as error:
                self.lost[name] = str(error)
        return changed


# -- the guard -------------------------------------------------------------------------------------------------------

SCOPES: Final = ("reads", "grads", "trains")
"""What an intervention may declare to change, the narrowest first."""

_FORBIDDEN: Final = {
    "reads": frozenset({"parameter", "gradient", "other gradient", "state"}),
    "grads": frozenset({"parameter", "gradient", "state"}),  # "gradient": a write to a parked one
    "trains": frozenset[str](),
}
"""The kinds of changes (`StateChange`) that a scope does not allow; all others are undone without an error. In a
block of scope "grads" the run's gradients are parked: taken off the parameters until its end
(`Snapshot.park_gradients`)."""
_HOST_MEMORY: Final[WeakKeyDictionary[nn.Module, dict[Any, list[Tensor]]]] = WeakKeyDictionary()
"""The host memory for copies that the latest `rollback` of each model has used. To get such memory from the system
takes up to ten times as long as to copy. On other devices torch itself keeps what is free."""


@dataclass(slots=True)
class GuardReceipt:
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

    Copies go to the device of what is copied if they fit there, else to pinned memory of the host.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, *, loader: Any = None
    ) -> None:
        self._snapshot = Snapshot(roots_of(model, optimizer, scheduler, scaler, loader))
        self._saved_scope: str | None = None
        self._blocks: list[_Block] = []
        """Those in each other, the outermost first."""
        self.num_saves = 0
        """How often `save` was called."""
        self.last_bytes = 0
        """How many bytes the latest save copied."""

    @property
    def gradients(self) -> dict[Tensor, Tensor]:
        """The run's gradients as they were saved, by their parameter; also while they are parked (taken off)."""
        return self._snapshot.gradients

    def save(self, scopes: Iterable[str] = ("trains",), *, batch: Any = None) -> None:
        """Save what interventions of these ``scopes`` may change; the widest decides.

        The tensors and arrays of ``batch``, in containers or objects, are saved whatever the scopes.
        """
        names = [scopes] if isinstance(scopes, str) else list(scopes)
        saved = max(map(_check_scope, names), key=SCOPES.index, default="reads")
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
        """Put everything back, once; raise if something is lost, or the scope forbids a change."""
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
        changes, lost = self._snapshot.restore()
        if receipt.scope == "grads":
            # Allowed: new gradients, and writes to those that were copied (buckets of DDP, which backward writes). A
            # write to a parked gradient that was not copied stays in the list, as it cannot be undone.
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

        A block that is still open, because an interrupt came just before its end, is put back first.
        """
        for block in reversed(self._blocks):
            self._end(block)
        self._saved_scope = None
        self._snapshot.forget()


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
    less and hold the block to that.
    """
    guard = Guard(model, optimizer, scheduler, scaler, loader=loader)
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
    fate = f"No copy was taken of {listed(lost)}: the run cannot continue." if lost else "All of it was put back."
    only_grads = receipt.scope == "reads" and all("gradient" in change.kind for change in forbidden)
    wider = "scope='grads' or 'trains'" if only_grads else "scope='trains'"
    return (
        f"Hook {receipt.hook!r} declares scope={receipt.scope!r}, and changed "
        f"{listed([change.name for change in forbidden])}. {fate} "
        f"Next: declare {wider}."
    )
