"""Follow a script from inside: make the hooks of its run file, its folder and its log, at the first step.

``sitecustomize`` of ``hookline.integrations.script_start`` calls `begin_script` in the script's process. Whatever goes
wrong before hooks are attached is written down for `script_command`, and the script runs on as if nothing were there.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.cli.run_folder import LOG, RunNotes, model_facts, new_folder
from hookline.cli.run_observers import BarMetricsSink
from hookline.cli.script_request import STRATEGY
from hookline.distributed.ranks import rank_count, this_rank
from hookline.errors import HooklineError
from hookline.integrations.follow import follow
from hookline.integrations.host_run_file import HooksOfFile
from hookline.integrations.model_of_optimizer import FoundModel, find_model, find_scaler
from hookline.training.loops.loop_result import LoopResult
from hookline.training.manager import HookManager

if TYPE_CHECKING:
    from hookline.integrations.backward_losses import BackwardLosses
    from hookline.integrations.follow import Follow
    from hookline.integrations.loader_passes import LoaderPass

__all__ = ["ScriptSession", "begin_script", "note"]

RUN_FILE: Final = "HOOKLINE_RUN"
"""The environment variable that names the run file; nothing is followed without it."""
NOTES: Final = "HOOKLINE_RUN_NOTES"
"""The folder in which processes write down how far they came."""
NAME: Final = "HOOKLINE_RUN_NAME"
"""What the folder of the run is called."""
_FLUSH_EVERY: Final = 50
"""Steps: what a script loses at most when it is killed."""


def begin_script(
    optimizer: Any, latest: LoaderPass | None, losses: BackwardLosses | None, done: Callable[[], None]
) -> None:
    """Follow the script of this process from the step that ``optimizer`` makes now.

    Args:
        optimizer: The first that makes a step.
        latest: The pass over a ``DataLoader`` that gave a batch last.
        losses: What ``backward()`` was called on so far.
        done: Takes off what waited for the first step; called when the step is over.
    """
    optimizer.register_step_post_hook(_Once(done))
    try:
        found = find_model(optimizer)
        session = ScriptSession(Path(os.environ[RUN_FILE]))
        loader = None if latest is None or latest.is_over else latest.loader
        session.follow(found, optimizer, loader).take_over(latest, losses)
    except HooklineError as error:
        note("failed", str(error))
    except Exception as error:
        note("failed", f"{type(error).__name__}: {error}")


class _Once:
    """Call a function at the first step; torch is going through its hooks, so this one stays, and does nothing."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self, *_: Any) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


def note(what: str, text: str = "") -> None:
    """Write down how far this process came, for the one that started the script."""
    folder = os.environ.get(NOTES)
    if folder and Path(folder).is_dir():
        (Path(folder) / f"{os.getpid()}.{what}").write_text(text, encoding="utf-8")


class ScriptSession:
    """The run of a script, in one of its processes: hooks, folder, log and ``run.json``."""

    def __init__(self, run_file: Path) -> None:
        self._file = HooksOfFile(run_file)
        self._asked = json.loads(run_file.read_text(encoding="utf-8"))
        self._newest = BarMetricsSink()
        self._notes: RunNotes | None = None
        self._began = time.perf_counter()
        self.folder: Path | None = None
        """Where records go; None on ranks over 0, which write nothing."""
        self.manager = self._make_manager()

    def _make_manager(self) -> HookManager:
        from hookline.sinks.fan_out import FanOut

        sinks: list[Any] = []
        fan_out = None
        if this_rank() == 0:
            name = os.environ.get(NAME, "run")
            self.folder = new_folder(Path(self._asked["output_dir"]), name, STRATEGY)
            sinks = self._file.make_sinks()
            fan_out = FanOut([*sinks, self._newest], log=self.folder / LOG)
        manager = HookManager(
            hooks=self._file.make_hooks(),
            sinks=fan_out,
            loop_type="epoch",
            on_error=self._file.on_error,
            flush_every=_FLUSH_EVERY,
            **self._file.options,
        )
        if self.folder is not None:
            self._notes = RunNotes(self.folder, manager, sinks)
        return manager

    @property
    def context(self) -> dict[str, Any]:
        """What hooks and sinks are told of the run."""
        name = os.environ.get(NAME, "run")
        told = {"strategy": STRATEGY, "experiment_name": name, "output_dir": self._asked["output_dir"]}
        return told if self.folder is None else {**told, "run_dir": str(self.folder)}

    def follow(self, found: FoundModel, optimizer: Any, loader: Any) -> Follow:
        """Follow the loop, in the middle of its first step."""
        model = found.model
        self.begin(model, optimizer)
        atexit.register(self.end)  # before the one of `follow`, so that it is called after it
        run = follow(
            model, optimizer, manager=self.manager, loader=loader, scaler=find_scaler(), run_context=self.context
        )
        if self._file.specs:
            from hookline.specs.hook_spec import register_hooks

            register_hooks(model, self._file.specs)
        part = "" if found.owned == found.of else f", which has {found.owned} of the {found.of} parameters"
        note("followed", json.dumps({"folder": str(self.folder or ""), "rank": this_rank(), "part": part}))
        return run

    def begin(self, model: Any, optimizer: Any) -> None:
        """Write what is known of the run when it begins."""
        import torch

        if self._notes is None:
            return
        first = next(model.parameters())
        self._notes.begin(
            {
                "experiment": os.environ.get(NAME, "run"),
                "path": sys.argv[0],
                "strategy": STRATEGY,
                "command": self._asked.get("command", [sys.executable, *sys.argv]),
                "config": {},
                "options": self._asked,
                "optimizer": type(optimizer).__name__,
                "ranks": rank_count(),
                "threads": torch.get_num_threads(),
                "device": str(first.device),
                "dtype": str(first.dtype).removeprefix("torch."),
                "model": model_facts(model),
            }
        )

    def end(self) -> None:
        """Write how the run ended, and close the log and the sinks; may be called again."""
        notes, self._notes = self._notes, None
        self.manager.close()
        if notes is None:
            return
        error = getattr(sys, "last_value", None)
        steps = self.manager.global_step + 1
        result = LoopResult(0, steps, stopped_early=False, loss=self._newest.newest.get("loss"))
        notes.end(
            "finished" if error is None else "failed", time.perf_counter() - self._began, result=result, error=error
        )
