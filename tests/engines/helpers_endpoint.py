"""Stand for vLLM's app and workers in the tests of the HTTP paths that hookline adds to it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from fastapi import FastAPI, Request

from hookline.serve.http.vllm_endpoints import HookEndpoints

TOKEN = "a-token-for-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
STATS = {"target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"}


def hook(rank: int, **values: Any) -> dict[str, Any]:
    """A hook as one worker tells of it."""
    return {
        "id": "h1", "name": "stats", "hook_factory": "hookline.factories:activation_stats", "on": "forward",
        "target_modules": ["model.layers.#"], "config": {}, "matched": ["model.layers.0"],
        "fired": 3, "last_step": 2, "cost_us": 1.5, "errors": 0, "off": False, "last_error": None, "rank": rank,
        "way": "eager", "sites": {"model.layers.0": 3}, "silent": {}, **values,
    }  # fmt: skip


def result(request: str, value: float, **values: Any) -> dict[str, Any]:
    """What a worker has gathered for one answer."""
    data = torch.full((1, 2), value).numpy().tobytes()
    layer = {"dtype": "float32", "shape": [1, 2], "positions": [0], "data": data}
    rest = {"silent": {}, "hooks": [], "flags": [], "prompt_tokens": 5, "not_computed": 4, "error": None}
    return {"request": request, "states": {"model.norm": layer}, **rest, **values}


class Workers:
    """Stands for vLLM's engine client with two workers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Any] = {
            "hookline_describe": {
                "engine": {
                    "compiled": False,
                    "version": "0.32.0",
                    "runner": "V1",
                    "steps": 7,
                    "eager_steps": 0,
                    "prompt_tokens": 30,
                    "not_computed": 20,
                    "captured_bytes": 64,
                }
            },
            "hookline_list": lambda rank: {"hooks": [hook(rank)]},
            "hookline_add": lambda rank: {"hooks": [hook(rank)]},
            "hookline_remove": lambda rank: {"hooks": [hook(rank)]},
            "hookline_metrics": {"metrics": {"h1": {"mean": 0.5}}},
            "hookline_take": {"answers": []},
        }

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return [{"rank": rank, **(answer(rank) if callable(answer) else answer)} for rank in (0, 1)]

    def of(self, method: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of `method`."""
        return [args for name, args in self.calls if name == method]


class Server:
    """vLLM's app with the plugin in it; `bodies` are those that reached vLLM's own route."""

    def __init__(self, additional: Any = None, root_path: str = "") -> None:
        self.workers = Workers()
        self.bodies: list[Any] = []
        app = FastAPI()
        app.state.args = SimpleNamespace(additional_config=additional)
        app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        plugin = HookEndpoints()
        plugin.attach_router(app)
        asyncio.run(plugin.init_state(self.workers, app.state, app.state.args))
        self._app = app
        self._root_path = root_path

    async def _complete(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        return {"choices": body.get("n", 1)}

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False, root_path=self._root_path)
            async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())
