"""The engine: answers are the model's own whoever shares the batch, and every request hears of its end once."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers_serve import alone, ask, prompts, small_model, started
from helpers_waiting import PATIENCE, until

from hookline.engines.request_options import StatesWanted
from hookline.errors import OptionError
from hookline.serve.generation_request import Finished, GenerationRequest, Token
from hookline.serve.serving_engine import Engine

# -- answers -------------------------------------------------------------------------------------------------


def test_greedy_answers_are_those_of_generate_whatever_shares_the_batch(tiny, engine) -> None:
    """Twelve prompts of different lengths, that join and leave at different moments: token for token as alone."""
    model, _ = tiny
    asked = []
    for index, prompt in enumerate(prompts(12)):
        asked.append((prompt, 4 + 5 * index, ask(engine, prompt, max_tokens=4 + 5 * index, ignore_eos=False)))
        if index % 3 == 2:
            until(lambda: len(asked[-1][2].tokens) >= 2)  # the others are in the middle of theirs
    for prompt, count, answer in asked:
        answer.wait()
        assert answer.ids == alone(model, prompt, count, ignore_eos=False)
        assert answer.finished.prompt_tokens == len(prompt)
        assert answer.finished.completion_tokens == len(answer.ids)
    assert engine.counts()["decode_forwards"] < sum(count for _, count, _ in asked) / 2, "they did not share batches"


def _gpt2():
    from transformers import GPT2LMHeadModel

    return small_model("GPT2", GPT2LMHeadModel)


def _windowed(kind, **options):
    return small_model(kind, num_hidden_layers=3, num_key_value_heads=2, sliding_window=8, **options)


@pytest.mark.parametrize(
    "make",
    [_gpt2, lambda: _windowed("Mistral"), lambda: _windowed("Gemma2", head_dim=8)],
    ids=["learned positions", "sliding window", "every other layer with a window"],
)
def test_other_architectures_answer_as_alone(make) -> None:
    """Learned positions, and windows of 8 columns in sequences of up to 60."""
    model = make()
    engine = started(model)
    asked = [(each, ask(engine, each, max_tokens=36)) for each in prompts(5, vocabulary=99)]
    until(lambda: len(asked[0][1].tokens) > 10)
    late = prompts(2, seed=1, vocabulary=99)
    asked += [(each, ask(engine, each, max_tokens=20)) for each in late]
    answers = [(prompt, answer.wait().ids) for prompt, answer in asked]
    engine.close()
    for prompt, ids in answers:
        assert ids == alone(model, prompt, len(ids))


def test_a_model_that_padding_confuses_is_refused_for_batches() -> None:
    """Positions that are counted from the first column, padding or not: alone it can be served."""
    from transformers import GPT2LMHeadModel

    class Confused(GPT2LMHeadModel):
        def forward(self, input_ids=None, attention_mask=None, past_key_values=None, use_cache=None):
            past = past_key_values.get_seq_length()
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=torch.arange(past, past + input_ids.shape[1]).unsqueeze(0),
                use_cache=use_cache,
            )

    model = small_model("GPT2", Confused)
    with pytest.raises(OptionError, match=r"Confused gives .* padded batch, .*--max-batch 1"):
        Engine(model)
    engine = started(model, max_batch=1)
    both = [ask(engine, (5, 6, 7), max_tokens=5), ask(engine, (8,), max_tokens=4)]
    assert [len(each.wait().ids) for each in both] == [5, 4]
    engine.close()


def test_models_that_cannot_be_served_are_refused_when_the_engine_is_made() -> None:
    """No causal model, one that keeps something else than keys and values, one in training mode; odd limits."""
    from transformers import JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM

    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2}
    with pytest.raises(OptionError, match="got a Linear"):
        Engine(torch.nn.Linear(2, 2).eval())
    with pytest.raises(OptionError, match="takes no past_key_values"):
        Engine(MambaForCausalLM(MambaConfig(**small)).eval())
    hybrid = JambaConfig(**small, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, num_experts=2)
    with pytest.raises(OptionError, match="JambaForCausalLM cannot be served: it fails on a few tokens"):
        Engine(JambaForCausalLM(hybrid).eval())
    model = _gpt2()
    with pytest.raises(OptionError, match=r"call model.eval\(\)"):
        Engine(model.train())
    model.eval()
    for options, says in [
        ({"max_batch": 0}, "max_batch and max_sequence are at least 1"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_sequence": 97}, "says that it has 96 positions"),
        ({"max_sequence": 0}, "max_sequence are at least 1"),
    ]:
        with pytest.raises(OptionError, match=says):
            Engine(model, **options)


# -- limits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_ids": ()}, "at least 1"),
        ({"prompt_ids": tuple(range(3, 300))}, "together 313; this model takes 256"),
        ({"max_tokens": 254}, "together 257"),
        ({"max_tokens": True}, "max_tokens"),
        ({"prompt_ids": (5, 384)}, "Token 384 is not in the model's vocabulary"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": ("",)}, "stop"),
        ({"states": {"layers": ()}}, "at least 1"),
        ({"states": {"layers": ("model.layers.0",), "positions": "some"}}, "'all' or 'last'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_runs(engine, options, says) -> None:
    """Each with a message that says what was asked and what there is."""

    def submit() -> None:
        wanted = {"states": StatesWanted(**options["states"])} if "states" in options else {}
        engine.submit(GenerationRequest(**({"id": "r", "prompt_ids": (5, 6, 7)} | options | wanted)), print)

    with pytest.raises(OptionError, match=says):
        submit()
    assert engine.counts()["requests_accepted"] == 0


# -- coming and going ----------------------------------------------------------------------------------------


def test_a_listener_that_raises_costs_itself_alone(tiny, engine, caplog) -> None:
    """It is logged and cancelled; the other gets all of its tokens."""

    def listen(event: Token | Finished) -> None:
        raise RuntimeError("no ear")

    good = ask(engine, (5, 6), max_tokens=30)
    engine.submit(GenerationRequest("bad", (5, 6), max_tokens=200, ignore_eos=True), listen)
    assert len(good.wait().tokens) == 30
    until(lambda: engine.counts()["requests_cancelled"] == 1)
    assert "listener of request 'bad' raised" in caplog.text


def test_acts_are_done_between_forwards_and_their_errors_come_back(tiny, engine) -> None:
    """On the engine's thread while it runs; at once before it starts and after it has closed."""
    model, _ = tiny
    running = []
    handle = model.register_forward_pre_hook(lambda *_: running.append(1))
    after = model.register_forward_hook(lambda *_: running.pop() and None)
    with handle, after:
        answer = ask(engine, (5,), max_tokens=60)
        seen = [
            engine.between(lambda: (len(running), threading.current_thread().name)).result(PATIENCE) for _ in range(20)
        ]
        answer.wait()
    assert set(seen) == {(0, "hookline-engine")}
    with pytest.raises(ZeroDivisionError):
        engine.between(lambda: 1 // 0).result(PATIENCE)
    assert engine.between(lambda: engine.between(lambda: 5).result(1)).result(PATIENCE) == 5
    idle = Engine(*tiny)
    assert idle.between(threading.current_thread).result(0) is threading.current_thread()
    engine.close()
    assert engine.between(threading.current_thread).result(0) is threading.current_thread()


def test_closing_cancels_what_takes_too_long(tiny) -> None:
    """With no time to drain, everybody hears of an end at once."""
    engine = started(*tiny, max_batch=1)
    asked = [ask(engine, (5,), max_tokens=200) for _ in range(3)]
    until(lambda: asked[0].tokens)
    engine.close(0.0)
    assert [each.wait(0).finished.reason for each in asked] == ["cancelled"] * 3


def test_an_error_in_a_forward_fails_that_batch_alone(tiny, engine, caplog) -> None:
    """Whoever was in it is told what happened; the next request is answered."""
    model, _ = tiny

    def breaks(module, args):
        raise RuntimeError("a kernel broke")

    first = ask(engine, (5,), max_tokens=200)
    until(lambda: first.tokens)
    with model.model.layers[1].register_forward_pre_hook(breaks):
        assert first.wait().finished.error == "RuntimeError: a kernel broke"
        assert ask(engine, (5,)).wait().finished.reason == "error"  # in the forward over its prompt
    assert first.finished.reason == "error"
    assert ask(engine, (5, 6), max_tokens=20).wait().ids == alone(model, (5, 6), 20)
    assert engine.counts()["requests_error"] == 2


def test_logits_that_are_no_numbers_end_one_request(tiny, engine) -> None:
    """The row that has them fails; its neighbour goes on."""
    model, _ = tiny

    def spoil(module, args, output):
        return output.masked_fill(args[0].new_tensor([0.0, 1.0]).bool()[: len(output), None, None], float("nan"))

    good = ask(engine, (5, 6), max_tokens=100)
    until(lambda: good.tokens)
    bad = ask(engine, (7,), max_tokens=200)
    until(lambda: len(bad.tokens) > 2)
    with model.lm_head.register_forward_hook(spoil):
        bad.wait()
    assert "not numbers" in bad.finished.error
    assert good.wait().finished.reason == "length"
    assert good.ids == alone(model, (5, 6), 100)
