"""Reducing later: on the CPU with a reducer that copies, so that what it was shown can be compared."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline.errors import HooklineWarning
from hookline.observe.watch.engine import StatsEngine
from hookline.observe.watch.hooks import ModuleStatsHook
from hookline.observe.watch.pending import PendingTensors
from hookline.observe.watch.place import Note, WatchedPlace
from hookline.observe.watch.row import Layout
from hookline.observe.watch.steps import Passes, Steps
from hookline.phases import During
from hookline.when import StepSchedule


class Seen:
    """A reducer that keeps what it was shown: by name, and how many came together."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}
        self.batches: list[int] = []

    def __call__(self, notes: Sequence[Note]) -> None:
        self.batches.append(len(notes))
        for note in notes:
            self.values.setdefault(note.place.name, []).append(note.tensor.detach().clone())


def _place(name: str = "a") -> WatchedPlace:
    return WatchedPlace(name, "forward")


def _made(*names: str, **options: Any) -> tuple[Any, ...]:
    """A reducer, tensors that wait for it, and places: one, or those that are named."""
    seen = Seen()
    return seen, PendingTensors(seen, **options), *map(_place, names or "a")


def _known(pending: PendingTensors, *places: WatchedPlace) -> None:
    """Have the places seen once, so that they are deferred from now on."""
    for place in places:
        pending.take(place, torch.zeros(1))
    pending.flush()


def test_the_first_firing_is_reduced_at_once_and_later_ones_together() -> None:
    """Two places: one by one the first time, in one batch at the flush the second time."""
    seen, pending, a, b = _made("a", "b")
    _known(pending, a, b)
    assert seen.batches == [1, 1]
    pending.take(a, torch.tensor([1.0]))
    pending.take(b, torch.tensor([2.0]))
    assert (len(pending), seen.batches) == (2, [1, 1])
    pending.flush()
    assert (len(pending), seen.batches) == (0, [1, 1, 2])
    assert [x.item() for x in seen.values["b"]] == [0.0, 2.0]


def test_a_place_whose_tensor_is_changed_in_place_is_reduced_at_once_for_good() -> None:
    """An in-place consumer is noticed at the first flush: from the first firing on, no number is wrong."""
    seen, pending, place = _made()
    for value in (-1.0, -2.0, -3.0):
        x = torch.tensor([value])
        pending.take(place, x)
        x.relu_()
        pending.flush()
    assert [x.item() for x in seen.values["a"]] == [-1.0, -2.0, -3.0]
    assert not pending.lost
    assert not place.silent


def test_until_it_is_known_a_place_is_reduced_at_once() -> None:
    """A module called twice in its first forward is not deferred the second time: nothing was looked at yet."""
    seen, pending, place = _made()
    first, second = torch.tensor([-1.0]), torch.tensor([-2.0])
    pending.take(place, first)
    pending.take(place, second)
    second.relu_()
    pending.flush()
    assert [x.item() for x in seen.values["a"]] == [-1.0, -2.0]
    pending.take(place, torch.ones(1))
    assert not len(pending)


def test_a_change_that_comes_later_loses_the_firing_and_says_so() -> None:
    """A tensor that is changed in place though the place was clean before: dropped, counted, never a wrong number."""
    seen, pending, place = _made()
    _known(pending, place)
    x = torch.tensor([-5.0])
    pending.take(place, x)
    x.view(-1).relu_()  # by a view, too
    pending.flush()
    assert [x.item() for x in seen.values["a"]] == [0.0]
    assert pending.lost == {place: 1}
    assert "1 firing(s) not counted" in place.silent
    y = torch.tensor([-6.0])
    pending.take(place, y)
    y.relu_()
    pending.flush()
    assert seen.values["a"][-1].item() == -6.0


def test_without_the_check_a_deferred_tensor_would_be_read_changed() -> None:
    """Negative control: what a reducer would be shown, were versions not looked at."""
    seen, pending, place = _made()
    _known(pending, place)
    x = torch.tensor([-5.0])
    pending.take(place, x)
    x.relu_()
    seen([Note(place, tensor) for _, place, tensor, *_ in pending._notes])
    assert seen.values["a"][-1].item() == 0.0


def test_a_scale_that_was_changed_in_place_loses_the_firing_too() -> None:
    """GradScaler updates its scale in place; a gradient must not be divided by the next step's."""
    _, pending, place = _made()
    _known(pending, place)
    scale = torch.tensor(8.0)
    pending.take(place, torch.ones(1), scale)
    scale.mul_(2)
    pending.flush()
    assert pending.lost == {place: 1}


def test_tensors_of_inference_mode_are_reduced_at_once() -> None:
    """They have no version to compare."""
    seen, pending, place = _made()
    _known(pending, place)
    with torch.inference_mode():
        pending.take(place, torch.tensor([3.0]))
        pending.take(_place("new"), torch.tensor([4.0]))
    assert not len(pending)
    assert seen.values["a"][-1].item() == 3.0


def test_no_more_bytes_are_held_than_the_limit() -> None:
    """A tensor that exceeds it has all reduced."""
    seen, pending, a, b = _made("a", "b", limit=200)
    _known(pending, a, b)
    pending.take(a, torch.ones(20))  # 80 bytes
    pending.take(b, torch.ones(20))
    assert len(pending) == 2
    pending.take(a, torch.ones(20))
    assert len(pending) == 0
    assert seen.batches[-1] == 3


def test_a_view_counts_for_all_that_it_holds() -> None:
    """The last of many positions, in a loop that nobody says the end of: the rest of its memory is held, too."""
    _, pending, place = _made(limit=3999)
    _known(pending, place)
    for _ in range(3):
        pending.take(place, torch.ones(1000)[:1])
        assert len(pending) == 0
    fresh = _place("b")
    x = torch.ones(1000)
    memory = weakref.ref(x.untyped_storage())
    pending.take(fresh, x[:1])
    del x
    assert memory() is None


def test_places_become_known_though_nobody_says_that_a_pass_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluating without an end: what is remembered of first firings has a bound, and the oldest is looked at."""
    monkeypatch.setattr("hookline.observe.watch.pending._MOST_CHECKS", 3)
    seen = Seen()
    pending = PendingTensors(seen)
    clean, changed = _place("clean"), _place("changed")
    for _ in range(4):
        pending.take(clean, torch.ones(1))
        x = torch.tensor([-1.0])
        pending.take(changed, x)
        x.relu_()
        assert len(pending._checks) <= 3
    assert (clean.deferred, changed.deferred) == (pending, None)
    pending.flush()
    assert [[x.item() for x in seen.values[name]] for name in ("clean", "changed")] == [[1.0] * 4, [-1.0] * 4]


def test_a_gradient_that_autograd_would_add_to_is_deferred() -> None:
    """It adds in place only where nobody else has the tensor; so it is held from the first time on."""
    seen, pending, place = _made()
    for _ in range(3):
        x = torch.ones(3, requires_grad=True) * 1
        y = x + x.exp()  # the gradient of y goes to x as it is, and that of exp is added to it
        y.register_hook(lambda grad: pending.take(place, grad))
        y.sum().backward()
    assert (seen.batches, pending.lost, place.deferred) == ([1, 1, 1], {}, pending)
    assert [each.tolist() for each in seen.values["a"]] == [[1, 1, 1]] * 3


def test_the_first_firing_holds_no_memory_beyond_the_limit() -> None:
    """What is kept to see whether a tensor was changed shares its version, not its numbers, beyond the limit."""
    pending = PendingTensors(Seen(), limit=3999)
    x = torch.ones(1000)
    memory = weakref.ref(x.untyped_storage())
    pending.take(_place(), x)
    del x
    assert memory() is None
    pending.flush()


def test_the_end_of_a_backward_pass_is_a_moment_to_reduce() -> None:
    """Gradients noted in a backward pass are reduced when it is over, once, without anybody asking."""
    seen = Seen()
    pending = PendingTensors(seen)
    places = [_place(name) for name in "ab"]
    _known(pending, *places)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    for _ in range(2):
        x = torch.randn(2, 3)
        for place, layer in zip(["a", None, "b"], model, strict=True):
            x = layer(x)
            if place is not None:
                which = places["ab".index(place)]
                x.register_hook(lambda grad, which=which: pending.take(which, grad))
        seen.batches.clear()
        x.sum().backward()
        assert (seen.batches, len(pending)) == ([2], 0)


def test_what_is_forgotten_is_not_reduced() -> None:
    """A reset lets go of what is noted."""
    seen, pending, place = _made()
    _known(pending, place)
    pending.take(place, torch.ones(1))
    pending.forget()
    pending.flush()
    assert len(seen.values["a"]) == 1


def test_a_reducer_that_fails_later_costs_its_numbers_and_not_the_run() -> None:
    """The flush at the end of a backward pass warns, and the backward pass goes on."""

    def fails(notes: Sequence[Note]) -> None:
        if len(notes) > 1 or notes[0].tensor.numel() > 1:
            raise RuntimeError("no such kernel")

    pending = PendingTensors(fails)
    place = _place()
    _known(pending, place)
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: pending.take(place, grad))
    with pytest.warns(HooklineWarning, match="no such kernel"):
        y.sum().backward()
    assert x.grad is not None
    assert "no such kernel" in place.silent


def test_two_threads_lose_nothing() -> None:
    """One notes while another has it reduced, as with the backward pass of a GPU: every note is reduced once."""
    counted: list[int] = []
    pending = PendingTensors(lambda notes: counted.append(len(notes)))
    places = [_place(str(number)) for number in range(4)]
    _known(pending, *places)
    counted.clear()
    done = threading.Event()

    def flush() -> None:
        while not done.is_set():
            pending.flush()

    def note(place: WatchedPlace) -> None:
        for _ in range(2000):
            pending.take(place, torch.zeros(1))

    flusher = threading.Thread(target=flush)
    flusher.start()
    noters = [threading.Thread(target=note, args=(place,)) for place in places]
    for thread in noters:
        thread.start()
    for thread in noters:
        thread.join()
    done.set()
    flusher.join()
    pending.flush()
    assert sum(counted) == 4 * 2000


def test_two_threads_that_are_first_note_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one makes what it notes in, another has made it: there is one, which the engine has reduced."""
    engine = StatsEngine(Layout.of(None))
    others: list[PendingTensors] = []

    def make(*args: Any, **options: Any) -> PendingTensors:
        if not others:
            others.append(PendingTensors(*args, **options))
            others[0] = engine._pending.setdefault(torch.device("cpu"), others[0])
        return PendingTensors(*args, **options)

    monkeypatch.setattr("hookline.observe.watch.engine.PendingTensors", make)
    assert engine._pending_on(torch.device("cpu")) is others[0]
    assert list(engine._pending.values()) == others


def test_an_error_on_the_short_way_costs_its_numbers_and_not_the_run() -> None:
    """A scaler that cannot tell its scale, at a place whose tensors are noted."""

    def fails() -> Tensor:
        raise RuntimeError("no scale")

    module, engine = nn.Linear(1, 1), StatsEngine(Layout.of(None))
    passes = Passes(module, During(frozenset({"train"})), Steps(StepSchedule()))
    hook = ModuleStatsHook(engine, module, [("a", module)], "backward", passes, fails)
    engine.place("a", "backward").deferred = PendingTensors(Seen())
    with pytest.warns(HooklineWarning, match="no scale"):
        hook.backward(module, (torch.ones(1),))


class Streams:
    """Streams that a test goes between, and a record of who waited for whom."""

    def __init__(self) -> None:
        self.current = 1
        self.waited: list[tuple[int, int]] = []

    def now(self) -> int:
        return self.current

    @contextmanager
    def on(self, number: int) -> Iterator[None]:
        before, self.current = self.current, number
        yield
        self.current = before

    def join(self, number: int) -> None:
        self.waited.append((self.current, number))


def test_a_tensor_is_reduced_on_the_stream_that_it_was_seen_on() -> None:
    """Notes of another stream are reduced on that one; each stream that adds to rows waits for the one before."""
    streams = Streams()
    reduced_on: list[tuple[str, int]] = []
    pending = PendingTensors(lambda notes: reduced_on.extend((note.place.name, streams.current) for note in notes))
    pending._streams = streams  # type: ignore[assignment]
    a, b = _place("a"), _place("b")
    _known(pending, a, b)
    reduced_on.clear()
    pending.take(a, torch.ones(1))
    streams.current = 2
    pending.take(b, torch.ones(1))
    streams.current = 3
    pending.flush()
    assert reduced_on == [("a", 1), ("b", 2)]
    assert streams.waited == [(2, 1), (3, 2)]
    streams.current = 4
    pending.take(_place("new"), torch.ones(1))  # at once
    assert streams.waited[2:] == [(4, 3)]


def _train(hold: bool) -> tuple[dict[str, Tensor], Seen]:
    """Some steps of a model with residuals, shared modules and accumulated gradients, its tensors noted or not."""
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    layers = nn.ModuleList([nn.Linear(8, 8), shared, nn.ReLU(inplace=True), shared, nn.LayerNorm(8)])
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    seen = Seen()
    pending = PendingTensors(seen)
    places = {(kind, index): WatchedPlace(f"{index}/{kind}", kind) for kind in ("f", "b") for index in range(5)}
    for step in range(6):
        x = torch.randn(4, 8)
        for index, layer in enumerate(layers):
            before = x
            x = layer(x)
            if hold:
                pending.take(places["f", index], x)
                x.register_hook(lambda grad, index=index: pending.take(places["b", index], grad))
            x = x + before  # a gradient that goes two ways, and is added up in place if nobody holds it
        (x * x).mean().backward()
        pending.flush()
        if step % 2:  # two backward passes are accumulated
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
    gradients = {f"{name}.grad": p.grad.clone() for name, p in layers.named_parameters() if p.grad is not None}
    return {**layers.state_dict(), **gradients}, seen


def test_holding_activations_and_gradients_changes_no_bit_of_training() -> None:
    """Weights and gradients after accumulation, sharing and residuals are the same with every tensor held."""
    bare, _ = _train(hold=False)
    held, seen = _train(hold=True)
    assert max(seen.batches) > 3
    assert bare.keys() == held.keys()
    for name, value in bare.items():
        assert torch.equal(value, held[name]), name


def test_the_comparison_of_training_runs_notices_a_changed_gradient() -> None:
    """Negative control: a gradient that is edited by one bit's worth makes the runs differ."""
    bare, _ = _train(hold=False)
    take = PendingTensors.take

    def edit(self: PendingTensors, place: WatchedPlace, tensor: Tensor) -> None:
        take(self, place, tensor)
        tensor.data.mul_(1.001)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingTensors, "take", edit)
        edited, _ = _train(hold=True)
    assert any(not torch.equal(value, edited[name]) for name, value in bare.items())
