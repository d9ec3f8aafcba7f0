"""Inside of attention, in twelve families of transformers: held against what transformers itself gives out.

The pattern is that of ``output_attentions=True``; what heads read is what goes into the output projection. Both come
from the model without hookline's parts, and so hold queries, keys and values as well: these make them.
"""

from __future__ import annotations

import copy
import functools
import gc
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import hookline as hl
from hookline.errors import CaptureError, HookReturnError, NoMatchError, OptionError, TargetError, UnhookableError
from hookline.sites.compiled import recompile_guard

BASE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
LONG = {**BASE, "max_position_embeddings": 64}
GROUPED = {**LONG, "num_key_value_heads": 2}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
OPT = {**LONG, "ffn_dim": 48, "word_embed_proj_dim": 32}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {  # class, options, output projection in the attention module
    "GPT2": ("GPT2LMHeadModel", GPT, "c_proj"),
    "Llama": ("LlamaForCausalLM", GROUPED, "o_proj"),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, "o_proj"),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, "o_proj"),
    "Gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}, "o_proj"),
    "Phi": ("PhiForCausalLM", LONG, "dense"),
    "GPTNeoX": ("GPTNeoXForCausalLM", LONG, "dense"),
    "OPT": ("OPTForCausalLM", OPT, "out_proj"),
    "Falcon": ("FalconForCausalLM", {key: BASE[key] for key in BASE if key != "intermediate_size"}, "dense"),
    "Mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, "o_proj"),
    "T5": ("T5ForConditionalGeneration", T5, "o"),
    "Bert": ("BertForMaskedLM", LONG, "output.dense"),
}
ROLES = ("q", "k", "v", "pattern", "z", "attn_out")
WAYS = [(family, way) for family in FAMILIES for way in ("sdpa", "eager")]
WAYS = [each for each in WAYS if each not in (("Gemma2", "sdpa"), ("Falcon", "eager"))]  # neither is there


def _model(family: str, way: str = "sdpa") -> Any:
    name, options, _ = FAMILIES[family]
    cls = getattr(transformers, name)
    config = cls.config_class(**options, attn_implementation=way)
    torch.manual_seed(0)
    return cls(config).eval()


def _inputs(family: str) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "decoder_input_ids": ids[:, :5]} if family == "T5" else {"input_ids": ids}


def _patterns(family: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What transformers itself says that tokens look at, layer by layer; of T5, encoder and then decoder."""
    with torch.no_grad():
        found = _model(family, "eager")(**inputs, output_attentions=True)
    return list(found.encoder_attentions + found.decoder_attentions if family == "T5" else found.attentions)


def _grouped(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_parts_are_those_that_transformers_computes_with(family: str, way: str) -> None:
    model, inputs = _model(family, way), _inputs(family)
    blocks = hl.find(model, role="resid").names
    attention = [each.module for each in hl.find(model, role="attn")]
    projections = [each.get_submodule(FAMILIES[family][2]) for each in attention]
    read: list[Tensor] = []
    added: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        read.append(args[0])
        added.append(output if module.bias is None else output - module.bias)

    handles = [each.register_forward_hook(keep) for each in projections]
    with torch.no_grad():
        plain = model(**inputs).logits
        for handle in handles:
            handle.remove()
        with hl.capture(model, [f"role:{role}" for role in ROLES]) as cache:
            assert torch.equal(model(**inputs).logits, plain)  # observers change no bit
    patterns = _patterns(family, inputs)
    for number in range(len(blocks)):
        q, k, v, pattern, z, attn_out = (
            cache[hl.find(model, f"role:{role}.{number}").names[0]].output for role in ROLES
        )
        assert q.shape[1] == pattern.shape[1] == z.shape[1] == 4
        torch.testing.assert_close(pattern, patterns[number], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(pattern @ _grouped(v, 4), z, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(z.transpose(1, 2).flatten(2), read[number], atol=0, rtol=0)
        torch.testing.assert_close(attn_out.sum(1), added[number], atol=1e-6, rtol=1e-5)
        assert attn_out.shape[1] == 4
        assert k.shape == v.shape
    hl.assert_no_hooks(model, foreign=True)
    assert not [key for each in model.modules() for key in ("forward", "_hookline_attention") if key in vars(each)]


def test_scores_are_made_of_queries_and_keys() -> None:
    """The pattern of a Llama by hand: scale, causal mask, grouped keys."""
    model, inputs = _model("Llama"), _inputs("Llama")
    with torch.no_grad(), hl.capture(model, ["role:q.1", "role:k.1", "role:pattern.1"]) as cache:
        model(**inputs)
    q, k, pattern = (cache[f"model.layers.1.self_attn:{part}"].output for part in ("q", "k", "pattern"))
    scores = q @ _grouped(k, 4).mT * 8**-0.5
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(scores.softmax(-1), pattern, atol=1e-6, rtol=1e-5)


def _first_head_off(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(output[:, :1]), output[:, 1:]], 1)


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Falcon", "T5"])
def test_edits_in_compiled_code_that_was_there_before(family: str) -> None:
    """With one graph, on and off; the head is gone from the output as it is in eager code."""
    torch._dynamo.reset()
    model, inputs = _model(family), _inputs(family)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        plain = compiled(**inputs).logits
        for part in ("z", "q", "pattern", "attn_out"):
            with hl.attach(model, f"role:{part}.1", _first_head_off) as handle:
                changed = compiled(**inputs).logits
                assert handle.report().fired == 1
                torch.testing.assert_close(changed, model(**inputs).logits, atol=1e-5, rtol=1e-5)
            assert not torch.allclose(changed, plain)
            assert torch.equal(compiled(**inputs).logits, plain)


def test_a_pattern_that_is_put_back_gives_the_same_output() -> None:
    """The control of the edit: the model's own pattern in its place changes nothing but rounding."""
    model, inputs = _model("Mistral"), _inputs("Mistral")
    with torch.no_grad():
        plain = model(**inputs).logits
        with hl.attach(model, "role:pattern", lambda module, args, output: output.clone()):
            torch.testing.assert_close(model(**inputs).logits, plain, atol=1e-5, rtol=1e-5)
        with hl.attach(model, "role:pattern", lambda module, args, output: torch.zeros_like(output)):
            assert not torch.allclose(model(**inputs).logits, plain)


def test_gradients_and_training_are_as_without() -> None:
    """Twenty steps of AdamW with dropout end with the same bits; the control, which draws a number, does not."""

    def trained(observe: Any) -> list[Tensor]:
        torch.manual_seed(0)
        config = transformers.GPT2Config(**GPT, attn_pdrop=0.1, resid_pdrop=0.1, attn_implementation="sdpa")
        model = transformers.GPT2LMHeadModel(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = _inputs("GPT2")["input_ids"]
        with observe(model):
            for _ in range(20):
                optimizer.zero_grad()
                model(ids, labels=ids).loss.backward()
                optimizer.step()
        return [each.detach() for each in model.parameters()]

    roles = [f"role:{role}" for role in ROLES]
    plain = trained(lambda model: hl.attach(model, lambda module, args, output: None))
    seen: list[Any] = []
    watched = trained(lambda model: hl.attach(model, roles, lambda module, args, out: seen.append(0), observe=True))
    assert all(map(torch.equal, plain, watched))
    assert len(seen) == 20 * 3 * len(roles)
    grads = trained(
        lambda model: hl.attach(model, roles[:3], lambda m, gi, go: seen.append(go), on="backward", observe=True)
    )
    assert all(map(torch.equal, plain, grads))
    drawn = trained(lambda model: hl.attach(model, roles, lambda module, args, output: torch.rand(1) and None))
    assert not all(map(torch.equal, plain, drawn))


def test_gradients_are_those_of_autograd() -> None:
    """Of all parts, the pattern too, which then takes the place of the fused kernel; of z by hand."""
    model, inputs = _model("GPT2"), _inputs("GPT2")
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any) -> None:
        args[0].retain_grad()
        kept.append(args[0])

    with model.transformer.h[1].attn.c_proj.register_forward_pre_hook(keep):
        model(**inputs).logits.square().sum().backward()
    roles = ["role:q.1", "role:pattern.1", "role:z.1"]
    with hl.capture(model, roles, grads=True) as cache:
        model(**inputs).logits.square().sum().backward()
    found = {part: cache[f"transformer.h.1.attn:{part}"].grad for part in ("q", "pattern", "z")}
    torch.testing.assert_close(found["z"].transpose(1, 2).flatten(2), kept[0].grad, atol=1e-6, rtol=1e-4)
    assert found["pattern"].shape == (2, 4, 7, 7)
    assert found["pattern"].abs().sum() > 0
    assert found["q"].abs().sum() > 0


def test_an_edit_in_place_of_keys_does_not_reach_the_cache() -> None:
    """It counts in its call, as an edit that is returned; the next token looks at the keys as they were."""
    model, ids = _model("Llama"), _inputs("Llama")["input_ids"]
    with torch.no_grad():
        plain = model(ids, use_cache=True)
        with hl.attach(model, ["role:k.1", "role:v.1"], _zero):
            edited = model(ids, use_cache=True)
    assert not torch.equal(edited.logits, plain.logits)
    for one, other in zip(plain.past_key_values.layers[:2], edited.past_key_values.layers[:2], strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


def test_prefill_and_decode_with_a_cache() -> None:
    model, inputs = _model("Llama"), _inputs("Llama")
    shapes: list[tuple[int, ...]] = []
    with hl.attach(model, ["role:q.0", "role:k.0"], lambda m, a, o: shapes.append(tuple(o.shape)), observe=True):
        model.generate(**inputs, attention_mask=torch.ones(2, 7), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert shapes == [(2, 4, 7, 8), (2, 2, 7, 8), (2, 4, 1, 8), (2, 2, 8, 8), (2, 4, 1, 8), (2, 2, 9, 8)]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class ByHand(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.mT).softmax(-1) @ v)


class Viewed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        z = scaled_dot_product_attention(q, k, v.view_as(other=v), is_causal=True)
        return self.out(z.transpose(1, 2).flatten(2)).view_as(other=x)


class Rotated(Attention):
    shared = nn.Identity()

    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = self.shared


class Own(nn.Module):
    """A model that nobody has heard of."""

    def __init__(self, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        mlp = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))  # noqa: E731
        self.layers = nn.ModuleList([nn.ModuleDict({"attn": attention(), "mlp": mlp()}) for _ in range(2)])
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer["attn"](x)
            x = x + layer["mlp"](x)
        return self.head(x)


@pytest.fixture
def ids() -> Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 16, (2, 5))


def test_a_model_of_ones_own(ids: Tensor) -> None:
    model = Own(Rotated)  # all layers have one embedding of positions
    with hl.capture(model, ["role:pattern.0", "role:z.-1"]) as cache:
        model(ids)
    assert cache.names == ("layers.0.attn:pattern", "layers.1.attn:z")
    assert cache["layers.0.attn:pattern"].output.sum(-1).sub(1).abs().max() < 1e-6
    other = Own(ByHand)
    handle = hl.attach(other, "role:q", lambda module, args, output: None)
    with pytest.raises(UnhookableError, match="sdpa"):
        other(ids)
    handle.remove(quiet=True)


@pytest.mark.parametrize("attention", [Attention, Viewed])
def test_what_a_head_adds_can_be_edited_and_has_gradients(attention: Any, ids: Tensor) -> None:
    """Without a head as without what it reads; the gradient of each head is that of the sum."""
    model = Own(attention)
    for head in range(2):
        with hl.patch(model, hl.edits.ablate(head=head), role="attn_out"):
            without = model(ids)
        with hl.patch(model, hl.edits.ablate(head=head), role="z"):
            torch.testing.assert_close(without, model(ids))
    with hl.capture(model, ["role:attn_out.0", "role:attn.0"], grads=True) as cache:
        model(ids).square().sum().backward()
    grad = cache["attn_out", 0].grad
    torch.testing.assert_close(grad, cache["attn", 0].grad[:, None].expand_as(grad))


class Gated(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) * x.sigmoid())


class Adapted(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        read = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(read) + self.high(self.low(read))


class Shuffled(Attention):
    """Forgets to put the heads behind the tokens: its columns are of no head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(scaled_dot_product_attention(q, k, v).reshape(x.shape))


class Unprojected(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("attention", "words"),
    [(Gated, "(mul)"), (Adapted, "merge_adapter"), (Shuffled, "(reshape)"), (Unprojected, "was not seen to")],
)
def test_where_what_a_head_adds_is_not_known_is_an_error(attention: Any, words: str, ids: Tensor) -> None:
    model = Own(attention)
    with hl.capture(model, role="z"):
        model(ids)
    with pytest.raises(UnhookableError, match=re.escape(words)), hl.capture(model, role="attn_out"):
        model(ids)
    hl.assert_no_hooks(model, foreign=True)


def test_copies_have_no_hooks_and_weights_of_their_own(ids: Tensor, tmp_path: Any) -> None:
    model = Own()
    with hl.attach(model, "role:z", _first_head_off), hl.attach(model, "role:attn", lambda m, a, o: None):
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copied, loaded):
        assert torch.equal(other(ids), model(ids))
        with torch.no_grad():
            other.layers[0]["attn"].qkv.weight.zero_()
        assert not torch.equal(other(ids), model(ids))


def test_hooks_on_the_module_and_inside_come_off_in_any_order(ids: Tensor) -> None:
    """Both give the module a forward of its own while they are on."""
    fired: list[str] = []
    for order in ((0, 1), (1, 0)):
        model = Own()
        plain = model(ids)
        fired.clear()
        handles = [
            hl.attach(model, "role:attn", lambda m, a, o: fired.append("module"), observe=True),
            hl.attach(model, "role:q", lambda m, a, o: fired.append("part"), observe=True),
        ]
        assert torch.equal(model(ids), plain)
        assert fired == ["part", "module"] * 2
        handles[order[0]].remove()
        assert torch.equal(model(ids), plain)
        assert fired[4:] == [["part", "module"][order[0]]] * 2
        handles[order[1]].remove()
        assert not [each for each in model.modules() if "forward" in vars(each)]


def test_blocks_by_number() -> None:
    model = _model("Mixtral")
    assert hl.find(model, "role:resid.1").names == ["model.layers.1"]
    assert hl.find(model, "role:mlp.-1").names == ["model.layers.2.mlp"]
    assert hl.find(model, "role:attn.1:").names == ["model.layers.1.self_attn", "model.layers.2.self_attn"]
    assert hl.find(model, ["role:router.0", "role:z.2"]).names == [
        "model.layers.0.mlp.gate",
        "model.layers.2.self_attn:z",
    ]
    for target, words in {
        "role:resid.3": "this model has 3",
        "role:embed.0": "has no number",
        "role:head": "called 'unembed'",
        "role:quer": "Roles are",
        "role:mlp.x": "Roles are",
    }.items():
        with pytest.raises((TargetError, NoMatchError), match=words):
            hl.find(model, target)


def test_a_cache_is_read_by_role_and_block() -> None:
    model, inputs = _model("Llama"), _inputs("Llama")
    with torch.no_grad(), hl.capture(model, ["role:resid", "role:q", "role:mlp.0"]) as cache:
        model(**inputs)
    assert cache["resid", 1].output is cache["model.layers.1"].output
    assert cache["q", -1].output is cache["model.layers.2.self_attn:q"].output
    assert cache.stack("resid").shape == (3, 2, 7, 32)
    assert torch.equal(cache.stack("q")[1], cache["q", 1].output)
    for place in (("mlp", 1), ("z", 0)):
        with pytest.raises(KeyError, match="was not captured"):
            cache[place]
    with pytest.raises(KeyError, match="by role and block"):
        cache["resid", "x"]  # type: ignore[index]
    with pytest.raises(KeyError, match="Nothing with the role 'z'"):
        cache.stack("z")
    assert ("resid", np.int64(1)) in cache
    assert not [place for place in (("resid", 9), ("mlp", 1), ("resid", "x")) if place in cache]
    assert cache.get(("resid", 9)) is None
    with pytest.raises(NoMatchError, match="1 of 3 blocks"):
        cache.stack("mlp")
    assert hl.find(model, role="mlp", layer=np.int64(1)).names == ["model.layers.1.mlp"]
    assert len(hl.find(model, role="mlp", layer=np.arange(2)).names) == 2
    with pytest.raises(TargetError, match="number of a block"):
        hl.find(model, role="mlp", layer=1.5)  # type: ignore[arg-type]


def test_blocks_of_an_encoder_and_a_decoder_are_stacked_if_they_are_of_one_shape() -> None:
    model, inputs = _model("T5"), _inputs("T5")
    with torch.no_grad(), hl.capture(model, role="resid") as cache:
        model(**inputs)
    with pytest.raises(CaptureError, match="encoder"):
        cache.stack("resid")
    assert cache["resid", 3].tensor.shape == (2, 5, 32)
    with torch.no_grad(), hl.capture(model, role="resid") as cache:
        model(inputs["input_ids"], decoder_input_ids=inputs["input_ids"])
    assert torch.equal(cache.stack("resid")[3], cache["resid", 3].tensor)


def test_layers_wherever_there_are_roles() -> None:
    model, inputs = _model("Llama"), _inputs("Llama")
    names = [f"model.layers.{number}.mlp" for number in range(3)]
    for layer, expected in ((1, names[1:2]), (-1, names[2:]), ([0, 2], names[::2]), (slice(1, None), names[1:])):
        assert hl.find(model, role="mlp", layer=layer).names == expected
        with torch.no_grad(), hl.capture(model, role="mlp", layer=layer) as cache:
            model(**inputs)
        assert list(cache) == expected
        with hl.patch(model, hl.edits.ablate(), role="mlp", layer=layer) as patched:
            model(**inputs)
            assert [site.name for receipt in patched.report() for site in receipt.sites] == expected
        with hl.watch(model, role="mlp", layer=layer, on="forward") as watch:
            model.train()(**inputs)
            assert {name.partition("/")[0] for name in watch.to_metrics() if "layers" in name} == set(expected)
        model.eval()
        assert hl.attach(model, lambda module, args, output: None, role="mlp", layer=layer).names == tuple(expected)
    with pytest.raises(TargetError, match="goes with a role"):
        hl.find(model, layer=1)
    with pytest.raises(TargetError, match="number of a block"):
        hl.find(model, role="mlp", layer="one")  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [1, (0, 3)])
def test_edits_by_head(heads: Any) -> None:
    """What is left is what the other heads add; and with the values of another run, that of the other."""
    model, inputs = _model("GPT2"), _inputs("GPT2")
    other = {"input_ids": inputs["input_ids"].flip(1)}
    chosen = [heads] if isinstance(heads, int) else list(heads)
    edits = hl.edits
    with torch.no_grad(), hl.capture(model, ["role:z"]) as clean:
        model(**inputs)
    with torch.no_grad(), hl.capture(model, ["role:z", "role:pattern"]) as corrupted:
        model(**other)
    rest = [head for head in range(4) if head not in chosen]
    for edit, expected in (
        (edits.ablate(head=heads), torch.zeros(2, len(chosen), 7, 8)),
        (edits.swap(corrupted, head=heads), corrupted["z", 0].output[:, chosen]),
        (edits.mean_ablate(corrupted, head=heads), None),
        (edits.scale(2.0, head=heads), clean["z", 0].output[:, chosen] * 2),
    ):
        with torch.no_grad(), hl.patch(model, edit, role="z", layer=0), hl.capture(model, role="z", layer=0) as cache:
            model(**inputs)
        found = cache["z", 0].output
        assert torch.equal(found[:, rest], clean["z", 0].output[:, rest])
        if expected is None:
            expected = corrupted["z", 0].output.mean((0, 2), keepdim=True)[:, chosen].expand(2, -1, 7, -1)
        torch.testing.assert_close(found[:, chosen], expected)
    with pytest.raises(OptionError, match="has no heads"):
        hl.patch(model, edits.ablate(head=1), role="resid")
    with pytest.raises(OptionError, match="head= or index="):
        edits.ablate(head=1, index=0)
    heads = "^head=9, but the output of .*:z' has . heads, 0 to"
    with pytest.raises(HookReturnError, match=heads), hl.patch(model, edits.ablate(head=9), role="z", layer=0):
        model(**inputs)


def test_padding_on_the_left_looks_at_nothing() -> None:
    """Rows that are masked as a whole are zero, and a pattern with them can be put back."""
    model, ids = _model("Llama"), _inputs("Llama")["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        with hl.capture(model, role="pattern") as cache:
            model(ids, attention_mask=mask)
        with hl.patch(model, hl.edits.scale(1.0), role="pattern"):
            put_back = model(ids, attention_mask=mask).logits
    assert cache.stack("pattern").isfinite().all()
    torch.testing.assert_close(put_back[mask.bool()], plain[mask.bool()], atol=1e-5, rtol=1e-5)


def _zero(module: nn.Module, args: Any, output: Tensor) -> None:
    with torch.no_grad():
        output.zero_()


@torch.no_grad()
def test_edits_in_place_count(ids: Tensor) -> None:
    model = Own()
    for part in ("q", "pattern", "z", "attn_out"):
        plain = model(ids)
        with hl.attach(model, f"role:{part}.0", _zero):
            changed = model(ids)
        assert not torch.allclose(plain, changed), part


def test_specs_names_and_checks_know_the_parts(ids: Tensor) -> None:
    """A spec by role, a name as a cache has it; and what is left on is told."""
    model = Own()
    spec = {"target_modules": ["role:z", "role:mlp.0"], "hook_factory": "hookline.factories:nan_alarm"}
    with hl.register_hooks(model, [spec]) as handles:
        model(ids)
        names = [site.name for site in handles.report()[0].sites]
        assert names == ["layers.0.mlp", "layers.0.attn:z", "layers.1.attn:z"]
        assert handles.report()[0].fired == 3
        assert {each.site for each in hl.doctor(model).hooks} == set(names)
        with pytest.raises(hl.errors.HooksLeftError, match="attn:z"):
            hl.assert_no_hooks(model)
    hl.assert_no_hooks(model)
    with hl.capture(model, "layers.1.attn:q") as cache:
        model(ids)
    assert cache.names == ("layers.1.attn:q",)


def test_a_model_of_ones_own_compiles_whole(ids: Tensor) -> None:
    torch._dynamo.reset()
    model = Own()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain = compiled(ids)
    with hl.attach(model, "role:z.0", _first_head_off) as handle:
        torch.testing.assert_close(compiled(ids), model(ids))
    assert handle.report().fired == 2
    assert torch.equal(compiled(ids), plain)


def test_hooks_that_come_off_during_a_forward_and_two_threads(ids: Tensor) -> None:
    """Neither is taken for a module that computes attention by itself."""
    model = Own()
    part = hl.attach(model, "role:q.0", lambda module, args, output: None, observe=True)
    with hl.attach(model, "layers.0.attn.qkv", lambda module, args, output: part.remove(quiet=True), observe=True):
        model(ids)
    with hl.attach(model, "role:q", lambda module, args, output: None, observe=True), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: model(ids), range(40)))
    assert all(torch.equal(found[0], each) for each in found)


def test_an_interrupt_while_parts_are_switched_on_leaves_nothing(ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Own()
    with monkeypatch.context() as patched:
        patched.setattr(recompile_guard, "bind_forward", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            hl.attach(model, "role:q", lambda module, args, output: None)
    with hl.capture(model, "role:q") as cache:
        model(ids)
    assert cache.names == ("layers.0.attn:q", "layers.1.attn:q")


def test_models_go_when_nobody_has_them(ids: Tensor) -> None:
    """Also with a hook that refers to its model; and the functions of transformers are as before."""
    interface = vars(transformers.modeling_utils.AttentionInterface)["get_interface"]
    kept: list[Any] = []
    for make in (Own, lambda: _model("Llama")):
        model = make()
        hl.attach(model, "role:q", functools.partial(_refer, model), observe=True)
        kept.append(weakref.ref(model))
        del model
    gc.collect()
    assert [each() for each in kept] == [None, None]
    assert vars(transformers.modeling_utils.AttentionInterface)["get_interface"] is interface


def _refer(model: Any, module: nn.Module, args: Any, output: Any) -> None:
    pass


def test_a_forward_of_somebody_else_stays(ids: Tensor) -> None:
    """Put there before or after, in copies, and when hooks come back."""
    model = Own()
    attention = model.layers[0]["attn"]
    own = attention.forward
    attention.forward = lambda x: own(x) * 2
    doubled = model(ids)
    handle = hl.attach(model, "role:q.0", lambda module, args, output: None, observe=True)
    ours = attention.forward
    attention.forward = lambda x: ours(x) + 1
    more = model(ids)
    assert not torch.equal(more, doubled)
    handle.remove()
    assert torch.equal(model(ids), more)
    with hl.attach(model, "role:q.0", lambda module, args, output: None, observe=True) as again:
        assert torch.equal(model(ids), more)
    assert again.report().fired == 1


def test_replicas_of_data_parallel_go_through_the_parts(ids: Tensor) -> None:
    """As ``nn.DataParallel`` makes and calls them; without hooks afterwards."""
    attention = Own().layers[0]["attn"]
    x = torch.randn(2, 5, 8)
    model = nn.ModuleDict({"attn": attention})
    parts = hl.sites.attention.parts_of(attention)

    def replica() -> Any:
        made = attention._replicate_for_data_parallel()
        made.__dict__.update(attention._modules)  # which a replica has as attributes
        return made

    plain = replica()(x)
    with hl.attach(parts["z"], _first_head_off):
        with pytest.raises(hl.errors.HooksLeftError, match=r"\(the model\):z: "):
            hl.assert_no_hooks(attention)
        assert torch.equal(replica()(x), attention(x))
        assert not torch.equal(replica()(x), plain)
    assert torch.equal(replica()(x), plain)
    hl.assert_no_hooks(model)


def test_multihead_attention_is_refused_when_hooks_come() -> None:
    """In an encoder of torch it may not even be called, so that nothing would say so later."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Embedding(16, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    with pytest.raises(UnhookableError, match="scaled_dot_product_attention"):
        hl.capture(model, role="q")
    hl.assert_no_hooks(model, foreign=True)


def test_what_has_no_heads_is_refused() -> None:
    class Flat(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))

    model = Own(Flat)
    handle = hl.attach(model, "role:pattern", lambda module, args, output: None, observe=True)
    with pytest.raises(UnhookableError, match="3 dimensions"):
        model(torch.ones(1, 2, dtype=torch.long))
    handle.remove(quiet=True)


class ServedLayer(nn.Module):
    """As vLLM's: called with rows of all requests."""

    num_heads, num_kv_heads, head_size, kv_cache_dtype = 2, 1, 4, "auto"

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (each.view(len(each), -1, 4).transpose(0, 1)[None] for each in (query, key, value))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)


class Served(nn.Module):
    rotary = nn.Identity()
    """The same in all layers, as there."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.out, self.attn = nn.Linear(8, 16), nn.Linear(8, 8), ServedLayer()
        self.rotary_emb = self.rotary

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attn(*self.qkv(x).split((8, 4, 4), -1)))


@torch.no_grad()
def test_the_layer_of_vllm_has_heads_by_token() -> None:
    model, ids = Own(Served), torch.arange(5)
    plain = model(ids)
    with hl.capture(model, [f"role:{part}" for part in ("q", "k", "v", "z")]) as cache:
        assert torch.equal(model(ids), plain)
    shapes = [tuple(cache[part, 0].output.shape) for part in ("q", "k", "v", "z")]
    assert shapes == [(5, 2, 4), (5, 1, 4), (5, 1, 4), (5, 2, 4)]
    with pytest.raises(UnhookableError, match="q, k, v and z"):
        hl.capture(model, role="pattern")
    spec = {"target_modules": ["role:z"], "hook_factory": "hookline.factories:activation_stats"}
    with hl.register_hooks(model, [spec]) as handles:
        assert torch.equal(model(ids), plain)
        assert handles.report()[0].fired == 2
    with hl.patch(model, hl.edits.ablate(head=1), role="z", layer=0), hl.capture(model, role="z") as cache:
        assert not torch.equal(model(ids), plain)
    assert not cache["z", 0].output[:, 1].any()
    assert cache["z", 0].output[:, 0].any()
    assert torch.equal(model(ids), plain)
    hl.assert_no_hooks(model, foreign=True)
