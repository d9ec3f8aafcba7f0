"""Undo by hand: everything done to a run in a block is taken back at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hookline.guard.guard import Guard, Receipt
from hookline.guard.tensor_copies import Where

__all__ = ["rollback"]


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
) -> Iterator[Receipt]:
    """Try something on a run, and have it as it was.

    Recipe::

        with hookline.rollback(model, optimizer) as receipt:
            for batch in more_batches:
                train_step(model, optimizer, batch)
            reached = evaluate(model)
        print(reached, receipt.touched)

    Parameters, buffers, gradients, the optimizer's state and learning rates, modes, hooks, attributes and random
    streams come back, whether the block ends well or not, each the same object as before; so does what was written
    into a ``batch``, while a write into the dataset of ``loader`` is an error that names it. ``scope="reads"`` or
    ``"grads"`` copy less and hold the block to that; ``where`` the copies go is said at `Guard`.
    """
    guard = Guard(model, optimizer, scheduler, scaler, loader=loader, where=where)
    guard.save([scope], batch=batch)
    try:
        with guard.protecting("rollback", scope) as receipt:
            yield receipt
    finally:
        guard.release()
