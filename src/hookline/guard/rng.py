"""Save where random streams are, and set them back there.

``HookManager.fire`` wraps a firing in `hook_rng`, unless each hook that is due promises to draw nothing. What calls or
makes hooks elsewhere (lifecycle/manager.py, lifecycle/managed_hooks.py, ``analyses``, runs/build.py), the audit and
guard/loaders.py use `kept_rng`. `Snapshot`, the audit, ``check_hook``, ``find_bad_operations``, training/run.py and
training/state.py take `RandomStates`. guard/digest.py and guard/loaders.py read `stream_states` and `run_seed`.
Checkpoints (training/state.py) save each stream, and the marks of `hook_stream`.

All of these cover the streams of torch on the CPU and on every CUDA device in use, of NumPy, of Python, and generators
that are passed. What hooks draw depends on where the run is, and differs from firing to firing.

To add a stream: a row of `_HOST_STREAMS`; a branch of `_digest` if its state is no tensor; a line each in ``streams``
and ``set_streams`` of training/state.py; a line in ``seed_everything`` of runs/find.py; its name in docs/guard.md. To
add a type of generator: `GENERATOR_TYPES`, `state_of` and `set_state`. Tests: tests/guard/test_guard_rng.py and
tests/guard/test_hook_streams.py.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

GENERATOR_TYPES: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""The types that ``generators=`` takes, and that are found on models, loaders and samplers."""
_Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_NUMPY: Final[Any] = np.random  # its annotations leave out the functions that exchange its global stream


# -- NumPy's store ---------------------------------------------------------------------------------------------------
#
# NumPy makes normal numbers in pairs, and its global functions may have the second one in store. It is lost when they
# are given another stream. To read it with the whole state takes 70 µs, and to copy its 16 bytes takes 1. Where these
# bytes are is found once, on a generator of our own. If they are not found (another Python or NumPy), the whole state
# is read each time.

_Twister: Final = ctypes.c_char * (624 * 4 + 4)
"""The numbers of a Mersenne twister, and its position among them. Made once: a type is garbage that only gc frees."""
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


_MARKS: Final[dict[str, tuple[int, int]]] = {}
"""For each stream, the digest of its state in the run when hooks last drew, and how many firings before had found it
there. All firings of the process share it."""
_RUN_SEEDS: Final[list[int]] = []
"""The seed of the run, for each firing that has begun: `hook_rng` may have given torch another."""


class RandomStates:
    """The states of all streams, to go back to any number of times."""

    def __init__(self, generators: Iterable[_Generator] = ()) -> None:
        self.streams = _positions()
        """Where torch, Python, NumPy and every CUDA device in use are."""
        self._others = [(generator, state_of(generator)) for generator in generators]

    def restore(self, streams: Iterable[str] | None = None) -> None:
        """Set every stream back to where it was; of the global ones those of these names, by default all."""
        verbs = _streams()
        for name in self.streams if streams is None else streams:
            verbs[name][1](self.streams[name])
        for generator, state in self._others:
            set_state(generator, state)

    def changed(self) -> list[str]:
        """Return the names of the streams that have moved since; not of a device that was not in use then."""
        now = _positions()
        moved = [name for name, state in self.streams.items() if not _is_same(state, now[name])]
        others = [
            f"generator {number} ({type(generator).__name__})"
            for number, (generator, state) in enumerate(self._others)
            if not _is_same(state_of(generator), state)
        ]
        return [*map(_spoken, moved), *others]


class kept_rng:
    """Set all random streams back, when the block ends, to where they were.

    Recipe::

        with hookline.guard.rng.kept_rng():
            anything()  # may draw from torch, NumPy, Python

    The block draws what the run would have drawn. May be nested.
    """

    # A class: Ctrl-C at the end of a generator's block leaves its ``finally`` to the collector, in another run perhaps.
    def __init__(self, *, generators: Iterable[_Generator] = ()) -> None:
        self._generators = generators

    def __enter__(self) -> None:
        self._before = RandomStates(self._generators)

    def __exit__(self, *exc_info: object) -> None:
        self._before.restore()


class hook_rng(kept_rng):
    """Keep all streams for a firing, and let hooks draw other numbers than at the firing before.

    A stream goes on from where the run is, so that a forward with dropout drops what the next step would. If the run
    has not drawn from it since hooks did (most runs draw nothing from NumPy), hooks would get the same numbers again.
    Then the stream is seeded by its state and by how many firings have found it in that state.

    ``undone``: the firing has interventions. The guard sets streams back after each, so that at the end of the block
    nobody can see which streams were drawn from: all count as drawn.
    """

    def __init__(self, *, undone: bool = True, generators: Iterable[_Generator] = ()) -> None:
        super().__init__(generators=generators)
        self._undone = undone

    def __enter__(self) -> None:
        super().__enter__()
        seed, self._repeats = run_seed(), dict[str, int]()
        for name, state in self._before.streams.items():
            mark, earlier = _MARKS.get(name, (None, 0))
            if mark is not None and mark == _digest(state):  # hooks of an earlier firing found it here, and drew
                self._repeats[name] = earlier + 1
                _streams()[name][2](_hashed(name, mark, earlier + 1))
        self._begin = _positions() if self._repeats and not self._undone else self._before.streams
        _RUN_SEEDS.append(seed)

    def __exit__(self, *exc_info: object) -> None:
        _RUN_SEEDS.pop()
        drawn = self._before.streams
        if not self._undone:  # a firing that draws nothing changes nothing for the next
            now = _positions()
            drawn = {name: state for name, state in drawn.items() if not _is_same(now[name], self._begin[name])}
        for name, state in drawn.items():  # not before the block, since a firing inside has left its own marks
            _MARKS[name] = _digest(state), self._repeats.get(name, 0)
        self._before.restore(drawn.keys() | self._repeats.keys())


def stream_states() -> dict[str, Any]:
    """Return the states of the streams of torch, Python, NumPy and every CUDA device in use, by name in messages.

    For comparisons (`guard.digest`), not to be set again: NumPy's is the whole state, without addresses.
    """
    return {_spoken(name): state for name, state in {**_positions(), "NumPy": numpy_state()}.items()}


def run_seed() -> int:
    """Return the seed that the run has given torch, also while hooks draw from others; loaders' seeds begin with it."""
    return _RUN_SEEDS[-1] if _RUN_SEEDS else torch.default_generator.initial_seed()


def hook_stream() -> dict[str, list[int]]:
    """Return the marks of the streams of hooks, for a checkpoint; plain values."""
    return {name: list(mark) for name, mark in _MARKS.items()}


def set_hook_stream(marks: Mapping[str, Sequence[int]]) -> None:
    """Set the ``marks`` that `hook_stream` returned."""
    _MARKS.clear()
    _MARKS.update({name: (mark, repeats) for name, (mark, repeats) in marks.items()})


def restart_hook_stream() -> None:
    """Forget the firings of another run, so that equal runs in one process draw the same.

    `HookManager.reset_all` and the audit call this.
    """
    if not _RUN_SEEDS:  # a hook that trains a run of its own draws on
        _MARKS.clear()


def _spoken(name: str) -> str:
    """Return the name of a stream in messages; first_bad/replay_check.py knows it by its beginning."""
    return f"random stream of {'Python' if name == 'python' else name}"


def _digest(state: Any) -> int:
    """Return a number for where a stream is, the same in every process."""
    if isinstance(state, torch.Tensor):
        return zlib.crc32(state.numpy().data)
    return zlib.crc32(state[1]) if isinstance(state[1], bytes) else hash(state[1])  # of NumPy, of Python


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


def numpy_state() -> Any:
    """Return the state of NumPy's global stream."""
    return np.random.get_state(legacy=False)


def set_numpy_state(state: Any) -> None:
    """Set NumPy's global stream, also if it is a stream of another kind now."""
    kind = state["bit_generator"]
    if _NUMPY.get_bit_generator().state["bit_generator"] != kind:
        _NUMPY.set_bit_generator(getattr(np.random, kind)())
    if kind == "MT19937":
        np.random.set_state(state)
    else:
        _NUMPY.get_bit_generator().state = state


def _numpy_position() -> tuple[Any, bytes, bytes]:
    """Return NumPy's stream, its state, and what it has in store.

    The state of a Mersenne twister is its bytes in memory; that of another stream is pickled.
    """
    stream = _NUMPY.get_bit_generator()
    stored = b"" if _STORED_NORMAL is None else _STORED_NORMAL.raw
    if not stored or type(stream) is not np.random.MT19937:
        return stream, pickle.dumps(numpy_state()), stored
    with stream.lock:
        return stream, _Twister.from_address(stream.ctypes.state_address).raw, stored


def _set_numpy_position(position: tuple[Any, bytes, bytes]) -> None:
    """Have NumPy's global functions draw from this stream again, from where it was."""
    stream, state, stored = position
    if _NUMPY.get_bit_generator() is not stream:
        _NUMPY.set_bit_generator(stream)
    if not stored or type(stream) is not np.random.MT19937:
        set_numpy_state(pickle.loads(state))
    else:
        with stream.lock:
            _Twister.from_address(stream.ctypes.state_address).raw = state
    if stored:
        _STORED_NORMAL.raw = stored


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


def _seed_numpy(seed: int) -> None:
    if type(_NUMPY.get_bit_generator()) is not np.random.MT19937:  # np.random.seed takes no other
        _NUMPY.set_bit_generator(np.random.MT19937())
    np.random.seed(seed % 2**32)


# -- all global streams --------------------------------------------------------------------------------------------

_Verbs: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]
_HOST_STREAMS: Final[dict[str, _Verbs]] = {
    "torch": (
        torch.default_generator.get_state,
        torch.default_generator.set_state,
        torch.default_generator.manual_seed,
    ),
    "python": (random.getstate, random.setstate, random.seed),
    "NumPy": (_numpy_position, _set_numpy_position, _seed_numpy),
}
"""How to read, set and seed each stream of the host. The names are keys of the marks in checkpoints."""


def _streams() -> dict[str, _Verbs]:
    """Return how to read, set and seed the streams of torch, Python, NumPy and every CUDA device in use.

    To ask does not begin to use a device (it would take memory on it).
    """
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    own = {f"cuda:{i}": (one.get_state, one.set_state, one.manual_seed) for i, one in enumerate(devices)}
    return _HOST_STREAMS | own


def _positions() -> dict[str, Any]:
    """Return where these streams are."""
    return {name: read() for name, (read, _, _) in _streams().items()}


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is tuple or type(one) is not type(other):
        return bool(one == other)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
