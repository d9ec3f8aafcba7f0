"""Measure what hookline costs vLLM: its idle extension, and the hidden states of one layer for all tokens.

Run it in the environment of ``make test-vllm``, from the root of the repository::

    PYTHONPATH=tests:benchmarks .venv-vllm/bin/python tests_vllm/measure_tokens.py
    PYTHONPATH=tests:benchmarks .venv-vllm/bin/python tests_vllm/measure_tokens.py --out page.md

One eager engine of a small Llama answers the same prompts again and again: without hookline, whose hooks are taken off
the model, the sampler and the runner for that turn; once more so (A/A); with the idle extension; with the hidden states
of one layer for all tokens, taken and put together. A round has all four in a shuffled order, and ratios are formed
within a round. Times are those of the processor, of the engine's process and this one: other programs change little.
``benchmarks/run.py --merge page.md`` takes the rows over.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers_vllm import ENVIRONMENT, running_engine, tiny_llama
from measure import Row, Spread
from report import console_line, write

CLIENTS = 8
TOKENS = 64
LAYER = "model.layers.2"
ENGINE = f"vLLM 0.32.0 on a CPU ({platform.machine()}), eager"
MODEL = f"Llama of 4 layers of 128, {ENGINE}, {CLIENTS} clients, answers of {TOKENS}"
GOALS = {"idle extension": 1.01, "hidden states of one layer, all tokens": 1.10}


class TokenClock:
    """An extension class for measuring: read the processor's time, and take hookline off and put it back."""

    def processor_seconds(self) -> float:
        """Return the time that the processor has given to this process."""
        return time.process_time()

    def with_hookline(self, is_on: bool) -> None:
        """Put what hookline has installed in the worker back, or take it off."""
        worker: Any = self
        runner, model = worker.model_runner, worker.get_model()
        places = [model._forward_pre_hooks, model._forward_hooks, model._forward_pre_hooks_with_kwargs]
        places += [model._forward_hooks_always_called, runner.sampler._forward_hooks]
        if not hasattr(self, "_clock_kept"):
            self._clock_kept = [dict(each) for each in places]
            self._clock_call = runner.__dict__["execute_model"]
        for place, kept in zip(places, self._clock_kept, strict=True):
            place.clear()
            place.update(kept if is_on else {})
        runner.__dict__.pop("execute_model", None)
        if is_on:
            runner.execute_model = self._clock_call


def main() -> None:
    """Measure, and print a row for each case."""
    options = parse()
    os.environ.update(ENVIRONMENT)
    from hookline.engines.vllm import VllmHooks, engine_options

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder) / "tiny")
        extension = engine_options(combine_with="measure_tokens.TokenClock")
        with running_engine(model, **extension) as llm:
            hooks = VllmHooks(llm)
            hooks.describe()  # the first call installs it, if the start has not
            turns: dict[str, Callable[[], float]] = {
                "bare": lambda: turn(llm, is_on=False),
                "bare again": lambda: turn(llm, is_on=False),
                "idle extension": lambda: turn(llm),
                "hidden states of one layer, all tokens": lambda: turn(llm, hooks=hooks),
            }
            for take in turns.values():
                take()  # warms up
            rows = measure(turns, options.rounds)
    for row in rows:
        print(console_line(row), flush=True)
    if options.out is not None:
        write(options.out, "CPU", rows)


def measure(turns: dict[str, Callable[[], float]], rounds: int) -> list[Row]:
    """Return a row for each case, from the ratios of all rounds."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        order = list(turns)
        random.Random(number).shuffle(order)
        for name in order:
            found[name].append(turns[name]())
    bare = found["bare"]
    same = spread(found["bare again"], bare)
    return [
        Row(
            name=f"vLLM, {name}",
            numerator="time of the processor for the same answers",
            denominator="the same engine without hookline",
            model=MODEL,
            ratio=spread(found[name], bare),
            same=same,
            absolute=f"{speed(found[name]):.0f} / {speed(bare):.0f} tokens a second of the processor",
            at_most=most,
        )
        for name, most in GOALS.items()
    ]


def spread(times: list[float], bare: list[float]) -> Spread:
    """Return median and quartiles of the ratios of all rounds."""
    low, middle, high = statistics.quantiles([one / other for one, other in zip(times, bare, strict=True)], n=4)
    return Spread(middle, low, high)


def speed(times: list[float]) -> float:
    """Return tokens per second."""
    return CLIENTS * TOKENS / statistics.median(times)


def turn(llm: Any, *, is_on: bool = True, hooks: Any = None) -> float:
    """Return the processor's time for one batch of answers, with the states of a layer if ``hooks`` are given."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    extra = {"hookline": {"hidden_states": {"layers": [LAYER]}}}
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, extra_args=extra if hooks else None)
    prompts: Any = [TokensPrompt(prompt_token_ids=[5 + place, 6, 7, 8]) for place in range(CLIENTS)]
    llm.collective_rpc("with_hookline", args=(is_on,))
    start = seconds(llm)
    answers = llm.generate(prompts, params, use_tqdm=False)
    if hooks:
        for answer in answers:
            assert hooks.states(answer.request_id).states[LAYER].values.shape == (TOKENS + 3, 128)
    taken = seconds(llm) - start
    llm.collective_rpc("with_hookline", args=(True,))
    return taken


def seconds(llm: Any) -> float:
    """Return the processor's time so far, of the engine and of this process."""
    return sum(llm.collective_rpc("processor_seconds")) + time.process_time()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write the rows to a page of results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
