"""Changes that are hard to see or to put back: classes, views, storages, arrays, containers, hooks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch
from helpers_guard import Run, differing, portrait
from torch import nn
from torch.autograd import grad_mode

import hookline as hl
from hookline.errors import GuardError
from hookline.guard import guard as guard_module
from hookline.guard import snapshot as copies
from hookline.guard.guard import Guard, rollback

X = torch.ones(1, 3)

# -- tensors --------------------------------------------------------------------------------------------------------


def test_a_view_whose_graph_is_kept_is_named_when_all_else_is_back():
    """torch exchanges the internals of no tensor that a graph refers to."""
    model = nn.Linear(3, 3)
    model.register_buffer("whole", torch.ones(6))
    model.register_buffer("part", model.whole[::2])
    before, state, kept = model.weight.detach().clone(), torch.get_rng_state(), []
    guard = Guard(model)
    guard.save()

    def fire():
        with guard.protecting("keeps") as receipt:
            kept.append(receipt)
            model.part.mul_(model.weight.sum())
            kept.append(model.part.square().sum())
            model.weight.data.zero_()
            model.eval()
            torch.rand(1)

    with pytest.raises(GuardError, match=r"'keeps' has changed.*model\.part .*graph"):
        fire()
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.whole.tolist() == [1.0] * 6
    assert "model.part" in kept[0].touched
    assert "model.part" not in kept[0].restored


def test_a_parameter_whose_insides_were_swapped_for_some_on_another_device_is_back():
    """The tensor that got its own is gone."""
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with rollback(model):
        torch.utils.swap_tensors(model.weight, nn.Parameter(torch.empty(2, 2, device="meta")))
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("firings", [1, 2])
def test_tensors_that_hang_on_a_parameter_come_back(firings):
    """Some keep a gradient there of another precision; also if it is there only from the second firing on."""
    model = nn.Linear(2, 2)
    guard = Guard(model)
    for _ in range(firings - 1):
        guard.save()
        guard.release()
    kept = model.weight.main_grad = torch.ones(2, 2)
    guard.save()
    with guard.protecting("any") as receipt:
        model.weight.main_grad.zero_()
        del model.weight.main_grad
        model.bias.note = "seen"
    assert model.weight.main_grad is kept
    assert kept.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert not hasattr(model.bias, "note")
    assert sorted(receipt.touched) == ["model.bias.note", "model.weight.main_grad"]


# -- arrays ---------------------------------------------------------------------------------------------------------


def test_containers_of_every_kind_come_back():
    """In place, with their order."""
    model = nn.Linear(2, 2)
    model.counter, model.default = Counter("abc"), defaultdict(list, {1: [1]})
    model.queue, model.set, model.nested = deque([1, 2], maxlen=2), {1, 2}, (1, [torch.ones(2)])
    model.ordered = OrderedDict(a=1, b=2)
    containers = model.counter, model.default, model.queue, model.set, model.nested, model.ordered
    with rollback(model):
        model.counter.update("zz")
        model.default[1].append(model.default[5])
        model.queue.append(3)
        model.set.add(3)
        model.nested[1].pop().zero_()
        model.ordered.move_to_end("a")
        model.ordered = None
    assert containers[:4] == (Counter("abc"), {1: [1]}, deque([1, 2]), {1, 2})
    assert model.nested[1][0].tolist() == [1.0, 1.0]
    assert model.ordered is containers[5]
    assert list(model.ordered) == ["a", "b"]
    with rollback(model):  # nothing else tells that something was changed
        model.ordered.move_to_end("a")
    assert list(model.ordered) == ["a", "b"]


# -- hooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
def test_hooks_of_ours_on_no_model_in_particular_come_off_too():
    """On every module, on a function; those of before stay."""
    model, fired = nn.Linear(2, 2), []
    with hl.attach_everywhere(lambda module, args, output: fired.append("before")):
        guard = Guard(model)
        guard.save()
        for _ in range(2):
            with guard.protecting("any"):
                hl.attach_everywhere(lambda module, args, output: fired.append("left"))
                hl.attach_function("torch.nn.functional.linear", lambda *args: fired.append("left"), on="forward_pre")
        model(torch.ones(1, 2))
    assert fired == ["before"]


# -- what is said ---------------------------------------------------------------------------------------------------


class Interrupting:
    """Traces the guard's outer code, and sends one interrupt before its opcode (in torch: its line) number ``at``."""

    by_opcode = guard_module.__file__, contextlib.__file__

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame, event, arg):
        name = frame.f_code.co_filename
        is_deferring = frame.f_code is copies.interrupts_deferred.__wrapped__.__code__
        frame.f_trace_opcodes = name in self.by_opcode or is_deferring
        frame.f_trace_lines = name == grad_mode.__file__
        return self.count if frame.f_trace_opcodes or frame.f_trace_lines else None

    def count(self, frame, event, arg):
        self.left -= event in ("opcode", "line")
        if self.left == 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return self.count


def spoil(model):
    model.weight.data.zero_()
    model.note = 1
    model.eval()
    torch.set_grad_enabled(False)


def roll_back(model):
    with rollback(model):
        spoil(model)


def protect(model):
    guard = Guard(model)
    guard.save()
    try:
        with guard.protecting("any"):
            spoil(model)
    finally:
        guard.release()


@pytest.mark.parametrize("use", [roll_back, protect])
def test_an_interrupt_at_any_opcode_of_the_guard_loses_nothing(use):
    """Not even the mode for gradients, into and out of which the guard itself goes."""
    model = nn.Linear(2, 1)
    weight, handler = model.weight.detach().clone(), signal.getsignal(signal.SIGINT)

    def lost():
        whole = torch.equal(model.weight, weight) and not hasattr(model, "note")
        return not (whole and model.training and torch.is_grad_enabled())

    before = sys.gettrace()
    for at in itertools.count(1):
        interrupting, was_interrupted = Interrupting(at), False
        try:
            sys.settrace(interrupting)
            use(model)
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.settrace(before)
        assert was_interrupted is (interrupting.left <= 0)
        if lost():
            gc.collect()  # contextlib was interrupted before it went on: that is over with the last reference
        assert not lost()
        assert signal.getsignal(signal.SIGINT) is handler
        if not was_interrupted:
            break
    assert at > 1


@pytest.mark.parametrize("wants_error", [False, True])
def test_the_copies_of_a_rollback_are_gone_with_its_block(monkeypatch, wants_error):
    """At once, not when cycles are next looked for: until then every rollback would hold as much memory again."""
    kept, original = weakref.WeakSet(), copies.MemoryCopies.save

    def noted(self):
        kept.add(self)
        original(self)

    monkeypatch.setattr(copies.MemoryCopies, "save", noted)
    model = nn.Linear(2, 2)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError), rollback(model):
            assert kept
            model(torch.ones(1, 2)).sum().backward()
            1 / (not wants_error)
        assert not kept
    finally:
        gc.enable()


def test_a_hook_on_a_module_that_was_taken_out_is_off():
    """It is in the model again when hooks are looked for; so is one on a module that was put in."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    first, other, expected = model[0], nn.ReLU(), model(X)
    with rollback(model):
        hl.attach(model, "0", lambda module, args, output: output + 1)
        hl.attach(first, lambda module, args, output: output + 1)  # which the model itself knows nothing of
        del model[0]
        model.append(other)
        hl.attach(model, "1", lambda module, args, output: output + 1)
    assert torch.equal(model(X), expected)
    for module in (first, other):
        hl.assert_no_hooks(module)


def test_a_guard_may_be_used_in_inference_mode_and_then_outside_of_it():
    """What it keeps must not belong to either."""
    run = Run()
    guard = Guard(*run.guarded, loader=run.loader)
    before = portrait(run)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            guard.save()
            with guard.protecting("any"):
                run.model.head.weight.data = torch.zeros(3)
                run.model.norm.running_mean.zero_()
                run.model.head.bias.requires_grad_(False)
                run.model.embed.weight.grad = None
            guard.release()
        assert differing(before, portrait(run)) == []
    run.step()


@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning", "ignore:Sparse BSR:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
def test_a_compressed_sparse_buffer_comes_back(layout: torch.layout) -> None:
    """Torch's own check of layouts ends the process when it meets one."""
    model = nn.Linear(4, 4)
    blocks = {"blocksize": (2, 2)} if layout is torch.sparse_bsr else {}
    model.register_buffer("links", torch.eye(4).to_sparse(layout=layout, **blocks))
    with rollback(model, batch={"links": model.links.clone()}):
        model.links.values().mul_(3)
    assert torch.equal(model.links.to_dense(), torch.eye(4))


def test_a_block_is_not_blamed_for_memory_that_an_earlier_one_left_longer() -> None:
    """Torch does not shrink memory any more once NumPy has seen it."""
    model = nn.Linear(4, 4)
    guard = Guard(model)
    guard.save(["trains"])
    with guard.protecting("first"):
        memory = model.weight.untyped_storage()
        memory.resize_(2 * memory.nbytes())
        model.weight.detach().numpy()
    with guard.protecting("second", "reads") as receipt:
        pass
    assert receipt.touched == ()
    guard.release()


def test_a_parameter_that_is_frozen_between_firings_costs_no_new_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the discriminator of a GAN; what a block does to the flag is undone all the same."""
    model, walked = nn.Linear(4, 4), []
    walk = copies.RunWalk

    def walk_and_count(roots: dict[str, object], *known: object) -> object:
        walked.append(sorted(roots))
        return walk(roots, *known)

    monkeypatch.setattr(copies, "RunWalk", walk_and_count)
    guard = Guard(model)
    for frozen in (False, True, False):
        model.weight.requires_grad_(not frozen)
        guard.save(["trains"])
        with guard.protecting("any"):
            model.weight.requires_grad_(frozen)
        assert model.weight.requires_grad is not frozen
        guard.release()
    assert sum("model" in roots for roots in walked) == 1
