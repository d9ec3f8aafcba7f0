"""Save where random streams are, and set them back there.

`HookManager.fire` wraps a firing in `hook_rng`, everything else that calls hooks uses `kept_rng`, and `Snapshot` takes
`RandomStates`. All three cover the streams of torch on the CPU and on every CUDA device in use, of NumPy, of Python,
and generators that are passed. What hooks draw depends on the seeds of the run, and is different at every firing.

    >>> with kept_rng():
    ...     _ = torch.rand(3)  # the stream goes on after the block as if this had not been
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import random
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch

GENERATOR_TYPES: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""The types that ``generators=`` takes, and that are found on models, loaders and samplers."""
_Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_NUMPY: Final[Any] = np.random  # its annotations leave out the functions that exchange its global stream
_CPU_STREAMS: Final[dict[str, Any]] = {"torch": torch.default_generator, "python": random}


# -- NumPy's store ---------------------------------------------------------------------------------------------------
#
# NumPy's global functions may have a normal number in store, which is gone once they are given another stream. To read
# it with the whole state takes 70 µs, and to copy its 16 bytes 1. Where they lie is checked once, on a generator of our
# own; where they are not found (another Python or NumPy), the whole state is read.

_TWISTER_BYTES: Final = 624 * 4 + 4
"""The bytes of the numbers of a Mersenne twister, and of its position among them."""
_STORE: Final = 16
"""The bytes of NumPy's note whether it has a normal number in store, and of that number."""


def _find_store() -> Any:
    """Return the memory of the normal number that NumPy's global functions have in store; None if it is not found."""
    holder = getattr(np.random.get_state, "__self__", None)
    if sys.implementation.name != "cpython" or type(holder) is not np.random.RandomState:
        return None
    size, number = np.random.RandomState.__basicsize__, 1.234567e-77
    probe = np.random.RandomState(0)
    seen = []
    for has_one in (0, 1):
        probe.set_state({**probe.get_state(legacy=False), "has_gauss": has_one, "gauss": number})
        seen.append(ctypes.string_at(id(probe), size))
    begin = seen[0].find(struct.pack("d", number)) - 8
    expected = [struct.pack("@iid", has_one, 0, number) for has_one in (0, 1)]
    if begin < 0 or [each[begin : begin + _STORE] for each in seen] != expected:
        return None
    return (ctypes.c_char * _STORE).from_address(id(holder) + begin)


_STORED_NORMAL: Final = _find_store()
"""The memory of NumPy's note; None if it is not found."""


# -- keeping streams -------------------------------------------------------------------------------------------------


class _HookStreams:
    """The streams that hooks draw from, of the process."""

    def __init__(self) -> None:
        self.numpy: np.random.MT19937 | None = None
        """The stream of NumPy's global functions inside `kept_rng`; continues from one block to the next."""
        self.base = 0
        """Its seed, made of the seeds of torch and NumPy at the first block of a run."""
        self.num_nested = 0
        """How many more streams were made for blocks inside blocks, which must not move the stream of the outer one."""
        self.in_use: Final[list[Any]] = []
        """The NumPy streams of the blocks that are open, the innermost last."""
        self.outside: tuple[Any, Any] = None, None
        """The run's own stream of NumPy, and the number it has in store, while a block is open."""
        self.marks: Final[dict[str, tuple[int, int]]] = {}
        """For each other stream, the digest of its state in the run when hooks last drew, and how many firings before
        had found it there."""
        self.run_seed: int | None = None
        """The seed of the run, while hooks fire."""


_HOOKS: Final = _HookStreams()


class kept_rng:
    """Set all random streams back, when the block ends, to where they were.

    Recipe::

        with hookline.guard.rng.kept_rng():
            anything()  # may draw from torch, NumPy, Python

    NumPy's global functions draw from a stream of ours meanwhile, which goes on in the next block; the others
    go on from where they are. May be nested.
    """

    __slots__ = ("_generators", "_numpy", "_others", "_states")

    def __init__(self, *, generators: Iterable[_Generator] = ()) -> None:
        self._generators = generators

    def __enter__(self) -> None:
        self._states = _positions()
        self._others = [(generator, state_of(generator)) for generator in self._generators]
        self._numpy = _exchange_numpy()

    def __exit__(self, *exc_info: object) -> None:
        self._put_back(self._states)

    def _put_back(self, states: Mapping[str, Any]) -> None:
        _exchange_numpy_back(*self._numpy)
        for name, state in states.items():
            set_state(_stream(name), state)
        for generator, state in self._others:
            set_state(generator, state)


class hook_rng(kept_rng):
    """Keep all streams for a firing, and let hooks draw other numbers than at the firing before.

    torch and Python go on from where the run is, so that a forward with dropout drops what the next step would. Where
    the run has not drawn since hooks did (a run of full batches never does), those would be the same numbers again:
    then the stream is seeded by where the run is and how often hooks have been there.
    """

    __slots__ = ("_begin", "_outer_seed", "_repeats", "_undone")

    def __init__(self, *, undone: bool = True, generators: Iterable[_Generator] = ()) -> None:
        """Keep all streams; ``undone``: what a hook draws may be taken back before the block ends."""
        self._generators = generators
        self._undone = undone

    def __enter__(self) -> None:
        kept_rng.__enter__(self)
        self._outer_seed = _HOOKS.run_seed
        _HOOKS.run_seed = run_seed()
        self._begin = self._states
        self._repeats: dict[str, int] = {}
        if _HOOKS.marks:
            self._seed_where_hooks_drew(_HOOKS.marks)

    def _seed_where_hooks_drew(self, marks: Mapping[str, tuple[int, int]]) -> None:
        """Seed each stream that is where the hooks of an earlier firing found it, and drew."""
        for name, state in self._states.items():
            mark, repeats = marks.get(name, (None, 0))
            if mark is not None and mark == _digest(state):
                self._repeats[name] = repeats + 1
                stream, seed = _stream(name), _hashed(name, _digest(state), repeats + 1)
                (stream.manual_seed if isinstance(stream, torch.Generator) else stream.seed)(seed)
        if self._repeats and not self._undone:
            self._begin = _positions()

    def __exit__(self, *exc_info: object) -> None:
        drawn = self._states
        if not self._undone:  # a firing that draws nothing changes nothing for the next
            now = _positions()
            drawn = {name: state for name, state in drawn.items() if not _is_same(now[name], self._begin[name])}
        for name, state in drawn.items():  # not in __enter__, since a firing inside has left its own marks
            _HOOKS.marks[name] = _digest(state), self._repeats.get(name, 0)
        _HOOKS.run_seed = self._outer_seed
        self._put_back(self._states if self._repeats else drawn)


class RandomStates:
    """The states of all streams, to go back to any number of times."""

    __slots__ = ("_is_of_hooks", "_numpy", "_others", "_states", "_stream")

    def __init__(self, generators: Iterable[_Generator] = ()) -> None:
        self._states = _positions()
        self._stream, self._numpy = _NUMPY.get_bit_generator(), _numpy_position()
        self._is_of_hooks = any(self._stream is stream for stream in _HOOKS.in_use)
        self._others = [(generator, state_of(generator)) for generator in generators]

    def restore(self, *, own: bool = True) -> None:
        """Set every stream back to where it was.

        Without ``own``, the stream of NumPy that hooks draw from goes on: it is not the run's, and a hook that is
        undone at every firing would draw the same from it for ever.
        """
        for name, state in self._states.items():
            set_state(_stream(name), state)
        for generator, state in self._others:
            set_state(generator, state)
        if _HOOKS.in_use and not self._is_of_hooks:
            # Saved outside of the firing: hooks get its numbers, the run's own stream stays where it is.
            _NUMPY.set_bit_generator(type(self._stream)())
            _set_numpy_position(self._numpy)
            return
        if _NUMPY.get_bit_generator() is not self._stream:
            _NUMPY.set_bit_generator(self._stream)
        if own or not self._is_of_hooks:
            _set_numpy_position(self._numpy)

    def changed(self) -> list[str]:
        """Return the names of the streams that have moved since."""
        now, before = _positions() | {"NumPy": _numpy_position()}, self._states | {"NumPy": self._numpy}
        moved = [name for name, state in now.items() if name not in before or not _is_same(before[name], state)]
        others = [
            f"generator {number} ({type(generator).__name__})"
            for number, (generator, state) in enumerate(self._others)
            if not _is_same(state_of(generator), state)
        ]
        return [*map(_spoken, moved), *others]


def stream_states() -> dict[str, Any]:
    """Return the states of the streams of torch, Python, NumPy and every CUDA device in use, by name."""
    return {_spoken(name): state for name, state in (_positions() | {"NumPy": numpy_state()}).items()}


def run_seed() -> int:
    """Return the seed that the run has given torch, also while hooks draw from other streams."""
    return torch.default_generator.initial_seed() if _HOOKS.run_seed is None else _HOOKS.run_seed


def hook_stream() -> dict[str, Any]:
    """Return the states of the streams of hooks, for a checkpoint; plain values."""
    return {
        "numpy": None if _HOOKS.numpy is None else _HOOKS.numpy.state,
        "base": _HOOKS.base,
        "others": _HOOKS.num_nested,
        "marks": {name: list(mark) for name, mark in _HOOKS.marks.items()},
    }


def set_hook_stream(state: Mapping[str, Any]) -> None:
    """Set the streams of hooks to a ``state`` that `hook_stream` returned."""
    _HOOKS.numpy, _HOOKS.num_nested, _HOOKS.base = None, state["others"], state.get("base", 0)
    _HOOKS.marks.clear()
    _HOOKS.marks.update({name: (mark, repeats) for name, (mark, repeats) in state.get("marks", {}).items()})
    if state["numpy"] is not None:
        _HOOKS.numpy = np.random.MT19937(0)
        _HOOKS.numpy.state = state["numpy"]


def restart_hook_stream() -> None:
    """Restart the streams of hooks for another run, so that equal runs in one process draw the same."""
    if not _HOOKS.in_use:  # a hook that trains a run of its own draws on
        set_hook_stream({"numpy": None, "others": 0})


def _stream(name: str) -> Any:
    """Return the stream of torch, Python or a CUDA device."""
    return _CPU_STREAMS[name] if name in _CPU_STREAMS else torch.cuda.default_generators[int(name[len("cuda:") :])]


def _spoken(name: str) -> str:
    return f"random stream of {'Python' if name == 'python' else name}"


def _digest(state: Any) -> int:
    """Return a number for a state of torch or Python, the same in every process."""
    return zlib.crc32(state.numpy().data) if isinstance(state, torch.Tensor) else hash(state[1])


def _hashed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


# -- CUDA ----------------------------------------------------------------------------------------------------------


def cuda_states() -> list[torch.Tensor] | None:
    """Return the state of every device, without waiting for it; None where CUDA is not in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return [generator.get_state() for generator in torch.cuda.default_generators]


def set_cuda_states(states: Iterable[torch.Tensor]) -> None:
    """Set the stream of every device."""
    for generator, state in zip(torch.cuda.default_generators, states, strict=False):
        generator.set_state(state)


# -- NumPy ---------------------------------------------------------------------------------------------------------


def _exchange_numpy() -> tuple[Any, Any, Any]:
    """Let NumPy draw from a stream of ours; return that, its own, and the second number of a pair, which it forgets."""
    own = _NUMPY.get_bit_generator()
    stored = numpy_state() if _STORED_NORMAL is None else _STORED_NORMAL.raw
    if _HOOKS.numpy is None:
        _HOOKS.base = _hashed(torch.initial_seed(), pickle.dumps(own.state))
        _HOOKS.numpy = np.random.MT19937(_HOOKS.base)
    ours = _HOOKS.numpy
    if type(own) is not np.random.MT19937 or own is ours:
        _HOOKS.num_nested += 1
        ours = np.random.MT19937(_hashed(_HOOKS.base, _HOOKS.num_nested))
    _NUMPY.set_bit_generator(ours)
    if not _HOOKS.in_use:
        _HOOKS.outside = own, stored
    _HOOKS.in_use.append(ours)
    return ours, own, stored


def _exchange_numpy_back(ours: Any, own: Any, stored: Any) -> None:
    is_innermost = _HOOKS.in_use[-1] is ours
    _HOOKS.in_use.remove(ours)
    if not is_innermost:
        return  # NumPy has one stream for all threads: the block that another thread began later puts it back
    if not _HOOKS.in_use:
        own, stored = _HOOKS.outside  # what was there when this block began may be the stream of one that has ended
    _NUMPY.set_bit_generator(own)
    if _STORED_NORMAL is None:
        _set_numpy(stored)
    else:
        _STORED_NORMAL.raw = stored


def numpy_state() -> Any:
    """Return the state of NumPy's global stream."""
    return np.random.get_state(legacy=False)


def set_numpy_state(state: Any) -> None:
    """Set NumPy's global stream, also if it is a stream of another kind now."""
    kind = state["bit_generator"]
    if _NUMPY.get_bit_generator().state["bit_generator"] != kind:
        _NUMPY.set_bit_generator(getattr(np.random, kind)())
    _set_numpy(state)


def _set_numpy(state: Any) -> None:
    if state["bit_generator"] == "MT19937":
        np.random.set_state(state)
    else:
        _NUMPY.get_bit_generator().state = state


def _numpy_position() -> Any:
    """Return where NumPy is, and its store: of a Mersenne twister as bytes, in 1 µs and not 70, else the state."""
    stream = _NUMPY.get_bit_generator()
    if _STORED_NORMAL is None or type(stream) is not np.random.MT19937:
        return numpy_state()
    with stream.lock:
        return ctypes.string_at(stream.ctypes.state_address, _TWISTER_BYTES), _STORED_NORMAL.raw


def _set_numpy_position(position: Any) -> None:
    """Set the stream that NumPy's global functions draw from now, which is of the same kind."""
    if not isinstance(position, tuple):
        _set_numpy(position)
        return
    stream = _NUMPY.get_bit_generator()
    with stream.lock:
        (ctypes.c_char * _TWISTER_BYTES).from_address(stream.ctypes.state_address).raw, _STORED_NORMAL.raw = position


# -- generators ----------------------------------------------------------------------------------------------------


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


def _positions() -> dict[str, Any]:
    """Return where the streams of torch, Python and every CUDA device in use are; to ask begins to use none."""
    found = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
    return found | {f"cuda:{index}": state for index, state in enumerate(cuda_states() or ())}


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is tuple or type(one) is not type(other):
        return bool(one == other)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
