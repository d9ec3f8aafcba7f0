"""Find where the random streams of Python and NumPy lie in memory.

`hookline.guard.rng` reads and writes them there. Both are Mersenne twisters of 2,500 bytes, which are copied in 1 µs;
``random.getstate`` takes 15 µs and ``numpy.random.get_state`` 70. Where the bytes lie is checked once, on generators of
our own. Where they are not found (another Python or NumPy), there is None, and the verbs are used.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any, Final

import numpy as np

__all__ = ["COMPARE", "PYTHON_STREAM", "STORED_NORMAL", "TWISTER_BYTES"]

TWISTER_BYTES: Final = 624 * 4 + 4
"""The bytes of the numbers of a Mersenne twister, and of its position among them."""
_STORE: Final = 16
"""The bytes of NumPy's note whether it has a normal number in store, and of that number."""


def _memory(address: int, nbytes: int) -> Any:
    """Return an array of ctypes; reading and assigning its ``raw`` copies all of it, and no other thread runs."""
    return (ctypes.c_char * nbytes).from_address(address)


def _find_python() -> Any:
    """Return the memory of Python's stream; None if a generator of our own does not lie as expected."""
    begin, end = object.__basicsize__, object.__basicsize__ + TWISTER_BYTES
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < end:
        return None
    probe = random.Random(5)
    *numbers, position = probe.getstate()[1]
    if ctypes.string_at(id(probe) + begin, TWISTER_BYTES) != struct.pack("@i624I", position, *numbers):
        return None
    return _memory(id(random.random.__self__) + begin, TWISTER_BYTES)  # type: ignore[attr-defined]


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
    return _memory(id(holder) + begin, _STORE)


PYTHON_STREAM: Final = _find_python()
"""The memory of the stream of the module ``random``; None if it is not found."""
STORED_NORMAL: Final = _find_store()
"""The memory of NumPy's note; None if it is not found."""


def _find_compare() -> Any:
    """Return ``memcmp`` of the C library; None where it is not found."""
    try:
        compare = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):  # Windows has no library without a name
        return None
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    compare.restype = ctypes.c_int
    return compare


COMPARE: Final = _find_compare()
"""Compares memory: ``COMPARE(address, other, nbytes)`` is 0 if it is the same; None if it is not found."""
