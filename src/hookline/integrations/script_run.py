"""Follow a script from inside: make the hooks of its run file, its folder and its log, at the first step.

``sitecustomize`` of ``script_start`` calls `begin_script` in the script's process, which calls `follow`. Whatever goes
wrong before hooks are attached is written down for ``hookline run``, and the script runs on as if nothing were there.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.distributed.ranks import this_rank
from hookline.error_policy import error_text
from hookline.errors import HooklineError, HooklineWarning, NoMatchError
from hookline.integrations.follow import Follow, error_of_process, follow
from hookline.integrations.host_run import command_name, with_recorder
from hookline.integrations.loop_events import find_model, find_scaler
from hookline.plain import to_plain
from hookline.runs.build import build
from hookline.runs.folder import LOG, STRATEGY, new_folder, read_run_json, write_run_json
from hookline.runs.read import read_file
from hookline.specs.apply_specs import register_hooks
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.integrations.loop_events import FirstStep
    from hookline.runs.build import Built
    from hookline.runs.run import Run

_FLUSH_EVERY: Final = 50
"""Steps: what a script loses at most when it is killed."""
_MOST_SECONDS: Final = 10.0
"""To write everything after SIGTERM: torchrun waits for 30 s before it kills."""
_NUMBERS: Final = itertools.count()


def begin_script(optimizer: Any, first: FirstStep, began: float) -> bool:
    """Follow the script of this process from the step that ``optimizer`` makes now.

    Args:
        optimizer: One that makes a step.
        first: Knows what came before it.
        began: When this was asked for, by ``time.perf_counter``: modules had to be imported since.

    Returns:
        Whether the wait is over. An optimizer whose parameters no module has, a temperature that is tuned say, is not
        what the script trains: the next one that makes a step is asked.
    """
    try:
        model = find_model(optimizer).model
    except NoMatchError as error:
        _note("failed", str(error))
        return False
    for path in Path(os.environ["HOOKLINE_RUN_NOTES"]).glob(f"{os.getpid()}.*failed"):  # of one before it
        path.unlink()
    folder = None
    try:
        asked = read_file(os.environ["HOOKLINE_RUN"], of_script=True)
        built = build(asked)
        if this_rank() == 0:  # the others write nothing
            folder = new_folder(Path(asked.output_dir), command_name(asked.command), STRATEGY)
        _note("followed", str(folder or ""))
        run = _follow(asked, built, folder, model, optimizer, first)
        options = to_plain(asked.model_dump(exclude_unset=True))
        told = {"name": asked.name, "options": options, "command": asked.command}
        run.note(**told, set_up_seconds=time.perf_counter() - began)
    except Exception as error:
        _tell_not_attached(str(error) if isinstance(error, HooklineError) else error_text(error))
        if folder is not None:  # the script goes on without hooks
            told = {"experiment": command_name(asked.command), "status": "failed", "error": error_text(error)}
            write_run_json(folder, read_run_json(folder) | told)
    return True


def _follow(asked: Run, built: Built, folder: Path | None, model: Any, optimizer: Any, first: FirstStep) -> Follow:
    """Follow the loop, in the middle of its first step, as the run file asks for it."""
    every = asked.snapshot_every
    context = {"strategy": STRATEGY, "experiment_name": command_name(asked.command), "output_dir": asked.output_dir}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Hook .* (could not be started|excluded)", HooklineWarning)  # told below
        run = follow(
            model,
            optimizer,
            with_recorder(built.hooks),  # on all ranks, which have the same hooks
            sinks=[] if folder is None else built.make_sinks(),
            log=None if folder is None else folder / LOG,
            loader=first.loader,
            scaler=find_scaler(),
            loop=None if every is None else "step" if every else "epoch",
            snapshot_every=every or None,
            flush_every=_FLUSH_EVERY,
            run_context=context if folder is None else context | {"run_dir": str(folder)},
            **built.options,
        )
    first.hand_over(run)
    for name, why in run.manager.plan.left_out.items():
        _tell_not_attached(f"the hook {name}: {why}")
    for spec in built.specs:  # one by one: if a factory raises, the others are on
        try:
            run.when_closed(register_hooks(model, [spec]).remove)
        except Exception as error:
            _tell_not_attached(f"the spec {spec.name}: {error_text(error)}")
    _at_sigterm(lambda: _end_by_signal(run))
    return run


def _at_sigterm(act: Callable[[], None]) -> None:
    """Call ``act`` when SIGTERM comes, then let it end the process: torchrun ends all ranks so when one has died.

    Where the script has a handler of its own already, or this is not the main thread, nothing is done: the handler
    decides whether the process ends, and a process that ends as Python processes do is heard of in other ways.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    process = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() == process:  # a child that was forked later has this too
            # The signal may have come within a flush, whose lock this thread holds: another one cannot block it.
            worker = threading.Thread(target=act, name="hookline-sigterm", daemon=True)
            worker.start()
            worker.join(_MOST_SECONDS)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)


def _end_by_signal(run: Follow) -> None:
    """Write everything: no other rank is waited for, since torchrun sends the signal when one has died."""
    error = KeyboardInterrupt("The process was ended by SIGTERM, as torchrun does when another rank has ended.")
    if run.manager.output.ranks.is_lost:  # it is ending by an error already, and waits for a word of the others
        told = {"run/error": error_text(error_of_process() or error)}
        run.manager.emit_metrics(told, run.epoch, HookPoint.POST_STEP)
    run.__exit__(KeyboardInterrupt, error, None)


# -- what the process that started the script is told ------------------------------------------------------------


def _tell_not_attached(text: str) -> None:
    """Say at once what is not measured: the script may run for a night. It is said again at its end."""
    print(f"hookline: not attached: {text}", file=sys.stderr, flush=True)
    _note("failed", text)


def _note(what: str, text: str) -> None:
    """Write down how far this process came, for the one that started the script."""
    folder = Path(os.environ["HOOKLINE_RUN_NOTES"])
    if folder.is_dir():
        (folder / f"{os.getpid()}.{next(_NUMBERS)}.{what}").write_text(text, encoding="utf-8")
