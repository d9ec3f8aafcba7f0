"""The engine where things go wrong or come at once: each costs whom it concerns, and nobody else."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import tracemalloc

import pytest
import torch
from helpers_serve import Answer, alone, save_seeded, tiny_llama
from helpers_waiting import PATIENCE, until

import hookline as hl
from hookline.errors import EngineClosed, OptionError
from hookline.serve.generation import row_batch as batches
from hookline.serve.generation_request import Finished, Request, StatesWanted
from hookline.serve.load_model import load
from hookline.serve.serving_engine import Engine

LAYER = "model.layers.0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tiny(folder):
    return load(folder, device="cpu")


@pytest.fixture
def engine(tiny):
    made = Engine(*tiny, allow=None)
    made.start()
    yield made
    made.close(0.0)


def ask(engine, prompt=(5, 6, 7), listen=None, **options):
    answer = Answer()
    request = Request(f"r{random.getrandbits(60)}", tuple(prompt), **({"ignore_eos": True} | options))
    answer.ticket = engine.submit(request, listen or answer)
    return answer


def held_back(engine):
    """Busy until what is returned is called: whoever asks meanwhile is taken in together."""
    gate = threading.Event()
    engine.start()
    engine.between(lambda: gate.wait(PATIENCE))
    return gate.set


# -- before anybody is served --------------------------------------------------------------------------------


def test_hooks_that_are_on_a_model_see_nothing_of_the_runs_that_try_it_out(tiny) -> None:
    """Neither those that look nor those that edit; afterwards they are where they were, and see what is served."""
    model, tokenizer = tiny
    seen, foreign = [], []
    module = model.model.layers[0]
    with (
        hl.attach(model, "*", lambda module, args, output: seen.append(1) and None) as looks,
        module.register_forward_hook(lambda *_: foreign.append(1) and None),
        hl.attach(model, LAYER, lambda module, args, output: output * 2) as edits,
        hl.attach(model, LAYER, lambda *_: seen.append(1), always_call=True) as always,
    ):
        hooks = [list(module._forward_hooks), list(module._forward_pre_hooks)]
        engine = Engine(model, tokenizer)
        assert (seen, looks.report().fired, edits.report().fired, always.report().fired) == ([], 0, 0, 0)
        assert [list(module._forward_hooks), list(module._forward_pre_hooks)] == hooks
        assert foreign, "what others have put on may be part of how the model works, and stays on"
        engine.start()
        ask(engine, max_tokens=3).wait()
        engine.close()
        assert edits.report().fired == always.report().fired == 3
        assert edits.report().last_step == 2
    hl.assert_no_hooks(model, foreign=True)


def test_a_module_that_sees_tokens_in_another_order_gives_states_to_nobody() -> None:
    """As many rows as there are tokens, but column after column: row by row they would be another's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Mixing(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.columns, self.rows = torch.nn.Identity(), torch.nn.Identity()

        def forward(self, input_ids=None, **options):
            embedded = self.get_input_embeddings()(input_ids)
            self.columns(embedded.transpose(0, 1).flatten(0, 1))
            self.rows(embedded.flatten(0, 1))
            return super().forward(input_ids=input_ids, **options)

        forward.__signature__ = __import__("inspect").signature(LlamaForCausalLM.forward)

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    engine = Engine(save_seeded(Mixing, LlamaConfig(vocab_size=80, **small), None))
    engine.start()
    with pytest.raises(OptionError, match=r"'columns' has no output with a row for each token"):
        ask(engine, states=StatesWanted(("columns",)))
    found = ask(engine, states=StatesWanted(("rows",)), max_tokens=2).wait().finished.states["rows"]
    engine.close()
    assert torch.equal(found.values[:3], engine.model.get_input_embeddings().weight[[5, 6, 7]])


# -- who waits for whom --------------------------------------------------------------------------------------


def test_who_wants_no_states_does_not_wait_for_who_waits_for_room(tiny) -> None:
    """The second waits for the first's bytes; the fourth passes it, the third, which wants some too, does not."""
    engine = Engine(*tiny, captured_bytes=210 * 128)
    begun = []
    release = held_back(engine)

    def client(name, **options):
        answer = Answer()

        def listen(event) -> None:
            if name not in begun:
                begun.append(name)
            answer(event)

        ask(engine, listen=listen, **options)
        return answer

    states = StatesWanted((LAYER,))
    first = client("first", max_tokens=200, states=states)
    second = client("second", max_tokens=199, states=states)
    third = client("third", max_tokens=2, states=states)
    fourth = client("fourth", max_tokens=2)
    release()
    assert fourth.wait().finished.reason == "length"
    assert first.finished is None
    assert [each.wait().finished.reason for each in (first, second, third)] == ["length"] * 3
    engine.close()
    assert begun == ["first", "fourth", "second", "third"]


@pytest.mark.parametrize("fails_at", [1, 3, 4])
def test_no_memory_for_those_who_join_leaves_those_who_run_alone(tiny, engine, monkeypatch, fails_at) -> None:
    """The cache of some layers has been joined when it happens: those are put back as they were."""
    model, _ = tiny
    stacked, calls = batches._stacked, []

    def breaks(*args):
        calls.append(1)
        if len(calls) == fails_at:
            raise torch.OutOfMemoryError("none left")
        return stacked(*args)

    runs = ask(engine, (5, 6), max_tokens=120)
    until(lambda: len(runs.tokens) > 3)
    monkeypatch.setattr(batches, "_stacked", breaks)
    joins = ask(engine, tuple(range(9, 40)), max_tokens=9).wait()
    again = ask(engine, (7,), max_tokens=9).wait()
    assert joins.finished.error == "OutOfMemoryError: none left"
    assert len(joins.tokens) == 1
    assert again.ids == alone(model, (7,), 9)
    assert runs.wait().ids == alone(model, (5, 6), 120)


def test_a_tokenizer_that_raises_ends_the_request_whose_token_it_was(tiny) -> None:
    """A vocabulary that is smaller than the model's, for one; the engine goes on, and so does the neighbour."""
    model, tokenizer = tiny
    bad = alone(model, (5, 6, 7), 4)[3]

    class Small:
        def decode(self, ids, **options):
            if bad in ids:
                raise IndexError(f"piece {bad} is out of range")
            return tokenizer.decode(ids, **options)

    other = next(each for each in range(8, 300) if bad not in (each, *alone(model, (each,), 20)))
    engine = Engine(model, Small())
    release = held_back(engine)
    fails, goes_on = ask(engine, max_tokens=20), ask(engine, (other,), max_tokens=20)
    release()
    assert fails.wait().finished.reason == "error"
    assert f"IndexError: piece {bad} is out of range" in fails.finished.error
    assert goes_on.wait().ids == alone(model, (other,), 20)
    engine.close()


def test_the_count_of_tokens_never_falls(engine) -> None:
    """Read at every event, also at those between leaving the batch and being counted as ended."""
    seen = []
    done = threading.Semaphore(0)

    def listen(event) -> None:
        seen.append(engine.counts()["answer_tokens"])
        if isinstance(event, Finished):
            done.release()

    for count in (1, 5, 9, 3):
        ask(engine, listen=listen, max_tokens=count)
    for _ in range(4):
        assert done.acquire(timeout=PATIENCE)
    assert seen == sorted(seen)
    assert seen[-1] == 18


# -- hooks that are slow to go -------------------------------------------------------------------------------


class Slow:
    """A hook whose close waits."""

    def __init__(self, config):
        self.may_close, self.is_closing, self.closed = threading.Event(), threading.Event(), False

    def __call__(self, module, inputs, output):
        pass

    def close(self):
        self.is_closing.set()
        assert self.may_close.wait(PATIENCE)
        self.closed = True
        raise OSError("disk full")


def test_forwards_go_on_while_a_hook_is_flushed(tiny, caplog) -> None:
    """Who removes it waits, and so does the end of the engine; what the close says is told."""
    engine = Engine(*tiny, allow=None)
    engine.start()
    live = engine.hooks.add({"target_modules": [LAYER], "hook_factory": Slow})
    removed = []
    thread = threading.Thread(target=lambda: removed.append(engine.hooks.remove(live.id)))
    thread.start()
    assert live.hook.is_closing.wait(PATIENCE)
    assert len(ask(engine, max_tokens=20).wait().tokens) == 20
    assert (live.removed, removed, engine.hooks.list()) == (True, [], [])
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: engine._is_over)
    closing.join(0.1)
    assert closing.is_alive()
    live.hook.may_close.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert live.hook.closed
    thread.join(PATIENCE)
    assert removed == [live]
    assert (live.errors, live.last_error) == (1, "OSError in close: disk full")
    assert "Closing hook" in caplog.text


def test_a_hook_that_goes_while_all_go_keeps_none_of_them_on(tiny) -> None:
    """The close of one takes another off, which is next; and closes the engine, which waits for it."""

    class Takes(Slow):
        def close(self):
            if engine.hooks.list():
                engine.hooks.remove(engine.hooks.list()[-1].id)
            engine.close()

    engine = Engine(*tiny, allow=None)
    for _ in range(4):
        engine.hooks.add({"target_modules": [LAYER], "hook_factory": Takes})
    engine.start()
    engine.hooks.remove("h2")
    engine.close()
    assert engine.hooks.list() == []
    hl.assert_no_hooks(tiny[0], foreign=True)


# -- compiled ------------------------------------------------------------------------------------------------


def test_a_compiled_model_is_compiled_for_single_tokens_and_few_times(tiny) -> None:
    """Not when the engine is made, nor for prompts of any length; hooks are on, and count, in both."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = copy.deepcopy(tiny[0])
    engine = Engine(torch.compile(model, backend=backend, dynamic=True), tiny[1], allow=None)
    assert graphs == []
    looks = engine.hooks.add({"target_modules": [LAYER], "hook_factory": "hookline.factories:activation_stats"})
    halves = engine.hooks.add({"target_modules": ["model.layers.1"], "hook_factory": halving})
    with pytest.raises(OptionError, match="every=2"):
        engine.hooks.add({"target_modules": [LAYER], "hook_factory": halving, "every": 2})
    release = held_back(engine)
    prompts = [tuple(range(9, 9 + length)) for length in (3, 1, 12, 7)]
    asked = [ask(engine, each, max_tokens=9, states=StatesWanted((LAYER,))) for each in prompts]
    release()
    for each in asked:
        assert each.wait().finished.reason == "length"
    assert graphs
    assert len(graphs) <= 3
    assert looks.fired == halves.fired == engine.counts()["prefill_forwards"] + engine.counts()["decode_forwards"] == 9
    assert (looks.errors, halves.errors) == (0, 0)
    engine.close()
    with tiny[0].model.layers[1].register_forward_hook(halving({})):
        for prompt, each in zip(prompts, asked, strict=True):
            assert each.ids == alone(tiny[0], prompt, 9)
            assert each.finished.states[LAYER].positions == list(range(len(prompt) + 8))


def test_an_edit_that_raises_is_switched_off_in_a_compiled_model_too(tiny) -> None:
    """In the forward over the prompt, which is not compiled, and before anything is; the request goes on."""

    def raises(config):
        def edit(module, inputs, output):
            if config["raises"]:
                raise ArithmeticError("enough")
            return output

        return edit

    model = copy.deepcopy(tiny[0])
    engine = Engine(torch.compile(model, backend="eager", dynamic=True), tiny[1], allow=None)
    spec = {"target_modules": [LAYER], "hook_factory": raises, "config": {"raises": True}}
    live = engine.hooks.add(spec)
    engine.start()
    answer = ask(engine, max_tokens=5).wait()
    engine.close()
    assert (answer.finished.reason, live.errors, live.off) == ("length", 1, True)
    assert answer.ids == alone(tiny[0], (5, 6, 7), 5)


def halving(config):
    def halve(module, inputs, output):
        return output * 0.5

    return halve


# -- the engine's thread -------------------------------------------------------------------------------------


def test_a_listener_may_ask_call_off_act_and_close(tiny) -> None:
    """All from inside an event, on the engine's own thread, where waiting for it would never end."""
    engine = Engine(*tiny)
    engine.start()
    other = ask(engine, (8, 9), max_tokens=200)
    second, acts = Answer(), []

    def listen(event) -> None:
        if isinstance(event, Finished):
            acts.append(engine.between(threading.current_thread).result(0).name)
            engine.submit(Request("second", (5, 6), max_tokens=7, ignore_eos=True), second)
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


@pytest.mark.parametrize("started", [True, False])
def test_three_may_close_at_once(tiny, started) -> None:
    """Each returns when all is over: hooks are off and closed, those that ran have ended."""
    engine = Engine(*tiny, allow=None)
    live = engine.hooks.add({"target_modules": [LAYER], "hook_factory": Slow})
    if started:
        engine.start()
        asked = ask(engine, max_tokens=50)
    left = []
    together = threading.Barrier(3)

    def close() -> None:
        together.wait(PATIENCE)
        engine.close()
        left.append(live.hook.closed)

    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert live.hook.is_closing.wait(PATIENCE)
    threads[0].join(0.1)  # none of them comes back before
    assert left == []
    live.hook.may_close.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert left == [True] * 3
    if started:
        assert len(asked.wait(0).tokens) == 50


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


def test_a_program_that_ends_without_closing_flushes_its_hooks(folder, tmp_path) -> None:
    """In the middle of an answer: the exit is clean, and what a hook writes when it is closed is there."""
    program = f"""
        import time
        from pathlib import Path
        from hookline.serve.serving_engine import Engine
        from hookline.serve.load_model import load
        from hookline.serve.generation_request import Request

        class Writes:
            def __init__(self, config): self.calls = 0
            def __call__(self, module, inputs, output): self.calls += 1
            def close(self): Path({str(tmp_path / "calls")!r}).write_text(str(self.calls))

        engine = Engine(*load({str(folder)!r}, device="cpu"), allow=None)
        live = engine.hooks.add({{"target_modules": ["lm_head"], "hook_factory": Writes}})
        engine.start()
        told = []
        engine.submit(Request("r", (5, 6), max_tokens=200, ignore_eos=True), told.append)
        while len(told) < 3:
            time.sleep(0.001)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert int((tmp_path / "calls").read_text()) >= 3


def test_two_thousand_requests_leave_nothing_behind(engine) -> None:
    """Memory that Python knows of, after 500 and after 2,000 short requests, some with states."""

    def serve(count: int) -> int:
        for begin in range(0, count, 100):
            asked = [
                ask(
                    engine,
                    (5, 6, 7 + number % 50),
                    max_tokens=1 + number % 3,
                    states=None if number % 4 else StatesWanted((LAYER,), positions="last"),
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
