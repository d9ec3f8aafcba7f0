"""Test what a request cannot do in a worker of vLLM: touch another one, stop the engine, or stay in its memory."""

from __future__ import annotations

import pytest
import torch
from helpers_vllm_worker import PROMPTS, STATS, Engine, Worker

from hookline.engines.vllm import VllmHooks, extension
from hookline.errors import HookNameError, OptionError
from hookline.factories import ProbeHead

STEER = {"target_modules": ["layers.1"], "hook_factory": "hookline.factories:steer", "config": {"vector": [1.0] * 4}}
BOTH = {"a-00000001": 3, "b-00000002": 2}


def test_a_hook_of_a_request_is_for_its_rows_whatever_it_is_called(context, monkeypatch):
    """Two of one name: each has hooks and results of its own."""
    monkeypatch.setitem(PROMPTS, "a-00000009", 2)
    both = {"a-00000001": 3, "a-00000009": 2}
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    plain = engine.step(both)
    asked = {"hooks": [STEER, {**STATS, "target_modules": ["layers.0"]}]}
    changed = engine.step(both, {"a-00000001": None, "a-00000009": asked}) != plain
    assert changed.any(1).tolist() == [False, False, False, True, True]
    with pytest.raises(HookNameError):
        hooks.states("a")
    assert [each["rows"] for each in hooks.states("a-00000009").hooks] == [2, 2]


@pytest.mark.parametrize("on_error", ["raise", "disable", "warn"])
def test_a_client_cannot_stop_the_engine(context, on_error):
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    plain = engine.step(BOTH)
    bad = {**STEER, "config": {"vector": [1.0] * 7}, "on_error": on_error}
    assert torch.equal(engine.step(BOTH, {"a-00000001": {"hooks": [bad]}, "b-00000002": None}), plain)
    if on_error == "raise":
        with pytest.raises(OptionError, match="on_error"):
            hooks.states("a")
        answer = engine.workers[0].hookline_add([bad], ["hookline.factories"])  # as it comes over HTTP
        assert "on_error" in answer["error"]["message"]
    else:
        assert hooks.states("a").hooks[0]["errors"] == 1


def probe(**config):
    head = ProbeHead([(torch.zeros(1, 4), torch.tensor([5.0]))], threshold=0.5)
    spec = {"target_modules": ["layers.1"], "hook_factory": "hookline.factories:probe"}
    return {**spec, "config": {"head": head, "name": "p", "action": "flag", **config}}


def test_flags_are_of_one_request_though_its_name_comes_again(context, monkeypatch):
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    added = hooks.add(probe())
    engine.step(BOTH, {key: {} for key in BOTH})
    engine.step({}, finished=list(BOTH))
    later = {"a-00000003": 1, "b-00000004": 1}
    for name in later:
        monkeypatch.setitem(PROMPTS, name, 1)
    engine.step(later, {key: {} for key in later})
    hooks.remove(added["id"])
    (flag,) = hooks.states("a").flags
    assert (flag["tokens"], flag["stopped"]) == (1, False)
    engine.step({}, finished=list(later))
    engine.step(BOTH, {key: {} for key in BOTH})  # negative control: nothing is flagged in these
    assert hooks.states("b").flags == []


def test_a_step_whose_rows_cannot_be_read_fails_the_states_of_running_requests(context, monkeypatch):
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    asked = {"hidden_states": {"layers": ["layers.0"]}}
    engine.step(BOTH, {"a-00000001": asked, "b-00000002": None})

    def fail(*args):
        raise RuntimeError("moved")

    with monkeypatch.context() as patch:
        patch.setattr(extension, "tokens_of_step", fail)
        engine.step({"a-00000001": 1}, computed={"a-00000001": 3})
    engine.step({"a-00000001": 1}, computed={"a-00000001": 4})
    assert not context.skip_compiled  # nobody waits for states any more
    with pytest.raises(OptionError, match="moved"):
        hooks.states("a")


def test_a_probe_that_is_to_stop_is_refused(context):
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    with pytest.raises(OptionError, match=r"action='stop' ends no answer.*action='flag'"):
        hooks.add(probe(action="stop"))
    assert hooks.list() == []
    engine.step(BOTH, {"a-00000001": {"hooks": [probe(action="stop")]}, "b-00000002": None})
    with pytest.raises(OptionError, match="ends no answer"):
        hooks.states("a")
