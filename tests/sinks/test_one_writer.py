"""One writer to a log: within a process, between processes, and after all of them nothing is left lying about."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers_sinks import Slow, record

import hookline as hl
from hookline.errors import OptionError
from hookline.records.log import FanOut, RecordLog, read_log

OTHER = """
import sys
from pathlib import Path
from hookline.files import take_lock
print(take_lock(Path(sys.argv[1])) is not None)
"""


def other_process_gets(path) -> bool:
    """Whether somebody else could have the lock now."""
    found = subprocess.run([sys.executable, "-c", OTHER, str(path)], capture_output=True, text=True, check=True)
    return found.stdout.strip() == "True"


def test_two_managers_of_one_process_do_not_write_one_log(tmp_path):
    """The second is refused, and the first keeps its lock; closed, the log is free, and its numbers go on."""
    path = tmp_path / "records.jsonl"
    first = hl.HookManager(log=path)
    with pytest.raises(OptionError, match=r"is being written already, here or.*Close the manager that writes it"):
        hl.HookManager(log=path)
    assert not other_process_gets(tmp_path / ".records.jsonl.lock")
    first.fan_out.write(record(0))
    first.close()
    with FanOut(log=path) as second:
        second.write(record(1))
    assert [found.number for found in read_log(path)] == [0, 1]


def test_a_manager_that_nobody_has_any_more_holds_nothing(tmp_path):
    """Not closed, and in a circle of references, as managers and their hooks are."""
    manager = hl.HookManager(log=tmp_path / "records.jsonl")
    manager.itself = manager
    del manager
    hl.HookManager(log=tmp_path / "records.jsonl").close()


def test_no_lock_is_left(tmp_path):
    """Neither of the log nor of the helper process; a record that comes later takes it again."""
    fan_out = FanOut([Slow(str(tmp_path / "slow.txt"))], log=tmp_path / "records.jsonl")
    fan_out.write(record(0))
    assert (tmp_path / ".records.jsonl.lock").exists()
    fan_out.close()
    assert [path.name for path in tmp_path.iterdir() if "lock" in path.name] == []
    fan_out.write(record(1))
    assert not other_process_gets(tmp_path / ".records.jsonl.lock")
    fan_out.close()
    assert [path.name for path in tmp_path.iterdir() if "lock" in path.name] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_gives_nothing_up(tmp_path):
    """It has a copy of everything, closes it, and the lock is still its parent's."""
    log = RecordLog(tmp_path / "records.jsonl")
    child = os.fork()
    if child == 0:
        log.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert not other_process_gets(tmp_path / ".records.jsonl.lock")
    log.append(record(0))
    log.close()
    assert other_process_gets(tmp_path / ".records.jsonl.lock")
