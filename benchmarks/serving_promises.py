"""Check what the two engines of `serving_engines` keep of the server's promises; called by its main.

Each check runs the same thing on both: greedy answers of many families, hooks that come, go and raise, cancels, seeds.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from serving_engines import STATS, VOCABULARY, WAIT_S, alone, llama, manager_of, ours, prompts, theirs

import hookline as hl
from hookline.serve.generation_request import GenerationRequest
from hookline.serve.serving_engine import Engine

_WARM = 0.9
"""The temperature of managers that sample."""
FAMILIES = {
    "Llama": {}, "Mistral": {"sliding_window": None}, "Qwen2": {}, "Qwen3": {}, "Gemma": {"head_dim": 16}, "Phi": {},
    "GPT2": {}, "GPTNeoX": {}, "OPT": {"ffn_dim": 128}, "Falcon": {}, "Bloom": {}, "Mamba": {},
}  # fmt: skip


def show_promises(options: argparse.Namespace) -> None:
    """Print what each engine keeps of what the server promises."""
    print(f"{'promise':<66} {'hookline':<22} continuous batching")
    same = families_that_agree(options)
    row(
        "greedy answers equal generate()",
        f"{len(same[0])} of {len(FAMILIES)} families",
        f"{len(same[1])} of {len(FAMILIES)}",
    )
    for which, names in zip(("ours", "theirs"), same, strict=True):
        print(f"  not the same in {which}: {', '.join(sorted(FAMILIES.keys() - names)) or 'none'}")
    for words, own, other in (
        ("a hook comes and goes between two forwards of a running answer", hooks_ours, hooks_theirs),
        ("a hook that raises fails its batch alone; the engine goes on", survives_ours, survives_theirs),
        ("a cancelled request is told that it has ended", cancels_ours, cancels_theirs),
        ("a seeded answer is the same whatever runs beside it", seeds_ours, seeds_theirs),
        ("greedy and sampled requests in one batch", mixes_ours, mixes_theirs),
    ):
        row(words, said(own, options), said(other, options))


def row(words: str, own: str, other: str) -> None:
    print(f"{words:<66} {own:<22} {other}")


def said(check: Callable[[Any], bool], options: Any) -> str:
    try:
        return "yes" if check(options) else "no"
    except Exception as error:
        return f"no: {type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"


def families_that_agree(options: Any) -> tuple[set[str], set[str]]:
    """Return the families whose greedy answers are those of generate(), for both engines."""
    found: tuple[set[str], set[str]] = (set(), set())
    for name, more in FAMILIES.items():
        try:
            model = family(name, more).to(options.device)
        except Exception as error:
            print(f"  {name} cannot be made: {error}")
            continue
        asked = prompts(8, longest=24)
        wanted = [alone(model, prompt, 12) for prompt in asked]
        for names, engine in zip(found, (ours, theirs), strict=True):
            try:
                with engine(model, 8, argparse.Namespace(longest=24, tokens=16)) as run:
                    if run(asked, 12) == wanted:
                        names.add(name)
            except Exception:
                pass  # it cannot run this family
    return found


def hooks_ours(options: Any) -> bool:
    engine = Engine(llama(options), allow=None)
    engine.start()
    try:
        listen, over = _listen()
        engine.submit(GenerationRequest("r", (5, 6, 7), max_tokens=200, ignore_eos=True), listen)
        over.begun.wait(WAIT_S)
        hook = engine.hooks.add(STATS)
        while not hook.fired and not over.is_set():
            time.sleep(0.001)
        engine.hooks.remove(hook.id)
        return over.wait(WAIT_S) and 0 < hook.fired < 200 * options.layers
    finally:
        engine.close(0.0)


def hooks_theirs(options: Any) -> bool:
    model = llama(options)
    with manager_of(model, 4, 256) as manager:
        manager.add_request([5, 6, 7], max_new_tokens=200, streaming=True, eos_token_id=-1)
        assert manager.get_result(timeout=WAIT_S) is not None
        with manager.pause():
            handle = hl.attach(model, "model.layers.#", lambda module, args, output: None)
        for _ in range(3):
            assert manager.get_result(timeout=WAIT_S) is not None
        with manager.pause():
            fired = handle.report().fired
            handle.remove()
        while (each := manager.get_result(timeout=WAIT_S)) is not None and not each.is_finished():
            pass
    return each is not None and each.error is None and 0 < fired < 200 * options.layers


def survives_ours(options: Any) -> bool:
    model = llama(options)
    engine = Engine(model, allow=None, on_error="raise")
    engine.start()
    try:
        handle = hl.attach(model, "model.layers.0", fails)
        first = answer_of(engine, GenerationRequest("bad", (5, 6, 7), max_tokens=3))
        handle.remove()
        second = answer_of(engine, GenerationRequest("good", (5, 6, 7), max_tokens=3))
    finally:
        engine.close(0.0)
    return first[1].reason == "error" and second[1].reason == "length"


def survives_theirs(options: Any) -> bool:
    model = llama(options)
    with manager_of(model, 4, 64) as manager:
        handle = hl.attach(model, "model.layers.0", fails)
        manager.add_request([5, 6, 7], max_new_tokens=3)
        first = manager.get_result(timeout=WAIT_S)
        handle.remove()
        name = manager.add_request([5, 6, 7], max_new_tokens=3)
        second = manager.get_result(timeout=5.0) if name is not None else None
    return first is not None and second is not None and second.error is None


def fails(module: Any, args: Any, output: Any) -> None:
    raise RuntimeError("a hook that breaks")


def cancels_ours(options: Any) -> bool:
    engine = Engine(llama(options), allow=None)
    engine.start()
    try:
        tokens, over = _listen()
        ticket = engine.submit(GenerationRequest("r", (5, 6, 7), max_tokens=400, ignore_eos=True), tokens)
        over.begun.wait(WAIT_S)
        ticket.cancel()
        return over.wait(WAIT_S) and over.last.reason == "cancelled"
    finally:
        engine.close(0.0)


def cancels_theirs(options: Any) -> bool:
    with manager_of(llama(options), 4, 512) as manager:
        name = manager.add_request([5, 6, 7], max_new_tokens=400, streaming=True, eos_token_id=-1)
        assert manager.get_result(timeout=WAIT_S) is not None
        manager.cancel_request(name)
        while (each := manager.get_result(timeout=3.0)) is not None:  # a token takes milliseconds
            if each.is_finished():
                return len(each.generated_tokens) < 400
    return False


def seeds_ours(options: Any) -> bool:
    engine = Engine(llama(options), allow=None)
    engine.start()
    request = {"prompt_ids": (5, 6, 7), "max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    try:
        lone = answer_of(engine, GenerationRequest("a", **request))[0]
        for place in range(3):
            engine.submit(GenerationRequest(f"x{place}", (9, 8), max_tokens=30, temperature=1.0), lambda event: None)
        return lone == answer_of(engine, GenerationRequest("b", **request))[0]
    finally:
        engine.close(0.0)


def seeds_theirs(options: Any) -> bool:
    """It takes one seed for all requests, so ask twice by two managers, the second time beside others."""
    answers = []
    for others in (0, 3):
        model = llama(options)
        with manager_of(model, 4, 512, temperature=_WARM, seed=3) as manager:
            for _ in range(others):
                manager.add_request([9, 8], max_new_tokens=30, eos_token_id=-1)
            name = manager.add_request([5, 6, 7], max_new_tokens=12, eos_token_id=-1)
            while (each := manager.get_result(timeout=WAIT_S)) is not None:
                if each.request_id == name and each.is_finished():
                    answers.append(each.generated_tokens)
                    break
    return answers[0] == answers[1]


def mixes_ours(options: Any) -> bool:
    engine = Engine(model := llama(options), allow=None)
    engine.start()
    try:
        engine.submit(GenerationRequest("x", (9, 8), max_tokens=40, temperature=1.0), lambda event: None)
        got = answer_of(engine, GenerationRequest("g", (5, 6, 7), max_tokens=8, ignore_eos=True))[0]
    finally:
        engine.close(0.0)
    return got == alone(model, [5, 6, 7], 8)


def mixes_theirs(options: Any) -> bool:
    """Sampling is a setting of the manager; a request can at most ask for a temperature near 0."""
    model = llama(options)
    with manager_of(model, 4, 512, temperature=_WARM, per_request_processors=True) as manager:
        manager.add_request([9, 8], max_new_tokens=40, temperature=1.0)
        name = manager.add_request([5, 6, 7], max_new_tokens=8, temperature=1e-4, eos_token_id=-1)
        while (each := manager.get_result(timeout=WAIT_S)) is not None:
            if each.request_id == name and each.is_finished():
                return bool(each.generated_tokens == alone(model, [5, 6, 7], 8))
    return False


class _Over(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.last: Any = None


def _listen() -> tuple[Any, _Over]:
    over, ids = _Over(), []

    def listen(event: Any) -> None:
        if hasattr(event, "reason"):
            over.last = event
            over.set()
        else:
            ids.append(event.id)
        over.begun.set()

    listen.ids = ids  # type: ignore[attr-defined]
    return listen, over


def answer_of(engine: Engine, request: GenerationRequest) -> tuple[list[int], Any]:
    listen, over = _listen()
    engine.submit(request, listen)
    assert over.wait(WAIT_S), "no answer came"
    return listen.ids, over.last


def family(name: str, more: dict[str, Any]) -> Any:
    """Return a small random model of a family; its logits are spread, so that rounding decides nothing."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "eos_token_id": None,
        "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**sizes, **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval()
