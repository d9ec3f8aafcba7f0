"""``hookline completion bash``: the script that makes bash complete commands, flags and their values.

Takes the name of a shell, prints a script that asks `complete` at every Tab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from tyro.conf import Positional, arg

from hookline.cli.error_messages import DONE
from hookline.cli.parse import parse

__all__ = ["ASK", "CompletionOptions", "command"]

ASK: Final = "__complete"
"""The command that the script calls; it is in no list."""

_BASH: Final = """\
# Completion of hookline for bash. What could stand at the cursor is asked of hookline itself.
_hookline() {
    local kind words=() files=()
    { IFS= read -r kind; mapfile -t words; } < <(
        "${1/#\\~/$HOME}" @ASK@ "$COMP_LINE" "$COMP_POINT" "$COMP_WORDBREAKS" 2>/dev/null
    )
    if [[ $kind == files ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t files < <(compgen -f -- "$2")
    fi
    COMPREPLY=("${words[@]}" "${files[@]}")
    # A hook is followed by its argument, a file by what is in it.
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *@(.|.py) ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _hookline hookline
"""


@dataclass
class CompletionOptions:
    """Print what makes bash complete hookline's commands, flags, hooks, experiments and files.

    Examples:
      hookline completion bash > ~/.local/share/bash-completion/completions/hookline
      eval "$(hookline completion bash)"                      # in this shell alone
    """

    shell: Annotated[Positional[Literal["bash"]], arg(help_behavior_hint="")]
    """Which shell; bash 4 or later is the one there is."""


def command(arguments: Sequence[str]) -> int:
    """Print the script."""
    parse(CompletionOptions, arguments, "completion")
    print(_BASH.replace("@ASK@", ASK), end="")
    return DONE
