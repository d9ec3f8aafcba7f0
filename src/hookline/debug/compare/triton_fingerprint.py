"""Find the fingerprints of tensors on the GPU: programs in Triton, which `DeviceFingerprints` launches.

``read_rows`` reads one tensor once: each program takes 16 rows of 1,021 numbers, and then the same bytes as words of
the hash, which the cache still holds, and leaves what it found in a slot. ``merge_slots`` adds up the slots of many
tensors at once. No program writes where another one does, so the numbers are the same in every run. Torch's own
operators need about 35 launches and 17 times the traffic for the same.

Tensors go in by address: arguments are 64 bits wide and none is specialized on, so that a compiled program fits every
tensor of its type.
"""
# mypy: ignore-errors
# No `from __future__ import annotations`: Triton reads the types of arguments.

import triton
import triton.language as tl

__all__ = ["merge_slots", "read_rows"]

_COLUMNS = tl.constexpr(1021)
_LANES = tl.constexpr(1024)
_INF = tl.constexpr(float("inf"))
_SLOT = tl.constexpr(32)
"""Of a slot: sum, squares, largest, NaN, Inf, the sketch of 16 groups, and the hash."""
_HASH = tl.constexpr(21)


@triton.jit(do_not_specialize=range(6))
def read_rows(
    tensor: tl.int64,
    signs: tl.int64,
    block_signs: tl.int64,
    odd: tl.int64,
    slots: tl.int64,
    count: tl.int64,
    ELEMENT: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Leave the numbers, the sketch and the hash of some rows in one slot."""
    program = tl.program_id(0).to(tl.int64)
    numbers = tensor.to(tl.pointer_type(ELEMENT))
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
        sign = tl.load(signs.to(tl.pointer_type(tl.float32)) + sign_at, mask=lanes < _COLUMNS, other=0)
        total += x
        squares += x.to(tl.float64) * x.to(tl.float64)
        largest = tl.maximum(largest, tl.abs(x))
        nans += is_nan.to(tl.int32)
        infs += is_inf.to(tl.int32)
        sketch += x * sign
    slot = slots + program * _SLOT * 8
    out = slot.to(tl.pointer_type(tl.float64))
    tl.store(out + 0, tl.sum(total.to(tl.float64), 0))
    tl.store(out + 1, tl.sum(squares, 0))
    tl.store(out + 2, tl.max(largest, 0).to(tl.float64))
    tl.store(out + 3, tl.sum(nans, 0).to(tl.float64))
    tl.store(out + 4, tl.sum(infs, 0).to(tl.float64))
    groups = tl.arange(0, GROUPS)
    block = (program * ROWS) // BLOCK_ROWS
    of_groups = tl.sum(tl.reshape(sketch.to(tl.float64), [GROUPS, WIDTH]), 1)
    of_block = tl.load(block_signs.to(tl.pointer_type(tl.float64)) + block * GROUPS + groups)
    tl.store(out + 5 + groups, of_groups * of_block)

    num_words = count * SIZE // 8
    each = ROWS * _COLUMNS * SIZE // 8
    words = tensor.to(tl.pointer_type(tl.int64))
    factors = odd.to(tl.pointer_type(tl.int64))
    mixed = tl.zeros([_LANES], tl.int64)
    column = ((program * each) % _COLUMNS).to(tl.int32)
    for part in range((ROWS * _COLUMNS * SIZE // 8 + _LANES - 1) // _LANES):
        within = part * _LANES + lanes
        at = program * each + within
        inside = (within < each) & (at < num_words)
        word = tl.load(words + at, mask=inside, other=0)
        mixed += word * tl.load(factors + (column + within) % _COLUMNS, mask=inside, other=0)
    # The last bytes, which fill no word, are one for the last program.
    places = tl.arange(0, 8)
    num_left = tl.where(program == tl.num_programs(0) - 1, count * SIZE % 8, 0)
    rest = (tensor + num_words * 8).to(tl.pointer_type(tl.uint8))
    left = tl.load(rest + places, mask=places < num_left, other=0)
    last = tl.sum(left.to(tl.int64) << (places * 8).to(tl.int64), 0)
    tl.store(
        slot.to(tl.pointer_type(tl.int64)) + _HASH, tl.sum(mixed, 0) + last * tl.load(factors + num_words % _COLUMNS)
    )


@triton.jit(do_not_specialize=range(4))
def merge_slots(
    jobs: tl.int64, slots: tl.int64, numbers_out: tl.int64, hashes_out: tl.int64, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up the slots of one tensor; its job says the first and how many, how many numbers, and which row."""
    job = jobs.to(tl.pointer_type(tl.int64)) + tl.program_id(0) * 4
    first = tl.load(job)
    programs = tl.load(job + 1)
    count = tl.load(job + 2)
    row = tl.load(job + 3)
    lanes = tl.arange(0, _SLOT)
    rows = tl.arange(0, ROWS)
    total = tl.zeros([_SLOT], tl.float64)
    largest = tl.zeros([_SLOT], tl.float64)
    mixed = tl.zeros([ROWS], tl.int64)
    for begin in range(0, programs, ROWS):
        inside = (begin + rows) < programs
        at = (first + begin + rows) * _SLOT
        mask = inside[:, None] & (lanes[None, :] < _HASH)
        values = tl.load(slots.to(tl.pointer_type(tl.float64)) + at[:, None] + lanes[None, :], mask=mask, other=0.0)
        total += tl.sum(values, 0)
        largest = tl.maximum(largest, tl.max(values, 0))
        mixed += tl.load(slots.to(tl.pointer_type(tl.int64)) + at + _HASH, mask=inside, other=0)
    total = tl.where(lanes == 0, total / count, total)
    total = tl.where(lanes == 1, tl.sqrt(tl.maximum(total, 0.0)), total)
    total = tl.where(lanes == 2, largest, total)
    tl.store(numbers_out.to(tl.pointer_type(tl.float64)) + row * _HASH + lanes, total, mask=lanes < _HASH)
    tl.store(hashes_out.to(tl.pointer_type(tl.int64)) + row, tl.sum(mixed, 0))
