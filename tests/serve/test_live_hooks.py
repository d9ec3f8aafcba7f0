"""Hooks on a model while it is served: wholly on or not at all, off when they raise, and what they did is known."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers_serve import alone, ask
from helpers_waiting import PATIENCE

import hookline as hl
from hookline.errors import EngineClosed, HookSignatureError, NoMatchError, OptionError
from hookline.factories import current_tokens
from hookline.serve.serving_engine import Engine

LAYER = "model.layers.0"


@pytest.fixture
def engine(tiny):
    made = Engine(*tiny, allow=("hookline.factories", __name__))
    made.start()
    yield made
    made.close(0.0)
    hl.assert_no_hooks(tiny[0], foreign=True)


def spec(factory, target=LAYER, **options):
    return {"target_modules": [target], "hook_factory": f"{__name__}:{factory}", **options}


# -- factories that the specs name ---------------------------------------------------------------------------

MADE: list[Counting] = []


class Counting:
    """A hook with all that a hook may have."""

    def __init__(self, config):
        self.calls, self.closed, self.tables = 0, 0, []
        self.fails_at = config.get("fails_at")
        self.in_inference = set()
        MADE.append(self)

    def __call__(self, module, inputs, output):
        self.calls += 1
        self.tables.append(current_tokens())
        self.in_inference.add(torch.is_inference_mode_enabled())
        if self.calls == self.fails_at:
            raise ArithmeticError("enough")

    def to_metrics(self):
        return {"calls": float(self.calls)}

    def close(self):
        self.closed += 1


def counting(config):
    return Counting(config)


SHARED = Counting({})


def shared(config):
    return SHARED


def nothing(config):
    return None


def broken(config):
    raise ZeroDivisionError("no hook today")


def misfit(config):
    return lambda module: None


# -- hooks that fail -----------------------------------------------------------------------------------------


def test_a_hook_that_raises_is_switched_off_and_requests_go_on(tiny, engine, caplog) -> None:
    """Counted, logged once, listed with its error; nobody's answer changes."""
    live = engine.hooks.add(spec("counting", "model.layers.#", name="picky", config={"fails_at": 4}))
    answer = ask(engine, max_tokens=30).wait()
    assert answer.finished.reason == "length"
    assert answer.ids == alone(tiny[0], (5, 6, 7), 30)
    assert (live.fired, live.errors, live.off) == (4, 1, True)
    assert live.last_error == "ArithmeticError on model.layers.1: enough"
    assert caplog.text.count("Hook 'picky' raised on model.layers.1; it is switched off") == 1
    assert engine.hooks.list() == [live], "it stays on the list until somebody takes it off"


def test_a_spec_may_ask_for_errors_to_be_raised(engine) -> None:
    """The requests of that batch fail with the hook's own words, and the next is answered when it is off."""
    live = engine.hooks.add(spec("counting", config={"fails_at": 2}, on_error="raise"))
    answer = ask(engine, max_tokens=9).wait()
    assert (answer.finished.reason, answer.finished.error) == ("error", "ArithmeticError: enough")
    assert (live.errors, live.off) == (1, False)
    assert ask(engine, max_tokens=9).wait().finished.reason == "length"


# -- what cannot be attached ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (spec("counting", "model.layer.#"), NoMatchError, "nearest"),
        (spec("nothing"), OptionError, f"Hook factory '{__name__}:nothing' for spec '' returned None"),
        (spec("broken"), ZeroDivisionError, "no hook today"),
        (spec("misfit"), HookSignatureError, "cannot be a forward hook"),
        (spec("absent"), AttributeError, "absent"),
        ({"target_modules": [LAYER]}, OptionError, "no 'hook_factory'"),
        ({"hook_factory": f"{__name__}:counting"}, OptionError, "no 'target_modules'"),
        (spec("counting", enabled=False), OptionError, "Nothing was attached"),
        ({**spec("counting"), "targets": []}, OptionError, "Did you mean"),
        ([], OptionError, "A hook spec is an object"),
    ],
)
def test_nothing_is_half_attached(tiny, engine, wrong, error, says) -> None:
    """A spec that fails, alone or behind one that would do, leaves the model bare and closes what was made."""
    before = len(MADE)
    with pytest.raises(error, match=says):
        engine.hooks.add(wrong)
    with pytest.raises((error, OptionError)):
        engine.hooks.add_all([spec("counting"), wrong], strict=True) and engine.hooks.add(wrong)
    for live in engine.hooks.list():  # a spec that is not enabled is passed over in a list
        assert wrong.get("enabled") is False
        engine.hooks.remove(live.id)
    assert engine.hooks.list() == []
    assert [made.closed for made in MADE[before:]] == [1] * len(MADE[before:])
    assert engine.between(lambda: hl.attached(tiny[0])).result(PATIENCE) == []


def test_start_up_files_pass_over_what_matches_nothing(engine, caplog) -> None:
    """Not strict: one line of log for the one that matches nothing, and its hook is closed."""
    before = len(MADE)
    specs = [spec("counting", name="a"), spec("counting", "nowhere.*", name="b"), spec("counting", "lm_head", name="c")]
    added = engine.hooks.add_all(specs)
    assert [(live.name, live.matched) for live in added] == [("a", (LAYER,)), ("c", ("lm_head",))]
    assert "No modules matched hook spec 'b'" in caplog.text
    assert [made.closed for made in MADE[before:]] == [0, 1, 0]


def test_closing_the_engine_flushes_its_hooks_after_the_last_answer(tiny) -> None:
    """Also one whose close raises does not keep the others open."""
    engine = Engine(*tiny, allow=None)
    lives = engine.hooks.add_all([spec("counting") for _ in range(3)])
    lives[1].hook.close = lambda: 1 // 0
    engine.start()
    answer = ask(engine, max_tokens=20)
    engine.close()
    assert len(answer.wait(0).ids) == 20
    assert [live.hook.calls for live in lives] == [20] * 3
    assert (lives[0].hook.closed, lives[2].hook.closed) == (1, 1)
    hl.assert_no_hooks(tiny[0], foreign=True)
    with pytest.raises(EngineClosed):
        engine.hooks.add(spec("counting"))


def test_hooks_come_and_go_under_load(tiny, engine) -> None:
    """Four threads add and remove while requests run: answers are the same, and nothing is left."""
    errors = []

    def churn(factory):
        try:
            for _ in range(15):
                engine.hooks.remove(engine.hooks.add(spec(factory, "model.layers.#")).id)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(name,)) for name in ("counting", "shared") * 2]
    asked = [ask(engine, (5, 6, each), max_tokens=60) for each in range(7, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for each in asked:
        each.wait()
    assert errors == []
    assert engine.hooks.list() == []
    for number, each in enumerate(asked):
        assert each.ids == alone(tiny[0], (5, 6, 7 + number), 60)
