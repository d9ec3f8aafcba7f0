"""Say the hints of errors and warnings in the words of the command line.

`main` prints errors by `shell_text`, `screen` prints warnings by it, and commands that know the name of the model give
it along.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from hookline.errors import Hint

if TYPE_CHECKING:
    from hookline.errors import HooklineError, HooklineWarning

__all__ = ["shell_text"]

_WORDS: Final = {
    Hint.RESUME_ANYWAY: "To go on all the same: --force.",
    Hint.REFERENCE_WEIGHTS: "Give it some: --hook-config reference_weights.path=FILE.",
    Hint.LATER_FAILURES: "Further failures are counted in run.json.",
}


def shell_text(problem: HooklineError | HooklineWarning, model: str = "MODEL") -> str:
    """Return what an error or a warning says, with its hint for a shell; ``model`` is what ``find`` calls the model."""
    return problem.text({**_WORDS, Hint.LIST_MODULES: f"See all: hookline find {shlex.quote(model)}"})
