"""Find the fingerprints of tensors on the GPU: programs in Triton, which `DeviceFingerprints` launches.

``read_rows`` reads many tensors once: each program takes some rows of one, and leaves what it found in a slot.
``merge_slots`` adds up the slots of each tensor. No program writes where another one does, so the numbers are the same
in every run. Torch's own operators need about 35 launches and 17 times the traffic for one tensor.

A thread reads eight numbers at a time, and makes their signs from their place. What is not finite needs no instruction:
it shows in the sum of squares, and only then are the rows read once more, to count it and leave it out. So are rows
whose squares are too large or too small for float32.
"""
# mypy: ignore-errors
# No `from __future__ import annotations`: Triton reads the types of arguments.

import triton
import triton.language as tl

from hookline.observe.watch.triton_programs import FIELDS, job_of

_EIGHTS = tl.constexpr(251)
_LANES = tl.constexpr(256)
_COLUMNS = tl.constexpr(2008)
_BLOCK_ROWS = tl.constexpr(32)
_GROUPS = tl.constexpr(16)
_INF = tl.constexpr(float("inf"))
_TINY = tl.constexpr(1e-30)
_SLOT = tl.constexpr(32)
"""Of a slot: sum, squares, largest, NaN, Inf, the sketch of 16 groups, and the hash."""
_HASH = tl.constexpr(21)
_AT_ONCE = tl.constexpr(2)
"""Rows that are on their way at a time."""


@triton.jit
def _mixed(number):
    """Return a hash of a number; `_mixed` for the CPU is the same."""
    number = (number ^ (number >> 16)) * 0x21F0AAAD
    number = (number ^ (number >> 15)) * 0xD35A2D97
    return number ^ (number >> 15)


@triton.jit
def _read(address, begin, end, last, ELEMENT: tl.constexpr, SIZE: tl.constexpr, CAREFUL: tl.constexpr):
    """Return sum, squares, largest, NaN, Inf, sketch and hash of the rows from ``begin`` to ``end``.

    ``last`` is where their eights end. Only if ``CAREFUL``, what is not finite is counted, and left out.
    """
    SQUARES: tl.constexpr = tl.float64 if CAREFUL else tl.float32
    AT_ONCE: tl.constexpr = 1 if CAREFUL else _AT_ONCE
    eights = tl.arange(0, _LANES)
    places = tl.arange(0, 8)
    columns = tl.arange(0, SIZE)
    total = tl.zeros([_LANES, 8], tl.float32)
    squares = tl.zeros([_LANES, 8], SQUARES)
    largest = tl.zeros([_LANES, 8], tl.float32)
    nans = tl.zeros([_LANES, 8], tl.int32)
    infs = tl.zeros([_LANES, 8], tl.int32)
    sketch = tl.zeros([_LANES, 8], tl.float32)
    words = tl.zeros([_LANES, SIZE], tl.int64)
    numbers = tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16)
    memory = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    for row in range(begin, end, AT_ONCE):  # whole ones: a block, and a program's share, have a multiple of that
        rows = tl.zeros_like(eights) + row
        of_block = 0 - (_mixed((rows // _BLOCK_ROWS).to(tl.uint32)) >> (eights % _GROUPS).to(tl.uint32) & 1)
        for part in tl.static_range(AT_ONCE):
            at = (eights + (rows + part) * _EIGHTS).to(tl.int64)
            inside = ((eights < _EIGHTS) & (at < last))[:, None]
            x = tl.load(numbers + ((at * 8)[:, None] + places[None, :]), mask=inside, other=0.0).to(tl.float32)
            words += tl.load(memory + ((at * SIZE)[:, None] + columns[None, :]), mask=inside, other=0)
            if CAREFUL:
                is_nan = x != x
                is_inf = tl.abs(x) == _INF
                nans += is_nan.to(tl.int32)
                infs += is_inf.to(tl.int32)
                x = tl.where(is_nan | is_inf, 0.0, x)
            total += x
            squares += x.to(SQUARES) * x.to(SQUARES)
            largest = tl.maximum(largest, tl.abs(x))
            bits = of_block ^ _mixed((eights + (rows % _BLOCK_ROWS + part) * _EIGHTS).to(tl.uint32))
            sign = bits[:, None] << places.to(tl.uint32)[None, :] & 0x80000000
            sketch += (x.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    column = (eights[:, None] * SIZE + columns[None, :] + 1).to(tl.uint32)
    odd = _mixed(column).to(tl.int64) << 32 | _mixed(column + _COLUMNS).to(tl.int64) | 1
    of_eights = tl.sum(sketch.to(tl.float64), 1)
    return (
        tl.sum(tl.sum(total.to(tl.float64), 1), 0),
        tl.sum(tl.sum(squares.to(tl.float64), 1), 0),
        tl.max(tl.max(largest, 1), 0).to(tl.float64),
        tl.sum(tl.sum(nans, 1), 0).to(tl.float64),
        tl.sum(tl.sum(infs, 1), 0).to(tl.float64),
        tl.sum(tl.reshape(of_eights, [_LANES // _GROUPS, _GROUPS]), 0),
        tl.sum(tl.sum(words * odd, 1), 0),
    )


@triton.jit(do_not_specialize=range(3))
def read_rows(
    jobs: tl.int64, num_jobs: tl.int64, slots: tl.int64, ELEMENT: tl.constexpr, SIZE: tl.constexpr, JOBS: tl.constexpr
):
    """Leave what is found in some rows of one tensor in the slot of this program; ``jobs`` tells which are whose.

    A job has its first program, how many, the address and the number of its numbers, how many rows each program takes,
    and where the fingerprint goes. The memory goes on to the end of the last eight, with zeros.
    """
    program = tl.program_id(0).to(tl.int64)
    job = job_of(program, jobs, num_jobs, JOBS)
    address = tl.load(job + 2)
    count = tl.load(job + 3)
    each = tl.load(job + 4)
    begin = ((program - tl.load(job)) * each).to(tl.int32)
    end = begin + each.to(tl.int32)
    last = tl.minimum(end.to(tl.int64) * _EIGHTS, (count + 7) // 8)
    found = _read(address, begin, end, last, ELEMENT, SIZE, False)
    total, squares, largest, nans, infs, of_groups, mark = found
    is_usual = (squares < _INF) & ((squares >= _TINY) | (largest == 0.0))
    if is_usual == 0:  # read twice: all at once would take more registers, and slow down the usual way
        _, squares, _, nans, infs, _, _ = _read(address, begin, end, last, ELEMENT, SIZE, True)
        total, _, largest, _, _, of_groups, _ = _read(address, begin, end, last, ELEMENT, SIZE, True)
    out = slots.to(tl.pointer_type(tl.float64)) + program * _SLOT
    tl.store(out, total)
    tl.store(out + 1, squares)
    tl.store(out + 2, largest)
    tl.store(out + 3, nans)
    tl.store(out + 4, infs)
    tl.store(out + 5 + tl.arange(0, _GROUPS), of_groups)
    tl.store(out.to(tl.pointer_type(tl.int64)) + _HASH, mark)


@triton.jit(do_not_specialize=range(4))
def merge_slots(jobs: tl.int64, slots: tl.int64, numbers_out: tl.int64, hashes_out: tl.int64, ROWS: tl.constexpr):
    """Add up the slots of one tensor."""
    job = jobs.to(tl.pointer_type(tl.int64)) + tl.program_id(0) * FIELDS
    first = tl.load(job)
    programs = tl.load(job + 1)
    count = tl.load(job + 3)
    row = tl.load(job + 5)
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
