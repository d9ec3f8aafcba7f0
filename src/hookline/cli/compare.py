"""Compare two runs, for people and for CI: ``hookline compare A B``.

`main` calls `compare`, which reads the options and calls `hookline.debug.compare`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hookline.cli.main import DONE, FAILED
from hookline.cli.screen import tell, tell_found
from hookline.errors import HooklineError, OptionError
from hookline.runs.flags import Show, parse
from hookline.runs.folder import LOG

__all__ = ["CompareOptions", "compare"]


@dataclass
class CompareOptions:
    """Find where two runs part, and whether that is rounding or a bug.

    Exit codes: 0 the same within the thresholds (or rounding), 1 they differ, 2 they cannot be compared.

    Examples:
      hookline compare trace_a trace_b
      hookline compare trace_a trace_b --noise trace_float64 --html compared.html
      hookline compare trace_a trace_b --threshold 'layers.#.mlp=1e-3' --threshold 'lm_head=max_abs:0.1' --json
      hookline compare one_gpu two_gpus --dims '*.q_proj=b s h[tp]'
    """

    a: Annotated[str, Show("A", is_word=True)]
    """The reference: the folder of a trace, a safetensors file, or a folder of .npy files."""
    b: Annotated[str, Show("B", is_word=True)]
    """The run in question."""
    atol: Annotated[float | None, Show("NUMBER")] = None
    """Allow each number to differ by this much."""
    rtol: Annotated[float | None, Show("NUMBER")] = None
    """Allow each number to differ by this part of it."""
    threshold: Annotated[tuple[str, ...], Show("PATTERN=BOUND ...")] = ()
    """Bounds for sites: a relative error, or MEASURE:NUMBER[,…] with rel, rel_diff, max_abs or mean_abs."""
    noise: Annotated[tuple[str, ...], Show("PATH ...")] = ()
    """Other traces of A that differ by rounding alone (float64, repeated, permuted): what is noise at each site."""
    dims: Annotated[tuple[str, ...], Show("[PATTERN=]DIMS ...")] = ()
    """How tensors lie on ranks, such as 'b s h[tp] d', for all sites or for those that a pattern matches."""
    mesh: Annotated[tuple[str, ...], Show("AXIS=RANKS ...")] = ()
    """How many ranks each axis of --dims has, the outermost first."""
    tensors: bool = False
    """Compare only what both traces have tensors of; no estimates from fingerprints."""
    json: bool = False
    """Print everything as JSON."""
    html: Annotated[str | None, Show("FILE")] = None
    """Write a page with a map of layers and calls, which opens from disk."""


def compare(arguments: Sequence[str]) -> int:
    """Print where the runs part; return 0 if they do not, 1 if they do."""
    options = parse(CompareOptions, arguments, "compare")
    from hookline.debug.compare.compare import compare as compare_runs
    from hookline.debug.compare.judge import parse_thresholds

    try:
        found = compare_runs(
            options.a,
            options.b,
            atol=options.atol,
            rtol=options.rtol,
            thresholds=parse_thresholds(options.threshold),
            noise=list(options.noise) or None,
            dims=_dims(options.dims),
            mesh=_mesh(options.mesh),
            tensors_only=options.tensors,
        )
    except HooklineError as error:
        if all((Path(path) / LOG).exists() for path in (options.a, options.b)):
            runs = shlex.join([options.a, options.b])
            raise OptionError(f"These are runs, not traces. Side by side: hookline report {runs}.") from error
        raise
    tell_found("compare", found.to_json(), found, as_json=options.json)
    if options.html is not None:
        try:
            page = found.write_html(options.html)
        except OSError as error:
            raise OptionError(f"--html {options.html}: the page cannot be written ({error}).") from error
        if not options.json:
            tell(f"The page is {page}.")
    return DONE if found.ok else FAILED


def _dims(texts: Sequence[str]) -> Any:
    """Return one string for all sites, or strings by pattern."""
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    pairs = [text.partition("=") for text in texts]
    if not all(sign for _, sign, _ in pairs):
        raise OptionError("--dims: write one 'b s h[tp] d' for all sites, or PATTERN='b s h[tp] d' for each.")
    return {pattern: dims for pattern, _, dims in pairs} or None


def _mesh(texts: Sequence[str]) -> dict[str, int] | None:
    found = {}
    for text in texts:
        axis, _, size = text.partition("=")
        if not size.isdecimal():
            raise OptionError(f"--mesh {text!r}: write AXIS=RANKS, such as dp=2.")
        found[axis] = int(size)
    return found or None
