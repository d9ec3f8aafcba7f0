"""Reducing later: on the CPU with a reducer that copies, so that what it was shown can be compared."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookline.observe.watch.pending import PendingTensors
from hookline.observe.watch.place import WatchedPlace


class Seen:
    """A reducer that keeps what it was shown: by name, and how many came together."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}
        self.batches: list[int] = []

    def __call__(self, notes: Sequence[Any]) -> None:
        self.batches.append(len(notes))
        for place, tensor, _ in notes:
            self.values.setdefault(place.name, []).append(tensor.detach().clone())


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
    """An in-place consumer is noticed at the first flush: from the first firing on, no number is wrong.

    A module that is called twice in its first forward is not deferred the second time: nothing was looked at yet.
    """
    seen, pending, place = _made()
    for values in ([-1.0, -2.0], [-3.0], [-4.0]):
        for value in values:
            x = torch.tensor([value])
            pending.take(place, x)
            x.relu_()
        pending.flush()
    assert [x.item() for x in seen.values["a"]] == [-1.0, -2.0, -3.0, -4.0]
    assert (pending.lost, place.silent) == ({}, "")


def test_a_change_that_comes_later_loses_the_firing_and_says_so() -> None:
    """A tensor that is changed in place though the place was clean before: dropped, counted, never a wrong number."""
    seen, pending, place = _made()
    _known(pending, place)
    x = torch.tensor([-5.0])
    pending.take(place, x)
    x.view(-1).relu_()  # by a view, too
    assert [tensor.item() for _, _, tensor, *_ in pending._notes] == [0.0]  # what would be read: the negative control
    pending.flush()
    assert [x.item() for x in seen.values["a"]] == [0.0]
    assert pending.lost == {place: 1}
    assert "1 firing(s) not counted" in place.silent
    y = torch.tensor([-6.0])
    pending.take(place, y)
    y.relu_()
    pending.flush()
    assert seen.values["a"][-1].item() == -6.0
    other, scale = _place("b"), torch.tensor(8.0)
    _known(pending, other)
    pending.take(other, torch.ones(1), scale)
    scale.mul_(2)  # as GradScaler does: a gradient must not be divided by the next step's
    pending.flush()
    assert pending.lost == {place: 1, other: 1}


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
