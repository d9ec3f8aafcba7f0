"""Compare two folders of ``.npy`` files, as two precision checks with ``save_tensors`` leave them.

Users call `compare_npy_folders`; scripts exit with its ``exit_code``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hookline.errors import OptionError
from hookline.tables import ShownAsTable, Table

__all__ = ["NpyComparison", "NpyDifference", "compare_npy_folders"]

_TINY: Final = 1e-12
"""Keeps a relative error finite where the second value is 0."""


@dataclass(frozen=True, slots=True)
class NpyDifference:
    """Two files of one name."""

    name: str
    """The path inside both folders."""
    verdict: str
    """``pass``, ``fail``, or ``error``: they cannot be compared."""
    reason: str
    """What is wrong, in words; empty if nothing is."""
    max_abs: float
    """The largest difference of two finite values."""
    max_rel: float
    """The largest difference over the size of the second value."""


class NpyComparison(ShownAsTable):
    """What came of two folders; prints as a table, the worst first.

    Recipe: ``sys.exit(compare_npy_folders("a", "b").exit_code)``.
    """

    def __init__(self, files: list[NpyDifference], only_a: list[str], only_b: list[str]) -> None:
        self.files = files
        """Every file that both folders have."""
        self.only_a, self.only_b = only_a, only_b
        """Files that one folder has alone."""

    @property
    def exit_code(self) -> int:
        """0 if all common files pass; 1 if one does not, or there is none. Files of one folder alone change nothing."""
        return 0 if self.files and all(file.verdict == "pass" for file in self.files) else 1

    @property
    def summary(self) -> str:
        """How many passed, failed and could not be compared."""
        counts = {verdict: sum(file.verdict == verdict for file in self.files) for verdict in ("pass", "fail", "error")}
        return f"Summary: {counts['pass']} passed, {counts['fail']} failed, {counts['error']} errors"

    def _table(self) -> Table:
        worst = sorted(self.files, key=lambda file: (-_RANKS[file.verdict], -file.max_rel, file.name))
        rows = [(file.name, file.verdict, f"{file.max_abs:.3g}", f"{file.max_rel:.3g}", file.reason) for file in worst]
        foot = [f"only in {side}: {name}" for side, names in (("a", self.only_a), ("b", self.only_b)) for name in names]
        foot += [] if self.files else ["no file is in both folders"]
        return Table(("file", "verdict", "max abs", "max rel", "why"), rows, (2, 3), foot=(*foot, self.summary))


_RANKS: Final = {"pass": 0, "fail": 1, "error": 2}


def compare_npy_folders(
    a: str | Path, b: str | Path, atol: float = 1e-5, rtol: float = 1e-3, *, equal_nan: bool = False
) -> NpyComparison:
    """Compare the ``.npy`` files that two folders have under the same path.

    Recipe::

        found = compare_npy_folders("checks/before/rank_0", "checks/after/rank_0")
        print(found)
        sys.exit(found.exit_code)

    Args:
        a: A folder, searched with its folders.
        b: The other; the allowed error of a value is ``atol + rtol * abs(value of b)``.
        atol: The absolute part.
        rtol: The relative part.
        equal_nan: Whether a NaN in both is no difference.
    """
    files_a, files_b = _files(Path(a)), _files(Path(b))
    common = [name for name in files_a if name in files_b]
    compared = [_compared(name, files_a[name], files_b[name], atol, rtol, equal_nan) for name in common]
    only_a = [name for name in files_a if name not in files_b]
    return NpyComparison(compared, only_a, [name for name in files_b if name not in files_a])


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise OptionError(f"There is no folder {folder}; a check with save_tensors=true writes PATH/TIME/rank_0.")
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.npy"))}


def _compared(name: str, a: Path, b: Path, atol: float, rtol: float, equal_nan: bool) -> NpyDifference:
    try:
        one, other = (np.load(path, allow_pickle=False, mmap_mode="r") for path in (a, b))
    except (OSError, ValueError, EOFError) as error:
        return NpyDifference(name, "error", f"cannot be read: {error}", 0.0, 0.0)
    if one.shape != other.shape:
        return NpyDifference(name, "error", f"shapes {one.shape} and {other.shape}", 0.0, 0.0)
    if one.dtype != other.dtype:
        return NpyDifference(name, "error", f"dtypes {one.dtype} and {other.dtype}", 0.0, 0.0)
    if one.dtype.kind not in "biufc":
        return NpyDifference(name, "error", f"no numbers, but {one.dtype}", 0.0, 0.0)
    max_abs, max_rel = _errors(one, other)
    if np.allclose(one, other, atol=atol, rtol=rtol, equal_nan=equal_nan):
        return NpyDifference(name, "pass", "", max_abs, max_rel)
    bad = int((~np.isfinite(one)).sum()), int((~np.isfinite(other)).sum())
    reason = f"not finite: {bad[0]} in a, {bad[1]} in b" if any(bad) else "larger than the tolerance"
    return NpyDifference(name, "fail", reason, max_abs, max_rel)


def _errors(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return the largest absolute and relative error; what is not finite counts as 0."""
    if not one.size:
        return 0.0, 0.0
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        x, y = one.astype(wide), other.astype(wide)
        gap = np.abs(x - y)
        relative = gap / (np.abs(y) + _TINY)
    return float(np.max(gap, where=np.isfinite(gap), initial=0.0)), float(
        np.max(relative, where=np.isfinite(relative), initial=0.0)
    )
