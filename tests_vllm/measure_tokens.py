"""Measure tokens per second of vLLM without hookline, with its idle extension, and with hidden states of one layer.

Run it in the environment of ``make test-vllm``, from the root of the repository:
``PYTHONPATH=tests .venv-vllm/bin/python tests_vllm/measure_tokens.py``. Two eager engines of one tiny Llama run side by
side and take turns, so that other work on the machine slows both. A row is the median of the ratios of neighbouring
turns. The first compares the engine without hookline with itself: the noise.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from helpers_vllm import ENVIRONMENT, running_engine, tiny_llama

CLIENTS = 8
TOKENS = 64


def main(turns: int = 40) -> None:
    """Print a row for each case."""
    os.environ.update(ENVIRONMENT)
    from hookline.engines.vllm import VllmHooks, engine_options

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder) / "tiny")
        with running_engine(model) as plain, running_engine(model, **engine_options()) as hooked:
            hooks = VllmHooks(hooked)
            for llm in (plain, hooked):
                seconds(llm)  # warms up
            rows = {
                "without hookline, against itself": (lambda: seconds(plain), lambda: seconds(plain)),
                "idle extension": (lambda: seconds(plain), lambda: seconds(hooked)),
                "hidden states of one layer, all tokens": (lambda: seconds(plain), lambda: seconds_with(hooked, hooks)),
            }
            for name, (one, other) in rows.items():
                print(row(name, one, other, turns), flush=True)


def row(name: str, one: Any, other: Any, turns: int) -> str:
    """Return the figures of one case, measured in turns, each first every other time."""
    found = []
    for turn in range(turns):
        pair = (one(), other()) if turn % 2 else tuple(reversed((other(), one())))
        found.append(pair)
    ratio = statistics.median(second / first for first, second in found)
    speeds = [CLIENTS * TOKENS / statistics.median(times) for times in zip(*found, strict=True)]
    return f"{name:42} {speeds[0]:8.0f} tokens/s {speeds[1]:8.0f} tokens/s   ratio of times {ratio:.3f}"


def seconds(llm: Any, **sampling: Any) -> float:
    """Return the time that one batch of answers takes."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, **sampling)
    prompts: Any = [TokensPrompt(prompt_token_ids=[5 + place, 6, 7, 8]) for place in range(CLIENTS)]
    start = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    taken = time.perf_counter() - start
    llm.last_ids = [answer.request_id for answer in answers]
    return taken


def seconds_with(llm: Any, hooks: Any) -> float:
    """Return the time of the same batch with the states of a layer, and of taking them."""
    asked = {"hidden_states": {"layers": ["model.layers.2"]}}
    taken = seconds(llm, extra_args={"hookline": asked})
    start = time.perf_counter()
    for id in llm.last_ids:
        assert hooks.states(id).states["model.layers.2"].values.shape == (TOKENS + 3, 128)
    return taken + time.perf_counter() - start


if __name__ == "__main__":
    main()
