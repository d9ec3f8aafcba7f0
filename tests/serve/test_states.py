"""Hidden states: each request gets its own, those it asked for, and nobody gets anybody else's."""

from __future__ import annotations

import random
import threading
import weakref

import pytest
import torch
from helpers_serve import Answer, ask, held_back, small_model, started, states_alone
from helpers_waiting import PATIENCE, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hookline as hl
from hookline.engines.request_options import StatesWanted
from hookline.errors import EngineBusy, NoMatchError, OptionError
from hookline.observe.tokens import current_tokens
from hookline.serve.generation_request import GenerationRequest
from hookline.serve.serving_engine import Engine

LAYER = "model.layers.0"


def assert_own(model, answer, names=(LAYER,)) -> None:
    """What came is what a run of this sequence alone gives, at the positions that it says."""
    ran = answer.prompt + answer.ids[:-1]
    for name in names:
        states = answer.finished.states[name]
        expected = states_alone(model, ran, name)[states.positions]
        if len(states.positions):
            torch.testing.assert_close(states.values, expected, rtol=1e-4, atol=1e-3)


def test_two_clients_in_one_padded_batch_see_their_own_rows(tiny) -> None:
    """A prompt of 3 beside one of 17, in one forward; the third, which asked for nothing, gets nothing."""
    model, tokenizer = tiny
    engine = Engine(model, tokenizer)
    shapes = []
    with model.model.layers[0].register_forward_hook(lambda module, args, output: shapes.append(output.shape[:2])):
        release = held_back(engine)
        short = ask(engine, range(5, 8), StatesWanted((LAYER,)), max_tokens=6)
        silent = ask(engine, range(60, 70), max_tokens=9)
        long = ask(engine, range(20, 37), StatesWanted(("model.layers.#",)), max_tokens=4)
        release()
        for answer in (short, long, silent):
            answer.wait()
    engine.close()
    assert (3, 17) in shapes, "they did not share a padded batch"
    assert silent.finished.states is None
    assert list(short.finished.states) == [LAYER]
    assert short.finished.states[LAYER].positions == list(range(8))
    assert long.finished.states[LAYER].positions == list(range(20))
    assert_own(model, short)
    assert_own(model, long, (LAYER, "model.layers.1"))
    with pytest.raises(AssertionError):  # the comparison can fail: these are another's
        torch.testing.assert_close(short.finished.states[LAYER].values, long.finished.states[LAYER].values[:8])


@pytest.mark.parametrize(
    ("wanted", "positions"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"phase": "prefill"}, [0, 1, 2, 3, 4]),
        ({"phase": "decode"}, [5, 6, 7]),
        ({"positions": "last"}, [4, 5, 6, 7]),
        ({"positions": "last", "phase": "prefill"}, [4]),
        ({"window": (-2, 7)}, [3, 4, 5, 6]),
        ({"window": [-5, 1]}, [0]),
    ],
)
def test_positions_count_in_the_sequence(tiny, engine, wanted, positions) -> None:
    """A prompt of five tokens and an answer of four, of which the last is never run; beside somebody else's."""
    other = ask(engine, range(30, 50), StatesWanted((LAYER,)), max_tokens=12)
    answer = ask(engine, range(5, 10), StatesWanted((LAYER,), **wanted), max_tokens=4).wait()
    other.wait()
    assert answer.finished.states[LAYER].positions == positions
    assert_own(tiny[0], answer)
    assert_own(tiny[0], other)


def test_observers_are_on_while_somebody_wants_them_and_no_longer(tiny) -> None:
    """One on each module however many want it; after the last the model is as it was found."""
    model, tokenizer = tiny
    engine = Engine(model, tokenizer)
    release = held_back(engine)
    hl.assert_no_hooks(model)
    asked = [ask(engine, (5, 6), StatesWanted((LAYER,)), max_tokens=200) for _ in range(3)]
    release()
    until(lambda: all(len(each.tokens) > 1 for each in asked))
    attached = engine.between(lambda: [handle.names for handle in hl.attached(model)]).result(PATIENCE)
    assert attached == [(LAYER,)]
    for each in asked[:2]:
        each.ticket.cancel()
        assert each.wait().finished.states is None
    assert engine.between(lambda: len(hl.attached(model))).result(PATIENCE) == 1
    asked[2].ticket.cancel()
    asked[2].wait()
    assert engine.between(lambda: hl.attached(model)).result(PATIENCE) == []
    engine.close()
    hl.assert_no_hooks(model, foreign=True)


def test_a_layer_that_is_not_there_is_refused_with_the_nearest(engine) -> None:
    """Before anything runs, as a module without a row for each token is, and a window without a position."""
    with pytest.raises(NoMatchError, match=r"No module matches 'model.layer.0'.*nearest: 'model.layers.0'"):
        ask(engine, (5,), StatesWanted(("model.layer.0",)))
    with pytest.raises(OptionError, match=r"'model.layers' has no output with a row for each token"):
        ask(engine, (5,), StatesWanted(("model.layers",)))
    with pytest.raises(OptionError, match=r"window \[0, -3\] has no position in it"):
        ask(engine, (5, 6), StatesWanted((LAYER,), window=(0, -3)), max_tokens=3)
    assert engine.counts()["requests_accepted"] == 0


def test_the_room_of_states_is_taken_until_they_are_let_go(tiny) -> None:
    """Two layers of 32 numbers of 4 bytes: 10 tokens fit in 2,560 bytes. Who still has them holds the room."""
    engine = started(*tiny, captured_bytes=2560)
    both = StatesWanted(("model.layers.#",))
    prompt, answers = (5, 6, 7, 8, 9), [Answer(), Answer()]
    group = [GenerationRequest(name, prompt, max_tokens=1, states=both) for name in ("a", "b")]
    ticket = engine.submit_all(group, answers, hold=True)
    found = [answer.wait().finished.states for answer in answers]
    assert sum(each.values.nbytes for states in found for each in states.values()) == 2560
    assert engine.counts()["captured_bytes_reserved"] == 2560
    with pytest.raises(EngineBusy, match="no room"):
        ask(engine, prompt, both, max_tokens=1)
    assert ask(engine, prompt).wait().finished.reason == "length"
    ticket.release()
    assert ask(engine, prompt, both, max_tokens=1).wait().finished.states
    with pytest.raises(OptionError, match=r"can come to 2,816 bytes, .* have 2,560"):
        ask(engine, range(5, 11), both, max_tokens=6)
    until(lambda: engine.counts()["captured_bytes_reserved"] == 0)
    engine.close()


def test_an_answer_is_not_kept_once_it_was_given(tiny) -> None:
    """Also where no other request comes: its states may be a gigabyte."""
    engine = started(*tiny)
    for hold in (False, True):
        answer = Answer()
        asked = GenerationRequest("a", (5, 6, 7), max_tokens=2, states=StatesWanted((LAYER,)))
        ticket = engine.submit_all([asked], [answer], hold=hold)
        states = weakref.ref(answer.wait().finished.states[LAYER].values)
        ticket.release()
        del answer, ticket
        engine.between(lambda: None).result()  # the round in which it ended is over
        assert states() is None
    engine.close()


def test_experts_give_their_tokens_back_to_whom_they_belong() -> None:
    """The router of a mixture sees all tokens of the batch in one row after the other; padding is left out of them."""
    model = small_model("Mixtral", num_hidden_layers=1, num_key_value_heads=2, num_local_experts=3)
    engine = Engine(model)
    release = held_back(engine)
    name = "model.layers.0.mlp"
    asked = [ask(engine, range(3, 3 + 4 * size), StatesWanted((name,)), max_tokens=3) for size in (1, 3)]
    release()
    for answer in asked:
        answer.wait()
    engine.close()
    for answer in asked:
        assert_own(model, answer, (name,))


def test_states_that_turn_out_otherwise_fail_who_asked_and_nobody_else(tiny, engine) -> None:
    """Somebody's own hook has logits come in another type than when the engine was made."""
    model, _ = tiny
    with model.lm_head.register_forward_hook(lambda module, args, output: output.double()):
        good = ask(engine, (5, 6, 7), StatesWanted((LAYER,)), max_tokens=30)
        bad = ask(engine, (5, 6, 7), StatesWanted(("lm_head",)), max_tokens=30).wait()
        good.wait()
    assert bad.finished.reason == "error"
    assert "larger numbers than when the engine was made" in bad.finished.error
    assert good.finished.reason == "length"
    assert_own(model, good)


def test_somebody_else_running_the_model_is_not_mistaken_for_the_engine(tiny, engine) -> None:
    """Forwards of another thread go past the observers, in the middle of an answer."""
    model, _ = tiny
    answer = ask(engine, (5, 6, 7), StatesWanted((LAYER,)), max_tokens=60)
    with torch.no_grad():
        while not answer.finished:
            model(torch.tensor([[9]]))
    assert answer.finished.reason == "length"
    assert_own(model, answer)


def test_asking_for_states_does_not_change_an_answer(tiny, engine) -> None:
    """Bit for bit: the same request, with and without, alone in the engine."""
    plain = ask(engine, range(5, 25), max_tokens=40, logprobs=1).wait()
    asked = ask(engine, range(5, 25), StatesWanted(("*layers*", "lm_head")), max_tokens=40, logprobs=1).wait()
    assert [(each.id, each.logprob) for each in plain.tokens][1:] == [(each.id, each.logprob) for each in asked.tokens][
        1:
    ]
    assert plain.ids == asked.ids


one_of_them = st.tuples(
    st.integers(1, 14),  # tokens of the prompt
    st.integers(1, 10),  # of the answer
    st.sampled_from([(LAYER,), ("model.layers.#",), ("model.norm", LAYER), None]),
    st.sampled_from(["output", "input"]),
    st.lists(st.integers(-20, 20), min_size=1, max_size=4),
    st.sampled_from([0, 0, 0, 1, 3]),  # tokens of whoever came before, until this one comes; 0 is together with it
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(one_of_them, min_size=2, max_size=6), st.sets(st.integers(0, 30), max_size=3), st.integers(0, 10_000))
def test_whatever_fails_meanwhile_nobody_gets_what_is_anothers(tiny, shared, clients, failing, seed) -> None:
    """Forwards that break, among any layers, inputs and windows: who ends well has their own, and all."""
    model, _ = tiny
    rng = random.Random(seed)
    forwards, asked, gate = iter(range(10_000)), [], threading.Event()
    shared.between(lambda: gate.wait(PATIENCE))

    def breaks(module, args):
        if current_tokens() is not None and next(forwards) in failing:
            raise RuntimeError("a kernel broke")

    with model.model.layers[1].mlp.register_forward_pre_hook(breaks):
        for prompt, count, layers, of, positions, after in clients:
            if asked and after:
                gate.set()
                until(lambda after=after: len(asked[-1].tokens) >= after or asked[-1].finished)
            places = [each + prompt * (each < 0) for each in positions if -prompt <= each < prompt + count - 1]
            window = (min(places) - prompt * (min(places) < prompt), max(places) + 1) if places else None
            states = StatesWanted(layers, window=window, of=of) if layers and window else None
            answer = ask(shared, [rng.randrange(3, 384) for _ in range(prompt)], states, max_tokens=count)
            answer.wanted = states
            asked.append(answer)
        gate.set()
        for answer in asked:
            answer.wait()
    for answer in asked:
        assert answer.finished.reason in ("length", "error")
        if answer.finished.reason == "error":
            assert answer.finished.states is None
        elif answer.wanted is not None:
            _assert_windowed(model, answer)
    assert shared.between(lambda: hl.attached(model)).result(PATIENCE) == []


def _assert_windowed(model, answer) -> None:
    """The positions of the window, with the numbers of a run alone."""
    ran = answer.prompt + answer.ids[:-1]
    first, end = (None if each is None else each + len(answer.prompt) * (each < 0) for each in answer.wanted.window)
    listed = list(range(len(ran)))[first:end]
    for name, found in answer.finished.states.items():
        assert found.positions == listed
        expected = states_alone(model, ran, name, of=answer.wanted.of)[listed]
        torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def shared(tiny):
    engine = started(*tiny, max_batch=4)
    yield engine
    engine.close(0.0)
