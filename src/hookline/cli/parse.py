"""The options of a command, read from its arguments.

Takes a dataclass whose docstring is the help, hands back one that is filled; tyro does the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff

__all__ = ["parse"]

_Options = TypeVar("_Options")


def parse(cls: type[_Options], arguments: Sequence[str], command: str) -> _Options:
    """The options; a mistake in them leaves the process with exit code 2."""
    about = inspect.cleandoc(cls.__doc__ or "")
    return tyro.cli(
        cls, args=list(arguments), prog=f"hookline {command}", description=about, config=(FlagCreatePairsOff,)
    )
