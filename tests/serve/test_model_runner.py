"""`ServerArgs` and `ModelRunner`: hooks from the settings of a server, on a model that is loaded."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
import types

import pytest
import torch
from helpers_training import differences, plain_step, train
from helpers_waiting import PATIENCE
from torch import nn

import hookline as hl
from hookline.sglang.model_runner import ModelRunner
from hookline.sglang.server_args import ServerArgs
from hookline.testing.model_hooks import HOOK_CALLS, dummy_hook_factory

FACTORY = "hookline.testing.model_hooks:dummy_hook_factory"
LINE = "enable_hooks=True but no 'hooks' specified in server_args"


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def spec(*patterns: str, tag: str = "t", **more):
    return {"name": tag, "target_modules": list(patterns), "hook_factory": FACTORY, "config": {"tag": tag}, **more}


def calls(model: nn.Module) -> list[str]:
    """What the hooks of one forward wrote down."""
    HOOK_CALLS.clear()
    model(torch.ones(3, 4))
    return [call["tag"] for call in HOOK_CALLS]


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "hookline")
    return lambda level: [record.getMessage() for record in caplog.records if record.levelname == level]


# -- the settings ----------------------------------------------------------------------------------------------


def test_hooks_are_off_unless_they_are_enabled():
    """The defaults of SGLang's server."""
    args = ServerArgs()
    assert (args.enable_hooks, args.hooks, args.forward_hooks, args.others) == (False, None, None, {})
    assert ServerArgs(hooks=[spec("0")]).hook_specs() == []
    assert ServerArgs(enable_hooks=True, hooks=[spec("0")]).hook_specs() == [spec("0")]


def test_forward_hooks_need_no_switch_and_come_after():
    """The newer spelling; an empty list is none."""
    args = ServerArgs(enable_hooks=True, hooks=[spec("0")], forward_hooks=[spec("1")])
    assert args.hook_specs() == [spec("0"), spec("1")]
    assert ServerArgs(hooks=[spec("0")], forward_hooks=[spec("1")]).hook_specs() == [spec("1")]
    assert ServerArgs(forward_hooks=[]).hook_specs() == []


def test_other_settings_are_kept_and_found():
    """A real server has more, called whatever it likes."""
    args = ServerArgs.from_dict({"model_path": "m", "port": 3, "self": 1, "hook_specs": 2, "enable_hooks": None})
    assert (args.model_path, args.port, args.enable_hooks) == ("m", 3, False)
    assert args.others == {"model_path": "m", "port": 3, "self": 1, "hook_specs": 2}
    assert args.hook_specs() == []  # the method
    with pytest.raises(AttributeError, match="have no 'prt'"):
        args.prt


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_hooks": "false"}, "enable_hooks is true or false, got 'false'."),
        ({"hooks": {"name": "x"}}, "hooks is a list of hook specs, got a dict; write [spec]."),
        ({"hooks": "[]"}, "hooks is a list of hook specs, got a str; write [spec]."),
        ({"forward_hooks": 3}, "forward_hooks is a list of hook specs, got an int; write [spec]."),
    ],
)
def test_settings_that_cannot_be_are_refused_when_they_are_made(given, said):
    """Not when the server is up."""
    with pytest.raises(hl.errors.OptionError) as caught:
        ServerArgs(**given)
    assert str(caught.value) == said


def test_settings_are_an_object():
    """Not a list, not text."""
    with pytest.raises(hl.errors.OptionError, match="are an object with keys, got a list"):
        ServerArgs.from_dict([spec("0")])


def test_a_slip_of_the_pen_is_told_and_kept(log):
    """It could be a setting of the server's."""
    assert ServerArgs(enable_hook=True).enable_hook is True
    assert log("WARNING") == ["server_args has 'enable_hook', which is not about hooks; did you mean 'enable_hooks'?"]
    ServerArgs(enable_lora=True, hook_port=3, enable_metrics=True, model_path="x")
    assert len(log("WARNING")) == 1


def test_settings_can_be_compared_copied_and_printed():
    """As the dataclass that they are elsewhere."""
    args = ServerArgs(enable_hooks=True, hooks=[spec("0")], port=3)
    assert args == copy.deepcopy(args) == pickle.loads(pickle.dumps(args)) == eval(repr(args))
    assert args != ServerArgs(enable_hooks=True, hooks=[spec("0")], port=4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.json", f'{{// hooks\n"enable_hooks": true, "port": 3, "hooks": [{json.dumps(spec("0"))},]}}'),
        ("s.yaml", f"enable_hooks: true\nport: 3\nhooks:\n- {json.dumps(spec('0'))}\n"),
        (
            "s.toml",
            "enable_hooks = true\nport = 3\n[[hooks]]\nname = 't'\ntarget_modules = ['0']\n"
            f"hook_factory = '{FACTORY}'\nconfig.tag = 't'\n",
        ),
    ],
)
def test_they_are_read_from_three_languages(tmp_path, name, text):
    """To the same settings."""
    (tmp_path / name).write_text(text)
    assert ServerArgs.from_file(tmp_path / name) == ServerArgs(enable_hooks=True, hooks=[spec("0")], port=3)


def test_a_mistake_in_a_file_has_its_line(tmp_path):
    """The file is refused whole."""
    (tmp_path / "s.json").write_text('{"hooks": [\n{"nme": "x"}]}')
    with pytest.raises(hl.errors.ConfigError, match=r"s\.json, line 2, at \$\.hooks\[0\]\.nme: .* Did you mean 'name'"):
        ServerArgs.from_file(tmp_path / "s.json")


# -- the runner ------------------------------------------------------------------------------------------------


def test_initialize_attaches_once(log):
    """Called again it does nothing, also when the hooks are off again."""
    runner = ModelRunner(small(), ServerArgs(enable_hooks=True, hooks=[spec("0", "1")]))
    assert calls(runner.model) == []
    runner.initialize()
    runner.initialize()
    assert calls(runner.model) == ["t", "t"]
    assert log("INFO") == ["Registered forward hook 't' on 0", "Registered forward hook 't' on 1"]
    runner.hook_handles.remove()
    runner.hook_handles.remove()
    runner.initialize()
    assert calls(runner.model) == []
    hl.assert_no_hooks(runner.model, foreign=True)


@pytest.mark.parametrize("hooks", [None, []])
def test_enabled_and_nothing_to_attach_is_one_line(log, hooks):
    """Word for word, and the model works."""
    runner = ModelRunner(small(), ServerArgs(enable_hooks=True, hooks=hooks))
    runner.initialize()
    runner.initialize()
    assert log("WARNING") == [LINE]
    assert calls(runner.model) == []
    assert len(runner.hook_handles) == 0


@pytest.mark.parametrize("args", [None, ServerArgs(), ServerArgs(hooks=[spec("0")]), ServerArgs(forward_hooks=[]), {}])
def test_what_is_off_is_off_without_a_word(log, args):
    """No settings, no hooks, hooks that are not enabled."""
    runner = ModelRunner(small(), args)
    runner.initialize()
    hl.assert_no_hooks(runner.model, foreign=True)
    assert log("WARNING") == log("INFO") == []


@pytest.mark.parametrize(
    "args",
    [
        {"enable_hooks": True, "hooks": [spec("0")], "port": 3},
        {"forward_hooks": [spec("0")]},
        types.SimpleNamespace(enable_hooks=True, hooks=[spec("0")], tp_size=1),
        types.SimpleNamespace(forward_hooks=[spec("0")], model_path="x"),
    ],
)
def test_settings_may_be_a_dictionary_or_somebody_elses_object(args):
    """Whatever has the fields of the source, old or new."""
    runner = ModelRunner(small(), args)
    runner.initialize()
    assert calls(runner.model) == ["t"]
    runner.hook_handles.remove()


def test_hooks_can_be_registered_beside_the_settings():
    """Each call has its own handles; the runner has all of them."""
    runner = ModelRunner(small(), ServerArgs(forward_hooks=[spec("0", tag="a")]))
    runner.initialize()
    more = runner.register_hooks([spec("1", tag="b"), spec("2", tag="c")])
    assert calls(runner.model) == ["a", "b", "c"]
    assert (len(more), len(runner.hook_handles)) == (2, 3)
    more.remove()
    assert calls(runner.model) == ["a"]
    assert [receipt.fired for receipt in runner.hook_handles.report()] == [2, 1, 1]
    runner.hook_handles.remove()
    assert calls(runner.model) == []


def test_closing_takes_hooks_off_and_has_them_write():
    """In that order; removing alone leaves them as they are."""
    closed = []

    class Hook:
        def __call__(self, module, inputs, output):
            pass

        def close(self):
            closed.append(len(hl.attached(runner.model)))

    runner = ModelRunner(
        small(), ServerArgs(forward_hooks=[{"target_modules": ["0"], "hook_factory": lambda c: Hook()}])
    )
    runner.initialize()
    runner.register_hooks([spec("1")])
    assert calls(runner.model) == ["t"]
    runner.hook_handles.remove()
    assert closed == []
    runner.close()
    assert closed == [0]  # when nothing could be shown to it any more
    hl.assert_no_hooks(runner.model, foreign=True)


def test_what_came_off_is_let_go_but_for_what_has_yet_to_write():
    """A server attaches and removes for weeks: neither handles nor hooks pile up."""

    class Hook:
        closed = 0

        def __call__(self, module, inputs, output):
            pass

        def close(self):
            self.closed += 1

    writes = Hook()
    runner = ModelRunner(small())
    runner.register_hooks([{"target_modules": ["0"], "hook_factory": lambda c: writes, "every": 2}]).remove(quiet=True)
    for _ in range(20):
        runner.register_hooks([spec("1")]).remove(quiet=True)
    assert len(runner.hook_handles) == 2  # the one that writes, and the last
    runner.close()
    assert writes.closed == 1
    assert len(runner.hook_handles.report()) == 2  # receipts can still be read
    on = runner.register_hooks([spec("2")])
    assert list(runner.hook_handles) == list(on)
    on.remove(quiet=True)


def test_settings_that_fail_attach_nothing_and_may_be_mended():
    """All or nothing; then the second try counts."""
    args = ServerArgs(enable_hooks=True, hooks=[spec("0"), spec("1", hook_factory="no_such_package:f")])
    runner = ModelRunner(small(), args)
    with pytest.raises(ModuleNotFoundError):
        runner.initialize()
    hl.assert_no_hooks(runner.model, foreign=True)
    assert len(runner.hook_handles) == 0
    args.hooks[1]["hook_factory"] = FACTORY
    runner.initialize()
    assert calls(runner.model) == ["t", "t"]
    runner.hook_handles.remove()


def test_strict_and_allow_are_handed_on(log):
    """To the start, and to later calls."""
    runner = ModelRunner(small(), ServerArgs(forward_hooks=[spec("nowhere.*")]))
    with pytest.raises(hl.errors.NoMatchError):
        runner.initialize(strict=True)
    with pytest.raises(hl.errors.NotAllowedError):
        runner.initialize(allow=["my_project"])
    with pytest.raises(hl.errors.NotAllowedError):
        runner.register_hooks([spec("0")], allow=[])
    with pytest.raises(hl.errors.NoMatchError):
        runner.register_hooks([spec("nowhere")], strict=True)
    runner.initialize(allow=["hookline.testing"])
    assert log("WARNING") == ["No modules matched hook spec 't' patterns=['nowhere.*']"]


def test_the_factory_for_tests_writes_down_what_it_saw():
    """Type, tag and shape; an output without a shape has none."""
    HOOK_CALLS.clear()
    hook = dummy_hook_factory({})
    assert hook(nn.ReLU(), (), "out") == "out"
    assert HOOK_CALLS == [{"module_type": "ReLU", "tag": "default", "shape": None}]


def test_a_run_with_a_runners_hooks_is_the_same_to_the_last_bit():
    """Dropout, BatchNorm, AdamW; the hook returns the output that it got."""

    def hooked(model, x, target):
        runner = ModelRunner(model, ServerArgs(forward_hooks=[spec("*")]))
        runner.initialize()
        plain_step(model, x, target)
        runner.hook_handles.remove()

    HOOK_CALLS.clear()
    assert differences(train(plain_step), train(hooked)) == []
    assert len(HOOK_CALLS) >= 20


def test_a_runners_edit_does_change_the_run():
    """The control."""

    def edited(model, x, target):
        edit = {"target_modules": ["0"], "hook_factory": lambda config: lambda module, inputs, output: output * 1.001}
        runner = ModelRunner(model, ServerArgs(forward_hooks=[edit]))
        runner.initialize()
        plain_step(model, x, target)
        runner.hook_handles.remove()

    assert "weight 0.weight" in differences(train(plain_step), train(edited))


ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"fastapi", "uvicorn", "transformers", "orjson"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import hookline as hl
from hookline.sglang.server_args import ServerArgs
args = ServerArgs.from_file(sys.argv[1])
assert "torch" not in sys.modules
try:
    ServerArgs.from_file(sys.argv[2])
except hl.errors.ConfigError as error:
    assert "line 2, at $.hooks[0].nme" in str(error), error
else:
    raise SystemExit("read it")
from torch import nn
import torch
from hookline.sglang.model_runner import ModelRunner
from hookline.testing.model_hooks import HOOK_CALLS
runner = ModelRunner(nn.Sequential(nn.Linear(4, 4)), args)
runner.initialize()
runner.model(torch.ones(3, 4))
print([call["tag"] for call in HOOK_CALLS])
try:
    import fastapi
except ImportError:
    print("absent")
"""


def test_neither_needs_what_a_bare_machine_has_not(tmp_path):
    """Nothing of the serve extra; and settings are read without torch."""
    right, wrong = tmp_path / "right.yaml", tmp_path / "wrong.json"
    right.write_text(json.dumps({"enable_hooks": True, "hooks": [spec("0")]}))
    wrong.write_text('{"hooks": [\n{"nme": "x"}]}')
    command = [sys.executable, "-c", ABSENT, str(right), str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['t']\nabsent\n"
