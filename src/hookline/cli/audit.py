"""Audit hooks from the shell: ``hookline audit RUNFILE``, or of a function or script that trains.

`main` calls `audit`, which makes a training of what was named and calls `hookline.audit`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from hookline.cli.main import DONE, FAILED, NOT_ATTACHED, WRONG_USE
from hookline.cli.screen import messages, tell, tell_json
from hookline.errors import OptionError
from hookline.load import load_object
from hookline.runs.flags import Show, parse
from hookline.runs.read import split_command

if TYPE_CHECKING:
    from hookline.debug.audit.audit_result import Audit

__all__ = ["AuditOptions", "audit"]

_EXIT_CODES: Final = {"same": DONE, "changed": FAILED, "not repeatable": WRONG_USE, "cannot be told": NOT_ATTACHED}


@dataclass
class AuditOptions:
    """Train with and without hooks, compare bit for bit after every step, and name the hook that changes the run.

    Exit codes: 0 the same to the last bit, 1 a hook changes the run, 2 the training does not repeat by itself, 3 it
    cannot be told, as a hook did not fire.

    Examples:
      hookline audit my_run.yaml                                    # the hooks of a run file
      hookline audit mod_arithmetic --hooks norms hessian --steps 50
      hookline audit --hooks norms my_file.py:watch -- python train.py --lr 1e-3
      hookline audit --train my_file.py:train --hooks wandb:watch --json
    """

    run: Annotated[str | None, Show("RUNFILE | -- COMMAND", is_word=True)] = None
    """A run file, or an experiment: its name, or path/file.py:Class."""
    train: Annotated[str | None, Show("FILE:FUNCTION")] = None
    """A function that trains, in place of a run file: without arguments, or with the list of hooks as the only one."""
    hooks: Annotated[tuple[str, ...], Show("HOOK")] = ()
    """Names of hooks or groups. For --train and scripts also files of specs, and FILE:NAME of a function of the model,
    a torch forward hook or a context manager."""
    steps: Annotated[int, Show("N")] = 20
    """After how many steps a training is stopped."""
    json: bool = False
    """Print JSON."""


def audit(arguments: Sequence[str]) -> int:
    """Print the audit, and return the exit code."""
    before, command = split_command(arguments)
    options = parse(AuditOptions, before, "audit")
    # What the training prints is not the answer.
    with messages(), contextlib.redirect_stdout(sys.stderr):
        found = _audited(options, command)
    if options.json:
        tell_json("audit", found.to_dict())
    else:
        tell(str(found))
    return _EXIT_CODES[found.verdict]


def _audited(options: AuditOptions, command: list[str]) -> Audit:
    from hookline.debug.audit.audit import audit as audit_training

    if sum((options.run is not None, options.train is not None, bool(command))) != 1:
        raise OptionError(
            "hookline audit takes one training: a run file or an experiment, --train FILE:FUNCTION, or a script behind "
            "--: hookline audit --hooks norms -- python train.py."
        )
    if options.run is not None:
        from hookline.cli.audited_run import audit_run

        return audit_run(options.run, options.hooks, options.steps)
    if not options.hooks:
        raise OptionError("hookline audit needs hooks for this training: --hooks NAME, or --hooks FILE:NAME.")
    if options.train is not None:
        train = load_object(options.train, wanted="a function that trains")
    else:
        from hookline.cli.audited_run import ScriptTraining

        train = ScriptTraining(command)
    return audit_training(train, options.hooks, steps=options.steps)
