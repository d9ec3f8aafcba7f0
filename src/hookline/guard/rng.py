"""Random streams: where they stand, and going back there.

Taken by whoever fires hooks (`hook_rng`, the cheap way, around a whole firing) and by snapshots (`RandomStates`).
The streams of torch on the CPU and on every CUDA device in use, of NumPy, of Python, and generators one names. What
hooks draw depends on the seeds of the run, and is other at every firing.

    >>> with kept_rng():
    ...     _ = torch.rand(3)  # the stream goes on after the block as if this had not been
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch

__all__ = [
    "GENERATOR_TYPES",
    "Generator",
    "RandomStates",
    "cuda_states",
    "hook_rng",
    "hook_stream",
    "kept_rng",
    "numpy_state",
    "restart_hook_stream",
    "run_seed",
    "set_cuda_states",
    "set_hook_stream",
    "set_numpy_state",
    "set_state",
    "state_of",
]

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

GENERATOR_TYPES: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""What ``generators=`` takes, and what is found on models, loaders and samplers."""

_NUMPY: Final[Any] = np.random
"""Its annotations leave out the functions that exchange the stream."""

_MT19937_BYTES: Final = 624 * 4 + 4
"""The numbers of a Mersenne twister, and where it stands among them."""


class kept_rng:
    """For as long as the block lasts, random numbers are drawn from elsewhere; afterwards all streams stand as before.

    Recipe::

        with hookline.guard.rng.kept_rng():
            anything()  # may draw from torch, NumPy, Python

    About 20 µs, of which Python's stream takes 15. NumPy's global functions draw from a stream of ours meanwhile, since
    exchanging that costs 1 µs and copying its state 110; the others go on from where they stand. May be nested.
    """

    __slots__ = ("_cuda", "_generators", "_numpy", "_python", "_states", "_torch", "_wants")

    def __init__(
        self, *, python: bool = True, numpy: bool = True, cuda: bool = True, generators: Iterable[Generator] = ()
    ) -> None:
        self._wants = (python, numpy, cuda)
        self._generators = tuple(generators)

    def __enter__(self) -> None:
        python, numpy, cuda = self._wants
        self._torch = torch.default_generator.get_state()
        self._cuda = cuda_states() if cuda else None
        self._states = [state_of(generator) for generator in self._generators]
        self._python = random.getstate() if python else None
        self._numpy = _lend_numpy() if numpy else None

    def __exit__(self, *exc_info: object) -> None:
        if self._numpy is not None:
            _take_numpy_back(*self._numpy)
        torch.default_generator.set_state(self._torch)
        if self._cuda is not None:
            set_cuda_states(self._cuda)
        if self._python is not None:
            random.setstate(self._python)
        for generator, state in zip(self._generators, self._states, strict=True):
            set_state(generator, state)


class hook_rng(kept_rng):
    """`kept_rng` for a firing: what hooks draw is other than at the firing before.

    torch and Python go on from where the run stands, so that a forward with dropout drops what the next step would.
    Where the run has not drawn since hooks did, that would be the same numbers again, for a run of full batches
    at every firing: then the stream is seeded by where the run stands and how often hooks have been there.
    It takes 2.5 times as long as `kept_rng`, and about 4 times where it has to seed.
    """

    __slots__ = ("_outer_seed", "_stood", "_times", "_undone")

    def __init__(self, *, undone: bool = True, generators: Iterable[Generator] = ()) -> None:
        """Keep all streams; ``undone``: what a hook draws may be taken back before the block ends."""
        super().__init__(generators=generators)
        self._undone = undone

    def __enter__(self) -> None:
        super().__enter__()
        self._outer_seed = _Lent.seed
        if _Lent.seed is None:
            _Lent.seed = torch.initial_seed()
        self._stood = self._run_states()
        self._times: dict[str, int] = {}
        for name in [name for name in _Lent.marks if name in self._stood]:
            mark, times = _Lent.marks[name]
            if mark == _mark(self._stood[name]):
                self._times[name] = times + 1
                _seed(name, _hashed(name, mark, times + 1))
        if self._times and not self._undone:
            self._stood = _states_now()

    def _run_states(self) -> dict[str, Any]:
        """Return where the run's streams stand, by name."""
        found = {"torch": self._torch, "python": self._python}
        return found | {f"cuda:{index}": state for index, state in enumerate(self._cuda or ())}

    def __exit__(self, *exc_info: object) -> None:
        drawn = self._run_states()
        if not self._undone:  # a firing that draws nothing changes nothing for the next
            now = _states_now()
            drawn = {name: state for name, state in drawn.items() if not _same(now[name], self._stood[name])}
        # Now, since a firing inside has left its own.
        _Lent.marks.update({name: (_mark(state), self._times.get(name, 0)) for name, state in drawn.items()})
        _Lent.seed = self._outer_seed
        super().__exit__(*exc_info)


def _states_now() -> dict[str, Any]:
    found = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
    return found | {f"cuda:{index}": state for index, state in enumerate(cuda_states() or ())}


def _mark(state: Any) -> int:
    """Return a number for where a stream stands, the same in every process."""
    return zlib.crc32(state.numpy().data) if isinstance(state, torch.Tensor) else hash(state[1])


def _seed(name: str, seed: int) -> None:
    if name == "python":
        random.seed(seed)
    elif name == "torch":
        torch.default_generator.manual_seed(seed)
    else:
        torch.cuda.default_generators[int(name.partition(":")[2])].manual_seed(seed)


def _hashed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


def run_seed() -> int:
    """Return what the run has seeded torch with, also while hooks draw from elsewhere."""
    return torch.initial_seed() if _Lent.seed is None else _Lent.seed


class RandomStates:
    """Where all streams stand, to go back there any number of times."""

    __slots__ = ("_bits", "_cuda", "_generators", "_is_lent", "_numpy", "_python", "_torch")

    def __init__(self, generators: Iterable[Generator] = ()) -> None:
        self._torch = torch.default_generator.get_state()
        self._cuda = cuda_states()
        self._bits: Any = _NUMPY.get_bit_generator()
        self._numpy: Any = np.random.get_state(legacy=False)
        self._is_lent = any(self._bits is stream for stream in _Lent.out)
        self._python = random.getstate()
        self._generators = [(generator, state_of(generator)) for generator in generators]

    def restore(self, *, own: bool = True) -> None:
        """Have every stream stand where it stood.

        Without ``own``, the stream of NumPy that hooks draw from goes on: it is not the run's, and a hook that is
        undone at every firing would draw the same from it for ever.
        """
        torch.default_generator.set_state(self._torch)
        set_cuda_states(self._cuda)
        self._restore_numpy(own=own)
        random.setstate(self._python)
        for generator, state in self._generators:
            set_state(generator, state)

    def _restore_numpy(self, *, own: bool) -> None:
        if _Lent.out and not self._is_lent:
            # Saved outside of the firing: hooks get its numbers, the run's own stream stays where it stands.
            _NUMPY.set_bit_generator(getattr(np.random, self._numpy["bit_generator"])())
            _set_numpy(self._numpy)
            return
        if _NUMPY.get_bit_generator() is not self._bits:
            _NUMPY.set_bit_generator(self._bits)
        if own or not self._is_lent:
            _set_numpy(self._numpy)

    def changed(self) -> list[str]:
        """The streams that have moved since."""
        moved = {
            "random stream of torch": not torch.equal(torch.default_generator.get_state(), self._torch),
            "random stream of NumPy": not _same(np.random.get_state(legacy=False), self._numpy),
            "random stream of Python": random.getstate() != self._python,
        }
        for index, state in enumerate(cuda_states() or ()):
            before = self._cuda[index] if self._cuda else None
            moved[f"random stream of cuda:{index}"] = before is None or not torch.equal(state, before)
        for number, (generator, state) in enumerate(self._generators):
            moved[f"generator {number} ({type(generator).__name__})"] = not _same(state_of(generator), state)
        return [name for name, has_moved in moved.items() if has_moved]


# -- CUDA ------------------------------------------------------------------------------------------------------


def cuda_states() -> list[torch.Tensor] | None:
    """Of every device, without waiting for it; None where CUDA is not in use, which asking does not change."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return [generator.get_state() for generator in torch.cuda.default_generators]


def set_cuda_states(states: list[torch.Tensor] | None) -> None:
    """Have every device's stream stand there."""
    # A stream that was begun since it was None was never part of the run: nobody had drawn from it.
    for generator, state in zip(torch.cuda.default_generators, states or (), strict=False):
        generator.set_state(state)


# -- NumPy -----------------------------------------------------------------------------------------------------


class _Lent:
    stream: np.random.MT19937 | None = None
    """What NumPy's global functions draw from inside `kept_rng`; goes on from one block to the next."""
    base = 0
    """What it was seeded with: made of the seeds of torch and NumPy at the time of the first block of a run."""
    others = 0
    """How many more were made for blocks inside blocks, which must not move the stream of the outer one."""
    out: Final[list[Any]] = []
    """The streams that are lent now, the innermost block's last."""
    marks: Final[dict[str, tuple[int, int]]] = {}
    """For each other stream, where the run stood when hooks drew last, and how many firings before found it there."""
    seed: int | None = None
    """While hooks are fired, the seed of the run."""


def hook_stream() -> dict[str, Any]:
    """Where the streams of hooks stand; plain values."""
    return {
        "numpy": None if _Lent.stream is None else _Lent.stream.state,
        "base": _Lent.base,
        "others": _Lent.others,
        "marks": {name: list(mark) for name, mark in _Lent.marks.items()},
    }


def set_hook_stream(state: Mapping[str, Any]) -> None:
    """Have them stand there."""
    _Lent.stream, _Lent.others, _Lent.base = None, state["others"], state.get("base", 0)
    _Lent.marks.clear()
    _Lent.marks.update({name: (mark, times) for name, (mark, times) in state.get("marks", {}).items()})
    if state["numpy"] is not None:
        _Lent.stream = np.random.MT19937(0)
        _Lent.stream.state = state["numpy"]


def restart_hook_stream() -> None:
    """Another run begins: its hooks draw what those of an equal run have drawn before in this process."""
    if not _Lent.out:  # a hook that trains a run of its own draws on
        set_hook_stream({"numpy": None, "others": 0})


def _another_stream() -> np.random.MT19937:
    _Lent.others += 1
    return np.random.MT19937(_hashed(_Lent.base, _Lent.others))


def _lend_numpy() -> tuple[Any, float | None]:
    """Have NumPy draw from our stream; its own, and the normal number it had in store, if any.

    NumPy makes normal numbers in pairs and forgets the second when its stream is exchanged. To draw one tells whether
    there is one: then the stream stands still.
    """
    own = _NUMPY.get_bit_generator()
    is_twister = type(own) is np.random.MT19937
    before = ctypes.string_at(own.ctypes.state_address, _MT19937_BYTES) if is_twister else b""
    if _Lent.stream is None:
        _Lent.base = _hashed(torch.initial_seed(), before or own.state)
        _Lent.stream = np.random.MT19937(_Lent.base)
    in_store, drawn = False, 0.0
    if is_twister:
        drawn = np.random.standard_normal()
        in_store = ctypes.string_at(own.ctypes.state_address, _MT19937_BYTES) == before
        if not in_store:
            ctypes.memmove(own.ctypes.state_address, before, _MT19937_BYTES)
    is_free = is_twister and own is not _Lent.stream
    lent = _Lent.stream if is_free else _another_stream()
    _NUMPY.set_bit_generator(lent)
    _Lent.out.append(lent)
    return own, drawn if in_store else None


def _take_numpy_back(own: Any, in_store: float | None) -> None:
    _Lent.out.pop()
    _NUMPY.set_bit_generator(own)
    if in_store is not None:
        state: Any = np.random.get_state(legacy=False)
        np.random.set_state({**state, "has_gauss": 1, "gauss": in_store})


def numpy_state() -> Any:
    """Where NumPy's global stream stands."""
    state: Any = np.random.get_state(legacy=False)
    return state


def set_numpy_state(state: Any) -> None:
    """Have it stand there, also if it is a stream of another kind now."""
    kind = state["bit_generator"]
    if _NUMPY.get_bit_generator().state["bit_generator"] != kind:
        _NUMPY.set_bit_generator(getattr(np.random, kind)())
    _set_numpy(state)


def _set_numpy(state: Any) -> None:
    if state["bit_generator"] == "MT19937":
        np.random.set_state(state)
    else:
        _NUMPY.get_bit_generator().state = state


# -- generators ------------------------------------------------------------------------------------------------


def state_of(generator: Any) -> Any:
    """Where a generator stands."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Have it stand there."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
