"""Compare two runs: pair their values, measure the errors, tell rounding from bugs, and find where they part.

Users call `compare`, and ``hookline compare`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.debug.compare.blame import find_blame
from hookline.debug.compare.judge import ALLOWED, AllowedErrors, NoiseFloors, judge, noise_floors
from hookline.debug.compare.key import Pair, names_around
from hookline.debug.compare.measure import measure
from hookline.debug.compare.result import Comparison
from hookline.debug.compare.rows import RowTable
from hookline.debug.compare.rules import DEFAULT_RULES, Rule, few_partners, find_gaps, pair_runs
from hookline.debug.compare.values import DimsOption, Run, RunSource, read_run, unshard
from hookline.errors import CompareError, OptionError


def compare(
    a: RunSource,
    b: RunSource,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    thresholds: Mapping[str, float | Mapping[str, float]] | None = None,
    noise: RunSource | Sequence[RunSource] | None = None,
    rules: Sequence[Rule] = DEFAULT_RULES,
    rows: tuple[RowTable, RowTable] | None = None,
    dims: DimsOption = None,
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
        rows: For A and for B, whose the rows are: `padded_rows` or `packed_rows`. Traces know.
        dims: How tensors lie on ranks, ``"b s h[tp] d"``, for all sites or by pattern; DTensors know.

    Raises:
        CompareError: (a ValueError) nothing of the two can be compared; the message says why.
        TraceError: (a RuntimeError) a path that holds no trace.
    """
    allowed = AllowedErrors(atol=atol, rtol=rtol, thresholds=thresholds)
    rows_a, rows_b = _row_pair(rows)

    def read(source: RunSource, name: str, rows: RowTable | None) -> Run:
        run = read_run(source, name, rows)
        has_ranks = len({key.rank for key in run.values}) > 1
        return unshard(run, dims) if has_ranks else run

    run_a, run_b = read(a, "A", rows_a), read(b, "B", rows_b)
    notes: list[str] = []
    pairs = pair_runs(run_a, run_b, rules, notes)
    strangers, gaps = few_partners(pairs), find_gaps(pairs, run_a, run_b)
    notes += [*_unfit_rows(run_a, rows_a), *_unfit_rows(run_b, rows_b)]
    problems = [*run_a.problems, *run_b.problems]
    measure(pairs, problems)
    measured = [pair for pair in pairs if pair.is_measured]
    if not measured:
        raise CompareError(_why_nothing(pairs, notes, run_a, run_b))
    others = [read(source, f"noise run {number}", rows_a) for number, source in enumerate(_sources(noise))]
    floors = _measured_noise(run_a, others, rules, notes)
    notes += [*run_a.notes, *run_b.notes]
    judge(measured, allowed, floors)
    if (atol is not None or rtol is not None) and any(pair.errors.is_estimate for pair in measured):
        notes.append("atol and rtol were held against estimates, which are no bounds: trace with tensors=.")
    notes += [f"No site matches the threshold {pattern!r}." for pattern in allowed.unused_patterns()]
    return Comparison(
        pairs,
        blamed=[] if strangers else find_blame(pairs),
        missing=[*strangers, *gaps, *_lone_dtype(measured)],
        notes=notes,
        problems=problems,
        left_out=[*run_a.left_out, *run_b.left_out],
        names=(_name_of(a, "A"), _name_of(b, "B")),
        limit={**allowed.to_json(), "rounding": ALLOWED, "noise": "modelled" if noise is None else "measured"},
    )


def _row_pair(rows: Any) -> tuple[RowTable | None, RowTable | None]:
    if rows is None:
        return None, None
    if not isinstance(rows, tuple | list) or len(rows) != 2 or not all(isinstance(one, RowTable) for one in rows):
        raise OptionError("rows= takes a pair, for A and for B: rows=(padded_rows(mask), packed_rows([5, 7])).")
    return rows[0], rows[1]


def _unfit_rows(run: Run, rows: RowTable | None) -> list[str]:
    """Return a note if rows were given for a run, and no tensor of it has so many."""
    if rows is None or any(value.rows is not None for value in run.values.values()):
        return []
    shapes = ", ".join(map(str, list(dict.fromkeys(value.shape for value in run.values.values()))[:3]))
    return [
        f"The rows= of {run.name} ({sum(rows.lengths)} tokens of {len(rows.requests)} requests) fit no tensor of it; "
        f"it has {shapes}, …."
    ]


def _lone_dtype(pairs: Sequence[Pair]) -> list[str]:
    """Return a line if one part of the model alone has another dtype in B; a whole run in bfloat16 is meant."""
    changed = [pair for pair in pairs if pair.dtypes[0] != pair.dtypes[1]]
    around = [{*names_around(pair.module), pair.module} for pair in changed]
    part = max(set.intersection(*around), key=len) if around else ""
    if not part or 2 * sum(f"{pair.module}.".startswith(f"{part}.") for pair in pairs) > len(pairs):
        return []
    dtype_a, dtype_b = changed[0].dtypes
    return [f"only {part} is {dtype_b} in B where A has {dtype_a}: give both one dtype."]


def _name_of(source: RunSource, otherwise: str) -> str:
    return str(source) if isinstance(source, str | Path) else otherwise


def _why_nothing(pairs: Sequence[Pair], notes: Sequence[str], a: Run, b: Run) -> str:
    refused = next((pair for pair in pairs if pair.why), None)
    if refused is not None:
        where = f"{refused.site or 'the model'} ({refused.kind})"
        return f"Nothing can be compared: {where}: {refused.why}. {' '.join(notes)}"
    steps = [sorted({key.step for key in run.values}) for run in (a, b)]
    sites = [{key.site for key in run.values} for run in (a, b)]
    if sites[0] & sites[1]:
        return f"A has steps {steps[0]}, B has {steps[1]}: none in common, and not as many. Trace the same steps."
    have = [", ".join(map(repr, sorted(of_run)[:3])) for of_run in sites]
    return (
        f"A and B have no site in common: A has {have[0]}…, B has {have[1]}…. "
        "Are they of the same model? Names can be made equal by rules=[RenameRule(pattern, replacement)]."
    )


def _sources(noise: Any) -> list[RunSource]:
    """Return the runs that ``noise=`` names: none, one or several."""
    if noise is None:
        return []
    return [noise] if isinstance(noise, str | Path | Mapping) or hasattr(noise, "records") else list(noise)


def _measured_noise(a: Run, others: Sequence[Run], rules: Sequence[Rule], notes: list[str]) -> NoiseFloors:
    """Return the noise floors that other runs of A show."""
    found = []
    for other in others:
        problems = list(other.problems)
        pairs = pair_runs(a, other, rules, [])
        measure(pairs, problems)
        measured = [pair for pair in pairs if pair.is_measured]
        name = other.name.capitalize()
        if not measured:
            raise CompareError(f"{name} has no site in common with A: give another run of the same model.")
        if all(pair.errors.is_equal for pair in measured):
            notes.append(f"{name} is A to the bit: it measures no rounding. Give a run in float64.")
        notes += [f"Noise: {problem}" for problem in problems]
        found.append(measured)
    return noise_floors(found)
