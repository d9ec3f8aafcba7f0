"""Hooks that a request brings along: they see and change its rows alone, whatever runs in the same batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers_http import served
from helpers_serve import Answer, alone, ask, held_back, small_model
from torch import nn

import hookline as hl
from hookline.engines import live_hooks
from hookline.engines.request_options import StatesWanted
from hookline.errors import EngineBusy, NoMatchError, NotAllowedError, OptionError
from hookline.factories import ProbeHead
from hookline.serve.generation_request import GenerationRequest
from hookline.serve.serving_engine import Engine

PROMPTS = ((5, 6, 7, 8, 9, 10, 11), (20, 21), (30, 31, 32, 33))
LAYER = "model.layers.0"
STATES = StatesWanted((LAYER, "model.norm"))


def steer(number: float, layer: str = LAYER, **more: Any) -> dict[str, Any]:
    """A hook that is easy to tell from another: it adds this number, with alternating signs, to every unit."""
    vector = [number, -number] * 16
    return {"target_modules": [layer], "hook_factory": "hookline.factories:steer", "config": {"vector": vector}, **more}


STATS = {"name": "s", "target_modules": [LAYER], "hook_factory": "hookline.factories:activation_stats"}
OWN = {"target_modules": [LAYER], "hook_factory": f"{__name__}:keeps_all"}
KEPT: list[tuple[Any, Any, Any]] = []


def keeps_all(config: dict[str, Any]) -> Any:
    """A factory whose hook keeps all that it is shown."""

    def hook(module: Any, args: Any, output: Any) -> None:
        from hookline.observe.tokens import current_tokens

        KEPT.append((args, output, current_tokens()))

    return hook


def run_together(tiny: Any, *hooks: tuple[Any, ...]) -> list[Answer]:
    """Answer the prompts in one batch, each with its hooks, and wait."""
    engine = Engine(*tiny)
    release = held_back(engine)
    try:
        answers = [
            ask(engine, prompt, STATES, max_tokens=6, hooks=own) for prompt, own in zip(PROMPTS, hooks, strict=True)
        ]
        release()
        for answer in answers:
            answer.wait()
        assert engine.counts()["prefill_forwards"] == 1  # they did run in one batch
        assert not engine.hooks.list()
    finally:
        engine.close(0.0)
    hl.assert_no_hooks(tiny[0], foreign=True)
    return answers


def states(answer: Answer, layer: str = LAYER) -> torch.Tensor:
    return answer.finished.states[layer].values


@pytest.fixture(scope="module")
def plain(tiny: Any) -> list[Answer]:
    """The answers without hooks."""
    return run_together(tiny, (), (), ())


def test_two_requests_are_steered_each_by_its_own_hook_and_a_third_by_none(tiny: Any, plain: list[Answer]) -> None:
    """In one padded batch: the third has the same bits as without them; each of the two has its own vector added."""
    found = run_together(tiny, (steer(3.0),), (steer(-2.0),), ())
    assert torch.equal(states(found[2]), states(plain[2]))
    assert torch.equal(states(found[2], "model.norm"), states(plain[2], "model.norm"))
    assert found[2].ids == plain[2].ids
    for place, number in enumerate((3.0, -2.0)):
        count = len(PROMPTS[place])  # the prompt alone: what follows depends on the tokens that were chosen
        signs = torch.tensor([number, -number] * 16)
        assert torch.equal(states(found[place])[:count], states(plain[place])[:count] + signs)
    assert found[0].ids != plain[0].ids
    results = [answer.finished.hooks for answer in found]
    assert [[hook["rows"] for hook in each] for each in results] == [[7 + 5], [2 + 5], []]
    assert results[0][0]["matched"] == [LAYER]


def test_a_hook_is_shown_the_rows_of_its_request_and_no_other(tiny: Any) -> None:
    """Without padding, prompt and answer, inputs and outputs; also of the model itself, whose cache it does not get."""
    engine = Engine(*tiny)
    release = held_back(engine)
    KEPT.clear()
    own = {**OWN, "target_modules": [LAYER, ""]}
    watched = Answer()
    ask(engine, PROMPTS[0], max_tokens=4)
    request = GenerationRequest("mine", PROMPTS[1], max_tokens=4, ignore_eos=True, states=STATES, hooks=(own,))
    engine.submit(request, watched, allow=(__name__,))
    release()
    watched.wait()
    engine.close()
    at_layer = [each for each in KEPT if each[0]]
    of_model = [each for each in KEPT if not each[0]]  # it is called with keywords alone
    shown = torch.cat([output[0] if isinstance(output, tuple) else output for _, output, _ in at_layer], 1)
    assert torch.equal(shown[0], states(watched))
    assert [table.requests for *_, table in KEPT] == [("mine",)] * 8
    assert [table.phase for *_, table in at_layer] == ["prefill", *["decode"] * 3]
    assert [tuple(args[0].shape) for args, *_ in at_layer] == [(1, 2, 32), *[(1, 1, 32)] * 3]
    assert [tuple(output.logits.shape[:2]) for _, output, _ in of_model] == [(1, 2), *[(1, 1)] * 3]
    assert [output.past_key_values for _, output, _ in of_model] == [None] * 4
    KEPT.clear()


class Swapped(nn.Module):
    """Takes the rows of the batch in another order, as experts may, and returns them in order."""

    def forward(self, swapped: torch.Tensor) -> torch.Tensor:
        return swapped.flip(0)


class Mlp(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.swapped = mlp, Swapped()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.swapped(self.mlp(x).flip(0))


def test_a_hook_gets_nothing_of_another_request_from_inputs_or_storage() -> None:
    """Where the order of inputs is not that of the batch they are not shown; what is shown is a copy of its rows."""
    model = small_model("Llama")
    model.model.layers[0].mlp = Mlp(model.model.layers[0].mlp)
    engine = Engine(model)
    release = held_back(engine)
    KEPT.clear()
    names = ["model.layers.0.mlp.swapped", "model.layers.0.mlp"]
    own = {**OWN, "target_modules": names}
    answers = [Answer(), ask(engine, PROMPTS[1], max_tokens=1)]
    request = GenerationRequest("mine", PROMPTS[1], max_tokens=1, hooks=(own,), states=StatesWanted(tuple(names)))
    engine.submit(request, answers[0], allow=(__name__,))
    release()
    for answer in answers:
        answer.wait()
    engine.close()
    (swapped, swapped_output, _), (mlp, mlp_output, _) = sorted(KEPT, key=lambda each: each[0][0] is not None)
    assert swapped == (None,)
    for shown in (swapped_output, mlp[0], mlp_output):
        assert tuple(shown.shape) == (1, 2, 32)
        assert shown.untyped_storage().nbytes() == shown.nbytes
    assert torch.equal(swapped_output[0], answers[0].finished.states[names[0]].values)
    KEPT.clear()


def test_a_probe_of_a_request_ends_its_answer_alone(tiny: Any, plain: list[Answer]) -> None:
    """The head comes as data; the flag is in the answer of the request that brought it."""
    head = ProbeHead([(torch.zeros(1, 32), torch.full((1,), 9.0))]).to_plain()  # finds everything
    config = {"head": head, "action": "stop", "name": "all"}
    probe = {"target_modules": [LAYER], "hook_factory": "hookline.factories:probe", "config": config}
    found = run_together(tiny, (), (probe,), ())
    assert [answer.ids for answer in (found[0], found[2])] == [plain[0].ids, plain[2].ids]
    assert found[1].ids == []
    assert found[1].finished.reason == "stop"
    assert [flag.tokens for flag in found[1].finished.flags] == [len(PROMPTS[1])]
    assert found[0].finished.flags == found[2].finished.flags == ()


def test_a_hook_that_raises_is_switched_off_and_told_and_no_answer_suffers(engine: Any, tiny: Any) -> None:
    """Also the request that brought it gets its answer."""
    broken = {"target_modules": [LAYER], "hook_factory": "helpers_http:breaks_later", "config": {"after": 2}}
    answer = Answer()
    request = GenerationRequest("r", PROMPTS[0], max_tokens=5, ignore_eos=True, hooks=(broken, STATS))
    engine.submit(request, answer, allow=("helpers_http",))
    assert answer.wait().ids == alone(tiny[0], PROMPTS[0], 5)
    first, second = answer.finished.hooks
    assert (first["errors"], first["rows"]) == (1, 7 + 1 + 1)
    assert "a hook of a stranger broke" in first["last_error"]
    assert (second["errors"], second["rows"]) == (0, 7 + 4)
    assert second["metrics"][f"{LAYER}/mean"] is not None


REFUSED = {
    "a factory of others": ({"target_modules": ["*"], "hook_factory": "os:system"}, NotAllowedError, "may not name"),
    "files": (
        {"target_modules": [LAYER], "hook_factory": "hookline.factories:export", "config": {"folder": "x"}},
        NotAllowedError,
        "gets none",
    ),
    "another kind": ({**STATS, "on": "forward_pre"}, OptionError, "on='forward'"),
    "no such module": ({**STATS, "target_modules": ["model.layrs.#"]}, NoMatchError, "nearest"),
    "no rows": ({**STATS, "target_modules": ["model.layers"]}, OptionError, "a row for each token"),
    "an option that it does not take": ({**STATS, "config": {"nope": 1}}, OptionError, "nope"),
    "a vector of another length": (
        {**steer(1.0), "config": {"vector": [1.0] * 7}},
        OptionError,
        rf"steer was given 7 numbers, and the output of {LAYER} has 32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_told_at_once(engine: Any, case: str) -> None:
    """The request is not taken, and what was made of its hooks before is closed."""
    spec, error, words = REFUSED[case]
    CLOSED.clear()
    good = {"target_modules": [LAYER], "hook_factory": f"{__name__}:tells_when_closed"}
    request = GenerationRequest("r", PROMPTS[0], hooks=(good, spec))
    with pytest.raises(error, match=words):
        engine.submit(request, Answer(), allow=(__name__,))
    unmade = ("a factory of others", "files", "another kind", "no such module")
    made_first = case not in unmade
    assert ["closed"] * made_first == CLOSED
    assert engine.counts()["requests_accepted"] == 0


CLOSED: list[str] = []


def tells_when_closed(config: dict[str, Any]) -> Any:
    class Hook:
        def __call__(self, module: Any, args: Any, output: Any) -> None: ...

        def close(self) -> None:
            CLOSED.append("closed")

    return Hook()


def test_hooks_are_closed_once_however_the_request_ends(tiny: Any) -> None:
    """Finished, cancelled while it waits, refused as too many wait."""
    engine = Engine(*tiny, max_waiting=2)
    release = held_back(engine)
    CLOSED.clear()
    hook = {"target_modules": [LAYER], "hook_factory": f"{__name__}:tells_when_closed"}

    def submit(name: str) -> tuple[Answer, Any]:
        answer = Answer()
        return answer, engine.submit(GenerationRequest(name, (5, 6), hooks=(hook,)), answer, allow=(__name__,))

    finishes, _ = submit("a")
    waits, ticket = submit("b")
    with pytest.raises(EngineBusy):
        submit("c")
    assert CLOSED == ["closed"]
    ticket.cancel()
    release()
    assert waits.wait().finished.reason == "cancelled"
    assert finishes.wait().finished.reason == "length"
    engine.close()
    assert CLOSED == ["closed"] * 3
    hl.assert_no_hooks(tiny[0], foreign=True)


def test_hooks_of_requests_that_wait_or_run_are_bounded_together(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many clients bring them; there is room again when one has ended."""
    monkeypatch.setattr(live_hooks, "MOST_PLACES", 2)
    engine = Engine(*tiny)
    release = held_back(engine)
    answers = {name: Answer() for name in "abcd"}

    def submit(name: str) -> None:
        engine.submit(GenerationRequest(name, (5, 6), hooks=(STATS,)), answers[name])

    submit("a")
    submit("b")
    with pytest.raises(EngineBusy, match="3 modules"):
        submit("c")
    release()
    assert answers["a"].wait().finished.reason == answers["b"].wait().finished.reason == "length"
    submit("d")
    assert answers["d"].wait().finished.hooks[0]["rows"] > 0
    engine.close()


# -- over HTTP -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with served(folder, settings={"token": None}) as found:
        yield found.client


BODY = {"prompt": list(PROMPTS[0]), "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}


def test_a_body_brings_hooks_as_it_does_on_vllm(client: httpx.Client, tiny: Any) -> None:
    """No token, as for any request; many at once, half of them steered, and none has what is another's."""
    steered, bare = {**BODY, "hooks": {"hooks": [{**steer(3.0), "name": "up"}, STATS]}}, BODY
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(client.post, "/v1/completions", json=[bare, steered][job % 2]) for job in range(24)]
        answers = [job.result() for job in jobs]
    assert {answer.status_code for answer in answers} == {200}
    choices = [answer.json()["choices"][0] for answer in answers]
    without, with_hooks = {each["text"] for each in choices[::2]}, {each["text"] for each in choices[1::2]}
    assert len(without) == len(with_hooks) == 1
    assert without != with_hooks
    assert all("hooks" not in each for each in choices[::2])
    for choice in choices[1::2]:
        first, second = choice["hooks"]["hooks"]
        assert (first["name"], first["rows"], first["errors"]) == ("up", 7 + 5, 0)
        assert (second["matched"], second["rows"]) == ([LAYER], 7 + 5)
    assert client.get("/hooks").json() == {"hooks": []}
