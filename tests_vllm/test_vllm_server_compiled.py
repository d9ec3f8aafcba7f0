"""``vllm serve`` with compiled code and two ranks: hooks over HTTP fire in both, and states are whole."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import torch
from helpers_vllm import BEARER, ROUNDING, TOKEN, ask_with_hooks, row_error, running_server
from helpers_waiting import PATIENCE

import hookline as hl

PROMPT = [5, 6, 7, 8, 9]
STATS = {"name": "stats", "target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"}
LAYERS = ["model.layers.2", "model.norm"]


def test_hooks_and_states_over_http(tiny: Path, reference: Any) -> None:
    """A hook and a request make steps eager, and then no more."""
    made = reference.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    plain = made[0, len(PROMPT) :].tolist()
    sampling = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running_server(
        tiny, "--tensor-parallel-size", "2", "--no-enable-prefix-caching",
        HOOKLINE_VLLM="1", VLLM_PLUGINS="hookline", HOOKLINE_SERVE_TOKEN=TOKEN,
    ) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:  # fmt: skip

        def ask(**hooks: Any) -> Any:
            answer = ask_with_hooks(client, "/v1/completions", sampling, hooks) if hooks else plain_answer()
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            assert choice["token_ids"] == plain
            return choice

        def plain_answer() -> Any:
            return client.post("/v1/completions", json=sampling)

        def eager_steps() -> float:
            page = client.get("/hooks/metrics").text.splitlines()
            return sum(float(line.split()[-1]) for line in page if line.startswith("hookline_engine_eager_steps"))

        ask()
        assert eager_steps() == 0
        added = client.post("/hooks", json={**STATS, "name": "late"}, headers=BEARER).json()
        assert added["way"] == "on_demand"
        ask()
        late = client.delete(f"/hooks/{added['id']}", headers=BEARER).json()
        assert late["fired"] >= 4 * 6
        assert late["fired_by_rank"] == {"0": late["fired"], "1": late["fired"]}
        assert eager_steps() == late["fired"] / 4
        found = ask(hidden_states={"layers": LAYERS})["hooks"]["hidden_states"]
        with torch.no_grad(), hl.capture(reference, LAYERS) as cache:
            reference(torch.tensor([[*PROMPT, *plain[:-1]]]))
        for name in LAYERS:
            raw = bytearray(base64.b64decode(found[name]["data"]))
            values = torch.frombuffer(raw, dtype=getattr(torch, found[name]["dtype"])).reshape(found[name]["shape"])
            assert row_error(values, cache[name].output[0]) < ROUNDING
        before = eager_steps()
        ask()
        assert eager_steps() == before
