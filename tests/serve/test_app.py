"""What the HTTP side of a served model answers: completions, streams, hidden states, hooks, metrics.

One server for the file, in a thread, with real sockets.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers_http import BEARER, served
from helpers_waiting import PATIENCE, until

import hookline as hl

PROMPT = "A hook sits at a site"
OTHER = "The quick brown fox jumps over the lazy dog, twice a day."
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
STATS = {"name": "stats", "target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    settings = {
        "allow": ("hookline.factories", "helpers_http"),
        "export_dir": tmp_path_factory.mktemp("exports"),
        "max_body": 100_000,
    }
    with served(folder, settings=settings) as found:
        yield found


@pytest.fixture
def client(server: Any) -> Iterator[httpx.Client]:
    yield server.client
    for hook in server.client.get("/hooks").json()["hooks"]:
        server.client.delete(f"/hooks/{hook['id']}", headers=BEARER)


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[Any, Any]:
    """The same model, not served."""
    from hookline.serve.load_model import load

    return load(folder, device="cpu")


def _complete(client: httpx.Client, prompt: Any = PROMPT, **options: Any) -> Any:
    answer = client.post("/v1/completions", json={"prompt": prompt, **GREEDY, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def _events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _tensor(found: dict[str, Any]) -> torch.Tensor:
    raw = bytearray(base64.b64decode(found["data"]))
    return torch.frombuffer(raw, dtype=getattr(torch, found["dtype"])).reshape(found["shape"])


def _greedy(alone: tuple[Any, Any], prompt: str, length: int) -> list[int]:
    model, tokenizer = alone
    ids = torch.tensor([tokenizer.encode(prompt)])
    with torch.inference_mode():
        for _ in range(length):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0].tolist()


# -- completions -----------------------------------------------------------------------------------------------


def test_a_greedy_completion_is_what_the_model_says_without_a_server(client: httpx.Client, alone: Any) -> None:
    """The text is the model's own, and the usage counts its tokens."""
    prompt = alone[1].encode(PROMPT)
    expected = alone[1].decode(_greedy(alone, PROMPT, 8)[len(prompt) :])
    answer = _complete(client)
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": 8, "total_tokens": len(prompt) + 8
    }  # fmt: skip


def test_prompts_come_as_text_as_tokens_or_as_lists_of_either(client: httpx.Client, alone: Any) -> None:
    """The four forms of a prompt mean the same; several prompts and ``n`` give several choices, in order."""
    ids, other = alone[1].encode(PROMPT), alone[1].encode(OTHER)
    text = _complete(client)["choices"][0]["text"]
    assert _complete(client, ids)["choices"][0]["text"] == text
    several = _complete(client, [PROMPT, OTHER], n=2)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == len(ids) + len(other)
    texts = [choice["text"] for choice in several["choices"]]
    assert texts == [text, text, texts[2], texts[2]]
    assert texts[2] != text
    assert [choice["text"] for choice in _complete(client, [ids, other])["choices"]] == [text, texts[2]]


def test_a_stream_says_the_same_as_the_whole_answer(client: httpx.Client) -> None:
    """The pieces of a stream are the text; the last of each choice has the reason; usage comes if asked for."""
    whole = _complete(client, [PROMPT, OTHER])
    answer = client.post(
        "/v1/completions",
        json={"prompt": [PROMPT, OTHER], **GREEDY, "stream": True, "stream_options": {"include_usage": True}},
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = _events(answer.text)
    assert events[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        pieces = [c for event in events for c in event["choices"] if c["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces][-1] == "length"


def test_logprobs_are_those_of_the_model(client: httpx.Client, alone: Any) -> None:
    """A chosen token has the log-probability that the model gives it, and greedy takes the likeliest."""
    found = _complete(client, logprobs=2)["choices"][0]["logprobs"]
    model, tokenizer = alone
    ids = _greedy(alone, PROMPT, 8)
    start = len(tokenizer.encode(PROMPT))
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [wanted[place - 1, ids[place]].item() for place in range(start, len(ids))]
    assert found["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    assert [max(top.values()) for top in found["top_logprobs"]] == pytest.approx(expected, abs=1e-3)
    assert found["tokens"] == [tokenizer.decode([each]) for each in ids[start:]]


def test_token_ids_come_with_the_answer_if_asked_for(client: httpx.Client, alone: Any) -> None:
    """Whole and in a stream, where a token may have no text yet."""
    expected = _greedy(alone, PROMPT, 8)[len(alone[1].encode(PROMPT)) :]
    assert _complete(client, return_token_ids=True)["choices"][0]["token_ids"] == expected
    body = {"prompt": PROMPT, **GREEDY, "stream": True, "return_token_ids": True}
    events = _events(client.post("/v1/completions", json=body).text)
    assert [id for event in events for id in event["choices"][0]["token_ids"]] == expected
    assert "token_ids" not in _complete(client)["choices"][0]


# -- hidden states ---------------------------------------------------------------------------------------------


def _asked(**states: Any) -> dict[str, Any]:
    return {"hooks": {"hidden_states": {"layers": ["model.layers.#"], **states}}}


def test_hidden_states_come_back_as_the_model_has_them(client: httpx.Client, alone: Any) -> None:
    """A whole answer and the last event of a stream carry the same numbers: those of a forward elsewhere."""
    ids = _greedy(alone, PROMPT, 8)
    with torch.inference_mode():
        layers = alone[0](torch.tensor([ids]), output_hidden_states=True).hidden_states
    whole = _complete(client, **_asked())["choices"][0]["hooks"]["hidden_states"]
    assert list(whole) == ["model.layers.0", "model.layers.1"]
    found = whole["model.layers.0"]
    assert found["positions"] == list(range(len(ids) - 1))  # the last token goes through no forward
    torch.testing.assert_close(_tensor(found), layers[1][0, :-1], atol=1e-3, rtol=1e-3)

    events = _events(client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, **_asked(), "stream": True}).text)
    assert events[-1]["choices"][0]["hooks"]["hidden_states"] == whole


# -- hooks -----------------------------------------------------------------------------------------------------


def test_a_hook_goes_on_fires_and_comes_off(client: httpx.Client) -> None:
    """POST attaches, GET shows what it does, DELETE takes it off and tells the last; a second DELETE finds nothing."""
    added = client.post("/hooks", headers=BEARER, json=STATS)
    assert added.status_code == 201
    hook = added.json()
    assert hook["matched"] == ["model.layers.0", "model.layers.1"]
    assert (hook["fired"], hook["cost_us"]) == (0, None)
    _complete(client)
    (listed,) = client.get("/hooks").json()["hooks"]
    assert listed["fired"] == 2 * 8  # two layers, eight forwards
    assert listed["cost_us"] > 0
    removed = client.delete(f"/hooks/{hook['id']}", headers=BEARER)
    assert (removed.status_code, removed.json()["fired"]) == (200, 16)
    _complete(client)
    assert client.get("/hooks").json() == {"hooks": []}
    again = client.delete(f"/hooks/{hook['id']}", headers=BEARER)
    assert again.status_code == 404
    assert "there is none" in again.json()["error"]["message"]


def test_modules_are_listed_with_the_width_of_what_they_return(client: httpx.Client, alone: Any) -> None:
    """By the patterns that hooks take; a vector of that width can be steered with, and another one cannot."""
    listed = client.get("/modules").json()["modules"]
    assert [each["name"] for each in listed] == hl.find(alone[0]).names
    blocks = client.get("/modules", params={"pattern": "model.layers.#"}).json()["modules"]
    parameters = sum(weight.numel() for weight in alone[0].model.layers[0].parameters())
    expected = {"type": "LlamaDecoderLayer", "parameters": parameters, "width": alone[0].config.hidden_size}
    assert blocks == [{"name": f"model.layers.{number}", **expected} for number in range(2)]
    assert client.get("/modules", params={"pattern": "role:attn"}).json()["modules"][0]["type"] == "LlamaAttention"
    (head,) = client.get("/modules", params={"pattern": "lm_head"}).json()["modules"]
    steer = {**STATS, "hook_factory": "hookline.factories:steer", "config": {"vector": [0.1] * head["width"]}}
    assert client.post("/hooks", headers=BEARER, json=steer).status_code == 400
    added = client.post("/hooks", headers=BEARER, json={**steer, "target_modules": ["lm_head"]}).json()
    _complete(client)
    (hook,) = client.get("/hooks").json()["hooks"]
    assert (hook["id"], hook["fired"], hook["errors"]) == (added["id"], 8, 0)
    assert hook["config"] == {"vector": [0.1] * 4 + [f"… {head['width'] - 4} more"]}
    assert (hook["observe"], hook["every"], hook["on_error"]) == (False, None, "disable")


def test_an_export_over_http_lands_in_the_export_folder(server: Any, client: httpx.Client) -> None:
    """A relative folder is one inside of --export-dir; when the hook comes off, all it took is on the disk."""
    from hookline.factories import read_export

    spec = {**STATS, "hook_factory": "hookline.factories:export", "config": {"folder": "mine"}}
    hook = client.post("/hooks", headers=BEARER, json=spec).json()
    assert hook["config"] == {"folder": "mine"}
    assert str(server._settings.export_dir) not in client.get("/hooks").text  # which anybody here may read
    answer = _complete(client)
    client.delete(f"/hooks/{hook['id']}", headers=BEARER).raise_for_status()
    inside = client.post("/hooks", headers=BEARER, json={**spec, "config": {"folder": None}}).json()
    assert inside["config"] == {"folder": "."}, "no folder is the export folder, not the server's own"
    client.delete(f"/hooks/{inside['id']}", headers=BEARER).raise_for_status()
    records = list(read_export(server._settings.export_dir / "mine"))
    assert {record.module for record in records} == {"model.layers.0", "model.layers.1"}
    assert {record.request for record in records} == {answer["id"]}
    tokens = answer["usage"]["prompt_tokens"] + 7
    assert sum(len(record.positions) for record in records) == 2 * tokens


STEER = {
    "name": "a",
    "target_modules": ["model.layers.0"],
    "hook_factory": "hookline.factories:steer",
    "config": {"vector": [3.0] * 16 + [-3.0] * 16, "requests": ["exp-a-*"]},
}


def _steered_tokens(client: httpx.Client) -> float:
    page = client.get("/metrics").text
    return float(next(line for line in page.splitlines() if 'stat="steered_tokens"' in line).rpartition(" ")[2])


def test_a_hook_for_named_requests_steers_these_and_leaves_their_neighbours_alone(
    server: Any, client: httpx.Client
) -> None:
    """A route takes a name, and gives it back; requests of other names, in the same batch too, answer as they do
    without the hook. The count of steered tokens tells a hook that met nobody from one that did."""
    plain = _complete(client)["choices"][0]["text"]
    client.post("/hooks", headers=BEARER, json=STEER).raise_for_status()
    assert _complete(client)["choices"][0]["text"] == plain
    assert _steered_tokens(client) == 0  # and it has fired
    answers = _in_one_batch(server, ["exp-a-1", "exp-b-1", "exp-a-2", "exp-b-2"])
    texts = {}
    for name, answer in answers.items():
        assert (answer.headers["X-Request-Id"], answer.json()["id"]) == (name, name)
        texts[name] = answer.json()["choices"][0]["text"]
    assert texts["exp-b-1"] == texts["exp-b-2"] == plain
    assert texts["exp-a-1"] == texts["exp-a-2"] != plain
    tokens = answers["exp-a-1"].json()["usage"]["prompt_tokens"] + 7  # the last one passes through no forward
    assert _steered_tokens(client) == 2 * tokens


def _in_one_batch(server: Any, asked: list[str]) -> dict[str, httpx.Response]:
    """Send requests by their names while the engine stands still, so that they begin together."""
    held, go = threading.Event(), threading.Event()
    server.engine.between(lambda: (held.set(), go.wait(PATIENCE)))
    assert held.wait(PATIENCE)
    answers: dict[str, httpx.Response] = {}

    def ask(name: str) -> None:
        body = {"prompt": PROMPT, **GREEDY}
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as own:
            answers[name] = own.post("/v1/completions", json=body, headers={"X-Request-Id": name})

    threads = [threading.Thread(target=ask, args=(name,)) for name in asked]
    for thread in threads:
        thread.start()
    try:
        until(lambda: server.engine.counts()["requests_waiting"] == len(asked), "all wait")
        refused = server.client.post("/v1/completions", json={"prompt": PROMPT}, headers={"X-Request-Id": asked[0]})
        assert refused.status_code == 400  # two requests of one name would share what hooks do
        assert "is waiting or running already" in refused.text
    finally:
        go.set()
        for thread in threads:
            thread.join(PATIENCE)
    return answers


def test_metrics_are_prometheus_text_and_count_what_happened(server: Any, client: httpx.Client) -> None:
    """Every line parses; engine, hooks, exports and HTTP are among them, and the counts go up."""
    from prometheus_client.parser import text_string_to_metric_families

    export = {**STATS, "hook_factory": "hookline.factories:export", "config": {"folder": "metered"}}
    client.post("/hooks", headers=BEARER, json=export).raise_for_status()
    before = server.engine.counts()["answer_tokens"]
    _complete(client)
    page = client.get("/metrics").text
    families = list(text_string_to_metric_families(page))
    samples = {
        (sample.name, sample.labels.get("stat")): sample.value for family in families for sample in family.samples
    }
    for family in families:
        assert family.type in ("counter", "gauge")
        assert len(family.documentation.split()) >= 3, family.name
    assert page.count("# HELP ") == page.count("# TYPE ") == len(families)
    assert samples["hookline_engine_answer_tokens_total", None] == before + 8
    assert samples["hookline_hook_fired_total", None] == 16
    assert samples["hookline_hook_metric", "dropped"] == 0
    assert {("hookline_hook_metric", "written_bytes"), ("hookline_hook_metric", "queued_bytes")} <= set(samples)


# -- clients that go -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_takes_its_request_out_of_the_engine(
    server: Any, client: httpx.Client, stream: bool
) -> None:
    """After a disconnect, in a stream or while waiting, the engine cancels the sequence and is idle again."""
    slow = {"target_modules": ["model.norm"], "hook_factory": "helpers_http:slow", "config": {"seconds": 0.05}}
    client.post("/hooks", headers=BEARER, json=slow).raise_for_status()
    before = server.engine.counts()
    body = {"prompt": PROMPT, **GREEDY, "max_tokens": 200, "stream": stream}
    if stream:
        with (
            httpx.Client(base_url=server.url, timeout=PATIENCE) as own,
            own.stream("POST", "/v1/completions", json=body) as s,
        ):
            next(s.iter_lines())
    else:
        with httpx.Client(base_url=server.url, timeout=0.5) as own, pytest.raises(httpx.ReadTimeout):
            own.post("/v1/completions", json=body)
    gone = before["requests_cancelled"] + 1
    until(lambda: server.engine.counts()["requests_cancelled"] == gone, "it is cancelled")
    after = server.engine.counts()
    assert after["requests_running"] == 0
    assert after["answer_tokens"] - before["answer_tokens"] < 150
