"""SGLang's configurations and calls, as a user has them, with only imports and paths of factories changed."""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import json
import logging
import re
import sys
import types

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.sglang.model_runner import ModelRunner
from hookline.sglang.server_args import ServerArgs
from hookline.testing import model_hooks
from hookline.testing.model_hooks import HOOK_CALLS


class DummyModel(nn.Module):
    """The model of the source's tests: ``inner`` is also ``outer.2``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
        self.outer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), self.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x)


@pytest.fixture(autouse=True)
def my_project(monkeypatch):
    """``my_project.hooks`` has the source's factory."""
    module = types.ModuleType("my_project.hooks")
    module.dummy_hook_factory = model_hooks.dummy_hook_factory
    monkeypatch.setitem(sys.modules, "my_project", types.ModuleType("my_project"))
    monkeypatch.setitem(sys.modules, "my_project.hooks", module)
    HOOK_CALLS.clear()


@pytest.fixture
def lines(caplog):
    """What was logged, in order."""
    caplog.set_level(logging.INFO, "hookline")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def runner():
    torch.manual_seed(0)
    made = ModelRunner(DummyModel())
    yield made
    made.hook_handles.remove(quiet=True)
    hl.assert_no_hooks(made.model, foreign=True)


MINIMAL = """{
  "enable_hooks": true,
  "hooks": [
    {
      "name": "outer_linear_hooks",
      "target_modules": ["outer.0", "outer.1"],
      "hook_factory": "my_project.hooks:dummy_hook_factory",
      "config": {
        "tag": "outer-layer"
      }
    }
  ]
}
"""

CAPTURE = """{
  "enable_hooks": true,
  "hooks": [
    {
      "name": "capture_outer",
      "target_modules": ["outer.0", "outer.1"],
      "hook_factory": "my_project.hooks:dummy_hook_factory",
      "config": {
        "tag": "outer"
      }
    }
  ]
}
"""


@pytest.mark.parametrize(
    ("text", "name", "tag"), [(MINIMAL, "outer_linear_hooks", "outer-layer"), (CAPTURE, "capture_outer", "outer")]
)
def test_the_json_of_the_page_attaches_at_initialize(text, name, tag, lines, tmp_path):
    """From text and from a file; on every forward; with the lines of the source."""
    (tmp_path / "server_args.jsonc").write_text(text)
    from_file = ServerArgs.from_file(tmp_path / "server_args.jsonc")
    assert from_file == ServerArgs(**json.loads(text))
    runner = ModelRunner(DummyModel(), from_file)
    runner.initialize()
    assert lines() == [f"Registered forward hook '{name}' on outer.{number}" for number in (0, 1)]
    for _ in range(2):
        runner.model(torch.randn(3, 4))
    once = [{"module_type": kind, "tag": tag, "shape": (3, 4)} for kind in ("Linear", "ReLU")]
    assert [*once, *once] == HOOK_CALLS
    runner.hook_handles.remove()


@pytest.mark.parametrize("hooks", ["", ', "hooks": []', ', "hooks": null'])
def test_enabled_without_hooks_is_the_line_of_the_source(hooks, lines):
    """Empty or null."""
    runner = ModelRunner(DummyModel(), ServerArgs(**json.loads(f'{{"enable_hooks": true{hooks}}}')))
    runner.initialize()
    assert lines() == ["enable_hooks=True but no 'hooks' specified in server_args"]


def test_the_fields_have_the_defaults_of_the_source():
    """Off, and none."""
    server_args = ServerArgs()
    assert server_args.enable_hooks is False
    assert server_args.hooks is None


def test_hooks_are_called(runner):
    """The source's first test."""
    hook_specs = [
        {
            "target_modules": ["outer.0", "outer.1"],
            "hook_factory": "hookline.testing.model_hooks:dummy_hook_factory",
            "config": {"tag": "forward-ok"},
        }
    ]

    runner.register_hooks(hook_specs)
    x = torch.randn(3, 4)
    _ = runner.model(x)

    assert len(HOOK_CALLS) > 0
    assert {call["tag"] for call in HOOK_CALLS} == {"forward-ok"}


def test_no_matching_modules_is_no_error(runner, lines):
    """The source's second test."""
    hook_specs = [
        {
            "name": "no_match",
            "target_modules": ["does_not_exist.*"],
            "hook_factory": "hookline.testing.model_hooks:dummy_hook_factory",
            "config": {"tag": "unused"},
        }
    ]

    runner.register_hooks(hook_specs)
    x = torch.randn(3, 4)
    _ = runner.model(x)

    assert len(HOOK_CALLS) == 0
    assert lines() == ["No modules matched hook spec 'no_match' patterns=['does_not_exist.*']"]


@pytest.mark.parametrize(
    "pattern", ["outer.0", "outer.*", "outer.inner.*", "inner.*", "*", "?nner", "[io]*", "outer.[!0]", "Outer.*", "*.0"]
)
def test_patterns_match_what_fnmatch_matches(runner, pattern):
    """Over ``named_modules()``, but by every name of a module: ``outer.2`` is ``inner``."""
    names = [name for name, _ in runner.model.named_modules(remove_duplicate=False) if fnmatch.fnmatch(name, pattern)]
    modules = dict(runner.model.named_modules(remove_duplicate=False))
    wanted = {id(modules[name]) for name in names}
    handles = runner.register_hooks(
        [{"target_modules": [pattern], "hook_factory": "my_project.hooks.dummy_hook_factory"}]
    )
    assert {id(modules[name]) for handle in handles for name in handle.names} == wanted


def test_the_page_on_writing_a_factory(runner):
    """A function of a config that returns a hook of three arguments, whose output is that of the module."""
    seen = []

    def dummy_hook_factory(config):
        tag = config.get("tag", "default")

        def hook(module, inputs, output):
            seen.append({"module_type": type(module).__name__, "tag": tag, "shape": tuple(output.shape)})
            return output

        return hook

    sys.modules["my_project.hooks"].mine = dummy_hook_factory
    x = torch.randn(3, 4)
    plain = runner.model(x)
    runner.register_hooks([{"target_modules": ["outer.*"], "hook_factory": "my_project.hooks:mine"}])
    assert torch.equal(runner.model(x), plain)
    assert [call["tag"] for call in seen] == ["default"] * 5


def test_resolve_callable_fails_fast_as_the_page_says():
    """At start-up: a malformed path, a missing attribute."""
    assert hl.specs.resolve_callable(None) is None
    for path in ("my_project.hooks:dummy_hook_factory", "my_project.hooks.dummy_hook_factory"):
        assert hl.specs.resolve_callable(path) is model_hooks.dummy_hook_factory
    with pytest.raises(
        ValueError, match=r"^Invalid hook callable path 'factory'\. Expected 'module\.submodule:factory'"
    ):
        hl.specs.resolve_callable("factory")
    with pytest.raises(AttributeError) as caught:
        hl.specs.resolve_callable("my_project.hooks:nope")
    assert str(caught.value) == (
        "Module 'my_project.hooks' has no attribute 'nope' (from hook path 'my_project.hooks:nope')"
    )
    assert caught.value.__cause__ is not None


# -- names and flags -------------------------------------------------------------------------------------------


def test_signatures_have_the_parameters_of_the_source(runner):
    """By name and in order; what is ours comes after, by keyword."""
    assert list(inspect.signature(ModelRunner.register_hooks).parameters)[:2] == ["self", "hook_specs"]
    assert list(inspect.signature(hl.register_hooks).parameters)[:2] == ["model", "hook_specs"]
    assert list(inspect.signature(hl.specs.resolve_callable).parameters)[:1] == ["path"]
    assert list(inspect.signature(ModelRunner.initialize).parameters)[:1] == ["self"]
    for function, theirs in ((ModelRunner.register_hooks, 2), (hl.register_hooks, 2), (ModelRunner.initialize, 1)):
        ours = list(inspect.signature(function).parameters.values())[theirs:]
        assert all(one.kind is one.KEYWORD_ONLY for one in ours)
    specs = json.loads(CAPTURE)["hooks"]
    runner.register_hooks(hook_specs=specs)
    hl.register_hooks(runner.model, hook_specs=specs).remove(quiet=True)
    runner.model(torch.randn(3, 4))
    assert len(HOOK_CALLS) == 2


SPEC = {
    "name": "outer_and_inner_from_cli",
    "target_modules": ["outer.0", "outer.1", "inner.*"],
    "hook_factory": "my_project.hooks:dummy_hook_factory",
    "config": {"tag": "cli-hook", "levels": [1, {"a": None}]},
}


def flags(*arguments):
    parser = argparse.ArgumentParser()
    assert ServerArgs.add_cli_args(parser) is None
    return ServerArgs.from_cli_args(parser.parse_args(list(arguments)))


def test_hooks_from_the_command_line_reach_the_model():
    """As JSON, by their newer name, beside flags that are not about hooks; they fire on every match."""
    args = flags("--model-path", "Qwen/Qwen2-7B-Instruct", "--forward-hooks", json.dumps([SPEC]))
    assert (args.forward_hooks, args.model_path, args.enable_hooks) == ([SPEC], "Qwen/Qwen2-7B-Instruct", False)
    model = DummyModel()
    with hl.register_hooks(model, args.forward_hooks):
        model(torch.randn(3, 4))
    assert [call["tag"] for call in HOOK_CALLS] == ["cli-hook"] * 4
    runner = ModelRunner(model, args)
    runner.initialize()
    assert len(runner.hook_handles) == 1
    runner.hook_handles.remove(quiet=True)


def test_the_older_names_are_flags_as_well():
    """Off without the switch; nothing given is the settings' own defaults."""
    given = ["--hooks", json.dumps([SPEC])]
    assert flags(*given).hook_specs() == []
    assert flags("--enable-hooks", *given).hook_specs() == [SPEC]
    assert flags() == ServerArgs()


def test_a_parser_may_have_flags_of_its_own():
    """They are kept, as all settings are that are not about hooks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype")
    ServerArgs.add_cli_args(parser)
    args = ServerArgs.from_cli_args(parser.parse_args([]))
    assert args.others == {"port": 30000}


@pytest.mark.parametrize("text", ["{", "", "[1", '{"target_modules": []}', "3", "null"])
def test_what_is_no_json_list_is_refused_in_the_words_of_the_source(text, capsys):
    """By the parser, with its exit code; an object, too."""
    with pytest.raises(SystemExit) as caught:
        flags("--forward-hooks", text)
    assert caught.value.code == 2
    assert f"Invalid JSON list: {text}. Please provide a valid JSON list." in capsys.readouterr().err


@pytest.mark.parametrize("path", ["", "abc"])
def test_a_malformed_path_fails_start_up_with_both_forms(path, runner):
    """An empty one, too: only a spec without a factory is passed over."""
    said = f"Invalid hook callable path '{path}'. Expected 'module.submodule:factory' or 'module.submodule.factory'."
    with pytest.raises(ValueError, match=re.escape(said)):
        runner.register_hooks([{"target_modules": ["outer.0"], "hook_factory": path}])
    with pytest.raises(ValueError, match=re.escape(said)):
        ModelRunner(runner.model, {"forward_hooks": [SPEC, {**SPEC, "hook_factory": path}]}).initialize()
    hl.assert_no_hooks(runner.model, foreign=True)


@pytest.mark.parametrize("factory", [{}, {"hook_factory": None}])
def test_a_missing_factory_is_passed_over_with_the_line_of_the_source(factory, runner, lines):
    """No key, or null."""
    runner.register_hooks([{"name": "bare", "target_modules": ["outer.0"], **factory}])
    assert lines() == ["Hook spec 'bare' has no 'hook_factory', skipping"]
    assert len(runner.hook_handles) == 0
