"""What every kind of site promises about removal: at once, whoever asks and whenever, and nothing is left."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
from helpers_sites import CALL, SITES, VARIANTS, Place, chosen, ignore, noting

Make = Callable[[], Place]
SEVERAL = chosen(VARIANTS, lambda place: not place.single)
FOUND = chosen(
    VARIANTS, lambda place: not (place.process_wide and place.kind not in CALL) and place.attached() is not None
)
IN_BACKWARD = chosen(VARIANTS, lambda place: place.in_backward)
WITH_FOREIGN = chosen(SITES, lambda place: type(place).foreign is not Place.foreign)


@pytest.mark.parametrize("make", SEVERAL)
def test_hooks_are_removed_one_by_one(make: Make) -> None:
    """(1,1,1), (2,1,2), (2,1,3), (2,1,3); removing twice is harmless, also to a hook that came in between."""
    place, counts = make(), [0, 0, 0]
    before = place.traces()

    def counter(index: int) -> Callable[..., None]:
        def hook(*args: object, **kwargs: object) -> None:
            counts[index] += 1

        return hook

    def step() -> list[int]:
        place.run()
        return counts

    handles = [place.attach(counter(index)) for index in range(3)]
    assert step() == [1, 1, 1]
    handles[1].remove()
    assert step() == [2, 1, 2]
    handles[0].remove()
    with place.attach(ignore) as between:
        handles[0].remove()
        handles[1].remove()
        assert step() == [2, 1, 3]
        assert between.report().fired == 1
    handles[2].remove()
    assert step() == [2, 1, 3]
    assert [handle.removed for handle in handles] == [True] * 3
    assert place.traces() == before


@pytest.mark.parametrize("make", SEVERAL)
def test_a_with_block_takes_the_hook_off_however_it_ends(make: Make) -> None:
    """The handle is what ``as`` gives; an error goes on as it is; a removal inside of the block is harmless."""
    place, log = make(), []
    before = place.traces()
    handle = place.attach(noting(log, "x"))
    with handle as entered:
        assert entered is handle
        assert not handle.removed
        place.run()
    assert handle.removed
    for error in (ValueError("mine"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()):
        with pytest.raises(type(error)) as caught, place.attach(ignore):
            raise error
        assert caught.value is error
        assert place.traces() == before
    with place.attach(ignore) as handle:
        handle.remove(quiet=True)
    place.run()
    assert log == ["x"]
    assert place.traces() == before


@pytest.mark.parametrize("make", FOUND)
def test_letting_go_of_the_handle_keeps_the_hook(make: Make) -> None:
    """As in torch, it lives with the place; `attached` finds an equal handle, which takes it off."""
    place, log = make(), []
    before = place.traces()
    name = hash(place.attach(noting(log, "x")))
    gc.collect()
    place.run()
    assert log == ["x"]
    (found,) = place.attached()
    assert hash(found) == name
    (again,) = place.attached()
    assert found == again
    with place.attach(ignore) as other:
        assert found != other
        place.run()
    found.remove()
    assert again.removed
    assert place.traces() == before


@pytest.mark.parametrize("observe", [False, True], ids=["hook", "observer"])
@pytest.mark.parametrize("make", IN_BACKWARD)
def test_removal_between_forward_and_backward_is_immediate(make: Make, observe: bool) -> None:
    """The neighbour stays; a hook that comes then takes part from the next call on, on a tensor from now on."""
    place, log = make(), []
    options = {"observe": True} if observe and place.edits else {}
    before = place.traces()
    gone = place.attach(noting(log, "gone"), **options)
    kept = place.attach(noting(log, "kept"), **options)
    finish = place.begin()
    gone.remove(quiet=True)
    late = place.attach(noting(log, "late"), **options)
    finish()
    assert log == (["kept", "late"] if place.late else ["kept"])
    log.clear()
    place.run()
    assert log == ["kept", "late"]
    finish = place.begin()
    kept.remove()
    late.remove()
    assert place.traces() == before
    finish()
    assert log == ["kept", "late"]
    assert place.traces() == before


@pytest.mark.parametrize("make", WITH_FOREIGN)
def test_hooks_of_others_run_and_stay(make: Make) -> None:
    """Before ours and behind them, each once; only our own come off."""
    place, log = make(), []
    theirs = [place.foreign(noting(log, "theirs"))]
    ours = [place.attach(noting(log, "ours")) for _ in range(2)]
    theirs.append(place.foreign(noting(log, "theirs")))
    place.run()
    assert sorted(log) == ["ours"] * 2 + ["theirs"] * 2
    for handle in ours:
        handle.remove()
    log.clear()
    place.run()
    assert log == ["theirs"] * 2
    for handle in theirs:
        handle.remove()
    log.clear()
    place.run()
    assert log == []


@pytest.mark.parametrize("alone", [False, True], ids=["in-company", "alone"])
@pytest.mark.parametrize("make", WITH_FOREIGN)
def test_a_hook_may_remove_itself_among_hooks_of_others(make: Make, alone: bool) -> None:
    """torch walks some of its dictionaries live and fails if they change; ours go at once, or with the next change."""
    place, log = make(), []
    before = place.traces()
    theirs = [place.foreign(noting(log, "theirs"))]

    def leave(*args: object, **kwargs: object) -> None:
        log.append("leaves")
        handle.remove()

    others = [] if alone else [place.attach(noting(log, "first"))]
    handle = place.attach(leave)
    others += [] if alone else [place.attach(noting(log, "last"))]
    theirs.append(place.foreign(noting(log, "theirs")))
    place.run()
    ours = [text for text in log if text != "theirs"]
    assert ours == (["leaves"] if alone else ["first", "leaves", "last"])
    assert log.count("theirs") == 2
    log.clear()
    place.run()
    assert sorted(log) == sorted(["theirs"] * 2 + ([] if alone else ["first", "last"]))
    for one in (*others, *theirs):
        one.remove()
    place.settle()
    after = place.traces()
    if "0" in after:  # torch never takes its flag for full backward hooks back
        before = {name: value[:1] + value[2:] if name == "0" else value for name, value in before.items()}
        after["0"] = after["0"][:1] + after["0"][2:]
    assert after == before


@pytest.mark.parametrize("make", SEVERAL)
def test_a_hook_may_be_removed_in_another_thread(make: Make) -> None:
    """It is off everywhere once remove() has returned, also if two threads call it at once."""
    place, log = make(), []
    before = place.traces()
    for _ in range(5):
        handle = place.attach(noting(log, "x"))
        threads = [threading.Thread(target=handle.remove) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        place.run()
        assert log == []
        place.attach(ignore).remove(quiet=True)  # a mode of torch's on this thread's stack goes with the next change
        assert place.traces() == before
