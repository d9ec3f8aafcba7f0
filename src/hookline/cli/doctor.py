"""Examine the hooks of a model: ``hookline doctor FILE:MODEL``.

`main` calls `doctor`, which makes the model and prints what `hookline.debug.doctor` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from hookline.cli.find import model_at
from hookline.cli.main import DONE, FAILED
from hookline.cli.screen import tell_found
from hookline.load import load_object
from hookline.runs.flags import Show, parse

__all__ = ["DoctorOptions", "doctor"]


@dataclass
class DoctorOptions:
    """Say who hooks what in a model, which modules no hook would fire on and why, what is left behind, what it costs.

    Exit codes: 0 no problems, 1 problems.

    Examples:
      hookline doctor my_file.py:make_model
      hookline doctor my_file.py:make_model --inputs my_file.py:sample     # calls the model, and puts it back
      hookline doctor mod_arithmetic --json
    """

    model: Annotated[str, Show("FILE:MODEL", is_word=True)]
    """A model, its class, or a function that makes one: file.py:NAME or package.module:NAME; also an experiment."""
    inputs: Annotated[str | None, Show("FILE:NAME")] = None
    """Sample arguments, or a function that makes them: a tensor, a tuple, or a dict of keyword arguments."""
    json: bool = False
    """Print JSON."""


def doctor(arguments: Sequence[str]) -> int:
    """Print the diagnosis."""
    options = parse(DoctorOptions, arguments, "doctor")
    from hookline.debug.diagnose.doctor import doctor as examine

    model = model_at(options.model)
    sample = None if options.inputs is None else load_object(options.inputs, wanted="sample inputs")
    found = examine(model, sample() if callable(sample) else sample)
    tell_found("doctor", found.to_dict(), found, as_json=options.json)
    return FAILED if found.problems else DONE
