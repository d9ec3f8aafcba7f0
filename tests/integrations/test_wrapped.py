"""A function is wrapped for as long as someone listens, and is the original again afterwards."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hookline.sites.functions.wrapped import wrapped


class Base:
    def double(self, x: int) -> int:
        return 2 * x


class Owner(Base):
    def add(self, x: int) -> int:
        return x + 1


def plus(amount: int) -> Any:
    """Add something to what a function returns."""
    return lambda original, *args, **kwargs: original(*args, **kwargs) + amount


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize("on_class", [True, False])
def test_wraps_end_in_any_order_and_leave_nothing(order: tuple[int, ...], on_class: bool) -> None:
    """Of a class and of one object; whoever has ended does nothing more, and may end again."""
    one, other = Owner(), Owner()
    owner = Owner if on_class else one
    before = dict(vars(owner))
    amounts = [10, 100, 1000]
    ends = [wrapped(owner, "add", plus(amount)) for amount in amounts]
    assert (one.add(1), other.add(1)) == (1112, 1112 if on_class else 2)
    left = sum(amounts)
    for place in order:
        ends[place]()
        left -= amounts[place]
        assert one.add(1) == 2 + left
        ends[place]()
    assert dict(vars(owner)) == before


def test_a_method_of_a_base_class_stays_there() -> None:
    """Wrapped on the derived class, it is no attribute of that afterwards."""
    end = wrapped(Owner, "double", plus(1))
    assert (Owner().double(3), Base().double(3)) == (7, 6)
    end()
    assert "double" not in vars(Owner)


@pytest.mark.parametrize("copies_attributes", [False, True])
def test_what_someone_else_has_put_in_front_stays(copies_attributes: bool) -> None:
    """It goes on calling the original, through what does nothing any more; also if ``wraps`` made it look like ours."""
    one = Owner()
    end = wrapped(one, "add", plus(10))
    ours = one.add

    def theirs(x: float) -> float:
        return ours(x) + 0.5

    one.add = functools.wraps(ours)(theirs) if copies_attributes else theirs  # type: ignore[method-assign]
    end()
    assert one.add(1) == 2.5
