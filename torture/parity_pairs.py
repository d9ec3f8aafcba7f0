"""Count what `hookline.parity` says of many pairs: false alarms among clean ones, and names of planted faults.

    PYTHONPATH=tests python torture/parity_pairs.py [--pairs 100] [--first 1000] [--train 60]

Clean pairs are tiny Llamas and Mixtrals, in float32 and in emulated bf16, in turn: random ones, each with its own
weights, and every third time one that has learned a language for ``--train`` seconds; prompts, lengths and batches
differ. The eight faults are planted in random models and in the two that have learned, in this process and behind a
server that is known by its URL alone. Every verdict is a line; the last line counts them.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections import Counter
from contextlib import nullcontext
from typing import Any

import helpers_parity as helpers

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
    learned = {make: helpers.learned(make(7), seconds=asked.train) for make in (helpers.llama, helpers.mixture)}
    for seed in range(asked.first, asked.first + asked.pairs):
        counts[_clean(seed, learned)] += 1
    for plant, wanted in FAULTS.items():
        make = helpers.mixture if plant is helpers.swapped_experts else helpers.llama
        for has_learned in (False, True):
            for precision in ("float32", "bf16"):
                for over_http in (False, True):
                    model, asked_for = (learned[make], helpers.texts) if has_learned else (make(7), helpers.prompts)
                    options: Any = {"over_http": over_http, "prompts": asked_for(16, 5)}
                    verdict = _planted(model, precision, plant, *wanted, **options)
                    counts[f"{'learned' if has_learned else 'random'} {verdict}"] += 1
    for kind, count in sorted(counts.items()):
        print(f"{count:4} {kind}")


def _pair(model: Any, precision: str) -> tuple[Any, Any, Any]:
    """Return a trainer, an engine's model, and the trainer in higher precision."""
    if precision == "float32":
        return model, copy.deepcopy(model), None
    return helpers.as_trainer(model), helpers.as_engine(model), helpers.exact(model)


def _clean(seed: int, learned: dict[Any, Any]) -> str:
    """Compare a clean pair of any shape; return what to count it as."""
    draws = random.Random(seed)
    precision = ("float32", "bf16")[seed % 2]
    make = (helpers.llama, helpers.mixture)[seed // 2 % 2]
    has_learned = seed % 3 == 0
    trainer, served, reference = _pair(learned[make] if has_learned else make(seed), precision)
    batch, length, count = draws.choice((1, 2, 3, 5, 8, 16)), draws.randint(4, 24), draws.randint(2, 12)
    prompts = (helpers.texts if has_learned else helpers.prompts)(count, seed)
    found = hl.parity(trainer, served, prompts, reference=reference, batch=batch, new_tokens=length)
    kind = f"{'learned' if has_learned else 'random'} {precision}"
    print(
        f"{'ok   ' if found.ok else 'ALARM'} {make.__name__} {kind}, seed {seed}, {count} prompts, batch {batch}, "
        f"{length} new: {found.sentence}",
        flush=True,
    )
    return f"clean {kind}: {'ok' if found.ok else 'false alarm'}"


def _planted(
    model: Any, precision: str, plant: Any, name: str, where: str, *, over_http: bool, prompts: list[list[int]]
) -> str:
    """Compare a pair with a fault; return what to count it as."""
    trainer, served, reference = _pair(model, precision)
    if plant is helpers.NoBos:
        engines: Any = nullcontext(helpers.NoBos(served, 24))
    else:
        plant(served)
        engines = helpers.served(served) if over_http else nullcontext(served)
    with engines as engine:
        found = hl.parity(trainer, engine, prompts, reference=reference, new_tokens=24)
    cause = found.cause
    verdict = "unsure" if cause is not None and cause.name == "unsure" else "other"
    if cause is None:
        verdict = "unseen"
    elif cause.name == name and cause.where.startswith(where.removesuffix(".weight")):  # states know of modules
        verdict = "named"
    way = "over HTTP" if over_http else "in process"
    print(f"{verdict:<6} {plant.__name__} {precision} {way}: {found.sentence}", flush=True)
    return f"fault {precision} {way}: {verdict}"


if __name__ == "__main__":
    main()
