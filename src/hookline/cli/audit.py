"""Audit hooks from the shell: ``hookline audit RUNFILE``, or of a function that trains.

`main` calls `audit`, which makes a training of what was named and calls `hookline.audit`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

from hookline.cli.main import DONE, FAILED, NOT_ATTACHED, WRONG_USE
from hookline.cli.screen import messages, tell_found
from hookline.errors import OptionError
from hookline.load import load_object
from hookline.runs.flags import Show, parse
from hookline.runs.read import read

if TYPE_CHECKING:
    from hookline.debug.audit.audit import Audit

_EXIT_CODES: Final = {"same": DONE, "changed": FAILED, "not repeatable": WRONG_USE, "cannot be told": NOT_ATTACHED}


@dataclass
class AuditOptions:
    """Train with and without hooks, compare bit for bit after every step, and name the hook that changes the run.

    Exit codes: 0 the same to the last bit, 1 a hook changes the run, 2 the training does not repeat by itself, 3 it
    cannot be told, as a hook did not fire.

    Examples:
      hookline audit my_run.yaml                                    # the hooks of a run file
      hookline audit mod_arithmetic --hooks norms hessian --steps 50
      hookline audit --train my_file.py:train --hooks wandb:watch --json
    """

    run: Annotated[str | None, Show("RUNFILE", is_word=True)] = None
    """A run file, or an experiment: its name, or path/file.py:Class."""
    train: Annotated[str | None, Show("FILE:FUNCTION")] = None
    """A function that trains, in place of a run file: without arguments, or with the list of hooks as the only one."""
    hooks: Annotated[tuple[str, ...], Show("HOOK")] = ()
    """Names of hooks or groups. For --train also FILE:NAME of a function of the model, or of one without arguments that
    makes a context manager."""
    steps: Annotated[int, Show("N")] = 20
    """After how many steps a training is stopped."""
    json: bool = False
    """Print JSON."""


def audit(arguments: Sequence[str]) -> int:
    """Print the audit, and return the exit code."""
    options = parse(AuditOptions, arguments, "audit")
    # What the training prints is not the answer.
    with messages(), contextlib.redirect_stdout(sys.stderr):
        found = _audited(options)
    tell_found("audit", found.to_dict(), found, as_json=options.json)
    return _EXIT_CODES[found.verdict]


def _audited(options: AuditOptions) -> Audit:
    from hookline.debug.audit.audit import audit as audit_training

    if (options.run is None) is (options.train is None):
        raise OptionError("hookline audit takes one training: a run file or an experiment, or --train FILE:FUNCTION.")
    if options.run is not None:
        return _audited_run(options.run, options.hooks, options.steps)
    if not options.hooks:
        raise OptionError("hookline audit needs hooks for this training: --hooks NAME, or --hooks FILE:NAME.")
    train = load_object(str(options.train), wanted="a function that trains")
    hooks = [load_object(name, wanted="a hook") if ":" in name else name for name in options.hooks]
    return audit_training(train, hooks, steps=options.steps)


def _audited_run(path: str, hooks: Sequence[str], steps: int) -> Audit:
    """Audit the hooks of a run file, or of an experiment; ``hooks`` are taken in place of those the file names."""
    from hookline.debug.audit.audit import audit as audit_training
    from hookline.debug.audit.audit import did_nothing
    from hookline.runs.build import build, spec_name
    from hookline.runs.find import make_experiment, process_settings

    run, found, *_ = read([path, *(["--hooks", *hooks] if hooks else [])])
    built = build(run, found)
    specs = {spec_name(spec, place): spec for place, spec in enumerate(built.specs)}
    if found is None:
        raise OptionError(f"{path} runs a script; put its training into a function, for --train FILE:FUNCTION.")
    strategy = found.chosen(run.strategy)[0]
    silent: dict[str, bool] = {}

    def train(names: Sequence[str]) -> None:
        """Train from the seed, with the hooks of these names alone; note which of them did nothing."""
        made, some = make_experiment(run, found, strategy), build(run, found, only=names)
        with some.attached(made):
            manager = some.make_manager(loop_type=made.loop, on_error="raise") if some.hooks else None
            try:
                made.train(manager, {"strategy": strategy})
            finally:
                if manager is not None:
                    silent.update({name: did_nothing(manager, name) for name in manager.hooks})
                    manager.close()

    with process_settings(deterministic=run.determinism, matmul_precision=run.matmul_precision):
        audited = audit_training(train, [*(hook.name for hook in built.hooks), *specs], steps=steps)
    return replace(audited, silent=tuple(name for name, nothing in silent.items() if nothing))
