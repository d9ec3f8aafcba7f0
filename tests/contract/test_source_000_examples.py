"""Source 000's configurations and calls, as a user has them, with only imports and paths of factories changed."""

from __future__ import annotations

import fnmatch
import json
import logging
import sys
import types

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.serve.model_runner import ModelRunner
from hookline.serve.server_args import ServerArgs
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
    assert hl.resolve_callable(None) is None
    for path in ("my_project.hooks:dummy_hook_factory", "my_project.hooks.dummy_hook_factory"):
        assert hl.resolve_callable(path) is model_hooks.dummy_hook_factory
    with pytest.raises(
        ValueError, match=r"^Invalid hook callable path 'factory'\. Expected 'module\.submodule:factory'"
    ):
        hl.resolve_callable("factory")
    with pytest.raises(AttributeError) as caught:
        hl.resolve_callable("my_project.hooks:nope")
    assert str(caught.value) == (
        "Module 'my_project.hooks' has no attribute 'nope' (from hook path 'my_project.hooks:nope')"
    )
    assert caught.value.__cause__ is not None
