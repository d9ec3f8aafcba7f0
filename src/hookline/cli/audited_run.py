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

from hookline.cli.process_settings import process_settings
from hookline.cli.run_command import prepare_run
from hookline.cli.run_request import Request, first_look, read_request
from hookline.cli.run_session import Prepared, Session
from hookline.debug.audit.audit import audit
from hookline.debug.audit.train_once import did_nothing
from hookline.errors import OptionError
from hookline.lifecycle.reference import read_weights
from hookline.messages import short_repr
from hookline.runs.run_options import flat, manager_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookline.cli.prepared_experiment import PreparedExperiment
    from hookline.debug.audit.audit_result import Audit
    from hookline.lifecycle.manager import HookManager

__all__ = ["ScriptTraining", "audit_run"]


def audit_run(path: str, hooks: Sequence[str], steps: int) -> Audit:
    """Audit the hooks of a run file, or of an experiment; ``hooks`` are taken in place of those the file names."""
    words = [path, *(["--hooks", *hooks] if hooks else [])]
    request = read_request(*first_look(words))
    if request.settings.command:
        return audit(ScriptTraining(request.settings.command), _hooks_of(request), steps=steps)
    training = RunTraining(prepare_run(request, words))
    asked = request.options.training
    with process_settings(deterministic=not asked.no_determinism, matmul_precision=asked.matmul_precision):
        found = audit(training.train, training.names, steps=steps)
    return replace(found, silent=tuple(name for name, nothing in training.silent.items() if nothing))


def _hooks_of(request: Request) -> dict[str, Any]:
    """Return the hooks of a run file by name, for a script that the audit puts them on."""
    specs, objects = request.module_specs(), request.hook_objects()
    found: dict[str, Any] = {hook.name: hook for hook in objects.make()}
    reference = manager_options(flat(request.options), objects.config)["reference_weights"]
    for hook in found.values():
        if hook.needs_reference_weights and reference is not None:
            hook.set_reference_weights(read_weights(reference))
    return found | {_spec_name(spec, place): spec for place, spec in enumerate(specs)}


def _spec_name(spec: dict[str, Any], place: int) -> str:
    return str(spec.get("name") or f"specs[{place}]")


class RunTraining:
    """Train an experiment from its seed, with some of its hooks."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._strategy = prepared.request.found.chosen(prepared.request.options.training.strategy)[0]
        self._specs = {_spec_name(spec, place): spec for place, spec in enumerate(prepared.specs)}
        objects = prepared.hook_objects
        self.names = [*objects.names, *(tracker.name for tracker in objects.trackers), *self._specs]
        """The hooks of the run: lifecycle hooks, trackers, hooks on modules."""
        self.silent: dict[str, bool] = {}
        """Of each lifecycle hook, whether it did nothing in the last training that it was in."""

    def train(self, hooks: Sequence[str]) -> None:
        """Train with the hooks of these names alone."""
        made = Session(self._prepared, self._strategy, may_be_new=True).make()
        with made.hooks_on_modules([spec for name, spec in self._specs.items() if name in hooks]):
            manager = self._manager(made, hooks)
            try:
                made.train(manager, {"strategy": self._strategy}, None, resume=False)
            finally:
                if manager is not None:
                    self.silent |= {name: did_nothing(manager, name) for name in manager.hooks}
                    manager.close()

    def _manager(self, made: PreparedExperiment, hooks: Sequence[str]) -> HookManager | None:
        objects = self._prepared.hook_objects
        chosen = replace(
            objects,
            names=[name for name in objects.names if name in hooks],
            trackers=[tracker for tracker in objects.trackers if tracker.name in hooks],
        ).make()
        return self._prepared.make_manager(chosen, made.loop, on_error="raise") if chosen else None


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
