"""Audit hooks from the shell: ``hookline audit RUNFILE``, or of a function or script that trains.

`main` calls `audit`, which makes a training of what was named and calls `hookline.audit`.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from hookline.cli.main import DONE, FAILED, NOT_ATTACHED, WRONG_USE
from hookline.cli.screen import messages, tell_found
from hookline.errors import OptionError
from hookline.load import load_object
from hookline.messages import short_repr
from hookline.runs.flags import Show, parse
from hookline.runs.read import read, split_command

if TYPE_CHECKING:
    from hookline.debug.audit.audit import Audit
    from hookline.runs.build import Built

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
    tell_found("audit", found.to_dict(), found, as_json=options.json)
    return _EXIT_CODES[found.verdict]


def _audited(options: AuditOptions, command: list[str]) -> Audit:
    from hookline.debug.audit.audit import audit as audit_training

    if sum((options.run is not None, options.train is not None, bool(command))) != 1:
        raise OptionError(
            "hookline audit takes one training: a run file or an experiment, --train FILE:FUNCTION, or a script behind "
            "--: hookline audit --hooks norms -- python train.py."
        )
    if options.run is not None:
        return _audited_run(options.run, options.hooks, options.steps)
    if not options.hooks:
        raise OptionError("hookline audit needs hooks for this training: --hooks NAME, or --hooks FILE:NAME.")
    train = load_object(options.train, wanted="a function that trains") if options.train else _script(command)
    return audit_training(train, options.hooks, steps=options.steps)


def _audited_run(path: str, hooks: Sequence[str], steps: int) -> Audit:
    """Audit the hooks of a run file, or of an experiment; ``hooks`` are taken in place of those the file names."""
    from hookline.debug.audit.audit import audit as audit_training
    from hookline.debug.audit.train_once import did_nothing
    from hookline.runs.build import build, spec_name
    from hookline.runs.find import make_experiment, process_settings

    run, found, *_ = read([path, *(["--hooks", *hooks] if hooks else [])])
    built = build(run, found)
    specs = {spec_name(spec, place): spec for place, spec in enumerate(built.specs)}
    if found is None:
        return audit_training(_script(run.command), _with_reference(built) | specs, steps=steps)
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


def _with_reference(built: Built) -> dict[str, Any]:
    """Return the lifecycle hooks of a run by name, for a script that the audit puts them on."""
    from hookline.lifecycle.managed_hooks import read_weights

    reference = built.options["reference_weights"]
    for hook in built.hooks:
        if hook.needs_reference_weights and reference is not None:
            hook.set_reference_weights(read_weights(reference))
    return {hook.name: hook for hook in built.hooks}


def _script(command: Sequence[str]) -> Callable[[], None]:
    """Return a function that runs a Python script in this process, as ``python train.py`` or ``-m module`` would."""
    words = list(command[1:] if Path(command[0]).name.startswith("python") else command)
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or not (is_module or words[0].endswith(".py")):
        raise OptionError(
            f"hookline audit runs one Python script in this process, and {short_repr(command)} is none. Next: "
            "hookline audit --hooks norms -- python train.py."
        )
    folder = Path.cwd() if is_module else Path(words[0]).resolve().parent

    def train() -> None:
        argv, path = sys.argv, list(sys.path)
        sys.argv = list(words)
        sys.path.insert(0, str(folder))
        try:
            if is_module:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as left:
            if left.code not in (None, 0):
                raise RuntimeError(f"The script ended with exit code {left.code}.") from left
        finally:
            sys.argv, sys.path[:] = argv, path

    return train
