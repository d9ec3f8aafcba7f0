"""Completion in bash: commands, flags, hooks, experiments, what an experiment takes, and files."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_cli import EXPERIMENTS, run_here
from helpers_waiting import PATIENCE

from hookline.analyses import BUILT_IN
from hookline.cli.completion_command import candidates

ASK = """
source ./script
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDBREAKS=$' \\t\\n":='
_hookline "$2" "$3"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def bash(tmp_path, capsys):
    """A folder with the script in it, and what bash offers for a line."""
    assert run_here("completion", "bash") == 0
    Path("script").write_text(capsys.readouterr().out)
    Path("ask").write_text(ASK)
    program = tmp_path / "bin" / "hookline"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hookline "$@"\n')
    program.chmod(0o755)

    def offered(line: str, word: str) -> list[str]:
        command = ["bash", "--norc", "ask", line, str(program), word]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        assert done.stderr == ""
        return done.stdout.split("\n")[:-1]

    return offered


def of(line: str) -> list[str]:
    """The candidates that begin as the last word does."""
    words = line.split(" ")
    return [one for one in candidates(words).words if one.startswith(words[-1])]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("re", ["report", "replay"]),
        ("run ", ["mod_arithmetic", "digits"]),
        ("run --strat", ["--strategy"]),
        ("run mod_arithmetic --strategy ", ["random", "stride", "target", "fixed_random", "all"]),
        ("run mod_arithmetic --with-hooks ", ["none", "minimal", "observers", "interventions", "full"]),
        ("run mod_arithmetic --hooks norms hess", ["hessian", "hessian_spectrum"]),
        ("run mod_arithmetic --train", ["--train-fraction"]),
        ("run digits --hook-csv --chan", ["--channels"]),
        ("run mod_arithmetic --hook-config nor", ["norms."]),
        ("run mod_arithmetic --console ", ["live", "lines", "tables", "silent", "none"]),
        ("run mod_arithmetic --on-hook-error ", ["raise", "warn", "disable"]),
        ("run mod_arithmetic --matmul-precision ", ["highest", "high", "medium"]),
        (f"run {EXPERIMENTS}:Tiny --norm", ["--normalize"]),
        (f"run {EXPERIMENTS}:Tiny --strategy ", ["forward", "backward", "all"]),
        (f"run {EXPERIMENTS}:make_t", [f"{EXPERIMENTS}:make_tiny", f"{EXPERIMENTS}:make_tool"]),
        (f"run {EXPERIMENTS}:make_tiny --wid", ["--width"]),
        ("hooks nor", ["norms"]),
        ("replay runs/x --to pa", ["parquet"]),
        ("replay runs/x --to mem", ["memory"]),
        ("run mod_arithmetic --hook-sink mem", ["memory"]),
        ("schema ", ["run", "hooks", "server"]),
        ("new ", ["experiment", "hook", "sink"]),
        ("serve --protect ", ["hooks", "everything"]),
        ("serve --tok", ["--token", "--token-file"]),
        ("run mod_arithmetic --lr ", []),
        ("nothing ", []),
    ],
)
def test_what_can_stand_there_is_offered(line, words):
    """Nothing of the help's text, no None."""
    assert of(line) == words


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("run ", True),
        ("run mod_arithmetic --hook-specs ", True),
        ("run mod_arithmetic --output-dir ", True),
        ("run mod_arithmetic --hooks my_", True),
        ("run mod_arithmetic --hooks nor", False),
        ("report ", True),
        ("check ", True),
        ("new hook ", True),
        ("run mod_arithmetic --lr ", False),
        ("run mod_arithmetic --strategy ", False),
    ],
)
def test_files_are_offered_where_one_can_stand(line, files):
    """And nowhere else."""
    assert candidates(line.split(" ")).has_files is files


def test_every_flag_of_run_is_offered_once():
    """Those of the experiment before the others."""
    offered = of("run mod_arithmetic --")
    assert len(offered) == len(set(offered))
    assert offered[:2] == ["--epochs", "--snapshot-every"]
    assert {"--hook-wandb", "--resume", "--dry-run", "--show", "--help"} <= set(offered)
    assert set(of("hooks ")) >= set(BUILT_IN)


def test_a_file_is_read_and_not_run(tmp_path):
    """A key pressed by mistake does nothing; what cannot be read has no candidates."""
    (tmp_path / "own.py").write_text(
        "raise SystemExit('run')\nclass Own:\n    strategies = ('one',)\n    config_class = Settings\n"
        "class Settings:\n    depth: int = 3\n"
    )
    assert of("run own.py:") == ["own.py:Own", "own.py:Settings"]
    assert of("run own.py:Own --dep") == ["--depth"]
    assert of("run own.py:Own --strategy o") == ["one"]
    (tmp_path / "broken.py").write_text("class (:\n")
    assert of("run broken.py:") == []
    assert "--lr" not in of("run broken.py:Own --")


def test_completion_does_not_import_torch():
    """It has to be there at once."""
    code = (
        "import sys; from hookline.cli.main import main; "
        "main(['__complete', 'hookline run mod_arithmetic --hooks no', '37', ':=']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "words\nnorms\nnone\n")


def test_bash_completes_by_the_script(bash, tmp_path):
    """Words behind a colon, which begins a word in bash; names of files with blanks; nothing of the help."""
    Path("mine.py").write_text("class Mine:\n    pass\n")
    Path("x y.json").write_text("[]")
    assert bash("hookline run mod_arithmetic --strat", "--strat") == ["--strategy"]
    assert bash("hookline run m", "m") == ["mod_arithmetic", "mine.py"]
    assert bash("hookline run mine.py:M", "M") == ["Mine"]
    assert bash("hookline run mod_arithmetic --hook-specs x", "x") == ["x y.json"]
    assert bash("hookline run mod_arithmetic --hooks hessian_", "hessian_") == ["hessian_spectrum"]


def test_a_tab_in_an_interactive_bash_writes_the_word(bash, tmp_path):
    """As a user has it: a terminal, the script, a key."""
    child, terminal = pty.fork()
    if child == 0:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**os.environ, "PATH": path, "TERM": "dumb"})
    try:
        os.write(terminal, b"source ./script; echo rea''dy\n")
        _read_until(terminal, b"ready")
        os.write(terminal, b"hookline run mod_arithmetic --weight-d\t")
        _read_until(terminal, b"--weight-decay ")
    finally:
        os.write(terminal, b"\x03\nexit\n")
        _read_until(terminal, None)
        os.waitpid(child, 0)
        os.close(terminal)


def _read_until(terminal: int, wanted: bytes | None) -> None:
    """Read until that is there, or, for None, until the other side has gone; a minute is a safety net."""
    found = b""
    while wanted is None or wanted not in found:
        ready, _, _ = select.select([terminal], [], [], 60)
        try:
            part = os.read(terminal, 4096) if ready else b""
        except OSError:
            part = b""
        if not part:
            assert wanted is None, found
            return
        found += part


def test_other_shells_are_refused_by_name(capsys):
    """There is a script for bash alone."""
    assert run_here("completion", "tcsh") == 2
    assert "bash" in capsys.readouterr().err
