"""Put hooks on the models of SGLang's engines that somebody else starts; an entry point of ``sglang.srt.plugins``.

SGLang calls `register` in each of its processes. Without ``HOOKLINE_SGLANG_HOOKS=FILE`` in the environment it does
nothing and imports nothing; with it, it reads `SglangOptions` and has `runner_hooks` install them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hookline.errors import OptionError

__all__ = ["SglangOptions", "register"]

_HOOKS: Final = "HOOKLINE_SGLANG_HOOKS"
_IN_GRAPH: Final = "HOOKLINE_SGLANG_IN_GRAPH"
_REPORT: Final = "HOOKLINE_SGLANG_REPORT"


@dataclass(frozen=True)
class SglangOptions:
    """What the environment asks for.

    Recipe: ``SglangOptions.read({"HOOKLINE_SGLANG_HOOKS": "hooks.json"})``.
    """

    specs: tuple[Any, ...] = ()
    """The specs of the file ``HOOKLINE_SGLANG_HOOKS``."""
    in_graph: bool = False
    """``HOOKLINE_SGLANG_IN_GRAPH=1``: let CUDA graphs record the hooks, and replay those graphs."""
    report: Path | None = None
    """``HOOKLINE_SGLANG_REPORT``: a folder for a file of each worker with its hooks and their metrics."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> SglangOptions:
        """Return the options; raise for a file that cannot be read, with the lines of its mistakes."""
        from hookline.runs.documents import specs_of_file

        in_graph = environment.get(_IN_GRAPH, "0")
        if in_graph not in ("", "0", "1"):
            raise OptionError(f"{_IN_GRAPH} is 0 or 1, got {in_graph!r}.")
        report = environment.get(_REPORT)
        return cls(
            specs=tuple(specs_of_file(environment[_HOOKS])),
            in_graph=in_graph == "1",
            report=Path(report).absolute() if report else None,
        )


def register() -> None:
    """Register with SGLang what attaches the hooks of the file to every model that this process loads."""
    if not os.environ.get(_HOOKS):
        return
    from hookline.engines.sglang.runner_hooks import install

    install(SglangOptions.read(os.environ))
