"""The engine: answers are the model's own whoever shares the batch, and every request hears of its end once."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
import torch
from helpers_serve import Answer, alone, save_seeded, tiny_llama
from helpers_waiting import PATIENCE, until

from hookline.errors import EngineBusy, EngineClosed, OptionError
from hookline.serve.generation.answer_text import TextStream
from hookline.serve.generation_request import Finished, Request, StatesWanted, Token
from hookline.serve.load_model import load
from hookline.serve.serving_engine import Engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load(tiny_llama(tmp_path_factory.mktemp("llama")), device="cpu")


@pytest.fixture
def engine(tiny):
    made = Engine(*tiny)
    made.start()
    yield made
    made.close(0.0)


def ask(engine, prompt, **options):
    """A request of a random name, on its way."""
    answer = Answer()
    answer.ticket = engine.submit(Request(f"r{random.getrandbits(60)}", tuple(prompt), **options), answer)
    return answer


def prompts(count, seed=0, vocabulary=384, longest=24):
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, longest))) for _ in range(count)]


# -- answers -------------------------------------------------------------------------------------------------


def test_greedy_answers_are_those_of_generate_whatever_shares_the_batch(tiny, engine) -> None:
    """Twelve prompts of different lengths, that join and leave at different moments: token for token as alone."""
    model, _ = tiny
    asked = []
    for index, prompt in enumerate(prompts(12)):
        asked.append((prompt, 4 + 5 * index, ask(engine, prompt, max_tokens=4 + 5 * index)))
        if index % 3 == 2:
            until(lambda: len(asked[-1][2].tokens) >= 2)  # the others are in the middle of theirs
    for prompt, count, answer in asked:
        answer.wait()
        assert answer.ids == alone(model, prompt, count, ignore_eos=False)
        assert answer.finished.prompt_tokens == len(prompt)
        assert answer.finished.completion_tokens == len(answer.ids)
    assert engine.counts()["decode_forwards"] < sum(count for _, count, _ in asked) / 2, "they did not share batches"


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=96, initializer_range=0.3)
    config.eos_token_id = config.bos_token_id = None
    return save_seeded(GPT2LMHeadModel, config, None)


def _windowed(kind, **options):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        sliding_window=8,
        initializer_range=0.3,
        eos_token_id=None,
        **options,
    )
    return save_seeded(getattr(transformers, f"{kind}ForCausalLM"), config, None)


@pytest.mark.parametrize(
    "make",
    [_gpt2, lambda: _windowed("Mistral"), lambda: _windowed("Gemma2", head_dim=8)],
    ids=["learned positions", "sliding window", "every other layer with a window"],
)
def test_other_architectures_answer_as_alone(make) -> None:
    """Learned positions, and windows of 8 columns in sequences of up to 60."""
    model = make()
    engine = Engine(model)
    engine.start()
    asked = [(each, ask(engine, each, max_tokens=36, ignore_eos=True)) for each in prompts(5, vocabulary=99)]
    until(lambda: len(asked[0][1].tokens) > 10)
    late = prompts(2, seed=1, vocabulary=99)
    asked += [(each, ask(engine, each, max_tokens=20, ignore_eos=True)) for each in late]
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

    model = save_seeded(Confused, _gpt2().config, None)
    with pytest.raises(OptionError, match=r"Confused gives .* padded batch than alone .*max_batch=1"):
        Engine(model)
    engine = Engine(model, max_batch=1)
    engine.start()
    both = [ask(engine, (5, 6, 7), max_tokens=5, ignore_eos=True), ask(engine, (8,), max_tokens=4, ignore_eos=True)]
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
        ({"max_batch": 0}, "max_batch is a whole number from 1 on"),
        ({"max_waiting": 1.5}, "max_waiting"),
        ({"max_sequence": 97}, "says that it has 96 positions"),
        ({"max_sequence": 0}, "max_sequence is a whole number"),
        ({"on_error": "shrug"}, "on_error is 'disable'"),
    ]:
        with pytest.raises(OptionError, match=says):
            Engine(model, **options)


# -- sampling ------------------------------------------------------------------------------------------------


def test_a_seed_decides_the_answer_whatever_shares_the_batch(tiny, engine) -> None:
    """Alone, and among seven others that draw too; torch's own random stream is left alone."""
    before = torch.random.get_rng_state()
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "max_tokens": 24, "ignore_eos": True}
    first = ask(engine, (5, 6, 7), seed=7, **options).wait().ids
    others = [ask(engine, each, **options) for each in prompts(7)]
    again = ask(engine, (5, 6, 7), seed=7, **options).wait().ids
    another = ask(engine, (5, 6, 7), seed=8, **options).wait().ids
    for each in others:
        each.wait()
    assert first == again
    assert first != another
    assert torch.equal(before, torch.random.get_rng_state())


def test_draws_follow_the_probabilities_of_the_model(tiny, engine) -> None:
    """400 draws of one token, against the probabilities that the model gives; top_k=2 and top_p cut the rest off."""
    model, _ = tiny
    engine = Engine(model, max_batch=200)
    engine.start()
    with torch.no_grad():
        chances = model(torch.tensor([[9, 10]])).logits[0, -1].div(3.0).softmax(-1)
    drawn = [ask(engine, (9, 10), max_tokens=1, temperature=3.0, ignore_eos=True) for _ in range(200)]
    two = [ask(engine, (9, 10), max_tokens=1, temperature=3.0, top_k=2, ignore_eos=True) for _ in range(50)]
    few = [ask(engine, (9, 10), max_tokens=1, temperature=3.0, top_p=0.05, ignore_eos=True) for _ in range(50)]
    counted = Counter(each.wait().ids[0] for each in drawn)
    top = chances.topk(20)
    share = sum(counted[token] for token in top.indices.tolist()) / 200
    expected = float(top.values.sum())
    assert abs(share - expected) < 4 * (expected * (1 - expected) / 200) ** 0.5
    best = chances.argsort(descending=True)
    assert {each.wait().ids[0] for each in two} == set(best[:2].tolist())
    inside = int((chances.sort(descending=True).values.cumsum(0) < 0.05).sum()) + 1
    assert {each.wait().ids[0] for each in few} <= set(best[:inside].tolist())
    engine.close()


def test_log_probabilities_are_the_models_own(tiny, engine) -> None:
    """Of the chosen token and of the likeliest three; without asking there are none."""
    model, _ = tiny
    answer = ask(engine, (5, 6), max_tokens=3, logprobs=3).wait()
    with torch.no_grad():
        scores = model(torch.tensor([[5, 6, *answer.ids[:-1]]])).logits[0, 1:].log_softmax(-1)
    for token, row in zip(answer.tokens, scores, strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
        assert [each for each, _ in token.top_logprobs] == row.topk(3).indices.tolist()
        assert token.top_logprobs[0][1] == pytest.approx(row.max().item(), abs=1e-4)
    plain = ask(engine, (5, 6), max_tokens=1).wait()
    assert plain.tokens[0].logprob is None
    assert plain.tokens[0].top_logprobs == ()


# -- text ----------------------------------------------------------------------------------------------------


def test_text_is_that_of_the_whole_answer_and_never_half_a_character(tiny) -> None:
    """Every split of a text with characters of one to four bytes, token by token; and any bytes at all."""
    _, tokenizer = tiny
    prompt = tuple(tokenizer("A hook").input_ids)
    answer = tokenizer(" – Größe 你好世界 🎣🪝, привет").input_ids
    stream = TextStream(tokenizer, prompt)
    parts = [stream.add(token) for token in answer]
    assert "".join(parts) + stream.rest() == " – Größe 你好世界 🎣🪝, привет"
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert "" in parts, "no character had several tokens, so that nothing was tested"
    rng = random.Random(3)
    for _ in range(100):
        ids = [rng.randrange(3, len(tokenizer)) for _ in range(40)]
        stream = TextStream(tokenizer, prompt)
        text = "".join(stream.add(token) for token in ids) + stream.rest()
        assert "A hook" + text == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize(
    ("stop", "shown", "met"),
    [
        (("wor",), "Hello ", "wor"),
        (("lo w", "zzz"), "Hel", "lo w"),
        (("worlds",), "Hello world", None),
        (("H",), "", "H"),
        (("o", "Hello"), "", "Hello"),
    ],
)
def test_nothing_of_a_stop_text_slips_out(stop, shown, met) -> None:
    """One letter a token: what could become a stop text is held back, and let out if it does not."""

    class Letters:
        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    stream = TextStream(Letters(), (), stop)
    parts = []
    for letter in "Hello world":
        parts.append(stream.add(ord(letter)))
        if stream.met is not None:
            break
        assert shown.startswith("".join(parts))
    assert "".join(parts) + stream.rest() == shown
    assert stream.met == met


def test_an_answer_ends_at_a_stop_text_and_at_the_end_token(tiny, engine) -> None:
    """The stop text is no part of it; the model's own end-of-text token ends it unless that is ignored."""
    model, tokenizer = tiny
    whole = ask(engine, (5, 6, 7), max_tokens=40, ignore_eos=True).wait()
    stop = next(text for text in (whole.text[at : at + 2] for at in range(6, 30)) if "\ufffd" not in text)
    answer = ask(engine, (5, 6, 7), max_tokens=40, stop=(stop,), ignore_eos=True).wait()
    assert answer.finished.reason == "stop"
    assert answer.finished.stop == stop
    assert answer.text == whole.text[: whole.text.index(stop)]
    token = whole.ids[9]
    first = whole.ids.index(token)
    model.generation_config.eos_token_id, kept = token, model.generation_config.eos_token_id
    try:
        ends = Engine(model, tokenizer)
    finally:
        model.generation_config.eos_token_id = kept
    ends.start()
    answer = ask(ends, (5, 6, 7), max_tokens=40).wait()
    ends.close()
    assert answer.ids == whole.ids[: first + 1]
    assert answer.finished == Finished("stop", None, 3, first + 1)


# -- limits --------------------------------------------------------------------------------------------------


def test_no_tokens_and_one_token_are_answers_too(engine) -> None:
    """With 0 the prompt is run and nothing sampled."""
    nothing = ask(engine, (5, 6), max_tokens=0, states=StatesWanted(("model.layers.0",))).wait()
    assert nothing.tokens == []
    assert nothing.finished.reason == "length"
    assert nothing.finished.states["model.layers.0"].positions == [0, 1]
    assert len(ask(engine, (5, 6), max_tokens=1).wait().tokens) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_ids": ()}, "at least one token"),
        ({"prompt_ids": tuple(range(3, 300))}, "together 313; this model takes 256"),
        ({"max_tokens": 254}, "together 257"),
        ({"max_tokens": -1}, "max_tokens takes whole numbers from 0 on"),
        ({"max_tokens": True}, "max_tokens"),
        ({"prompt_ids": (5, 384)}, "Token 384 is not in the model's vocabulary"),
        ({"prompt_ids": (-1,)}, "Token -1"),
        ({"prompt_ids": (1.5,)}, "prompt_ids"),
        ({"temperature": float("nan")}, "temperature is a number from 0 on"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p is a number above 0"),
        ({"stop": ("",)}, "an empty one is everywhere"),
        ({"logprobs": 65}, "logprobs is at most 64"),
        ({"seed": 1 << 70}, "at most 64 bits"),
        ({"id": ""}, "id is a string"),
        ({"states": {"layers": ()}}, "at least one module"),
        ({"states": {"layers": ("model.layers.0",), "positions": "some"}}, "'all', 'last' or a list"),
        ({"states": {"layers": ("model.layers.0",), "phase": "both "}}, "phase is one of"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_runs(engine, options, says) -> None:
    """Each with a message that says what was asked and what there is."""

    def submit() -> None:
        wanted = {"states": StatesWanted(**options["states"])} if "states" in options else {}
        engine.submit(Request(**({"id": "r", "prompt_ids": (5, 6, 7)} | options | wanted)), print)

    with pytest.raises(OptionError, match=says):
        submit()
    assert engine.counts()["requests_accepted"] == 0


def test_without_a_tokenizer_there_is_no_text(tiny) -> None:
    """Tokens come all the same; stop texts are refused."""
    engine = Engine(tiny[0])
    engine.start()
    assert ask(engine, (5, 6), max_tokens=4, ignore_eos=True).wait().text == ""
    with pytest.raises(OptionError, match="no tokenizer"):
        ask(engine, (5,), stop=("x",))
    engine.close()


def test_only_so_many_may_wait(tiny) -> None:
    """One runs, two wait, the fourth is told to come later; an id may be used again when its request has ended."""
    engine = Engine(*tiny, max_batch=1, max_waiting=2)
    engine.start()
    first = ask(engine, (5,), max_tokens=200, ignore_eos=True)
    until(lambda: first.tokens)
    held = [ask(engine, (5,), max_tokens=2, ignore_eos=True) for _ in range(2)]
    with pytest.raises(EngineBusy, match="2 requests are waiting"):
        ask(engine, (5,))
    assert engine.counts()["requests_refused"] == 1
    assert engine.counts()["requests_waiting"] == 2
    first.ticket.cancel()
    assert [each.wait().finished.reason for each in held] == ["length"] * 2
    one, two = Answer(), Answer()
    engine.submit(Request("same", (5,), max_tokens=100, ignore_eos=True), one)
    with pytest.raises(OptionError, match="'same' is waiting or running"):
        engine.submit(Request("same", (5,)), two)
    one.wait()
    engine.submit(Request("same", (5,), max_tokens=1), two)
    assert two.wait().finished.reason == "length"
    engine.close()


# -- coming and going ----------------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_and_the_others_stay(tiny, engine) -> None:
    """The one that runs and the one that waits; who stays gets the answer that it would have had."""
    model, _ = tiny
    small = Engine(*tiny, max_batch=2)
    small.start()
    stays, goes, waits = (ask(small, each, max_tokens=120, ignore_eos=True) for each in [(5, 6), (7,), (8,)])
    until(lambda: len(goes.tokens) > 3)
    waits.ticket.cancel()
    goes.ticket.cancel()
    goes.ticket.cancel()
    assert goes.wait().finished.reason == "cancelled"
    assert 3 < len(goes.ids) < 120
    assert goes.finished.completion_tokens == len(goes.ids)
    assert waits.wait().finished == Finished("cancelled", None, 1, 0)
    assert stays.wait().finished.reason == "length"
    small.close()
    assert stays.ids[:40] == alone(model, (5, 6), 40)
    stays.ticket.cancel()  # long over: nothing happens


def test_a_request_that_is_called_off_when_another_ends_ends_once(tiny) -> None:
    """From inside the other's last event, in the middle of the turn; a third still gets all that it asked for."""
    engine = Engine(*tiny)
    gate = threading.Event()
    engine.start()
    engine.between(lambda: gate.wait(PATIENCE))
    states = StatesWanted(("model.layers.0",))
    tickets = {}

    def listen(event: Token | Finished) -> None:
        if isinstance(event, Finished):
            tickets["second"].cancel()

    engine.submit(Request("first", (5, 6), max_tokens=4, ignore_eos=True, states=states), listen)
    second = ask(engine, (7,), max_tokens=50, ignore_eos=True, states=states)
    third = ask(engine, (8, 9), max_tokens=20, ignore_eos=True, states=states)
    tickets["second"] = second.ticket
    gate.set()
    assert second.wait().finished.reason == "cancelled"
    assert third.wait().finished.states["model.layers.0"].positions == list(range(21))
    until(lambda: engine.counts()["requests_length"] == 2, "both are counted, a moment after their last events")
    assert engine.counts()["requests_cancelled"] == 1
    engine.close()


def test_a_listener_that_raises_costs_itself_alone(tiny, engine, caplog) -> None:
    """It is logged and cancelled; the other gets all of its tokens."""

    def listen(event: Token | Finished) -> None:
        raise RuntimeError("no ear")

    good = ask(engine, (5, 6), max_tokens=30, ignore_eos=True)
    engine.submit(Request("bad", (5, 6), max_tokens=200, ignore_eos=True), listen)
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
        answer = ask(engine, (5,), max_tokens=60, ignore_eos=True)
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


def test_closing_finishes_what_was_accepted_and_refuses_the_rest(tiny) -> None:
    """Those that run and those that wait have their whole answers; closing again is harmless."""
    engine = Engine(*tiny, max_batch=2)
    with pytest.raises(EngineClosed, match="has not been started"):
        ask(engine, (5,))
    engine.start()
    engine.start()
    asked = [ask(engine, (5, each), max_tokens=30, ignore_eos=True) for each in range(3, 9)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: engine._is_closing)
    with pytest.raises(EngineClosed, match="is closing"):
        ask(engine, (5,))
    closing.join(PATIENCE)
    assert [len(each.wait(0).ids) for each in asked] == [30] * 6
    engine.close()
    with pytest.raises(EngineClosed, match="does not start again"):
        engine.start()


def test_closing_cancels_what_takes_too_long(tiny) -> None:
    """With no time to drain, everybody hears of an end at once."""
    engine = Engine(*tiny, max_batch=1)
    engine.start()
    asked = [ask(engine, (5,), max_tokens=200, ignore_eos=True) for _ in range(3)]
    until(lambda: asked[0].tokens)
    engine.close(0.0)
    assert [each.wait(0).finished.reason for each in asked] == ["cancelled"] * 3


def test_an_error_in_a_forward_fails_that_batch_alone(tiny, engine, caplog) -> None:
    """Whoever was in it is told what happened; the next request is answered."""
    model, _ = tiny

    def breaks(module, args):
        raise RuntimeError("a kernel broke")

    first = ask(engine, (5,), max_tokens=200, ignore_eos=True)
    until(lambda: first.tokens)
    with model.model.layers[1].register_forward_pre_hook(breaks):
        assert first.wait().finished.error == "RuntimeError: a kernel broke"
        assert ask(engine, (5,)).wait().finished.reason == "error"  # in the forward over its prompt
    assert first.finished.reason == "error"
    assert ask(engine, (5, 6), max_tokens=20, ignore_eos=True).wait().ids == alone(model, (5, 6), 20)
    assert engine.counts()["requests_error"] == 2


def test_logits_that_are_no_numbers_end_one_request(tiny, engine) -> None:
    """The row that has them fails; its neighbour goes on."""
    model, _ = tiny

    def spoil(module, args, output):
        return output.masked_fill(args[0].new_tensor([0.0, 1.0]).bool()[: len(output), None, None], float("nan"))

    good = ask(engine, (5, 6), max_tokens=100, ignore_eos=True)
    until(lambda: good.tokens)
    bad = ask(engine, (7,), max_tokens=200, ignore_eos=True)
    until(lambda: len(bad.tokens) > 2)
    with model.lm_head.register_forward_hook(spoil):
        bad.wait()
    assert "not numbers" in bad.finished.error
    assert good.wait().finished.reason == "length"
    assert good.ids == alone(model, (5, 6), 100)


def test_a_model_of_which_a_part_is_compiled_is_served_with_hooks_on_that_part(tiny) -> None:
    """Hooks that might edit are called in compiled code too, which inference mode would not let them be."""
    import copy

    model = copy.deepcopy(tiny[0])
    model.model.layers[0].mlp.compile(backend="eager", dynamic=True)
    shapes = []

    def look(config):
        def hook(module, inputs, output):
            shapes.append(tuple(output.shape))

        return hook

    engine = Engine(model, allow=None)
    engine.hooks.add({"target_modules": ["model.layers.0.mlp.down_proj"], "hook_factory": look})
    engine.start()
    answer = ask(engine, (5, 6, 7), max_tokens=6, ignore_eos=True).wait()
    live = engine.hooks.list()[0]
    engine.close()
    assert answer.ids == alone(tiny[0], (5, 6, 7), 6)
    assert shapes == [(1, 3, 32)] + [(1, 1, 32)] * 5
    assert (live.errors, live.fired) == (0, 6)
