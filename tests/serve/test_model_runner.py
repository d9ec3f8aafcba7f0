"""`ServerArgs` and `ModelRunner`: hooks from the settings of a server, on a model that is loaded."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.sglang.model_runner import ModelRunner
from hookline.sglang.server_args import ServerArgs
from hookline.testing.model_hooks import HOOK_CALLS

FACTORY = "hookline.testing.model_hooks:dummy_hook_factory"


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
