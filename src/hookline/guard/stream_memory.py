"""Read and write the random streams of Python and NumPy where they lie in memory.

`hookline.guard.rng` calls this around every firing and at every save. Both streams are Mersenne twisters of 2,500
bytes, which are copied in 1 µs; ``random.getstate`` takes 15 µs and ``numpy.random.get_state`` 70. Where the bytes lie
is checked once, on generators of our own. Where they are not found (another Python or NumPy), the verbs are used.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

__all__ = [
    "NumpyPosition",
    "numpy_position",
    "numpy_state",
    "python_position",
    "set_numpy_position",
    "set_python_position",
    "set_stored_normal",
    "set_twister",
    "stored_normal",
    "twister_bytes",
]

_Memory: TypeAlias = Any
"""An array of ctypes; reading and assigning ``raw`` copies all of it without letting another thread run."""
_NUMPY: Final[Any] = np.random
"""NumPy's annotations leave out the functions that exchange its global stream."""
_TWISTER: Final = 624 * 4 + 4
"""The bytes of the numbers of a Mersenne twister, and of its position among them."""
_STORE: Final = 16
"""The bytes of NumPy's note whether it has a normal number in store, and of that number."""


def _memory(address: int, nbytes: int) -> _Memory:
    return (ctypes.c_char * nbytes).from_address(address)


def _find_python() -> _Memory | None:
    """Return the memory of Python's stream; None if a generator of our own does not lie as expected."""
    begin, end = object.__basicsize__, object.__basicsize__ + _TWISTER
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < end:
        return None
    probe = random.Random(5)
    *numbers, position = probe.getstate()[1]
    if ctypes.string_at(id(probe) + begin, _TWISTER) != struct.pack("@i624I", position, *numbers):
        return None
    return _memory(id(random.random.__self__) + begin, _TWISTER)  # type: ignore[attr-defined]


def _find_store() -> _Memory | None:
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
    return _memory(id(holder) + begin, _STORE)


_PYTHON: Final = _find_python()
_STORED: Final = _find_store()
_INSTANCE: Final[Any] = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of the module ``random``."""


# -- Python --------------------------------------------------------------------------------------------------------


def python_position() -> tuple[Any, ...]:
    """Return where Python's stream is, with the normal number in store."""
    return random.getstate() if _PYTHON is None else (_PYTHON.raw, _INSTANCE.gauss_next)


def set_python_position(position: tuple[Any, ...]) -> None:
    """Set Python's stream to what `python_position` returned."""
    if _PYTHON is None:
        random.setstate(position)
    else:
        _PYTHON.raw, _INSTANCE.gauss_next = position


# -- NumPy ---------------------------------------------------------------------------------------------------------


class NumpyPosition(NamedTuple):
    """Where NumPy's global stream is."""

    stream: Any
    """The bit generator."""
    numbers: Any
    """The memory of a Mersenne twister; the state of another one."""
    stored: bytes


def numpy_state() -> Any:
    """Return the state of NumPy's global stream, for a file."""
    return np.random.get_state(legacy=False)


def numpy_position() -> NumpyPosition:
    """Return where NumPy's global stream is, with the normal number in store."""
    stream = _NUMPY.get_bit_generator()
    if _STORED is None or type(stream) is not np.random.MT19937:
        return NumpyPosition(stream, numpy_state(), b"")
    with stream.lock:
        return NumpyPosition(stream, twister_bytes(stream), _STORED.raw)


def set_numpy_position(position: NumpyPosition) -> None:
    """Set the stream that NumPy's global functions draw from now; it is of the same kind."""
    if isinstance(position.numbers, bytes):
        stream = _NUMPY.get_bit_generator()
        with stream.lock:
            set_twister(stream, position.numbers)
            set_stored_normal(position.stored)
    elif position.numbers["bit_generator"] == "MT19937":
        np.random.set_state(position.numbers)
    else:
        _NUMPY.get_bit_generator().state = position.numbers


def twister_bytes(stream: Any) -> bytes:
    """Return the memory of a Mersenne twister of NumPy."""
    return ctypes.string_at(stream.ctypes.state_address, _TWISTER)


def set_twister(stream: Any, numbers: bytes) -> None:
    """Write the memory of a Mersenne twister of NumPy."""
    _memory(stream.ctypes.state_address, _TWISTER).raw = numbers


def stored_normal() -> Any:
    """Return the normal number that NumPy has in store, or that it has none: it makes them in pairs."""
    if _STORED is not None:
        return _STORED.raw
    state = numpy_state()
    return state["has_gauss"], state["gauss"]


def set_stored_normal(stored: Any) -> None:
    """Set what `stored_normal` returned; NumPy has none in store after its stream was exchanged."""
    if _STORED is not None:
        _STORED.raw = stored
    elif stored[0] and type(_NUMPY.get_bit_generator()) is np.random.MT19937:  # it sets no other kind
        np.random.set_state({**numpy_state(), "has_gauss": stored[0], "gauss": stored[1]})
