"""Run a command of ``hookline``, and turn what it raises into a sentence and an exit code.

``python -m hookline`` and the script of that name call `main`, which imports the module of the command only then: help
comes without torch. Commands take their exit codes from here.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Final

DONE: Final = 0
FAILED: Final = 1
"""The run failed: an error in training, or in the user's code."""
WRONG_USE: Final = 2
"""What was asked cannot be done: an unknown name, a flag that does not go."""
NOT_ATTACHED: Final = 3
"""A script has run to its end, and not all that was asked for could be attached to its model."""

COMMANDS: Final = {
    "run": "train an experiment, or your own script, with hooks",
    "hooks": "list the hooks there are, or describe some",
    "find": "show the modules of a model that a pattern matches",
    "doctor": "say who hooks what in a model, and where no hook would fire",
    "audit": "train with and without hooks, and say which hook changes the run",
    "check": "check a run file, or a file of hooks",
    "serve": "serve a model over HTTP, with hooks",
    "report": "make the HTML page of one or more runs",
    "compare": "find where two traced runs diverge, and whether that is rounding",
    "parity": "say how far a trainer's model and an engine are apart, and why",
    "replay": "feed a run's records to another destination",
    "new": "write a file to start from: experiment, hook or sink",
}
"""What each command does: a function of its name takes the arguments."""
_OWN_FILES: Final = ("run", "serve")
"""Commands with a module of their name; the others are in ``commands``."""

_HELP: Final = """\
usage: hookline COMMAND ...

Hooks on any place of a PyTorch model, or any moment of its run; metrics to wherever they are wanted.

commands:
{commands}

options:
  -h, --help    this help; after a command, help for it (after an experiment, with its own options)
  --version     the version
  --debug       whole tracebacks

examples:
  hookline run mod_arithmetic --with-hooks observers --hook-csv
  hookline run --hooks norms -- python train.py --lr 1e-3

exit codes:
  0 done   1 the run failed   2 wrong use   3 not all hooks were attached, or fired   130, 143 stopped by Ctrl-C
  or SIGTERM, after saving
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    Recipe: ``main(["hooks", "norms"])``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    _replace_unknown_letters()
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `hookline hooks | head`
        sys.stderr.close()
        return DONE
    except Exception as error:
        return _explain(error, debug=debug)


def _replace_unknown_letters() -> None:
    """Print question marks for letters that the screen lacks, in a formula or a layer's name."""
    for stream in (sys.stdout, sys.stderr):
        encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
        if hasattr(stream, "reconfigure") and encoding not in ("", "utf8"):
            stream.reconfigure(errors="replace")


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        lines = [f"  {name:<12}  {text}" for name, text in COMMANDS.items()]
        print(_HELP.format(commands="\n".join(lines)), end="")
        return DONE if arguments else WRONG_USE
    if arguments[0] in ("-V", "--version"):
        from hookline import __version__

        print(f"hookline {__version__}")
        return DONE
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        from hookline.messages import did_you_mean  # not for every --help

        meant = did_you_mean(name, COMMANDS)
        print(f"hookline: Unknown command {name!r}.{meant} Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return WRONG_USE
    module = name if name in _OWN_FILES else "commands"
    return int(getattr(importlib.import_module(f"hookline.cli.{module}"), name)(rest))


# -- errors ----------------------------------------------------------------------------------------------------


def _explain(error: BaseException, *, debug: bool) -> int:
    """Print what went wrong to the standard error, and return the exit code."""
    from hookline.errors import HooklineError
    from hookline.runs.folder import RunFailed

    if isinstance(error, RunFailed) and error.__cause__ is not None:
        _print_error(error.__cause__, debug=debug)
        print(f"hookline: {error}", file=sys.stderr)
        return FAILED
    _print_error(error, debug=debug)
    return WRONG_USE if isinstance(error, HooklineError) else FAILED


def _print_error(error: BaseException, *, debug: bool) -> None:
    """Print an error of hookline as a sentence; of others, or if asked to, the traceback."""
    from hookline.errors import HooklineError, help_line

    if debug or not isinstance(error, HooklineError):
        traceback.print_exception(error)
        return
    notes = getattr(error, "__notes__", ())
    if not sys.stderr.isatty():  # a log has no use for the address, and most lines of a pipe are read by programs
        notes = [note for note in notes if note != help_line(type(error))]
    print("\n".join([f"hookline: {error}", *notes]), file=sys.stderr)
