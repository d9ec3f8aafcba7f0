"""``hookline completion SHELL``: the script that makes a shell complete commands and flags.

Takes the name of a shell, prints what tyro makes of the options of all commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg, subcommand

from hookline.cli.failures import DONE
from hookline.cli.parse import parse

__all__ = ["CompletionOptions", "command"]


@dataclass
class CompletionOptions:
    """Print what makes a shell complete hookline's commands and flags.

    Examples:
      hookline completion bash > ~/.local/share/bash-completion/completions/hookline
      hookline completion zsh > ~/.zfunc/_hookline
    """

    shell: Annotated[Positional[Literal["bash", "zsh", "fish"]], arg(help_behavior_hint="")]
    """Which shell."""


def command(arguments: Sequence[str]) -> int:
    """Print the script."""
    options = parse(CompletionOptions, arguments, "completion")
    try:
        tyro.cli(
            _everything(),
            args=["--tyro-print-completion", options.shell],
            prog="hookline",
            config=(OmitArgPrefixes, FlagCreatePairsOff),
        )
    except SystemExit as left:
        return int(left.code or DONE)
    return DONE


def _everything() -> Any:
    """All commands as one type."""
    from hookline.cli.check import CheckOptions
    from hookline.cli.find import FindOptions
    from hookline.cli.hooks import HooksOptions
    from hookline.cli.new import NewOptions
    from hookline.cli.options import RunOptions
    from hookline.cli.replay import ReplayOptions
    from hookline.cli.report import ReportOptions
    from hookline.cli.schema import SchemaOptions
    from hookline.cli.serve import ServeOptions

    commands: dict[str, Any] = {
        "run": RunOptions,
        "hooks": HooksOptions,
        "find": FindOptions,
        "check": CheckOptions,
        "schema": SchemaOptions,
        "serve": ServeOptions,
        "report": ReportOptions,
        "replay": ReplayOptions,
        "new": NewOptions,
        "completion": CompletionOptions,
    }
    marked = tuple(Annotated.__class_getitem__((cls, subcommand(name))) for name, cls in commands.items())  # type: ignore[attr-defined]
    return Union.__getitem__(marked)
