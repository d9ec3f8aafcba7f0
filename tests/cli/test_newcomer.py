"""What goes wrong on the first day: each mistake has its sentence, its exit code, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_cli import run_here

QUIET = ("--silent", "--no-report")
OWN = """
import torch
from torch import nn
import hookline

class Own(hookline.Experiment):
    name = "own"

    def __init__(self, config=None, strategy="default"):
        model = nn.Linear(4, 2)
        batches = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(5)]
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)

class ByItself(Own):
    def __init__(self, config=None, strategy="default"):
        super().__init__()
        self.optimizer = None

    def train_step(self, batch):
        self.model.zero_grad()
        loss = self.loss_fn(self.model, batch)
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.1 * parameter.grad
        return loss.detach()

class TorchLoss(Own):
    loss_fn = staticmethod(nn.functional.cross_entropy)

class Steps(Own):
    loop = "step"

    def evaluate(self, model):
        return {"val_acc": 0.5}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_syntax_error_shows_its_line_and_nothing_of_hookline(capsys, tmp_path):
    """The error names the place itself."""
    (tmp_path / "wrong.py").write_text("class A(:\n    pass\n")
    assert run_here("run", "wrong.py:A") == 1
    err = capsys.readouterr().err
    assert "class A(:" in err
    assert "SyntaxError: invalid syntax" in err
    assert "Traceback" not in err
    assert "cli/" not in err


def test_an_error_without_a_frame_of_the_user_begins_where_hookline_called(capsys, own):
    """A loss of torch's own, taken for one of a model and a batch: the call shows what it was given."""
    assert run_here("run", f"{own}:TorchLoss", "--epochs", "1", *QUIET) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (none of it is your code")
    assert "loss_fn(model, part)" in err
    assert "TypeError: cross_entropy_loss()" in err
    assert "session.py" not in err
    assert run_here("--debug", "run", f"{own}:TorchLoss", "--epochs", "1", *QUIET) == 1
    assert "session.py" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--epochs", "--snapshot-every"])
def test_a_negative_length_is_wrong_use_and_makes_no_folder(capsys, own, tmp_path, flag):
    """It is found out before anything is written."""
    assert run_here("run", f"{own}:Own", flag, "-3", *QUIET) == 2
    assert f"{flag}: expected greater than or equal to 0" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("always::hookline.errors.HooklineWarning")  # as outside of tests
def test_a_sink_that_cannot_begin_is_told_in_a_sentence(capsys, own, tmp_path):
    """A failure that its warning explains has no traceback; the run goes on."""
    (tmp_path / "sinks.py").write_text(
        "import hookline\n\n\nclass Full(hookline.MetricSink):\n"
        "    def emit(self, metrics, epoch, hook_point):\n        raise OSError(28, 'No space left on device')\n"
    )
    flags = ("--hooks", "norms", "--hook-sink", "sinks.py:Full", "--epochs", "1")
    assert run_here("run", f"{own}:Own", *flags, *QUIET) == 0
    err = capsys.readouterr().err
    assert err.count("No space left on device") == 1
    assert "Traceback" not in err


def test_a_second_ctrl_c_says_what_there_is_to_go_on_from(capsys, own, monkeypatch):
    """Nothing is saved then."""
    from hookline.runs.find import RunExperiment

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunExperiment, "train", interrupted)
    assert run_here("run", f"{own}:Own", "--epochs", "1", *QUIET) == 130
    assert "Stopped at once, without saving; there is no checkpoint to continue from." in capsys.readouterr().out
