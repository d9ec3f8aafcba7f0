"""The guard by itself: scopes and what they hold a hook to, receipts, faults, and what torch makes of it afterwards."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import pytest
import torch
from helpers_guard import Run, Stop, differing, guard_of, portrait, ruin
from torch import nn

from hookline.errors import GuardError
from hookline.guard import snapshot as copies
from hookline.guard.guard import rollback
from hookline.sites import _torch

# -- scopes ---------------------------------------------------------------------------------------------------------


BREACHES = {
    "parameter": (lambda run: nn.init.zeros_(run.model.head.weight), "model.head.weight"),
    "step": (lambda run: run.step(), "model.embed.weight"),
    "state": (lambda run: run.optimizer.state.clear(), "optimizer.state"),
    "learning rate": (lambda run: run.optimizer.param_groups[0].update(lr=9.0), "optimizer.param_groups[0].lr"),
    "replaced": (lambda run: setattr(run.model.head, "bias", nn.Parameter(torch.ones(5))), "model.head.bias"),
    "scheduler": (lambda run: run.scheduler.step(), "scheduler.last_epoch"),
}


@pytest.mark.parametrize("scope", ["reads", "grads"])
@pytest.mark.parametrize("breach", sorted(BREACHES))
def test_a_broken_declaration_is_an_error_that_names_hook_and_tensor(scope, breach):
    """Whether or not the hook itself raised."""
    act, name = BREACHES[breach]
    for raising in (False, True):
        run = Run()
        run.optimizer.step()
        guard = guard_of(run)
        guard.save([scope])

        def protected(run=run, guard=guard, raising=raising):
            with guard.protecting("liar", scope):
                act(run)
                if raising:
                    raise Stop

        with pytest.raises(GuardError, match="'liar'") as caught:
            protected()
        assert name in str(caught.value)
        assert isinstance(caught.value.__cause__, Stop if raising else type(None))


def test_gradients_are_forbidden_to_readers_and_put_away_for_those_who_compute_some():
    """By reference: the objects come back, nothing of them is copied."""
    run = Run()
    grads = [p.grad for p in run.model.parameters()]
    guard = guard_of(run)
    guard.save(["grads"])
    assert guard.last_bytes < 200
    with guard.protecting("computes", "grads"):
        assert all(p.grad is None for p in run.model.parameters())
        assert list(guard.gradients) == list(run.model.parameters())
        run.loss(run.model, [torch.randn(6, 5)]).backward()
    assert all(p.grad is grad for p, grad in zip(run.model.parameters(), grads, strict=True))
    guard.save(["reads"])
    complaint = r"changed 'model\.embed\.weight\.grad'.*scope='grads'"
    with pytest.raises(GuardError, match=complaint), guard.protecting("liar", "reads"):
        run.model.embed.weight.grad = None
    assert run.model.embed.weight.grad is grads[0]


def test_an_intervention_wider_than_what_was_saved_is_refused_before_it_begins():
    """And one without any save."""
    run = Run()
    guard = guard_of(run)
    with pytest.raises(GuardError, match="nothing is saved"), guard.protecting("early"):
        pytest.fail("it ran")
    guard.save(["reads"])
    with pytest.raises(GuardError, match=r"save\(\['trains'\]\)"), guard.protecting("wide"):
        pytest.fail("it ran")
    guard.release()
    with pytest.raises(GuardError, match="nothing is saved"), guard.protecting("late", "reads"):
        pytest.fail("it ran")


# -- receipts -------------------------------------------------------------------------------------------------------


def test_a_receipt_says_what_was_touched_and_restored():
    """By the way one would write it."""
    run = Run()
    with rollback(*run.guarded) as receipt:
        with torch.no_grad():
            run.model.norm.weight.mul_(2)
        run.model.drop.eval()
        run.optimizer.param_groups[0]["lr"] = 3.0
        torch.rand(1)
    assert receipt.touched == (
        "model.drop.training",
        "optimizer.param_groups[0].lr",
        "model.norm.weight",
        "random stream of torch",
    )
    assert receipt.restored == receipt.touched
    assert receipt.hook == "rollback"
    assert receipt.seconds > 0
    assert receipt.saved_bytes > sum(p.nbytes for p in run.model.parameters())


# -- faults ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_saved_is_refused_by_name_before_anything_is_touched():
    """The meta device, lazy parameters."""
    with (
        pytest.raises(GuardError, match=r"model\.weight is on the meta device"),
        rollback(nn.Linear(2, 2, device="meta")),
    ):
        pytest.fail("it ran")
    lazy = nn.LazyLinear(2)
    with pytest.raises(GuardError, match=r"model\.weight has no numbers yet"), rollback(lazy):
        pytest.fail("it ran")


def test_no_memory_is_an_error_before_anything_is_touched(monkeypatch):
    """Nothing was written, and the guard can be used again."""
    run = Run()
    before = portrait(run)
    guard = guard_of(run)

    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(copies, "_empty_like", refuse)
        with pytest.raises(GuardError, match=r"no room.*Nothing was touched.*a narrower scope.*none left"):
            guard.save()
        with pytest.raises(GuardError, match="nothing is saved"), guard.protecting("late"):
            pytest.fail("it ran")
    assert differing(before, portrait(run)) == []
    guard.save()
    with guard.protecting("fine"):
        run.step()
    assert differing(before, portrait(run)) == []


@pytest.mark.parametrize("moment", ["save", "restore"])
def test_an_interrupt_while_saving_or_restoring_waits(monkeypatch, moment):
    """It arrives afterwards, with the state whole, and the handler of before is in place again."""
    run = Run()
    before = portrait(run)
    handler = signal.getsignal(signal.SIGINT)
    guard = guard_of(run)
    method = moment
    original = getattr(copies.MemoryCopies, method)

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # were it delivered at once, it would be here
            pass
        original(self)

    def fire():
        guard.save()
        with guard.protecting("any"):
            ruin(run)

    with monkeypatch.context() as patched:
        patched.setattr(copies.MemoryCopies, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            fire()
    assert differing(before, portrait(run)) == []
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_can_guard_too():
    """Where no handler can be set."""
    run = Run()
    before = portrait(run)
    errors = []

    def work():
        try:
            with rollback(*run.guarded):
                ruin(run)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert differing(before, portrait(run)) == []


def test_a_release_keeps_no_gradient_batch_or_graph_alive():
    """What is remembered for the next save is of model and optimizer alone. Before the release they are alive."""
    run = Run()
    guard = guard_of(run)
    for _ in range(2):
        run.model.zero_grad()
        loss = run.model(torch.ones(4, 5)).sum()
        loss.backward(retain_graph=True)
        batch = {"x": torch.ones(3)}
        parameters = list(run.model.parameters())
        refs = [weakref.ref(batch["x"]), *(weakref.ref(p.grad) for p in parameters if p.grad is not None)]
        guard.save(batch=batch)
        with guard.protecting("any"):
            pass
        run.model.zero_grad(set_to_none=True)
        del batch, loss
        assert all(ref() is not None for ref in refs)
        assert max(map(_torch.use_count, parameters)) > 1  # by the nodes of the graph
        guard.release()
        gc.collect()
        assert all(ref() is None for ref in refs)
        assert max(map(_torch.use_count, parameters)) == 1
