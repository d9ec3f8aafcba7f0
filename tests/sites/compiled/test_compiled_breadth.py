"""Hooks in compiled code fire as they do in eager code: as often, in the same order, on the same values."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from helpers_compiled import (
    KINDS,
    WAYS,
    Blocks,
    Seen,
    breaks,
    compiled,
    graphs,
    observe_all,
    same_fires,
    same_values,
    step,
    tensors_in,
)
from helpers_models import build
from torch import nn

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")


# -- every way to compile ----------------------------------------------------------------------------------


# Every way after the first call, when there is compiled code to find; before it a way differs in nothing but the one.
_MOMENTS = [
    *((way, True) for way in WAYS),
    *((way, False) for way in ("torch.compile(model)", "block.compile()", "another instance before")),
]


@pytest.mark.parametrize(("way", "late"), _MOMENTS)
def test_hooks_of_all_kinds_fire_as_in_eager_code(way: str, late: bool) -> None:
    """The same moments and values, in one graph each, without a break; twelve times on and off compile nothing."""
    model, x = Blocks(), torch.randn(3, 4)
    eager: list[Seen] = []
    with observe_all(model, eager):
        step(model, x), step(model, x)
    run = compiled(model, way=way)
    if late:
        step(run, x), step(run, x)
    seen: list[Seen] = []
    with observe_all(model, seen):
        step(run, x), step(run, x)
    assert same_fires(seen, eager)
    assert same_values(seen, eager)
    assert breaks() == 0
    step(run, x)
    assert len(seen) == len(eager)
    before = graphs()
    for _ in range(12):
        with observe_all(model, seen):
            step(run, x)
        step(run, x)
    assert graphs() == before
    assert len(seen) == 7 * len(eager)


@pytest.mark.parametrize("kind", KINDS)
def test_twelve_blocks_share_graphs(kind: str) -> None:
    """Compiled block by block, a hook on each takes one graph for all, and one more where input needs no gradient."""
    model, x, seen = Blocks(depth=12), torch.randn(3, 4), []
    run = compiled(model, way="block.compile()")
    with observe_all(model, seen, "layers.#", (kind,)):
        step(run, x)
    assert [s.name for s in seen] == [f"layers.{i}" for i in (range(12) if "forward" in kind else range(11, -1, -1))]
    assert graphs() <= 2
    assert breaks() == 0


@pytest.mark.parametrize("target", ["child", "wrapper", "list"])
def test_late_attachment_through_a_part_or_the_wrapper_fires(target: str) -> None:
    """Attaching to a child of what was compiled, or to what torch.compile gave back, is as good; names are clean."""
    model, x, names = Blocks(), torch.randn(3, 4), []

    def note(module, args, output, *, site):
        names.append(site.name)

    run = compiled(model)
    run(x)
    if target == "child":
        handle = hl.attach(model.layers[1].up, note, observe=True)
    elif target == "wrapper":
        handle = hl.attach(run, "layers.1.up", note, observe=True)
    else:
        handle = hl.attach(model, ["layers.1.up"], note, observe=True)
    with handle:
        run(x)
    assert names == ["" if target == "child" else "layers.1.up"]


def test_a_model_of_torchs_own_classes_is_refreshed_too() -> None:
    """Linear and ReLU in a Sequential, and a free function around one Linear."""
    model, x, fired = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4), []
    alone = nn.Linear(4, 4)
    run, function = compiled(model), torch.compile(lambda x: alone(x).relu(), backend="aot_eager", fullgraph=True)
    run(x), function(x)

    def note(module, args, output):
        fired.append(type(module).__name__)

    with hl.attach(model, "*", note, observe=True), hl.attach(alone, note, observe=True):
        run(x), function(x)
    assert fired == ["Linear", "ReLU", "Sequential", "Linear"]


# -- real models -------------------------------------------------------------------------------------------

# transformers leaves masks out in eager code alone where it can, which attention in plain operators keeps it from.
_PLAIN = {"attn_implementation": "eager"}
_ONE_LAYER: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 1, **_PLAIN},
    "llama": {"num_hidden_layers": 1, **_PLAIN},
    "bert_language": {"num_hidden_layers": 1, **_PLAIN},
    "vit": {"num_hidden_layers": 1, **_PLAIN},
    "t5": {"num_layers": 1, "num_decoder_layers": 1},
}


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.full) for name in ("bert_language", "llama", "t5", "vit"))]
)
def test_transformers_report_every_module_as_in_eager_code(name: str) -> None:
    """Hooks of all four kinds on every module: the same moments, and the same values within rounding."""
    model = build(name, **_ONE_LAYER[name]).eval()
    ids = torch.randint(0, 31, (2, 6))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if name == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    if name in ("gpt2", "llama"):
        model.loss_type = "ForCausalLM"  # transformers warns otherwise, which breaks the graph
    if name in ("gpt2", "llama", "t5"):
        batch["use_cache"] = False

    def train(run: Any) -> None:
        model.zero_grad()
        run(**batch).loss.backward()

    eager: list[Seen] = []
    with observe_all(model, eager):
        train(model), train(model)
    run = compiled(model)
    seen: list[Seen] = []
    with observe_all(model, seen):
        train(run), train(run)
    assert collections.Counter(s.where for s in seen) == collections.Counter(s.where for s in eager)
    forwards = [[s for s in log if s.kind.startswith("forward")] for log in (seen, eager)]
    assert same_fires(*forwards)
    by_place = {s.where: s.values for s in eager}
    for fired in seen:
        for ours, theirs in zip(tensors_in(fired.values), tensors_in(by_place[fired.where]), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert (graphs(), breaks()) == (1, 0)
