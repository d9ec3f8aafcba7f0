"""`Run`: what a run file may say, how it says no, and that flags, files and saved runs are one value."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hookline as hl
from hookline.errors import ConfigError
from hookline.runs.build import build
from hookline.runs.documents import placed_specs, read_document
from hookline.runs.flags import declared
from hookline.runs.read import read, read_file
from hookline.runs.run import Run
from hookline.specs.hook_spec import HookSpec

SHAPES = {"name": "a", "target_modules": ["x"], "hook_factory": "hookline.factories:nan_alarm"}
WHOLE = """\
experiment: mod_arithmetic
strategy: all
config: {epochs: 3, lr: 1e-3}
hooks:
  with_hooks: observers
  names: [hessian]
  config: {hessian: {epsilon: 1e-3}}
specs:
  - {name: a, target_modules: [x], hook_factory: "hookline.factories:nan_alarm"}
sinks: {csv: true, others: ["memory", {sink: "jsonl", options: {path: a}}]}
console: live
seed: 3
save_checkpoints: 5
"""


def write(tmp_path, text, name="run.yaml"):
    file = tmp_path / name
    file.write_text(text)
    return str(file)


def test_a_whole_run_file_is_one_value(tmp_path):
    """Every part as it is declared; what was not given is absent; what is saved says the same again."""
    run, found = read([write(tmp_path, WHOLE)])[:2]
    assert (run.experiment, run.strategy, run.epochs, run.config) == ("mod_arithmetic", "all", 3, {"lr": 0.001})
    assert (run.hooks.with_hooks, run.hooks.names) == ("observers", ["hessian"])
    assert run.hooks.config == {"hessian": {"epsilon": 0.001}}
    assert (run.sinks.chosen(), [one.options for one in run.sinks.others]) == ({"csv": True}, [{}, {"path": "a"}])
    assert (run.console, run.seed, run.save_checkpoints) == ("live", 3, 5)
    saved = run.model_dump(exclude_unset=True)
    assert "device" not in saved
    assert "config" in saved
    context = {"found": found, "groups": found.hook_sets}
    assert Run.model_validate(saved, context=context).model_dump() == run.model_dump()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hoks: {}\n", r"line 1, at \$\.hoks: nothing is called 'hoks' here\. Did you mean 'hooks'\? There are: exp"),
        ("hooks:\n  names: [norms]\n  confg: {}\n", r"line 3, at \$\.hooks\.confg: .* Did you mean 'config'\?"),
        ("hooks:\n  names:\n    - norms\n    - 3\n", r"line 4, at \$\.hooks\.names\[1\]: expected .* string, got 3\."),
        ("seed: -1\n", r"line 1, at \$\.seed: expected greater than or equal to 0, got -1\."),
        ("save_checkpoints: true\nvalidate_checkpoints: 3\n", r"at \$\.validate_checkpoints: .* do not go together"),
        ("sinks:\n  others:\n    - {snk: a}\n", r"line 3, at \$\.sinks\.others\[0\]"),
        ("specs:\n  - nme: x\n", r"line 2, at \$\.specs\[0\]\.nme: .* Did you mean 'name'\?"),
        ("specs:\n- x\n", r"line 2, at \$\.specs\[0\]: A hook spec is an object with target_modules and "),
        ("hooks: [norms, {name: x}]\n", r"line 1, at \$\.hooks\[0\]: A hook spec is an object .*got 'norms'\."),
        ("hooks: [{name: x}]\nspecs: []\n", r"line 1, at \$\.hooks: hooks on modules are here and under specs"),
        ("hooks: 3\n", r"line 1, at \$\.hooks: expected an object, got 3\."),
        ("- a\n- b\n", r"run\.yaml holds a list, and settings are keys with values"),
        ("", r"run\.yaml is empty, and settings are keys with values: experiment"),
    ],
)
def test_a_mistake_is_named_with_its_path_and_line(tmp_path, text, said):
    """Asked, found, next; and where."""
    with pytest.raises(ConfigError, match=said):
        read([write(tmp_path, text)])


def test_null_is_the_same_as_nothing(tmp_path):
    """A key without a value is what is left of a file somebody is writing."""
    run = read_file(write(tmp_path, "hooks:\nspecs: ~\nsinks: {csv: null}\nconfig:\nseed:\n"))
    assert run.model_dump(exclude_unset=True) == {"sinks": {}}


def test_hooks_may_be_a_list_of_names_or_what_a_server_takes():
    """The file of a server can be run as it is, with an experiment beside."""
    assert Run(hooks=["norms", "hessian"]).hooks.names == ["norms", "hessian"]
    run = Run(experiment="x", enable_hooks=True, hooks=[SHAPES])
    assert (build(run).specs, run.hooks.names) == ([HookSpec(**SHAPES)], None)
    assert build(Run(enable_hooks=False, specs=[SHAPES])).specs == []


def test_a_mistake_in_a_list_of_hooks_is_found_where_it_was_written(tmp_path):
    """Under hooks, though it is checked as specs."""
    file = write(tmp_path, '{"experiment": "x",\n "hooks": [{"name": "a"},\n {"nam": "b"}]}', "run.json")
    with pytest.raises(ConfigError, match=r"line 3, at \$\.hooks\[1\]\.nam"):
        read_file(file)


@pytest.mark.parametrize("key", ["", "hooks", "forward_hooks"])
def test_hooks_on_modules_are_found_in_every_form(tmp_path, key):
    """A list, a server's settings, a run file."""
    spec = '[{"name": "a", "target_modules": ["x"], "hook_factory": "m:f"}]'
    file = write(tmp_path, f'{{"{key}": {spec}}}' if key else spec, "hooks.json")
    found = placed_specs(read_document(file), is_server=True)
    assert [(spec.name, spec.hook_factory) for spec in found.values()] == [("a", "m:f")]


def test_hooks_that_are_switched_off_are_none(tmp_path):
    """``enable_hooks: false`` wins over a list."""
    text = '{"enable_hooks": false, "hooks": [{"name": "a"}]}'
    assert not placed_specs(read_document(write(tmp_path, text, "hooks.json")), is_server=True)


def test_values_become_what_is_declared():
    """A whole number where a float is wanted, a list where a tuple is."""
    assert declared([1, 2], tuple[int, ...]) == (1, 2)
    assert type(declared(1, float)) is float
    assert declared(None, int | None) is None
    with pytest.raises(ConfigError, match=r"^expected a valid integer, got 'x'\."):
        declared("x", int)


# -- flags, files and builds are one -----------------------------------------------------------------------------


def test_a_flag_wins_key_by_key_and_what_is_not_given_is_absent(tmp_path):
    """Arguments of hooks are joined; a switch of the file can be turned off."""
    file = write(tmp_path, WHOLE)
    run = read([file, "--seed", "4", "--no-hook-csv", "--hook-config", "hessian.every_n_steps=7"]).run
    assert (run.seed, run.strategy, run.sinks.chosen()) == (4, "all", {})
    assert run.hooks.config == {"hessian": {"epsilon": 0.001, "every_n_steps": 7}}
    assert read(["mod_arithmetic"]).run.model_fields_set == {"experiment"}


def test_a_mistake_in_a_flag_names_the_flag_and_not_the_file(tmp_path):
    """The file is told of where it is to blame."""
    with pytest.raises(ConfigError) as caught:
        read([write(tmp_path, WHOLE), "--hooks", "nrms", "--device", "warp"])
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["--device", "--hooks"]


def test_sinks_by_name_are_those_of_the_package_in_every_build(tmp_path):
    """For a trainer as for an experiment: a name, a file beside the run file, a path."""
    (tmp_path / "k_sinks.py").write_text("import hookline\n\n\nclass Own(hookline.sinks.MemorySink):\n    pass\n")
    file = write(tmp_path, "sinks: {others: [memory, 'k_sinks.py:Own'], prometheus: 0}\n")
    run = read_file(file)
    sinks = build(run).make_sinks()
    assert [type(sink).__name__ for sink in sinks] == ["PrometheusSink", "MemorySink", "Own"]
    assert isinstance(sinks[1], hl.sinks.MemorySink)
    for sink in sinks:
        sink.close()
    assert list(run.sinks.chosen()) == ["prometheus"]  # port 0 is one that is free, and not "off"


def test_an_error_in_a_users_file_comes_through_as_it_is(tmp_path):
    """It is no mistake of the run file, also where it is a ValueError."""
    (tmp_path / "k_broken.py").write_text("raise ValueError('mine')\n")
    with pytest.raises(ValueError, match=r"^mine$"):
        read_file(write(tmp_path, "hooks: ['k_broken.py:Hook']\n"))


def test_help_needs_no_torch_and_the_package_no_pydantic():
    """Both would be waited for."""
    code = "import sys, hookline, hookline.lifecycle, hookline.training; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys; from hookline.cli.main import main\ntry: main(['run', '--help'])\nexcept SystemExit: "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
