"""Make and find the folder of a run.

`run_session` makes one for each strategy and fills it by `RunNotes`; ``--resume``, ``report`` and ``replay`` find it
again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hookline.errors import OptionError
from hookline.messages import did_you_mean
from hookline.training.run_notes import FACTS, LOG, RunNotes, model_facts, read_run_json, to_plain, write_run_json

__all__ = [
    "LOG",
    "RunNotes",
    "checkpoints_in",
    "model_facts",
    "new_folder",
    "newest_run",
    "next_folder",
    "read_run_json",
    "run_folder",
    "to_plain",
    "write_run_json",
]


def next_folder(output_dir: Path, experiment: str, strategy: str) -> Path:
    """Return where a run that begins now would be: ``{strategy}``, or ``{strategy}_1``, ``_2`` … if that is taken."""
    base = output_dir / experiment / strategy
    folder, number = base, 0
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        number += 1
        folder = base.with_name(f"{strategy}_{number}")
    return folder


def new_folder(output_dir: Path, experiment: str, strategy: str) -> Path:
    """Make the next folder; of two runs that begin at the same moment, each has its own."""
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
    """Return the newest folder of that experiment and strategy that has a checkpoint."""
    return max(_runs(output_dir / experiment, strategy), key=_age, default=None)


def _runs(parent: Path, strategy: str) -> Iterator[Path]:
    name = re.compile(rf"{re.escape(strategy)}(_\d+)?$")
    for folder in sorted(parent.glob("*")) if parent.is_dir() else ():
        if name.match(folder.name) and checkpoints_in(folder):
            yield folder


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a run: files of one process, folders of several ranks."""
    return [one for one in (folder / "checkpoints").glob("step_*") if one.suffix in (".safetensors", ".ranks")]


def _age(folder: Path) -> tuple[float, int]:
    newest = max(one.stat().st_mtime for one in checkpoints_in(folder))
    number = re.search(r"_(\d+)$", folder.name)
    return newest, int(number[1]) if number else 0


_OF_OWN_LOOPS: Final = (
    f" hl.follow and HooklineCallback leave one if they are asked to: log='FOLDER/{LOG}' among their options; then: "
    "hookline report FOLDER. A file of a JSONLSink is no such log: it has no times, and nothing of the run itself."
)


def run_folder(path: str | Path) -> Path:
    """Return the folder of a run that a user means by its path, or by that of the log in it."""
    folder = Path(path)
    if not folder.exists():
        raise OptionError(f"There is no folder {path}.{_runs_near(folder)}")
    if folder.is_file():
        folder = folder.parent
    if (folder / LOG).exists() or (folder / FACTS).exists():
        return folder
    below = sorted(one.parent for one in folder.glob(f"**/{LOG}")) if folder.is_dir() else []
    if len(below) == 1:
        return below[0]
    there = f" Runs below it: {', '.join(map(str, below[:8]))}." if below else _OF_OWN_LOOPS + _runs_near(folder)
    raise OptionError(f"{path} is no folder of a run: there is no {LOG} in it.{there}")


def _runs_near(folder: Path) -> str:
    """Return the end of an error about a folder: the runs there are, the nearest name first, at most eight."""
    known = sorted({str(one.parent) for one in Path("runs").glob(f"*/*/{FACTS}")})
    by_name = [run for run in known if folder.name and folder.name in Path(run).parts][:1]
    meant = did_you_mean(folder, known) or "".join(f" Did you mean {run!r}?" for run in by_name)
    listed = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
    if not known:
        return " A run leaves one in runs/EXPERIMENT/STRATEGY: hookline run EXPERIMENT."
    return f"{meant} Runs here: {listed}."
