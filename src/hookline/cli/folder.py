"""The folder of a run: where it is, and ``run.json``, which says what the run was.

Made by `run` for each strategy, found again by ``--resume``, ``report`` and ``replay``.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from hookline.errors import OptionError

__all__ = ["LOG", "new_folder", "newest_run", "next_folder", "plain", "read_run_file", "run_folder", "write_run_file"]

LOG: Final = "records.jsonl"
"""The record log."""
_FACTS: Final = "run.json"


def next_folder(output_dir: Path, experiment: str, strategy: str) -> Path:
    """Where a run that begins now would be: ``{strategy}``, or ``{strategy}_1``, ``_2`` … if that is a run already."""
    base = output_dir / experiment / strategy
    folder, number = base, 0
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        number += 1
        folder = base.with_name(f"{strategy}_{number}")
    return folder


def new_folder(output_dir: Path, experiment: str, strategy: str) -> Path:
    """Make it; of two runs that begin at the same moment, each has its own."""
    parent = output_dir / experiment
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = next_folder(output_dir, experiment, strategy)
            try:
                folder.mkdir()
            except FileExistsError:  # an empty one will do; one that another run has just made will not be empty long
                if not folder.is_dir() or any(folder.iterdir()):
                    continue
            return folder
    except OSError as error:
        raise OptionError(
            f"A folder for the run cannot be made in {parent}: {error.strerror}. Another place: --output-dir DIR."
        ) from None


def newest_run(output_dir: Path, experiment: str, strategy: str) -> Path | None:
    """The newest folder of that experiment and strategy that has something to go on from."""
    return max(_runs(output_dir / experiment, strategy), key=_age, default=None)


def _runs(parent: Path, strategy: str) -> Iterator[Path]:
    name = re.compile(rf"{re.escape(strategy)}(_\d+)?$")
    for folder in sorted(parent.glob("*")) if parent.is_dir() else ():
        if name.match(folder.name) and any((folder / "checkpoints").glob("step_*.safetensors")):
            yield folder


def _age(folder: Path) -> tuple[float, int]:
    newest = max(one.stat().st_mtime for one in (folder / "checkpoints").glob("step_*.safetensors"))
    number = re.search(r"_(\d+)$", folder.name)
    return newest, int(number[1]) if number else 0


def run_folder(path: str | Path) -> Path:
    """The folder that a user means: of a run, or the log in it."""
    folder = Path(path)
    if not folder.exists():
        raise OptionError(f"There is no folder {path}.{_runs_near(folder)}")
    if folder.is_file():
        folder = folder.parent
    if (folder / LOG).exists() or (folder / _FACTS).exists():
        return folder
    below = sorted(one.parent for one in folder.glob(f"**/{LOG}")) if folder.is_dir() else []
    if len(below) == 1:
        return below[0]
    there = f" Runs below it: {', '.join(map(str, below[:8]))}." if below else ""
    raise OptionError(f"{path} is no folder of a run: there is no {LOG} in it.{there or _runs_near(folder)}")


def _runs_near(folder: Path) -> str:
    """The end of an error about a folder: the runs there are, the nearest name first, at most eight."""
    known = sorted({str(one.parent) for one in Path("runs").glob(f"*/*/{_FACTS}")})
    near = get_close_matches(str(folder), known, n=1)
    by_name = [run for run in known if folder.name and folder.name in Path(run).parts]
    meant = (near or by_name)[:1]
    listed = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
    if not known:
        return " A run leaves one in runs/EXPERIMENT/STRATEGY: hookline run EXPERIMENT."
    return (f" Did you mean {meant[0]!r}?" if meant else "") + f" Runs here: {listed}."


def read_run_file(folder: Path) -> dict[str, Any]:
    """What ``run.json`` says; nothing if there is none, or it cannot be read."""
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def write_run_file(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write ``run.json`` in one go: whoever reads it meanwhile finds the old one or the new one, whole."""
    text = json.dumps(plain(facts), indent=2, allow_nan=False, ensure_ascii=False)
    part = folder / f".{_FACTS}.{os.getpid()}"
    try:
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(folder / _FACTS)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def plain(value: Any) -> Any:
    """A value as JSON has it; what it has no word for becomes text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value if isinstance(value, int) or math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)
