"""A hook that raises: what ``--on-hook-error`` makes of it, and what the user is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_cli import TINY, facts_of, run_here

FOLDER = Path("runs/tiny/forward")
QUIET = ("--silent", "--no-report", "--epochs", "4")
BOOM = """
import hookline as hl

class Boom(hl.TrainingHook):
    name = "boom"
    hook_points = {hl.HookPoint.POST_EPOCH}

    def compute(self, ctx):
        if ctx.epoch >= 1:
            raise ValueError("no such luck")
        return {"ok": 1.0}

class Late(hl.TrainingHook):
    name = "late"
    hook_points = {hl.HookPoint.POST_EPOCH}

    def start(self, model):
        raise ValueError("not ready")

    def compute(self, ctx):
        return {}
"""


@pytest.fixture(autouse=True)
def boom() -> None:
    Path("boom.py").write_text(BOOM)


def test_by_default_the_run_fails_and_says_who_when_where_and_what_next(capsys):
    """Hook, point, step, folder, and the flag to go on with."""
    assert run_here("run", TINY, "--hooks", "boom.py:Boom", *QUIET) == 1
    err = capsys.readouterr().err
    assert "ValueError: no such luck" in err
    assert "Raised by the hook 'boom' at POST_EPOCH, step 5, epoch 1." in err
    assert "The run failed; what it recorded until then is in runs/tiny/forward." in err
    assert "to train on when boom raises: --on-hook-error disable" in err
    assert facts_of(FOLDER)["status"] == "failed"
    assert facts_of(FOLDER)["hooks"]["boom"]["failed"] == 1


@pytest.mark.filterwarnings("always::hookline.errors.HooklineWarning")  # as outside of tests
@pytest.mark.parametrize(
    ("policy", "count", "said"),
    [
        ("warn", 3, "The hook boom raised 3 times and stayed on: its metrics are incomplete."),
        ("disable", 1, "The hook boom raised once and was switched off: its metrics are incomplete."),
    ],
)
def test_the_run_goes_on_if_that_is_asked_for(policy, count, said, capsys):
    """The frames that are the user's are shown once; the end says what is missing."""
    assert run_here("run", TINY, "--hooks", "boom.py:Boom", "norms", "--on-hook-error", policy, *QUIET) == 0
    heard = capsys.readouterr()
    assert said in heard.out
    assert heard.err.count("Traceback") == 1
    assert "boom.py" in heard.err
    assert "firing.py" not in heard.err
    assert "manager.hooks.errors" not in heard.err
    facts = facts_of(FOLDER)
    assert (facts["status"], facts["hooks"]["boom"]["failed"], facts["hooks"]["norms"]["failed"]) == (
        "finished",
        count,
        0,
    )


def test_a_hook_that_cannot_start_is_named(capsys):
    assert run_here("run", TINY, "--hooks", "boom.py:Late", *QUIET) == 1
    err = capsys.readouterr().err
    assert "Raised by the hook 'late' when training began, in start(model)." in err
    assert "in runs/tiny/forward." in err
