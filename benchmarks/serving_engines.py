"""Compare the generation loop of ``hookline serve`` with transformers' continuous batching, on the server's promises.

    python benchmarks/serving_engines.py                         speed with 8 and 64 clients, and the promises
    python benchmarks/serving_engines.py --width 512 --layers 8  a larger random Llama
    python benchmarks/serving_engines.py --device cuda --dtype bfloat16

Both engines run in this process, in turns, on the same weights, greedily, with the same prompts; a row has the median
of several turns. On a CPU seconds are those of the processor, on one thread, so that other programs change little. The
cache of continuous batching is sized for the clients: by default it takes most of the memory.

docs/serving.md has the figures, and what was decided by them.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

import hookline as hl
from hookline.serve.generation_request import GenerationRequest
from hookline.serve.serving_engine import Engine

PAGE = 32
VOCABULARY = 997
STATS = {"name": "stats", "target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"}
WAIT_S = 60.0


def main() -> None:
    """Measure, and print both tables."""
    options = parse()
    torch.set_num_threads(1)
    for name in ("ContinuousBatchingLogger", "hookline.serve.serving_engine", "transformers"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # what breaks is counted here
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.device}, {options.dtype}, "
          f"Llama of {options.layers} layers of {options.width}\n")  # fmt: skip
    for clients in options.clients:
        show_speed(options, clients)
    if not options.speed_only:
        from serving_promises import show_promises

        show_promises(options)


# -- speed ------------------------------------------------------------------------------------------------------


def show_speed(options: argparse.Namespace, clients: int) -> None:
    """Print the tokens per second of both, bare and with statistics on every layer."""
    asked = prompts(clients, longest=options.longest)
    model = llama(options)
    found: dict[str, list[float]] = {}
    starts: dict[str, float] = {}
    for _ in range(options.turns):
        for name, engine in (("hookline", ours), ("continuous batching", theirs)):
            for hooked in (False, True):
                begun = time.perf_counter()
                with engine(model, clients, options) as run:
                    run(asked[:1], 2)
                    starts.setdefault(name, time.perf_counter() - begun)
                    row = f"{name}{', statistics on every layer' if hooked else ''}"
                    found.setdefault(row, []).append(speed(model, run, asked, options.tokens, hooked=hooked))
                    took = time.perf_counter() - begun
                    print(
                        f"  {row}: {found[row][-1]:.0f} tokens/s, {took:.1f} s with the start",
                        file=sys.stderr,
                        flush=True,
                    )
    base = statistics.median(found["hookline"])
    print(f"{clients} clients, prompts of 4 to {options.longest} tokens, answers of {options.tokens}")
    for row, speeds in found.items():
        middle = statistics.median(speeds)
        print(f"  {row:<55} {middle:8.0f} tokens/s   {middle / base:5.2f} of ours")
    print(
        "  start, with the first answer:  " + ", ".join(f"{name} {took:.1f} s" for name, took in starts.items()) + "\n"
    )


def speed(model: Any, run: Any, asked: Any, tokens: int, *, hooked: bool) -> float:
    """Return the tokens per second of all answers together."""
    handles = hl.register_hooks(model, [STATS]) if hooked else None
    try:
        begun = clock(model)
        answers = run(asked, tokens)
        took = clock(model) - begun
    finally:
        if handles is not None:
            assert all(handle.report().fired for handle in handles), "a hook did not fire"
            handles.remove()
    return sum(map(len, answers)) / took


def clock(model: Any) -> float:
    """Return seconds: of the processor for a model that runs on it, which other programs do not change; else real."""
    return time.process_time() if model.device.type == "cpu" else time.perf_counter()


Run = Callable[[list[list[int]], int], list[list[int]]]


@contextmanager
def ours(model: Any, clients: int, options: Any) -> Iterator[Run]:
    """Run prompts on our engine, all at once."""
    engine = Engine(model, max_batch=clients, max_waiting=clients, allow=None)
    engine.start()

    def run(asked: list[list[int]], tokens: int) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in asked]
        left = threading.Semaphore(0)

        def listen(place: int, event: Any) -> None:
            if hasattr(event, "reason"):
                left.release()
            else:
                answers[place].append(event.id)

        for place, prompt in enumerate(asked):
            request = GenerationRequest(f"r{place}", tuple(prompt), max_tokens=tokens, ignore_eos=True)
            engine.submit(request, lambda event, place=place: listen(place, event))
        for _ in asked:
            assert left.acquire(timeout=10 * WAIT_S)
        return answers

    try:
        yield run
    finally:
        engine.close(0.0)


@contextmanager
def theirs(model: Any, clients: int, options: Any) -> Iterator[Run]:
    """Run prompts by continuous batching, all at once."""
    with manager_of(model, clients, options.longest + options.tokens) as manager:

        def run(asked: list[list[int]], tokens: int) -> list[list[int]]:
            names = [manager.add_request(prompt, max_new_tokens=tokens, eos_token_id=-1) for prompt in asked]
            results: dict[Any, Any] = {}
            while len(results) < len(names):
                each = manager.get_result(timeout=WAIT_S)
                assert each is not None, "no answer came"
                assert each.error is None, each.error
                if each.is_finished():
                    results[each.request_id] = each.generated_tokens
            return [results[name] for name in names]

        yield run


@contextmanager
def manager_of(
    model: Any, clients: int, length: int, *, temperature: float | None = None, **more: Any
) -> Iterator[Any]:
    """Start continuous batching with a cache for so many sequences of such a length; greedy without a temperature."""
    blocks = clients * (length // PAGE + 2)
    is_old = "page_size" not in inspect.signature(ContinuousBatchingConfig).parameters  # transformers before 5.22
    sizes: dict[str, Any] = {"block_size" if is_old else "page_size": PAGE, "num_blocks": blocks, **more}
    config = ContinuousBatchingConfig(max_batch_tokens=4096, allow_block_sharing=False, **sizes)
    sampled = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    generation = GenerationConfig(eos_token_id=-1, pad_token_id=0, max_new_tokens=64, **sampled)
    attention = model.config._attn_implementation
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True, timeout=WAIT_S, hard_stop=True)
        model.set_attn_implementation(attention)


# -- models -----------------------------------------------------------------------------------------------------


def llama(options: Any) -> Any:
    """Return a random Llama, the same each time."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=options.width, intermediate_size=4 * options.width, eos_token_id=None,
        num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=2048,
        initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config).eval()
    return made.to(options.device, getattr(torch, options.dtype))


def prompts(count: int, longest: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(4, longest))] for _ in range(count)]


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return what generate() says to this prompt by itself."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0,
            eos_token_id=1 << 20,
        )  # fmt: skip
    return list(made[0, len(prompt) :].tolist())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--longest", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--speed-only", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
