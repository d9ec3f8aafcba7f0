"""Make a training that can be audited of a run file, an experiment or a script.

``hookline audit`` calls `audit_run` for the first two, and makes a `ScriptTraining` of a command.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.debug.audit.audit import audit
from hookline.debug.audit.train_once import did_nothing
from hookline.errors import OptionError
from hookline.lifecycle.reference import read_weights
from hookline.messages import short_repr
from hookline.runs.build import build, spec_name
from hookline.runs.find import make_experiment
from hookline.runs.process import process_settings
from hookline.runs.read import Asked, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookline.debug.audit.audit_result import Audit
    from hookline.runs.build import Built

__all__ = ["ScriptTraining", "audit_run"]


def audit_run(path: str, hooks: Sequence[str], steps: int) -> Audit:
    """Audit the hooks of a run file, or of an experiment; ``hooks`` are taken in place of those the file names."""
    asked = read([path, *(["--hooks", *hooks] if hooks else [])])
    built = build(asked.run, asked.found)
    if asked.run.command:
        return audit(ScriptTraining(asked.run.command), _hooks_of(built), steps=steps)
    training = RunTraining(asked, built)
    with process_settings(deterministic=asked.run.determinism, matmul_precision=asked.run.matmul_precision):
        found = audit(training.train, training.names, steps=steps)
    return replace(found, silent=tuple(name for name, nothing in training.silent.items() if nothing))


def _hooks_of(built: Built) -> dict[str, Any]:
    """Return the hooks of a run by name, for a script that the audit puts them on."""
    found: dict[str, Any] = {hook.name: hook for hook in built.hooks}
    reference = built.options["reference_weights"]
    for hook in found.values():
        if hook.needs_reference_weights and reference is not None:
            hook.set_reference_weights(read_weights(reference))
    return found | {spec_name(spec, place): spec for place, spec in enumerate(built.specs)}


class RunTraining:
    """Train an experiment from its seed, with some of its hooks."""

    def __init__(self, asked: Asked, built: Built) -> None:
        assert asked.found is not None
        self._run, self._found = asked.run, asked.found
        self._strategy = asked.found.chosen(asked.run.strategy)[0]
        specs = [spec_name(spec, place) for place, spec in enumerate(built.specs)]
        self.names = [*(hook.name for hook in built.hooks), *specs]
        """The hooks of the run: lifecycle hooks, trackers, hooks on modules."""
        self.silent: dict[str, bool] = {}
        """Of each lifecycle hook, whether it did nothing in the last training that it was in."""

    def train(self, hooks: Sequence[str]) -> None:
        """Train with the hooks of these names alone."""
        made = make_experiment(self._run, self._found, self._strategy)
        built = build(self._run, self._found, only=hooks)
        with built.attached(made):
            manager = built.make_manager(loop_type=made.loop, on_error="raise") if built.hooks else None
            try:
                made.train(manager, {"strategy": self._strategy})
            finally:
                if manager is not None:
                    self.silent |= {name: did_nothing(manager, name) for name in manager.hooks}
                    manager.close()


class ScriptTraining:
    """Run a Python script in this process, as ``python train.py`` would.

    Args:
        command: The words of the command: ``["python", "train.py", "--lr", "1e-3"]``, or ``["-m", "package.train"]``.
    """

    def __init__(self, command: Sequence[str]) -> None:
        words = list(command)
        if words and Path(words[0]).name.startswith("python"):
            words = words[1:]
        is_module = words[:1] == ["-m"]
        self._words = words[1:] if is_module else words
        self._is_module = is_module
        if not self._words or not (is_module or self._words[0].endswith(".py")):
            raise OptionError(
                f"hookline audit runs one Python script in this process, and {short_repr(command)} is none. Next: "
                "hookline audit --hooks norms -- python train.py."
            )

    def __call__(self) -> None:
        with self._as_main():
            try:
                if self._is_module:
                    runpy.run_module(self._words[0], run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(self._words[0], run_name="__main__")
            except SystemExit as left:
                if left.code not in (None, 0):
                    raise RuntimeError(f"The script ended with exit code {left.code}.") from left

    @contextmanager
    def _as_main(self) -> Iterator[None]:
        argv, path = sys.argv, list(sys.path)
        sys.argv = list(self._words)
        sys.path.insert(0, str(Path.cwd() if self._is_module else Path(self._words[0]).resolve().parent))
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, path
