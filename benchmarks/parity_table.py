"""Print the table of noise and gap that trl#6789 made by hand: a trainer alone, an engine alone, and the pair.

    PYTHONPATH=tests python benchmarks/parity_table.py [--dtype bfloat16] [--seconds 120]

A small Llama learns a synthetic language for some seconds, is turned into ``--dtype``, and is served. The kernels are
torch's own on this device; nothing is emulated.
"""

from __future__ import annotations

import argparse
import copy

import helpers_parity as helpers
import torch

import hookline as hl


def main() -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=120.0)
    asked = parser.parse_args()
    model = helpers.learned(helpers.llama(7, layers=asked.layers, width=128), seconds=asked.seconds).to(
        getattr(torch, asked.dtype)
    )
    found = hl.parity(model, copy.deepcopy(model), helpers.texts(32, 5), new_tokens=64, watched=32)
    print("| comparison | tokens | mean | rms | p50 | p99 | max | ratio outside [0.9, 1.1] |\n|---|" + "---|" * 7)
    for name, group in {"engine against trainer": found.gap, **found.noise}.items():
        print("|", " | ".join((name, *group.row())), "|")
    print(found.sentence)


if __name__ == "__main__":
    main()
