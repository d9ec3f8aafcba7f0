"""Roles: the parts of language models found by structure, confirmed by runs, and usable as targets everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_engine_trees import SGLANG, VLLM, build_tree
from torch import Tensor, nn

import hookline as hl
from hookline.errors import NoMatchError, TargetError
from hookline.sites import find_roles

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
OPT = {**SMALL, "word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 128}
DISTIL = {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
BLOOM = {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
QWEN_MOE = {
    "num_key_value_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "llama": (
        "LlamaForCausalLM",
        SMALL | {"num_key_value_heads": 2},
        {
            "resid": "model.layers.#",
            "attn": "model.layers.#.self_attn",
            "mlp": "model.layers.#.mlp",
            "embed": "model.embed_tokens",
            "final_norm": "model.norm",
            "unembed": "lm_head",
        },
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        SMALL | {"num_key_value_heads": 2},
        {
            "resid": "model.layers.#",
            "attn": "model.layers.#.self_attn",
            "mlp": "model.layers.#.mlp",
            "unembed": "lm_head",
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        SMALL | {"num_key_value_heads": 2, "head_dim": 8},
        {
            "resid": "model.layers.#",
            "attn": "model.layers.#.self_attn",
            "final_norm": "model.norm",
            "unembed": "lm_head",
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        GPT | {"n_positions": 128},
        {
            "resid": "transformer.h.#",
            "attn": "transformer.h.#.attn",
            "embed": "transformer.wte",
            "final_norm": "transformer.ln_f",
        },
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        SMALL,
        {
            "resid": "gpt_neox.layers.#",
            "attn": "gpt_neox.layers.#.attention",
            "embed": "gpt_neox.embed_in",
            "final_norm": "gpt_neox.final_layer_norm",
        },
    ),
    "opt": (
        "OPTForCausalLM",
        OPT,
        {
            "attn": "model.decoder.layers.#.self_attn",
            "mlp": "model.decoder.layers.#.fc2",
            "embed": "model.decoder.embed_tokens",
            "final_norm": "model.decoder.final_layer_norm",
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        BLOOM,
        {
            "attn": "transformer.h.#.self_attention",
            "embed": "transformer.word_embeddings",
            "final_norm": "transformer.ln_f",
        },
    ),
    "falcon": ("FalconForCausalLM", SMALL, {"mlp": "transformer.h.#.mlp", "final_norm": "transformer.ln_f"}),
    "mixtral": (
        "MixtralForCausalLM",
        SMALL | EXPERTS,
        {"mlp": "model.layers.#.mlp", "final_norm": "model.norm", "router": "model.layers.#.mlp.gate"},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        SMALL | QWEN_MOE | {"num_key_value_heads": 2, "num_experts_per_tok": 2},
        {"attn": "model.layers.#.self_attn", "final_norm": "model.norm", "router": "model.layers.#.mlp.gate"},
    ),
    "bert": (
        "BertForMaskedLM",
        SMALL,
        {
            "attn": "bert.encoder.layer.#.attention",
            "mlp": "bert.encoder.layer.#.output.dense",
            "embed": "bert.embeddings.word_embeddings",
            "unembed": "cls.predictions.decoder",
        },
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        DISTIL,
        {"mlp": "distilbert.transformer.layer.#.ffn", "unembed": "vocab_projector"},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        T5,
        {
            "resid": "*coder.block.#",
            "attn": "*coder.block.#.layer.0.SelfAttention",
            "mlp": "*coder.block.#.layer.*.DenseReluDense",
            "embed": "*coder.embed_tokens",
            "final_norm": "*coder.final_layer_norm",
        },
    ),
}
"""By family: the class, a small configuration, and some of the globs that mean the same as roles."""

"""By family, the roles whose modules have (batch × tokens, …) and no axis for the batch."""

POST_NORM = ("bert", "distilbert")
"""Families whose blocks end with a norm: there is none between the last block and the first matrix of the head."""

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def make(family: str) -> nn.Module:
    """Return a small model of a family."""
    name, options, _ = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model: nn.Module = cls(cls.config_class(**options)).eval()
    return model


def inputs(model: Any) -> dict[str, Tensor]:
    """Return the arguments of a forward."""
    return {"input_ids": IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})}


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_of_a_family_are_found_by_structure(family: str) -> None:
    """Each role means the modules that a glob for that family means."""
    model = make(family)
    for role, glob in FAMILIES[family][2].items():
        found = hl.find(model, role=role).names
        assert found == hl.find(model, glob).names, role
    found = find_roles(model)
    assert {"resid", "attn", "mlp", "embed", "unembed"} <= set(found)
    assert ("router" in found) == ("moe" in family or "mixtral" in family)
    assert ("final_norm" in found) == (family not in POST_NORM)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in POST_NORM])
def test_the_last_norm_is_the_one_that_a_run_calls_last_before_the_head(family: str) -> None:
    """Whichever order modules were registered in; what it returns of the last block is what the head is given."""
    model = make(family)
    found = find_roles(model)
    norms = [name for name, module in model.named_modules() if "Norm" in type(module).__name__]
    called: list[str] = []
    with (
        torch.no_grad(),
        hl.attach(model, norms, lambda module, args, output, *, site: called.append(site.name)),
        hl.capture(model, [*found["resid"], *found["final_norm"], "role:unembed"], inputs=True) as cache,
    ):
        model(**inputs(model))
    assert called[-1] == found["final_norm"][-1]
    last, norm = cache[found["resid"][-1]], model.get_submodule(found["final_norm"][-1])
    with torch.no_grad():
        ready = norm(last.output if isinstance(last.output, Tensor) else last.output[0])
    given = cache[found["unembed"][0]].calls[0].inputs[0]
    scale = model.config.d_model**-0.5 if family == "t5" else 1.0  # T5 makes it smaller where head and embedding share
    assert torch.equal(ready * scale, given)


@pytest.mark.parametrize(("name", "norms"), [("MBart", ["encoder.layer_norm", "decoder.layer_norm"]), ("Bart", [])])
def test_a_norm_of_the_embedding_is_not_the_last_one(name: str, norms: list[str]) -> None:
    """Both have one beside the blocks; Bart's blocks end with a norm of their own."""
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 99, "pad_token_id": 0}
    model = cls(cls.config_class(**sizes, **heads, max_position_embeddings=64)).eval()
    assert find_roles(model).get("final_norm", []) == [f"model.{norm}" for norm in norms]


def test_a_model_without_attention_has_a_last_norm() -> None:
    """The blocks are found in another way there."""
    config = transformers.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = transformers.MambaForCausalLM(config).eval()
    assert find_roles(model)["final_norm"] == ["backbone.norm_f"]


@pytest.mark.parametrize(("engine", "architecture"), [*(("vllm", a) for a in VLLM), *(("sglang", a) for a in SGLANG)])
def test_roles_are_found_in_the_trees_of_serving_engines(engine: str, architecture: str) -> None:
    """Fused projections, parallel layers and runners of experts change no role; the head is what is called there."""
    tree = (VLLM if engine == "vllm" else SGLANG)[architecture]
    found = find_roles(build_tree(tree))
    layers = next(line.split()[0] for line in tree.split("\n") if line.split()[1:] == ["ModuleList"])
    assert found["resid"] == [f"{layers}.0", f"{layers}.1"]
    assert found["unembed"] == ["logits_processor"]
    norm = {"GPT2LMHeadModel": "ln_f", "OPTForCausalLM": "final_layer_norm"}.get(architecture, "norm")
    assert found["final_norm"] == [f"{layers.rpartition('.')[0]}.{norm}"]
    assert [name.rpartition(".")[2] for name in found["embed"]] == ["wte" if "GPT2" in architecture else "embed_tokens"]
    assert {name.rpartition(".")[2] for name in found["attn"]} == {"attn" if "GPT2" in architecture else "self_attn"}
    last = {"OPTForCausalLM": "fc2", "MixtralForCausalLM": "block_sparse_moe"}.get(architecture, "mlp")
    assert [name.rpartition(".")[2] for name in found["mlp"]] == [last, last]
    has_experts = architecture in ("MixtralForCausalLM", "Qwen2MoeForCausalLM")
    assert [name.rpartition(".")[2] for name in found.get("router", [])] == ["gate", "gate"] * has_experts


def test_a_rank_with_some_of_the_experts_or_layers_has_its_roles() -> None:
    """With two of four experts on this rank the router is found; a layer that another rank has is passed over."""
    model = build_tree(VLLM["MixtralForCausalLM"], local_experts=2)
    assert len(find_roles(model)["router"]) == 2
    model.model.layers[1] = nn.Identity()  # PPMissingLayer holds nothing either
    assert find_roles(model)["resid"] == ["model.layers.0"]


class Adapted(nn.Module):
    """A layer with an adapter of low rank beside it, by hand and as PEFT builds it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        layer = self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_a_layer_with_an_adapter_has_the_role_as_a_whole() -> None:
    """By hand on head and MLP."""
    model = own()
    plain = find_roles(model)
    model.out = Adapted(model.out)
    for block in model.stack:
        block.two = Adapted(block.two)
    assert find_roles(model) == plain


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("opt", {"target_modules": ["fc1", "fc2", "q_proj"]}),
        ("bert", {"target_modules": ["dense", "query"]}),
        ("llama", {"target_modules": ["q_proj", "lm_head"]}),
        ("llama", {"target_modules": "all-linear", "modules_to_save": ["embed_tokens", "lm_head"]}),
    ],
)
def test_models_of_peft_have_the_roles_of_the_model_inside(family: str, options: dict[str, Any]) -> None:
    """Also where LoRA, or a copy to be trained, stands in the place of head, MLP or embedding."""
    peft = pytest.importorskip("peft")
    model = make(family)
    plain = find_roles(model)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, **options)).eval()
    assert find_roles(tuned) == plain
    with torch.no_grad(), hl.capture(tuned, role="unembed") as cache:
        logits = tuned(**inputs(model)).logits
    assert torch.equal(cache[plain["unembed"][0]].output, logits)


def test_blocks_without_a_word_for_attention_are_the_outermost_list() -> None:
    """Lists inside of a block, as heads of attention, are not taken for the blocks."""
    heads = [nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)) for _ in range(2)]
    blocks = nn.Sequential(*(nn.ModuleDict({"sa": each, "net": nn.Linear(8, 8)}) for each in heads))
    model = nn.ModuleDict({"tokens": nn.Embedding(20, 8), "blocks": blocks})
    assert find_roles(model)["resid"] == ["blocks.0", "blocks.1"]


class Block(nn.Module):
    """A block whose names say nothing: only a number of heads tells which part is attention."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads = 2
            self.a, self.b = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            one, two, three = self.a(x).chunk(3, -1)
            return self.b(nn.functional.scaled_dot_product_attention(one, two, three))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two = self.Mixing(), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.two(self.one(x).relu())


class Own(nn.Module):
    """A model of one's own, without a library."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.stack, self.out = nn.Embedding(20, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.stack(self.table(ids)))


def own() -> Own:
    """Return such a model."""
    torch.manual_seed(0)
    return Own()


def test_roles_of_a_model_of_ones_own() -> None:
    """Structure alone is enough, and wrapping does not matter."""
    model = own()
    expected = {
        "resid": ["stack.0", "stack.1"],
        "attn": ["stack.0.first", "stack.1.first"],
        "mlp": ["stack.0.two", "stack.1.two"],
        "embed": ["table"],
        "unembed": ["out"],
    }
    assert find_roles(model) == expected
    assert find_roles(nn.DataParallel(model)) == expected


def use_attach(model: nn.Module, target: dict[str, Any]) -> list[str]:
    """Return the names that `attach` hooks."""
    with hl.attach(model, hook=lambda module, args, output: None, **target) as handle:
        model(IDS)
        return list(handle.names)


def use_capture(model: nn.Module, target: dict[str, Any]) -> list[str]:
    """Return the names that `capture` keeps."""
    given = {"targets" if key == "target" else key: value for key, value in target.items()}
    with hl.capture(model, **given) as cache:
        model(IDS)
    return list(cache)


def use_watch(model: nn.Module, target: dict[str, Any]) -> list[str]:
    """Return the names that `watch` counts."""
    with hl.watch(model, on="forward", stats="mean", **target) as watch:
        model(IDS)
    return [key.split("/")[0] for key in watch.to_metrics()]


def use_spec(model: nn.Module, target: dict[str, Any]) -> list[str]:
    """Return the names that the hook of a spec is called at."""
    from hookline.factories import activation_stats

    role = target.get("target") or f"role:{target['role']}"
    made: list[Any] = []
    spec = {"target_modules": [role], "hook_factory": lambda config: made.append(activation_stats(config)) or made[0]}
    with hl.register_hooks(model, [spec], strict=True):
        model(IDS)
    return list(dict.fromkeys(key.split("/")[0] for key in made[0].to_metrics()))


@pytest.mark.parametrize("use", [use_attach, use_capture, use_watch, use_spec])
@pytest.mark.parametrize("target", [{"role": "attn"}, {"target": "role:attn"}], ids=["role", "target"])
def test_every_verb_takes_a_role(use: Callable[[nn.Module, dict[str, Any]], list[str]], target: dict[str, Any]) -> None:
    """``role="attn"`` and the target ``"role:attn"`` select the same modules in every verb, and in specs."""
    assert use(own(), target) == ["stack.0.first", "stack.1.first"]


def test_patch_freeze_and_lists_take_roles() -> None:
    """A role is a target like any other: a key of patch, an element of a list, something to exclude."""
    model = own()
    with hl.patch(model, {"role:mlp": hl.edits.ablate(), "role:attn": hl.edits.ablate()}):
        assert torch.equal(model(IDS), model.out(model.table(IDS)))
    assert hl.find(model, ["role:unembed", "table"]).names == ["table", "out"]
    assert hl.find(model, "stack.*", exclude=["role:attn", "role:resid"]).names[0] == "stack.0.first.a"
    with hl.freeze(model, "role:resid"):
        model(IDS).sum().backward()
    assert model.stack[0].one.weight.grad is None
    assert model.out.weight.grad is not None


def test_a_role_goes_with_one_edit() -> None:
    """``role=`` of patch means the one target; with a mapping it says which key to write."""
    model = make("gpt2")
    with torch.no_grad(), hl.patch(model, {"role:attn": hl.edits.scale(0.5)}):
        expected = model(IDS).logits
    with torch.no_grad(), hl.patch(model, hl.edits.scale(0.5), role="attn") as patched:
        assert torch.equal(model(IDS).logits, expected)
    assert [len(report.sites) for report in patched.report()] == [2]
    assert not torch.equal(model(IDS).logits, expected)
    with pytest.raises(TargetError, match="as a key: 'role:attn'"):
        hl.patch(model, {"transformer.h.0": hl.edits.ablate()}, role="attn")
    with pytest.raises(TargetError, match="no role 'atn'"):
        hl.patch(model, hl.edits.ablate(), role="atn")
    hl.assert_no_hooks(model)


def test_mistakes_about_roles_say_what_to_do() -> None:
    """An unknown role, one that the model does not have, two targets, and a model without roles."""
    model = own()
    with pytest.raises(TargetError, match="no role 'residual'; did you mean 'resid'"):
        hl.capture(model, role="residual")
    with pytest.raises(NoMatchError, match=r"role 'router'; found by structure: resid ×2, attn ×2"):
        hl.find(model, "role:router")
    with pytest.raises(TargetError, match="leave one out"):
        hl.watch(model, "out", role="resid")
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert find_roles(plain) == {}
    assert find_roles(nn.Sequential(nn.LazyLinear(2), nn.Embedding(3, 2))) == {}  # it has no shape yet
    with pytest.raises(NoMatchError, match="found by structure: none"):
        hl.attach(plain, "role:resid", lambda module, args, output: None)
    with pytest.raises(TargetError, match="no role"):
        hl.find(nn.Linear(1, 1), role=["resid", "attn"])  # type: ignore[arg-type]
