"""A program that `helpers_warm` starts is one that Python has started, but for the imports."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_warm import WarmPopen, run_warm

TELLS = """
import os, sys
before = set(sys.modules)
import torch, torch._dynamo
print(len(set(sys.modules) - before), __name__, sys.argv, os.getcwd(), sorted(os.environ), os.getsid(0) == os.getpid())
print(sys.stdin.read(), file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def test_a_program_has_its_arguments_streams_folder_variables_session_and_exit_code(tmp_path: Path) -> None:
    """And nothing of torch is left to import."""
    started = WarmPopen(
        [sys.executable, "-c", TELLS, "3"], text=True, cwd=tmp_path, env={"ONLY": "this"}, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = started.communicate("told", timeout=600)
    assert out.split("\n")[0] == f"0 __main__ ['-c', '3'] {tmp_path} ['ONLY'] True"
    assert (err, started.returncode) == ("told\n", 3)


@pytest.mark.parametrize("takes_down", [False, True])
def test_exit_functions_run_threads_are_waited_for_and_errors_are_shown(tmp_path: Path, takes_down: bool) -> None:
    """A file and a module are run as well; what was raised is on the standard error, with exit code 1."""
    file = tmp_path / "ends.py"
    file.write_text(
        "import atexit, sys, threading\n"
        "atexit.register(print, 'last')\n"
        "threading.Timer(0.05, print, ['thread']).start()\n"
        "if len(sys.argv) > 1: raise ValueError(sys.argv[1])\n"
    )
    done = run_warm([sys.executable, file], capture_output=True, text=True, takes_down=takes_down)
    assert (done.returncode, done.stdout, done.stderr) == (0, "thread\nlast\n", "")
    done = run_warm(
        [sys.executable, "-W", "ignore", "-m", "ends", "bad"], capture_output=True, text=True, cwd=tmp_path,
        takes_down=takes_down,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "thread\nlast\n")
    assert done.stderr.endswith("ValueError: bad\n")
    with pytest.raises(subprocess.CalledProcessError):
        run_warm([sys.executable, "-c", "raise SystemExit('why')"], stderr=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it_and_end_it_as_ever(number: signal.Signals) -> None:
    """Ctrl-C too, though the process that forks was started in the background."""
    waits = "import time; print('waits', flush=True); time.sleep(600)"
    with WarmPopen(
        [sys.executable, "-c", waits], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "waits\n"
        assert started.poll() is None
        started.send_signal(number)
        assert started.wait(600) == -number
