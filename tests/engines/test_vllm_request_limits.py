"""What a client of ``vllm serve`` may ask of hookline: bodies, options for workers, how many answers, which paths."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_endpoint import ASKED, BEARER, STATS, TOKEN, Server

from hookline.engines.vllm.asked_hooks import read_request
from hookline.engines.vllm.endpoint_plugin import endpoint_settings
from hookline.errors import OptionError

DEEP = {"a": json.loads("[" * 40 + "]" * 40)}
OPTIONS = json.dumps({"hooks": [{**STATS, "on_error": "raise"}]})
HIDDEN = json.dumps({"prompt": "a", "vllm_xargs": {"hookline": json.dumps({"key": "victim"})}})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN", TOKEN)
    return Server()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps({"prompt": "a", "hooks": {"hooks": [{**STATS, "on_error": "raise"}]}}), "on_error"),
        (json.dumps({"prompt": "a", "vllm_xargs": {"hookline": OPTIONS}}), "on_error"),
        (json.dumps({"prompt": "a", "hooks": {"hooks": [STATS] * 65}}), "at most 64"),
        (json.dumps({"prompt": "a", "hooks": {"hooks": [{**STATS, "evry": 2}]}}), "evry"),
        (json.dumps({"prompt": "a", "hooks": {"hooks": [{**STATS, "config": DEEP}]}}), "32 deep"),
        (json.dumps({"prompt": "a", "hooks": {"key": "victim"}}), "leave key out"),
        (json.dumps({"prompt": "a", "hooks": {**ASKED, "key": None}}), "leave key out"),
        (HIDDEN, "leave key out"),
        (HIDDEN.replace("hook", "\\u0068ook").replace("key", "\\u006bey"), "leave key out"),
        (HIDDEN.encode("utf-16"), "leave key out"),
        (json.dumps({"vllm_xargs": {"hookline": "null"}}), "vllm_xargs.hookline"),
        (json.dumps({"vllm_xargs": "x", "hooks": ASKED}), "$.vllm_xargs is an object"),
        (json.dumps({"vllm_xargs": [], "hooks": ASKED}), "$.vllm_xargs is an object"),
        ('{"prompt": "a", "temperature": NaN, "hooks": {"hidden_states": {"layers": ["a"]}}}', "NaN"),
        ('{"hooks": ' + "[" * 100_000 + "]" * 100_000 + "}", "too deep"),
        (json.dumps({"vllm_xargs": {"hookline": "[" * 100_000 + "]" * 100_000}}), "too deep"),
    ],
)  # fmt: skip
def test_what_a_client_must_not_send_is_a_400_before_vllm(server: Server, content: str | bytes, words: str) -> None:
    """In either spelling, however it is written; the error has the usual form and no worker is asked."""
    before = len(server.workers.calls)
    answer = server.ask("POST", "/v1/completions", content=content)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text
    assert (server.bodies, len(server.workers.calls)) == ([], before)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt": "a", "n": 10**12}, "answers at once"),
        ({"prompt": ["a"] * 100_000}, "100000 answers at once"),
        ({"prompt": ["a"] * 13, "n": 5}, "65 answers at once"),
        ({"prompt": "a", "n": 0}, "$.n is a whole number"),
        ({"prompt": "a", "n": True}, "$.n is a whole number"),
        ({"prompt": "a", "n": "2"}, "$.n is a whole number"),
        ({"prompt": "a", "n": 2.0}, "$.n is a whole number"),
    ],
)
def test_the_answers_of_a_request_are_bounded_before_they_get_names(server: Server, asked: Any, words: str) -> None:
    """10**12 names would not fit into the memory. Without hooks it is vLLM that decides."""
    before = len(server.workers.calls)
    answer = server.ask("POST", "/v1/completions", json={**asked, "hooks": ASKED})
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text
    assert (server.bodies, len(server.workers.calls)) == ([], before)
    assert read_request(json.dumps(asked).encode()) is None
    most = read_request(json.dumps({"prompt": ["a"] * 16, "n": 4, "hooks": ASKED}).encode())
    assert most is not None
    assert len(set(most.keys)) == 64


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a", "vllm_xargs": {"hookline": "{}"}}),
        ("/inference/v1/generate", {"sampling_params": {"extra_args": {"hookline": {"key": "victim"}}}}),
    ],
)
def test_other_paths_take_no_options_for_workers(server: Server, path: str, body: Any) -> None:
    """Their answers have no place for states, and nothing there would check the options."""
    assert "takes no hooks" in server.ask("POST", path, json=body).json()["error"]["message"]
    assert not server.bodies
    assert server.ask("POST", path, json={"prompt": "a", "vllm_xargs": {"a": 1}}).status_code == 200


def test_a_body_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announced or counted while it is read; one that fits passes."""
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN", TOKEN)
    server = Server({"hookline": {"max_body": 2048}})

    async def pieces() -> Any:
        for _ in range(3):
            yield b" " * 1000

    for content in (b" " * 3000, pieces()):
        answer = server.ask("POST", "/v1/completions", content=content)
        assert (answer.status_code, "max_body in --additional-config" in answer.text) == (413, True)
    assert not server.bodies
    assert server.ask("POST", "/v1/completions", json={"prompt": "w" * 1900}).status_code == 200
    with pytest.raises(OptionError, match="max_body"):
        endpoint_settings({"hookline": {"max_body": "2M"}})


def test_the_path_of_a_proxy_goes_around_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--root-path`` routes are found with and without it: the token and the checks hold for both."""
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN", TOKEN)
    server = Server(root_path="/proxy")
    for root in ("", "/proxy"):
        assert server.ask("POST", f"{root}/hooks", json=STATS).status_code == 401
        assert server.ask("POST", f"{root}/hooks", json=STATS, headers=BEARER).status_code == 201
        assert server.ask("POST", f"{root}/v1/completions", content=HIDDEN).status_code == 400
        assert server.ask("POST", f"{root}/v1/completions", json={"prompt": "w5"}).status_code == 200
