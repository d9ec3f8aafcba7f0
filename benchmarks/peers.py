"""The family "capture and patch": take the output of one block, or double it, attach to remove.

``bench_peers`` runs the `CAPTURING` contests. The model is a GPT-2 that all of the libraries know; the captures are
those of ``threads``. Before anything is timed, each capture and each patch is held against one made by hand.

The nearest is captum: 111 calls of Python beside the forward, where ours makes 91 for a capture and 88 for a patch.
What ours has more are objects: the context that keeps two threads apart, the counter of forwards and its step, the
watch for compiled code, the receipt. After a forward all of them are cold, and take several times as long as in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from contests import Contest, Work, take_turns
from measure import Samples
from threads import BLOCK, LENGTH, LIBRARIES, bridge_of, by_hand, close, make_model
from torch import Tensor, nn

import hookline as hl

__all__ = ["CAPTURING"]

MODEL = f"GPT-2 of transformers: 4 layers, d 16, seq {LENGTH}, batch 1; output of one block"
CAPTURE, PATCH, KEPT = "capture of one block", "patch of one block", "capture of one block, kept open"
NO_PATCH = "it offers no edit of an activation"
WHY_CAPTURE = (
    "it attaches a closure and keeps a tensor; ours also counts the call, keeps two threads apart, watches for "
    "compiled code and makes a receipt"
)
WHY_PATCH = "it calls a closure; ours also checks shape and type of what the edit returns, counts, and makes a receipt"

Call = Callable[[Tensor], Any]


def measure(name: str, rounds: int) -> dict[str, Samples | str]:
    """Time one library: bare forward, ours, theirs; capture, then patch."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, tokens = make_model(), torch.full((1, LENGTH), 1)
    prepared = LIBRARIES[name].prepare if name in LIBRARIES else by_baukit_style
    few = name == "torchlens"  # a third of a second a capture
    found: dict[str, Samples | str] = {}
    expected, capture = by_hand(model)(tokens), prepared(model)
    assert close(capture(tokens), expected), "captured something else"
    ours = by_capture(model)
    assert close(ours(tokens), expected)
    found[CAPTURE] = turns(tokens, model, ours, capture, 5 if few else rounds, inner=1 if few else 8)
    if name not in PATCHES:
        return {**found, PATCH: NO_PATCH}
    model = make_model()  # TransformerLens has changed the other one
    try:
        plain, want = model(tokens).logits, patched_by_hand(model)(tokens)
        edit = PATCHES[name](model)
        assert not close(want, plain)
        assert close(edit(tokens), want), "the patch gives other logits"
        assert close(patched(model)(tokens), want)
    except Exception as error:  # a library that has changed is a line of the table, not the end of the family
        return {**found, PATCH: f"failed: {type(error).__name__}: {error}"[:140]}
    found[PATCH] = turns(tokens, model, patched(model), edit, 5 if few else rounds, inner=1 if few else 8)
    return found


def turns(tokens: Tensor, bare: Call, ours: Call, theirs: Call, rounds: int, inner: int) -> Samples:
    calls = {"bare": bare, "ours": ours, "theirs": theirs}
    return take_turns({name: lambda call=call: call(tokens) for name, call in calls.items()}, rounds, inner=inner)


def measure_kept(rounds: int) -> dict[str, Samples | str]:
    """Time whole forwards: transformers leaves its hooks in the model after the first call, so ours stays open too."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tokens, model = torch.full((1, LENGTH), 1), make_model()
    theirs, ours = LIBRARIES["transformers"].prepare(model), by_open_capture()
    assert close(theirs(tokens), ours(tokens))
    return {KEPT: turns(tokens, model, ours, theirs, rounds, inner=8)}


# -- captures --------------------------------------------------------------------------------------------------------


def by_capture(model: nn.Module) -> Call:
    """Ours."""

    def capture(tokens: Tensor) -> Any:
        with hl.capture(model, BLOCK) as cache:
            model(tokens)
        return cache[BLOCK].output

    return capture


def by_open_capture() -> Call:
    """Ours for who captures at each forward; on a model of its own, as it stays."""
    model = make_model()
    cache = hl.capture(model, BLOCK)

    def capture(tokens: Tensor) -> Any:
        cache.clear()
        model(tokens)
        return cache[BLOCK].output

    return capture


@contextmanager
def traced(model: nn.Module, name: str, edit: Callable[[Any], Any] | None = None) -> Iterator[dict[str, Any]]:
    """Keep, or edit, the output of a module found by name, in the manner of baukit's ``Trace``."""
    module = dict(model.named_modules())[name]
    kept: dict[str, Any] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        output = output if edit is None else edit(output)
        kept["output"] = output
        return output

    handle = module.register_forward_hook(hook)
    try:
        yield kept
    finally:
        handle.remove()


def by_baukit_style(model: nn.Module) -> Call:
    """The helper that people write."""

    def capture(tokens: Tensor) -> Any:
        with traced(model, BLOCK) as kept:
            model(tokens)
        return kept["output"]

    return capture


# -- patches: the output of the block doubled, the logits handed back ------------------------------------------------


def double(output: Tensor) -> Tensor:
    """Return twice the activation."""
    return output * 2


def patched(model: nn.Module) -> Call:
    """Ours."""

    def run(tokens: Tensor) -> Any:
        with hl.patch(model, {BLOCK: double}):
            return model(tokens).logits

    return run


def patched_by_hand(model: nn.Module) -> Call:
    block = model.get_submodule(BLOCK)

    def run(tokens: Tensor) -> Any:
        handle = block.register_forward_hook(lambda module, args, output: double(output))
        try:
            return model(tokens).logits
        finally:
            handle.remove()

    return run


def patched_in_baukit_style(model: nn.Module) -> Call:
    def run(tokens: Tensor) -> Any:
        with traced(model, BLOCK, double):
            return model(tokens).logits

    return run


def patched_by_transformer_lens(model: nn.Module) -> Call:
    bridge, name = bridge_of(model)
    hooks = [(name, lambda activation, hook: double(activation))]
    return lambda tokens: bridge.run_with_hooks(tokens, fwd_hooks=hooks)


def patched_by_nnsight(model: nn.Module) -> Call:
    from nnsight import NNsight

    wrapped = NNsight(model)

    def run(tokens: Tensor) -> Any:
        with wrapped.trace(tokens):
            wrapped.transformer.h[1].output = wrapped.transformer.h[1].output * 2
            logits = wrapped.lm_head.output.save()
        return logits

    return run


def patched_by_pyvene(model: nn.Module) -> Call:
    import pyvene

    class Doubled(pyvene.ConstantSourceIntervention):
        def forward(self, base: Tensor, source: Any = None, subspaces: Any = None) -> Tensor:
            return double(base)

    where = {"layer": 1, "component": "block_output", "unit": "pos", "max_number_of_units": LENGTH}
    config = pyvene.IntervenableConfig([{**where, "intervention_type": Doubled}])

    def run(tokens: Tensor) -> Any:
        edited = pyvene.IntervenableModel(config, model=model)
        _, output = edited({"input_ids": tokens}, unit_locations={"base": list(range(LENGTH))})
        return output.logits

    return run


def patched_by_tdhook(model: nn.Module) -> Call:
    from tdhook.latent import SteeringVectors

    def run(tokens: Tensor) -> Any:
        steering = SteeringVectors([BLOCK], steer_fn=lambda *, module_key, output: double(output))
        with steering.prepare(model) as hooked:
            return hooked(tokens)["logits"]

    return run


def patched_by_torchlens(model: nn.Module) -> Call:
    import torchlens

    doubled = torchlens.when(torchlens.module(BLOCK), torchlens.scale(2.0))
    return lambda tokens: torchlens.trace(model, tokens, intervene=doubled).modules["lm_head"].out


PATCHES: Mapping[str, Callable[[nn.Module], Call]] = {
    "torch": patched_by_hand,
    "baukit": patched_in_baukit_style,
    "transformer-lens": patched_by_transformer_lens,
    "nnsight": patched_by_nnsight,
    "pyvene": patched_by_pyvene,
    "tdhook": patched_by_tdhook,
    "torchlens": patched_by_torchlens,
}


# -- the contests ----------------------------------------------------------------------------------------------------


def contest(name: str, label: str, capture: str, patch: str, package: str = "") -> Contest:
    works = {
        CAPTURE: Work("what `hl.capture(model, name)` adds to a forward", f"what {capture} adds", MODEL,
                      why=WHY_CAPTURE),
        PATCH: Work("what `hl.patch(model, {name: function})` adds to a forward",
                    f"what {patch} adds" if patch else "–", MODEL, why=WHY_PATCH),
    }  # fmt: skip
    return Contest(label, package or name, lambda rounds: measure(name, rounds), works)


_STAY = "the same forward with `output_hidden_states=True`: its hooks stay in the model, and keep every block"
_OPEN = Work("a forward in an open `hl.capture(model, name)`, and `cache.clear()`", _STAY, MODEL, beyond=False)

CAPTURING: dict[str, Contest] = {
    "torch": contest("torch", "hand-written hook", "a closure through `register_forward_hook`", "such a closure"),
    "baukit": contest("baukit", "baukit-style `Trace`", "a context written here that finds the module by name (baukit "
                      "itself is not on the package index)", "the same with an edit", "torch"),
    "captum": contest("captum", "captum", "`LayerActivation(model, block).attribute`", ""),
    "tdhook": contest("tdhook", "tdhook", "`ActivationCaching(name).prepare(model)`", "`SteeringVectors([name], …)`"),
    "nnsight": contest("nnsight", "nnsight", "`trace`, `output.save()`", "`trace`, `output = output * 2`"),
    "transformer-lens": contest("transformer-lens", "TransformerLens", "`run_with_cache` of one name",
                                "`run_with_hooks` of one name"),
    "pyvene": contest("pyvene", "pyvene", "`CollectIntervention`", "a `ConstantSourceIntervention`"),
    "torchlens": contest("torchlens", "torchlens", "`trace`, which keeps every operation", "`trace(intervene=…)`"),
    "transformers": Contest("transformers", "transformers", measure_kept, {KEPT: _OPEN}),
}  # fmt: skip
