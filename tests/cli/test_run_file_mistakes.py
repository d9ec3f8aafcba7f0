"""Everything that is wrong with a run file is told in one go, by line, whoever reads it and in whichever language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers_cli import EXPERIMENTS, TINY, run_here

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
