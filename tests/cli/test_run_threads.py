"""Threads of torch: as asked, written down, kept by --resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_cli import TINY, facts_of, run_here


@pytest.fixture(autouse=True)
def three_threads():
    """torch's own number, as on a machine of three cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_a_resumed_run_keeps_its_threads_and_a_flag_wins(capsys):
    """Which is told, as it may change the last bits; and the process has its own number again."""
    run = ("run", TINY, "--silent", "--no-report", "--epochs")
    folder = Path("runs/tiny/forward")
    seen = []
    for epochs, *flags in (("1", "--threads", "2"), ("2", "--resume"), ("3", "--resume", "--threads", "1")):
        assert run_here(*run, epochs, *flags) == 0
        seen.append((facts_of(folder)["threads"], "last bits" in capsys.readouterr().out))
    assert seen == [(2, False), (2, False), (1, True)]
    assert torch.get_num_threads() == 3
