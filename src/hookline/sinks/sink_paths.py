"""Which run a sink writes for, and where that run's files lie.

Takes what ``set_run_context`` says, hands paths to the sinks that write files.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["RunContext", "candidates", "file_name"]

_WHICH = ("strategy", "run_dir", "output_dir", "experiment_name")


class RunContext:
    """What a sink was told of its run so far.

    Recipe::

        context = RunContext()
        context.update({"strategy": "random", "run_dir": "runs/mod/random"})  # True: another run begins
        context.file(".csv")  # runs/mod/random/random.csv
    """

    def __init__(self, **known: Any) -> None:
        self.known: dict[str, Any] = {key: value for key, value in known.items() if value is not None}

    def update(self, context: Mapping[str, Any]) -> bool:
        """Take in what is said now; whether another run begins.

        A run folder holds one run, so naming the same one again goes on with it (a resumed run does that). Without
        one, each naming of a strategy begins another run.
        """
        before = self.which()
        self.known |= {key: value for key, value in context.items() if value is not None}
        if "run_dir" in self.known:
            return self.which() != before
        return self.which() != before or "strategy" in context

    def which(self) -> tuple[Any, ...]:
        """What tells this run from others."""
        return tuple(None if self.known.get(key) is None else str(self.known[key]) for key in _WHICH)

    def adds_to(self, before: tuple[Any, ...]) -> bool:
        """Whether what was known of the run before still holds."""
        return all(old in (None, new) for old, new in zip(before, self.which(), strict=True))

    @property
    def strategy(self) -> str | None:
        """Which of the runs that an experiment makes."""
        found = self.known.get("strategy")
        return None if found is None else str(found)

    @property
    def folder(self) -> Path | None:
        """The folder of the run: as told, else ``{output_dir}/{experiment_name}/{strategy}``; None if not known yet."""
        if "run_dir" in self.known:
            return Path(self.known["run_dir"])
        output, experiment = self.known.get("output_dir"), self.known.get("experiment_name")
        if output is None or experiment is None or self.strategy is None:
            return None
        return Path(output) / file_name(str(experiment)) / file_name(self.strategy)

    def file(self, ending: str) -> Path | None:
        """``{folder}/{strategy}{ending}``, None if not known yet."""
        folder = self.folder
        return None if folder is None else folder / (file_name(self.strategy or "run") + ending)


def file_name(text: str) -> str:
    """A text as the name of one file: separators become ``_``, as does the dot of a name that is all dots."""
    name = "".join("_" if sign in "/\\:\0" else sign for sign in text)
    name = name.encode("utf-8", "backslashreplace").decode()
    return name if name.strip(". ") else name.replace(".", "_") or "_"


def candidates(path: Path) -> Iterator[Path]:
    """A path, then ``_1``, ``_2``, … before its ending, for one who takes the first that is free."""
    yield path
    for number in itertools.count(1):
        yield path.with_name(f"{path.stem}_{number}{path.suffix}")
