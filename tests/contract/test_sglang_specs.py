"""SGLang's hooks as data: its configurations and calls, and what is promised of specs, patterns, paths, removal."""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import json
import logging
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.errors import NoMatchError
from hookline.sglang.model_runner import ModelRunner
from hookline.sglang.server_args import ServerArgs
from hookline.specs import register_hooks, resolve_callable
from hookline.testing import model_hooks
from hookline.testing.model_hooks import HOOK_CALLS


class T(nn.Module):
    """The model of the source's tests: ``inner`` is also ``outer.2``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
        self.outer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), self.inner)

    def forward(self, x):
        return self.outer(x)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """``my_project.hooks`` has the source's factory, and some that fail; what its hooks were called with."""

    def broken_factory(config):
        raise RuntimeError("no such layer")

    module = types.ModuleType("my_project.hooks")
    module.dummy_hook_factory = model_hooks.dummy_hook_factory
    module.broken_factory = broken_factory
    module.none_factory = lambda config: None
    monkeypatch.setitem(sys.modules, "my_project", types.ModuleType("my_project"))
    monkeypatch.setitem(sys.modules, "my_project.hooks", module)
    HOOK_CALLS.clear()
    return HOOK_CALLS


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "hookline")
    return lambda level: [record.getMessage() for record in caplog.records if record.levelname == level]


@pytest.fixture
def runner():
    torch.manual_seed(0)
    made = ModelRunner(T())
    yield made
    made.hook_handles.remove(quiet=True)
    hl.assert_no_hooks(made.model, foreign=True)


def spec(*patterns: str, tag: str = "t", **more: Any) -> dict[str, Any]:
    return {
        "name": tag,
        "target_modules": list(patterns),
        "hook_factory": "my_project.hooks:dummy_hook_factory",
        "config": {"tag": tag},
        **more,
    }


def run(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(0)
    return model(torch.randn(3, 4))


def assert_bare(model: nn.Module) -> None:
    hl.assert_no_hooks(model, foreign=True)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks


def test_four_calls_each_with_the_tag_of_its_own_spec(calls):
    model = T()
    with register_hooks(model, [spec("outer.0", "outer.1", tag="a"), spec("inner.*", tag="b")]):
        run(model)
    assert [(call["module_type"], call["tag"], call["shape"]) for call in calls] == [
        ("Linear", "a", (3, 4)),
        ("ReLU", "a", (3, 4)),
        ("Linear", "b", (3, 2)),
        ("ReLU", "b", (3, 2)),
    ]


def test_no_match_is_one_warning_and_no_call(calls, log):
    model = T()
    handles = register_hooks(model, [spec("does_not_exist.*", tag="no_match"), spec("outer.0")])
    run(model)
    assert log("WARNING") == ["No modules matched hook spec 'no_match' patterns=['does_not_exist.*']"]
    assert [call["tag"] for call in calls] == ["t"]
    assert len(handles) == 1
    with pytest.raises(NoMatchError, match=r"does_not_exist\.\*"):
        register_hooks(model, [spec("outer.0"), spec("does_not_exist.*")], strict=True)
    handles.remove()
    assert_bare(model)


def test_one_pattern_that_matches_is_enough(calls, log):
    model = T()
    with register_hooks(model, [spec("nope", "outer.0")]):
        run(model)
    assert len(calls) == 1
    assert log("WARNING") == []


def test_the_factory_runs_even_if_nothing_matches(calls, log):
    with pytest.raises(RuntimeError, match="no such layer"):
        register_hooks(T(), [spec("nope", hook_factory="my_project.hooks:broken_factory")])


def test_once_per_spec_and_twice_by_two_specs_in_their_order(calls):
    model = T()
    with register_hooks(model, [spec("outer.0", "outer.*", "outer.0")]) as handles:
        run(model)
        assert len(calls) == len(handles.report()[0].sites) == 5  # 0, 1, and inner, which is outer.2, with its two
        assert [call["module_type"] for call in calls].count("Linear") == 2
    calls.clear()
    with register_hooks(model, [spec("outer.0", tag="first"), spec("outer.0", tag="second")]):
        run(model)
    assert [call["tag"] for call in calls] == ["first", "second"]


def test_a_shared_module_is_found_by_every_name_and_logged_by_its_first(calls, log):
    model = T()
    with register_hooks(model, [spec("outer.2")]):
        run(model)
    assert len(calls) == 1
    assert log("INFO") == ["Registered forward hook 't' on inner"]


def test_both_forms_of_a_path_are_the_same_object(calls):
    factory = sys.modules["my_project.hooks"].dummy_hook_factory
    assert resolve_callable("my_project.hooks:dummy_hook_factory") is factory
    assert resolve_callable("my_project.hooks.dummy_hook_factory") is factory
    assert resolve_callable(None) is None


@pytest.mark.parametrize("path", ["abc", ""])
def test_a_malformed_path_is_quoted_with_both_forms(path):
    with pytest.raises(ValueError, match="Invalid") as caught:
        resolve_callable(path)
    assert str(caught.value) == (
        f"Invalid hook callable path '{path}'. Expected 'module.submodule:factory' or 'module.submodule.factory'."
    )


def test_a_missing_attribute_says_module_attribute_and_path():
    with pytest.raises(AttributeError) as caught:
        resolve_callable("os:nope")
    assert str(caught.value) == "Module 'os' has no attribute 'nope' (from hook path 'os:nope')"
    assert isinstance(caught.value.__cause__, AttributeError)
    assert caught.value.__cause__ is not caught.value


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("no_such_package.hooks:f", ModuleNotFoundError),
        ("os.path.Nope.method", ModuleNotFoundError),
        (":f", ValueError),
        ("os:", AttributeError),
        ("os:path.join", AttributeError),
    ],
)
def test_other_paths_that_lead_nowhere(path, error):
    with pytest.raises(error) as caught:
        resolve_callable(path)
    assert error is not ModuleNotFoundError or not isinstance(caught.value, AttributeError)


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({"hook_factory": "abc"}, ValueError),
        ({"hook_factory": "my_project.hooks:nope"}, AttributeError),
        ({"hook_factory": "no_such_package:f"}, ModuleNotFoundError),
        ({"hook_factory": "my_project.hooks:broken_factory"}, RuntimeError),
        ({"on": "sideways"}, ValueError),
        ({"target_module": ["outer.0"]}, ValueError),
    ],
)
def test_all_or_nothing(calls, broken, error):
    model = T()
    with pytest.raises(error) as caught:
        register_hooks(model, [spec("outer.0"), spec("outer.1", tag="bad", **broken)])
    assert "This is about hook spec 1 ('bad')." in caught.value.__notes__
    run(model)
    assert calls == []
    assert_bare(model)


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        ({"target_modules": []}, "Hook spec 'bad' has no 'target_modules', skipping"),
        ({"target_modules": None}, "Hook spec 'bad' has no 'target_modules', skipping"),
        ({"hook_factory": None}, "Hook spec 'bad' has no 'hook_factory', skipping"),
        (
            {"hook_factory": "my_project.hooks:none_factory"},
            "Hook factory 'my_project.hooks:none_factory' for spec 'bad' returned None, not registering any hook",
        ),
    ],
)
def test_an_incomplete_spec_is_skipped_with_a_line_and_the_next_applies(calls, log, broken, line):
    model = T()
    bad = spec("outer.0", tag="bad", **broken)
    with register_hooks(model, [bad, spec("outer.1", tag="good")]):
        run(model)
    assert log("WARNING") == [line]
    assert [call["tag"] for call in calls] == ["good"]
    with pytest.raises(hl.errors.OptionError, match="bad"):
        register_hooks(model, [spec("outer.1"), bad], strict=True)
    assert_bare(model)


def test_a_hook_that_is_falsy_is_a_hook(calls):
    """The source's document tests its truth, its later code tests for None."""

    class Empty(list):
        def __call__(self, module, inputs, output):
            calls.append({})

    model = T()
    with register_hooks(model, [spec("outer.0", hook_factory=lambda config: Empty())]):
        run(model)
    assert calls == [{}]


def test_removal_leaves_nothing_and_may_be_repeated(calls):
    model = T()
    handles = register_hooks(model, [spec("*"), spec("outer.*", tag="b")])
    run(model)
    assert calls
    calls.clear()
    handles.remove()
    handles.remove()
    run(model)
    assert calls == []
    assert_bare(model)


def test_what_the_hook_returns_replaces_the_output():
    model = T()
    double = {"target_modules": ["outer"], "hook_factory": lambda config: lambda m, i, o: o * config["by"]}
    plain = run(model)
    with register_hooks(model, [{**double, "config": {"by": 3.0}}]):
        assert torch.equal(run(model), plain * 3.0)


@pytest.mark.parametrize(
    ("backend", "fullgraph"), [pytest.param("aot_eager", True, marks=pytest.mark.slow), ("eager", False)]
)
def test_attached_after_compiling_by_data_it_fires_on_every_forward(calls, backend, fullgraph):
    """By the settings of a server, on a model whose graph is there; and off it is off."""
    torch._dynamo.reset()
    model = T().eval()
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    x = torch.ones(3, 4)
    with torch.inference_mode():
        plain = compiled(x)
        runner = ModelRunner(compiled, ServerArgs(forward_hooks=[spec("outer.0", tag="a"), spec("inner", tag="b")]))
        runner.initialize()
        for _ in range(3):
            assert torch.equal(compiled(x), plain)
        assert [receipt.fired for receipt in runner.hook_handles.report()] == [3, 3]
        runner.hook_handles.remove()
        calls.clear()
        assert torch.equal(compiled(x), plain)
    assert calls == []
    assert_bare(model)
    torch._dynamo.reset()


@pytest.mark.parametrize("hooks", [{}, {"hooks": []}, {"hooks": None}])
def test_the_flag_on_without_specs_is_one_warning_and_off_with_specs_nothing(hooks, calls, log):
    model = T()
    plain = run(model)
    for args in ({"enable_hooks": True, **hooks}, {"enable_hooks": False, "hooks": [spec("*")]}):
        ModelRunner(model, ServerArgs(**args)).initialize()
        assert torch.equal(run(model), plain)
    assert log("WARNING") == ["enable_hooks=True but no 'hooks' specified in server_args"]
    assert calls == []
    assert_bare(model)


def test_initialize_attaches_once(calls, log):
    """Called again it does nothing, also when the hooks are off again."""
    runner = ModelRunner(T(), ServerArgs(enable_hooks=True, hooks=[spec("outer.0", "outer.1")]))
    runner.initialize()
    runner.initialize()
    run(runner.model)
    assert [call["tag"] for call in calls] == ["t", "t"]
    assert log("INFO") == [f"Registered forward hook 't' on outer.{number}" for number in (0, 1)]
    runner.hook_handles.remove()
    runner.hook_handles.remove()
    runner.initialize()
    calls.clear()
    run(runner.model)
    assert calls == []
    assert_bare(runner.model)


def test_closing_takes_hooks_off_and_has_them_write(calls):
    """In that order; removing alone leaves them as they are."""
    closed = []

    class Hook:
        def __call__(self, module, inputs, output):
            pass

        def close(self):
            closed.append(len(hl.attached(runner.model)))

    specs = [{"target_modules": ["outer.0"], "hook_factory": lambda config: Hook()}]
    runner = ModelRunner(T(), ServerArgs(forward_hooks=specs))
    runner.initialize()
    runner.register_hooks([spec("outer.1")])
    run(runner.model)
    assert [call["tag"] for call in calls] == ["t"]
    runner.hook_handles.remove()
    assert closed == []
    runner.close()
    assert closed == [0]  # when nothing could be shown to it any more
    assert_bare(runner.model)


def test_strict_and_allow_are_handed_on(log):
    """To the start, and to later calls."""
    shipped = spec("nowhere.*", hook_factory="hookline.testing.model_hooks:dummy_hook_factory")
    runner = ModelRunner(T(), ServerArgs(forward_hooks=[shipped]))
    for options, error in (({"strict": True}, NoMatchError), ({"allow": ["other"]}, hl.errors.NotAllowedError)):
        with pytest.raises(error):
            runner.initialize(**options)
        with pytest.raises(error):
            runner.register_hooks([shipped], **options)
    runner.initialize(allow=["hookline.testing"])
    assert log("WARNING") == ["No modules matched hook spec 't' patterns=['nowhere.*']"]


@pytest.mark.parametrize("pattern", ["outer.0", "_orig_mod.outer.0", "outer.2", "_orig_mod.outer.2", "*outer.0"])
def test_raw_names_of_wrappers_match_and_clean_names_are_logged(calls, log, pattern):
    """Each module once, by its first clean name."""
    wrapped = torch.compile(T(), backend="eager")
    handles = register_hooks(wrapped, [spec(pattern, pattern, "nope")])
    name = "inner" if pattern.endswith("2") else "outer.0"
    assert [handle.names for handle in handles] == [(name,)]
    assert log("INFO") == [f"Registered forward hook 't' on {name}"]
    run(wrapped)
    assert len(calls) == 1
    handles.remove()


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


def test_the_json_of_the_page_attaches_at_initialize(log, tmp_path):
    """From text and from a file; on every forward; with the lines of the source."""
    (tmp_path / "server_args.json").write_text(MINIMAL)
    from_file = ServerArgs.from_file(tmp_path / "server_args.json")
    assert from_file == ServerArgs(**json.loads(MINIMAL))
    runner = ModelRunner(T(), from_file)
    runner.initialize()
    assert log("INFO") == [f"Registered forward hook 'outer_linear_hooks' on outer.{number}" for number in (0, 1)]
    for _ in range(2):
        runner.model(torch.randn(3, 4))
    once = [{"module_type": kind, "tag": "outer-layer", "shape": (3, 4)} for kind in ("Linear", "ReLU")]
    assert [*once, *once] == HOOK_CALLS
    runner.hook_handles.remove()


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


def test_signatures_have_the_parameters_of_the_source(runner):
    """By name and in order; what is ours comes after, by keyword."""
    assert list(inspect.signature(ModelRunner.register_hooks).parameters)[:2] == ["self", "hook_specs"]
    assert list(inspect.signature(hl.register_hooks).parameters)[:2] == ["model", "hook_specs"]
    assert list(inspect.signature(hl.specs.resolve_callable).parameters)[:1] == ["path"]
    assert list(inspect.signature(ModelRunner.initialize).parameters)[:1] == ["self"]
    for function, theirs in ((ModelRunner.register_hooks, 2), (hl.register_hooks, 2), (ModelRunner.initialize, 1)):
        ours = list(inspect.signature(function).parameters.values())[theirs:]
        assert all(one.kind is one.KEYWORD_ONLY for one in ours)
    specs = json.loads(MINIMAL)["hooks"]
    runner.register_hooks(hook_specs=specs)
    hl.register_hooks(runner.model, hook_specs=specs).remove(quiet=True)
    runner.model(torch.randn(3, 4))
    assert len(HOOK_CALLS) == 2


FROM_SHELL = {
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
    args = flags("--model-path", "Qwen/Qwen2-7B-Instruct", "--forward-hooks", json.dumps([FROM_SHELL]))
    assert (args.forward_hooks, args.model_path, args.enable_hooks) == ([FROM_SHELL], "Qwen/Qwen2-7B-Instruct", False)
    model = T()
    with hl.register_hooks(model, args.forward_hooks):
        model(torch.randn(3, 4))
    assert [call["tag"] for call in HOOK_CALLS] == ["cli-hook"] * 4
    runner = ModelRunner(model, args)
    runner.initialize()
    assert len(runner.hook_handles) == 1
    runner.hook_handles.remove(quiet=True)


def test_the_older_names_are_flags_as_well():
    """Off without the switch; nothing given is the settings' own defaults."""
    given = ["--hooks", json.dumps([FROM_SHELL])]
    assert flags(*given).hook_specs() == []
    assert flags("--enable-hooks", *given).hook_specs() == [FROM_SHELL]
    assert flags() == ServerArgs()
    assert (ServerArgs().enable_hooks, ServerArgs().hooks) == (False, None)


def test_a_parser_may_have_flags_of_its_own():
    """They are kept, as all settings are that are not about hooks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype")
    ServerArgs.add_cli_args(parser)
    args = ServerArgs.from_cli_args(parser.parse_args([]))
    assert (args.port, hasattr(args, "dtype")) == (30000, False)


@pytest.mark.parametrize("text", ["{", "", "[1", '{"target_modules": []}', "3", "null"])
def test_what_is_no_json_list_is_refused_in_the_words_of_the_source(text, capsys):
    """By the parser, with its exit code; an object, too."""
    with pytest.raises(SystemExit) as caught:
        flags("--forward-hooks", text)
    assert caught.value.code == 2
    assert f"Invalid JSON list: {text}. Please provide a valid JSON list." in capsys.readouterr().err
