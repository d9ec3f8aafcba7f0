"""Audit hooks: train with and without them, compare bit for bit, name the step and the hook that changes the run.

Users and ``hookline audit`` call `audit`, which calls `Trainings` and `find_culprits` and returns an `Audit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hookline.debug.audit.audit_result import Audit
from hookline.debug.audit.audited_hook import AuditedHook, audited_hooks
from hookline.debug.audit.blame_hooks import find_culprits
from hookline.debug.audit.run_state import first_difference
from hookline.debug.audit.train_once import Training, Trainings, takes_hooks
from hookline.errors import OptionError

__all__ = ["audit"]

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
        hooks: One, a list, or a dictionary by name. A name of a lifecycle hook or a group (``"norms"``), a lifecycle
            hook, a spec, a file of specs, ``"package.module:NAME"``; a function of the model, or of model and
            optimizer, that puts something on and may return what takes it off; a context manager, or a function or
            class without arguments that makes one, for around the training; a torch forward hook
            ``(module, args, output)``, for every module. Each training gets a copy.
        steps: After how many steps a training is stopped; None: at its own end.
        blame: Whether to find out which hook it is.

    Returns:
        The result: ``ok``, ``first_step``, ``culprits``, and a table when printed.

    Raises:
        OptionError: there are no hooks, or ``train_fn`` makes no step that can be followed.
    """
    if steps is not None and steps < 1:
        raise OptionError(f"audit(steps=) takes a number of at least 1, got {steps}.")
    chosen = audited_hooks(hooks, by_training=takes_hooks(train_fn))
    trainings = Trainings(train_fn, steps=steps)
    try:
        return _compare(chosen, trainings, blame=blame)
    finally:
        trainings.set_back()


def _compare(hooks: list[AuditedHook], trainings: Trainings, *, blame: bool) -> Audit:
    plain = trainings.train()
    names, length = tuple(hook.name for hook in hooks), len(plain.recorded.states)
    unstable = plain.difference(trainings.train(), with_batch=True)
    if unstable is not None:
        return Audit(names, length, trainings.count, not_repeatable=unstable, notes=[_NEXT_REPEATABLE])
    hooked = trainings.train(hooks)
    difference = plain.difference(hooked)
    left_behind = plain.difference(trainings.train())
    notes = [_NEXT_LEFT_BEHIND] if left_behind is not None else []
    culprits = []
    if difference is not None and left_behind is None and blame:
        culprits = find_culprits(hooks, difference, lambda some: plain.difference(trainings.train(some, plain)))
        # One that counts over trainings looks like an interaction: it did it once, and none of the halves did.
        if any(one.is_interaction for one in culprits) and plain.difference(trainings.train(hooks, plain)) is None:
            culprits, notes = [], [*notes, _NEXT_STATE]
    return Audit(
        names,
        length,
        trainings.count,
        difference,
        culprits,
        left_behind=left_behind,
        silent=tuple(sorted(trainings.silent)) if hooked.error is None else (),
        leftovers=_leftovers(plain, hooked),
        end_differs=_end_differs(plain, hooked),
        notes=notes,
    )


def _leftovers(plain: Training, hooked: Training) -> tuple[str, ...]:
    """Return what is on after the training with hooks and not after that without, or the other way round."""
    before, after = plain.recorded.left, hooked.recorded.left
    return tuple(name for name in {**before, **after} if before.get(name) != after.get(name)) if after else ()


def _end_differs(plain: Training, hooked: Training) -> tuple[str, ...]:
    """Return what differs after the last step of both; nothing if one has not come so far."""
    if hooked.error is not None:
        return ()
    last = [one.recorded.end or one.recorded.states[-1] for one in (plain, hooked)]
    return first_difference(last[0], last[1])
