"""The HTTP paths that hookline adds to ``vllm serve``, on workers and an app that stand for vLLM's."""

from __future__ import annotations

import asyncio
import base64
import uuid
from typing import Any

import pytest
import torch
from helpers_endpoint import BEARER, STATS, TOKEN, Server, Workers, hook, result

from hookline.engines.request_options import ClientHook
from hookline.errors import OptionError
from hookline.serve.http import vllm_endpoints
from hookline.serve.http.error_answers import Refused
from hookline.serve.http.request_gate import Settings
from hookline.serve.http.vllm_endpoints import WorkerCalls, endpoint_settings

KEY = str(uuid.UUID(int=7))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN", TOKEN)
    return Server()


def test_hooks_go_on_and_off_in_all_workers(server: Server) -> None:
    """The paths, bodies and answers are those of ``hookline serve``; two workers make one answer."""
    added = server.ask("POST", "/hooks", json=STATS, headers=BEARER)
    assert (added.status_code, added.json()["fired_by_rank"]) == (201, {"0": 3, "1": 3})
    [(specs, allow)] = server.workers.of("hookline_add")
    assert ClientHook.from_dict(specs[0]) == ClientHook.from_dict(STATS)
    assert specs[0]["on_error"] == "disable"
    assert allow == ["hookline.factories"]
    listed = server.ask("GET", "/hooks").json()["hooks"]
    assert [(each["id"], each["fired"]) for each in listed] == [("h1", 3)]
    assert server.ask("DELETE", "/hooks/h1", headers=BEARER).json()["fired"] == 3
    assert server.workers.of("hookline_remove") == [("h1",)]
    page = server.ask("GET", "/hooks/metrics").text
    assert "hookline_engine_captured_bytes_reserved 128.0" in page
    assert "hookline_engine_not_computed_total 20.0" in page
    assert 'module="",name="stats",stat="mean"} 0.5' in page


def test_who_has_no_token_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same refusals as on our own server, also behind a proxy's path, and the workers are not asked."""
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN", TOKEN)
    server = Server(root_path="/proxy")
    before = len(server.workers.calls)
    for root in ("", "/proxy"):
        for method, path in (("POST", "/hooks"), ("DELETE", "/hooks/h1")):
            assert server.ask(method, root + path, json=STATS).status_code == 401
            other = {"Authorization": "Bearer other"}
            assert server.ask(method, root + path, json=STATS, headers=other).status_code == 401
    assert len(server.workers.calls) == before
    assert server.ask("POST", "/proxy/hooks", json=STATS, headers=BEARER).status_code == 201
    strict = Server({"hookline": {"protect": "everything"}})
    for path in ("/hooks", "/hooks/metrics", f"/hooks/results/{KEY}"):
        assert strict.ask("GET", path).status_code == 401
        assert strict.ask("GET", path, headers=BEARER).status_code == 200
    monkeypatch.delenv("HOOKLINE_SERVE_TOKEN")
    assert Server().ask("POST", "/hooks", json=STATS, headers=BEARER).status_code == 403


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({**STATS, "hook_factory": "os:system"}, 403, "os:system"),
        ({**STATS, "hook_factory": "hookline.factories:export"}, 403, "export_dir in --additional-config"),
        ({**STATS, "evry": 2}, 400, "evry"),
        ({"hook_factory": "hookline.factories:nan_alarm"}, 400, "target_modules"),
    ],
)
def test_a_spec_that_is_not_allowed_reaches_no_worker(server: Server, body: Any, status: int, words: str) -> None:
    """The allow-list, the export folder and the keys are checked in the server, before the workers."""
    if status == 403 and "os" in body["hook_factory"]:  # the workers have the allow-list
        server.workers.answers["hookline_add"] = {"error": {"type": "NotAllowedError", "message": "'os:system' is not"}}
    answer = server.ask("POST", "/hooks", json=body, headers=BEARER)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True)


def test_a_hook_that_one_worker_cannot_attach_is_on_none(server: Server) -> None:
    """What a worker has attached is removed again where another failed."""
    failed = {"error": {"type": "OptionError", "message": "no such option"}}
    server.workers.answers["hookline_add"] = lambda rank: failed if rank else {"hooks": [hook(rank)]}
    answer = server.ask("POST", "/hooks", json=STATS, headers=BEARER)
    assert (answer.status_code, "no such option" in answer.text) == (400, True)
    assert server.workers.of("hookline_remove") == [("h1",)]
    server.workers.answers["hookline_remove"] = {"error": {"type": "HookNameError", "message": "no hook h9"}}
    assert server.ask("DELETE", "/hooks/h9", headers=BEARER).status_code == 404


def test_a_hook_that_is_refused_for_want_of_time_is_not_attached_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get to the call after its client was told 503: what they attach then is removed."""
    monkeypatch.setattr(vllm_endpoints, "PATIENCE_S", 0.02)

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
            await calls.attach(ClientHook.from_dict(STATS))
        has_time.set()
        for _ in range(20):  # turns of the event loop
            await asyncio.sleep(0)
        return workers

    workers = asyncio.run(try_it())
    assert [method for method, _ in workers.calls] == ["hookline_add", "hookline_remove"]
    assert workers.of("hookline_remove") == [("h1",)]


def test_results_are_fetched_by_the_uuid_alone(server: Server) -> None:
    """An entry for each answer, of all workers; one that failed has its error, and beside it the others are whole."""
    wrong = {"type": "NoMatchError", "message": "'model.nrm' matches nothing"}
    entries = [result("0_cmpl-a-0", 3.0), result("1_cmpl-a-0", 4.0, states={}, error=wrong)]
    server.workers.answers["hookline_take"] = {"answers": entries}
    found = server.ask("GET", f"/hooks/results/{KEY.upper()}").json()["answers"]
    assert server.workers.of("hookline_take") == [(KEY,)]
    assert [(each["request"], each["error"]) for each in found] == [("0_cmpl-a-0", None), ("1_cmpl-a-0", wrong)]
    layer = found[0]["hidden_states"]["model.norm"]
    values = torch.frombuffer(bytearray(base64.b64decode(layer["data"])), dtype=torch.float32)
    assert (values.tolist(), layer["shape"], found[0]["tokens_not_computed"]) == ([3.0, 3.0], [1, 2], 4)
    gone = {"error": {"type": "HookNameError", "message": "Nothing is kept"}}
    server.workers.answers["hookline_take"] = gone
    assert server.ask("GET", f"/hooks/results/{KEY}").status_code == 404
    before = len(server.workers.calls)
    for guess in ("cmpl-a-0", "victim", KEY[:-1]):  # ids of other requests, which clients can guess
        assert server.ask("GET", f"/hooks/results/{guess}").status_code == 404
    assert len(server.workers.calls) == before


def test_what_vllm_answers_passes_untouched(server: Server) -> None:
    """Its routes see the bodies that clients send, and no worker is asked."""
    before = len(server.workers.calls)
    body = {"prompt": "w5", "n": 2, "vllm_xargs": {"hookline": "{}"}}
    assert server.ask("POST", "/v1/completions", json=body).json() == {"choices": 2}
    assert (server.bodies, len(server.workers.calls)) == ([body], before)


def test_settings_come_from_the_engines_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """And the token from the environment; what is unknown stops the server."""
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN", TOKEN)
    found = endpoint_settings({"hookline": {"allow": ["mine"], "export_dir": str(tmp_path)}})
    assert (found.token, found.allow, found.export_dir) == (TOKEN, ("mine",), tmp_path)
    with pytest.raises(OptionError, match="protekt"):
        endpoint_settings({"hookline": {"protekt": "everything"}})
