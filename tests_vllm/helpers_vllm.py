"""Tiny models, engines and servers of vLLM for tests; imported by workers too, as the home of extension classes."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers_waiting import PATIENCE, until

from hookline.engines.vllm import HookExtension

HERE = Path(__file__).parent

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a 40 % share of the memory if left out
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines of a machine would bind their threads to the same core
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Workers are processes of their own, and import the extension classes of this file.
    "PYTHONPATH": os.pathsep.join(
        [str(HERE), str(HERE.parent / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}
TOKEN = "a-token-for-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def tiny_llama(folder: Path) -> Path:
    """Write a random Llama of four layers and 128 features, which two ranks can share, and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=512, eos_token_id=1, bos_token_id=2,
        # Logits of a random model lie so near to each other that rounding decides; this spreads them.
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    words = {"<unk>": 0, "</s>": 1, "<s>": 2, **{f"w{number}": number for number in range(3, 256)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    return folder


def words(ids: list[int]) -> str:
    """The prompt that the tokenizer of `tiny_llama` turns into `ids`."""
    return " ".join(f"w{each}" for each in ids)


@contextmanager
def running_engine(model: Path, **options: Any) -> Iterator[Any]:
    """An `LLM` of float32, eager unless `options` say otherwise; its processes are gone afterwards."""
    from vllm import LLM

    defaults = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "enable_prefix_caching": False}
    llm = LLM(str(model), **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def greedy(llm: Any, prompts: list[list[int]], length: int = 8, **sampling: Any) -> list[list[int]]:
    """The tokens that the engine answers with, all prompts in one batch."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, **sampling)
    asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(asked, params, use_tqdm=False)]


class PlainExtension:
    """An extension class of somebody else: counts the forwards of the root with a plain hook of torch."""

    def count_forwards(self) -> int:
        """Begin to count, and return the rank."""
        self._plain_count = 0

        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self._plain_count += 1

        self._plain_handle = self.get_model().register_forward_pre_hook(hook, with_kwargs=True)  # type: ignore[attr-defined]
        return int(self.rank)  # type: ignore[attr-defined]

    def forwards(self) -> int:
        """Return how many there were, and stop."""
        self._plain_handle.remove()
        return self._plain_count


class BothExtensions(HookExtension, PlainExtension):
    """What vLLM is given, which takes one class."""


ROUNDING = 5e-5
"""Of a row, against its norm. transformers in float32 is up to 8e-6 off its own float64 on this model; the row of
another token is off by about 1."""


def row_error(found: Any, expected: Any) -> float:
    """The largest difference of two rows, against the norm of the expected one."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def head_for(rows: Any, token: int, width: int = 128) -> dict[str, Any]:
    """A linear head as data for a probe, which scores row `token` of `rows` over a half, and all others below.

    The direction in which that row lies farther out than any other one is found by the difference from their mean.
    """
    import torch

    rows = rows.double()
    others = torch.cat([rows[:token], rows[token + 1 :]])
    centred = others - others.mean(0)
    spread = centred.T @ centred / len(others) + 1e-3 * torch.eye(width, dtype=rows.dtype)
    direction = torch.linalg.solve(spread, rows[token] - others.mean(0))
    heights = rows @ direction
    top, next_one = heights[token], torch.cat([heights[:token], heights[token + 1 :]]).max()
    assert top > next_one, "the rows cannot be told apart, which would prove nothing"
    scale = 20 / (top - next_one)
    bias = -scale * (top + next_one) / 2
    return {"layers": [{"weight": [(scale * direction).tolist()], "bias": [float(bias)]}], "threshold": 0.5}


def raising_hook(config: dict[str, Any] | None = None) -> Any:
    """A factory whose hook raises in a worker."""

    def hook(module: Any, args: Any, output: Any) -> None:
        raise RuntimeError("this hook was made to raise")

    return hook


def hook_of_inputs(config: dict[str, Any] | None = None) -> Any:
    """A factory whose hook goes before a module, and does nothing."""
    return lambda module, args: None


class VllmServer:
    """``vllm serve`` in a process of its own."""

    def __init__(self, model: Path, *arguments: str, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        known = {name: value for name, value in os.environ.items() if name != "HOOKLINE_SERVE_TOKEN"}
        self.process = subprocess.Popen(
            [
                # What ``vllm serve`` runs. That command fails in vllm-cpu: it asks for a package named vllm.
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                "--port", str(self.port),
                "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "256", *arguments,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**known, **ENVIRONMENT, **environment},
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def said(self) -> str:
        """All that it has logged."""
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self) -> None:
        """Wait until it answers."""
        import httpx

        def ready() -> bool:
            assert self.process.poll() is None, self.said
            try:
                return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
            except httpx.HTTPError:
                return False

        until(ready, "the server is ready", pause=0.5)

    def stop(self) -> None:
        """End it as an administrator does, and wait for it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        finally:
            self._reader.join(10)


def ask_with_hooks(client: Any, path: str, body: dict[str, Any], hooks: Any, **options: Any) -> Any:
    """The answer of vLLM with what is fetched afterwards as ``hooks`` of each choice; a 400 if that is an error."""
    import httpx

    key = str(uuid.uuid4())
    asked = {**body, "vllm_xargs": {"hookline": json.dumps({"key": key, **hooks})}}
    answer = client.post(path, json=asked, **options)
    if answer.status_code != 200:
        return answer
    entries = client.get(f"/hooks/results/{key}").json()["answers"]
    for entry in entries:
        if entry["error"] is not None:
            return httpx.Response(400, json={"error": entry["error"]})
    found = answer.json()
    for choice, entry in zip(found["choices"], entries, strict=True):
        choice["hooks"] = entry
    assert client.get(f"/hooks/results/{key}").status_code == 404  # they are taken once
    return httpx.Response(200, json=found)


@contextmanager
def running_server(model: Path, *arguments: str, **environment: str) -> Iterator[VllmServer]:
    """A server that answers; it is stopped afterwards."""
    server = VllmServer(model, *arguments, **environment)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()
