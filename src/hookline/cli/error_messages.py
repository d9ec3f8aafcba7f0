"""What a user sees when something goes wrong: a sentence for a mistake, their own frames for a bug of theirs.

Called by `main` for whatever a command raises; hands back the exit code.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

__all__ = ["BUG", "DONE", "FAILED", "WRONG_USE", "RunFailed", "explain", "explain_error", "own_frames", "own_text"]

DONE: Final = 0
FAILED: Final = 1
"""The run failed: an error in training, or in the user's code."""
WRONG_USE: Final = 2
"""What was asked cannot be done: an unknown name, a flag that does not go."""
BUG: Final = 1

_PACKAGE: Final = Path(__file__).resolve().parent.parent


class RunFailed(Exception):
    """Training raised; the cause is told, then what to do next; the exit code is 1, whatever kind of error it is."""


def explain(error: BaseException, *, debug: bool) -> int:
    """Print what went wrong to the standard error; the exit code."""
    from hookline.errors import HooklineError

    if isinstance(error, RunFailed) and error.__cause__ is not None:
        explain_error(error.__cause__, debug=debug)
        if str(error):
            print(f"hookline: {error}", file=sys.stderr)
        return FAILED
    explain_error(error, debug=debug)
    return WRONG_USE if isinstance(error, HooklineError) else FAILED


def explain_error(error: BaseException, *, debug: bool) -> None:
    """The text of an error of ours; of another, the frames that are the user's."""
    from hookline.errors import HooklineError

    if debug:
        traceback.print_exception(error)
    elif isinstance(error, HooklineError) and _says_it_all(error):
        print("\n".join([f"hookline: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
    else:
        print(own_text(error), file=sys.stderr)


def _says_it_all(error: BaseException) -> bool:
    """Whether the sentence is enough: nothing of the user's called it, or a package is missing, whoever needs it.

    What an experiment that comes with hookline raises of its own is about its options.
    """
    from hookline.errors import MissingPackageError

    frames = own_frames(error.__traceback__)
    theirs = [frame for frame in frames if not Path(frame.filename).resolve().is_relative_to(_PACKAGE)]
    return isinstance(error, MissingPackageError) or not theirs


def own_frames(trace: TracebackType | None) -> traceback.StackSummary:
    """The frames of code that is neither hookline's nor an installed package's."""
    frames = traceback.extract_tb(trace)
    return traceback.StackSummary.from_list([frame for frame in frames if _is_theirs(frame.filename)])


def _is_theirs(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if path.is_relative_to(_PACKAGE):
        # The experiments that come with hookline are read as examples; an error in them is shown as in one's own.
        return path.parent.name == "experiments"
    return "site-packages" not in path.parts and not path.is_relative_to(Path(traceback.__file__).resolve().parent)


def own_text(error: BaseException) -> str:
    """The frames of an error that are the user's, and what it says."""
    frames, lines = own_frames(error.__traceback__), []
    if frames:
        is_embedded = all(Path(frame.filename).resolve().is_relative_to(_PACKAGE) for frame in frames)
        lines.append(f"Traceback ({'the experiment' if is_embedded else 'your code'}; all of it: --debug):")
    elif not (isinstance(error, SyntaxError) and _is_theirs(error.filename or "<")):  # that names its place itself
        frames = _last_call(error.__traceback__)
        lines.append("Traceback (none of it is your code; from hookline's last call on; all of it: --debug):")
    if frames:
        lines.append("".join(frames.format()).rstrip())
    lines.append("".join(traceback.format_exception_only(error)).rstrip())
    return "\n".join(lines)


def _last_call(trace: TracebackType | None) -> traceback.StackSummary:
    """From the last frame of hookline on: a loss that is torch's own function is called there, with what it got."""
    frames = traceback.extract_tb(trace)
    ours = [place for place, frame in enumerate(frames) if Path(frame.filename).resolve().is_relative_to(_PACKAGE)]
    return traceback.StackSummary.from_list(frames[ours[-1] if ours else 0 :])
