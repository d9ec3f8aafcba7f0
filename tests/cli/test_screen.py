"""What a run shows: the live view on a terminal, its progress elsewhere, tables when they are asked for."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
from pathlib import Path

import pytest
from helpers_cli import TINY, records_of, run_here, same_weights
from helpers_warm import WarmPopen

SMALL = ("--p", "11", "--width", "8", "--batch-size", "32", "--epochs", "3", "--snapshot-every", "1")


@pytest.mark.filterwarnings("always::hookline.errors.HooklineWarning")  # as outside of tests
def test_the_run_of_the_makefile_is_a_few_lines_and_begins_with_no_warning(capsys):
    """How far it is, where everything is."""
    flags = ("--with-hooks", "observers", "--hook-csv", "--hook-jsonl")
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert f"hookline run mod_arithmetic {' '.join(flags)}" in makefile
    assert run_here("run", "mod_arithmetic", *flags, *SMALL) == 0
    heard = capsys.readouterr()
    assert heard.err == ""
    lines = heard.out.splitlines()
    assert len(lines) <= 20
    assert " steps · " in lines[0]
    assert max(len(line) for line in lines) <= 160


def test_a_bare_run_records_its_loss_and_has_a_page(capsys, tmp_path):
    """Nobody who trains wants no curve; and the run is the same bit for bit."""
    assert run_here("run", TINY, "--epochs", "8", "--snapshot-every", "3") == 0
    folder = tmp_path / "runs" / "tiny" / "forward"
    assert (folder / "report.html").exists()
    assert sum("training_metrics/loss" in record["metrics"] for record in records_of(folder)) == 8
    assert sum("eval/val_acc" in record["metrics"] for record in records_of(folder)) == 8
    assert capsys.readouterr().out.startswith("24/24 steps")
    assert run_here("run", TINY, "--epochs", "8", "--hooks", "none", "--silent") == 0
    assert same_weights(folder, tmp_path / "runs" / "tiny" / "forward_1")


def on_terminal(*arguments: str, until: bytes, then: int | None = None) -> tuple[bytes, int]:
    """``hookline ...`` on a terminal of 80 by 24; what it wrote, and its exit code. ``then`` is a signal, once."""
    terminal, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "OMP_NUM_THREADS": "1"}
    child = WarmPopen(
        [sys.executable, "-m", "hookline", *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    found, sent = b"", then is None
    while True:
        ready, _, _ = select.select([terminal], [], [], 120)  # a safety net
        try:
            part = os.read(terminal, 65536) if ready else b""
        except OSError:  # the other side has gone
            part = b""
        if not part:
            break
        found += part
        if not sent and until in found:
            sent = True
            child.send_signal(then)
    os.close(terminal)
    assert until in found, found[-2000:]
    return found, child.wait()


HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"


def test_on_a_terminal_the_view_is_live_and_the_cursor_comes_back():
    """No tables; the last state stays, and the closing lines are below it."""
    found, code = on_terminal("run", TINY, "--epochs", "3", "--no-report", until=b"finished")
    assert code == 0
    assert HIDE in found
    assert found.rindex(SHOW) > found.rindex(HIDE)
    assert "╭".encode() in found
    assert b"Hook Metrics" not in found.replace(b"Hook Metrics \xc2\xb7", b"")
    assert found.rindex(b"finished") > found.rindex("╭".encode())


def test_ctrl_c_leaves_the_terminal_as_it_was():
    """The cursor is there, the run is saved, and how to go on is said."""
    flags = ("--epochs", "100000", "--pause", "0.01", "--no-report")
    found, code = on_terminal("run", TINY, *flags, until="╭".encode(), then=signal.SIGINT)
    assert code == 130
    assert found.rindex(SHOW) > found.rindex(HIDE)
    assert b"Stopped by SIGINT, and saved." in found
