"""Count what `hookline.parity` says of many pairs: false alarms among clean ones, and names of planted faults.

    PYTHONPATH=tests python torture/parity_pairs.py [--pairs 100] [--first 1000] [--train 60]

Clean pairs are tiny random Llamas and Mixtrals, in float32 and in emulated bf16, in turn, each with its own weights,
prompts, lengths and batch. The eight faults are planted in a Llama and a Mixtral that were trained for ``--train``
seconds. Every verdict is a line; the last line counts them.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections import Counter
from typing import Any

import helpers_parity as helpers
import torch

import hookline as hl

FAULTS = {
    helpers.stale_layer: ("weights", "model.layers.2"),
    helpers.stale_weight: ("weights", "model.layers.1.mlp.down_proj"),
    helpers.head_in_fp8: ("head", "lm_head"),
    helpers.rope_base: ("rope", "all layers"),
    helpers.decode_offset: ("positions", "decode"),
    helpers.temperature: ("temperature", "sampling"),
    helpers.swapped_experts: ("experts", "model.layers.1"),
    helpers.NoBos: ("tokens", "first token"),
}


def main() -> None:
    """Run both parts and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--train", type=float, default=60.0, help="seconds for each of the two models")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(asked.first, asked.first + asked.pairs):
        counts[_clean(seed)] += 1
    if asked.train:
        models = {make: _trained(make(7), asked.train) for make in (helpers.llama, helpers.mixture)}
        for plant, wanted in FAULTS.items():
            make = helpers.mixture if plant is helpers.swapped_experts else helpers.llama
            for precision in ("float32", "bf16"):
                counts[_planted(models[make], precision, plant, *wanted)] += 1
    print(dict(counts))


def _pair(model: Any, precision: str) -> tuple[Any, Any, Any]:
    """Return a trainer, an engine's model, and the trainer in higher precision."""
    if precision == "float32":
        return model, copy.deepcopy(model), None
    return helpers.as_trainer(model), helpers.as_engine(model), helpers.exact(model)


def _clean(seed: int) -> str:
    """Compare a clean pair of any shape; return what to count it as."""
    draws = random.Random(seed)
    precision = ("float32", "bf16")[seed % 2]
    model = (helpers.llama, helpers.mixture)[seed // 2 % 2](seed)
    trainer, served, reference = _pair(model, precision)
    batch, length, count = draws.choice((1, 2, 3, 5, 8, 16)), draws.randint(4, 24), draws.randint(2, 12)
    prompts = helpers.prompts(count, seed)
    found = hl.parity(trainer, served, prompts, reference=reference, batch=batch, new_tokens=length)
    what = f"{type(model).__name__} {precision}, seed {seed}, {count} prompts, batch {batch}, {length} new"
    print(f"{'ok   ' if found.ok else 'ALARM'} {what}: {found.sentence}", flush=True)
    return f"clean {precision}: {'ok' if found.ok else 'false alarm'}"


def _trained(model: Any, seconds: float) -> Any:
    """Train a model to repeat sequences of tokens, so that its weights are no longer random."""
    draws = torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.train().parameters(), 1e-3)
    began, loss = time.monotonic(), torch.tensor(0.0)
    while time.monotonic() - began < seconds:
        half = torch.randint(3, helpers.VOCABULARY, (16, 12), generator=draws)
        ids = torch.cat([torch.full((16, 1), 2), half, half], 1)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{type(model).__name__} trained for {seconds:g} s, loss {loss.item():.3g}", flush=True)
    return model.eval()


def _planted(model: Any, precision: str, plant: Any, name: str, where: str) -> str:
    """Compare a pair with a fault; return what to count it as."""
    trainer, served, reference = _pair(model, precision)
    engine = served
    if plant is helpers.NoBos:
        engine = helpers.NoBos(served, 12)
    else:
        plant(served)
    try:
        found = hl.parity(trainer, engine, helpers.prompts(8, 5), reference=reference, new_tokens=12)
    finally:
        if engine is not served:
            engine.close()
    cause = found.cause
    verdict = "unsure" if cause is None or cause.name == "unsure" else "other"
    if cause is not None and cause.name == name and cause.where.startswith(where):
        verdict = "named"
    print(f"{verdict:<6} {plant.__name__} {precision}: {found.sentence}", flush=True)
    return f"fault {precision}: {verdict}"


if __name__ == "__main__":
    main()
