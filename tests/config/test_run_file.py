"""The run file: what it takes, and how it says no."""

from __future__ import annotations

import pytest

from hookline.errors import ConfigError
from hookline.runs.read import read_document
from hookline.runs.run_file import RunFile, placed_specs, validate_value
from hookline.when import StepSchedule

WHOLE = """\
experiment: mod_arithmetic
strategy: all
config: {epochs: 3, lr: 1e-3}
hooks:
  with_hooks: observers
  names: [hessian]
  config: {hessian: {epsilon: 1e-3}}
specs:
  - {name: a, target_modules: [x], hook_factory: "m:f", config: {tag: 1}}
sinks: {csv: true, wandb: project, others: ["m:C", {sink: "m:D", options: {a: 1}}]}
console: live
seed: 3
save_checkpoints: 5
"""


def write(tmp_path, text, name="run.yaml"):
    file = tmp_path / name
    file.write_text(text)
    return file


def test_a_whole_run_file_is_read(tmp_path):
    """Every part arrives as what it is declared as."""
    run = RunFile.read(write(tmp_path, WHOLE))
    assert (run.experiment, run.strategy, run.config) == ("mod_arithmetic", "all", {"epochs": 3, "lr": 0.001})
    assert (run.hooks.with_hooks, run.hooks.names) == ("observers", ("hessian",))
    assert run.hooks.config == {"hessian": {"epsilon": 0.001}}
    assert run.given_specs()[0] == {"name": "a", "target_modules": ["x"], "hook_factory": "m:f", "config": {"tag": 1}}
    assert (run.sinks.csv, run.sinks.wandb, run.sinks.others[0]) == (True, "project", "m:C")
    assert (run.sinks.others[1].sink, run.sinks.others[1].options) == ("m:D", {"a": 1})
    assert (run.console, run.seed, run.save_checkpoints) == ("live", 3, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "experiment: x\nhoks: {}\n",
            r"line 2, at \$\.hoks: nothing is called 'hoks' here\. Did you mean 'hooks'\? There are: experiment, ",
        ),
        (
            "hooks:\n  names: [a]\n  confg: {}\n",
            r"line 3, at \$\.hooks\.confg: nothing is called 'confg' here\. Did you mean 'config'\?",
        ),
        (
            "hooks:\n  names:\n    - a\n    - b\n    - 3\n",
            r"line 5, at \$\.hooks\.names\[2\]: expected a valid string, got 3\.",
        ),
        ("seed: -1\n", r"line 1, at \$\.seed: expected greater than or equal to 0, got -1\."),
        (
            "console: loud\n",
            r"at \$\.console: expected 'live', 'lines', 'tables', 'normal', 'silent' or 'none', got 'loud'\.",
        ),
        ("sinks:\n  others:\n    - {snk: a}\n", r"line 3, at \$\.sinks\.others\[0\]"),
        (
            "specs:\n  - nme: x\n",
            r"line 2, at \$\.specs\[0\]\.nme: .* Did you mean 'name'\?",
        ),
        ("specs: {name: x}\n", r"line 1, at \$\.specs: expected a list of hook specs, got an object; write \[spec\]\."),
        (
            "specs:\n- x\n",
            r"line 2, at \$\.specs\[0\]: A hook spec is an object with target_modules and hook_factory, ",
        ),
        ("specs:\n- name: 3\n", r"line 2, at \$\.specs\[0\]\.name: expected a valid string, got 3\."),
        ("specs:\n- on: foward\n", r"line 2, at \$\.specs\[0\]\.on: No kind 'foward'\. Nearest: 'forward'"),
        ("specs:\n- name: x\n  sees: raw\n", r"line 2, at \$\.specs\[0\]: sees='raw' is for observers"),
        ("hooks: [norms, {name: x}]\n", r"line 1, at \$\.hooks\[0\]: A hook spec is an object .*got 'norms'\."),
        ("hooks: [{name: x}]\nspecs: []\n", r"line 1, at \$\.hooks: hooks on modules are here and under specs"),
        ("hooks: 3\n", r"line 1, at \$\.hooks: expected an object, got 3\."),
        ("1: x\n", r"line 1, at \$\[1\]: keys are text, got 1\."),
        ("trackers:\n- traker: x\n", r"line 2, at \$\.trackers\[0\]\.traker: .* Did you mean 'tracker'\?"),
        ("trackers:\n- {name: x}\n", r"line 2, at \$\.trackers\[0\]\.tracker: this is missing\."),
        (
            "hooks:\n  schedules:\n    hessian: {strde: 3}\n",
            r"line 3, at \$\.hooks\.schedules\.hessian\.strde: .* Did you mean 'stride'\? There are: mode, stride, ",
        ),
        (
            "hooks:\n  schedules:\n    a: {mode: brst}\n",
            r"at \$\.hooks\.schedules\.a\.mode: expected 'continual', 'stride' or 'burst', got 'brst'\.",
        ),
        ("hooks: {schedules: {a: {mode: continual, stride: 3}}}\n", r"\.a: A continual schedule has no stride"),
        ("hooks: {schedules: {a: {stride: 3, mode: stride, burst_length: 2}}}\n", r"by stride has no burst_length"),
        ("hooks: {schedules: {a: {mode: burst}}}\n", r"by burst says how many steps there are .*: stride: 50\."),
        ("hooks: {schedules: {a: {warmup: -1}}}\n", r"\.a\.warmup: expected greater than or equal to 0, got -1\."),
        ("- a\n- b\n", r"run\.yaml holds a list, and settings are keys with values"),
        ("", r"run\.yaml is empty; it says at least which experiment to run"),
    ],
)
def test_a_mistake_is_named_with_its_path_and_line(tmp_path, text, said):
    """Asked, found, next; and where."""
    with pytest.raises(ConfigError, match=said):
        RunFile.read(write(tmp_path, text))


def test_every_mistake_is_told_at_once(tmp_path):
    """Not one per try."""
    with pytest.raises(ConfigError) as caught:
        RunFile.read(write(tmp_path, "sed: 1\nseed: x\ndevce: cpu\n"))
    assert len(str(caught.value).splitlines()) == 3


def test_mistakes_of_all_parts_are_told_at_once(tmp_path):
    """Those of hooks on modules among them, each field for itself; in the order of the lines."""
    text = "sed: 1\nspecs:\n- {nme: x, every: 0, on: sideways}\n- {observe: 'yes'}\ntrackers: [{traker: x}]\n"
    with pytest.raises(ConfigError) as caught:
        RunFile.read(write(tmp_path, text))
    places = [line.partition(": ")[0].partition(", ")[2] for line in str(caught.value).splitlines()]
    assert places == [
        "line 1, at $.sed",
        "line 3, at $.specs[0].on",
        "line 3, at $.specs[0].every",
        "line 3, at $.specs[0].nme",
        "line 4, at $.specs[1].observe",
        "line 5, at $.trackers[0].tracker",
        "line 5, at $.trackers[0].traker",
    ]


def test_a_very_long_value_is_not_told_whole(tmp_path):
    """An error is to be read."""
    with pytest.raises(ConfigError) as caught:
        RunFile.read(write(tmp_path, f"specs:\n- target_modules: [{', '.join(map(str, range(10_000)))}]\n"))
    assert "target_modules[0]: expected a valid string, got 0" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_null_is_the_same_as_nothing(tmp_path):
    """A key without a value is what is left of a file somebody is writing."""
    run = RunFile.read(write(tmp_path, "hooks:\nspecs: ~\ntrackers: null\nsinks:\nconfig:\nseed:\n"))
    assert run == RunFile()


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        ("{}", StepSchedule()),
        ("{warmup: 3}", StepSchedule(warmup=3)),
        ("{stride: 50}", StepSchedule("stride", stride=50)),
        ("{stride: 50, burst_length: 3}", StepSchedule("burst", stride=50, burst_length=3)),
        ("{mode: stride, stride: 5, warmup: 10}", StepSchedule("stride", stride=5, warmup=10)),
        ("{mode: burst, stride: 5}", StepSchedule("burst", stride=5)),
    ],
)
def test_a_schedule_is_what_it_looks_like(tmp_path, given, schedule):
    """Without a mode, what else is given says which."""
    run = RunFile.read(write(tmp_path, f"hooks: {{schedules: {{hessian: {given}}}}}\n"))
    assert StepSchedule(**run.hooks.schedules["hessian"].arguments()) == schedule


def test_hooks_may_be_a_list_of_names_or_what_a_server_takes(tmp_path):
    """The file of a server can be run as it is, with an experiment beside."""
    assert RunFile.read(write(tmp_path, "hooks: [norms, hessian]\n")).hooks.names == ("norms", "hessian")
    server = '{"experiment": "x", "enable_hooks": true, "hooks": [{"name": "a", "target_modules": ["m"]}]}'
    run = RunFile.read(write(tmp_path, server, "run.json"))
    assert run.specs[0]["name"] == "a"
    assert run.hooks.names is None


def test_a_mistake_in_a_list_of_hooks_is_found_where_it_was_written(tmp_path):
    """Under hooks, though it is checked as specs."""
    file = write(tmp_path, '{"experiment": "x",\n "hooks": [{"name": "a"},\n {"nam": "b"}]}', "run.json")
    with pytest.raises(ConfigError, match=r"line 3, at \$\.hooks\[1\]\.nam"):
        RunFile.read(file)


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "a", "target_modules": ["x"], "hook_factory": "m:f"}]',
        '{"hooks": [{"name": "a", "target_modules": ["x"], "hook_factory": "m:f"}]}',
        '{"enable_hooks": true, "hooks": [{"name": "a", "target_modules": ["x"], "hook_factory": "m:f"}]}',
        '{"experiment": "e", "specs": [{"name": "a", "target_modules": ["x"], "hook_factory": "m:f"}]}',
    ],
)
def test_hooks_on_modules_are_found_in_every_form(tmp_path, text):
    """A list, a server's settings, a run file."""
    found = placed_specs(read_document(write(tmp_path, text, "hooks.json")))
    assert [spec for _, spec in found] == [{"name": "a", "target_modules": ["x"], "hook_factory": "m:f"}]


def test_hooks_that_are_switched_off_are_none(tmp_path):
    """``enable_hooks: false`` wins over a list."""
    text = '{"enable_hooks": false, "hooks": [{"name": "a"}]}'
    assert placed_specs(read_document(write(tmp_path, text, "hooks.json"))) == []


def test_a_mistake_in_a_bare_list_has_its_place(tmp_path):
    """``$[1]``, not a key that nobody wrote."""
    file = write(tmp_path, '[{"name": "a"},\n {"on_eror": 1}]', "hooks.json")
    with pytest.raises(ConfigError, match=r"line 2, at \$\[1\]\.on_eror: .*Did you mean 'on_error'"):
        placed_specs(read_document(file))


def test_values_become_what_is_declared():
    """A whole number where a float is wanted, a list where a tuple is; a misfit says where."""
    assert validate_value(1, float, "here") == 1.0
    assert validate_value([1, 2], tuple[int, ...], "here") == (1, 2)
    assert validate_value(None, int | None, "here") is None
    with pytest.raises(ConfigError, match=r"^here: expected a valid integer, .*got 'x'\."):
        validate_value("x", int, "here")
