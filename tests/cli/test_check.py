"""Files on the command line: ``check`` for servers and runs, ``run`` with hooks, all mistakes in one go."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest
from helpers_cli import EXPERIMENTS, TINY, facts_of, records_of, run_here

SPEC = {"name": "count", "target_modules": ["1.*"], "hook_factory": "experiments:count_calls", "config": {}}


def write(text, name="run.yaml") -> str:
    Path(name).write_text(text if isinstance(text, str) else json.dumps(text))
    return name


# -- check -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_factory(monkeypatch):
    """A factory that must not be called."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS.parent))
    import experiments

    monkeypatch.setattr(experiments, "count_calls", lambda config: pytest.fail("called"))


def test_the_settings_of_a_server_are_checked_dry(no_factory, capsys):
    """Both lists; other keys are left alone; no factory is called."""
    forward = SPEC | {"name": "grads", "on": "backward", "target_modules": ["0"]}
    values = {"model_path": "m", "port": 3, "enable_hooks": True, "hooks": [SPEC], "forward_hooks": [forward]}
    assert run_here("check", write(values, "server.json")) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "count" in rows
    assert "backward" in rows["grads"]
    assert out.endswith("server.json: nothing is wrong with it.\n")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hooks": [SPEC], "enable_hooks": False}, "enable_hooks is false: none of 'hooks' is attached."),
        ({"enable_hooks": True, "hooks": None}, "enable_hooks=True but no 'hooks' specified in server_args"),
        ({"forward_hooks": [SPEC | {"enabled": False, "hook_factory": "nowhere:f"}]}, "False"),
    ],
)
def test_what_would_come_to_nothing_is_told(values, said, no_factory, capsys):
    """It is no mistake, but hardly what was meant."""
    assert run_here("check", write(values, "server.json")) == 0
    out = capsys.readouterr().out
    assert said in out
    summary = "" if said == "False" else ", but see the 1 warning above"
    assert out.endswith(f"server.json: nothing is wrong with it{summary}.\n")


@pytest.mark.parametrize(
    ("factory", "config", "said"),
    [
        ("factories:steer", {"vectr": [1.0]}, "steer has no option 'vectr'; did you mean 'vector'?"),
        ("factories:steer", {"file": "nowhere.safetensors"}, "nowhere.safetensors cannot be read"),
        ("factories:activation_stats", {"stats": ["maen"]}, "maen"),
        ("debug:trace_outputs", {"folder": "t", "budget": "lots"}, "budget='lots': give a number of bytes"),
        ("factories:nan_alarm", None, "cannot be a forward_pre hook"),
    ],
)
def test_options_of_our_factories_are_tried(factory, config, said, capsys, tmp_path):
    """What attaching would refuse is told with its place; nothing is written."""
    on = "forward" if config is not None else "forward_pre"
    spec = SPEC | {"hook_factory": f"hookline.{factory}", "on": on, "config": config or {}}
    assert run_here("check", write([SPEC | {"enabled": False}, spec], "hooks.json")) == 2
    heard = capsys.readouterr().err
    assert "at $[1]" in heard
    assert said in heard
    assert [each.name for each in tmp_path.rglob("*")] == ["hooks.json"]


def test_good_options_are_tried_without_writing(capsys, tmp_path):
    """Each of our factories that makes files is tried, and makes none."""
    options = {"export": {"folder": "e", "positions": "last"}, "activation_stats": {"log_every": 5}}
    options |= {"nan_alarm": {}}
    specs = [SPEC | {"hook_factory": f"hookline.factories:{name}", "config": each} for name, each in options.items()]
    specs.append(SPEC | {"hook_factory": "hookline.debug:trace_outputs", "config": {"folder": "t", "tensors": ["1"]}})
    assert run_here("check", write(specs, "hooks.json")) == 0, capsys.readouterr().err
    gc.collect()  # hooks that write when they are dropped have been dropped
    assert [each.name for each in tmp_path.rglob("*")] == ["hooks.json"]


RUN = f"""\
experiment: {TINY}
config: {{epochs: 2}}
hooks:
  names: [norms, "k_seen.py:Seen", stats]
  config: {{stats: {{targets: "1", every: 1, stats: "std"}}}}
specs:
  - {{name: count, target_modules: ["1"], hook_factory: "experiments:count_calls", config: {{file: calls.txt}}}}
sinks: {{csv: true, others: [{{sink: "{EXPERIMENTS}:LinesSink", options: {{ending: log}}}}]}}
console: silent
report: false
"""


SEEN = """\
import hookline as hl

class Seen(hl.TrainingHook):
    name = "seen"
    hook_points = {hl.HookPoint.POST_STEP}

    def compute(self, ctx):
        return {"step": self.manager.global_step}
"""
"""Says at which steps it was asked."""


@pytest.fixture
def seen():
    Path("k_seen.py").write_text(SEEN)


def test_a_run_file_is_told_what_it_means(seen, capsys):
    assert run_here("check", write(RUN)) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["count"].split() == ["count", "forward", "1", "True"]
    assert rows["lifecycle"].strip() == "lifecycle hooks  training_metrics, norms, seen, stats"
    assert "epochs=2" in rows["config"]
    assert "nothing is wrong with it." in rows["run.yaml:"]


# -- run -------------------------------------------------------------------------------------------------------


def test_a_run_file_brings_hooks_specs_and_sinks(seen, tmp_path):
    """Each of them has done its part, where and when the file says."""
    assert run_here("run", write(RUN)) == 0
    folder = tmp_path / "runs/tiny/forward"
    hooks = facts_of(folder)["hooks"]
    assert list(hooks) == ["training_metrics", "norms", "seen", "stats"]
    records = records_of(folder)
    metrics = {name for record in records for name in record["metrics"]}
    assert "stats/1/forward/std" in metrics
    assert "stats/1/forward/mean" not in metrics
    assert len(Path("calls.txt").read_text()) >= 6  # 2 epochs of 3 steps, and evaluations
    assert (folder / "forward.csv").exists()
    assert "stats/1/forward/std" in (folder / "lines.log").read_text()


def test_a_dry_run_shows_where_hooks_sit(seen, capsys):
    assert run_here("run", write(RUN), "--dry-run") == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out[out.index("Specs") :].splitlines() if line.strip()}
    assert rows["count"] == ["count", "forward", "1", "1"]


YAML = f"""\
experiment: {TINY}
sed: 3
strategy: sideways
config: {{
  epoch: 3,
  lr: high, batch_size: many}}
device: warp
hooks:
  with_hooks: all_of_them
  names: [norms, 3, nrms, hessian, variance]
  config:
    norms: {{wdth: 3}}
    hesian: {{epsilon: 1}}
    hessian:
      epsilon: small
console: loud
specs:
- {{name: a, target_modules: [x], hook_factory: "nowhere_at_all:f"}}
- {{name: b, target_modules: [x], hook_factory: ""}}
- {{name: c, target_module: [x]}}
- {{name: d, target_modules: [x], hook_factory: "json:nope", on: forward}}
- {{name: e, hook_factory: "json:dumps"}}
sinks:
  csv: 7
  others:
  - nowhere.mod:Sink
  - {{snk: x}}
  - unheard_of
"""

TOLD = [
    (2, "$.sed", "nothing is called 'sed' here. Did you mean 'seed'?"),
    (3, "$.strategy", "tiny has no strategy 'sideways'."),
    (5, "$.config.epoch", "Config has no 'epoch'. Did you mean 'epochs'?"),
    (6, "$.config.lr", "expected a valid number"),
    (6, "$.config.batch_size", "expected a valid integer"),
    (7, "$.device", "warp"),
    (9, "$.hooks.with_hooks", "Unknown group of hooks: 'all_of_them'."),
    (10, "$.hooks.names[1]", "expected a valid string, got 3."),
    (10, "$.hooks.names[2]", "Unknown hook: 'nrms'. Did you mean 'norms'?"),
    (12, "$.hooks.config.norms.wdth", "Hook 'norms' takes no 'wdth'."),
    (13, "$.hooks.config.hesian", "Unknown hook: 'hesian'. Did you mean 'hessian'?"),
    (15, "$.hooks.config.hessian.epsilon", "expected a valid number"),
    (16, "$.console", "expected 'live', 'tables', 'silent' or 'none', got 'loud'."),
    (18, "$.specs[0].hook_factory", "No module named 'nowhere_at_all'"),
    (19, "$.specs[1].hook_factory", "Invalid hook callable path ''."),
    (20, "$.specs[2].target_module", "Did you mean 'target_modules'?"),
    (21, "$.specs[3].hook_factory", "Module 'json' has no attribute 'nope'"),
    (22, "$.specs[4]", "the hook 'e' has no target_modules."),
    (24, "$.sinks.csv", "expected a valid boolean"),
    (26, "$.sinks.others[0]", "There is no module 'nowhere.mod'"),
    (27, "$.sinks.others[1].sink", "this is missing."),
    (27, "$.sinks.others[1].snk", "nothing is called 'snk' here."),
    (28, "$.sinks.others[2]", "Unknown sink 'unheard_of'."),
]


def told(text: str, file: str) -> list[tuple[int, str, str]]:
    """The line (0 in TOML), the path and the words of each mistake that was printed."""
    found = re.findall(rf"^(?:hookline: )?{re.escape(file)}(?:, line (\d+))?, at (\S+): (.*)$", text, re.MULTILINE)
    assert len(found) == len(text.strip().splitlines())
    return [(int(line or 0), path, words) for line, path, words in found]


@pytest.mark.parametrize("command", ["check", "run"])
def test_all_mistakes_of_a_run_file_are_told_in_one_go(command, capsys, tmp_path):
    """Unknown keys, wrong types, unknown names, parameters, factories, sinks: each once."""
    Path("run.yaml").write_text(YAML)
    assert run_here(command, "run.yaml") == 2
    said, wanted = sorted(told(capsys.readouterr().err, "run.yaml")), sorted(TOLD)
    assert [(line, path) for line, path, _ in said] == [(line, path) for line, path, _ in wanted]
    for (_, _, words), (_, _, expected) in zip(said, wanted, strict=True):
        assert expected in words
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ("experiment: nothere\n", "line 1, at $.experiment: Unknown experiment 'nothere'."),
        ("experiment: 3\n", "line 1, at $.experiment: expected a valid string, got 3."),
        (f"experiment: {EXPERIMENTS}:Nothere\n", "line 1, at $.experiment: "),
        ("", "run.yaml does not say what to run: experiment: NAME, or path/file.py:Class; or command: "),
    ],
)
@pytest.mark.parametrize("command", ["check", "run"])
def test_without_an_experiment_the_rest_is_still_checked(experiment, words, command, capsys):
    """But for what only the experiment knows; a hook that its groups may have is not said to be missing."""
    rest = (
        "hooks: {with_hooks: observers, names: [nrms], config: {hessian: {epsilon: x}}}\nconfig: {epoch: 1}\nseed: x\n"
    )
    Path("run.yaml").write_text(experiment + rest)
    assert run_here(command, "run.yaml") == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Unknown hook: 'nrms'" in said
    assert "$.hooks.config.hessian.epsilon: expected" in said
    assert "$.seed: expected" in said
    assert len(said.strip().splitlines()) == 4


def test_what_a_flag_says_instead_is_not_held_against_the_file(capsys):
    """Flags win, also over mistakes; the other mistakes are told."""
    Path("run.yaml").write_text(
        f"experiment: {TINY}\nstrategy: sideways\nsed: 1\n"
        "hooks: {names: [nrms], config: {hessian: {epsilon: 1}}}\n"
    )
    assert run_here("run", "run.yaml", "--strategy", "forward", "--hooks", "hessian") == 2
    said = capsys.readouterr().err
    assert [path for _, path, _ in told(said, "run.yaml")] == ["$.sed"]


@pytest.mark.parametrize("command", ["check", "run"])
def test_hooks_on_modules_have_a_place_of_their_own(command, capsys):
    Path("run.yaml").write_text(f"experiment: {TINY}\nhooks:\n- {{name: a, target_modules: ['0']}}\n")
    assert run_here(command, "run.yaml") == 2
    said = capsys.readouterr().err
    assert said == "hookline: run.yaml, line 2, at $.hooks: these are hooks on modules, which go under specs:.\n"


@pytest.mark.parametrize("command", [("check",), ("run", "--dry-run"), ("run", "--hooks", "norms")])
def test_a_wrong_option_of_a_sink_is_found_before_anything_begins(command, capsys, tmp_path):
    """For an experiment and for a script."""
    for what in (f"experiment: {TINY}", 'command: python -c \'open("begun", "w")\''):
        if "command" in what and "--dry-run" in command:
            continue
        Path("run.yaml").write_text(f"{what}\nsinks: {{others: [{{sink: csv, options: {{pth: a}}}}]}}\n")
        assert run_here(command[0], "run.yaml", *command[1:]) == 2
        assert "line 2, at $.sinks.others[0].options: The sink CSVSink cannot be made of pth" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
