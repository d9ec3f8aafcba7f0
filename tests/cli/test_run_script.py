"""``hookline run … -- COMMAND``: hooks in a script that hookline does not own; the script stays as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_training import nested_differences
from helpers_waiting import PATIENCE
from helpers_warm import WarmPopen
from torch import nn

from hookline.cli import script
from hookline.cli.main import main
from hookline.integrations.loop_events import find_model

WARM_START = Path(__file__).with_name("warm_start.py")
TRAIN = """
import importlib.util, os, sys
importlib.util.find_spec("torch")  # as transformers does, long before anything imports it
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(28, 6), torch.randint(3, (28,))), 4, shuffle=True)
layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
model = DistributedDataParallel(layers) if ranks > 1 else layers
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
next(iter(loader))
os.chdir("elsewhere")
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    print(f"epoch {epoch} of {__name__}\\n", end="")  # one write: two ranks share the terminal
if os.environ.get("RANK", "0") == "0":
    torch.save([layers.state_dict(), optimizer.state_dict(), torch.get_rng_state()], sys.argv[1])
if ranks > 1:
    torch.distributed.destroy_process_group()
sys.exit(int(sys.argv[2]))
"""

HOOK = """
import hookline as hl

class Drawing(hl.TrainingHook):
    name = "drawing"
    hook_points = {hl.HookPoint.POST_STEP}
    step_schedule = hl.StepSchedule("stride", stride=2)

    def __init__(self, size: int = 1) -> None:
        if size > 9:
            raise ValueError("at most 9")
        self.size = size

    def compute(self, ctx):
        import torch
        if self.size < 0:  # the negative control
            with torch.no_grad():
                next(iter(ctx.model.parameters())).add_(1e-6)
        return {"drawn": torch.rand(abs(self.size)).sum(), "loss": ctx.loss}
"""


@pytest.fixture
def cold() -> None:
    """Have commands started as users start them; others are forked where torch is imported already."""


def _warm(command: list[str], **options: Any) -> WarmPopen:
    words = command[1:] if command[0] == sys.executable else command
    return WarmPopen([sys.executable, WARM_START, *words], **options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder with a script, a hook of its own and a place to go to, as the current one; no terminal."""
    if "cold" not in request.fixturenames:
        monkeypatch.setattr(script, "subprocess", SimpleNamespace(Popen=_warm))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "own_hook.py").write_text(HOOK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "_is_in_foreground", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def _saved(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def _records(folder: Path) -> list[Any]:
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if '"metrics"' in line]


def test_a_script_ends_with_the_same_bits_and_its_own_exit_code(
    cold: None, folder: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = subprocess.Popen([sys.executable, "train.py", str(folder / "plain.pt"), "0"], stdout=subprocess.DEVNULL)
    own = folder / "own_start"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['OWN_START'] = 'ran'; print('own sitecustomize')")
    monkeypatch.setenv("PYTHONPATH", str(own), prepend=os.pathsep)
    hooks = ["--hooks", "norms", "own_hook.py:Drawing", "--hook-config"]
    code = main(["run", *hooks, "drawing.size=3", "--hook-csv", "--", "train.py", str(folder / "a.pt"), "3"])
    assert code == 3
    control = main(["run", *hooks, "drawing.size=-1", "--no-report", "--", "train.py", str(folder / "b.pt"), "0"])
    assert plain.wait(PATIENCE) == control == 0
    assert nested_differences(_saved(folder / "a.pt"), _saved(folder / "plain.pt")) == []
    assert nested_differences(_saved(folder / "b.pt"), _saved(folder / "plain.pt")) != []
    out, err = capfd.readouterr()
    assert out.splitlines()[:4] == ["own sitecustomize", *(f"epoch {epoch} of __main__" for epoch in range(3))]
    assert "train/script failed: 21 steps" in err  # exit code 3
    assert "train/script_1 finished: 21 steps" in err
    assert "hookline: The run failed: exit code 3" in err
    run = folder / "runs" / "train" / "script"
    assert {"report.html", "script.csv", "run.json"} <= {path.name for path in run.iterdir()}
    records = _records(run)
    assert [one["step"] for one in records if one["point"] == "SNAPSHOT"] == [0, 10, 20]
    drawn = [step for one in records for step in one["metrics"].get("drawing/loss", [])]
    assert len(drawn) == 11
    assert all(value > 0 for value in drawn)
    facts = json.loads((run / "run.json").read_text())
    assert facts["status"] == "failed"
    assert facts["hooks"]["drawing"]["fired"] == 11
    assert facts["model"]["class"] == "Sequential"
    assert not list((folder / "elsewhere").iterdir())


def test_under_torchrun_every_rank_is_followed_and_one_writes(cold: None, folder: Path, capfd: Any) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code = main(["run", "--hooks", "norms", "--", *launcher, "train.py", str(folder / "a.pt"), "0"])
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out.count("epoch 2 of __main__") == 2
    assert err.count("train/script finished: 21 steps") == 1
    run = folder / "runs" / "train" / "script"
    assert sorted(path.name for path in run.parent.iterdir()) == ["script"]
    assert [one["step"] for one in _records(run) if one["point"] == "SNAPSHOT"] == [0, 10, 20]
    facts = json.loads((run / "run.json").read_text())
    assert (facts["ranks"], facts["model"]["class"]) == (2, "Sequential")  # without what averages gradients


NOTHING = {
    "no step": ("import torch", [], "no optimizer of torch made a step"),
    "alone": ("print('hello')", ["-I"], "no optimizer of torch made a step"),
    "no module": (
        "import torch; w = torch.zeros(1, requires_grad=True); torch.optim.SGD([w], 0.1).step(); print('on')",
        [],
        "No module has the parameters of this SGD: of 1",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_where_nothing_can_be_seen_a_line_says_why(cold: None, case: str, folder: Path, capfd: Any) -> None:
    text, options, expected = NOTHING[case]
    (folder / "script.py").write_text(text)
    code = 3 if case == "no module" else 0  # something was there to follow, and could not be
    assert main(["run", "--hooks", "norms", "--", sys.executable, *options, "script.py"]) == code
    assert expected in capfd.readouterr().err
    assert not (folder / "runs").exists()


FORKS = """
import multiprocessing, os, sys
import torch
from torch import nn

def train(steps):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    return optimizer

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=train, args=(7,))
    child.start()
    child.join()
    assert child.exitcode == 0
    optimizer = train(3)
    if os.fork() == 0:  # goes on with what the parent trains, and leaves as any script does
        optimizer.step()
        sys.exit(0)
    os.wait()
"""

UNABLE = """
import hookline as hl

class Fails(hl.TrainingHook):
    name = "fails"
    hook_points = {hl.HookPoint.POST_STEP}

    def compute(self, ctx):
        if ctx.step == 1:
            raise ValueError("a bad day")
        return {"step": ctx.step}

class Steps(hl.TrainingHook):
    name = "steps"
    hook_points = {hl.HookPoint.POST_STEP}

    def compute(self, ctx):
        return {"step": ctx.step}

class Evaluates(Steps):
    name = "evaluates"
    requires = {"loss_fn"}

class Late(Steps):
    name = "late"
    step_schedule = hl.StepSchedule("stride", stride=5, warmup=100)
"""


def test_children_of_a_script_lose_nothing_and_hooks_that_cannot_run_are_named(
    cold: None, folder: Path, capfd: Any
) -> None:
    """A child that was forked has a run of its own; one that goes on with its parent's model does not touch that run.

    A hook that raises is switched off: it does not end a script that it does not own.
    """
    (folder / "script.py").write_text(FORKS)
    (folder / "unable.py").write_text(UNABLE)
    hooks = [f"unable.py:{name}" for name in ("Fails", "Evaluates", "Late", "Steps")]
    assert main(["run", "--hooks", *hooks, "--snapshot-every", "0", "--no-report", "--", "script.py"]) == 3
    err = capfd.readouterr().err
    runs = folder / "runs" / "script"
    assert sorted(path.name for path in runs.iterdir()) == ["script", "script_1"]
    for name, steps in (("script", 7), ("script_1", 3)):
        seen = [step for one in _records(runs / name) for step in one["metrics"].get("steps/step", [])]
        assert seen == [*range(steps)], name
        assert [one["point"] for one in _records(runs / name)].count("POST_EPOCH") == 1
        facts = json.loads((runs / name / "run.json").read_text())
        assert (facts["status"], facts["result"]["steps"]) == ("finished", steps)
        assert (facts["hooks"]["fails"]["fired"], facts["hooks"]["fails"]["failed"]) == (2, 1)
    assert err.count("The hook fails raised once and was switched off") == 2
    assert err.count("the hook late has not fired: it is due at POST_STEP") == 2
    assert "not attached: the hook evaluates: " in err
    assert "loss_fn" in err
    assert "the hook steps" not in err


UNATTACHABLE = """
import sys, time
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(12):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    print("step", step, file=sys.stderr, flush=True)
sys.exit(int(sys.argv[1]))
"""

SPECS = """[{"name": "refuses", "target_modules": ["0"], "hook_factory": "refusing:factory", "config": {}}]"""


@pytest.mark.parametrize(("own_code", "code"), [(0, 3), (7, 7)])
def test_what_the_model_has_no_place_for_is_told_at_the_first_step_and_the_rest_stays_on(
    own_code: int, code: int, folder: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "script.py").write_text(UNATTACHABLE)
    (folder / "hooks.json").write_text(SPECS)
    (folder / "refusing.py").write_text("def factory(config):\n    raise ValueError('not today')\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    asked = ["--hooks", "norms", "stats", "--hook-config", "stats.targets=blocks.9", "--hook-specs", "hooks.json"]
    assert main(["run", *asked, "--no-report", "--", "script.py", str(own_code)]) == code
    lines = capfd.readouterr().err.splitlines()
    refused = [place for place, line in enumerate(lines) if "not attached: the spec refuses" in line]
    unmatched = [place for place, line in enumerate(lines) if "not attached: the hook stats: " in line]
    assert all("not today" in lines[place] for place in refused)
    assert all("No module matches 'blocks.9'" in lines[place] for place in unmatched)
    for first, again in (refused, unmatched):
        assert first < lines.index("step 0") < lines.index("step 11") < again
    run = folder / "runs/script/script"
    facts = json.loads((run / "run.json").read_text())
    assert facts["result"]["steps"] == 12
    assert (facts["hooks"]["stats"]["fired"], facts["hooks"]["stats"]["failed"]) == (0, 1)
    reported = [one["step"] for one in _records(run) if "norms/total_norm" in one["metrics"]]
    assert reported == [0, 10, 11]
    assert not any("has not fired" in line or "Traceback" in line for line in lines)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_signals_reach_the_script(cold: None, name: str, code: int, folder: Path, capfd: Any) -> None:
    (folder / "script.py").write_text(
        "import os, signal, time\n"
        "def end(number, frame):\n"
        "    print('got it', flush=True)\n"
        "    signal.signal(number, signal.SIG_DFL)\n"
        "    os.kill(os.getpid(), number)\n"
        f"signal.signal(signal.{name}, end)\n"
        f"os.kill(os.getppid(), signal.{name})\n"
        "time.sleep(60)\n"
    )
    assert main(["run", "--hooks", "norms", "--", "script.py"]) == code
    out, err = capfd.readouterr()
    assert out == "got it\n"
    assert f"nothing was seen: the command was stopped by signal {code - 128} ({name}) before its first step." in err


def test_a_run_file_may_name_the_command(folder: Path, capfd: Any) -> None:
    (folder / "script.py").write_text("import sys; print(sys.argv[1:]); sys.exit(4)")
    (folder / "run.yaml").write_text("command: [script.py, a b, c]\nhooks: [norms]\n")
    assert main(["run", "run.yaml", "--output-dir", "there"]) == 4
    out, err = capfd.readouterr()
    assert out == "['a b', 'c']\n"
    assert "nothing was seen" in err
    assert main(["run", "run.yaml", "--dry-run"]) == 0
    assert "training_metrics, norms" in capfd.readouterr().out
    (folder / "run.yaml").write_text("hooks: [norms]\n")  # the command is in the line, so the file need not name it
    assert main(["run", "run.yaml", "--dry-run", "--", "script.py", "d"]) == 0
    out = capfd.readouterr().out
    assert "script.py d\n" in out
    assert "training_metrics, norms" in out
    assert main(["run", "run.yaml", "--dry-run"]) == 2
    assert "does not say what to run" in capfd.readouterr().err


WRONG = {
    "experiment": (["mod_arithmetic", "--", "train.py"], "the experiment 'mod_arithmetic'"),
    "program": (["--", "no_such_program"], "There is no program 'no_such_program'"),
    "training": (["--seed", "3", "--resume", "--", "train.py"], "--resume, --seed: that is for experiments"),
    "config": (["--hooks", "norms", "--hook-config", "hessian.epsilon=1", "--", "train.py"], "hessian"),
    "kind": (["--hooks", "stats", "--hook-config", "stats.on=foward", "--", "train.py"], "did you mean 'forward'?"),
    "flag": (["--hooks", "norms", "--hook-cvs", "--", "train.py"], "no option --hook-cvs. Did you mean '--hook-csv'?"),
    "own": (["--hooks", "own_hook.py:Drawing", "--hook-config", "drawing.size=99", "--", "train.py"], "at most 9"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_done_is_said_before_anything_is_started(case: str, folder: Path, capfd: Any) -> None:
    arguments, expected = WRONG[case]
    assert main(["run", *arguments]) == 2
    out, err = capfd.readouterr()
    assert expected in err
    assert err.count("\n") == 1  # one sentence, and no box
    assert out == ""
    assert not (folder / "runs").exists()


def _sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], 0.1)


def test_the_model_is_the_outermost_that_has_the_parameters_and_no_others() -> None:
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    both = nn.ModuleList([first, second])
    assert find_model(_sgd(first)).model is first
    assert find_model(_sgd(first, second), [second, first, both]).model is both
    head = nn.Linear(2, 2)
    tuned = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), head)
    assert find_model(_sgd(head), [head, tuned]).model is tuned
    wrapped = nn.DataParallel(first)
    assert find_model(_sgd(first), [first, wrapped]).model is wrapped


ENDS = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
since = []
for step, x in enumerate(DataLoader(torch.randn(30, 4), 1)):
    if step == 14:  # a step that has begun, as its batch is taken, and is not made
        if sys.argv[1] == "break":
            break
        if sys.argv[1] == "raise":
            model(torch.randn(1, 5))
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        time.sleep(60)
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    if step > 10:
        since.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.ndim > 1]))
    if step == 13:
        print(float(torch.stack(since).mean(0).norm()), flush=True)
"""


@pytest.mark.parametrize(
    ("end", "code", "status"), [("break", 0, "finished"), ("raise", 1, "failed"), ("SIGTERM", 143, "stopped")]
)
def test_however_a_script_ends_its_last_step_is_reported(
    end: str, code: int, status: str, folder: Path, capfd: Any
) -> None:
    """Steps 11 to 13 come after the report of step 10; the last one is of step 13, with their mean gradient."""
    (folder / "script.py").write_text(ENDS)
    looks = ["--hook-config", "stats.every=1"]
    assert main(["run", "--hooks", "norms", "stats", *looks, "--no-report", "--", "script.py", end]) == code
    out, err = capfd.readouterr()
    run = folder / "runs/script/script"
    snapshots = [one for one in _records(run) if one["point"] == "SNAPSHOT"]
    assert [one["step"] for one in snapshots] == [0, 10, 13]
    last = snapshots[-1]["metrics"]
    assert last["norms/total_norm"] == pytest.approx(float(out), rel=1e-5)
    assert any(name.startswith("stats/0/forward/") for name in last), last
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["result"]["steps"]) == (status, 14)
    by = f" by {end}" if status == "stopped" else ""
    assert re.search(rf"script/script {status}{by}: 14 steps in [\d.]+ s, and [\d.]+ s to attach the hooks\n", err)


KILLED = """
import os, signal, sys
import torch
from torch import nn
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(64):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
os.kill(os.getpid(), getattr(signal, sys.argv[1])) if sys.argv[1].startswith("SIG") else os._exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("end", "code", "words"), [("SIGKILL", 137, "failed, by signal 9 (SIGKILL)"), ("250", 250, "failed")]
)
def test_a_script_that_is_killed_has_failed_and_its_log_is_there(
    end: str, code: int, words: str, folder: Path, capfd: Any
) -> None:
    (folder / "script.py").write_text(KILLED)
    assert main(["run", "--hooks", "norms", "--", sys.executable, "script.py", end]) == code
    err = capfd.readouterr().err
    run = folder / "runs/script/script"
    assert 64 - 50 <= max(one["step"] for one in _records(run)) + 1 <= 64
    assert f"script/script {words}\n" in err
    facts = json.loads((run / "run.json").read_text())
    assert facts["status"] == "failed"
    assert facts["error"] == (words if code < 200 else "exit code 250")
    assert (run / "report.html").exists()
