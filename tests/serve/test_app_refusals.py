"""What the HTTP side does not do: bad bodies, strangers, too much at once; and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_http import BEARER, TOKEN, served
from helpers_serve import tiny_llama
from helpers_waiting import PATIENCE, until
from pydantic import TypeAdapter, ValidationError

from hookline.errors import OptionError
from hookline.serve.http.request_bodies import CompletionBody
from hookline.serve.http.request_gate import AT_THE_END, Gate, Settings

LIMIT = 20_000
SPEC = {"target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:nan_alarm"}
LAYERS = {"layers": ["model.layers.0"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("refusing") / "tiny", length=64)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    exports = tmp_path_factory.mktemp("exports")
    (exports / "way_out").symlink_to("/")
    settings = {"allow": ("hookline.factories", "helpers_http"), "export_dir": exports, "max_body": LIMIT}
    with served(folder, settings=settings, max_batch=1, max_waiting=2) as found:
        yield found


@pytest.fixture
def client(server: Any) -> httpx.Client:
    found: httpx.Client = server.client
    return found


def _error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, which has the one shape that errors have."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    assert body["error"]["message"].endswith(".")
    return body["error"]


BAD_BODIES = {
    "no prompt": ({}, "$.prompt", "required"),
    "a mistyped prompt": ({"promt": "a"}, "$.promt", "Did you mean 'prompt'?"),
    "a number for a prompt": ({"prompt": 5}, "$.prompt", "prompt: expected a valid string, got 5."),
    "text for a number": ({"prompt": "a", "max_tokens": "5"}, "$.max_tokens", "valid integer, got '5'"),
    "a window and positions": (
        {"prompt": "a", "hooks": {"hidden_states": {"layers": ["a"], "positions": "last", "window": [-1, None]}}},
        "$.hooks",
        "positions or a window, not both",
    ),
    "a mistyped key": ({"prompt": "a", "temprature": 0}, "$.temprature", "Did you mean 'temperature'?"),
    "a hook of one request without a factory": (
        {"prompt": "a", "hooks": {"hooks": [{"target_modules": ["*"]}]}},
        "$.hooks",
        "hooks.hooks.0.hook_factory",
    ),
    "what is not done": ({"prompt": "a", "presence_penalty": 1.0}, "$", "presence_penalty is not done here; leave"),
    "a token that is none": ({"prompt": [999_999]}, None, "not in the model's vocabulary"),
    "a prompt that is too long": ({"prompt": "word " * 100}, None, "this model takes 64"),
    "too many answers": ({"prompt": ["a"] * 65}, None, "64 is the most"),
    "an unknown layer": ({"prompt": "a", "hooks": {"hidden_states": {"layers": ["model.layer.0"]}}}, None, "nearest"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_body_that_cannot_be_done_is_400_and_says_where(
    client: httpx.Client, body: dict[str, Any], param: str | None, words: str
) -> None:
    """Each mistake is told in a sentence, with the place in the body; streams are refused before they begin."""
    error = _error(client.post("/v1/completions", json=body), 400)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": ', "not JSON"),
        (b'["prompt"]', "a JSON object"),
        (b'{"prompt": "\\ud800"}', "unicode"),
        (b'{"prompt": "a", "temperature": NaN}', "finite"),
        (b"[" * 10_000, "parsing the body"),
    ],
)
def test_what_is_not_json_is_400_in_the_same_shape(client: httpx.Client, content: bytes, words: str) -> None:
    """Cut off, of another kind, empty, half characters, no numbers, too deep, too long, no text at all."""
    answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert words in _error(answer, 400)["message"]


@pytest.mark.parametrize("name", ["", "exp a", "exp-*", "x" * 129])
def test_a_name_that_is_none_is_refused(client: httpx.Client, name: str) -> None:
    """Nothing that a pattern of names could mean, or a log be spoiled by."""
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": name})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Id")


def test_a_page_of_another_site_gets_nothing_from_a_server_of_this_machine(client: httpx.Client) -> None:
    """A name that was turned to 127.0.0.1 is still in ``Host``, and the site in ``Origin``; the token opens both."""
    path, body = "/v1/completions", {"prompt": "a", "max_tokens": 1}
    elsewhere = ["evil.example", "evil.example:8000", "localhost.evil.example", "evil-localhost", "evillocalhost:80"]
    elsewhere += ["10.0.0.1", "[half", "", "null"]
    for headers in [{"Host": name} for name in elsewhere] + [{"Origin": f"http://{name}"} for name in elsewhere]:
        assert "names another machine" in _error(client.post(path, json=body, headers=headers), 403)["message"]
        _error(client.get("/hooks", headers=headers), 403)
        assert client.get("/health", headers=headers).status_code == 200
    for name in ("localhost:3000", "127.0.0.1", "[::1]:80", "app.localhost"):
        for headers in ({"Host": name}, {"Origin": f"http://{name}"}):
            assert client.post(path, json=body, headers=headers).status_code == 200, headers
    with_token = {"Host": "evil.example", "Authorization": f"Bearer {TOKEN}"}
    _error(client.delete("/hooks/h0", headers=with_token), 404)  # asked for with the token, and not there
    _error(_without_engine(Settings()).get("/modules", headers={"Host": "evil.example"}), 403)  # of an app alone, too
    open_app = _without_engine(Settings(local_only=False))
    assert open_app.get("/v1/models", headers={"Host": "evil.example"}).status_code == 200  # control


BAD_HOOKS = {
    "no factory": ({"target_modules": ["*"]}, 400, "hook_factory: Field required"),
    "no modules": ({"hook_factory": "hookline.factories:nan_alarm"}, 400, "target_modules: Field required"),
    "a list of specs": ([SPEC], 400, "is an object"),
    "a mistyped key": ({"hook_factory": "x:y", "target_module": "x"}, 400, "Did you mean 'target_modules'?"),
    "an unknown kind": ({**SPEC, "on": "forwrd"}, 400, "No kind 'forwrd'"),
    "no match": ({**SPEC, "target_modules": ["model.layrs.#"]}, 400, "No module matches 'model.layrs.#'"),
    "one of two matches": ({**SPEC, "target_modules": ["model.layers.#", "nope.*"]}, 400, "hookline find MODEL"),
    "an unknown factory": ({**SPEC, "hook_factory": "hookline.factories:nope"}, 403, "no factory"),
    "a factory that raises": ({**SPEC, "hook_factory": "helpers_http:raises"}, 400, "no such thing in stock"),
    "a vector of another length": (
        {**SPEC, "target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:steer",
         "config": {"vector": [1.0] * 7}},
        400, "steer was given 7 numbers, and the output of model.layers.0 has 32 for each token",
    ),
    "raising into requests": ({**SPEC, "on_error": "raise"}, 400, "on_error: expected"),
    "another module": ({**SPEC, "hook_factory": "os:system"}, 403, "not allowed"),
    "a prefix that only looks like it": ({**SPEC, "hook_factory": "hookline.factories_evil:x"}, 403, "not allowed"),
    "what an allowed module imported": ({**SPEC, "hook_factory": "helpers_http:Path"}, 403, "comes from 'pathlib'"),
    "what is no factory of ours": ({**SPEC, "hook_factory": "hookline.factories:Tokens"}, 403, "no factory"),
    "inside of our factories": ({**SPEC, "hook_factory": "hookline.factories.exporting:Export"}, 403, "no factory"),
    "a folder elsewhere": (
        {**SPEC, "hook_factory": "hookline.factories:export", "config": {"folder": "/elsewhere"}}, 403, "has to lie",
    ),
    "a folder behind a link": (
        {**SPEC, "hook_factory": "hookline.factories:export", "config": {"folder": "way_out/tmp"}}, 403, "has to lie",
    ),
    "a file elsewhere": (
        {**SPEC, "hook_factory": "hookline.factories:steer", "config": {"file": "/etc/passwd"}}, 403, "has to lie",
    ),
    "half a character in the name": ({**SPEC, "name": "\ud800"}, 400, "unicode"),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "status", "words"), BAD_HOOKS.values(), ids=BAD_HOOKS)
def test_a_hook_that_cannot_be_attached_leaves_nothing_behind(
    server: Any, client: httpx.Client, spec: Any, status: int, words: str
) -> None:
    """Whatever is wrong with it: a status, a sentence, and a model without hooks."""
    # httpx's own json= does not send half characters; anybody's curl does.
    headers = {**BEARER, "Content-Type": "application/json"}
    error = _error(client.post("/hooks", content=json.dumps(spec), headers=headers), status)
    assert words in error["message"]
    assert client.get("/hooks").json() == {"hooks": []}
    assert client.get("/metrics").status_code == 200
    assert not any(module._forward_hooks for module in server.engine.model.modules())


# -- strangers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN[:-1]}"]
)
def test_without_the_token_hooks_stay_as_they_are(client: httpx.Client, header: str | None) -> None:
    """Missing, empty, longer, shorter, of another scheme: 401, before the body is looked at."""
    headers = {} if header is None else {"Authorization": header}
    for answer in (
        client.post("/hooks", json=SPEC, headers=headers),
        client.post("/hooks", content=b"{not json", headers=headers),
        client.delete("/hooks/h1", headers=headers),
    ):
        assert "Authorization: Bearer" in _error(answer, 401)["message"]
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert client.get("/hooks").json() == {"hooks": []}


def test_the_token_counts_in_one_header_alone(client: httpx.Client) -> None:
    """Not in the query, nor where there are two headers, whichever has it; the scheme may be in small letters."""
    _error(client.delete(f"/hooks/h0?token={TOKEN}&access_token={TOKEN}"), 401)
    for both in ((f"Bearer {TOKEN}", "Bearer x"), ("Bearer x", f"Bearer {TOKEN}"), (f"Bearer {TOKEN}",) * 2):
        _error(client.delete("/hooks/h0", headers=[("Authorization", each) for each in both]), 401)
    _error(client.delete("/hooks/h0", headers={"authorization": f"bearer  {TOKEN}"}), 404)


def test_a_server_without_a_token_lets_nobody_change_hooks() -> None:
    """403 and what to do, with whatever token; reading stays open."""
    answer = _without_engine(Settings()).post("/hooks", json=SPEC, headers=BEARER)
    assert "--token-file" in _error(answer, 403)["message"]


def test_everything_can_need_the_token() -> None:
    """With protect="everything" only /health is open."""
    client = _without_engine(Settings(token=TOKEN, protect="everything"))
    for path in ("/hooks", "/modules", "/metrics", "/v1/models", "/openapi.json"):
        _error(client.get(path), 401)
    _error(client.post("/v1/completions", json={"prompt": "a"}), 401)
    assert client.get("/health").status_code == 503  # there is no model
    assert client.get("/v1/models", headers=BEARER).status_code == 200


def _without_engine(settings: Settings) -> Any:
    from fastapi.testclient import TestClient

    from hookline.serve.http.app import make_app

    return TestClient(make_app(None, settings), base_url="http://localhost")


def test_settings_that_would_let_everybody_in_are_errors() -> None:
    """An empty token is none; to protect everything takes one."""
    with pytest.raises(OptionError, match="token is empty"):
        Settings(token=" ")
    with pytest.raises(OptionError, match="there is no token"):
        Settings(protect="everything")
    with pytest.raises(OptionError, match="spaces or line breaks"):
        Settings(token="one\ntwo")


# -- too much --------------------------------------------------------------------------------------------------


def test_a_body_that_is_too_large_is_413(client: httpx.Client) -> None:
    """Announced or not, with the token or without; and the next request is answered."""
    body = json.dumps({"prompt": "a" * (2 * LIMIT)}).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    headers = {"Content-Type": "application/json"}
    for content in (body, pieces()):
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert f"larger than {LIMIT} bytes" in _error(answer, 413)["message"]
    spec = json.dumps(SPEC).encode()
    # What came before the limit is a valid body, and is not done all the same.
    padded_spec = (spec if place == 0 else b" " * 1000 for place in range(2 * LIMIT // 1000))
    _error(client.post("/hooks", content=padded_spec, headers={**headers, **BEARER}), 413)
    assert client.get("/hooks").json() == {"hooks": []}
    fits = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    padded = fits[:-1] + b" " * (LIMIT - len(fits)) + b"}"
    assert client.post("/v1/completions", content=padded, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 50_000 + ["a"]},
        {"prompt": ["a"] * 50_000},
        {"prompt": [[]] * 50_000},
        {"prompt": "a", "hooks": {"hidden_states": {**LAYERS, "positions": ["1"] * 50_000}}},
        {"prompt": "a", **{f"key {place}": 1 for place in range(50_000)}},
    ],
)
def test_a_body_full_of_mistakes_costs_as_much_as_one(body: dict[str, Any]) -> None:
    """Pydantic would make an error of every element: 20 s and 2 GB for a body of 4 MB, on the thread of everybody."""
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(CompletionBody).validate_python(body)
    assert caught.value.error_count() <= 4


@pytest.mark.parametrize("headers", [[], [(b"authorization", f"Bearer {TOKEN}".encode())]])
def test_a_body_that_does_not_come_is_408_or_what_it_is_anyway(headers: list[Any]) -> None:
    """A client that stops in the middle of its body does not keep its place for ever."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not sent_body:
            sent_body.append(1)
            return {"type": "http.request", "body": b'{"target_modules"', "more_body": True}
        await asyncio.sleep(60)
        raise AssertionError("waited a minute")

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    sent_body: list[int] = []
    gate = Gate(app, Settings(token=TOKEN, body_s=0.05))
    asyncio.run(gate({"type": "http", "method": "POST", "path": "/hooks", "headers": headers}, receive, send))
    assert [sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]] == [408 if headers else 401] * 2


def test_a_client_that_does_not_take_its_answer_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """An answer goes out in pieces, and holds its hidden states until the last: not for ever."""
    sent: list[Any] = []
    over: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope[AT_THE_END] = [lambda: over.append(True)]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 1_000_000})

    async def take(message: Any) -> None:
        sent.append(message)

    async def stop_taking(message: Any) -> None:
        if len(sent) == 2:
            await asyncio.sleep(60)
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    gate = Gate(app, Settings(body_s=0.05))
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    asyncio.run(gate(dict(scope), receive, take))
    assert b"".join(each.get("body", b"") for each in sent) == b"x" * 1_000_000
    assert [each.get("more_body", False) for each in sent[1:]] == [True, True, True, False]
    sent.clear()
    asyncio.run(gate(dict(scope), receive, stop_taking))
    assert (len(sent), over) == (2, [True, True])
    assert "took nothing of its answer" in caplog.text


def test_when_too_many_wait_the_next_is_told_to_come_back(server: Any, client: httpx.Client) -> None:
    """429 with Retry-After; of a request with several prompts nothing is left in the queue; then all is as before."""
    slow = {"target_modules": ["model.norm"], "hook_factory": "helpers_http:slow", "config": {"seconds": 0.1}}
    hook = client.post("/hooks", json=slow, headers=BEARER).json()["id"]
    long = {"prompt": "a", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json=long, timeout=PATIENCE))

    first = threading.Thread(target=ask)
    first.start()
    until(lambda: server.engine.counts()["requests_running"] == 1, "the first runs")
    answer = client.post("/v1/completions", json={**long, "prompt": ["a", "b", "c"]})
    assert "try again" in _error(answer, 429)["message"]
    assert answer.headers["Retry-After"] == "1"
    until(lambda: server.engine.counts()["requests_waiting"] == 0, "nothing of it waits")
    client.delete(f"/hooks/{hook}", headers=BEARER).raise_for_status()
    first.join()
    assert answers[0].status_code == 200
    assert client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1}).status_code == 200


def test_a_server_that_stops_finishes_what_runs_and_takes_no_more(folder: Path) -> None:
    """While it drains, /health and new requests get 503; the running one gets its whole answer."""
    long = {"prompt": "a", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    slow = {"target_modules": ["model.norm"], "hook_factory": "helpers_http:slow", "config": {"seconds": 0.1}}
    answers: list[httpx.Response] = []
    with served(folder, settings={"allow": ("helpers_http",)}) as server:
        whole = server.client.post("/v1/completions", json=long).json()["choices"]
        server.client.post("/hooks", json=slow, headers=BEARER).raise_for_status()

        def ask() -> None:
            answers.append(httpx.post(f"{server.url}/v1/completions", json=long, timeout=PATIENCE))

        asking, stopping = threading.Thread(target=ask), threading.Thread(target=server.stop)
        asking.start()
        until(lambda: server.engine.counts()["requests_running"] == 1, "it runs")
        stopping.start()
        until(lambda: server.serving.is_draining, "it drains")
        health = server.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        refused = server.client.post("/v1/completions", json=long)
        assert "stopping" in _error(refused, 503)["message"]
        asking.join()
        stopping.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["choices"] == whole


def test_a_server_that_cannot_wait_longer_cuts_answers_off_and_says_so(folder: Path) -> None:
    """After the bound a whole answer is a 503 and a stream ends with an error; half an answer never looks whole."""
    long = {"prompt": "a", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    slow = {"target_modules": ["model.norm"], "hook_factory": "helpers_http:slow", "config": {"seconds": 0.1}}
    answers: dict[bool, httpx.Response] = {}
    with served(folder, settings={"allow": ("helpers_http",), "drain_s": 0.3}) as server:
        server.client.post("/hooks", json=slow, headers=BEARER).raise_for_status()

        def ask(stream: bool) -> None:
            answers[stream] = httpx.post(
                f"{server.url}/v1/completions", json={**long, "stream": stream}, timeout=PATIENCE
            )

        asking = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in asking:
            thread.start()
        until(lambda: server.engine.counts()["requests_running"] == 2, "both run")
        server.stop()
        for thread in asking:
            thread.join()
    _error(answers[False], 503)
    assert answers[True].status_code == 200
    last = answers[True].text.split("\n\n")[-3:]
    assert '"code":503' in last[0]
    assert last[1] == "data: [DONE]"


def test_an_engine_that_fails_is_told_by_health(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that ends the engine's thread: the request gets an error, the next one 503, and /health says failed."""
    with served(folder) as server:
        monkeypatch.setattr(server.engine._loop, "enter", lambda rows: 1 / 0)
        ask = {"prompt": "a", "max_tokens": 1}
        assert (
            "The engine failed: ZeroDivisionError"
            in _error(server.client.post("/v1/completions", json=ask), 500)["message"]
        )
        _error(server.client.post("/v1/completions", json=ask), 503)
        health = server.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
