"""Hooks that come and go while hooks fire: one rule for every kind and every place (docs/behaviour.md, *Order*)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_sites import (
    CALL,
    VARIANTS,
    AmongForeignHooks,
    OnClass,
    OnFunction,
    OnModule,
    OnOperator,
    OnOptimizer,
    Place,
    WithKwargs,
    chosen,
    ignore,
)

import hookline as hl

Attach = Callable[..., hl.HookHandle]
CASES = [
    pytest.param(*site.values, observes, id=f"{site.id}-{'observer' if observes else 'hook'}")
    for observes in (False, True)
    for site in chosen(VARIANTS, lambda place: not place.single)
    if not observes or (site.values[0]().edits and "AlwaysCalled" not in site.id)
]
CALLED = [OnModule, AmongForeignHooks, OnFunction, OnClass]


def log_of(first: Attach, later: Attach, run: Callable[[], object], options: dict[str, Any]) -> str:
    """Who fires while A takes B off and puts C on: in that run, and in the next."""
    log: list[str] = []
    handles: dict[str, hl.HookHandle] = {}

    def a(*args: object, **kwargs: object) -> None:
        log.append("A")
        if "C" not in handles:
            handles["B"].remove(quiet=True)
            handles["C"] = later(lambda *args, **kwargs: log.append("C"))

    handles["A"] = first(a)
    handles["B"] = later(lambda *args, **kwargs: log.append("B"), **options)
    run()
    log.append(" ")
    run()
    for handle in handles.values():
        handle.remove(quiet=True)
    return "".join(log)


@pytest.mark.parametrize(("make", "observes"), [case for case in CASES if "AnyOfSeveral" not in case.id])
def test_a_firing_runs_the_hooks_that_were_on_when_it_began(make: Callable[[], Place], observes: bool) -> None:
    """Of one kind at one place: the removed one still runs, the added one not yet; at the next firing both count."""
    place = make()
    assert log_of(place.attach, place.attach, place.run, {"observe": True} if observes else {}) == "AB AC"


@pytest.mark.filterwarnings("error::hookline.errors.HookNeverFired")
@pytest.mark.parametrize(("make", "observes"), CASES)
def test_a_hook_may_remove_itself_while_it_fires(make: Callable[[], Place], observes: bool) -> None:
    """The others of the same firing still run; from the next one on it is off, and no warning says it was silent."""
    place, log = make(), []
    before = place.traces()

    def leave(*args: object, **kwargs: object) -> None:
        log.append("B")
        handle.remove()
        last.remove(quiet=isinstance(place, OnFunction))  # a function counts as silent until its turn

    first = place.attach(lambda *args, **kwargs: log.append("A"))
    handle = place.attach(leave, **({"observe": True} if observes else {}))
    last = place.attach(lambda *args, **kwargs: log.append("C"), **({"observe": True} if observes else {}))
    place.run()
    log.append(" ")
    place.run()
    assert "".join(log) == "ABC A"
    assert last.report().fired == 1
    first.remove()
    assert place.traces() == before


LATER = [
    *((place, "forward_pre", "forward", "AC AC") for place in (*CALLED, OnOperator, WithKwargs)),
    (OnModule, "state_dict_pre", "state_dict_post", "AC AC"),
    (OnModule, "load_state_dict_pre", "load_state_dict_post", "AC AC"),
    (OnOptimizer, "step_pre", "step_post", "AC AC"),
    (OnOptimizer, "state_dict_pre", "state_dict_post", "AC AC"),
    (OnOptimizer, "load_state_dict_pre", "load_state_dict_post", "AC AC"),
    *((place, first, later, "A AC") for place in CALLED for first in CALL[:3] for later in CALL[2:] if first != later),
    *((OnModule, first, "full_backward", "A AC") for first in CALL[:3]),
    (OnModule, "full_backward", "backward", "A AC"),
]


@pytest.mark.product(
    case=LATER, observes={"hook": False, "observer": True}, company={"alone": False, "in-company": True}
)
def test_a_change_counts_from_the_next_firing_of_the_same_call(
    case: tuple[type[Place], str, str, str], observes: bool, company: bool
) -> None:
    """A later kind of the call leaves the removed one out and runs the added one; gradient hooks wait for a forward.

    Whatever else is on the place changes nothing in that.
    """
    sort, first, later, expected = case
    place = sort(first)
    others = [place.attach(ignore, on=kind) for kind in (first, later)] if company else []
    options = {"observe": True} if observes and place.edits else {}
    log = log_of(
        lambda hook: place.attach(hook, **options),
        lambda hook, **options: place.attach(hook, on=later, **options),
        place.run,
        {},
    )
    for handle in others:
        handle.remove(quiet=True)
    assert log == expected


def test_the_rule_stands_in_one_place() -> None:
    """Pages that speak of it repeat the sentence of docs/behaviour.md or link to it."""
    docs = Path(__file__).parents[2] / "docs"
    order = (docs / "behaviour.md").read_text().partition("\n## Order\n")[2].partition("\n## ")[0]
    assert "fire as they were when the first of them began" in " ".join(order.split())
    assert "behaviour.md#order" in (docs / "sources.md").read_text()
