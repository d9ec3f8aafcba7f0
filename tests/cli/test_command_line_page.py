"""The page about the command line shows what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from helpers_cli import run_here

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"
RUN_FILE = "experiment: parity.py:Parity\nconfig: {epochs: 3, lr: 1e-3}\nhooks:\n  with_hooks: observers\n  confg: {}\n"


def blocks() -> list[tuple[str, str]]:
    """Every command of the page, with what it prints."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for command, _, output in (part.partition("\n") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]):
            found.append((command, output))
    return found


def test_the_console_blocks_of_the_page_are_what_is_printed(capsys, monkeypatch):
    """One after the other in one folder; ``…`` stands for what differs from run to run."""
    monkeypatch.setenv("COLUMNS", "110")
    Path("run.yaml").write_text(RUN_FILE)
    shown = blocks()
    assert len(shown) >= 10
    for command, output in shown:
        words = shlex.split(command)
        assert words[0] == "hookline"
        run_here(*words[1:])
        heard = capsys.readouterr()
        pattern = re.escape(output).replace("…", "[^\n]*")
        assert re.fullmatch(pattern, heard.out + heard.err), f"$ {command}\n{heard.out}{heard.err}"


def test_a_page_that_shows_something_else_would_be_noticed(capsys):
    """The comparison can fail."""
    run_here("--version")
    assert not re.fullmatch(re.escape("hookline 9.9.9\n"), capsys.readouterr().out)
