"""Find the fingerprint of a tensor on the GPU: programs in Triton, which `fingerprint` launches.

``read_rows`` reads a tensor once: each program takes 32 rows of 1,021 numbers, and then the same bytes as words of the
hash, which the cache still holds. ``merge_programs`` adds up what the programs found. No program writes where another
one does, so the numbers are the same in every run. Torch's own operators need about 35 launches and 17 times the
traffic for the same.
"""
# mypy: ignore-errors
# No `from __future__ import annotations`: Triton reads the types of arguments.

import triton
import triton.language as tl

__all__ = ["merge_programs", "read_rows"]

_COLUMNS = tl.constexpr(1021)
_LANES = tl.constexpr(1024)
_INF = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["count", "num_words"])
def read_rows(
    numbers, words, signs, block_signs, odd, found, hashes, count, num_words,
    ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Leave sum, squares, largest, NaN, Inf and the sketch of some rows in one row of ``found``, and their hash."""
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, _LANES)
    total = tl.zeros([_LANES], tl.float32)
    squares = tl.zeros([_LANES], tl.float64)
    largest = tl.zeros([_LANES], tl.float32)
    nans = tl.zeros([_LANES], tl.int32)
    infs = tl.zeros([_LANES], tl.int32)
    sketch = tl.zeros([_LANES], tl.float32)
    for row in range(ROWS):
        at = (program * ROWS + row) * _COLUMNS + lanes
        inside = (lanes < _COLUMNS) & (at < count)
        x = tl.load(numbers + at, mask=inside, other=0.0).to(tl.float32)
        is_nan = x != x
        is_inf = tl.abs(x) == _INF
        x = tl.where(is_nan | is_inf, 0.0, x)
        sign_at = ((program * ROWS + row) % BLOCK_ROWS) * _COLUMNS + lanes
        sign = tl.load(signs + sign_at, mask=lanes < _COLUMNS, other=0).to(tl.float32)
        total += x
        squares += x.to(tl.float64) * x.to(tl.float64)
        largest = tl.maximum(largest, tl.abs(x))
        nans += is_nan.to(tl.int32)
        infs += is_inf.to(tl.int32)
        sketch += x * sign
    out = found + program * 32
    tl.store(out + 0, tl.sum(total.to(tl.float64), 0))
    tl.store(out + 1, tl.sum(squares, 0))
    tl.store(out + 2, tl.max(largest, 0).to(tl.float64))
    tl.store(out + 3, tl.sum(nans, 0).to(tl.float64))
    tl.store(out + 4, tl.sum(infs, 0).to(tl.float64))
    groups = tl.arange(0, GROUPS)
    block = (program * ROWS) // BLOCK_ROWS
    of_groups = tl.sum(tl.reshape(sketch.to(tl.float64), [GROUPS, WIDTH]), 1)
    tl.store(out + 5 + groups, of_groups * tl.load(block_signs + block * GROUPS + groups))
    mixed = tl.zeros([_LANES], tl.int64)
    column = ((program * WORDS) % _COLUMNS).to(tl.int32)
    for part in range((WORDS + _LANES - 1) // _LANES):
        within = part * _LANES + lanes
        at = program * WORDS + within
        inside = (within < WORDS) & (at < num_words)
        word = tl.load(words + at, mask=inside, other=0)
        mixed += word * tl.load(odd + (column + within) % _COLUMNS, mask=inside, other=0)
    tl.store(hashes + program, tl.sum(mixed, 0))


@triton.jit(do_not_specialize=["programs", "count", "num_words", "num_bytes"])
def merge_programs(
    found, hashes, last_bytes, odd, numbers_out, hash_out, programs, count, num_words, num_bytes, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up what all programs have found; the last bytes, which fill no word, come on top of the hash."""
    lanes = tl.arange(0, 32)
    rows = tl.arange(0, ROWS)
    total = tl.zeros([32], tl.float64)
    largest = tl.zeros([32], tl.float64)
    mixed = tl.zeros([ROWS], tl.int64)
    for begin in range(0, programs, ROWS):
        inside = (begin + rows) < programs
        at = (begin + rows).to(tl.int64)
        values = tl.load(
            found + at[:, None] * 32 + lanes[None, :], mask=inside[:, None] & (lanes[None, :] < 21), other=0.0
        )
        total += tl.sum(values, 0)
        largest = tl.maximum(largest, tl.max(values, 0))
        mixed += tl.load(hashes + at, mask=inside, other=0)
    total = tl.where(lanes == 0, total / count, total)
    total = tl.where(lanes == 1, tl.sqrt(tl.maximum(total, 0.0)), total)
    total = tl.where(lanes == 2, largest, total)
    tl.store(numbers_out + lanes, total, mask=lanes < 21)
    places = tl.arange(0, 8)
    left = tl.load(last_bytes + places, mask=places < num_bytes, other=0).to(tl.int64)
    last = tl.sum(left << (places * 8).to(tl.int64), 0)
    tl.store(hash_out, tl.sum(mixed, 0) + last * tl.load(odd + num_words % _COLUMNS))
