"""Structures: every tensor in them is found, and putting other tensors in changes nothing else."""

from __future__ import annotations

import collections
import dataclasses
import typing

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline.tree import leaves, put_in, replace, swap_back, to_builtins


class Pair(typing.NamedTuple):
    """A namedtuple."""

    left: object
    right: object


@dataclasses.dataclass
class Plain:
    """A dataclass."""

    a: object
    b: object = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataclass that refuses assignment."""

    a: object
    b: object = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """A dataclass without a dictionary."""

    a: object
    b: object = 3


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


TENSORS = st.builds(lambda n: torch.full((2,), float(n)), st.integers(-5, 5))
LEAVES = st.one_of(TENSORS, st.none(), st.integers(), st.text(max_size=3), st.booleans())
KEYS = st.one_of(st.text("abc", min_size=1, max_size=3), st.integers(0, 9))
STRUCTURES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.UserDict),
        st.builds(Pair, inner, inner),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner, inner),
        st.builds(Slotted, inner, inner),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(STRUCTURES)
def test_every_tensor_is_replaced_and_nothing_else(value):
    """After a swap the leaves are the same in number, order, path and type; tensors are swapped, others kept."""
    before = list(leaves(value))
    after = list(leaves(replace(value, double)))
    assert [path for path, _ in before] == [path for path, _ in after]
    for (_, old), (_, new) in zip(before, after, strict=True):
        if isinstance(old, Tensor):
            assert torch.equal(new, old * 2)
        else:
            assert new is old


@settings(deadline=None, max_examples=200)
@given(STRUCTURES)
def test_there_and_back_again_gives_the_same_tensors_in_the_same_types(value):
    """A round trip restores every leaf by identity, in containers of the same types."""
    originals = {}

    def there(tensor: Tensor) -> Tensor:
        new = tensor.clone()
        originals[id(new)] = (new, tensor)
        return new

    changed = replace(value, there)
    back = replace(changed, lambda tensor: originals[id(tensor)][1])
    assert type(back) is type(value)
    assert all(a is b for (_, a), (_, b) in zip(leaves(value), leaves(back), strict=True))
    assert repr(back) == repr(value)


@settings(deadline=None, max_examples=100)
@given(STRUCTURES)
def test_what_was_changed_in_place_can_be_swapped_back(value):
    """Lists and dicts keep their identity, and get their own tensors back; everything else is a copy."""
    before = [(path, id(leaf)) for path, leaf in leaves(value)]
    swapped = []
    replace(value, double, swapped)
    swap_back(swapped)
    assert [(path, id(leaf)) for path, leaf in leaves(value)] == before


@settings(deadline=None, max_examples=100)
@given(STRUCTURES)
def test_one_tensor_is_put_in_and_plain_containers_are_made_without_touching_the_value(value):
    """Every place of the tensor, in copies of what is around it; the same leaves in tuples, lists and dicts."""
    old, new = torch.zeros(2), torch.ones(2)
    value, before = (old, value, [old]), list(leaves(value))
    made, changed = put_in(value, old, new)
    assert changed
    assert (made[0] is new, made[2][0] is new, value[2][0] is old) == (True, True, True)
    assert made[1] is value[1]
    assert [id(leaf) for _, leaf in leaves(to_builtins(value[1], lambda leaf: leaf))] == [
        id(leaf) for _, leaf in before
    ]
