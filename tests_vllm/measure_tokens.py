"""Measure what hookline costs vLLM: idle, with hidden states, and with taps in compiled code.

Run it in the environment of ``make test-vllm``, from the root of the repository::

    PYTHONPATH=tests:benchmarks .venv-vllm/bin/python tests_vllm/measure_tokens.py [--keep]

Engines of a small Llama answer the same prompts again and again: an eager one with and without hookline, whose hooks
are taken off the model, the sampler and the runner for that turn; one whose compiled graph is split at attention, and
one that is split at taps too. A round has every case once in a shuffled order, and ratios are formed within a round.
Times are those of the processor, of the engine's process and this one: other programs change little.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from helpers_vllm import ENVIRONMENT, running_engine, tiny_llama
from measure import Row, Spread
from results import RESULTS, console_line, keep, measured

from hookline.engines.vllm import HookExtension

CLIENTS = 8
TOKENS = 64
LAYER = "model.layers.2"
MODEL = f"Llama of 4 layers of 128, vLLM 0.32.0 on a CPU ({platform.machine()}), {CLIENTS} clients, answers of {TOKENS}"
LAYERS = {"target_modules": ["model.layers.#"]}
STATS = {**LAYERS, "hook_factory": "hookline.factories:activation_stats"}
LARGEST = {**LAYERS, "hook_factory": "measure_tokens:largest"}
GOALS = [  # case, what it is held against, that again, target
    ("idle extension", "eager, bare", "eager, bare again", 1.02),
    ("hidden states of one layer, all tokens", "eager, bare", "eager, bare again", 1.10),
    ("taps, no hook", "split", "split again", 1.06),
    ("taps, largest value of all layers", "split", "split again", 1.10),
    ("taps, statistics of all layers", "split", "split again", 1.10),
    ("no taps, statistics of all layers", "split", "split again", None),
]


class TokenClock(HookExtension):
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


def split_on_cpu() -> None:
    """Have vLLM split compiled graphs on a CPU too, as it does on a GPU: its CPU platform makes one graph of all."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def keep_mode(cls: Any, config: Any) -> None:
        compilation = config.compilation_config
        mode, wrap = compilation.mode, compilation.ir_enable_torch_wrap
        check(cls, config)
        if mode == CompilationMode.VLLM_COMPILE:
            compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = mode, "inductor", wrap

    CpuPlatform.check_and_update_config = classmethod(keep_mode)  # type: ignore[assignment]
    # It names operators of CUDA that the CPU build lacks; Inductor itself puts the mutations back.
    FixFunctionalizationPass.__call__ = lambda self, graph: None  # type: ignore[method-assign]


if os.environ.get("MEASURE_TOKENS_SPLIT"):  # in the processes of an engine as well
    split_on_cpu()


def main() -> None:
    """Measure, and print a row for each case."""
    options = parse()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as engines:
        turns = cases(tiny_llama(Path(folder) / "tiny"), engines)
        for take in turns.values():
            take()  # warms up
        rows = measure(turns, options.rounds)
    for row in rows:
        print(console_line(row), flush=True)
    if options.keep:
        keep(RESULTS, measured("CPU", rows))


def cases(model: Path, engines: ExitStack) -> dict[str, Callable[[], float]]:
    """Start the engines; return what takes a turn of each case."""
    from hookline.engines.vllm import VllmHooks, engine_options

    def start(compilation: dict[str, Any] | None = None, **options: Any) -> Any:
        made = {**engine_options(**options), "worker_extension_cls": "measure_tokens.TokenClock"}
        if compilation is not None:
            given = made.get("compilation_config") or compilation
            made["compilation_config"] = {**given, "mode": 3, "cudagraph_mode": "NONE", "compile_sizes": []}
        llm = engines.enter_context(running_engine(model, enforce_eager=compilation is None, **made))
        VllmHooks(llm).describe()  # the first call installs it, if the start has not
        return llm

    eager = start()
    os.environ["MEASURE_TOKENS_SPLIT"] = "1"
    split_on_cpu()
    tapped = start({}, taps=["model.layers.#"])
    ops = tapped.llm_engine.vllm_config.compilation_config.splitting_ops
    split = start({"splitting_ops": [each for each in ops if "tap" not in each]})
    return {
        "eager, bare": lambda: turn(eager, is_on=False),
        "eager, bare again": lambda: turn(eager, is_on=False),
        "idle extension": lambda: turn(eager),
        "hidden states of one layer, all tokens": lambda: turn(eager, hooks=VllmHooks(eager)),
        "split": lambda: turn(split),
        "split again": lambda: turn(split),
        "taps, no hook": lambda: turn(tapped),
        "taps, largest value of all layers": lambda: turn(tapped, spec=LARGEST, way="tapped"),
        "taps, statistics of all layers": lambda: turn(tapped, spec=STATS, way="tapped"),
        "no taps, statistics of all layers": lambda: turn(split, spec=STATS, way="on_demand"),
    }


def measure(turns: dict[str, Callable[[], float]], rounds: int) -> list[Row]:
    """Return a row for each case, from the ratios of all rounds."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        order = list(turns)
        random.Random(number).shuffle(order)
        for name in order:
            found[name].append(turns[name]())
    return [
        Row(
            name=f"vLLM, {name}",
            numerator="time of the processor for the same answers",
            denominator=f"the same engine, {bare}",
            model=MODEL,
            ratio=spread(found[name], found[bare]),
            same=spread(found[again], found[bare]),
            absolute=f"{speed(found[name]):.0f} / {speed(found[bare]):.0f} tokens a second of the processor",
            at_most=most,
        )
        for name, bare, again, most in GOALS
    ]


def spread(times: list[float], bare: list[float]) -> Spread:
    """Return median and quartiles of the ratios of all rounds."""
    low, middle, high = statistics.quantiles([one / other for one, other in zip(times, bare, strict=True)], n=4)
    return Spread(middle, low, high)


def speed(times: list[float]) -> float:
    """Return tokens per second."""
    return CLIENTS * TOKENS / statistics.median(times)


def largest(config: dict[str, Any]) -> Any:
    """Make a hook of one operation: what a hook at a tap costs, not what statistics do."""
    found: dict[str, Any] = {}

    def hook(module: Any, args: Any, output: Any) -> None:
        found["largest"] = output[0].abs().amax()

    return hook


def turn(
    llm: Any, *, is_on: bool = True, hooks: Any = None, spec: dict[str, Any] | None = None, way: str = ""
) -> float:
    """Return the processor's time for one batch of answers: with the states of a layer (``hooks``), or a live hook."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    from hookline.engines.vllm import VllmHooks

    extra = {"hookline": {"hidden_states": {"layers": [LAYER]}}}
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, extra_args=extra if hooks else None)
    prompts: Any = [TokensPrompt(prompt_token_ids=[5 + place, 6, 7, 8]) for place in range(CLIENTS)]
    llm.collective_rpc("with_hookline", args=(is_on,))
    added = VllmHooks(llm).add(spec) if spec else None
    assert added is None or added["way"] == way, added
    start = seconds(llm)
    answers = llm.generate(prompts, params, use_tqdm=False)
    if hooks:
        for answer in answers:
            assert hooks.states(answer.request_id).states[LAYER].values.shape == (TOKENS + 3, 128)
    taken = seconds(llm) - start
    if added is not None:
        assert VllmHooks(llm).remove(added["id"])["fired"] > 0
    llm.collective_rpc("with_hookline", args=(True,))
    return taken


def seconds(llm: Any) -> float:
    """Return the processor's time so far, of the engine and of this process."""
    return sum(llm.collective_rpc("processor_seconds")) + time.process_time()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--keep", action="store_true", help="write the rows to benchmarks/results.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
