"""A server under load: many clients at once, with statistics on every layer and hidden states asked for by some.

    python benchmarks/serving_load.py                      64 clients for 60 s on a random Llama
    python benchmarks/serving_load.py --seconds 10         shorter
    python benchmarks/serving_load.py --model models/x     a model of yours

A real process (``hookline serve``) and real sockets. Of four clients one wants hidden states of a layer, one streams,
one wants both. It prints rows and ends with exit code 1 if a request failed, a token is missing, or memory grew.

Resident memory says little about growth: the C library keeps what lies between blocks in use, and that climbs for
minutes before it levels off (600 to 740 MB in three of them, with 160 to 190 MB in use all the time). So the server of
this benchmark, and no other, gives free memory back twice, after ten seconds and at the end, both under load; what is
left then is held. The most that was resident is told too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

LAYERS, WIDTH, LENGTH = 4, 128, 512
FLAT = 1.10
"""What may be held at the end over what was held after ten seconds."""
SAMPLE_S = 0.25
SERVE = """
import ctypes, signal, sys
from hookline.cli.main import main
signal.signal(signal.SIGUSR1, lambda *_: ctypes.CDLL(None).malloc_trim(0))
raise SystemExit(main(["serve", "--port", "0", *sys.argv[1:]]))
"""
"""``hookline serve``, which gives free memory back when it is asked to."""
STATS = {"name": "stats", "target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"}


@dataclass
class Seen:
    """What the clients saw."""

    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    tokens: int = 0
    states: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Memory:
    """What the server's process had, in bytes."""

    most: int = 0
    early: int = 0
    """Held after ten seconds."""
    late: int = 0
    """Held at the end."""

    async def watch(self, server: Server, seconds: float) -> None:
        """See the most that is resident."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(SAMPLE_S)
            self.most = max(self.most, server.memory())

    async def held(self, server: Server) -> int:
        """The least within two seconds of giving free memory back."""
        server.trim()
        found = []
        for _ in range(int(2 / SAMPLE_S)):
            await asyncio.sleep(SAMPLE_S)
            found.append(server.memory())
        self.most = max(self.most, *found)
        return min(found)


def main() -> int:
    """Serve, load, tell."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or random_llama(Path(folder) / "llama")
        hooks = Path(folder) / "hooks.json"
        hooks.write_text(json.dumps([STATS]))
        server = Server([*("--model", str(model), "--hooks", str(hooks)), *options.serve])
        try:
            memory = Memory()
            seen = asyncio.run(load(server, options, memory))
            metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        finally:
            code = server.stop()
    return tell(options, seen, memory, metrics, code)


# -- the server ------------------------------------------------------------------------------------------------


class Server:
    """``hookline serve`` in a process."""

    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SERVE, *arguments], stderr=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self._ready()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self._lines.extend(line.rstrip() for line in self._process.stderr)

    def _ready(self) -> str:
        assert self._process.stderr is not None
        while self._process.poll() is None:
            found = re.search(r"ready at (\S+)", "\n".join(self._lines))
            if found:
                return found[1]
            time.sleep(0.1)
        raise SystemExit("\n".join(self._lines))

    def memory(self) -> int:
        """Resident bytes."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024

    def trim(self) -> None:
        """Have it give free memory back; it takes a moment."""
        self._process.send_signal(signal.SIGUSR1)

    def stop(self) -> int:
        """End it as a supervisor does; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)


def random_llama(folder: Path) -> Path:
    """A Llama with random weights and a tokenizer of bytes, on the disk."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: place for place, letter in enumerate(letters, 2)}}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# -- the clients -----------------------------------------------------------------------------------------------


async def load(server: Server, options: argparse.Namespace, memory: Memory) -> Seen:
    """Have all clients ask for as long as it lasts; memory is looked at four times a second."""
    seen = Seen()
    start = time.monotonic()
    end = time.monotonic() + options.seconds
    limits = httpx.Limits(max_connections=options.clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        clients = [asyncio.create_task(ask_on(client, place, end, seen)) for place in range(options.clients)]
        await memory.watch(server, min(10.0, options.seconds / 3))
        memory.early = await memory.held(server)
        await memory.watch(server, end - time.monotonic() - 2)
        memory.late = await memory.held(server)
        await asyncio.gather(*clients)
    seen.seconds = time.monotonic() - start
    return seen


async def ask_on(client: httpx.AsyncClient, place: int, end: float, seen: Seen) -> None:
    """One client: one request after the other."""
    chance = random.Random(place)
    while time.monotonic() < end:
        start = time.perf_counter()
        try:
            await ask(client, body_for(place, chance), seen, start)
        except Exception as error:
            seen.errors.append(f"{type(error).__name__}: {error}"[:200])
        seen.latencies.append(time.perf_counter() - start)


def body_for(place: int, chance: random.Random) -> dict[str, Any]:
    """What a client asks; of four, the second wants states, the third streams, the fourth does both."""
    body: dict[str, Any] = {
        "prompt": "".join(chance.choices("abcdefgh ", k=chance.randint(4, 120))),
        "max_tokens": chance.randint(8, 48),
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": place % 4 >= 2,
        "stream_options": {"include_usage": True},
    }
    if place % 2:
        body["hooks"] = {"hidden_states": {"layers": [f"model.layers.{LAYERS // 2}"]}}
    return body


async def ask(client: httpx.AsyncClient, body: dict[str, Any], seen: Seen, start: float) -> None:
    """One request, whose answer has to be whole."""
    if body["stream"]:
        answer = await ask_stream(client, body, seen, start)
    else:
        whole = await client.post("/v1/completions", json=body)
        whole.raise_for_status()
        answer = whole.json()
    usage = answer["usage"]
    assert usage["completion_tokens"] == body["max_tokens"], usage
    seen.tokens += usage["completion_tokens"]
    if "hooks" in body:
        (found,) = answer["choices"][0]["hooks"]["hidden_states"].values()
        assert found["shape"][0] == usage["total_tokens"] - 1, found["shape"]
        seen.states += found["shape"][0]


async def ask_stream(client: httpx.AsyncClient, body: dict[str, Any], seen: Seen, start: float) -> Any:
    """The events of a stream, put together to a whole answer."""
    events = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                if not events:
                    seen.first_tokens.append(time.perf_counter() - start)
                events.append(json.loads(line.removeprefix("data: ")))
    assert line == "" or line == "data: [DONE]", line
    if "error" in events[-1]:
        raise RuntimeError(events[-1]["error"]["message"])
    return {"usage": events[-1]["usage"], "choices": events[-2]["choices"]}


# -- what came of it -------------------------------------------------------------------------------------------


def tell(options: argparse.Namespace, seen: Seen, memory: Memory, metrics: str, code: int) -> int:
    """Print the rows; 1 if something is not as it should be."""
    steps = counted(metrics, "decode_forwards_total")
    rows = [
        ("requests", f"{len(seen.latencies)}, {len(seen.errors)} failed"),
        ("tokens of answers", f"{seen.tokens}, {seen.tokens / seen.seconds:.0f}/s"),
        ("rows in a forward", f"{counted(metrics, 'answer_tokens_total') / max(steps, 1):.1f} on average"),
        ("time in forwards", f"{counted(metrics, 'forward_seconds_total') / seen.seconds:.0%}"),
        ("hidden states sent", f"{seen.states} tokens of one layer"),
        ("latency", spread(seen.latencies)),
        ("time to the first event of a stream", spread(seen.first_tokens)),
        ("statistics", f"{hooked(metrics, 'fired_total'):.0f} calls, {hooked(metrics, 'cost_us'):.0f} µs each"),
        ("most resident memory", f"{memory.most / 1e6:.0f} MB"),
        ("held after 10 s, at the end", f"{memory.early / 1e6:.0f}, {memory.late / 1e6:.0f} MB"),
        ("held at the end over held after 10 s", f"{memory.late / memory.early:.3f}"),
        ("exit code after SIGTERM", str(code)),
    ]  # fmt: skip
    print(f"serving_load: {options.clients} clients, {options.seconds:g} s")
    for name, value in rows:
        print(f"  {name:<36}  {value}")
    for error in sorted(set(seen.errors)):
        print(f"  error, {seen.errors.count(error)} times: {error}")
    return int(
        bool(seen.errors) or code != 0 or memory.late > FLAT * memory.early or hooked(metrics, "errors_total") > 0
    )


def counted(metrics: str, name: str) -> float:
    """A count of the engine."""
    found = re.search(rf"^hookline_engine_{name} (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


def hooked(metrics: str, name: str) -> float:
    """A figure of the one hook."""
    found = re.search(rf"^hookline_hook_{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


def spread(seconds: list[float]) -> str:
    """Percentiles in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    shown = [(name, ordered[min(int(share * len(ordered)), len(ordered) - 1)]) for name, share in SHARES]
    return ", ".join(f"{name} {value * 1e3:.0f}" for name, value in shown) + " ms"


SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("most", 1.0))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Load a server.")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", type=Path, help="a folder; a random Llama if left out")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further flags for hookline serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
