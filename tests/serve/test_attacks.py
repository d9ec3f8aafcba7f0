"""What strangers have tried: each is refused in a status, nothing of it stays, and nobody else has to wait for it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from helpers_http import BEARER, TOKEN, served
from helpers_waiting import PATIENCE, until
from starlette.applications import Starlette
from starlette.routing import Mount

from hookline.serve.http import hook_routes
from hookline.serve.http.app import Serving, make_app, make_hook_app
from hookline.serve.http.hook_routes import LiveHookPaths
from hookline.serve.http.request_gate import Settings

ALARM = {"target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:nan_alarm"}
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Any]:
    with served(folder, settings={"allow": ("helpers_http",)}, captured_bytes=9 * 256) as found:
        yield found


@pytest.mark.parametrize("kind", ["bare", "mounted", "behind a proxy", "the hook paths of another engine"])
def test_the_token_is_asked_for_wherever_the_app_is_put(kind: str) -> None:
    """Routes are found without the path of a mount or a proxy, and so is what needs the token."""
    settings = Settings(token=TOKEN)
    app = make_hook_app(LiveHookPaths(Serving(), settings)) if "engine" in kind else make_app(None, settings)
    root = "" if kind in ("bare", "mounted") else "/llm"
    client = TestClient(Starlette(routes=[Mount("/llm", app=app)]) if kind == "mounted" else app, root_path=root)
    path = "/hooks" if kind == "bare" else "/llm/hooks"
    for headers, status in (({}, 401), (BEARER, 503)):  # with it, there is no model yet
        assert client.post(path, json=ALARM, headers={"Host": "localhost", **headers}).status_code == status
        assert client.delete(f"{path}/h1", headers={"Host": "localhost", **headers}).status_code == status


def test_what_token_holders_may_name_is_not_for_requests(server: Any, folder: Path) -> None:
    """``allow`` is for ``POST /hooks``; a request without the token needs a list of its own."""
    spec = {**ALARM, "hook_factory": "helpers_http:slow"}
    body = {**BODY, "hooks": {"hooks": [spec]}}
    hook = server.client.post("/hooks", json=spec, headers=BEARER)
    assert hook.status_code == 201
    server.client.delete(f"/hooks/{hook.json()['id']}", headers=BEARER).raise_for_status()
    assert server.client.post("/v1/completions", json=body).status_code == 403
    with served(folder, settings={"allow_requests": ("helpers_http",)}) as open_server:
        assert open_server.client.post("/v1/completions", json=body).status_code == 200


def test_a_hook_that_is_refused_for_want_of_time_is_not_attached_later(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """429 while a forward runs for too long; "try again" would have attached it twice."""
    monkeypatch.setattr(hook_routes, "PATIENCE_S", 0.05)
    gate = threading.Event()
    server.engine.between(lambda: gate.wait(PATIENCE))
    answer = server.client.post("/hooks", json={**ALARM, "hook_factory": "helpers_http:slow"}, headers=BEARER)
    gate.set()
    assert (answer.status_code, "no time" in answer.text) == (429, True)
    server.engine.between(lambda: None).result()
    assert server.client.get("/hooks").json() == {"hooks": []}


def test_the_answers_of_a_request_share_the_room_of_states(server: Any) -> None:
    """64 prompts held 60 times as much as all requests together may."""
    states = {"hooks": {"hidden_states": {"layers": ["model.layers.#"]}}, "max_tokens": 0}
    answer = server.client.post("/v1/completions", json={**BODY, **states, "prompt": [[5, 6, 7]] * 4})
    assert (answer.status_code, "or answers" in answer.text) == (400, True)
    for _ in range(3):  # what was sent is let go
        fits = server.client.post("/v1/completions", json={**BODY, **states, "prompt": [[5, 6, 7]] * 3})
        assert fits.status_code == 200
    until(lambda: server.engine.counts()["captured_bytes_reserved"] == 0, "all is let go")


@pytest.mark.parametrize(
    ("hooks", "n", "words"),
    [
        ({"hidden_states": {"layers": [f"model.layers.{i % 2}*" for i in range(1024)]}}, 4, "256"),
        ({"hooks": [{**ALARM, "target_modules": ["*"]}] * 64}, 64, "4096 is the most"),
    ],
)
def test_what_would_keep_everybody_waiting_is_refused_at_once(server: Any, hooks: Any, n: int, words: str) -> None:
    """Patterns that were matched for 100 s on the event loop; hooks that took 20 minutes to attach and call."""

    async def ask() -> tuple[httpx.Response, float]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json={**BODY, "n": n, "hooks": hooks}))
            slowest = 0.0
            while not asked.done():
                start = time.perf_counter()
                assert (await client.get("/health")).status_code == 200
                slowest = max(slowest, time.perf_counter() - start)
            return await asked, slowest

    answer, slowest = asyncio.run(ask())
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True)
    assert slowest < 5.0


def test_what_is_loaded_is_not_gone_through_while_clients_wait(folder: Path) -> None:
    """A full collection of what torch and a model bring held up everybody for 0.7 s; afterwards all is as before."""
    with served(folder):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
