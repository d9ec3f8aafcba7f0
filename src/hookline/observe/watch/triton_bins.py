"""Count the binary exponents of tensors on the GPU: a program in Triton, which `exponent_kernel` launches.

Counts are whole numbers, added to bins by atomic operations: the same in every run, in whichever order programs come.
"""
# mypy: ignore-errors
# No `from __future__ import annotations`: Triton reads the types of arguments.

import triton
import triton.language as tl

from hookline.observe.watch.triton_merge import factor_of
from hookline.observe.watch.triton_reduce import job_of

__all__ = ["count_exponents"]

_FIELDS = tl.constexpr(6)
"""Of a job: first program, address of the bins, address of the numbers, how many, a program's share, the scale or 0."""
_BINS = tl.constexpr(256)


@triton.jit(do_not_specialize=range(7))
def count_exponents(
    jobs: tl.int64,
    num_jobs: tl.int64,
    bins: tl.int64,
    address: tl.int64,
    size: tl.int64,
    share: tl.int64,
    scale: tl.int64,
    ELEMENT: tl.constexpr,
    SINGLE: tl.constexpr,
    JOBS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Count one share of one tensor.

    Of several tensors, ``jobs`` tells which program begins which; of a SINGLE one, the arguments do.
    """
    program = tl.program_id(0).to(tl.int64)
    begin = program * share
    if not SINGLE:
        job = job_of(program, jobs, num_jobs, _FIELDS, JOBS)
        bins = tl.load(job + 1)
        address = tl.load(job + 2)
        size = tl.load(job + 3)
        share = tl.load(job + 4)
        scale = tl.load(job + 5)
        begin = (program - tl.load(job)) * share
    left = tl.minimum(size - begin, share).to(tl.int32)
    numbers = address.to(tl.pointer_type(ELEMENT)) + begin
    factor = factor_of(scale)
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
