"""Random streams: where they stand, and going back there.

Taken by whoever fires hooks (`kept_rng`, the cheap way, around a whole firing) and by snapshots (`RandomStates`).
The streams of torch on the CPU and on every CUDA device in use, of NumPy, of Python, and generators one names.

    >>> with kept_rng():
    ...     _ = torch.rand(3)  # the stream goes on after the block as if this had not been
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch

__all__ = [
    "GENERATOR_TYPES",
    "Generator",
    "RandomStates",
    "cuda_states",
    "hook_stream",
    "kept_rng",
    "numpy_state",
    "restart_hook_stream",
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


class RandomStates:
    """Where all streams stand, to go back there any number of times."""

    __slots__ = ("_bits", "_cuda", "_generators", "_numpy", "_python", "_torch")

    def __init__(self, generators: Iterable[Generator] = ()) -> None:
        self._torch = torch.default_generator.get_state()
        self._cuda = cuda_states()
        self._bits: Any = _NUMPY.get_bit_generator()
        self._numpy: Any = np.random.get_state(legacy=False)
        self._python = random.getstate()
        self._generators = [(generator, state_of(generator)) for generator in generators]

    def restore(self) -> None:
        """Have every stream stand where it stood."""
        torch.default_generator.set_state(self._torch)
        set_cuda_states(self._cuda)
        if _NUMPY.get_bit_generator() is not self._bits:
            _NUMPY.set_bit_generator(self._bits)
        _set_numpy(self._numpy)
        random.setstate(self._python)
        for generator, state in self._generators:
            set_state(generator, state)

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
    others = 0
    """How many more were made for blocks inside blocks, which must not move the stream of the outer one."""


def hook_stream() -> dict[str, Any]:
    """Where the stream stands that NumPy is lent; plain values."""
    return {"numpy": None if _Lent.stream is None else _Lent.stream.state, "others": _Lent.others}


def set_hook_stream(state: Mapping[str, Any]) -> None:
    """Have it stand there."""
    _Lent.stream, _Lent.others = None, state["others"]
    if state["numpy"] is not None:
        _Lent.stream = np.random.MT19937(0)
        _Lent.stream.state = state["numpy"]


def restart_hook_stream() -> None:
    """Another run begins: its hooks draw what those of an equal run have drawn before in this process."""
    if _NUMPY.get_bit_generator() is not _Lent.stream:  # a hook that trains a run of its own draws on
        set_hook_stream({"numpy": None, "others": 0})


def _another_stream() -> np.random.MT19937:
    _Lent.others += 1
    return np.random.MT19937(_Lent.others)


def _lend_numpy() -> tuple[Any, float | None]:
    """Have NumPy draw from our stream; its own, and the normal number it had in store, if any.

    NumPy makes normal numbers in pairs and forgets the second when its stream is exchanged. To draw one tells whether
    there is one: then the stream stands still.
    """
    if _Lent.stream is None:
        _Lent.stream = np.random.MT19937(0)
    own = _NUMPY.get_bit_generator()
    if type(own) is not np.random.MT19937:
        _NUMPY.set_bit_generator(_another_stream())
        return own, None
    address = own.ctypes.state_address
    before = ctypes.string_at(address, _MT19937_BYTES)
    drawn = np.random.standard_normal()
    in_store = ctypes.string_at(address, _MT19937_BYTES) == before
    if not in_store:
        ctypes.memmove(address, before, _MT19937_BYTES)
    _NUMPY.set_bit_generator(_Lent.stream if own is not _Lent.stream else _another_stream())
    return own, drawn if in_store else None


def _take_numpy_back(own: Any, in_store: float | None) -> None:
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
