"""Many at once, at any moment, some of whom leave: everybody hears of one end, and memory stays flat."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter

import pytest
import torch
from helpers_serve import Answer, alone, tiny_llama
from helpers_waiting import PATIENCE, until

import hookline as hl
from hookline.errors import EngineBusy, EngineClosed
from hookline.factories.batch_rows import current_rows
from hookline.serve.generation_request import Request, StatesWanted
from hookline.serve.load_model import load
from hookline.serve.serving_engine import Engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load(tiny_llama(tmp_path_factory.mktemp("llama")), device="cpu")


def test_two_hundred_requests_at_random_moments_with_random_cancels(tiny) -> None:
    """One in four is called off somewhere; the others have the answers of a run alone, in rows of their own."""
    model, tokenizer = tiny
    rng = random.Random(0)
    engine = Engine(model, tokenizer, max_batch=24)
    engine.start()
    asked = []
    for index in range(200):
        prompt = tuple(rng.randrange(3, 384) for _ in range(rng.randrange(1, 12)))
        answer = Answer()
        states = StatesWanted(("model.layers.1",), positions="last") if index % 5 == 0 else None
        count = rng.randrange(0, 24)
        request = Request(f"r{index}", prompt, max_tokens=count, ignore_eos=True, states=states)
        ticket = engine.submit(request, answer)
        asked.append((request, answer, ticket))
        if rng.random() < 0.25:
            rng.choice(asked)[2].cancel()
        if rng.random() < 0.3:
            seen = engine.counts()["decode_forwards"]
            until(
                lambda seen=seen: engine.counts()["decode_forwards"] > seen or not engine.counts()["requests_running"]
            )
    for _, answer, _ in asked:
        answer.wait()
    counts = engine.counts()
    engine.close()
    ends = Counter(answer.finished.reason for _, answer, _ in asked)
    assert set(ends) == {"length", "cancelled"}
    assert ends["length"] > 120
    assert (counts["requests_accepted"], counts["requests_running"], counts["requests_waiting"]) == (200, 0, 0)
    assert counts["answer_tokens"] == sum(len(answer.ids) for _, answer, _ in asked)
    hl.assert_no_hooks(model, foreign=True)
    for request, answer, _ in asked[::4]:
        if answer.finished.reason == "length" and request.max_tokens:
            assert answer.ids == alone(model, request.prompt_ids, request.max_tokens)
        if answer.finished.reason == "cancelled":
            assert answer.finished.states is None


def test_sixty_four_threads_submit_at_once(tiny) -> None:
    """Who finds the queue full asks again; nobody is lost, told twice, or told on another thread than the engine's."""
    model, tokenizer = tiny
    engine = Engine(model, tokenizer, max_batch=16, max_waiting=8)
    engine.start()
    answers: dict[str, list[Answer]] = {}
    together = threading.Barrier(64)

    def client(number: int) -> None:
        together.wait(PATIENCE)
        mine = answers.setdefault(f"c{number}", [])
        for turn in range(2):
            answer = Answer()
            request = Request(f"c{number}.{turn}", (5, 6, number + 3), max_tokens=6, ignore_eos=True)
            until(lambda answer=answer, request=request: _goes_in(engine, request, answer))
            mine.append(answer.wait())

    threads = [threading.Thread(target=client, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    engine.close()
    assert engine.counts()["requests_length"] == 128
    assert {len(mine) for mine in answers.values()} == {2}
    assert len(set().union(*(answer.threads for mine in answers.values() for answer in mine))) == 1
    for number in range(0, 64, 8):
        assert answers[f"c{number}"][1].ids == alone(model, (5, 6, number + 3), 6)


def _goes_in(engine, request, answer) -> bool:
    try:
        engine.submit(request, answer)
    except EngineBusy:
        return False
    return True


def test_closing_under_load_tells_everybody_once(tiny) -> None:
    """Threads go on submitting while it closes: what was accepted ends, what was not is refused."""
    engine = Engine(*tiny, max_batch=8)
    engine.start()
    accepted: list[Answer] = []
    refused = threading.Event()

    def client(number: int) -> None:
        for turn in range(10_000):
            answer = Answer()
            try:
                engine.submit(Request(f"{number}.{turn}", (5, 6), max_tokens=5, ignore_eos=True), answer)
            except EngineBusy:
                continue
            except EngineClosed:
                refused.set()
                return
            accepted.append(answer)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(accepted) > 20)
    engine.close(30.0)
    for thread in threads:
        thread.join(PATIENCE)
    assert refused.is_set()
    assert {answer.wait(0).finished.reason for answer in accepted} == {"length"}


def test_the_cache_is_as_long_as_the_longest_row_and_goes_with_the_last(tiny) -> None:
    """Requests that overlap without end: columns that are padding in all rows are cut off, and nothing is kept."""
    model, tokenizer = tiny
    engine = Engine(model, tokenizer)
    engine.start()
    batch = engine._loop._batch
    widest = 0
    previous = Answer()
    engine.submit(Request("r0", (5, 6, 7), max_tokens=12, ignore_eos=True), previous)
    for number in range(1, 25):
        answer = Answer()
        until(lambda previous=previous: len(previous.tokens) > 6)
        engine.submit(Request(f"r{number}", (5, 6, 7), max_tokens=12, ignore_eos=True), answer)
        widest = max(widest, engine.between(lambda: batch.width).result(PATIENCE))
        previous = answer
    previous.wait()
    assert 0 < widest <= 15
    until(lambda: engine.counts()["requests_running"] == 0)
    assert (batch.width, batch._cache, batch.rows) == (0, None, [])
    gc.collect()
    kept = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.dim() == 4]
    engine.close()
    assert kept == []


@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_an_engine_that_breaks_tells_everybody_and_takes_no_more(tiny, moment) -> None:
    """Something that is no mere exception, in the middle of a forward: no client waits for ever."""
    model, tokenizer = tiny
    engine = Engine(model, tokenizer, max_batch=2)
    live = engine.hooks.add({"target_modules": ["lm_head"], "hook_factory": "hookline.factories:nan_alarm"})

    def stop(module, args):
        if current_rows().phase == moment:
            raise SystemExit("not today")

    with model.model.layers[0].register_forward_pre_hook(stop):
        engine.start()
        answers = [Answer() for _ in range(4)]
        gate = threading.Event()
        engine.between(lambda: gate.wait(PATIENCE))
        for index, answer in enumerate(answers):
            states = StatesWanted(("model.layers.1",))
            engine.submit(Request(f"r{index}", (5,), max_tokens=200, ignore_eos=True, states=states), answer)
        gate.set()
        ends = {answer.wait().finished.error for answer in answers}
    assert ends == {"The engine failed: SystemExit: not today"}
    with pytest.raises(EngineClosed):
        engine.submit(Request("s", (5,)), Answer())
    engine.close()
    assert engine.between(lambda: 3).result(PATIENCE) == 3
    assert live.removed
    hl.assert_no_hooks(model, foreign=True)
