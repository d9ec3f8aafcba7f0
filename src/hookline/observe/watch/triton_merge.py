"""Add partial results to rows on the GPU: programs in Triton, which `stat_kernel` launches and nothing else imports.

``merge_slots`` adds what ``reduce_chunks`` of `triton_reduce` has left to rows. ``fold_parts`` first adds up what a
compiled graph has found by row; ``fold_table`` does both at once for what a graph has joined in buffers.
"""
# mypy: ignore-errors
# No `from __future__ import annotations`: Triton reads the types of arguments.

import triton
import triton.language as tl

from hookline.observe.watch.triton_reduce import FIELDS, INF, higher, is_finite, job_of, lower

__all__ = ["factor_of", "fold_parts", "fold_table", "merge_slots"]

_FOLD_FIELDS = tl.constexpr(7)
"""Of a job of ``fold_parts``: first program, addresses of sums, squares, lows, highs and zeros, number of rows."""


@triton.jit
def factor_of(scale):
    """Return the factor that divides by the scale at an address, if any; 1 for a scale of zero."""
    factor = tl.full((), 1.0, tl.float64)
    if scale != 0:
        divisor = tl.load(scale.to(tl.pointer_type(tl.float32))).to(tl.float64)
        factor = tl.where(divisor == 0.0, 1.0, 1.0 / divisor)
    return factor


@triton.jit(do_not_specialize=range(9))
def merge_slots(
    jobs: tl.int64,
    uses: tl.int64,
    row: tl.int64,
    size: tl.int64,
    count: tl.int64,
    scale: tl.int64,
    slots: tl.int64,
    num_slots: tl.int64,
    num_added: tl.int64,
    SINGLE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add one column of the slots of one job to one row."""
    use = tl.program_id(0)
    number = tl.program_id(1)
    first = tl.full((), 0, tl.int64)
    if not SINGLE:
        entry = uses.to(tl.pointer_type(tl.int64)) + 2 * use
        row = tl.load(entry)
        job = jobs.to(tl.pointer_type(tl.int64)) + tl.load(entry + 1) * FIELDS
        first = tl.load(job)
        count = tl.load(job + 1)
        size = tl.load(job + 3)
        scale = tl.load(job + 5)
    cell = row.to(tl.pointer_type(tl.float64)) + number
    before = tl.load(cell)
    if number == 0:
        tl.store(cell, before + 1.0)  # fires
    elif number == 1:
        tl.store(cell, before + size.to(tl.float64))
    else:
        factor = factor_of(scale)
        if number == 3:
            factor = factor * factor  # the sum of squares
        lanes = tl.arange(0, WIDTH)
        column = slots.to(tl.pointer_type(tl.float64)) + number * num_slots + first
        if number < num_added:
            sums = tl.zeros([WIDTH], tl.float64)
            for at in range(0, count, WIDTH):
                sums += tl.load(column + at + lanes, mask=at + lanes < count, other=0.0)
            found = tl.sum(sums, 0)
            if number == 5:
                found = tl.where(found > 0, 1.0, 0.0).to(tl.float64)  # one firing, however many of its chunks
            if (number == 2) | (number == 3):
                found = found * factor
            tl.store(cell, before + found)
        else:
            most = tl.full([WIDTH], -INF, tl.float64)
            for at in range(0, count, WIDTH):
                most = higher(most, tl.load(column + at + lanes, mask=at + lanes < count, other=-INF))
            tl.store(cell, higher(before, tl.reduce(most, 0, higher) * factor))


@triton.jit
def _added(sums, squares, begin, end, WIDTH: tl.constexpr):
    """Return the sums of entries of two columns of float64."""
    lanes = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float64)
    power = tl.zeros([WIDTH], tl.float64)
    for at in range(begin, end, WIDTH):
        inside = at + lanes < end
        total += tl.load(sums.to(tl.pointer_type(tl.float64)) + at + lanes, mask=inside, other=0.0)
        power += tl.load(squares.to(tl.pointer_type(tl.float64)) + at + lanes, mask=inside, other=0.0)
    return tl.sum(total, 0), tl.sum(power, 0)


@triton.jit
def _ends(lows, highs, begin, end, WIDTH: tl.constexpr):
    """Return the lowest entry of a column of float32, negated, and the highest one of another; NaN if there is one."""
    lanes = tl.arange(0, WIDTH)
    least = tl.full([WIDTH], INF, tl.float32)
    most = tl.full([WIDTH], -INF, tl.float32)
    for at in range(begin, end, WIDTH):
        inside = at + lanes < end
        low = tl.load(lows.to(tl.pointer_type(tl.float32)) + at + lanes, mask=inside, other=INF)
        high = tl.load(highs.to(tl.pointer_type(tl.float32)) + at + lanes, mask=inside, other=-INF)
        least = lower(least, low)
        most = higher(most, high)
    return -tl.reduce(least, 0, lower).to(tl.float64), tl.reduce(most, 0, higher).to(tl.float64)


@triton.jit
def _counted(zeros, begin, end, WIDTH: tl.constexpr):
    """Return the sum of entries of a column of int32."""
    lanes = tl.arange(0, WIDTH)
    none = tl.zeros([WIDTH], tl.int64)
    for at in range(begin, end, WIDTH):
        none += tl.load(zeros.to(tl.pointer_type(tl.int32)) + at + lanes, mask=at + lanes < end, other=0)
    return tl.sum(none, 0).to(tl.float64)


@triton.jit(do_not_specialize=range(11))
def fold_parts(
    jobs: tl.int64,
    num_jobs: tl.int64,
    sums: tl.int64,
    squares: tl.int64,
    lows: tl.int64,
    highs: tl.int64,
    zeros: tl.int64,
    count: tl.int64,
    slots: tl.int64,
    num_slots: tl.int64,
    num_added: tl.int64,
    MOMENTS: tl.constexpr,
    EXTREMES: tl.constexpr,
    ZEROS: tl.constexpr,
    SINGLE: tl.constexpr,
    JOBS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Add up what `find_in` has found: each program a SHARE of one tensor's rows, into its slot.

    Of several tensors, ``jobs`` tells which program begins which; of a SINGLE one, the arguments do. Sums, extremes and
    zeros are for three programs, since they mostly wait for memory. What is not finite is only seen here, not
    counted; the next graph that is compiled hands over the tensor itself.
    """
    program = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = program * SHARE
    if not SINGLE:
        job = job_of(program, jobs, num_jobs, _FOLD_FIELDS, JOBS)
        sums = tl.load(job + 1)
        squares = tl.load(job + 2)
        lows = tl.load(job + 3)
        highs = tl.load(job + 4)
        zeros = tl.load(job + 5)
        count = tl.load(job + 6)
        begin = (program - tl.load(job)) * SHARE
    end = tl.minimum(begin + SHARE, count)
    column = slots.to(tl.pointer_type(tl.float64)) + program
    if part == 0:
        sum_ = tl.full((), 0.0, tl.float64)
        spread = tl.full((), 0.0, tl.float64)
        if MOMENTS:
            sum_, spread = _added(sums, squares, begin, end, WIDTH)
        tl.store(column + 2 * num_slots, sum_)
        tl.store(column + 3 * num_slots, spread)
        if not EXTREMES:
            finite = is_finite(sum_) & is_finite(spread)
            tl.store(column + 5 * num_slots, tl.where(finite, 0.0, 1.0).to(tl.float64))
    elif part == 1:
        low_ = tl.full((), -INF, tl.float64)
        high_ = tl.full((), -INF, tl.float64)
        if EXTREMES:
            low_, high_ = _ends(lows, highs, begin, end, WIDTH)
        finite = is_finite(low_) & is_finite(high_)
        if EXTREMES:
            tl.store(column + 5 * num_slots, tl.where(finite | (count == 0), 0.0, 1.0).to(tl.float64))
        kept = column + num_added * num_slots
        tl.store(kept, low_)
        tl.store(kept + num_slots, high_)
        # Of a place with something else than numbers, the rest was not looked at.
        tl.store(kept + 2 * num_slots, tl.where(finite, low_, -INF).to(tl.float64))
        tl.store(kept + 3 * num_slots, tl.where(finite, high_, -INF).to(tl.float64))
    else:
        none = tl.full((), 0.0, tl.float64)
        if ZEROS:
            none = _counted(zeros, begin, end, WIDTH)
        tl.store(column + 4 * num_slots, none)
        tl.store(column + 6 * num_slots, tl.full((), 0.0, tl.float64))
        tl.store(column + 7 * num_slots, tl.full((), 0.0, tl.float64))


@triton.jit(do_not_specialize=range(8))
def fold_table(
    table: tl.int64,
    sums: tl.int64,
    squares: tl.int64,
    lows: tl.int64,
    highs: tl.int64,
    zeros: tl.int64,
    scale: tl.int64,
    num_added: tl.int64,
    MOMENTS: tl.constexpr,
    EXTREMES: tl.constexpr,
    ZEROS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add what was found for one place to its row: sums, extremes and zeros by one program each.

    The table has four numbers for a place: the address of its row, its first row in the buffers, how many are its own,
    and how many numbers each stands for. It stays while the graph is used; only the addresses of the buffers change.
    """
    entry = table.to(tl.pointer_type(tl.int64)) + 4 * tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(entry).to(tl.pointer_type(tl.float64))
    begin = tl.load(entry + 1)
    count = tl.load(entry + 2)
    end = begin + count
    factor = factor_of(scale)
    if part == 0:
        sum_ = tl.full((), 0.0, tl.float64)
        spread = tl.full((), 0.0, tl.float64)
        if MOMENTS:
            sum_, spread = _added(sums, squares, begin, end, WIDTH)
        size = count * tl.load(entry + 3)
        tl.store(row, tl.load(row) + 1.0)  # fires
        tl.store(row + 1, tl.load(row + 1) + size.to(tl.float64))
        tl.store(row + 2, tl.load(row + 2) + sum_ * factor)
        tl.store(row + 3, tl.load(row + 3) + spread * factor * factor)
        if not EXTREMES:
            finite = is_finite(sum_) & is_finite(spread)
            tl.store(row + 5, tl.load(row + 5) + tl.where(finite, 0.0, 1.0).to(tl.float64))
    elif part == 1:
        if EXTREMES:
            low_, high_ = _ends(lows, highs, begin, end, WIDTH)
            finite = is_finite(low_) & is_finite(high_)
            tl.store(row + 5, tl.load(row + 5) + tl.where(finite | (count == 0), 0.0, 1.0).to(tl.float64))
            # Of a place with something else than numbers, the rest was not looked at.
            good_low = tl.where(finite, low_, -INF).to(tl.float64)
            good_high = tl.where(finite, high_, -INF).to(tl.float64)
            kept = row + num_added
            tl.store(kept, higher(tl.load(kept), low_ * factor))
            tl.store(kept + 1, higher(tl.load(kept + 1), high_ * factor))
            tl.store(kept + 2, higher(tl.load(kept + 2), good_low * factor))
            tl.store(kept + 3, higher(tl.load(kept + 3), good_high * factor))
    elif ZEROS:
        tl.store(row + 4, tl.load(row + 4) + _counted(zeros, begin, end, WIDTH))
