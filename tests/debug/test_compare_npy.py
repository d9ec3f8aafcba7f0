"""Two folders of arrays: which files agree, and what a script exits with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hookline.debug.precision.compare_npy import compare_npy_folders
from hookline.errors import OptionError


def write(folder: Path, **arrays: object) -> Path:
    (folder / "rank_0").mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / "rank_0" / f"{name}.npy", array)
    return folder


def test_values_shapes_dtypes_and_broken_files_are_told_apart(tmp_path) -> None:
    """The worst first; NaN is unlike NaN unless asked."""
    x, n = np.ones(3, np.float32), np.array([1.0, np.nan])
    a = write(tmp_path / "a", same=x, off=x, shape=x, dtype=x, nan=n, broken=x, flag=x > 0, text=["a"])
    b = write(
        tmp_path / "b", same=x, off=x * 1.5, shape=x[:2], dtype=x.astype(float), nan=n, broken=x, flag=x > 0, text=["a"]
    )
    (b / "rank_0" / "broken.npy").write_bytes(b"no array")
    found = compare_npy_folders(a, b)
    verdicts = {Path(file.name).stem: (file.verdict, file.reason) for file in found.files}
    assert verdicts["same"] == verdicts["flag"] == ("pass", "")
    assert verdicts["off"] == ("fail", "larger than the tolerance")
    assert verdicts["nan"] == ("fail", "not finite: 1 in a, 1 in b")
    assert verdicts["shape"] == ("error", "shapes (3,) and (2,)")
    assert verdicts["dtype"] == ("error", "dtypes float32 and float64")
    assert verdicts["broken"][0] == verdicts["text"][0] == "error"
    assert found.exit_code == 1
    assert found.summary == "Summary: 2 passed, 2 failed, 4 errors"
    off = next(file for file in found.files if "off" in file.name)
    assert (off.max_abs, off.max_rel) == (0.5, pytest.approx(1 / 3))
    assert "error" in str(found).splitlines()[2]
    lenient = compare_npy_folders(a, b, rtol=1.0, equal_nan=True)
    assert {Path(file.name).stem for file in lenient.files if file.verdict == "fail"} == set()


def test_folders_without_a_common_file_fail_and_a_missing_one_is_an_error(tmp_path) -> None:
    """Nothing compared is not a success."""
    found = compare_npy_folders(write(tmp_path / "a", x=np.ones(1)), write(tmp_path / "b", y=np.ones(1)))
    assert found.exit_code == 1
    assert "no file is in both folders" in str(found)
    with pytest.raises(OptionError, match="There is no folder"):
        compare_npy_folders(tmp_path / "a", tmp_path / "c")
