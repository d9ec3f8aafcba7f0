"""What every kind of site promises about lifetime: nothing is held, cycles leave nothing, copies are clean."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_sites import COPIES, SITES, VARIANTS, Place, chosen, ignore
from torch import nn

import hookline as hl
from hookline.sites.kinds import STATE_KINDS, Kind

Make = Callable[[], Place]
OWNED = chosen(VARIANTS, lambda place: not place.process_wide)
COPIED = chosen(VARIANTS, lambda place: not place.process_wide and type(place).__name__ not in ("OnTensor", "OnNode"))


@pytest.mark.parametrize("make", SITES)
def test_five_hundred_cycles_leave_nothing_behind(make: Make) -> None:
    """Of attaching and removing, and now and then of firing: no object, no dictionary entry."""
    place = make()
    before = place.traces()

    def cycle(times: int) -> int:
        for index in range(times):
            handle = place.attach(ignore)
            if index % 10 == 0:
                place.run()
            handle.remove()
            if place.single:
                place.scopes.clear()
        gc.collect()
        return len(gc.get_objects())

    objects = cycle(10)
    assert cycle(500) - objects < 20
    assert place.traces() == before


@pytest.mark.parametrize("make", chosen(SITES, lambda place: not place.single))
def test_a_hundred_events_with_hooks_that_stay_leave_nothing_behind(make: Make) -> None:
    """No call is kept."""
    place = make()

    def events(times: int) -> int:
        for _ in range(times):
            place.run()
        gc.collect()
        return len(gc.get_objects())

    with hl.HandleSet([place.attach(ignore), place.attach(ignore)]):
        objects = events(5)
        assert events(100) - objects < 20


@pytest.mark.parametrize("kind", sorted(STATE_KINDS))
def test_a_module_with_hooks_on_saving_alone_goes_without_the_collector(kind: Kind) -> None:
    """As with torch's own; its forwards are counted nevertheless."""
    module = nn.Linear(1, 1)
    handle = hl.attach(module, ignore, on=kind)
    module(torch.ones(1))
    module.load_state_dict(module.state_dict())
    assert handle.report().last_step == 0
    reference = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert reference() is None
    finally:
        gc.enable()
    handle.remove()


@pytest.mark.parametrize("make", chosen(OWNED, lambda place: not place.keeps_owner))
def test_neither_hook_nor_handle_keeps_the_owner_alive(make: Make) -> None:
    """With only the handle left everything goes, and the handle can still report and be removed."""
    place = make()
    handle, sort = place.attach(ignore), type(place).__name__
    place.run()
    assert handle.report().attached == 1
    references = [weakref.ref(part) for part in place.parts()]
    del place
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert handle.report().fired == 1
    assert handle.report().matched == (0 if "Within" in sort else 1)
    handle.remove()


@pytest.mark.parametrize("make", chosen(OWNED, lambda place: place.owns_hooks))
def test_a_hook_that_refers_to_the_owner_goes_with_it(make: Make) -> None:
    """It is a ring that the collector can see, though the hook was never removed."""
    place = make()

    def hook(*args: object, held: Any = place.owner, **kwargs: object) -> None:
        """Holds the owner."""

    place.attach(hook)
    place.run()
    references = [weakref.ref(part) for part in place.parts()]
    del place, hook
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("make", COPIED)
def test_a_copy_carries_no_hook(make: Make, duplicate: str) -> None:
    """It fires nothing, is clean at its first use, and takes hooks of its own; the original keeps its hook."""
    place, log = make(), []
    handle = place.attach(lambda *args, **kwargs: log.append("original"))  # which no pickle could carry
    twin = place.twin(COPIES[duplicate])
    assert not twin.attached()
    twin.run()
    assert log == []
    if isinstance(twin.owner, nn.Module):
        hl.assert_no_hooks(twin.owner)  # which clears away what torch may have been walking
    assert _ours(twin) == _ours(make())
    again = twin.twin(COPIES[duplicate])
    with again.attach(lambda *args, **kwargs: log.append("copy")):
        again.run()
        assert log == ["copy"]
    with place.twin(COPIES[duplicate]).attach(lambda *args, **kwargs: log.append("copy")) as own:
        assert handle != own
    place.run()
    assert log == ["copy", "original"]
    assert place.attached() in (None, [handle])
    handle.remove()
    place.run()
    twin.run()
    assert log == ["copy", "original"]
    if isinstance(twin.owner, nn.Module) and "Foreign" not in type(place).__name__ and not place.options:
        hl.assert_no_hooks(twin.owner, foreign=True)


def _ours(place: Place) -> dict[str, Any]:
    """Return the traces with hooks counted: they have other numbers on a copy."""

    def counted(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: counted(each) for key, each in value.items()}
        return len(value) if isinstance(value, list) and not all(isinstance(one, str) for one in value) else value

    return {name: [*map(counted, each)] if isinstance(each, tuple) else each for name, each in place.traces().items()}


@pytest.mark.parametrize("make", chosen(COPIED, lambda place: hasattr(place, "model")))
def test_the_weights_are_saved_the_same_with_hooks(make: Make) -> None:
    """A state dict has the same keys and values while a hook is on."""
    place = make()
    before = {key: value.clone() for key, value in place.model.state_dict().items()}
    with place.attach(ignore) as handle:
        after = place.model.state_dict()
        handle.remove(quiet=True)
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
