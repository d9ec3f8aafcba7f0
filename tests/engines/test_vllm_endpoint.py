"""The HTTP paths that hookline adds to ``vllm serve``, on workers and an app that stand for vLLM's."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
import torch
from helpers_endpoint import ASKED, BEARER, STATS, TOKEN, WANTED, Server, Workers, hook

from hookline.engines.vllm import worker_calls
from hookline.engines.vllm.endpoint_plugin import endpoint_settings
from hookline.engines.vllm.worker_calls import WorkerCalls
from hookline.errors import OptionError
from hookline.serve.http.error_answers import Refused
from hookline.serve.http.http_settings import Settings
from hookline.serve.http.request_bodies import HookBody


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN", TOKEN)
    return Server()


def test_hooks_go_on_and_off_in_all_workers(server: Server) -> None:
    """The paths, bodies and answers are those of ``hookline serve``; two workers make one answer."""
    added = server.ask("POST", "/hooks", json=STATS, headers=BEARER)
    assert (added.status_code, added.json()["fired_by_rank"]) == (201, {"0": 3, "1": 3})
    [(specs, allow, strict, origin)] = server.workers.of("hookline_add")
    assert (specs, allow, strict, origin) == (
        [{**STATS, "on_error": "disable", "config": {}}],
        ["hookline.factories"],
        True,
        "http",
    )
    listed = server.ask("GET", "/hooks").json()["hooks"]
    assert [(each["id"], each["fired"], each["missing_on"]) for each in listed] == [("h1", 3, [])]
    assert server.ask("DELETE", "/hooks/h1", headers=BEARER).json()["fired"] == 3
    assert server.workers.of("hookline_remove") == [("h1",)]
    page = server.ask("GET", "/metrics", headers={"Accept-Encoding": "gzip"}).text
    assert "vllm_requests 5" in page
    assert "hookline_engine_captured_bytes_reserved 128.0" in page
    assert "hookline_engine_not_computed_total 20.0" in page
    assert (
        'hookline_hook_metric{factory="hookline.factories:activation_stats",hook="h1",module="",name="stats",stat="mean"}'
        " 0.5" in page
    )


def test_who_has_no_token_changes_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same refusals as on our own server, and the workers are not asked."""
    before = len(server.workers.calls)
    for method, path in (("POST", "/hooks"), ("DELETE", "/hooks/h1")):
        assert server.ask(method, path, json=STATS).status_code == 401
        assert server.ask(method, path, json=STATS, headers={"Authorization": "Bearer other"}).status_code == 401
    assert len(server.workers.calls) == before
    assert server.ask("POST", "/v1/completions", json={"prompt": "w5"}).status_code == 200
    strict = Server({"hookline": {"protect": "everything"}})
    assert strict.ask("POST", "/v1/completions", json={"prompt": "w5"}).status_code == 401
    assert strict.ask("POST", "/v1/completions", json={"prompt": "w5"}, headers=BEARER).status_code == 200
    assert strict.ask("GET", "/health").status_code == 200
    monkeypatch.delenv("HOOKLINE_SERVE_TOKEN")
    assert Server().ask("POST", "/hooks", json=STATS, headers=BEARER).status_code == 403


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({**STATS, "hook_factory": "os:system"}, 403, "os:system"),
        ({**STATS, "hook_factory": "hookline.factories:export"}, 403, "export_dir in --additional-config"),
        ({**STATS, "evry": 2}, 400, "$.evry"),
        ({"hook_factory": "hookline.factories:log_shapes"}, 400, "$.target_modules"),
    ],
)
def test_a_spec_that_is_not_allowed_reaches_no_worker(server: Server, body: Any, status: int, words: str) -> None:
    """The allow-list, the export folder and the keys are checked in the server, before the workers."""
    if status == 403 and "os" in body["hook_factory"]:  # the workers have the allow-list
        server.workers.answers["hookline_add"] = {"error": {"type": "NotAllowedError", "message": "'os:system' is not"}}
    answer = server.ask("POST", "/hooks", json=body, headers=BEARER)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True)


def test_a_hook_that_one_worker_cannot_attach_is_on_none(server: Server) -> None:
    """What a worker has attached is removed again where another failed; one that lacks the module is told."""
    failed = {"error": {"type": "OptionError", "message": "no such option"}}
    server.workers.answers["hookline_add"] = lambda rank: failed if rank else {"hooks": [hook(rank)]}
    answer = server.ask("POST", "/hooks", json=STATS, headers=BEARER)
    assert (answer.status_code, "no such option" in answer.text) == (400, True)
    assert server.workers.of("hookline_remove") == [("h1",)]
    absent = {"error": {"type": "NoMatchError", "message": "nothing matches"}}
    server.workers.answers["hookline_add"] = lambda rank: absent if rank else {"hooks": [hook(rank)]}
    answer = server.ask("POST", "/hooks", json=STATS, headers=BEARER)
    assert (answer.status_code, answer.json()["missing_on"]) == (201, [1])
    server.workers.answers["hookline_remove"] = {"error": {"type": "HookNameError", "message": "no hook h9"}}
    assert server.ask("DELETE", "/hooks/h9", headers=BEARER).status_code == 404


def test_a_hook_that_is_refused_for_want_of_time_is_not_attached_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get to the call after its client was told 503: what they attach then is removed."""
    monkeypatch.setattr(worker_calls, "_PATIENCE_S", 0.02)

    async def try_it() -> Workers:
        workers, calls = Workers(), WorkerCalls(Settings(token=TOKEN))
        has_time = asyncio.Event()
        now = workers.collective_rpc

        async def later(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            if method == "hookline_add":
                await has_time.wait()
            return await now(method, args)

        monkeypatch.setattr(workers, "collective_rpc", later)
        calls.client = workers
        with pytest.raises(Refused, match="no time"):
            await calls.add(HookBody.model_validate(STATS))
        has_time.set()
        for _ in range(20):  # turns of the event loop
            await asyncio.sleep(0)
        return workers

    workers = asyncio.run(try_it())
    assert [method for method, _ in workers.calls] == ["hookline_add", "hookline_remove"]
    assert workers.of("hookline_remove") == [("h1",)]


def test_a_request_without_hooks_passes_untouched(server: Server) -> None:
    """The body that vLLM sees is the client's, and no worker is asked."""
    before = len(server.workers.calls)
    body = {"prompt": "hooks are no key here", "n": 2}
    answer = server.ask("POST", "/v1/completions", json=body)
    assert [set(each) for each in answer.json()["choices"]] == [{"index", "text", "finish_reason"}] * 2
    assert (server.bodies, len(server.workers.calls)) == ([body], before)


@pytest.mark.parametrize(("path", "id"), [("/v1/completions", "cmpl-{}-0"), ("/v1/chat/completions", "chatcmpl-{}")])
def test_hidden_states_come_with_the_answer(server: Server, path: str, id: str) -> None:
    """What is wanted goes to the workers in vllm_xargs, and what they have comes back in the choice."""
    body = {"prompt": "w5", "vllm_xargs": {"a": 1}, "hooks": {"hidden_states": {**WANTED, "window": [-2, None]}}}
    answer = server.ask("POST", path, json=body, headers={"X-Request-Id": "mine"})
    [body] = server.bodies
    options = json.loads(body["vllm_xargs"]["hookline"])
    plain = {"layers": ["model.norm"], "positions": "all", "phase": "both", "of": "output", "window": [-2, None]}
    assert options == {"hidden_states": plain}
    assert (body["vllm_xargs"]["a"], "hooks" in body, "cache_salt" in body) == (1, False, False)
    [name] = server.names
    assert name.startswith("mine-")
    assert server.workers.of("hookline_take_states") == [(id.format(name),)]
    [choice] = answer.json()["choices"]
    found = choice["hooks"]["hidden_states"]["model.norm"]
    assert (found["shape"], choice["hooks"]["tokens_not_computed"]) == ([1, 2], 4)
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert not server.workers.of("hookline_drop_states")


def test_a_stream_ends_each_choice_with_its_states(server: Server) -> None:
    """Events that end a choice wait for the others; all else is sent as vLLM sent it."""
    piece = {"choices": [{"index": 1, "text": "w5", "finish_reason": None}]}
    ends = [{"choices": [{"index": place, "text": "w6", "finish_reason": "stop"}]} for place in (1, 0)]
    server.events = [piece, ends[0], piece, ends[1], {"choices": [], "usage": {"total_tokens": 3}}, "[DONE]"]
    answer = server.ask("POST", "/v1/completions", json={"prompt": "w5", "n": 2, "stream": True, "hooks": ASKED})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert (lines[-1], json.loads(lines[0]), json.loads(lines[1])) == ("[DONE]", piece, piece)
    found = {each["choices"][0]["index"]: each["choices"][0] for each in map(json.loads, lines[2:4])}
    assert {place: _first(choice["hooks"]) for place, choice in found.items()} == {0: 0.0, 1: 1.0}
    assert json.loads(lines[4])["usage"] == {"total_tokens": 3}


def _first(hooks: dict[str, Any]) -> float:
    raw = bytearray(base64.b64decode(hooks["hidden_states"]["model.norm"]["data"]))
    return float(torch.frombuffer(raw, dtype=torch.float32)[0])


def test_who_fails_gets_no_states_and_leaves_none_behind(server: Server) -> None:
    """A request that vLLM refuses, and one whose layer no worker has, whole and streamed."""
    refused = server.ask("POST", "/v1/completions", json={"prompt": "bad", "hooks": ASKED})
    assert (refused.status_code, refused.json()) == (400, {"error": {"message": "no"}})
    assert not server.workers.of("hookline_drop_states")  # it never began
    # With several prompts some may have begun; whatever fails inside has. Each drops all its keys in one call.
    for prompt, copies in ((["w5", "bad"], 2), ("broken", 3)):
        server.ask("POST", "/v1/completions", json={"prompt": prompt, "n": copies, "hooks": ASKED})
    [[several], [broken]] = server.workers.of("hookline_drop_states")
    assert (len(set(several)), len(set(broken))) == (4, 3)
    unknown = {"error": {"type": "NoMatchError", "message": "'model.nrm' matches nothing"}}
    server.workers.answers["hookline_take_states"] = unknown
    answer = server.ask("POST", "/v1/completions", json={"prompt": "w5", "hooks": ASKED})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "'model.nrm' matches nothing")
    server.events = [{"choices": [{"index": 0, "text": "w6", "finish_reason": "stop"}]}, "[DONE]"]
    stream = server.ask("POST", "/v1/completions", json={"prompt": "w5", "stream": True, "hooks": ASKED})
    assert json.loads(stream.text.split("\n\n")[0][6:])["choices"][0]["hooks"] == {
        "error": "'model.nrm' matches nothing"
    }


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ({"hidden_states": {}}, "$.hooks.hidden_states.layers is missing"),
        ({"hidden_state": {"layers": ["a"]}}, "hidden_states"),
        ({"hidden_states": {"layers": ["a"], "bypass_cach": True}}, "bypass_cache"),
        ({"hidden_states": {"layers": ["a"], "positions": "first"}}, "$.hooks.hidden_states.positions"),
        ({"hidden_states": {"layers": ["a"], "window": [5, 2]}}, "ends before it starts"),
        (3, "$.hooks is an object, got 3"),
    ],
)
def test_hooks_of_a_request_that_are_not_valid_are_told(server: Server, hooks: Any, words: str) -> None:
    """The request does not reach vLLM."""
    answer = server.ask("POST", "/v1/completions", json={"prompt": "w5", "hooks": hooks})
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text
    assert not server.bodies


def test_settings_come_from_the_engines_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A token in a file wins over the variable; what is unknown stops the server."""
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN", TOKEN)
    found = endpoint_settings({"hookline": {"allow": ["mine"], "export_dir": str(tmp_path)}})
    assert (found.token, found.allow, found.export_dir) == (TOKEN, ("mine",), tmp_path)
    (tmp_path / "token").write_text("from-the-file\n")
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN_FILE", str(tmp_path / "token"))
    assert endpoint_settings(None).token == "from-the-file"
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(OptionError, match="cannot be read"):
        endpoint_settings(None)
    monkeypatch.delenv("HOOKLINE_SERVE_TOKEN_FILE")
    with pytest.raises(OptionError, match="protekt"):
        endpoint_settings({"hookline": {"protekt": "everything"}})
