"""Read the options of a command from its arguments.

Every command but ``run`` calls `parse` with a dataclass whose docstring is the help.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TypeVar

from tyro.conf import FlagCreatePairsOff

from hookline.errors import OptionError
from hookline.runs.flags import flag, read_flags

__all__ = ["flag", "parse", "split_command"]

_Options = TypeVar("_Options")


def parse(cls: type[_Options], arguments: Sequence[str], command: str) -> _Options:
    """Return the options; a mistake in them leaves the process with exit code 2."""
    about = inspect.cleandoc(cls.__doc__ or "")
    options: _Options = read_flags(
        cls, arguments, f"hookline {command}", description=about, config=(FlagCreatePairsOff,)
    )
    return options


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before the first ``--``, and the command behind it; nothing for what there is not."""
    given = list(arguments)
    if "--" not in given:
        return given, []
    place = given.index("--")
    if place == len(given) - 1:
        raise OptionError("There is no command behind the --. Next: write it as a shell has it: -- python train.py.")
    return given[:place], given[place + 1 :]
