"""Test what a request cannot do in a worker of vLLM: touch another one, stop the engine, or stay in its memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers_vllm_worker import PROMPTS, STATS, Engine, Worker
from torch import nn

from hookline.engines.vllm import VllmHooks, worker_hooks
from hookline.errors import HookNameError, OptionError
from hookline.factories import ProbeHead

STEER = {
    "target_modules": ["layers.1"],
    "hook_factory": "hookline.factories:steer",
    "config": {"vector": [1.0] * 4},
}
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
    bad = {**STEER, "target_modules": ["tail"], "config": {"vector": [1.0] * 7}, "on_error": on_error}
    assert torch.equal(engine.step(BOTH, {"a-00000001": {"hooks": [bad]}, "b-00000002": None}), plain)
    if on_error == "raise":
        with pytest.raises(OptionError, match="on_error"):
            hooks.states("a")
        answer = engine.workers[0].hookline_add([bad], ["hookline.factories"])  # as it comes over HTTP
        assert "on_error" in answer["error"]["message"]
    else:
        assert hooks.states("a").hooks[0]["errors"] == 1


def test_a_vector_or_a_probe_of_another_length_is_refused_when_it_is_attached(context):
    """On every rank, in a file of the start and over HTTP, before a request meets it; also one of a request."""
    engine = Engine(Worker(context, tp=2), Worker(context, rank=1, tp=2))
    hooks = VllmHooks(engine)
    plain = engine.step(BOTH)
    probe = {"head": ProbeHead([(torch.zeros(1, 3), torch.zeros(1))]).to_plain()}
    wrong = {
        "steer": {**STEER, "config": {"vector": [1.0] * 7}},
        "probe": {"target_modules": ["layers.#"], "hook_factory": "hookline.factories:probe", "config": probe},
    }
    for name, spec in wrong.items():
        words = rf"{name} was given what is for \d numbers, and the output of layers\.\d has 4 for each token"
        with pytest.raises(OptionError, match=words):
            hooks.add(spec)
        assert not hooks.list()
        assert torch.equal(engine.step(BOTH, {"a-00000001": {"hooks": [spec]}, "b-00000002": None}), plain)
        with pytest.raises(OptionError, match=words):
            hooks.states("a")
        engine.step({}, finished=list(BOTH))
    assert hooks.add({**STEER, "config": {"vector": [1.0] * 4}})["matched"] == ["layers.1"]  # negative control


def probe(**config):
    head = ProbeHead([(torch.zeros(1, 4), torch.tensor([5.0]))], threshold=0.5)
    spec = {"target_modules": ["layers.1"], "hook_factory": "hookline.factories:probe"}
    return {**spec, "config": {"head": head, "name": "p", "action": "flag", **config}}


def test_flags_are_of_one_request_though_its_name_comes_again(context, monkeypatch):
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    added = hooks.add(probe())
    engine.step(BOTH, dict.fromkeys(BOTH))
    engine.step({}, finished=list(BOTH))
    later = {"a-00000003": 1, "b-00000004": 1}
    for name in later:
        monkeypatch.setitem(PROMPTS, name, 1)
    engine.step(later, dict.fromkeys(later))
    hooks.remove(added["id"])
    (flag,) = hooks.flags("a")
    assert (flag["tokens"], flag["stopped"]) == (1, False)
    engine.step({}, finished=list(later))
    engine.step(BOTH, dict.fromkeys(BOTH))  # negative control: nothing is flagged in these
    assert hooks.flags("b") == []


def test_flags_come_from_all_workers(context):
    engine = Engine(Worker(context), Worker(context, rank=1))
    hooks = VllmHooks(engine)
    engine.workers[1].get_model().layers.append(nn.Identity())  # a layer of a later pipeline stage
    engine.workers[1].get_model().layers.append(nn.Identity())
    hooks.add({**probe(), "target_modules": ["layers.3"]})
    hooks.add(probe(name="q"))
    asked = {"hidden_states": {"layers": ["layers.0"]}}
    engine.step(BOTH, {"a-00000001": asked, "b-00000002": None})
    expected = [("q", "layers.1"), ("p", "layers.3")]
    for flags, tokens in ((hooks.states("a").flags, 3), (hooks.flags("b"), 2)):
        assert sorted((each["probe"], each["module"], each["tokens"]) for each in flags) == sorted(
            (*place, tokens) for place in expected
        )


def test_a_step_whose_rows_cannot_be_read_fails_the_states_of_running_requests(context, monkeypatch):
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    asked = {"hidden_states": {"layers": ["layers.0"]}}
    engine.step(BOTH, {"a-00000001": asked, "b-00000002": None})

    def fail(*args):
        raise RuntimeError("moved")

    with monkeypatch.context() as patch:
        patch.setattr(worker_hooks, "tokens_of_step", fail)
        engine.step({"a-00000001": 1}, computed={"a-00000001": 3})
    engine.step({"a-00000001": 1}, computed={"a-00000001": 4})
    assert not context.skip_compiled  # nobody waits for states any more
    with pytest.raises(OptionError, match="moved"):
        hooks.states("a")


def ends(eos=1, stop=(), every=()):
    params = SimpleNamespace(eos_token_id=eos, stop_token_ids=list(stop), all_stop_token_ids=set(every))
    return SimpleNamespace(sampling_params=params)


@pytest.mark.parametrize(
    ("request_state", "token"), [(ends(), 1), (ends(None, [9, 2]), 9), (ends(None, (), {4}), 4), (ends(None), 0)]
)
@pytest.mark.parametrize("own", [False, True])
def test_a_probe_that_stops_ends_the_answer_of_its_request_alone(context, request_state, token, own):
    engine = Engine(Worker(context))
    hooks, runner = VllmHooks(engine), engine.workers[0].model_runner
    runner.requests = dict.fromkeys(BOTH, request_state)
    head = ProbeHead([(torch.zeros(1, 4), torch.tensor([5.0]))], threshold=0.5)
    spec = probe(action="stop", head=head.to_plain())  # data alone, as it comes over HTTP
    if own:
        options = {"a-00000001": {"hooks": [spec]}, "b-00000002": None}
    else:
        hooks.add({**spec, "config": {**spec["config"], "requests": ["a"]}})
        options = dict.fromkeys(BOTH)
    engine.step(BOTH, options)
    sampled = [runner.sampled.sampled_token_ids.flatten().tolist()]
    assert runner.sampled.logprobs_tensors.logprob_token_ids[:, 0].tolist() == sampled[0]
    assert runner.sampled.logprobs_tensors.logprobs[:, 0].tolist() == [0.0, -2.0]
    engine.step({"b-00000002": 1, "a-00000001": 1})  # it was a piece of a prompt, say: what was sampled did not count
    sampled.append(runner.sampled.sampled_token_ids.flatten().tolist())
    assert sampled == [[token, 7], [7, token]]
    (flag,) = hooks.states("a").flags if own else hooks.flags("a")
    assert (flag["stopped"], flag["tokens"]) == (True, 4)
    assert hooks.flags("b") == []
    engine.step({"b-00000002": 1}, finished=["a-00000001"])
    assert not engine.workers[0].__dict__["_hookline_hooks"].ends._ids


@pytest.mark.parametrize("kind", ["sampler", "drafts", "stages"])
def test_an_engine_that_cannot_end_answers_refuses_to_stop(context, kind):
    worker = Worker(context)
    if kind == "sampler":
        worker.model_runner.sampler = None
    elif kind == "drafts":
        worker.vllm_config.speculative_config = object()
    else:
        worker.vllm_config.parallel_config.pipeline_parallel_size = 2
    hooks = VllmHooks(Engine(worker))
    with pytest.raises(OptionError, match=r"action='stop' cannot end an answer.*action='flag'"):
        hooks.add(probe(action="stop"))
    if kind != "sampler":
        Engine(worker).step(BOTH, {"a-00000001": {"hooks": [probe(action="stop")]}, "b-00000002": None})
        with pytest.raises(OptionError, match="cannot end an answer"):
            hooks.states("a")
    assert hooks.list() == []
    hooks.add(probe())
