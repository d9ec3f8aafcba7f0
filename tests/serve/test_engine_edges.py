"""The engine where things go wrong or come at once: each costs whom it concerns, and nobody else."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers_serve import alone, ask, held_back, small_model, started
from helpers_waiting import PATIENCE, until

from hookline.engines.request_options import StatesWanted
from hookline.errors import OptionError
from hookline.serve import row_batch as batches
from hookline.serve.serving_engine import Engine

LAYER = "model.layers.0"


# -- before anybody is served --------------------------------------------------------------------------------


def test_a_module_that_sees_tokens_in_another_order_gives_states_to_nobody() -> None:
    """As many rows as there are tokens, but column after column: row by row they would be another's."""
    from transformers import LlamaForCausalLM

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

    engine = started(small_model("Llama", Mixing, num_hidden_layers=1))
    with pytest.raises(OptionError, match=r"'columns' has no output with a row for each token"):
        ask(engine, states=StatesWanted(("columns",)))
    found = ask(engine, states=StatesWanted(("rows",)), max_tokens=2).wait().finished.states["rows"]
    engine.close()
    assert torch.equal(found.values[:3], engine.model.get_input_embeddings().weight[[5, 6, 7]])


# -- who waits for whom --------------------------------------------------------------------------------------


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
    """Who removes it waits; what the close says is told."""
    engine = started(*tiny)
    live = engine.hooks.add({"target_modules": [LAYER], "hook_factory": Slow})
    removed = []
    thread = threading.Thread(target=lambda: removed.append(engine.hooks.remove(live.id)))
    thread.start()
    assert live.hook.is_closing.wait(PATIENCE)
    assert len(ask(engine, max_tokens=20).wait().tokens) == 20
    assert (live.handle.removed, removed, engine.hooks.list()) == (True, [], [])
    live.hook.may_close.set()
    thread.join(PATIENCE)
    assert (removed, live.hook.closed) == ([live], True)
    engine.close()
    assert (live.errors, live.last_error) == (1, "OSError in close: disk full")
    assert "Closing hook" in caplog.text


def test_a_compiled_model_is_refused(tiny) -> None:
    """Hooks come and go while it is served, and each change would have it compiled again."""
    with pytest.raises(OptionError, match="is compiled"):
        Engine(torch.compile(tiny[0], backend="eager"))
