"""``hookline run`` in this process: what it trains, writes and says; hooks that raise; ``--hook-config``."""

from __future__ import annotations

import csv
import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers_cli import EXPERIMENTS, TINY, facts_of, records_of, run_here, same_weights

from hookline.errors import ConfigError, OptionError
from hookline.runs.find import local_device
from hookline.runs.flags import from_text

QUIET = ("--silent", "--no-report")
NOTED = f"{EXPERIMENTS}:NotedHook"


def contexts_of(folder):
    """What the log says of the run, each time it began; its first line says where it was written, and no more."""
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [line["context"] for line in lines if line.get("context")]


def test_a_run_leaves_its_folder_and_says_where(capsys, tmp_path):
    """The log, what sinks write, a checkpoint, the page, run.json; each line of the end names a file that is there."""
    arguments = ["run", TINY, "--epochs", "2", "--hooks", "norms", "--hook-csv", "--hook-jsonl"]
    assert run_here(*arguments) == 0
    folder = tmp_path / "runs" / "tiny" / "forward"
    out = capsys.readouterr().out
    for name in ("report.html", "records.jsonl", "forward.csv", "forward.jsonl", "checkpoints"):
        assert (folder / name).exists(), name
        assert str(Path("runs/tiny/forward") / name) in out
    assert "tiny/forward finished: 6 steps" in out
    assert "Could not judge the loss" in out.splitlines()[-1]
    assert out.startswith("6/6 steps")
    facts = facts_of(folder)
    assert (facts["status"], facts["strategy"], facts["experiment"]) == ("finished", "forward", "tiny")
    assert facts["result"]["steps"] == 6
    assert 0 <= facts["result"]["metrics"]["val_acc"] <= 1
    assert facts["config"]["epochs"] == 2
    assert facts["command"] == ["hookline", *arguments]
    assert set(facts["hooks"]) == {"training_metrics", "norms"}
    assert facts["hooks"]["norms"]["fired"] == 2 + 6
    assert facts["hooks"]["norms"]["kind"] == "observer"
    assert facts["hooks"]["norms"]["cost"]["count"] == 2 + 6
    assert facts["hooks"]["norms"]["inside_steps"] is True
    assert facts["hooks"]["norms"]["metrics"]
    assert facts["sinks"] == ["CSVSink", "JSONLSink"]
    assert facts["model"] == {"class": "Sequential", "parameters": 44}
    assert facts["versions"]["torch"] == torch.__version__
    with open(folder / "forward.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert any(float(row["norms/total_norm"] or 0) > 0 for row in rows)
    names = {name for record in records_of(folder) for name in record["metrics"]}
    assert {"norms/total_norm", "training_metrics/loss", "eval/val_acc"} <= names


def test_the_fields_of_the_configuration_are_flags(tmp_path):
    """Typed; the seed is the command line's."""
    flags = ("--batch-size", "12", "--lr", "1e-3", "--sizes", "5", "7", "--kind", "wide", "--normalize", "--seed", "4")
    assert run_here("run", TINY, *flags, *QUIET) == 0
    config = facts_of(tmp_path / "runs" / "tiny" / "forward")["config"]
    assert config == {
        "epochs": 2, "snapshot_every": 1, "batch_size": 12, "lr": 0.001, "sizes": [5, 7], "kind": "wide",
        "normalize": True, "pause": 0.0, "seed": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "lr", "shuffle"),
    [((), 0.01, True), (("--optimizer.lr", "3", "--shuffle"), 3.0, True), (("--no-shuffle",), 0.01, False)],
)
def test_a_part_of_a_configuration_has_a_dot_and_a_switch_that_is_on_takes_both(flags, lr, shuffle):
    """Fields that are inherited are there as well; --lr is another one."""
    assert run_here("run", f"{EXPERIMENTS}:Nested", "--epochs", "1", "--lr", "2", *flags, *QUIET) == 0
    config = facts_of(Path("runs/nested/forward"))["config"]
    assert (config["optimizer"], config["shuffle"], config["lr"], config["epochs"]) == ({"lr": lr}, shuffle, 2.0, 1)


def test_a_field_without_a_default_has_to_be_given(capsys):
    """By a flag, or by a run file."""
    path = f"{EXPERIMENTS}:Needy"
    assert run_here("run", path, *QUIET) == 2
    assert "--width" in capsys.readouterr().err
    assert run_here("run", path, "--width", "3", *QUIET) == 0
    Path("run.yaml").write_text(f"experiment: {path}\nconfig: {{width: 5}}\n")
    assert run_here("run", "run.yaml", *QUIET) == 0
    assert facts_of(Path("runs/needy/forward_1"))["config"] == {"width": 5, "epochs": 1}


def test_the_help_of_an_experiment_shows_its_own_options(capsys):
    """With the text under each field, or its metadata, and the default."""
    assert run_here("run", TINY, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--epochs INT How often to go through the data. (default: 2)" in text
    assert "--batch-size INT How many rows make a step. (default: 8)" in text
    assert "--kind {plain,wide}" in text
    assert text.count("--seed") == 1


@pytest.mark.parametrize("flags", [("--epochs", "many"), ("--lr", "fast"), ("--kind", "narrow"), ("--lr",)])
def test_a_value_of_another_type_is_refused(flags, capsys, tmp_path):
    """By the flag's name, before anything is written."""
    assert run_here("run", TINY, *flags) == 2
    heard = capsys.readouterr().err
    assert all(word in heard for word in flags)
    assert len(heard.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_two_runs_with_one_seed_end_alike_and_another_seed_does_not():
    """Bit for bit, hooks or none: the second has two hooks, the third another seed."""
    assert run_here("run", TINY, "--epochs", "7", *QUIET, "--output-dir", "a") == 0
    hooks = ("--hooks", "norms", "hessian", "--hook-config", "hessian.every_n_steps=5", "hessian.burst_length=3")
    assert run_here("run", TINY, "--epochs", "7", *QUIET, "--output-dir", "b", *hooks) == 0
    assert run_here("run", TINY, "--epochs", "7", *QUIET, "--output-dir", "c", "--seed", "1") == 0
    assert same_weights(Path("a/tiny/forward"), Path("b/tiny/forward"))
    assert not same_weights(Path("a/tiny/forward"), Path("c/tiny/forward"))


def test_all_strategies_run_in_turn_with_the_same_hooks_reset(tmp_path, capsys):
    """Each its own folder, log and files; one group; hooks made once and reset for each."""
    flags = ("--hooks", NOTED, "--hook-csv", "--hook-jsonl", "--no-report", "--silent")
    assert run_here("run", TINY, "--strategy", "all", "--epochs", "1", *flags) == 0
    import experiments

    assert len(experiments.NotedHook.made) == 1
    groups = set()
    for number, strategy in enumerate(("forward", "backward"), 1):
        folder = tmp_path / "runs" / "tiny" / strategy
        assert (folder / f"{strategy}.csv").exists()
        lines = [json.loads(line) for line in (folder / f"{strategy}.jsonl").read_text().splitlines()]
        assert all({"epoch", "hook_point"} <= set(line) for line in lines)
        assert lines
        assert {record["strategy"] for record in records_of(folder)} == {strategy}
        context = contexts_of(folder)[0]
        assert (context["strategy"], context["experiment_name"]) == (strategy, "tiny")
        assert context["run_dir"] == f"runs/tiny/{strategy}"
        groups.add(context["run_group"])
        resets = [
            record["metrics"]["noted/resets"] for record in records_of(folder) if "noted/resets" in record["metrics"]
        ]
        assert resets == [number]
    assert len(groups) == 1
    assert "tiny: backward" in capsys.readouterr().out


def test_a_sink_of_ones_own_by_file_and_with_options(tmp_path, capsys):
    """A flag names it; a run file gives it arguments; what it cannot be made of is told."""
    sink = f"{EXPERIMENTS}:LinesSink"
    assert run_here("run", TINY, "--epochs", "1", "--hooks", *QUIET, "--hook-sink", sink) == 0
    assert "training_metrics/loss" in (tmp_path / "runs/tiny/forward/lines.txt").read_text()
    for options, code in (({"ending": "log"}, 0), ({"x": 1}, 2)):
        others = [{"sink": sink, "options": options}]
        Path("run.json").write_text(json.dumps({"experiment": TINY, "hooks": [], "sinks": {"others": others}}))
        assert run_here("run", "run.json", "--epochs", "1", *QUIET) == code
    assert (tmp_path / "runs/tiny/forward_1/lines.log").exists()
    assert "others[0].options: The sink LinesSink cannot be made of x" in capsys.readouterr().err


def test_a_function_makes_an_experiment(tmp_path):
    """It is given the strategy if it asks for one; how long to train is a flag."""
    path = f"{EXPERIMENTS}:make_tiny"
    assert run_here("run", path, "--epochs", "3", *QUIET) == 0
    assert facts_of(tmp_path / "runs" / "make_tiny" / "default")["result"]["steps"] == 3
    assert run_here("run", path, "--steps", "5", "--snapshot-every", "2", *QUIET, "--hooks") == 0
    facts = facts_of(tmp_path / "runs" / "make_tiny" / "default_1")
    assert (facts["result"]["steps"], facts["run"]["steps"], facts["run"]["snapshot_every"]) == (5, 5, 2)
    records = records_of(tmp_path / "runs" / "make_tiny" / "default_1")
    assert [record["point"] for record in records] == ["POST_STEP"] * 3  # of step 0, of 1 and 2, of 3 and 4


def test_a_run_file_says_everything_and_flags_win(tmp_path):
    """YAML, TOML, JSON; the experiment may stand beside the file."""
    Path("files").mkdir()
    Path("files/experiments.py").write_text(EXPERIMENTS.read_text())
    Path("files/run.toml").write_text(
        'experiment = "experiments.py:Tiny"\nstrategy = "backward"\nseed = 7\nconsole = "silent"\nreport = false\n'
        'hooks = ["norms"]\n[config]\nepochs = 1\nlr = 1\n[sinks]\njsonl = true\n'
    )
    assert run_here("run", "files/run.toml") == 0
    facts = facts_of(tmp_path / "runs" / "tiny" / "backward")
    assert (facts["seed"], facts["config"]["epochs"], facts["config"]["lr"]) == (7, 1, 1.0)
    assert type(facts["config"]["lr"]) is float
    assert list(facts["hooks"]) == ["training_metrics", "norms"]
    assert (tmp_path / "runs/tiny/backward/backward.jsonl").exists()
    assert run_here("run", "files/run.toml", "--seed", "8", "--epochs", "2", "--strategy", "forward") == 0
    facts = facts_of(tmp_path / "runs" / "tiny" / "forward")
    assert (facts["seed"], facts["config"]["epochs"], facts["config"]["seed"]) == (8, 2, 8)


def test_the_seed_of_a_configuration_in_a_file_is_the_seed_of_the_run(tmp_path, capsys):
    """As a field of a flag's name is that flag; a flag wins, and two that differ are a mistake."""
    Path("run.yaml").write_text(f"experiment: {TINY}\nconfig: {{epochs: 1, seed: 3}}\n")
    for number, (flags, seed) in enumerate([((), 3), (("--seed", "199"), 199)]):
        assert run_here("run", "run.yaml", "--output-dir", f"runs{number}", *flags, *QUIET) == 0
        facts = facts_of(tmp_path / f"runs{number}" / "tiny" / "forward")
        assert (facts["seed"], facts["config"]["seed"]) == (seed, seed)
    Path("run.yaml").write_text(f"experiment: {TINY}\nseed: 4\nconfig: {{epochs: 1, seed: 3}}\n")
    assert run_here("run", "run.yaml", *QUIET) == 2
    assert "config.seed" in capsys.readouterr().err


def test_a_word_that_is_the_name_of_a_switch_stays_on_the_line(tmp_path):
    """It is the value of another flag: of a switch of the configuration that is on, and of the run that goes on."""
    nested = f"{EXPERIMENTS}:Nested"
    assert run_here("run", nested, "--epochs", "1", "--name", "shuffle", "--live", "--no-report") == 0
    assert facts_of(tmp_path / "runs" / "nested" / "forward")["name"] == "shuffle"
    assert run_here("run", nested, "--epochs", "2", "--resume", "--console", "live", "--no-report") == 0


@pytest.mark.parametrize(
    ("other", "said"),
    [("{sink: jsonl, options: {pth: a}}", "line 4, at $.sinks.others[1].options: The sink JSONLSink"), ("wandb", "")],
)
def test_a_sink_that_does_not_take_its_arguments_leaves_no_folder(other, said, capsys, tmp_path):
    """Told with its line before anything is trained or written."""
    Path("run.yaml").write_text(f"experiment: {TINY}\nsinks:\n  others: [memory,\n    {other}]\n")
    assert run_here("run", "run.yaml", *QUIET) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "others[1]" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_sink_that_refuses_a_value_leaves_no_folder(tmp_path):
    """What only its constructor can tell comes before the folder is made."""
    Path("own.py").write_text(
        "import hookline\n\nclass Own(hookline.sinks.MemorySink):\n"
        "    def __init__(self, size):\n        raise hookline.errors.OptionError(f'no size {size}')\n"
    )
    Path("run.yaml").write_text(
        f"experiment: {TINY}\nsinks: {{others: [{{sink: 'own.py:Own', options: {{size: 3}}}}]}}\n"
    )
    assert run_here("run", "run.yaml", *QUIET) == 2
    assert not (tmp_path / "runs").exists()


def test_first_flags_outlive_a_resume_without_the_file(tmp_path):
    """Begun with a file and a flag, resumed by the experiment's name, then with the file again."""
    Path("run.yaml").write_text(f"experiment: {TINY}\nconfig: {{lr: 0.1}}\n")
    assert run_here("run", "run.yaml", "--lr", "0.5", "--epochs", "1", *QUIET) == 0
    assert run_here("run", TINY, "--resume", "--epochs", "2", *QUIET) == 0
    assert run_here("run", "run.yaml", "--resume", "--epochs", "3", *QUIET) == 0
    facts = facts_of(tmp_path / "runs/tiny/forward")
    assert (facts["config"]["lr"], facts["result"]["epochs"]) == (0.5, 3)


def test_a_dry_run_prints_the_plan_and_leaves_nothing(capsys, tmp_path):
    """Hooks with points and steps, files."""
    hooks = ("--hooks", "norms", "hessian", "stats", "--hook-config", "hessian.every_n_steps=50")
    assert run_here("run", TINY, *hooks, "--hook-csv", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "11 of every 50 steps from 50" in out
    assert "intervenes" in out
    assert "run.json, checkpoints/, records.jsonl, forward.csv, report.html" in out
    assert not any(tmp_path.iterdir())


def test_the_process_is_as_it_was_afterwards():
    """Determinism, precision, warnings, logging."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), warnings.showwarning)
    handlers = list(logging.getLogger("hookline").handlers)
    assert run_here("run", TINY, "--epochs", "1", "--matmul-precision", "high", *QUIET) == 0
    after = (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), warnings.showwarning)
    assert after == before
    assert logging.getLogger("hookline").handlers == handlers


def test_the_model_is_compiled_with_deterministic_kernels_unless_they_are_not_wanted(monkeypatch):
    """In place."""
    seen = []
    ask = torch.are_deterministic_algorithms_enabled
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, *a, **k: seen.append(ask()))
    for flags in ((), ("--no-determinism",)):
        assert run_here("run", TINY, "--epochs", "1", "--with-compile", *flags, *QUIET) == 0
    assert seen == [True, False]


def test_the_trajectory_is_saved_at_snapshots(tmp_path):
    """A file per snapshot, with the parameters of then."""
    from safetensors.torch import load_file

    assert run_here("run", TINY, "--epochs", "3", "--record-trajectory", *QUIET) == 0
    files = sorted((tmp_path / "runs/tiny/forward/trajectory").iterdir())
    assert [file.name for file in files] == [f"step_{step:08d}.safetensors" for step in (2, 5, 8)]
    first, last = load_file(files[0]), load_file(files[-1])
    assert set(first) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert not torch.equal(first["0.weight"], last["0.weight"])


def test_more_epochs_go_on_where_a_run_ended(tmp_path, capsys):
    """With the options it had; the record log goes on, and ends as that of a run of that length."""
    flags = ("--hooks", "norms", NOTED, "--hook-config", "noted.scale=3", *QUIET)
    assert run_here("run", TINY, "--epochs", "2", *flags) == 0
    assert run_here("run", TINY, "--resume", "--epochs", "4") == 0
    folder = tmp_path / "runs" / "tiny" / "forward"
    assert run_here("run", TINY, "--epochs", "4", *flags, "--output-dir", "whole") == 0
    whole = tmp_path / "whole" / "tiny" / "forward"
    timed = lambda record: {k: v for k, v in record.items() if k != "time"}  # noqa: E731
    going_on, at_once = ([timed(record) for record in records_of(one)] for one in (folder, whole))
    for records in (going_on, at_once):
        for record in records:
            record["metrics"].pop("noted/resets", None)
    assert going_on == at_once
    assert same_weights(folder, whole)
    facts = facts_of(folder)
    assert facts["hooks"]["noted"]["metrics"] == []
    assert facts["run"]["hooks"]["config"] == {"noted": {"scale": 3.0}}
    assert len(facts["resumed"]) == 1
    assert len({context["run_group"] for context in contexts_of(folder)}) == 1
    assert sorted(one.name for one in (tmp_path / "runs" / "tiny").iterdir()) == ["forward"]
    assert "12/12 steps" in capsys.readouterr().out


def test_another_configuration_is_refused_and_nothing_is_changed(tmp_path, capsys):
    """With what differs; --force goes on all the same."""
    assert run_here("run", TINY, "--epochs", "1", *QUIET) == 0
    folder = tmp_path / "runs" / "tiny" / "forward"
    before = facts_of(folder)
    capsys.readouterr()
    assert run_here("run", TINY, "--epochs", "2", "--lr", "5e-2", "--resume", *QUIET) == 2
    heard = capsys.readouterr().err
    assert "lr" in heard
    assert "0.05" in heard
    assert facts_of(folder) == before
    assert run_here("run", TINY, "--epochs", "2", "--lr", "5e-2", "--resume", "--force", *QUIET) == 0
    assert facts_of(folder)["result"]["metrics"]


@pytest.mark.filterwarnings("default::hookline.HooklineWarning")
def test_all_strategies_resume_those_that_were_begun_and_begin_the_others(tmp_path, capsys):
    """One command after whatever happened; of what is complete it is said that it is."""
    assert run_here("run", TINY, "--epochs", "1", *QUIET) == 0
    assert run_here("run", TINY, "--strategy", "all", "--resume", *QUIET) == 0
    assert "hookline: warning: The run in runs/tiny/forward/checkpoints is complete" in capsys.readouterr().err
    names = sorted(folder.name for folder in (tmp_path / "runs" / "tiny").iterdir())
    assert names == ["backward", "forward"]


@pytest.mark.parametrize("text", ['{"run": {"conf', "[1]"])
def test_a_damaged_run_json_is_not_passed_over_when_a_run_goes_on(tmp_path, text, capsys):
    """It has the options of the run: without them another run would go on. Nothing is written."""
    assert run_here("run", TINY, "--epochs", "1", "--lr", "0.03", *QUIET) == 0
    facts = tmp_path / "runs/tiny/forward/run.json"
    facts.write_text(text)
    names = sorted(tmp_path.rglob("*"))
    assert run_here("run", TINY, "--epochs", "2", "--resume", *QUIET) == 2
    assert "run.json cannot be read" in capsys.readouterr().err
    assert (facts.read_text(), sorted(tmp_path.rglob("*"))) == (text, names)
    facts.unlink()  # as it says
    assert run_here("run", TINY, "--epochs", "2", "--lr", "0.03", "--resume", *QUIET) == 0


@pytest.mark.parametrize(("every", "saved"), [((), (0, 3, 6, 9, 12)), (("2",), (0, 6, 12))])
def test_checkpoints_come_as_often_as_asked_and_are_read_back_and_compared(every, saved, capsys):
    """Bare: every epoch; N: every N. One line each, with hooks whose state is in them; the newest two stay."""
    flags = ("--epochs", "4", "--hooks", "variance", "path_length", *QUIET)
    assert run_here("run", TINY, "--validate-checkpoints", *every, *flags) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step_")]
    assert lines == [f"step_{step:08d}.pt: OK" for step in saved]
    assert len(list(Path("runs/tiny/forward/checkpoints").glob("step_*"))) == 2


def test_a_checkpoint_that_differs_is_a_mismatch():
    """The comparison can fail: in a bit of a tensor, a key, a length, a type; a NaN is the same as itself."""
    from hookline.runs.session import differing

    def tree(**changes):
        return {"a": {"x": torch.tensor([1.0, float("nan")]), "y": [1, (2.0, None)], "z": float("nan")}, **changes}

    assert differing(tree(), tree()) == []
    changed = tree()
    changed["a"]["x"][0] += 1e-7
    assert differing(tree(), changed) == ["a.x"]
    assert differing(tree(), tree(b=1)) == ["b"]
    assert differing({"x": torch.zeros(2)}, {"x": torch.zeros(2, dtype=torch.float64)}) == ["x"]
    assert differing({"x": [1, 2]}, {"x": [1]}) == ["x.1"]
    assert differing({"x": -0.0}, {"x": 1}) == ["x"]


def test_a_second_ctrl_c_says_what_there_is_to_continue_from(capsys, tmp_path, monkeypatch):
    """Nothing is saved then."""
    from hookline.runs.find import RunExperiment

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RunExperiment, "train", interrupted)
    assert run_here("run", TINY, "--epochs", "1") == 130
    assert "Stopped at once, without saving; there is no checkpoint to continue from." in capsys.readouterr().out


def test_a_resumed_run_keeps_its_threads():
    """Another number may change the last bits of sums; afterwards the process has its own number again."""
    before = torch.get_num_threads()
    seen = []
    try:
        for threads, *flags in ((2, "--epochs", "1"), (3, "--epochs", "2", "--resume")):
            torch.set_num_threads(threads)
            assert run_here("run", TINY, "--silent", "--no-report", *flags) == 0
            seen.append((facts_of(Path("runs/tiny/forward"))["threads"], torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
    assert seen == [(2, 2), (2, 3)]


def test_an_error_inside_of_a_sink_is_its_own(capsys):
    """A TypeError that its constructor raises is no wrong option."""
    Path("own.py").write_text(
        "class Broken:\n    def __init__(self):\n        len(3)\n\n    def emit(self, metrics, epoch, point): ...\n"
    )
    assert run_here("run", TINY, "--epochs", "1", *QUIET, "--hooks", "--hook-sink", "own.py:Broken") == 1
    heard = capsys.readouterr().err
    assert "object of type 'int' has no len()" in heard
    assert "options" not in heard


@pytest.mark.parametrize(
    "wrong", ["--heads 3", "--heads 0", "--batch-size 0", "--train-fraction 0.0", "--train-fraction 1.0"]
)
def test_wrong_values_of_mod_arithmetic_are_a_sentence(wrong, capsys, tmp_path):
    assert run_here("run", "mod_arithmetic", *QUIET, "--epochs", "1", *wrong.split()) == 2
    heard = capsys.readouterr().err
    assert wrong.split()[0].removeprefix("--").replace("-", "_") in heard
    assert len(heard.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_more_processes_than_gpus_are_an_error(monkeypatch):
    """Not one of CUDA that says nothing of processes."""
    for name, value in (
        ("RANK", "2"),
        ("LOCAL_RANK", "2"),
        ("WORLD_SIZE", "3"),
        ("MASTER_ADDR", "a"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OptionError, match="Process 2 of this machine has no GPU of its own: there are 2"):
        local_device(None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_device("cuda") == "cuda:1"


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("500", int, 500),
        ("1e-3", float, 0.001),
        ("inf", float, math.inf),
        ("true", bool, True),
        ("OFF", bool, False),
        ("true", str, "true"),
        ("none", int | None, None),
        ("7", int | None, 7),
        ("7", int | str, 7),
        ("2,5,10", list[int], [2, 5, 10]),
        ("", list[int], []),
        ("2,5", tuple[int, ...], (2, 5)),
        ("a,b", list[str] | None, ["a", "b"]),
        ("slow", Literal["fast", "slow"], "slow"),
        ("3", Any, 3),
        ("true", Any, True),
    ],
)
def test_a_text_becomes_what_is_declared(text, hint, value):
    found = from_text(text, hint)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "hint", "said"),
    [
        ("1.5", int, "valid integer"),
        ("x", float, "valid number"),
        ("maybe", bool, "valid boolean"),
        ("quick", Literal["fast", "slow"], "'fast' or 'slow'"),
        ("1,2,3", tuple[int, int], "expected"),
    ],
)
def test_a_misfit_says_what_was_expected(text, hint, said):
    with pytest.raises(ConfigError, match=said):
        from_text(text, hint)


FOLDER = Path("runs/tiny/forward")
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


@pytest.fixture
def boom() -> None:
    Path("boom.py").write_text(BOOM)


def test_by_default_the_run_fails_and_says_who_when_where_and_what_next(boom, capsys):
    """Hook, point, step, folder, and the flag to go on with."""
    assert run_here("run", TINY, "--hooks", "boom.py:Boom", *QUIET, "--epochs", "4") == 1
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
def test_the_run_goes_on_if_that_is_asked_for(boom, policy, count, said, capsys):
    """The frames that are the user's are shown once; the end says what is missing."""
    assert (
        run_here("run", TINY, "--hooks", "boom.py:Boom", "norms", "--on-hook-error", policy, *QUIET, "--epochs", "4")
        == 0
    )
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


def test_a_hook_that_cannot_start_is_named(boom, capsys):
    assert run_here("run", TINY, "--hooks", "boom.py:Late", *QUIET, "--epochs", "4") == 1
    err = capsys.readouterr().err
    assert "Raised by the hook 'late' when training began, in start(model)." in err
    assert "in runs/tiny/forward." in err
