"""Keep what a sink is told of its run, and derive names of files and folders from it.

`RunSink` has a `RunContext`; file names of runs go through `file_name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["RunContext", "file_name"]

_IDENTITY = ("strategy", "run_dir", "output_dir", "experiment_name")


class RunContext:
    """The arguments of ``set_run_context`` for the current run, and the places of its files.

    Recipe::

        context = RunContext()
        context.update({"strategy": "random", "run_dir": "runs/mod/random"})  # True: another run begins
        context.file(".csv")  # runs/mod/random/random.csv
    """

    def __init__(self, **known: Any) -> None:
        self.known: dict[str, Any] = {key: value for key, value in known.items() if value is not None}

    def update(self, context: Mapping[str, Any]) -> bool:
        """Take in ``context``; return whether another run begins.

        A run folder holds one run, so naming the same folder again continues it (a resumed run does that). Without a
        folder, each naming of a strategy begins another run.
        """
        before = self.identity()
        self.known |= {key: value for key, value in context.items() if value is not None}
        return self.identity() != before or ("run_dir" not in self.known and "strategy" in context)

    def identity(self) -> tuple[str | None, ...]:
        """Return what tells this run from others."""
        return tuple(None if self.known.get(key) is None else str(self.known[key]) for key in _IDENTITY)

    @property
    def strategy(self) -> str | None:
        """Which run of an experiment that makes several."""
        found = self.known.get("strategy")
        return None if found is None else str(found)

    @property
    def folder(self) -> Path | None:
        """The folder of the run: ``run_dir``, else ``{output_dir}/{experiment_name}/{strategy}``; None if unknown."""
        if "run_dir" in self.known:
            return Path(self.known["run_dir"])
        output, experiment = self.known.get("output_dir"), self.known.get("experiment_name")
        if output is None or experiment is None or self.strategy is None:
            return None
        return Path(output) / file_name(str(experiment)) / file_name(self.strategy)

    def file(self, ending: str) -> Path | None:
        """Return ``{folder}/{strategy}{ending}``; None if the folder is unknown."""
        folder = self.folder
        return None if folder is None else folder / (file_name(self.strategy or "run") + ending)


def file_name(text: str) -> str:
    """Return ``text`` as the name of one file: separators become ``_``, as do the dots of a name that is all dots."""
    name = "".join("_" if sign in "/\\:\0" else sign for sign in text)
    name = name.encode("utf-8", "backslashreplace").decode()
    return name if name.strip(". ") else name.replace(".", "_") or "_"
