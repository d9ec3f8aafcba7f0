"""Compare two runs: pair their values, measure the errors, tell rounding from bugs, and find where they part.

Users call `compare`, and ``hookline compare`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.debug.compare.align_runs import Alignment, align
from hookline.debug.compare.blame_modules import find_blame
from hookline.debug.compare.compare_values import compare_pairs, measure
from hookline.debug.compare.comparison import Comparison
from hookline.debug.compare.error_thresholds import AllowedErrors
from hookline.debug.compare.judge_errors import NoiseFloors, noise_floors
from hookline.debug.compare.name_rules import DEFAULT_RULES, Rule
from hookline.debug.compare.rounding import ALLOWED
from hookline.debug.compare.run_values import RunSource, RunValues, read_run
from hookline.debug.compare.unshard_values import DimsOption
from hookline.debug.trace.trace_record import RowTable
from hookline.errors import CompareError, OptionError

__all__ = ["compare"]


def compare(
    a: RunSource,
    b: RunSource,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    thresholds: Mapping[str, float | Mapping[str, float]] | None = None,
    noise: RunSource | Sequence[RunSource] | None = None,
    rules: Sequence[Rule] = DEFAULT_RULES,
    rows: tuple[Any, Any] | None = None,
    dims: DimsOption = None,
    mesh: Mapping[str, int] | None = None,
    tensors_only: bool = False,
) -> Comparison:
    """Find where two runs part, and whether that is rounding or a bug.

    Recipe::

        found = hookline.compare("trace_a", "trace_b")
        print(found)  # the first divergence, then the largest errors
        found.blame  # 'transformer.h.3.mlp.c_fc', or None

    Each run is the folder of a trace, what ``read_trace`` or ``capture`` gave, a safetensors file, a folder of ``.npy``
    files, or a dict from names to tensors. Values are paired by kind, site, leaf, step and call; by rows where both say
    whose their rows are. What has no partner is listed, and what was paired in another way says how. Without tensors,
    errors are estimated from fingerprints, and marked as estimates.

    A value is the same if the user's thresholds allow its error, or, where there are none for it, if the error is
    within rounding. The first that is not the same, in the order of the calls, is blamed; later ones follow from it.

    Args:
        a: The reference.
        b: The run that is in question.
        atol, rtol: Allow every entry to differ by ``atol + rtol * |a|``, as ``torch.allclose`` does.
        thresholds: Bounds for sites by pattern: a number for the relative error, or by measure:
            ``{"layers.#.mlp": 1e-3, "lm_head": {"max_abs": 0.1}}`` (``rel``, ``rel_diff``, ``max_abs``, ``mean_abs``).
            The first pattern that matches counts, before ``atol`` and ``rtol``.
        noise: Other runs of A that differ by rounding alone: in float64, repeated, or with the batch in another order
            (and put back). What they differ by is the noise floor of each site. Without them it is modelled by the
            dtypes and the depth.
        rules: Which sites are the same although fused, paired or named in another way.
        rows: For A and for B, whose the rows are: `padded_rows`, `packed_rows`, or a key for each row. Traces know.
        dims: How tensors lie on ranks, ``"b s h[tp] d"``, for all sites or by pattern; DTensors know.
        mesh: Sizes of the axes that ``dims`` names, the outermost first; needed if there are several.
        tensors_only: Leave out what only fingerprints are there of, instead of estimating its error.

    Raises:
        CompareError: (a ValueError) nothing of the two can be compared; the message says why.
        TraceError: (a RuntimeError) a path that holds no trace.
    """
    allowed = AllowedErrors(atol=atol, rtol=rtol, thresholds=thresholds)
    rows_a, rows_b = _row_pair(rows)
    run_a, run_b = read_run(a, "A", rows_a), read_run(b, "B", rows_b)
    found = align(run_a, run_b, rules=rules, dims=dims, mesh=mesh)
    found.notes += _unfit_rows(run_a, rows_a) + _unfit_rows(run_b, rows_b)
    pairs = [pair for pair in found.pairs if pair.has_tensors] if tensors_only else found.pairs
    measured = measure(
        pairs,
        found.unpaired,
        problems := [*run_a.problems, *run_b.problems],
    )
    if not measured:
        raise CompareError(_why_nothing(found, run_a, run_b))
    floors = _measured_noise(a, rows_a, noise, found.notes, rules=rules, dims=dims, mesh=mesh)
    found.notes += [*run_a.notes, *run_b.notes]
    values = compare_pairs(measured, allowed, floors)
    if (atol is not None or rtol is not None) and any(errors.is_estimate for _, errors in measured):
        found.notes.append("atol and rtol were held against estimates, which are no bounds: trace with tensors=.")
    found.notes += [f"No site matches the threshold {pattern!r}." for pattern in allowed.unused_patterns()]
    return Comparison(
        values,
        [] if found.few_partners else find_blame(values, found.unpaired, found.lost),
        found.only_a,
        found.only_b,
        found.unpaired,
        found.notes,
        problems,
        (_name_of(a, "A"), _name_of(b, "B")),
        [*run_a.left_out, *run_b.left_out],
        found.missing,
        {**allowed.to_json(), "rounding": ALLOWED, "noise": "modelled" if noise is None else "measured"},
    )


def _row_pair(rows: Any) -> tuple[Any, Any]:
    if rows is None:
        return None, None
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise OptionError("rows= takes a pair, for A and for B: rows=(padded_rows(mask), packed_rows([5, 7])).")
    return rows[0], rows[1]


def _unfit_rows(run: RunValues, rows: Any) -> list[str]:
    """Return a note if rows were given for a run, and no tensor of it has so many."""
    if rows is None or any(value.rows is not None for value in run.values):
        return []
    what = f"{sum(rows.lengths)} tokens of {len(rows.requests)} requests" if isinstance(rows, RowTable) else len(rows)
    shapes = ", ".join(map(str, list(dict.fromkeys(value.shape for value in run.values))[:3]))
    return [f"The rows= of {run.name} ({what}) fit no tensor of it; it has {shapes}, …."]


def _name_of(source: RunSource, otherwise: str) -> str:
    return str(source) if isinstance(source, str | Path) else otherwise


def _why_nothing(found: Alignment, a: RunValues, b: RunValues) -> str:
    if found.unpaired:
        first = found.unpaired[0]
        notes = " ".join(found.notes)
        return f"Nothing can be compared: {first.site or 'the model'} ({first.kind}): {first.why}. {notes}"
    if found.pairs:
        count = len(found.pairs)
        return f"{count} values are in A and in B, but no tensor of both: trace with tensors=, or take estimates."
    steps = [sorted({value.step for value in run.values}) for run in (a, b)]
    if {value.site for value in a.values} & {value.site for value in b.values} and not set(steps[0]) & set(steps[1]):
        return f"A has steps {steps[0]}, B has {steps[1]}: none in common, and not as many. Trace the same steps."
    have = [", ".join(map(repr, sorted({value.site for value in run.values})[:3])) for run in (a, b)]
    return (
        f"A and B have no site in common: A has {have[0]}…, B has {have[1]}…. "
        "Are they of the same model? Names can be made equal by rules=[RenameRule(pattern, replacement)]."
    )


def _measured_noise(a: RunSource, rows: Any, noise: Any, notes: list[str], **options: Any) -> NoiseFloors:
    """Return the noise floors that other runs of A show; nothing without them."""
    if noise is None:
        return {}
    given = [noise] if isinstance(noise, str | Path | Mapping) or hasattr(noise, "records") else list(noise)
    measured = []
    for number, source in enumerate(given):
        reference = read_run(a, "A", rows)
        other = read_run(source, f"noise run {number}", rows)
        found = align(reference, other, **options)
        measured.append(measure(found.pairs, [], other.problems))
        if measured[-1] and all(errors.is_equal for _, errors in measured[-1]):
            notes.append(f"Noise run {number} is A to the bit: it measures no rounding. Give a run in float64.")
        if not measured[-1]:
            raise CompareError(f"Noise run {number} has no site in common with A: give another run of the same model.")
        notes += [f"Noise: {problem}" for problem in other.problems]
    return noise_floors(measured)
