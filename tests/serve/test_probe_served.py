"""A probe that was trained offline, on a served model: flags in answers, and answers that end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_http import BEARER, served
from helpers_serve import ask

import hookline as hl
from hookline.factories import train_probe

PROMPTS = ((5, 6, 7, 8), (20, 21, 22, 23, 24, 25))


@pytest.fixture(scope="module")
def answers(tiny: Any) -> list[list[int]]:
    """What the model answers to the prompts, by `generate`."""
    model, _ = tiny
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def train_for(model: Any, token: int, file: Path) -> dict[str, Any]:
    """Train a probe that tells one token by its embedding; return the spec that serves it."""
    vocabulary = torch.arange(model.config.vocab_size)
    with torch.no_grad(), hl.capture(model, role="embed", detach=True, stop=True) as cache:
        model(vocabulary[:, None])
    table = cache["model.embed_tokens"].output[:, 0]
    head = train_probe(table, vocabulary == token, weight_decay=1e-5, held_out=0.0)
    assert ((head.scores(table) > 0.5).nonzero().flatten().tolist()) == [token]
    head.save(file)
    return {
        "name": "one token",
        "target_modules": ["role:embed"],
        "hook_factory": "hookline.factories:probe",
        "config": {"file": str(file), "name": "one token"},
    }


def test_flags_are_in_the_answer_of_their_request_alone(
    engine: Any, tiny: Any, answers: list[list[int]], tmp_path: Path
) -> None:
    """Two requests run beside each other; each is told of its own tokens, in prompt and answer, and loses none."""
    spec = train_for(tiny[0], PROMPTS[0][2], tmp_path / "probe.safetensors")
    live = engine.hooks.add({**spec, "config": {**spec["config"], "action": "flag"}})
    counts = {"model.embed_tokens/flagged": 0.0, "model.embed_tokens/tokens": 0.0}
    assert engine.hooks.metrics()[live.id] == counts  # so that an alert has its series
    running = [ask(engine, prompt, max_tokens=8) for prompt in PROMPTS]
    for prompt, answer, expected in zip(PROMPTS, running, answers, strict=True):
        assert answer.wait().ids == expected
        run = [*prompt, *expected[:-1]]  # the last token is run by no forward
        places = [place for place, token in enumerate(run) if token == PROMPTS[0][2]]
        flags = answer.finished.flags
        assert [(flag.tokens, flag.position) for flag in flags] == ([(len(places), places[0])] if places else [])
    assert running[0].finished.flags[0].module == "model.embed_tokens"
    assert live.errors == 0
    engine.hooks.remove(live.id)
    assert ask(engine, PROMPTS[0], max_tokens=2).wait().finished.flags == ()


def test_a_probe_that_stops_ends_one_answer_before_the_next_token(
    engine: Any, tiny: Any, answers: list[list[int]], tmp_path: Path
) -> None:
    """The answer is the beginning of the whole one, up to the flagged token; the other request is untouched."""
    token = next(each for each in answers[0][2:] if each not in (*answers[1], *PROMPTS[0], *PROMPTS[1]))
    spec = train_for(tiny[0], token, tmp_path / "probe.safetensors")
    engine.hooks.add({**spec, "config": {**spec["config"], "action": "stop"}})
    one, other = [ask(engine, prompt, max_tokens=8) for prompt in PROMPTS]
    until = answers[0].index(token) + 1
    if until < len(answers[0]):
        assert one.wait().ids == answers[0][:until]
        assert (one.finished.reason, one.finished.flags[0].stops) == ("stop", True)
    assert other.wait().ids == answers[1]
    assert other.finished.flags == ()
    stopped = ask(engine, (token, 5), max_tokens=8).wait()
    assert (stopped.ids, stopped.finished.reason) == ([], "stop")


def test_flags_of_a_probe_are_in_answers_over_http(folder: Path, tiny: Any, tmp_path: Path) -> None:
    """In a whole answer, at the end of a stream and beside hidden states; an answer without flags has none."""
    spec = train_for(tiny[0], PROMPTS[0][1], tmp_path / "probe.safetensors")
    spec["config"] = {"file": "probe.safetensors", "name": "second", "action": "flag"}
    body = {"prompt": PROMPTS[0], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    states = {"hooks": {"hidden_states": {"layers": ["role:resid"]}}}
    with served(folder, settings={"allow": ("hookline.factories",), "export_dir": tmp_path}) as server:
        client = server.client
        assert client.post("/hooks", json=spec, headers=BEARER).status_code == 201
        whole, beside = [client.post("/v1/completions", json={**body, **more}).json() for more in ({}, states)]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
        other = client.post("/v1/completions", json={**body, "prompt": PROMPTS[1], "max_tokens": 0}).json()
    assert "hooks" not in other["choices"][0]
    assert set(beside["choices"][0]["hooks"]["hidden_states"]) == {"model.layers.0", "model.layers.1"}
    for found in (whole, beside, json.loads(lines[-1])):
        flags = found["choices"][0]["hooks"]["flags"]
        assert [(flag["probe"], flag["module"], flag["position"], flag["stopped"]) for flag in flags] == [
            ("second", "model.embed_tokens", 1, False)
        ]
