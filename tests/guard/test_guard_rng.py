"""Random streams: each stands where it stood, whatever was drawn, also half a pair of normal numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hookline.guard import rng
from hookline.guard.rng import RandomStates, kept_rng


def _draw_all(generators=()) -> list[float]:
    drawn = [torch.rand(1).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]
    return drawn + [_draw(generator) for generator in generators]


def _draw(generator) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return generator.random_sample() if isinstance(generator, np.random.RandomState) else generator.random()


def _generators():
    return [torch.Generator().manual_seed(1), np.random.default_rng(1), np.random.RandomState(1), random.Random(1)]


def _seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def by_verbs(monkeypatch):
    """As where the memory of the streams is not found."""

    monkeypatch.setattr(rng, "_STORED_NORMAL", None)


@pytest.mark.parametrize("normals", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["kept", "states"])
@pytest.mark.parametrize("memory", [True, False])
def test_all_streams_go_on_as_if_nothing_had_been_drawn(normals, way, memory, request):
    """Also where NumPy and Python have the second normal number of a pair in store."""
    if not memory:
        request.getfixturevalue("by_verbs")
    expected = []
    for drawing in (False, True):
        _seed()
        np.random.standard_normal(normals)
        for _ in range(normals):
            random.gauss(0, 1)
        generators = _generators()
        if way == "kept":
            with kept_rng(generators=generators):
                if drawing:
                    _draw_all(generators)
        else:
            states = RandomStates(generators)
            if drawing:
                _draw_all(generators)
            states.restore()
        expected.append([_draw_all(generators) for _ in range(3)])
    assert expected[0] == expected[1]


def test_blocks_in_blocks_keep_each_others_streams():
    """The outer one goes on from where it stood when the inner began."""
    _seed()
    with kept_rng():
        np.random.rand()
        state = np.random.get_state()[1:]
        with kept_rng():
            _draw_all()
        again = np.random.get_state()[1:]
        assert all(np.array_equal(a, b) for a, b in zip(state, again, strict=True))


@pytest.mark.parametrize("memory", [True, False])
def test_another_bit_generator_of_numpy_is_put_back(memory, request):
    """Whoever has exchanged it: the user before, or the block."""
    if not memory:
        request.getfixturevalue("by_verbs")
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        mine, state = np.random.get_bit_generator(), np.random.get_bit_generator().state
        with kept_rng():
            np.random.rand(3)
        states = RandomStates()
        np.random.set_bit_generator(np.random.MT19937(1))
        np.random.rand(3)
        assert "random stream of NumPy" in states.changed()
        states.restore()
        assert np.random.get_bit_generator() is mine
        assert mine.state == state
    finally:
        np.random.set_bit_generator(own)


def test_blocks_of_two_threads_that_overlap_leave_numpy_its_stream():
    """The first ends in the middle of the second."""
    np.random.seed(3)
    expected = np.random.rand(2).tolist()
    np.random.seed(3)
    stream = np.random.get_bit_generator()
    first, second = kept_rng(), kept_rng()
    first.__enter__()
    second.__enter__()  # a thread of its own would do the same: NumPy has one stream for all
    first.__exit__(None, None, None)
    np.random.rand()
    second.__exit__(None, None, None)
    assert np.random.get_bit_generator() is stream
    assert np.random.rand(2).tolist() == expected


def test_the_stream_of_a_device_that_was_not_in_use_has_not_moved(monkeypatch):
    """So no receipt says that it was put back: it was nowhere before. A generator of the CPU stands for CUDA's."""
    states = RandomStates()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    assert states.changed() == []
