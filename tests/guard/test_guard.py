"""The guard by itself: scopes and what they hold a hook to, receipts, faults, and what torch makes of it afterwards."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import pytest
import torch
from helpers_guard import OPTIMIZERS, Run, differing, portrait
from torch import nn

import hookline as hl
from hookline.errors import GuardError, OptionError
from hookline.guard import snapshot_part as part
from hookline.guard import tensor_copies as copies
from hookline.guard.guard import Guard, rollback


class _Stop(Exception):
    """Raised by interventions of these tests."""


def _guard(run: Run, **options) -> Guard:
    return Guard(*run.guarded, loader=run.loader, **options)


def _ruin(run: Run) -> None:
    """Fill everything with 999, step everything, and leave the model another one."""
    with torch.no_grad():
        for tensor in [*run.model.parameters(), *run.model.buffers()]:
            tensor.fill_(999)
    run.step()
    run.model.eval()
    del run.model.head


# -- everything comes back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("steps", [0, 3])
def test_everything_is_as_before(optimizer, steps):
    """Also state that the optimizer made only in the block, and for each of several interventions."""
    run = Run(optimizer, steps=steps)
    before = portrait(run)
    guard = _guard(run)
    guard.save()
    for _ in range(3):
        with guard.protecting("ruin"):
            _ruin(run)
        assert differing(before, portrait(run)) == []
    assert guard.num_saves == 1


@pytest.mark.parametrize("error", [_Stop, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_block_goes_on_after_the_restore(error):
    """Whatever it is."""
    run = Run()
    before = portrait(run)

    def block():
        with rollback(*run.guarded, loader=run.loader):
            _ruin(run)
            raise error

    with pytest.raises(error):
        block()
    assert differing(before, portrait(run)) == []


def test_a_backward_whose_forward_is_over_works_as_without_the_block():
    """The counters by which autograd tells that a tensor was overwritten are set back, too."""
    grads = []
    for guarded in (False, True):
        run = Run()
        torch.manual_seed(5)
        run.optimizer.zero_grad()
        loss = run.loss(run.model, [torch.randn(6, 5)])
        if guarded:
            with rollback(*run.guarded):
                run.step()
                run.model.head.weight.data = torch.zeros(1)
        loss.backward()
        grads.append([p.grad for p in run.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_without_the_guard_that_backward_fails():
    """The control for the test above."""
    run = Run()
    loss = run.loss(run.model, [torch.randn(6, 5)])
    run.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_autocast_has_cast_is_cast_again():
    """Inside one autocast block, a weight is cast once; after the restore the cast must be of the old numbers."""
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        with rollback(model):
            with torch.no_grad():
                model.weight.fill_(3)
            torch.clear_autocast_cache()
            model(x)
        assert torch.equal(model(x), before)


def test_gradients_come_and_go_and_stay_the_same_objects():
    """From None to a tensor, from a tensor to None, written in place."""
    run = Run()
    first, second, *_ = run.model.parameters()
    first.grad, kept = None, second.grad
    numbers = kept.clone()
    with rollback(*run.guarded):
        first.grad = torch.ones_like(first)
        kept.zero_()
        second.grad = None
    assert first.grad is None
    assert second.grad is kept
    assert torch.equal(kept, numbers)


def test_sparse_gradients_come_back():
    """They have no memory of the usual kind."""
    model = nn.Embedding(6, 3, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    grad, numbers = model.weight.grad, model.weight.grad.to_dense()
    with rollback(model):
        model(torch.tensor([1, 4])).sum().backward()
    assert model.weight.grad is grad
    assert torch.equal(grad.to_dense(), numbers)


def test_hooks_of_torch_and_of_hookline_that_stay_behind_come_off():
    """And those that were there before still fire."""
    model, fired = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    with hl.attach(model, "0", lambda module, args, output: fired.append("ours")):
        model[1].register_forward_hook(lambda *args: fired.append("torch's"))
        with rollback(model):
            hl.attach(model, "*", lambda module, args, output: fired.append("new"))
            hl.attach(model, "0", lambda parameter: fired.append("new"), on="param_grad")
            model[0].weight.register_hook(lambda grad: fired.append("new"))
            model[0].register_forward_hook(lambda *args: fired.append("new"))
        model(torch.ones(1, 2)).sum().backward()
        assert fired == ["ours", "torch's"]
        assert len(hl.attached(model)) == 1
        hl.attach(model, "1", lambda module, args, output: fired.append("later"))
        model(torch.ones(1, 2))
        assert fired[2:] == ["ours", "later", "torch's"]  # our edits go before hooks of others


HOOKS = {
    "forward": ({}, lambda fired: lambda module, args, output: fired.append(1)),
    "always": ({"always_call": True}, lambda fired: lambda module, args, output: fired.append(1)),
    "observer": ({"observe": True}, lambda fired: lambda module, args, output: fired.append(1)),
    "backward": ({"on": "backward"}, lambda fired: lambda module, grad_input, grad_output: fired.append(1)),
    "param_grad": ({"on": "param_grad"}, lambda fired: lambda parameter: fired.append(1)),
}


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
@pytest.mark.parametrize("kind", sorted(HOOKS))
def test_hooks_of_ours_stay_whole_whatever_a_block_does_with_them(kind):
    """Those it attaches are off afterwards; one of before fires on; one it removes by its handle stays off."""
    options, make = HOOKS[kind]
    model, fired = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []

    def attached():
        return hl.attach(model, "0", make(fired), **options)

    def fires() -> bool:
        before = len(fired)
        model(torch.ones(1, 2)).sum().backward()
        return len(fired) > before

    with rollback(model):
        handle = attached()
        assert fires()
    assert handle.removed
    assert not fires()
    hl.assert_no_hooks(model, foreign=True)
    handle = attached()
    with rollback(model):
        assert fires()
    assert fires()
    with rollback(model):
        handle.remove()
    assert not fires()
    hl.assert_no_hooks(model, foreign=True)
    assert "_call_impl" not in vars(model[0])
    with attached():
        assert fires()


def test_a_storage_that_was_freed_is_there_again():
    """As sharding does between uses."""
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    with rollback(model):
        model.weight.untyped_storage().resize_(0)
    assert torch.equal(model.weight, before)


def test_tensors_made_in_inference_mode_come_back():
    """They have no counter, and may be written only there."""
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("made", torch.arange(3.0))
    with rollback(model), torch.inference_mode():
        model.made.zero_()
    assert model.made.tolist() == [0.0, 1.0, 2.0]


def test_it_works_in_inference_mode_and_where_gradients_are_off():
    """And leaves the switches alone."""
    run = Run()
    for switch in (torch.inference_mode, torch.no_grad):
        before = portrait(run)
        with switch(), rollback(*run.guarded):
            run.model.head.weight.add_(1)
            run.model(torch.randn(2, 5))
        assert differing(before, portrait(run)) == []
        assert torch.is_grad_enabled()


def test_switches_of_the_process_that_were_left_on_are_switched_back():
    """Whether gradients are recorded, and the type of new tensors."""
    model = nn.Linear(2, 2)
    with torch.no_grad(), rollback(model) as receipt:
        torch.set_grad_enabled(True)
    assert torch.is_grad_enabled()
    assert receipt.touched == ("grad mode",)
    with rollback(model) as receipt:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert receipt.touched == receipt.restored == ("grad mode", "default dtype")


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(), nn.BatchNorm1d(2, affine=False)], ids=str)
def test_models_without_parameters_are_guarded_too(model):
    """Their modes, buffers and random streams are there to be changed."""
    state = torch.get_rng_state()
    with rollback(model) as receipt:
        model.eval()
        torch.rand(1)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert "model.training" in receipt.touched


def test_an_optimizer_without_state_has_none_afterwards():
    """Entries that a step makes are gone; the dictionary is the same."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = optimizer.state
    with rollback(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert len(optimizer.state) == 2
    assert optimizer.state is state
    assert not state
    assert model.weight.grad is None


def test_samplers_of_any_kind_come_back():
    """Generators and attributes of batch samplers, generators of loaders that are none of torch's."""

    class Batches:
        def __init__(self):
            self.generator, self.served = torch.Generator().manual_seed(1), []

        def __iter__(self):
            self.served.append(int(torch.randint(9, (1,), generator=self.generator)))
            return iter([[0, 1], [2]])

    class Loader:
        def __init__(self):
            self.generator, self.data = torch.Generator().manual_seed(2), list(range(9))

    batches, mine = Batches(), Loader()
    loader = torch.utils.data.DataLoader([1.0, 2.0, 3.0], batch_sampler=batches)
    states = [batches.generator.get_state(), mine.generator.get_state()]
    with rollback(nn.ReLU(), loader=loader) as receipt:
        list(loader)
    with rollback(nn.ReLU(), loader=mine):
        torch.rand(1, generator=mine.generator)
    assert "loader.batch_sampler.served" in receipt.touched
    assert batches.served == []
    assert torch.equal(batches.generator.get_state(), states[0])
    assert torch.equal(mine.generator.get_state(), states[1])


def test_the_epoch_of_a_distributed_sampler_comes_back():
    """`set_epoch` decides the order of the next epoch."""
    sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=0)
    loader = torch.utils.data.DataLoader(range(8), sampler=sampler)
    with rollback(nn.ReLU(), loader=loader):
        sampler.set_epoch(7)
    assert sampler.epoch == 0


# -- scopes ---------------------------------------------------------------------------------------------------------


def test_a_reader_may_run_the_model_and_switch_modes():
    """Buffers and random streams are put back; nothing is said."""
    run = Run()
    before = portrait(run)
    guard = _guard(run)
    guard.save(["reads"])
    with guard.protecting("reader", "reads") as receipt:
        run.model(torch.randn(4, 5))
        run.model.eval()
    assert differing(before, portrait(run)) == []
    assert "model.calls" in receipt.restored
    assert receipt.saved_bytes == guard.last_bytes < 200


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
        guard = _guard(run)
        guard.save([scope])

        def protected(run=run, guard=guard, raising=raising):
            with guard.protecting("liar", scope):
                act(run)
                if raising:
                    raise _Stop

        with pytest.raises(GuardError, match="'liar'") as caught:
            protected()
        assert name in str(caught.value)
        assert isinstance(caught.value.__cause__, _Stop if raising else type(None))


def test_gradients_are_forbidden_to_readers_and_put_away_for_those_who_compute_some():
    """By reference: the objects come back, nothing of them is copied."""
    run = Run()
    grads = [p.grad for p in run.model.parameters()]
    guard = _guard(run)
    guard.save(["grads"])
    assert guard.last_bytes < 200
    with guard.protecting("computes", "grads"):
        assert all(p.grad is None for p in run.model.parameters())
        assert list(guard.gradients) == [f"model.{name}" for name, _ in run.model.named_parameters()]
        run.loss(run.model, [torch.randn(6, 5)]).backward()
    assert all(p.grad is grad for p, grad in zip(run.model.parameters(), grads, strict=True))
    guard.save(["reads"])
    complaint = r"changed model\.embed\.weight\.grad.*scope='grads'"
    with pytest.raises(GuardError, match=complaint), guard.protecting("liar", "reads"):
        run.model.embed.weight.grad = None
    assert run.model.embed.weight.grad is grads[0]


def test_what_a_reader_changed_is_put_back_where_there_is_a_copy():
    """Another intervention of the firing trains, so there is one; the error comes all the same."""
    run = Run()
    before = portrait(run)
    guard = _guard(run)
    guard.save(["reads", "trains"])
    with pytest.raises(GuardError, match="All of it was put back"), guard.protecting("liar", "reads"):
        nn.init.zeros_(run.model.head.weight)
    assert differing(before, portrait(run)) == []


def test_strict_sees_what_counters_do_not():
    """A write through ``.data`` moves no counter; byte by byte it shows, and is put back."""
    for strict in (False, True):
        run = Run()
        before = portrait(run)
        guard = _guard(run, strict=strict)
        guard.save(["reads"])
        if not strict:
            with guard.protecting("sly", "reads"):
                run.model.head.weight.data.zero_()
            assert "head.weight" in differing(before, portrait(run))  # the weaker promise, as the docs say
            continue
        complaint = r"model\.head\.weight.*All of it was put back"
        with pytest.raises(GuardError, match=complaint), guard.protecting("sly", "reads"):
            run.model.head.weight.data.zero_()
        assert differing(before, portrait(run)) == []


def test_an_intervention_wider_than_what_was_saved_is_refused_before_it_begins():
    """And one without any save."""
    run = Run()
    guard = _guard(run)
    with pytest.raises(GuardError, match="nothing is saved"), guard.protecting("early"):
        pytest.fail("it ran")
    guard.save(["reads"])
    with pytest.raises(GuardError, match=r"save\(\['trains'\]\)"), guard.protecting("wide"):
        pytest.fail("it ran")
    guard.release()
    with pytest.raises(GuardError, match="nothing is saved"), guard.protecting("late", "reads"):
        pytest.fail("it ran")


def test_unknown_scopes_and_places_are_named():
    """With what there is."""
    run = Run()
    with pytest.raises(OptionError, match=r"'reads', 'grads', 'trains'.*did you mean 'reads'"):
        _guard(run).save(["read"])
    with pytest.raises(OptionError, match="'auto', 'device', 'host'"):
        _guard(run, where="disk")
    with pytest.raises(GuardError, match=r"torch\.nn\.Module; got str"):
        Guard("model")
    with pytest.raises(GuardError, match="optimizer= has no attributes"):
        Guard(run.model, 3)


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


def test_a_block_that_touches_nothing_says_so():
    """No name is made up."""
    run = Run()
    with rollback(*run.guarded) as receipt:
        pass
    assert receipt.touched == receipt.restored == ()


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
    guard = _guard(run)

    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(copies, "_empty", refuse)
        with pytest.raises(GuardError, match=r"no room for it. Nothing was touched. Next: a narrower scope.*none left"):
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
    guard = _guard(run)
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
            _ruin(run)

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
                _ruin(run)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert differing(before, portrait(run)) == []


def test_memory_is_used_again_and_let_go_of_with_the_guard(monkeypatch):
    """One buffer for model and optimizer, one for the rest, one for gradients, however many firings; then none."""
    run = Run()
    guard = _guard(run)
    made = []
    original = copies._empty
    monkeypatch.setattr(copies, "_empty", lambda *args, **kwargs: made.append(original(*args, **kwargs)) or made[-1])
    for _ in range(5):
        guard.save()
        with guard.protecting("any"):
            run.step()
        guard.release()
        run.step()
    assert len(made) == 3
    refs = [weakref.ref(buffer) for buffer in made]
    made.clear()
    del guard
    assert [ref() for ref in refs] == [None, None, None]


def test_a_scaler_in_use_does_not_have_the_model_gone_through_again(monkeypatch):
    """It has new containers and tensors at every step; only they are learned anew."""
    run = Run()
    guard = _guard(run)
    walked = []
    original = part.ContainerTree
    for number in range(4):
        guard.save()
        if number == 0:
            monkeypatch.setattr(
                part, "ContainerTree", lambda roots, known: walked.append(list(roots)) or original(roots, known)
            )
        guard.release()
        run.step()
    assert len(walked) == 3
    assert all("scaler" in roots and "model" not in roots for roots in walked)


# -- observers ------------------------------------------------------------------------------------------------------

TRESPASSES = {
    "parameter": (lambda run: nn.init.zeros_(run.model.head.weight), "model.head.weight"),
    "buffer": (lambda run: run.model.scale.add_(1), "model.scale"),
    "forward in training mode": (lambda run: run.model.norm(torch.ones(2, 6)), "model.norm.num_batches_tracked"),
    "gradient": (lambda run: run.model.head.weight.grad.zero_(), "model.head.weight.grad"),
    "gradient gone": (lambda run: run.model.zero_grad(), "model.embed.weight.grad"),
    "mode": (lambda run: run.model.eval(), "model.training"),
    "optimizer": (lambda run: run.optimizer.step(), "model.embed.weight"),
    "random": (lambda run: torch.rand(1), "random stream of torch"),
}


@pytest.mark.parametrize("trespass", sorted(TRESPASSES))
def test_an_observer_that_changes_something_is_named(trespass):
    """With what it changed."""
    act, name = TRESPASSES[trespass]
    run = Run()
    guard = _guard(run)
    with pytest.raises(GuardError, match="'watcher' observes") as caught, guard.check_observers("watcher"):
        act(run)
    assert name in str(caught.value)


def test_an_observer_that_only_looks_passes():
    """Also between save and restore, and when it raises something of its own, that is what one sees."""
    run = Run()
    guard = _guard(run)
    guard.save()
    with guard.check_observers("watcher"):
        [p.norm() for p in run.model.parameters()]
    with guard.check_observers("drawer", random=False):
        torch.rand(1)
    with pytest.raises(_Stop), guard.check_observers("raiser"):
        raise _Stop
    with guard.protecting("any"):
        _ruin(run)


# -- the house test -------------------------------------------------------------------------------------------------


def _trained(intervene, *, guarded: bool = True) -> list[torch.Tensor]:
    run = Run()
    guard = _guard(run)
    for _ in range(20):
        run.step()
        if intervene is not None and guarded:
            guard.save()
            with guard.protecting("each step"):
                intervene(run)
            guard.release()
        elif intervene is not None:
            intervene(run)
    left = [*run.model.state_dict().values(), torch.get_rng_state()]
    return left + [v for state in run.optimizer.state.values() for v in state.values()]


def test_training_with_interventions_is_training_without():
    """Twenty steps through dropout and normalization: every bit of weights, state and random stream."""

    def intervene(run):
        run.step()
        run.model.eval()
        nn.init.zeros_(run.model.head.weight)

    plain, guarded = _trained(None), _trained(intervene)
    assert all(torch.equal(a, b) for a, b in zip(plain, guarded, strict=True))
    unguarded = _trained(lambda run: run.step(), guarded=False)
    assert not all(torch.equal(a, b) for a, b in zip(plain, unguarded, strict=True))
