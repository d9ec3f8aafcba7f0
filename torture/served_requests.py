"""A server under load: clients at once, requests that are cancelled, hooks that come and go, and spoiled bodies.

Every answer must be the one that the same request gets alone, tokens and hidden states; no body may end in status 500;
at the end no request and no hook may be left.
"""

from __future__ import annotations

import base64
import functools
import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from helpers_cases import Case, Part
from helpers_http import BEARER, served
from helpers_serve import SENTENCES, tiny_llama
from mutated import as_bytes, mutate

__all__ = ["PART"]

CLIENTS = 12
ROUNDS = 8
"""Requests of one client."""
ROUTES = ["/v1/completions", "/v1/chat/completions", "/hooks"]
HOOK = {"name": "stats", "target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"}


@functools.cache
def _folder() -> Path:
    """Write the model once, before the processes are forked."""
    return tiny_llama(Path(tempfile.mkdtemp(prefix="torture-")) / "tiny", length=128)


def _body(client: int, *, has_states: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": f"{client} {SENTENCES[client % len(SENTENCES)]}", "max_tokens": 4 + client % 5, "temperature": 0,
    }  # fmt: skip
    if has_states:
        body["hooks"] = {"hidden_states": {"layers": ["model.layers.1"], "positions": "last"}}
    return body


def _answer(http: httpx.Client, body: dict[str, Any]) -> tuple[Any, Any]:
    """Return what was answered, and the hidden states."""
    reply = http.post("/v1/completions", json=body, headers=BEARER)
    if reply.status_code != 200:
        return reply.text, None
    choice = reply.json()["choices"][0]
    found = choice.get("hooks", {}).get("hidden_states", {}).get("model.layers.1")
    states = None if found is None else np.frombuffer(base64.b64decode(found.pop("data")), dtype=np.float32)
    return {key: choice[key] for key in ("text", "hooks", "finish_reason") if key in choice}, states


def _are_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Return whether two answers are the same: states to rounding, as a batch is multiplied in another order."""
    if one[0] != other[0] or (one[1] is None) != (other[1] is None):
        return False
    return one[1] is None or bool(np.allclose(one[1], other[1], rtol=1e-3, atol=1e-3))


class _Load:
    """Clients of one server, and what they saw."""

    def __init__(self, server: Any, seed: int) -> None:
        self.server, self.seed = server, seed
        self.wrong: list[str] = []
        self.counts = {"answers compared": 0, "cancelled": 0, "spoiled bodies": 0, "hooks put on": 0}
        self.alone = {
            (client, has): _answer(server.client, _body(client, has_states=has))
            for client in range(CLIENTS)
            for has in (False, True)
        }

    def run(self, client: int) -> None:
        """Send requests of one client."""
        rng = random.Random(self.seed * CLIENTS + client)
        with httpx.Client(base_url=self.server.url, timeout=120) as http:
            for _ in range(ROUNDS):
                act = rng.choices([self._compare, self._cancel, self._spoil, self._hook], [6, 1, 3, 1])[0]
                act(http, client, rng)

    def _compare(self, http: httpx.Client, client: int, rng: random.Random) -> None:
        has_states = rng.random() < 0.5
        found = _answer(http, _body(client, has_states=has_states))
        self.counts["answers compared"] += 1
        if not _are_same(found, self.alone[client, has_states]):
            self.wrong.append(f"client {client}: {found!s:.150} instead of {self.alone[client, has_states]!s:.150}")

    def _cancel(self, http: httpx.Client, client: int, rng: random.Random) -> None:
        body = _body(client, has_states=False) | {"stream": True, "max_tokens": 60, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body, headers=BEARER) as reply:
            next(reply.iter_lines(), None)
        self.counts["cancelled"] += 1

    def _spoil(self, http: httpx.Client, client: int, rng: random.Random) -> None:
        route = rng.choice(ROUTES)
        body: Any = _body(client, has_states=True) if route != "/hooks" else {"spec": HOOK}
        if route == "/v1/chat/completions":
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        content = as_bytes(mutate(body, rng))
        if rng.random() < 0.2:
            content = content[: rng.randrange(len(content) + 1)] + rng.randbytes(4)
        reply = http.post(route, content=content, headers=BEARER | {"Content-Type": "application/json"})
        self.counts["spoiled bodies"] += 1
        if reply.status_code >= 500:
            self.wrong.append(f"{route}: status {reply.status_code} {reply.text:.100} for {content!r:.300}")
        if route == "/hooks" and reply.status_code < 300:
            http.delete(f"/hooks/{reply.json()['id']}", headers=BEARER)

    def _hook(self, http: httpx.Client, client: int, rng: random.Random) -> None:
        reply = http.post("/hooks", json=HOOK | {"name": f"stats{client}"}, headers=BEARER)
        if reply.status_code >= 300:
            self.wrong.append(f"a hook was refused: {reply.text:.150}")
            return
        self._compare(http, client, rng)
        self.counts["hooks put on"] += 1
        if http.delete(f"/hooks/{reply.json()['id']}", headers=BEARER).status_code >= 300:
            self.wrong.append("a hook could not be taken off")


def run_case(number: int) -> Case:
    """Serve a model to many clients at once."""
    with tempfile.TemporaryDirectory() as exports, served(_folder(), settings={"export_dir": Path(exports)}) as server:
        load = _Load(server, number)
        threads = [threading.Thread(target=load.run, args=(client,)) for client in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        left = server.client.get("/hooks", headers=BEARER).json()
        if left.get("hooks"):
            load.wrong.append(f"hooks are left: {left!s:.200}")
    return Case(number, CLIENTS * ROUNDS, load.wrong[:5], counts=load.counts)


PART = Part(
    name="requests",
    does="twelve clients at once: completions, hidden states, cancelled streams, hooks on and off, spoiled bodies",
    holds="requests",
    goal=3_000,
    quick=96,
    run_case=run_case,
    prepare=_folder,
    batch=5,
)
