"""Rows about served models: what the hooks of `hookline.factories` add to forwards of a small Llama.

Takes a Llama of ``transformers`` with random weights in a `ModelRunner`, hands `Row`s to ``rows``. By itself:

    python benchmarks/serving.py                      what run.py --only serving does, with figures of the export
    python benchmarks/serving.py --device cuda
    python benchmarks/serving.py --only eager --quick
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import Row, Samples, Trial, interleave, ratios, spread, trial, typical
from results import console_line, keep, measured
from subject import Setting

from hookline.sglang.model_runner import ModelRunner
from hookline.specs.hook_spec import resolve_callable

__all__ = ["serving"]

_LAYERS = ["model.layers.#"]
_OURS = "hookline.factories:"


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a Llama, and of what is fed to it."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"Llama: {self.layers} layers, d {self.width}, seq {self.length}, batch {self.batch}, {self.dtype}"


ON_CPU = Size(4, 256, 4, 1000, 4, 64, torch.float32)
ON_GPU = Size(12, 1024, 16, 32000, 8, 512, torch.bfloat16)


class Served:
    """A Llama in a runner, with a prompt to be run and a cache to go on from."""

    def __init__(self, setting: Setting) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.size = size = ON_GPU if setting.device.type == "cuda" else ON_CPU
        self.device = setting.device
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.width * 8 // 3,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            max_position_embeddings=2 * size.length,
        )
        self.runner = ModelRunner(LlamaForCausalLM(config).eval().to(setting.device, size.dtype))
        self.call: Callable[..., Any] = self.runner.model
        self.ids = torch.randint(size.vocabulary, (size.batch, size.length), device=setting.device)
        self.cache: Any = None

    def prefill(self) -> None:
        """All of the prompt, into a new cache."""
        with torch.inference_mode():
            self.cache = self.call(self.ids, use_cache=True).past_key_values

    def decode(self) -> None:
        """One more token for each sequence, which leaves the cache as it was."""
        with torch.inference_mode():
            self.call(self.ids[:, :1], past_key_values=self.cache, use_cache=True)
            self.cache.crop(-1)

    def leaves(self) -> list[str]:
        """Names of the modules without children."""
        return [name for name, module in self.runner.model.named_modules() if not any(module.children())]

    @contextmanager
    def hooked(self, factory: str, targets: list[str], told: dict[str, float], **config: Any) -> Iterator[None]:
        """One hook of ours, through the runner; its metrics are put into ``told``."""
        folder = tempfile.mkdtemp(prefix="hookline-export-") if factory == "export" else None
        hook = resolve_callable(_OURS + factory)({**config, **({"folder": folder} if folder else {})})
        spec = {"name": factory, "target_modules": targets, "hook_factory": lambda _: hook, "observe": True}
        handles = self.runner.register_hooks([spec])
        try:
            yield
        finally:
            handles.remove(quiet=True)
            hook.close()
            told.update(hook.to_metrics())
            if folder is not None:
                shutil.rmtree(folder)


def serving(setting: Setting) -> Iterator[Row]:
    """Forwards of a runner, eager and compiled; then hidden states through the engine."""
    yield from eager(setting)
    yield from states(setting)
    yield from compiled(setting)


def eager(setting: Setting) -> Iterator[Row]:
    """Prefill and decode under each hook."""
    served, told = Served(setting), {}
    yield from forwards(served, setting, "eager", variants(served, told), 40)
    print(f"  (export: {told['dropped']:.0f} dropped)")


def compiled(setting: Setting) -> Iterator[Row]:
    """The same for a compiled model, of which the layers and the export are shown."""
    torch._dynamo.reset()
    served, told = Served(setting), {}
    served.call = torch.compile(served.runner.model, dynamic=False)
    chosen = {name: on for name, on in variants(served, told).items() if name != "activation_stats on all leaves"}
    yield from forwards(served, setting, "compiled", chosen, 30)


def variants(served: Served, told: dict[str, float]) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """What is measured, by name."""
    middle = [f"model.layers.{served.size.layers // 2}"]
    return {
        "activation_stats on every layer": lambda: served.hooked("activation_stats", _LAYERS, {}),
        "activation_stats on all leaves": lambda: served.hooked("activation_stats", served.leaves(), {}),
        "nan_alarm on every layer": lambda: served.hooked("nan_alarm", _LAYERS, {}),
        "export of one layer": lambda: served.hooked("export", middle, told),
        "bare": nullcontext,
        "bare again": nullcontext,
    }


_LIMITS = {"activation_stats on every layer": 1.15}
"""Targets on a CPU; on a GPU, which works behind the host, figures are reported and no more."""


def forwards(
    served: Served,
    setting: Setting,
    how: str,
    hooked: Mapping[str, Callable[[], AbstractContextManager[object]]],
    rounds: int,
) -> Iterator[Row]:
    """Rows of prefill and decode."""
    for phase, call in (("prefill", served.prefill), ("decode", served.decode)):
        trials = [trial(name, call, inner=5, hooked=on, device=setting.device) for name, on in hooked.items()]
        samples = interleave(trials, setting.rounds(rounds))
        for name in hooked:
            if not name.startswith("bare"):
                at_most = _LIMITS.get(name) if setting.device.type == "cpu" else None
                yield _row(samples, name, f"served, {how} {phase}, {name}", str(served.size), at_most)


def _row(samples: Samples, name: str, words: str, model: str, at_most: float | None) -> Row:
    return Row(
        words,
        name,
        "the same forward without hooks",
        model,
        spread(ratios(samples, name, "bare")),
        spread(ratios(samples, "bare again", "bare")),
        f"{typical(samples, name) * 1e3:.2f} / {typical(samples, 'bare') * 1e3:.2f} ms",
        at_most=at_most,
    )


# -- through the engine --------------------------------------------------------------------------------------


def states(setting: Setting) -> Iterator[Row]:
    """Answers of the engine, with the hidden states of one layer for every token and without."""
    from hookline.engines.request_options import StatesWanted
    from hookline.serve.serving_engine import Engine

    served = Served(setting)
    engine = Engine(served.runner.model)
    engine.start()
    layer = f"model.layers.{served.size.layers // 2}"
    wanted = {"states": StatesWanted((layer,)), "bare": None, "bare again": None}
    try:
        trials = [answering(served, engine, name, states) for name, states in wanted.items()]
        samples = interleave(trials, setting.rounds(30))
    finally:
        engine.close()
    yield Row(
        "served, hidden states of one layer for every token",
        "eight requests, 16 tokens each, every hidden state of one layer",
        "the same requests without",
        f"{served.size}, through the engine",
        spread(ratios(samples, "states", "bare")),
        spread(ratios(samples, "bare again", "bare")),
        f"{typical(samples, 'states') * 1e3:.1f} / {typical(samples, 'bare') * 1e3:.1f} ms",
        at_most=1.2,
    )


def answering(served: Served, engine: Any, name: str, states: Any) -> Trial:
    """Eight requests at once, until the last has its answer."""
    from hookline.serve.generation_request import Finished, GenerationRequest

    # On a CPU what all threads of the process took: the engine has one of its own, and others' work is not ours.
    clock = time.perf_counter if served.device.type == "cuda" else time.process_time
    prompts = torch.randint(served.size.vocabulary, (8, served.size.length), generator=torch.Generator().manual_seed(1))

    def run() -> Mapping[str, float]:
        left, over = [len(prompts)], threading.Event()

        def tell(event: Any) -> None:
            if isinstance(event, Finished):
                assert event.reason == "length", event
                left[0] -= 1
                if not left[0]:
                    over.set()

        start = clock()
        for number, prompt in enumerate(prompts.tolist()):
            request = GenerationRequest(str(number), tuple(prompt), max_tokens=16, ignore_eos=True, states=states)
            engine.submit(request, tell)
        assert over.wait(300)
        return {name: clock() - start}

    return run


def main() -> None:
    """These rows alone."""
    parser = argparse.ArgumentParser(description="What hooks cost on a served model.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--only", choices=("eager", "states", "compiled"), nargs="*", default=[])
    parser.add_argument("--out", type=Path, help="a file of rows to keep them in")
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(torch.device(options.device), options.quick)
    parts = {"eager": eager, "states": states, "compiled": compiled}
    rows = []
    for name, part in parts.items():
        if not options.only or name in options.only:
            for row in part(setting):
                rows.append(row)
                print(console_line(row), flush=True)
    if options.out is not None:
        keep(options.out, measured("GPU" if options.device == "cuda" else "CPU", rows))


if __name__ == "__main__":
    main()
