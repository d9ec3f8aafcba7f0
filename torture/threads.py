"""Hooks attached and removed by eight threads while other threads call the same model.

Every output must be the bare one, a capture in a thread must hold that thread's call and no other, and at the end no
hook may be left.
"""

from __future__ import annotations

import random
import threading
import traceback
from typing import Any

import torch
from helpers_cases import Case, Part
from torch import Tensor, nn

import hookline as hl

__all__ = ["PART"]

THREADS = 8
ROUNDS = 40
"""Of one thread of one case."""


class Blocks(nn.Module):
    """A few blocks, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return self.h[0](x)


class _Case:
    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self.model = Blocks().eval()
        self.inputs = [torch.randn(2, 8) for _ in range(THREADS)]
        with torch.no_grad():
            self.expected = [self.model(x) for x in self.inputs]
            self.blocks = [self.model.h[0](x) for x in self.inputs]
        self.wrong: list[str] = []
        self.captures = 0

    def run(self, thread: int, rng: random.Random) -> None:
        """Attach, call, remove, capture and call again, many times."""
        try:
            for _ in range(ROUNDS):
                rng.choice([self._observe, self._capture, self._watch, self._call])(thread, rng)
        except Exception:
            self.wrong.append(traceback.format_exc(limit=-3))

    @torch.no_grad()
    def _call(self, thread: int, rng: random.Random) -> None:
        if not torch.equal(self.model(self.inputs[thread]), self.expected[thread]):
            self.wrong.append("an output is not the bare one")

    def _observe(self, thread: int, rng: random.Random) -> None:
        seen: list[Any] = []
        kind = rng.choice(["forward", "forward_pre"])
        handle = hl.attach(self.model, rng.choice(["h.#", "h.0", "*"]), lambda *f: seen.append(1) and None, on=kind)
        self._call(thread, rng)
        handle.remove()
        if not seen:
            self.wrong.append("a hook did not fire")

    def _capture(self, thread: int, rng: random.Random) -> None:
        with hl.capture(self.model, "h.0") as cache:
            self._call(thread, rng)
        first = cache["h.0"].calls[0].output
        self.captures += 1
        if len(cache["h.0"].calls) != 2 or not torch.equal(first, self.blocks[thread]):
            self.wrong.append("a capture holds the call of another thread")

    def _watch(self, thread: int, rng: random.Random) -> None:
        with hl.watch(self.model, "h.#", on="forward", during=("train", "eval")):
            self._call(thread, rng)


def run_case(number: int) -> Case:
    """Have eight threads put hooks on one model and call it."""
    case = _Case(number)
    threads = [
        threading.Thread(target=case.run, args=(thread, random.Random(number * THREADS + thread)))
        for thread in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        hl.assert_no_hooks(case.model)
    except AssertionError as error:
        case.wrong.append(str(error)[:200])
    return Case(number, THREADS * ROUNDS, case.wrong[:5], counts={"models": 1, "captures compared": case.captures})


PART = Part(
    name="threads",
    does="attach, remove, capture and watch from eight threads that call the same model",
    holds="captures",
    goal=50_000,
    quick=160,
    run_case=run_case,
    batch=10,
)
