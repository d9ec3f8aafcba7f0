"""Test the hooks of a worker with a stand-in for vLLM's: a small model, a runner and a forward context."""

from __future__ import annotations

import uuid

import pytest
import torch
from helpers_vllm_worker import KEPT, PROMPTS, STATS, Engine, Worker
from torch import nn

from hookline.engines import live_hooks
from hookline.engines.vllm import VllmHooks
from hookline.errors import EngineBusy, HookNameError, NoMatchError, NotAllowedError, OptionError
from hookline.factories import ProbeHead


def test_hooks_come_and_go_on_demand(context):
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    plain = engine.step(PROMPTS)
    assert not context.skip_compiled
    added = hooks.add(STATS)
    assert (added["id"], added["way"]) == ("h1", "on_demand")
    assert torch.equal(engine.step(PROMPTS), plain)
    assert context.skip_compiled
    assert hooks.list()[0]["sites"] == {"layers.0": 1, "layers.1": 1}
    assert hooks.remove("h1")["fired"] == 2
    engine.step(PROMPTS)
    assert not context.skip_compiled
    assert hooks.describe()[0]["eager_steps"] == 1
    with pytest.raises(HookNameError):
        hooks.remove("h1")


def test_workers_agree_on_ids_also_after_errors(context):
    engine = Engine(Worker(context, tp=2), Worker(context, rank=1, tp=2))
    hooks = VllmHooks(engine)
    with pytest.raises(NoMatchError, match="nope"):
        hooks.add({**STATS, "target_modules": ["nope"]})
    with pytest.raises(OptionError, match="no option"):
        hooks.add({**STATS, "config": {"x": 1}})
    assert hooks.add(STATS)["id"] == "h3"
    engine.step(PROMPTS)
    assert hooks.list()[0]["fired_by_rank"] == {"0": 2, "1": 2}


def test_one_worker_that_fails_takes_the_hook_off_the_others(context):
    engine = Engine(Worker(context, tp=2), Worker(context, rank=1, tp=2))
    hooks = VllmHooks(engine)
    engine.workers[1].hookline_add = lambda *args: {"rank": 1, "error": {"type": "OSError", "message": "disk full"}}
    with pytest.raises(OptionError, match="OSError: disk full"):
        hooks.add(STATS)
    assert hooks.list() == []


def test_a_request_gets_its_states_and_its_hooks(context):
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    plain = engine.step(PROMPTS)
    steer = {
        "target_modules": ["layers.1"],
        "hook_factory": "hookline.factories:steer",
        "config": {"vector": [1.0] * 4},
    }
    key = str(uuid.uuid4())
    asked = {"key": key, "hidden_states": {"layers": ["layers.1"]}, "hooks": [steer]}
    first = engine.step(PROMPTS, {"a-00000001": asked, "b-00000002": None})
    assert context.skip_compiled
    assert torch.equal(first[:3], plain[:3] + 1)
    assert torch.equal(first[3:], plain[3:])
    engine.step({"b-00000002": 1, "a-00000001": 1}, computed={"a-00000001": 3, "b-00000002": 2})
    answer = hooks.states(key)
    assert answer.states["layers.1"].positions == [0, 1, 2, 3]
    assert torch.equal(answer.states["layers.1"].values[:3], first[:3])
    assert answer.hooks[0]["rows"] == 4
    engine.step(PROMPTS, finished=["a-00000001"])
    assert not context.skip_compiled
    with pytest.raises(HookNameError):
        hooks.states(key)


def test_a_factory_of_a_user_knows_whose_rows_it_sees(context):
    """Requests by the names of their clients, and where each is in its sequence."""
    engine = Engine(Worker(context, allow=["helpers_vllm_worker"]))
    VllmHooks(engine).add({"target_modules": ["layers.0"], "hook_factory": "helpers_vllm_worker:keep_tokens"})
    KEPT.clear()
    engine.step(PROMPTS, {"a-00000001": None, "b-00000002": None})
    engine.step({"b-00000002": 1, "a-00000001": 1}, computed={"a-00000001": 3, "b-00000002": 2})
    assert [(table.requests, table.lengths, table.firsts, table.phases) for table in KEPT] == [
        (("a", "b"), (3, 2), (0, 0), ("prefill", "prefill")),
        (("b", "a"), (1, 1), (2, 3), ("decode", "decode")),
    ]


def test_a_probe_flags_requests(context):
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    always, never = (ProbeHead([(torch.zeros(1, 4), torch.tensor([bias]))], threshold=0.5) for bias in (5.0, -5.0))
    base = {"target_modules": ["layers.1"], "hook_factory": "hookline.factories:probe"}
    for name, head in (("always", always), ("never", never)):
        config = {"head": head, "name": name, "action": "flag", "requests": ["a"]}
        hooks.add({**base, "config": config})
    engine.step(PROMPTS, {"a-00000001": {"hidden_states": {"layers": ["layers.0"]}}, "b-00000002": {}})
    engine.step({"a-00000001": 1, "b-00000002": 1}, computed={"a-00000001": 3, "b-00000002": 2})
    (flag,) = hooks.states("a").flags
    assert (flag["probe"], flag["tokens"], flag["position"]) == ("always", 4, 0)
    assert hooks.states("b").flags == []


class ParallelLMHead(nn.Linear):
    """vLLM's has this name, and is never called."""


def test_a_hook_on_a_module_that_vllm_never_calls_is_refused(context):
    """It would be silent for ever; beside modules that are called it is told as silent."""
    worker = Worker(context)
    worker.get_model().lm_head = ParallelLMHead(4, 4)
    engine = Engine(worker)
    hooks = VllmHooks(engine)
    head = {**STATS, "target_modules": ["lm_head"]}
    with pytest.raises(OptionError, match=r"never fire.*logits_processor"):
        hooks.add(head)
    assert hooks.list() == []
    engine.step({"a-00000001": 3}, {"a-00000001": {"hooks": [head]}})
    with pytest.raises(OptionError, match="never fire"):
        hooks.states("a")
    hooks.add({**STATS, "target_modules": ["lm_head", "layers.0"]})
    engine.step({"b-00000002": 2})
    assert list(hooks.list()[0]["silent"]) == ["lm_head"]


def test_what_token_holders_may_name_is_not_for_requests(context):
    spec = {"target_modules": ["layers.0"], "hook_factory": f"{__name__}:counts_nothing"}
    for options, refused in (({"allow": [__name__]}, True), ({"allow_requests": [__name__]}, False)):
        engine = Engine(Worker(context, **options))
        engine.step({"a-00000001": 3}, {"a-00000001": {"hooks": [spec]}})
        engine.step({}, finished=["a-00000001"])
        if refused:
            with pytest.raises(NotAllowedError, match="may not name"):
                VllmHooks(engine).states("a")
        else:
            assert VllmHooks(engine).states("a").hooks[0]["rows"] == 3


def counts_nothing(config):
    return lambda module, args, output: None


def test_hooks_times_modules_of_running_requests_are_bounded(context, monkeypatch):
    """Each answer is a request of its own here: what counts is what runs together."""
    monkeypatch.setattr(live_hooks, "MOST_PLACES", 200)
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    asked = {"hooks": [STATS] * 64}  # on two modules
    engine.step(PROMPTS, dict.fromkeys(PROMPTS, asked))
    assert len(hooks.states("a").hooks) == 64
    with pytest.raises(EngineBusy, match="256 modules"):
        hooks.states("b")
    engine.step({}, finished=list(PROMPTS))
    engine.step({"b-00000002": 2}, {"b-00000002": asked})
    assert len(hooks.states("b").hooks) == 64


def test_wrong_options_of_a_request_harm_nobody(context):
    engine = Engine(Worker(context))
    hooks = VllmHooks(engine)
    plain = engine.step(PROMPTS)
    bad = {"hidden_states": {"layers": ["layers.0"]}, "hooks": [{"target_modules": ["x"], "hook_factory": "os:system"}]}
    assert torch.equal(engine.step(PROMPTS, {"a-00000001": bad, "b-00000002": "{"}), plain)
    for key, text in (("a", "os:system"), ("b", "JSON")):
        with pytest.raises(PermissionError if key == "a" else OptionError, match=text):
            hooks.states(key)


def test_hooks_of_the_start_wait_for_the_warm_up(context, tmp_path):
    file = tmp_path / "hooks.json"
    file.write_text('[{"target_modules": ["layers.#"], "hook_factory": "hookline.factories:activation_stats"}]')
    worker = Worker(context, hooks=str(file))
    assert worker.load_model() == "loaded"
    engine = Engine(worker)
    hooks = VllmHooks(engine)
    assert hooks.list() == []
    assert worker.compile_or_warm_up_model() == "warm"
    assert [(each["way"], each["fired"]) for each in hooks.list()] == [("on_demand", 0)]
    engine.step(PROMPTS)
    assert context.skip_compiled
    assert hooks.list()[0]["fired"] == 2
    assert hooks.metrics()["h1"]["layers.0/max"] < 1e5  # nothing of the warm-up
    hooks.remove("h1")
    assert not worker.get_model().layers[0]._forward_hooks
    hooks.add(STATS)
    assert worker.shutdown() == "down"
    assert hooks.list() == []
