"""Reducing later: on the CPU with a reducer that copies, so that what it was shown can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookline.observe.watch.engine import WatchedPlace
from hookline.observe.watch.pending import PendingTensors

CPU = torch.device("cpu")


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


def _made(*names: str) -> tuple[Any, ...]:
    """A reducer, tensors that wait for it, and places: one, or those that are named."""
    seen = Seen()
    return seen, PendingTensors(seen, CPU), *map(_place, names or "a")


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


def test_the_end_of_a_backward_pass_is_a_moment_to_reduce() -> None:
    """Gradients noted in a backward pass are reduced when it is over, once, without anybody asking."""
    seen = Seen()
    pending = PendingTensors(seen, CPU)
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
