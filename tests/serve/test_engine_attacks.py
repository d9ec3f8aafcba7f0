"""Many at once, at any moment, some of whom leave: everybody hears of one end, and memory stays flat."""

from __future__ import annotations

import gc
import os
import random
import sys
import textwrap
import threading
import tracemalloc
from collections import Counter

import pytest
from helpers_serve import Answer, alone, ask, started
from helpers_waiting import PATIENCE, until
from helpers_warm import run_warm

import hookline as hl
from hookline.engines.request_options import StatesWanted
from hookline.errors import EngineBusy, EngineClosed
from hookline.observe.tokens import current_tokens
from hookline.serve.generation_request import Finished, GenerationRequest
from hookline.serve.serving_engine import Engine


def test_two_hundred_requests_at_random_moments_with_random_cancels(tiny) -> None:
    """One in four is called off somewhere; the others have the answers of a run alone, in rows of their own."""
    model, tokenizer = tiny
    rng = random.Random(0)
    engine = started(model, tokenizer, max_batch=24)
    asked = []
    for index in range(200):
        prompt = tuple(rng.randrange(3, 384) for _ in range(rng.randrange(1, 12)))
        answer = Answer()
        states = StatesWanted(("model.layers.1",), positions="last") if index % 5 == 0 else None
        count = rng.randrange(0, 24)
        request = GenerationRequest(f"r{index}", prompt, max_tokens=count, ignore_eos=True, states=states)
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


def test_closing_under_load_tells_everybody_once(tiny) -> None:
    """Threads go on submitting while it closes: what was accepted ends, what was not is refused."""
    engine = started(*tiny, max_batch=8)
    accepted: list[Answer] = []
    refused = threading.Event()

    def client(number: int) -> None:
        for turn in range(10_000):
            answer = Answer()
            try:
                engine.submit(GenerationRequest(f"{number}.{turn}", (5, 6), max_tokens=5, ignore_eos=True), answer)
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


@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_an_engine_that_breaks_tells_everybody_and_takes_no_more(tiny, moment) -> None:
    """Something that is no mere exception, in the middle of a forward: no client waits for ever."""
    model, tokenizer = tiny
    engine = Engine(model, tokenizer, max_batch=2)
    live = engine.hooks.add({"target_modules": ["lm_head"], "hook_factory": "hookline.factories:nan_alarm"})

    def stop(module, args):
        if current_tokens().phase == moment:
            raise SystemExit("not today")

    with model.model.layers[0].register_forward_pre_hook(stop):
        engine.start()
        answers = [Answer() for _ in range(4)]
        gate = threading.Event()
        engine.between(lambda: gate.wait(PATIENCE))
        for index, answer in enumerate(answers):
            states = StatesWanted(("model.layers.1",))
            engine.submit(GenerationRequest(f"r{index}", (5,), max_tokens=200, ignore_eos=True, states=states), answer)
        gate.set()
        ends = {answer.wait().finished.error for answer in answers}
    assert ends == {"The engine failed: SystemExit: not today"}
    with pytest.raises(EngineClosed):
        engine.submit(GenerationRequest("s", (5,)), Answer())
    engine.close()
    assert engine.between(lambda: 3).result(PATIENCE) == 3
    assert live.handle.removed
    hl.assert_no_hooks(model, foreign=True)


# -- the engine's thread and process --------------------------------------------------------------------------


def test_a_listener_may_ask_call_off_act_and_close(tiny) -> None:
    """All from inside an event, on the engine's own thread, where waiting for it would never end."""
    engine = started(*tiny)
    other = ask(engine, (8, 9), max_tokens=200)
    second, acts = Answer(), []

    def listen(event) -> None:
        if isinstance(event, Finished):
            acts.append(engine.between(threading.current_thread).result(0).name)
            engine.submit(GenerationRequest("second", (5, 6), max_tokens=7, ignore_eos=True), second)
            other.ticket.cancel()
            engine.close()

    until(lambda: other.tokens)
    ask(engine, listen=listen, max_tokens=2)
    assert len(second.wait().tokens) == 7
    assert other.wait().finished.reason == "cancelled"
    assert acts == ["hookline-engine"]
    engine.close()
    with pytest.raises(EngineClosed):
        ask(engine)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_has_no_engine(engine) -> None:
    """Threads are not forked: who asks there is told, and does not wait for ever."""
    ask(engine, max_tokens=2).wait()
    until(lambda: engine.counts()["requests_running"] == 0)
    engine.between(lambda: None).result(PATIENCE)
    child = os.fork()
    if not child:
        try:
            ask(engine)
        except EngineClosed:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(ask(engine, max_tokens=2).wait().tokens) == 2


@pytest.mark.slow
def test_a_program_that_ends_without_closing_flushes_its_hooks(folder, tmp_path) -> None:
    """In the middle of an answer: the exit is clean, and what a hook writes when it is closed is there."""
    program = f"""
        import time
        from pathlib import Path
        from hookline.serve.serving_engine import Engine
        from hookline.serve.load_model import load
        from hookline.serve.generation_request import Finished, GenerationRequest

        class Writes:
            def __init__(self, config): self.calls = 0
            def __call__(self, module, inputs, output): self.calls += 1
            def close(self): Path({str(tmp_path / "calls")!r}).write_text(str(self.calls))

        engine = Engine(*load({str(folder)!r}, device="cpu"))
        live = engine.hooks.add({{"target_modules": ["lm_head"], "hook_factory": Writes}})
        engine.start()
        told = []
        engine.submit(GenerationRequest("r", (5, 6), max_tokens=200, ignore_eos=True), told.append)
        while len(told) < 3:
            time.sleep(0.001)
    """
    done = run_warm(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert int((tmp_path / "calls").read_text()) >= 3


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing_behind(engine) -> None:
    """Memory that Python knows of, after 500 and after 2,000 short requests, some with states."""

    def serve(count: int) -> int:
        for begin in range(0, count, 100):
            asked = [
                ask(
                    engine,
                    (5, 6, 7 + number % 50),
                    max_tokens=1 + number % 3,
                    states=None if number % 4 else StatesWanted(("model.layers.0",), positions="last"),
                )
                for number in range(begin, begin + 100)
            ]
            for each in asked:
                each.wait()
        until(lambda: engine.counts()["requests_running"] == 0)
        asked = each = None
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = serve(500)
        late = serve(1500)
    finally:
        tracemalloc.stop()
    # What the interpreter keeps for later use came to 40; one request with its row is 3,000.
    assert (late - early) / 1500 < 150, "bytes a request"
    assert engine.counts()["requests_length"] == 2000
