"""`Run` and files of hooks: what they may say, how they say no, and that flags, files and saved runs are one value."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import hookline as hl
from hookline.errors import ConfigError
from hookline.runs.build import build
from hookline.runs.documents import is_server_file, placed_specs, read_document, server_settings
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
    context = {"found": found}
    assert Run.model_validate(saved, context=context).model_dump() == run.model_dump()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hoks: {}\n", r"at \$\.hoks: nothing is called 'hoks' here\. Did you mean 'hooks'\? There are: exp"),
        ("hooks:\n  names: [norms]\n  confg: {}\n", r"at \$\.hooks\.confg: .* Did you mean 'config'\?"),
        ("seed: -1\n", r"at \$\.seed: expected greater than or equal to 0, got -1\."),
        ("save_checkpoints: true\nvalidate_checkpoints: 3\n", r"at \$\.validate_checkpoints: .* do not go together"),
        ("specs:\n- x\n", r"at \$\.specs\[0\]: A hook spec is an object with target_modules and "),
        ("hooks: [norms, {name: x}]\n", r"at \$\.hooks: these are hooks on modules, which go under specs:"),
        ("hooks: 3\n", r"at \$\.hooks: expected an object, got 3\."),
        ("- a\n- b\n", r"run\.yaml holds a list, and settings are keys with values"),
        ("x\n", r"run\.yaml holds text, and settings are"),
        ("", r"run\.yaml is empty, and settings are keys with values: experiment"),
    ],
)
def test_a_mistake_is_named_with_its_path(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        read([write(tmp_path, text if said.startswith(r"run\.yaml") else f"experiment: mod_arithmetic\n{text}")])


def test_null_is_the_same_as_nothing(tmp_path):
    """A key without a value is what is left of a file somebody is writing."""
    run = read_file(write(tmp_path, "hooks:\nspecs: ~\nsinks: {csv: null}\nconfig:\nseed:\n"))
    assert run.model_dump(exclude_unset=True) == {"sinks": {}}


def test_hooks_may_be_a_list_of_names():
    assert Run(hooks=["norms", "hessian"]).hooks.names == ["norms", "hessian"]
    assert build(Run(experiment="x", specs=[SHAPES])).specs == [HookSpec(**SHAPES)]


def test_values_become_what_is_declared():
    """A whole number where a float is wanted, a list where a tuple is."""
    assert declared([1, 2], tuple[int, ...]) == (1, 2)
    assert type(declared(1, float)) is float
    assert declared(None, int | None) is None
    with pytest.raises(ConfigError, match=r"^expected a valid integer, got 'x'\."):
        declared("x", int)


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


def test_the_package_needs_no_pydantic():
    code = "import sys, hookline, hookline.lifecycle, hookline.training; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SPEC = {"name": "a", "target_modules": ["x"], "hook_factory": "m:f"}


def document_of(tmp_path, text, name="server.json"):
    (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return read_document(tmp_path / name)


def read_specs(document):
    return [document.at(place) for place in placed_specs(document, is_server=True)]


def test_the_settings_of_a_server_are_kept_whole(tmp_path):
    """What is not about hooks is for the server."""
    text = {"model_path": "m", "port": 3, "enable_hooks": True, "hooks": [SPEC]}
    assert server_settings(document_of(tmp_path, text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"hooks": {"name": "x"}}, "at $.hooks: expected a valid list"),
        ({"forward_hooks": "x"}, "at $.forward_hooks: expected a valid list"),
        ({"enable_hooks": "false"}, "at $.enable_hooks: expected a valid boolean"),
        ({"hooks": ["x"]}, "at $.hooks[0]: A hook spec is an object with target_modules and hook_factory, got 'x'."),
        ({"hooks": [{"name": 3}]}, "at $.hooks[0].name: expected a valid string, got 3."),
        ({"hooks": [{"config": [1]}]}, "at $.hooks[0].config: expected an object, got [1]."),
        ({"hooks": [{"hook_factry": "m:f"}]}, "nothing is called 'hook_factry' here. Did you mean 'hook_factory'?"),
        ({"hooks": [{"every": 2, "on": "state_dict_pre"}]}, "at $.hooks[0]: every counts forwards of the model"),
    ],
)
def test_what_cannot_be_is_told(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        server_settings(document_of(tmp_path, text))
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'server.json'}, line 1, at ")


SPEC_B = SPEC | {"name": "b"}


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([SPEC], "a"),
        ({"hooks": [SPEC]}, "a"),
        ({"forward_hooks": [SPEC]}, "a"),
        ({"enable_hooks": False, "hooks": [SPEC], "forward_hooks": [SPEC_B]}, "b"),
        ({"enable_hooks": True, "hooks": [SPEC], "forward_hooks": [SPEC_B]}, "ab"),
        ({"enable_hooks": None, "hooks": []}, ""),
        ({"hooks": None}, ""),
        ({}, ""),
    ],
)
def test_hooks_on_modules_are_found_in_every_form(tmp_path, values, names):
    """A list, or a server's settings, where null and an empty list are none, and one of two keys has a switch."""
    assert [spec["name"] for spec in read_specs(document_of(tmp_path, values))] == list(names)


def test_all_that_a_spec_may_say_is_taken(tmp_path):
    """Null is left out by whoever makes the spec."""
    whole = SPEC | {"name": None, "config": None, "on": "backward", "observe": True, "every": 3}
    whole |= {"exclude": "x.*", "enabled": False, "on_error": "disable", "target_modules": "x"}
    assert read_specs(document_of(tmp_path, [whole])) == [whole]


def test_which_file_it_is_can_be_told():
    """A run file says what to run; a server has hooks on modules."""
    for values in ({"hooks": [SPEC]}, {"hooks": []}, {"enable_hooks": True}, {"forward_hooks": None, "port": 1}):
        assert is_server_file(values), values
    for values in (
        {},
        [],
        None,
        {"hooks": ["norms"]},
        {"hooks": {"names": []}},
        {"experiment": "x", "enable_hooks": True, "hooks": [SPEC]},
        {"sinks": {}, "hooks": [SPEC]},
    ):
        assert not is_server_file(values), values
