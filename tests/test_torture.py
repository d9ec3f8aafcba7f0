"""A little of what ``make torture`` does, in one process: nothing is lost, and what is broken on purpose is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_cases import Case, Outcome, Part
from helpers_waiting import PATIENCE
from helpers_warm import run_warm

ROOT = Path(__file__).parent.parent
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="cases run in forked processes")


def run_python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python without threads: a fork of this process, where other tests have started some, may wait for ever."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
    command = [sys.executable, *map(str, arguments)]
    return run_warm(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)


@LINUX
def test_nothing_is_lost_in_a_few_cases_of_each_part():
    """Interventions, programs, sinks, threads, files; kills and requests have tests of their own."""
    parts = ["interventions", "programs", "sinks", "threads", "files"]
    run = run_python(ROOT / "torture/run.py", "--quick", "--parts", *parts)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    lines = run.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == parts
    assert all(" 0 wrong, 0 dead" in line for line in lines), run.stdout


CODE = """
import os, signal, time
import helpers_cases
from helpers_cases import Case, Part, run_part

def run_case(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 4:
        time.sleep(600)
    if number == 5:
        raise ValueError("on purpose")
    return Case(number, 1, ["lost"] if number == 3 else [], "no" if number == 1 else "")

helpers_cases.HANG = 3.0
found = run_part(Part("x", "", "", 7, 7, run_case), seconds=600)
wrong, dead = [case.number for case in found.wrong], [number for number, _ in found.died]
print(found.cases, wrong, dead, dict(found.refused), found.is_clean)
"""


@LINUX
def test_cases_that_lose_crash_hang_or_raise_are_named_and_the_others_run():
    """The count would be worth nothing if it passed over the worst."""
    run = run_python("-c", CODE)
    assert run.stdout.strip() == "7 [3] [2, 4, 5] {'no': 1} False", run.stderr


def test_a_part_that_tried_nothing_is_not_clean():
    assert not Outcome(Part("x", "", "", 1, 1, lambda number: Case(number)), 0).is_clean
