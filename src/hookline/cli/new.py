"""Write a file to start from, which runs as it is: ``hookline new experiment|hook|sink FILE``.

`main` calls `new`, which fills a template with names made of the file's name.
"""

from __future__ import annotations

import importlib.resources
import keyword
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated, Final, Literal

from hookline.cli.main import DONE
from hookline.cli.screen import tell
from hookline.errors import OptionError
from hookline.runs.flags import Show, parse

__all__ = ["NewOptions", "new"]

_NEXT: Final = {
    "experiment": "hookline run {named} --hooks norms --hook-csv",
    "hook": "hookline run mod_arithmetic --epochs 3 --hooks {named}",
    "sink": "hookline run mod_arithmetic --epochs 3 --hooks --hook-sink {named}",
}


@dataclass
class NewOptions:
    """Write a file to start from: an experiment, a hook or a sink. It runs as it is.

    Examples:
      hookline new experiment parity.py
      hookline new hook weight_norm.py
    """

    kind: Annotated[Literal["experiment", "hook", "sink"], Show(is_word=True)]
    """What it is."""
    file: Annotated[str, Show("FILE", is_word=True)]
    """Where it goes; its name gives the class its name."""
    force: bool = False
    """Write over a file that is there."""


def new(arguments: Sequence[str]) -> int:
    """Write the file, and print how to try it."""
    options = parse(NewOptions, arguments, "new")
    path, cls = _write(options.kind, options.file, force=options.force)
    tell(f"{path} has the {options.kind} {cls}. Try it:")
    tell(f"  {_NEXT[options.kind].format(named=shlex.quote(f'{path}:{cls}'))}")
    return DONE


def _write(kind: str, file: str, *, force: bool) -> tuple[Path, str]:
    """Write a template; return its path, and the name of its class."""
    path = Path(file if file.endswith(".py") else f"{file}.py")
    name = re.sub(r"\W+", "_", path.stem).strip("_").lower()
    cls = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if keyword.iskeyword(name):
        raise OptionError(f"{path.name!r} is named after a keyword of Python, {name!r}: take another name.")
    if not cls.isidentifier():
        raise OptionError(f"A class cannot be named after {path.name!r}: begin it with a letter.")
    if path.exists() and not force:
        raise OptionError(f"{path} is there already; take another name, or --force.")
    template = importlib.resources.files("hookline.cli").joinpath("templates", f"{kind}.py.txt")
    text = Template(template.read_text(encoding="utf-8")).substitute(Class=cls, name=name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}.") from None
    return path, cls
