"""`hookline.parity`: a clean pair is called clean, and every planted fault gets its name and place, or "unsure"."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers_parity as helpers
import pytest
import torch

import hookline as hl
from hookline.cli.main import main

SMALL: dict[str, Any] = {"new_tokens": 12}


def _pair(model: Any, precision: str) -> tuple[Any, Any, Any]:
    """Return a trainer, an engine's model, and the trainer in higher precision."""
    if precision == "float32":
        return model, copy.deepcopy(model), None
    return helpers.as_trainer(model), helpers.as_engine(model), helpers.exact(model)


def _found(model: Any, precision: str, plant: Callable[[Any], None] | None = None, **options: Any) -> Any:
    trainer, served, reference = _pair(model, precision)
    if plant is not None:
        plant(served)
    return hl.parity(trainer, served, helpers.prompts(8), reference=reference, **{**SMALL, **options})


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("make", [helpers.llama, helpers.mixture])
def test_a_clean_pair_is_called_clean(make: Any, precision: str) -> None:
    found = _found(make(), precision)
    assert found.ok
    assert found.cause is None or found.cause.name == "router ties"
    assert ("nothing beyond" in found.sentence) is (found.cause is None)
    assert 0.05 < found.gap.rms / found.yardstick < 1.5
    assert found.gap.tokens == 8 * 12


FAULTS = [
    (helpers.stale_layer, "weights", "model.layers.2"),
    (helpers.stale_weight, "weights", "model.layers.1.mlp.down_proj"),
    (helpers.rope_base, "rope", "all layers"),
    (helpers.decode_offset, "positions", "decode"),
    (helpers.temperature, "temperature", "sampling"),
]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("plant", "name", "where"), FAULTS)
def test_a_fault_is_named(plant: Any, name: str, where: str, precision: str) -> None:
    found = _found(helpers.llama(), precision, plant)
    assert not found.ok
    assert found.cause.name == name
    assert found.cause.where.startswith(where)


@pytest.mark.parametrize(("precision", "plant"), [("float32", helpers.head_in_bf16), ("bf16", helpers.head_in_fp8)])
def test_the_head_is_named(precision: str, plant: Any) -> None:
    found = _found(helpers.llama(), precision, plant)
    assert (found.cause.name, found.cause.where) == ("head", "lm_head")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_swapped_experts_are_named(precision: str) -> None:
    found = _found(helpers.mixture(), precision, helpers.swapped_experts)
    assert found.cause.name == "experts"
    assert found.cause.where.startswith("model.layers.1")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_missing_bos_is_named_without_states(precision: str) -> None:
    trainer, served, reference = _pair(helpers.llama(), precision)
    engine = helpers.NoBos(served, 12)
    try:
        found = hl.parity(trainer, engine, helpers.prompts(8), reference=reference)
    finally:
        engine.close()
    assert found.cause.name == "tokens"
    assert not found.layers


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("plant", [None, helpers.stale_layer, helpers.stale_weight, helpers.head_in_fp8])
def test_over_http_without_a_look_at_parameters(plant: Any, precision: str) -> None:
    trainer, served, reference = _pair(helpers.llama(), precision)
    if plant is not None:
        plant(served)
    with helpers.served(served) as url:
        found = hl.parity(trainer, url, helpers.prompts(8), reference=reference, **SMALL)
    layer = "model.layers.2" if precision == "float32" else "unknown"  # its gap is not beyond what bf16 explains
    wheres = {None: None, helpers.stale_layer: layer, helpers.head_in_fp8: "lm_head"}
    assert (found.cause and found.cause.where) == wheres.get(plant, "model.layers.1.mlp.down_proj")
    assert found.ok is (plant is None)


def test_nothing_of_the_trainer_is_changed() -> None:
    trainer = helpers.llama()
    before = {name: value.clone() for name, value in (*trainer.named_parameters(), *trainer.named_buffers())}
    trainer.train()
    stream = torch.get_rng_state()
    served = copy.deepcopy(trainer)
    helpers.rope_base(served)
    hl.parity(trainer, served.eval(), helpers.prompts(4), **SMALL)
    assert trainer.training
    assert torch.equal(torch.get_rng_state(), stream)
    for name, value in (*trainer.named_parameters(), *trainer.named_buffers()):
        assert torch.equal(value, before[name]), name
    assert not any(module._forward_hooks for module in trainer.modules())


def _trained(between: Callable[[Any], object]) -> tuple[Any, list[bool]]:
    """Train for 20 steps with dropout, and one module in eval mode; call `between` now and then."""
    model = helpers.llama().train()
    model.model.norm.eval()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    for step in range(20):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (3, 12):
            between(model)
    return [each.detach().clone() for each in model.parameters()], [each.training for each in model.modules()]


def test_a_training_that_is_compared_on_the_way_ends_with_the_same_bits() -> None:
    """Modes of single modules too; a draw in between, which is not guarded, is noticed."""
    plain, modes = _trained(lambda model: None)
    served = helpers.llama().eval()
    found, after = _trained(lambda model: hl.parity(model, served, helpers.prompts(2), **SMALL))
    assert after == modes
    assert all(map(torch.equal, found, plain))
    drawn, _ = _trained(lambda model: torch.rand(1))
    assert not all(map(torch.equal, drawn, plain))


def test_healthy_numbers_show_smaller_faults(tmp_path: Path) -> None:
    def plant(model: Any) -> None:
        helpers.stale_layer(model, 0.006)

    with helpers.served(_pair(helpers.llama(), "bf16")[1]) as url:
        trainer, served, reference = _pair(helpers.llama(), "bf16")
        first = hl.parity(trainer, url, helpers.prompts(8), reference=reference, **SMALL)
    file = first.save_healthy(tmp_path / "healthy.json")
    plant(served)
    with helpers.served(served) as url:
        alone, known = (
            hl.parity(trainer, url, helpers.prompts(8), reference=reference, healthy=healthy, **SMALL)
            for healthy in (None, file)
        )
    assert alone.cause is None or alone.cause.name == "unsure"
    assert known.cause.where.startswith("model.layers.2")
    with pytest.raises(hl.errors.OptionError, match="another model"):
        hl.parity(helpers.llama(layers=5), None, [{"prompt": [2], "completion": [3], "logprobs": [-1]}], healthy=file)


def test_recorded_logprobs_need_no_engine() -> None:
    model = helpers.llama()
    given = []
    for prompt in helpers.prompts(4):
        answer = [5, 6, 7, 8]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
        given.append({"prompt": prompt, "completion": answer, "logprobs": logprobs})
    assert hl.parity(model, None, given).ok
    given[0]["logprobs"] = [each - 0.5 for each in given[0]["logprobs"]]
    found = hl.parity(model, None, given)
    assert not found.ok
    assert math.isclose(found.gap.rms, 0.25, rel_tol=1e-3)
    assert found.worst[0].sequence == 0


@pytest.mark.parametrize(
    ("engine", "sequences", "words"),
    [
        (lambda given: [], [[2, 3]], "it gave"),
        (lambda given: [([*ids, 4], [None]) for ids in given], [[2, 3]], "without a log-prob"),
        (lambda given: [([*ids, 9999], [-1.0]) for ids in given], [[2, 3]], "trainer knows"),
        (lambda given: [([2, 7, 8], [-1.0]) for ids in given], [[2, 3]], None),
        (None, [[2, 3]], "needs a completion"),
        (None, [{"prompt": [2], "completion": [3, 4], "logprobs": [-1.0]}], "2 tokens"),
        (print, ["a text"], "no tokenizer"),
        (print, [[2, 9999]], "token 9999"),
        (print, [], "no sequences"),
        (print, [[2, 3], {"prompt": [2], "completion": [3], "logprobs": [-1.0]}], "all of one kind"),
        (print, [{"prompt": [2], "completion": [3]}], "0 log-probs"),
        ("http://127.0.0.1:9", [[2, 3]], "does not answer"),
        (7, [[2, 3]], "An engine is"),
    ],
)
def test_what_cannot_be_compared_is_said(engine: Any, sequences: Any, words: str | None) -> None:
    model = helpers.llama(layers=1)
    if words is None:
        assert hl.parity(model, engine, sequences).cause.name == "tokens"
        return
    with pytest.raises(hl.errors.OptionError, match=words):
        hl.parity(model, engine, sequences)


def test_other_vocabularies_are_refused() -> None:
    import transformers

    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1)
    )
    with pytest.raises(hl.errors.OptionError, match="vocabulary"):
        hl.parity(helpers.llama(layers=1), other.eval(), [[2, 3]])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = helpers.llama(layers=2)
    model.save_pretrained(tmp_path / "model")
    helpers.words(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("w5 w6 w7\nw8 w9 w10 w11\n")
    flags = ["--trainer", str(tmp_path / "model"), "--engine", str(tmp_path / "model"), "--new-tokens", "6"]
    flags += ["--prompts", str(tmp_path / "prompts.txt"), "--html", str(tmp_path / "page.html")]
    assert main(["parity", *flags, "--json", "--save-healthy", str(tmp_path / "healthy.json")]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ok"]
    assert "yardstick" in shown.err
    assert "w5" in (tmp_path / "page.html").read_text() or "<svg" in (tmp_path / "page.html").read_text()
    assert main(["parity", *flags, "--max-outside", "-1"]) == 1
    assert "nothing beyond" in capsys.readouterr().out
    assert main(["parity", *flags, "--healthy", str(tmp_path / "no.json")]) == 2
