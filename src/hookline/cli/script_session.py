"""Follow a script from inside: make the hooks of its run file, its folder and its log, at the first step.

``sitecustomize`` of ``hookline.integrations.script_start`` calls `begin_script` in the script's process, and
`script_lightning` makes a `ScriptSession` of its own. Whatever goes wrong before hooks are attached is written down for
`hookline.cli.script`, and the script runs on as if nothing were there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hookline.cli.script import command_name
from hookline.distributed.ranks import this_rank
from hookline.error_policy import error_text
from hookline.errors import HooklineError, HooklineWarning, NoMatchError
from hookline.integrations.follow import follow
from hookline.integrations.host_facts import AutocastNoted, host_facts, script_name
from hookline.integrations.host_manager import recorder_of
from hookline.integrations.model_of_optimizer import FoundModel, find_model, find_scaler
from hookline.integrations.process_end import at_process_end, at_sigterm, error_of_process
from hookline.integrations.resources import ResourcesHook
from hookline.integrations.snapshot_steps import OFTEN_AT_FIRST, SnapshotSteps, can_count_steps
from hookline.lifecycle.manager import HookManager
from hookline.plain import to_plain
from hookline.records.sink import MetricSink
from hookline.runs.build import build
from hookline.runs.folder import LOG, STRATEGY, RunNotes, new_folder
from hookline.runs.read import read_file
from hookline.training.loops import LoopResult
from hookline.when import HookPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookline.integrations.first_step import FirstStep
    from hookline.integrations.follow import Follow
    from hookline.lifecycle.hook import TrainingHook
    from hookline.specs.hook_spec import HookSpec

__all__ = ["ScriptSession", "begin_script", "note", "wait_for_script"]

RUN_FILE: Final = "HOOKLINE_RUN"
"""The environment variable that names the run file; nothing is followed without it."""
NOTES: Final = "HOOKLINE_RUN_NOTES"
"""The folder in which processes write down how far they came."""
_ON_ERROR: Final = "disable"
"""A hook that raises does not end a script that it does not own, unless that was asked for."""
_FLUSH_EVERY: Final = 50
"""Steps: what a script loses at most when it is killed."""


class _Followed:
    """Whether this process is followed already: one run is enough."""

    yet = False


def wait_for_script() -> None:
    """Follow the script of this process from its first step on; once."""
    from hookline.integrations.first_step import FirstStep

    if not _Followed.yet:
        _Followed.yet = True
        FirstStep(begin_script)


def begin_script(optimizer: Any, first: FirstStep, began: float | None = None) -> bool:
    """Follow the script of this process from the step that ``optimizer`` makes now.

    Args:
        optimizer: One that makes a step.
        first: Knows what came before it.
        began: When this was asked for, by ``time.perf_counter``, if modules had to be imported since.

    Returns:
        Whether the wait is over. An optimizer whose parameters no module has, a temperature that is tuned say, is not
        what the script trains: the next one that makes a step is asked.
    """
    try:
        if ScriptSession.of_lightning is not None:
            return True
        found = find_model(optimizer)
    except NoMatchError as error:
        note("failed", str(error))
        return False
    withdraw("failed")  # of an optimizer before this one
    session = None
    try:
        session = ScriptSession(Path(os.environ[RUN_FILE]))
        if began is not None:
            session.began = began
        first.hand_over(session.follow(found, optimizer, first))
    except Exception as error:
        _tell_not_attached(str(error) if isinstance(error, HooklineError) else error_text(error))
        if session is not None:
            session.give_up(error)
    return True


def _tell_not_attached(text: str, number: int = 0) -> None:
    """Say at once what is not measured: the script may run for a night. It is said again at its end.

    Args:
        text: What is not attached, and why.
        number: How many were told of before.
    """
    print(f"hookline: not attached: {text}", file=sys.stderr, flush=True)
    note(f"{number}.failed", text)


def note(what: str, text: str = "") -> None:
    """Write down how far this process came, for the one that started the script."""
    folder = os.environ.get(NOTES)
    if folder and Path(folder).is_dir():
        (Path(folder) / f"{os.getpid()}.{what}").write_text(text, encoding="utf-8")


def withdraw(what: str) -> None:
    """Take back what was written down."""
    folder = os.environ.get(NOTES)
    if folder:
        (Path(folder) / f"{os.getpid()}.{what}").unlink(missing_ok=True)


class _NewestLoss(MetricSink):
    """Keep the newest loss."""

    loss: float | None = None

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Keep it; of values by step the last."""
        value = metrics.get("training_metrics/loss")
        value = value[-1] if isinstance(value, list) and value else value
        self.loss = float(value) if isinstance(value, int | float) else self.loss


class ScriptSession:
    """The run of a script, in one of its processes: hooks, folder, log and ``run.json``."""

    of_lightning: ClassVar[ScriptSession | None] = None
    """The one that a callback of Lightning drives; then the script is not followed by its optimizer as well."""

    def __init__(self, run_file: Path) -> None:
        run = self._asked = read_file(run_file, of_script=True)
        self._built = build(run)
        self._name = command_name(run.command) if run.command else script_name()
        self._output_dir = str(Path(run.output_dir).absolute())  # the script may go elsewhere
        self._newest = _NewestLoss()
        self._notes: RunNotes | None = None
        self.began = time.perf_counter()
        """When hooks began to be attached; and, once they are, when that was over."""
        self._set_up: float | None = None
        self.folder: Path | None = None
        """Where records go; None on ranks over 0, which write nothing."""
        self.specs = self._built.specs
        """Hooks on modules."""
        hooks = [*self._built.hooks, ResourcesHook()]
        every = run.snapshot_every
        by_steps = can_count_steps(hooks) if every is None else every > 0
        self.loop = "step" if by_steps else "epoch"
        """What the run counts. Epochs only where a hook needs them: a script of one epoch would have one report."""
        self.snapshots = (SnapshotSteps(every) if every else OFTEN_AT_FIRST) if by_steps else SnapshotSteps(1)
        """When watches and trackers report."""
        self.manager = self._make_manager(hooks)
        self._run: Follow | None = None
        self._forget_end = at_process_end(self.end)
        self._forget_signal: Callable[[], None] = lambda: None
        self._autocast: AutocastNoted | None = None
        self._error: HooklineError | None = None
        self._told = 0

    def _make_manager(self, hooks: list[TrainingHook]) -> HookManager:
        from hookline.records.readers import FanOut

        sinks: list[Any] = []
        fan_out = None
        if this_rank() == 0:
            self.folder = new_folder(Path(self._output_dir), self._name, STRATEGY)
            sinks = self._built.make_sinks()
            fan_out = FanOut([*sinks, self._newest], log=self.folder / LOG)
        manager = HookManager(
            recorder_of(hooks),  # on all ranks, which have the same hooks; the first alone has a folder
            hooks=hooks,
            sinks=fan_out,
            loop_type=self.loop,
            flush_every=_FLUSH_EVERY,
            **self._built.options | ({} if self._built.run.hooks.says_on_error else {"on_error": _ON_ERROR}),
        )
        if self.folder is not None:
            self._notes = RunNotes(self.folder, manager, sinks)
        return manager

    @property
    def context(self) -> dict[str, Any]:
        """What hooks and sinks are told of the run."""
        told = {"strategy": STRATEGY, "experiment_name": self._name, "output_dir": self._output_dir}
        return told if self.folder is None else {**told, "run_dir": str(self.folder)}

    def follow(self, found: FoundModel, optimizer: Any, first: FirstStep) -> Follow:
        """Follow the loop, in the middle of its first step."""
        self.begin(found.model, optimizer)
        parts: dict[str, Any] = {"loader": first.loader, "scaler": find_scaler(), "run_context": self.context}
        parts |= {"loop": self.loop, "snapshot_every": self.snapshots}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Hook .* (could not be started|excluded)", HooklineWarning)  # told below
            run = self._run = follow(found.model, optimizer, manager=self.manager, **parts)
        self.tell_not_started()
        self._forget_signal = at_sigterm(lambda: self._end_by_signal(run))
        for spec in self.specs:
            self._attach_spec(run, found.model, spec)
        now = time.perf_counter()
        self._set_up, self.began = now - self.began, now
        return run

    def tell_not_started(self) -> None:
        """Name the hooks that the model or the script gave no place to; the others are on."""
        for name, why in self.manager.plan().left_out.items():
            _tell_not_attached(f"the hook {name}: {why}", self._count_told())

    def _attach_spec(self, run: Follow, model: Any, spec: HookSpec) -> None:
        """Attach the hooks of one spec; one whose factory raises is no reason to lose the others."""
        from hookline.specs.apply_specs import register_hooks

        try:
            run.when_closed(register_hooks(model, [spec]).remove)
        except Exception as error:
            _tell_not_attached(f"the spec {spec.name}: {error_text(error)}", self._count_told())

    def _count_told(self) -> int:
        self._told += 1
        return self._told

    def give_up(self, error: Exception) -> None:
        """Write that the run was not followed, and nothing of steps: the script goes on without hooks."""
        notes, self._notes = self._notes, None
        self.end()
        if notes is not None:
            notes.end("failed", time.perf_counter() - self.began, error=error)

    def begin(self, model: Any, optimizer: Any) -> None:
        """Write what is known of the run when it begins."""
        note("followed", json.dumps({"folder": str(self.folder or ""), "rank": this_rank()}))
        if self._notes is None:
            return
        run = self._asked
        asked = {"experiment": self._name, "name": run.name, "options": to_plain(run.model_dump(exclude_unset=True))}
        command = {"command": run.command} if run.command else {}
        self._notes.begin({**host_facts(model, optimizer), **asked, **command})
        self._autocast = AutocastNoted(self._notes.add)

    def _end_by_signal(self, run: Follow) -> None:
        """Write everything: no other rank is waited for, since torchrun sends the signal when one has died."""
        self._error = HooklineError("The process was ended by SIGTERM, as torchrun does when another rank has ended.")
        ranks = self.manager.ranks
        if ranks.is_lost:  # it is ending by an error already, and waits for a word of the others
            told = {"run/error": error_text(error_of_process() or self._error)}
            self.manager.emit_metrics(told, run.epoch_of_step, HookPoint.POST_STEP)
        run.__exit__(HooklineError, self._error, None)
        self.end()

    def end(self) -> None:
        """Write how the run ended, and close the log and the sinks; may be called again."""
        self._forget_end()
        self._forget_signal()
        if self._autocast is not None:
            self._autocast.remove()
        notes, self._notes = self._notes, None
        self.manager.close()
        if notes is None:
            return
        error = self._error or error_of_process()
        silent = _why_silent(self.manager)
        if silent:
            note("silent", json.dumps(silent))
        steps = self.manager.global_step + 1
        reports = self.snapshots.count(steps) if self.loop == "step" else self._count_epochs()
        note("reports", json.dumps({"reports": reports, "steps": steps, "loop": self.loop}))
        result = LoopResult(0, steps, stopped_early=False, loss=self._newest.loss)
        is_stopped = self._error is not None or isinstance(error, KeyboardInterrupt)
        status = "stopped" if is_stopped else "finished" if error is None else "failed"
        if self._set_up is not None:
            notes.add(set_up_seconds=self._set_up)
        notes.end(status, time.perf_counter() - self.began, result=result, error=error)

    def _count_epochs(self) -> int:
        return self.snapshots.count(self._run.epoch_of_step + 1) if self._run is not None else 0


def _why_silent(manager: HookManager) -> dict[str, str]:
    """Return the hooks that have not fired, and why; one that raised or was left out has its own line."""
    plan, steps = manager.plan(), manager.global_step + 1
    told = {*manager.hook_errors, *plan.left_out}
    silent = [name for name in manager.hooks if not manager.fired[name] and name not in told]
    found = {}
    for name in silent:
        due = [f"{row.point}, {row.when}" if row.when else row.point for row in plan.rows if row.hook == name]
        found[name] = f"it is due at {' and '.join(due)}; the script made {steps} step{'s' * (steps != 1)}"
    return found
