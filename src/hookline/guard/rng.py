"""Save where random streams are, and set them back there.

`HookManager.fire` wraps a firing in `hook_rng`, everything else that calls hooks uses `kept_rng`, and `Snapshot` takes
`RandomStates`. All three cover the streams of torch on the CPU and on every CUDA device in use, of NumPy, of Python,
and generators that are passed.

    >>> with kept_rng():
    ...     _ = torch.rand(3)  # the stream goes on after the block as if this had not been
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import torch

__all__ = [
    "GENERATOR_TYPES", "RandomStates", "cuda_states", "hook_rng", "hook_stream", "kept_rng", "numpy_state",
    "restart_hook_stream", "run_seed", "set_cuda_states", "set_hook_stream", "set_numpy_state", "set_state",
    "state_of", "stream_states",
]  # fmt: skip

GENERATOR_TYPES: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""The types that ``generators=`` takes, and that are found on models, loaders and samplers."""
_Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_NUMPY: Final[Any] = np.random  # its annotations leave out the functions that exchange its global stream


class RandomStates:
    """The states of all streams, to go back to any number of times."""

    def __init__(self, generators: Iterable[_Generator] = ()) -> None:
        self._streams = _streams()
        """The streams of torch, Python and CUDA, each with its state, by name."""
        self._numpy = _NUMPY.get_bit_generator(), numpy_state()
        self._others = [(generator, state_of(generator)) for generator in generators]

    def restore(self) -> list[str]:
        """Set every stream back to where it was, and return the names of those that had moved."""
        changed = self.changed()
        for stream, state in (*self._streams.values(), *self._others):
            set_state(stream, state)
        stream, state = self._numpy
        if _NUMPY.get_bit_generator() is not stream or _spoken("NumPy") in changed:  # to set it takes 0.1 ms
            _NUMPY.set_bit_generator(stream)
            set_numpy_state(state)
        return changed

    def changed(self) -> list[str]:
        """Return the names of the streams that have moved since."""
        before = self._streams | {"NumPy": self._numpy}
        now = _streams() | {"NumPy": (_NUMPY.get_bit_generator(), numpy_state())}
        names = [_spoken(name) for name in now if name not in before or not _is_same(now[name][1], before[name][1])]
        return names + [
            f"generator {number} ({type(generator).__name__})"
            for number, (generator, state) in enumerate(self._others)
            if not _is_same(state_of(generator), state)
        ]


@contextmanager
def kept_rng(generators: Iterable[_Generator] = ()) -> Iterator[None]:
    """Set all random streams back, when the block ends, to where they were; what is drawn in it goes on from there."""
    states = RandomStates(generators)
    try:
        yield
    finally:
        states.restore()


# -- what hooks draw -------------------------------------------------------------------------------------------------


class _HookStreams:
    """Seeds for what hooks draw, of the process: the firings of a run are counted."""

    def __init__(self) -> None:
        self.base: int | None = None
        """Made of where torch, NumPy and Python are at the first firing of a run."""
        self.num_firings = 0
        self.num_open = 0
        """How many firings are under way, one in the other."""
        self.run_seed: int | None = None
        """The seed of the run, while hooks fire."""


_HOOKS: Final = _HookStreams()


@contextmanager
def hook_rng(generators: Iterable[_Generator] = ()) -> Iterator[None]:
    """Keep all streams for a firing, and let hooks draw other numbers than at the firings before.

    The streams of torch, NumPy and Python are seeded by where the run was at its first firing, and by how many firings
    there have been: equal runs draw equal numbers, also where the run itself draws none between two firings.
    """
    outer_seed = _HOOKS.run_seed
    with kept_rng(generators):
        _HOOKS.run_seed = run_seed()
        _HOOKS.num_open += 1
        try:
            _seed_for_hooks()
            yield
        finally:
            _HOOKS.num_open -= 1
            _HOOKS.run_seed = outer_seed


def _seed_for_hooks() -> None:
    if _HOOKS.base is None:
        numbers = numpy_state()["state"]
        seeded_by = torch.initial_seed(), random.getstate(), {name: _plain(value) for name, value in numbers.items()}
        _HOOKS.base = _hashed(seeded_by)
    _HOOKS.num_firings += 1
    seed = _hashed((_HOOKS.base, _HOOKS.num_firings))
    random.seed(seed)
    _NUMPY.set_bit_generator(_LENT)  # the run's own stays as it is
    np.random.seed(seed % 2**32)
    for generator in (torch.default_generator, *_cuda_generators()):
        generator.manual_seed(seed)


_LENT: Final = np.random.MT19937(0)
"""What NumPy's global functions draw from in a firing."""


def run_seed() -> int:
    """Return the seed that the run has given torch, also while hooks draw from other streams."""
    return torch.default_generator.initial_seed() if _HOOKS.run_seed is None else _HOOKS.run_seed


def hook_stream() -> dict[str, Any]:
    """Return where the streams of hooks are, for a checkpoint; plain values."""
    return {"base": _HOOKS.base, "firings": _HOOKS.num_firings}


def set_hook_stream(state: Mapping[str, Any]) -> None:
    """Set the streams of hooks to a ``state`` that `hook_stream` returned."""
    _HOOKS.base, _HOOKS.num_firings = state["base"], state["firings"]


def restart_hook_stream() -> None:
    """Restart the streams of hooks for another run, so that equal runs in one process draw the same."""
    if not _HOOKS.num_open:  # a hook that trains a run of its own draws on
        _HOOKS.base, _HOOKS.num_firings = None, 0


def _hashed(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little")


def _plain(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.ndarray) else value


# -- streams and generators ------------------------------------------------------------------------------------------


def stream_states() -> dict[str, Any]:
    """Return the states of the streams of torch, Python, NumPy and every CUDA device in use, by name."""
    states = {name: state for name, (_, state) in _streams().items()} | {"NumPy": numpy_state()}
    return {_spoken(name): state for name, state in states.items()}


def _streams() -> dict[str, tuple[Any, Any]]:
    """Return the streams of torch, Python and every CUDA device in use with their states; to ask begins to use none."""
    cuda = {f"cuda:{index}": generator for index, generator in enumerate(_cuda_generators())}
    named = {"torch": torch.default_generator, "Python": random, **cuda}
    return {name: (stream, state_of(stream)) for name, stream in named.items()}


def _spoken(name: str) -> str:
    return f"random stream of {name}"


def _cuda_generators() -> Iterable[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]


def cuda_states() -> list[torch.Tensor] | None:
    """Return the state of every device, without waiting for it; None where CUDA is not in use."""
    return [generator.get_state() for generator in _cuda_generators()] or None


def set_cuda_states(states: Iterable[torch.Tensor]) -> None:
    """Set the stream of every device."""
    for generator, state in zip(torch.cuda.default_generators, states, strict=False):
        generator.set_state(state)


def numpy_state() -> Any:
    """Return the state of NumPy's global stream."""
    return np.random.get_state(legacy=False)


def set_numpy_state(state: Any) -> None:
    """Set NumPy's global stream, also if it is a stream of another kind now."""
    kind = state["bit_generator"]
    if type(_NUMPY.get_bit_generator()).__name__ != kind:
        _NUMPY.set_bit_generator(getattr(np.random, kind)())
    if kind == "MT19937":
        np.random.set_state(state)
    else:
        _NUMPY.get_bit_generator().state = state


def state_of(generator: Any) -> Any:
    """Return the state of a generator, or of the module ``random``."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator, or of the module ``random``."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)
