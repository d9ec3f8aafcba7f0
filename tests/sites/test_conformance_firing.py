"""What every kind of site promises about firing: once per event, in order, observers unheard, errors as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_sites import SITES, VARIANTS, Place, chosen, ignore, noting
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import hookline as hl

Make = Callable[[], Place]
SEVERAL = chosen(VARIANTS, lambda place: not place.single)
OBSERVED = chosen(VARIANTS, lambda place: place.edits and not place.single)
UNHEARD = chosen(VARIANTS, lambda place: place.ignores_returns and not place.single)
KINDS = ["forward_pre", "forward", "backward_pre", "backward", "full_backward"]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Say whether two runs gave the same bits."""
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("make", VARIANTS)
def test_a_hook_fires_once_per_event_until_it_is_removed(make: Make) -> None:
    """The receipt counts with it, and the handle is one of torch's."""
    place, log = make(), []
    before = place.traces()
    handle = place.attach(noting(log, "x"), name="mine")
    assert isinstance(handle, hl.HookHandle)
    assert isinstance(handle, RemovableHandle)
    assert (handle.report().name, handle.report().fired) == ("mine", 0)
    for count in (1, 2):
        place.run()
        assert len(log) == handle.report().fired == count
    report = handle.report()
    assert report.kind.removeprefix("node_") == place.kind
    assert place.process_wide or (report.matched, report.attached) == (1, 1)
    handle.remove()
    assert handle.removed
    place.run()
    assert len(log) == handle.report().fired == 2
    assert handle.report().attached == 0
    assert place.traces() == before


@pytest.mark.parametrize("make", SEVERAL)
def test_hooks_run_in_the_order_they_came_and_prepended_ones_first(make: Make) -> None:
    """The last to be prepended is the very first."""
    place, log = make(), []
    labels = [("a", {}), ("b", {"prepend": True}), ("c", {"prepend": True}), ("d", {})]
    handles = [place.attach(noting(log, text), **options) for text, options in labels if place.prepends or not options]
    place.run()
    hl.HandleSet(handles).remove()
    assert "".join(log) == ("cbad" if place.prepends else "ad")


@pytest.mark.parametrize("make", chosen(OBSERVED, lambda place: not place.ignores_returns))
def test_edits_come_first_then_observers(make: Make) -> None:
    """However they were attached; prepending counts inside each order group only."""
    place, log = make(), []
    order = [
        ("observer", {"observe": True}),
        ("edit", {}),
        ("observer first", {"observe": True, "prepend": True}),
        ("edit first", {"prepend": True}),
    ]
    if not place.prepends:
        order = order[:2]
    handles = [place.attach(noting(log, text), **options) for text, options in order]
    place.run()
    hl.HandleSet(handles).remove()
    wanted = ["edit first", "edit", "observer first", "observer"]
    assert log == [text for text in wanted if text in dict(order)]


@pytest.mark.parametrize("make", OBSERVED)
def test_what_an_observer_returns_is_ignored(make: Make) -> None:
    """Outputs, gradients and what is stored are the same to the last bit."""
    plain = make().run()
    place, fired = make(), []
    with place.attach(lambda *args, **kwargs: fired.append(1) or "junk", observe=True):
        hooked = place.run()
    assert fired == [1]
    assert same(hooked, plain)


@pytest.mark.parametrize("make", UNHEARD)
def test_what_a_hook_returns_is_ignored_where_there_is_nothing_to_replace(make: Make) -> None:
    """torch raises for most of these."""
    place, fired = make(), []
    with place.attach(lambda *args, **kwargs: fired.append(1) or "junk"):
        hooked = place.run()
    assert fired == [1]
    assert same(hooked, make().run())


@pytest.mark.parametrize("everywhere_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_every_module_run_before_those_on_one(kind: str, everywhere_first: bool) -> None:
    """Whoever came first; prepended ones first among their own."""
    model, log = nn.Sequential(nn.Linear(2, 2)), []
    own = [
        lambda: hl.attach(model, "0", noting(log, "first"), on=kind),
        lambda: hl.attach(model, "0", noting(log, "second"), on=kind),
        lambda: hl.attach(model, "0", noting(log, "prepended"), on=kind, prepend=True),
    ]
    wide = [
        lambda: hl.attach_everywhere(noting(log, "wide"), on=kind),
        lambda: hl.attach_everywhere(noting(log, "wide, prepended"), on=kind, prepend=True),
    ]
    with hl.HandleSet([attach() for attach in ([*wide, *own] if everywhere_first else [*own, *wide])]):
        model[0](torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert log == ["wide, prepended", "wide", "prepended", "first", "second"]


@pytest.mark.parametrize("make", chosen(VARIANTS, lambda place: not place.process_wide))
def test_a_hook_that_declares_site_is_told_its_kind_and_name(make: Make) -> None:
    """And the hook beside it that does not, is not."""
    place, sites = make(), []

    def hook(*args: object, site: Any) -> None:
        sites.append(site)

    with place.attach(hook), place.attach(ignore) as plain:
        place.run()
    assert plain.report().fired == 1
    ((site,),) = [sites]
    assert site.kind.value.removeprefix("node_") == place.kind
    assert site.name in plain.names


@pytest.mark.parametrize("make", VARIANTS)
def test_an_error_in_a_hook_comes_out_as_it_is_and_the_next_event_fires_again(make: Make) -> None:
    """Nothing is stuck, nothing is left."""
    place, calls, error = make(), [], ValueError("mine")
    before = place.traces()

    def hook(*args: object, **kwargs: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise error

    handle = place.attach(hook)
    with pytest.raises(ValueError, match="mine") as caught:
        place.run()
    assert caught.value is error
    place.run()
    assert len(calls) == 2
    handle.remove()
    place.run()
    assert len(calls) == 2
    assert place.traces() == before


@pytest.mark.parametrize("make", chosen(VARIANTS, lambda place: not place.of_one_thread))
def test_an_event_in_another_thread_fires_there(make: Make) -> None:
    """Hooks belong to the place, not to the thread that put them on."""
    place, threads = make(), []
    with place.attach(lambda *args, **kwargs: threads.append(threading.current_thread())):
        thread = threading.Thread(target=place.run)
        thread.start()
        thread.join()
    assert threads == [thread]


@pytest.mark.parametrize("make", SITES)
def test_a_wrong_request_is_refused_before_anything_is_attached(make: Make) -> None:
    """A kind that there is not, a hook that cannot be called, or not so, and an option that does not go with it."""
    place = make()
    before = place.traces()
    if not place.single:
        with pytest.raises(hl.errors.KindError, match="No kind 'nonsense'"):
            place.attach(ignore, on="nonsense")
        with pytest.raises(hl.errors.HookSignatureError, match=r"^A hook has to be callable, got 3\.\n"):
            place.attach(3)
        with pytest.raises(hl.errors.HookSignatureError, match=r"called as hook\("):
            place.attach(lambda: None)
        if not place.edits:
            with pytest.raises(hl.errors.OptionError, match=f"observe= does not go with on='{place.kind}'"):
                place.attach(ignore, observe=True)
    assert place.traces() == before
    place.run()
