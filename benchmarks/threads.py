"""Rows about two threads on one model: how many captures hold what another thread's call has made.

Takes the capture that each library offers, hands `Row`s to ``rows``. Each of two threads opens a capture of one
block's output around a forward of its own tokens, which are all the thread's number, so a capture that is not its own
is told by value. Once begun, the threads run freely, so how many go wrong depends on what else the machine does: for
one and the same library it was a seventh in one run and half in another. A row tells whether a library keeps threads
apart, and not which of two that do not is the better one. Every library runs in a process of its own, as some leave
torch changed behind them::

    python benchmarks/threads.py hookline 10    the figures of one library over ten rounds, as JSON

What there is to compare with is in ``peers.txt`` (`make bench-peers` installs it); what is not installed is listed.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from contests import LIMIT, NOTHING, in_child, installed, last_line
from measure import Row, Spread, spread
from subject import Setting
from torch import Tensor, nn

import hookline as hl

__all__ = ["threads"]

THREADS = 2
CAPTURES = 120
"""Of both threads together, in one round."""
IN_TURN = 12
"""The same with one thread after the other, where nothing is left to chance."""
LENGTH = 8
BLOCK = "transformer.h.1"

Capture = Callable[[Tensor], Any]
"""Runs the model on some tokens; the output of the block in that run."""


@dataclass(frozen=True, slots=True)
class Library:
    """Something that captures the output of a module."""

    label: str
    package: str
    prepare: Callable[[Any], Capture]
    """Takes the model, once for all threads, and hands back what each of them does for a capture."""
    at_most: float | None = None
    rounds: int = 10


def threads(setting: Setting) -> Iterator[Row]:
    """A row per library: the share of captures that went wrong."""
    for name, library in LIBRARIES.items():
        ratio, same, words = figures(name, library, min(library.rounds, setting.rounds(10)))
        yield Row(
            f"two threads on one model, {library.label}",
            "captures that hold another call's output, or none, or raise",
            f"all captures, {CAPTURES} a round; A/A: the threads one after the other",
            f"GPT-2 of transformers: 4 layers, d 16, seq {LENGTH}, batch 1; output of one block",
            ratio,
            same,
            words,
            at_most=library.at_most if ratio is not NOTHING else None,
        )


def figures(name: str, library: Library, rounds: int) -> tuple[Spread, Spread, str]:
    """Share of wrong captures, the same with one thread at a time, and both in words."""
    for package in (library.package, "transformers"):
        if not installed(package):
            return NOTHING, NOTHING, f"{package} is not installed"
    try:
        result = in_child(__file__, name, str(rounds))
    except subprocess.TimeoutExpired:
        return NOTHING, NOTHING, f"did not finish within {LIMIT} s"
    except subprocess.CalledProcessError as error:
        return NOTHING, NOTHING, f"failed: {last_line(error)}"
    wrong, errors = (sum(counts[kind] for counts in result["together"]) for kind in ("wrong", "errors"))
    words = f"{wrong} wrong, {errors} errors of {rounds * CAPTURES}"
    if result["raised"]:
        words += f" ({', '.join(result['raised'])})"
    if library.package != "hookline":
        words += f"; {library.package} {importlib.metadata.version(library.package)}"
    return shares(result["together"], CAPTURES), shares(result["in turn"], IN_TURN), words


def shares(rounds: list[dict[str, int]], captures: int) -> Spread:
    return spread([(counts["wrong"] + counts["errors"]) / captures for counts in rounds])


# -- in the child ----------------------------------------------------------------------------------------------------


def measure(name: str, rounds: int) -> dict[str, Any]:
    """All rounds of one library: both threads together and, to see that it captures at all, one after the other."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tokens = [torch.full((1, LENGTH), number) for number in range(THREADS)]
    model = make_model()
    expected = [by_hand(model)(own) for own in tokens]
    assert not close(*expected)
    capture = LIBRARIES[name].prepare(model)
    for own in tokens:  # once for what is done at the first call
        capture(own)
    raised: set[str] = set()
    together = [one_round(capture, tokens, expected, raised) for _ in range(rounds)]
    in_turn = [one_round(capture, tokens, expected, raised, in_turn=True) for _ in range(rounds)]
    return {"together": together, "in turn": in_turn, "raised": sorted(raised)}


def one_round(
    capture: Capture, tokens: list[Tensor], expected: list[Tensor], raised: set[str], *, in_turn: bool = False
) -> dict[str, int]:
    """How many captures were wrong, and how many raised; by which errors, goes into ``raised``."""
    barrier = threading.Barrier(1 if in_turn else THREADS)
    captures = (IN_TURN if in_turn else CAPTURES) // THREADS
    wrong, errors = [0] * THREADS, [0] * THREADS

    def work(number: int) -> None:
        torch.set_grad_enabled(False)  # a setting of each thread
        barrier.wait()
        for _ in range(captures):
            try:
                got = capture(tokens[number])
            except Exception as error:
                errors[number] += 1
                raised.add(type(error).__name__)
            else:
                wrong[number] += not isinstance(got, Tensor) or not close(got, expected[number])

    running = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in running:
        thread.start()
        if in_turn:
            thread.join()
    for thread in running:
        thread.join()
    return {"wrong": sum(wrong), "errors": sum(errors)}


def make_model() -> nn.Module:
    """A GPT-2 that is known to every library, of random weights."""
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 31, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval()


def close(one: Tensor, other: Tensor) -> bool:
    """The same but for rounding: not everybody computes attention by the same kernel."""
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4)


# -- the libraries, each with what it offers for one capture ---------------------------------------------------------


def by_hookline(model: nn.Module, **options: Any) -> Capture:
    def capture(tokens: Tensor) -> Any:
        kept: dict[str, Any] = {}

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            kept["output"] = output

        with hl.attach(model, BLOCK, keep, observe=True, **options):
            model(tokens)
        return kept.get("output")

    return capture


def by_hookline_in_context(model: nn.Module) -> Capture:
    return by_hookline(model, scope="context")


def by_hand(model: nn.Module) -> Capture:
    block = model.get_submodule(BLOCK)

    def capture(tokens: Tensor) -> Any:
        kept: dict[str, Any] = {}

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            kept["output"] = output

        handle = block.register_forward_hook(keep)
        try:
            model(tokens)
        finally:
            handle.remove()
        return kept.get("output")

    return capture


def by_transformers(model: nn.Module) -> Capture:
    # The first of the hidden states is what goes into the first block.
    return lambda tokens: model(tokens, output_hidden_states=True).hidden_states[2]


def bridge_of(model: Any) -> tuple[Any, str]:
    """Return TransformerLens' view of the model, and its name for the output of the block."""
    from transformer_lens.model_bridge import TransformerBridge

    with tempfile.TemporaryDirectory() as folder:  # it reads the configuration from a folder, or the network
        model.save_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, hf_model=model, device="cpu"), "blocks.1.hook_out"


def by_transformer_lens(model: Any) -> Capture:
    bridge, name = bridge_of(model)
    return lambda tokens: bridge.run_with_cache(tokens, names_filter=[name])[1][name]


def by_nnsight(model: nn.Module) -> Capture:
    from nnsight import NNsight

    wrapped = NNsight(model)

    def capture(tokens: Tensor) -> Any:
        with wrapped.trace(tokens):
            output = wrapped.transformer.h[1].output.save()
        return output

    return capture


def by_pyvene(model: nn.Module) -> Capture:
    import pyvene

    where = {"layer": 1, "component": "block_output", "unit": "pos", "max_number_of_units": LENGTH}
    config = pyvene.IntervenableConfig([{**where, "intervention_type": pyvene.CollectIntervention}])

    def capture(tokens: Tensor) -> Any:
        collecting = pyvene.IntervenableModel(config, model=model)
        (_, collected), _ = collecting({"input_ids": tokens}, unit_locations={"base": list(range(LENGTH))})
        return collected[0]

    return capture


def by_tdhook(model: nn.Module) -> Capture:
    from tdhook.latent import ActivationCaching

    def capture(tokens: Tensor) -> Any:
        with ActivationCaching(f"{BLOCK}$").prepare(model) as hooked:
            hooked(tokens)
            return hooked.hooking_context.cache[BLOCK]

    return capture


def by_torchlens(model: nn.Module) -> Capture:
    import torchlens

    return lambda tokens: torchlens.trace(model, tokens).modules[BLOCK].out


def by_captum(model: nn.Module) -> Capture:
    from captum.attr import LayerActivation

    block = model.get_submodule(BLOCK)
    return lambda tokens: LayerActivation(model, block).attribute(tokens)


LIBRARIES: dict[str, Library] = {
    "hookline": Library('`hl.attach(…, scope="context")`', "hookline", by_hookline_in_context, at_most=0.0),
    "hookline-process": Library('`hl.attach(…)`, scope="process"', "hookline", by_hookline),
    "torch": Library("a hand-written `register_forward_hook`", "torch", by_hand),
    "transformers": Library("transformers, `output_hidden_states=True`", "transformers", by_transformers),
    "transformer-lens": Library("TransformerLens, `run_with_cache`", "transformer-lens", by_transformer_lens),
    "nnsight": Library("nnsight, `trace`", "nnsight", by_nnsight),
    "pyvene": Library("pyvene, `CollectIntervention`", "pyvene", by_pyvene),
    "tdhook": Library("tdhook, `ActivationCaching`", "tdhook", by_tdhook),
    "torchlens": Library("torchlens, `trace`", "torchlens", by_torchlens, rounds=3),  # a second a capture
    "captum": Library("captum, `LayerActivation`", "captum", by_captum),
}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
