"""Reduce tensors on the GPU: programs in Triton, which `Kernel` (kernel.py) launches by name.

Only `Kernel` (by `program_named`, when it first launches one) and triton_fingerprint.py of ``debug.compare`` (`job_of`,
`FIELDS`) import this file, since Triton may not be installed. Tests get programs by `program_named` too.

``reduce_chunks`` reads tensors once. Each of its programs reads one chunk, some tiles of 4 × WIDTH numbers, and leaves
what it found in its slot: one column of partial results. ``merge_slots`` adds the slots of a tensor to rows. No program
writes where another one does, so the numbers are the same in every run. ``fold_rows`` adds up what a compiled graph has
found in *slices* of a tensor, its own rows (graph.py), into the row of a place. ``count_exponents`` counts whole
numbers by atomic operations: the same in whichever order programs come.

The columns of a row stand here as numbers (2 is the sum, 3 the squares, up to 7; then thresholds; from ``num_added`` on
the extremes): row.py has their order, and its head who else knows it. Tables and arguments are read by position, as
kernel.py writes them. The five parts that ``fold_rows`` adds up come in the order of `_by_row` and with the types of
`_TYPES`, both in graph.py. `_BINS` is the one of engine.py, `_TINY` the one of row.py. Change the files together. A new
program also needs what the head of kernel.py lists: its warps in `_WARPS`, a `_launch`, and a case in test_kernel.py.

Numbers go in by address. All arguments are 64 bits wide, and none is specialized on, so that one compiled program fits
every call. A thread reads 16 bytes at a time, and spends 6.6 instructions on each number of 16 bits (machine code for
sm_90; 9.3 without comparing two at a time), where the memory of an H200 leaves time for fifteen. What is not finite
needs none: it shows in the extremes at the end, and only then is a chunk read once more, in float64, to count it. So
are chunks whose squares are too large or too small for float32.
"""
# mypy: ignore-errors
# ruff: noqa: SIM300
# No `from __future__ import annotations`: Triton reads the types of arguments.

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
_TINY = tl.constexpr(1e-30)
"""Sums of squares below this may have lost numbers that are too small to be squared in float32."""
FIELDS = tl.constexpr(6)
"""Of a job: first program, number of programs, address, size, tiles per program, address of the scale or 0. The same
number as `kernel.FIELDS`, and the same order as there."""
_SAMPLE = tl.constexpr(32)
"""How many numbers the centre is the mean of: as many as a warp has threads, so that no warp waits for another."""


@triton.jit
def lower(one, other):
    return tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def higher(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_finite(value):
    return tl.abs(value) < INF


@triton.jit
def _joined(sum1, squares1, low1, high1, zeros1, sum2, squares2, low2, high2, zeros2):
    """Join all at once: a reduction across threads is mostly waiting (12 barriers fewer than one by one)."""
    return sum1 + sum2, squares1 + squares2, lower(low1, low2), higher(high1, high2), zeros1 + zeros2


@triton.jit
def _centre(numbers, left, WIDE: tl.constexpr):
    """Return the mean of the first few numbers, to take sums about; 0 if that is not finite."""
    lanes = tl.arange(0, _SAMPLE)
    share = 1.0 / tl.minimum(left, _SAMPLE).to(WIDE)
    some = tl.load(numbers + lanes, mask=lanes < left, other=0).to(WIDE)
    mean = tl.sum(some * share, 0)
    return tl.where(is_finite(mean), mean, 0.0)


# -- two numbers of 16 bits at a time ------------------------------------------------------------------------


@triton.jit
def _half_of(pair, HALF: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the first number of a pair, for a HALF of 0, or the second one."""
    if ELEMENT == tl.bfloat16:
        bits = pair & -65536 if HALF else pair << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        bits = pair >> 16 if HALF else pair
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _of_pairs(INSTRUCTION: tl.constexpr, one, other):
    return tl.inline_asm_elementwise(INSTRUCTION, "=r,r,r", [one, other], tl.int32, True, 1)


@triton.jit
def _look_again(numbers, left, WIDTH: tl.constexpr):
    """Return all statistics of a chunk that has something unusual in it, in float64."""
    lanes = tl.arange(0, WIDTH)
    sum_ = tl.zeros([WIDTH], tl.float64)
    squares = tl.zeros([WIDTH], tl.float64)
    nan = tl.zeros([WIDTH], tl.int32)
    inf = tl.zeros([WIDTH], tl.int32)
    low = tl.full([WIDTH], INF, tl.float64)
    high = tl.full([WIDTH], -INF, tl.float64)
    for at in range(0, left, WIDTH):
        inside = at + lanes < left
        x = tl.load(numbers + at + lanes, mask=inside, other=0).to(tl.float64)
        finite = is_finite(x)
        sum_ += x
        squares += x * x
        nan += (x != x).to(tl.int32)
        inf += (tl.abs(x) == INF).to(tl.int32)
        low = tl.minimum(low, tl.where(inside & finite, x, INF))
        high = tl.maximum(high, tl.where(inside & finite, x, -INF))
    return tl.sum(sum_, 0), tl.sum(squares, 0), tl.sum(nan, 0), tl.sum(inf, 0), tl.min(low, 0), tl.max(high, 0)


@triton.jit
def job_of(program, jobs, num_jobs, JOBS: tl.constexpr):
    """Return where the job of a program begins in a table; the first field of a job is its first program."""
    table = jobs.to(tl.pointer_type(tl.int64))
    places = tl.arange(0, JOBS)
    firsts = tl.load(table + places * FIELDS, mask=places < num_jobs, other=1 << 62)
    return table + (tl.sum((firsts <= program).to(tl.int32), 0) - 1) * FIELDS


@triton.jit(do_not_specialize=range(7))
def reduce_chunks(
    jobs: tl.int64,
    num_jobs: tl.int64,
    slots: tl.int64,
    num_slots: tl.int64,
    offset: tl.int64,
    num_added: tl.int64,
    thresholds: tl.int64,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LOWER: tl.constexpr,
    HIGHER: tl.constexpr,
    OVER: tl.constexpr,
    JOBS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Reduce one chunk of one tensor into the slot of this program; a slot has the columns of a row.

    ``jobs`` tells which program begins which tensor. Programs are numbered from ``offset`` on, for launches that share
    the slots. LOWER and HIGHER are the instructions that compare two numbers of 16 bits at a time, empty for none. OVER
    is how many thresholds are counted, a power of two; those that fill it up are infinite.
    """
    program = offset + tl.program_id(0)
    job = job_of(program, jobs, num_jobs, JOBS)
    address = tl.load(job + 2)
    size = tl.load(job + 3)
    tiles = tl.load(job + 4)
    scale = tl.load(job + 5)
    begin = (program - tl.load(job)) * (tiles * (4 * WIDTH))
    left = tl.minimum(size - begin, tiles * (4 * WIDTH)).to(tl.int32)
    numbers = address.to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        numbers = tl.multiple_of(numbers, 16)
    numbers += begin

    PAIRS: tl.constexpr = LOWER != ""
    LANES: tl.constexpr = WIDTH // 2 if PAIRS else WIDTH
    lanes = tl.arange(0, LANES)
    sum_ = tl.zeros([LANES], WIDE)
    squares = tl.zeros([LANES], WIDE)
    low = tl.full([LANES], INF, WIDE)
    high = tl.full([LANES], -INF, WIDE)
    zeros = tl.zeros([LANES], tl.int32)
    centre = _centre(numbers, left, WIDE)
    if OVER > 0:
        columns = tl.arange(0, OVER)
        limits = tl.load(thresholds.to(tl.pointer_type(tl.float64)) + columns).to(WIDE)
        if scale != 0:
            limits *= tl.load(scale.to(tl.pointer_type(tl.float32))).to(WIDE)
        over = tl.zeros([LANES, OVER], tl.int32)

    place = numbers
    if PAIRS:
        words = place.to(tl.pointer_type(tl.int32))
        # What comparing begins with: twice infinity, and twice minus infinity, as the bits of two numbers.
        INF_PAIR: tl.constexpr = 0x7F807F80 if ELEMENT == tl.bfloat16 else 0x7C007C00
        low_pair = tl.full([LANES], INF_PAIR, tl.int32)
        high_pair = tl.full([LANES], INF_PAIR - 0x7FFF8000, tl.int32)  # with both signs
        filled = tl.zeros([LANES], tl.int32)
        for _ in range(left // (4 * WIDTH)):
            for part in tl.static_range(4):
                pair = tl.load(words + (part * LANES + lanes))
                low_pair = _of_pairs(LOWER, low_pair, pair)
                high_pair = _of_pairs(HIGHER, high_pair, pair)
                # 1 for each half, unless it is a zero of either sign
                filled += _of_pairs("min.u16x2 $0, $1, $2;", pair & 0x7FFF7FFF, 0x00010001)
                for half in tl.static_range(2):
                    about = _half_of(pair, half, ELEMENT) - centre
                    sum_ += about
                    squares += about * about
            words += 4 * LANES
        low = lower(_half_of(low_pair, 0, ELEMENT), _half_of(low_pair, 1, ELEMENT))
        high = higher(_half_of(high_pair, 0, ELEMENT), _half_of(high_pair, 1, ELEMENT))
        # 16 bits each: a chunk has less than 2^16 pairs per lane
        zeros = left // (4 * WIDTH) * 8 - (filled & 0xFFFF) - ((filled >> 16) & 0xFFFF)
        place = words.to(tl.pointer_type(ELEMENT))
    else:
        for _ in range(left // (4 * WIDTH)):
            for part in tl.static_range(4):
                x = tl.load(place + (part * LANES + lanes)).to(WIDE)
                about = x - centre
                sum_ += about
                squares += about * about
                low = lower(low, x)
                high = higher(high, x)
                zeros += (x == 0.0).to(tl.int32)
                if OVER > 0:
                    over += (tl.abs(x)[:, None] > limits[None, :]).to(tl.int32)
            place += 4 * LANES
    rest = left % (4 * WIDTH)
    for at in range(0, rest, LANES):
        inside = at + lanes < rest
        x = tl.load(place + (at + lanes), mask=inside, other=0).to(WIDE)
        about = tl.where(inside, x - centre, 0.0)
        sum_ += about
        squares += about * about
        low = lower(low, tl.where(inside, x, INF))
        high = higher(high, tl.where(inside, x, -INF))
        zeros += ((x == 0.0) & inside).to(tl.int32)
        if OVER > 0:  # what is not inside is 0, and no limit is lower
            over += (tl.abs(x)[:, None] > limits[None, :]).to(tl.int32)

    about, spread, least, most, num_zeros = tl.reduce((sum_, squares, low, high, zeros), 0, _joined)
    is_usual = is_finite(least) & is_finite(most) & is_finite(about) & is_finite(spread)
    is_usual = is_usual & ((spread >= _TINY) | (least == most))
    # From here in float64, and sums about the centre become sums about zero.
    about = about.to(tl.float64)
    middle = centre.to(tl.float64)
    count = left.to(tl.float64)
    total = about + count * middle
    power = spread.to(tl.float64) + 2 * middle * about + count * middle * middle
    nan = tl.full((), 0, tl.int32)
    inf = tl.full((), 0, tl.int32)
    finite_least = least.to(tl.float64)
    finite_most = most.to(tl.float64)
    if is_usual == 0:
        total, power, nan, inf, finite_least, finite_most = _look_again(numbers, left, WIDTH // 4)
    column = slots.to(tl.pointer_type(tl.float64)) + program
    tl.store(column + 2 * num_slots, total)
    tl.store(column + 3 * num_slots, power)
    tl.store(column + 4 * num_slots, num_zeros.to(tl.float64))
    tl.store(column + 5 * num_slots, tl.where(nan + inf > 0, 1.0, 0.0).to(tl.float64))
    tl.store(column + 6 * num_slots, nan.to(tl.float64))
    tl.store(column + 7 * num_slots, inf.to(tl.float64))
    kept = column + num_added * num_slots
    if OVER > 0:
        is_column = 8 + columns < num_added
        tl.store(column + (8 + columns) * num_slots, tl.sum(over, 0).to(tl.float64), mask=is_column)
    tl.store(kept, -least.to(tl.float64))
    tl.store(kept + num_slots, most.to(tl.float64))
    tl.store(kept + 2 * num_slots, -finite_least)
    tl.store(kept + 3 * num_slots, finite_most)


# -- adding to rows ------------------------------------------------------------------------------------------


@triton.jit
def factor_of(scale):
    """Return the factor that divides by the scale at an address, if any; 1 for a scale of zero."""
    factor = tl.full((), 1.0, tl.float64)
    if scale != 0:
        divisor = tl.load(scale.to(tl.pointer_type(tl.float32))).to(tl.float64)
        factor = tl.where(divisor == 0.0, 1.0, 1.0 / divisor)
    return factor


@triton.jit(do_not_specialize=range(5))
def merge_slots(
    jobs: tl.int64, uses: tl.int64, slots: tl.int64, num_slots: tl.int64, num_added: tl.int64, WIDTH: tl.constexpr
):
    """Add one column of the slots of one job to one row; a use has the address of the row and the number of the job."""
    use = tl.program_id(0)
    number = tl.program_id(1)
    entry = uses.to(tl.pointer_type(tl.int64)) + 2 * use
    row = tl.load(entry)
    job = jobs.to(tl.pointer_type(tl.int64)) + tl.load(entry + 1) * FIELDS
    first = tl.load(job)
    count = tl.load(job + 1)
    size = tl.load(job + 3)
    scale = tl.load(job + 5)
    cell = row.to(tl.pointer_type(tl.float64)) + number  # the number of a column
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
def _add_to(cell, value):
    tl.store(cell, tl.load(cell) + value)


@triton.jit
def _raise_to(cell, value):
    tl.store(cell, higher(tl.load(cell), value))


@triton.jit(do_not_specialize=range(8))
def fold_rows(
    table: tl.int64,
    sums: tl.int64,
    squares: tl.int64,
    lows: tl.int64,
    highs: tl.int64,
    zeros: tl.int64,
    scale: tl.int64,
    num_added: tl.int64,
    WIDTH: tl.constexpr,
):
    """Add what a graph has found for one place to its row: sums, extremes and zeros by one program each.

    The table has four numbers for a place: the address of its row, its first slice in the buffers, how many slices are
    its own, and how many numbers each stands for. It stays while the graph is used; only the addresses of the buffers
    change. What is not finite is only seen here, not counted; the next graph that is compiled hands over the tensor
    itself.
    """
    entry = table.to(tl.pointer_type(tl.int64)) + 4 * tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(entry).to(tl.pointer_type(tl.float64))
    begin = tl.load(entry + 1)
    count = tl.load(entry + 2)
    end = begin + count
    factor = factor_of(scale)
    lanes = tl.arange(0, WIDTH)
    if part == 0:
        total = tl.zeros([WIDTH], tl.float64)
        power = tl.zeros([WIDTH], tl.float64)
        for at in range(begin, end, WIDTH):
            inside = at + lanes < end
            total += tl.load(sums.to(tl.pointer_type(tl.float64)) + at + lanes, mask=inside, other=0.0)
            power += tl.load(squares.to(tl.pointer_type(tl.float64)) + at + lanes, mask=inside, other=0.0)
        _add_to(row, 1.0)  # fires
        _add_to(row + 1, (count * tl.load(entry + 3)).to(tl.float64))
        _add_to(row + 2, tl.sum(total, 0) * factor)
        _add_to(row + 3, tl.sum(power, 0) * factor * factor)
    elif part == 1:
        least = tl.full([WIDTH], INF, tl.float32)
        most = tl.full([WIDTH], -INF, tl.float32)
        for at in range(begin, end, WIDTH):
            inside = at + lanes < end
            least = lower(least, tl.load(lows.to(tl.pointer_type(tl.float32)) + at + lanes, mask=inside, other=INF))
            most = higher(most, tl.load(highs.to(tl.pointer_type(tl.float32)) + at + lanes, mask=inside, other=-INF))
        low = -tl.reduce(least, 0, lower).to(tl.float64)
        high = tl.reduce(most, 0, higher).to(tl.float64)
        finite = is_finite(low) & is_finite(high)
        _add_to(row + 5, tl.where(finite | (count == 0), 0.0, 1.0).to(tl.float64))
        kept = row + num_added
        _raise_to(kept, low * factor)
        _raise_to(kept + 1, high * factor)
        # Of a place with something else than numbers, the rest was not looked at.
        _raise_to(kept + 2, tl.where(finite, low, -INF).to(tl.float64) * factor)
        _raise_to(kept + 3, tl.where(finite, high, -INF).to(tl.float64) * factor)
    else:
        none = tl.zeros([WIDTH], tl.int64)
        for at in range(begin, end, WIDTH):
            none += tl.load(zeros.to(tl.pointer_type(tl.int32)) + at + lanes, mask=at + lanes < end, other=0)
        _add_to(row + 4, tl.sum(none, 0).to(tl.float64))


# -- histograms ----------------------------------------------------------------------------------------------

_BINS = tl.constexpr(256)


@triton.jit(do_not_specialize=range(2))
def count_exponents(jobs: tl.int64, num_jobs: tl.int64, ELEMENT: tl.constexpr, JOBS: tl.constexpr, WIDTH: tl.constexpr):
    """Count the exponents of one share of one tensor.

    A job has its first program, the address of its bins, the address of its numbers, how many these are, the share of a
    program, and the address of the scale or 0.
    """
    program = tl.program_id(0).to(tl.int64)
    job = job_of(program, jobs, num_jobs, JOBS)
    bins = tl.load(job + 1)
    address = tl.load(job + 2)
    size = tl.load(job + 3)
    share = tl.load(job + 4)
    begin = (program - tl.load(job)) * share
    left = tl.minimum(size - begin, share).to(tl.int32)
    numbers = address.to(tl.pointer_type(ELEMENT)) + begin
    factor = factor_of(tl.load(job + 5))
    lanes = tl.arange(0, WIDTH)
    counts = tl.zeros([_BINS], tl.int32)
    for at in range(0, left, WIDTH):
        x = tl.load(numbers + at + lanes, mask=at + lanes < left, other=0)
        # Divided as torch does it: in float32, and rounded to the type of the tensor.
        if tl.float64 == ELEMENT:
            x = x * factor
        elif ELEMENT.is_floating():
            x = (x.to(tl.float32) * factor.to(tl.float32)).to(ELEMENT)
        counts += tl.histogram((x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & (_BINS - 1), _BINS)
    exponents = tl.arange(0, _BINS)
    beyond = (left + WIDTH - 1) // WIDTH * WIDTH - left  # read as zeros
    counts -= tl.where(exponents == 0, beyond, 0)
    tl.atomic_add(bins.to(tl.pointer_type(tl.int64)) + exponents, counts.to(tl.int64), mask=counts > 0)
