"""``hookline``: finds the command, has it run, and turns what it raises into a sentence and an exit code.

Takes the arguments of the process, hands the rest of them to the command's own module, which is imported then: help
comes without torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

from hookline.cli.error_messages import DONE, WRONG_USE, explain

__all__ = ["COMMANDS", "main"]

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "run": ("hookline.cli.run_command", "train an experiment, with hooks"),
    "hooks": ("hookline.cli.hooks_command", "list the hooks there are, or describe some"),
    "find": ("hookline.cli.find_command", "show the modules of a model that a pattern matches"),
    "check": ("hookline.cli.check_command", "check a run file, or a file of hooks"),
    "schema": ("hookline.cli.schema_command", "print the JSON schema of such files, for editors"),
    "serve": ("hookline.cli.serve_command", "serve a model over HTTP, with hooks"),
    "report": ("hookline.cli.report_command", "make the HTML page of one or more runs"),
    "replay": ("hookline.cli.replay_command", "feed a run's records to another destination"),
    "new": ("hookline.cli.new_command", "write a file to start from: experiment, hook or sink"),
    "completion": ("hookline.cli.completion", "print what makes bash complete these commands"),
}
"""Each command: the module that has its ``command(arguments)``, and what it does."""

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
  hookline run mod_arithmetic --with-hooks observers --hook-csv --hook-jsonl
  hookline run my_file.py:MyExperiment --epochs 20 --hooks norms hessian --hook-config hessian.every_n_steps=50
  hookline run mod_arithmetic --resume
  hookline find my_file.py:make_model 'layers.#.mlp'

exit codes:
  0 done   1 the run failed   2 wrong use   130, 143 stopped by Ctrl-C or SIGTERM, after saving
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Recipe: ``main(["hooks", "norms"])``; the exit code comes back.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    _print_anything()
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `hookline hooks | head`
        sys.stderr.close()
        return DONE
    except Exception as error:
        if _is_interrupted(error) and not debug:
            return 130
        return explain(error, debug=debug)


def _is_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C came first: while torch is being imported, what cleans up after it meets half a module."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _print_anything() -> None:
    """A screen without the letters of a formula or a layer's name shows question marks for them."""
    for stream in (sys.stdout, sys.stderr):
        encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
        if hasattr(stream, "reconfigure") and encoding not in ("", "utf8"):
            stream.reconfigure(errors="replace")


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return DONE if arguments else WRONG_USE
    if arguments[0] in ("-V", "--version"):
        from hookline import __version__

        print(f"hookline {__version__}")
        return DONE
    name, rest = arguments[0], arguments[1:]
    if name == "__complete":
        from hookline.cli import completions as complete

        return complete.command(rest)
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        print(f"hookline: Unknown command {name!r}.{meant} Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return WRONG_USE
    code = importlib.import_module(COMMANDS[name][0]).command(rest)
    return int(code)


def _help() -> str:
    lines = [f"  {name:<12}  {text}" for name, (_, text) in COMMANDS.items()]
    return _HELP.format(commands="\n".join(lines))
