"""Plant bugs in small Llama, Mixtral, T5 and ViT models, and see whom `compare` blames; then 100 innocent pairs.

    python torture/planted_bugs.py [WORD ...]     # only the cases whose names have one of the words

Exits with 1 if a bug is blamed on another module, or an innocent pair on any. All weights are random, and all runs on
the CPU; ranks are processes with gloo. An innocent pair that is "unsure" is counted, and is no alarm.
"""

from __future__ import annotations

import copy
import itertools
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hookline as hl
from hookline.debug import Comparison, padded_rows

FOLDER = Path(tempfile.mkdtemp())
FORWARD = ("input", "output")
BOTH = ("input", "output", "output_grad", "param_grad")
COMMON: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 61}
DECODER = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}


def made(family: str, seed: int = 0, attention: str = "eager") -> Any:
    """Return a model with random weights, the same for each seed."""
    import transformers as hf

    configs: dict[str, Any] = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
        "mixtral": lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(**{**COMMON, "intermediate_size": 48, "image_size": 16, "patch_size": 4})
        ),
    }
    torch.manual_seed(seed)
    model = configs[family]().eval()
    model.config._attn_implementation = attention if family != "t5" else "eager"
    model.config._experts_implementation = "eager"  # the other has no float64
    for parameter in model.parameters():  # norms and biases are ones and zeros, which hide bugs
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def ids(seed: int = 0, batch: int = 2, length: int = 10) -> Tensor:
    """Return tokens."""
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(seed + 1))


def forward(model: Any, seed: int = 0) -> Any:
    """Run a model once, with what it takes."""
    inner = getattr(model, "_orig_mod", model)
    if "ViT" in type(inner).__name__:
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        return model(pixels.to(next(model.parameters()).dtype))
    if "T5" in type(inner).__name__:
        return model(input_ids=ids(seed), labels=ids(seed + 7, length=6))
    return model(ids(seed), use_cache=False)


def decode(model: Any, seed: int = 0, shift: int = 0) -> None:
    """Prefill seven tokens, then decode three, one by one; ``shift`` moves their positions."""
    past = model(ids(seed)[:, :7], use_cache=True).past_key_values
    for place in range(7, 10):
        token, at = ids(seed)[:, place : place + 1], torch.full((2, 1), place + shift)
        past = model(token, past_key_values=past, use_cache=True, position_ids=at).past_key_values


def train(model: Any, *, lr: float = 1e-2, scale: float = 1.0, clip: float | None = None) -> Any:
    """Return what trains two steps, to be traced by the steps of its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def run(model: Any) -> None:
        for step in range(2):
            optimizer.zero_grad()
            logits = model(ids(step), use_cache=False).logits
            (nn.functional.cross_entropy(logits.flatten(0, 1), ids(step + 3).flatten()) * scale).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

    return run, optimizer


def traced(model: Any, run: Callable[[Any], Any], to: str, **options: Any) -> Path:
    """Return the folder of a trace with all tensors."""
    shutil.rmtree(FOLDER / to, ignore_errors=True)
    given = {"kinds": FORWARD, **options}
    with hl.trace(model, to=FOLDER / to, tensors=True, **given), torch.set_grad_enabled(given["kinds"] != FORWARD):
        run(model)
    return FOLDER / to


# -- bugs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bug:
    """A change of a model, or of how it runs, and who is to be blamed."""

    name: str
    family: str
    blamed: str
    edit: Callable[[Any], Any] = lambda model: None
    run: Callable[[Any], Any] = forward
    wrong_run: Callable[[Any], Any] | None = None
    dtype: torch.dtype = torch.float32


def with_forward(path: str, change: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> Callable[[Any], None]:
    """Return an edit that puts another forward into a module: ``change(module, old forward)``."""

    def edit(model: Any) -> None:
        module = model.get_submodule(path)
        module.forward = change(module, module.forward)

    return edit


def changed(path: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Return an edit of a parameter."""

    def edit(model: Any) -> None:
        parameter = model.get_parameter(path)
        parameter.data = change(parameter.data.clone()).contiguous()

    return edit


def with_value(path: str, name: str, value: Any) -> Callable[[Any], None]:
    """Return an edit that sets an attribute of a module."""
    return lambda model: setattr(model.get_submodule(path), name, value)


def without_residual(layer: Any, old: Any) -> Any:
    """Return the forward of a decoder layer that forgets what came in."""

    def new(hidden_states: Tensor, **options: Any) -> Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
        out: Tensor = attended + layer.mlp(layer.post_attention_layernorm(attended))
        return out

    return new


def without_cache(attention: Any, old: Any) -> Any:
    """Return the forward of an attention that sees only the newest token while it decodes."""

    def new(hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        is_decode = hidden_states.shape[1] == 1
        mask = None if is_decode else attention_mask
        return old(
            hidden_states, past_key_values=None if is_decode else past_key_values, attention_mask=mask, **options
        )

    return new


def swap_gate_and_up(model: Any) -> None:
    """Exchange the two projections of a feed-forward part."""
    part = model.model.layers[0].mlp
    part.gate_proj.weight, part.up_proj.weight = part.up_proj.weight, part.gate_proj.weight


def unnormalized(router: Any, old: Any) -> Any:
    """Return the forward of a router whose weights do not add up to one."""

    def new(x: Tensor) -> Any:
        logits, _, chosen = old(x)
        return logits, logits.softmax(-1).gather(-1, chosen), chosen

    return new


L, M, E, D = "model.layers", "model.layers.1.mlp", "encoder.block.0.layer.0", "decoder.block.1.layer.1"
ATTENTION, BIAS, KEYS = f"{L}.1.self_attn", f"{E}.SelfAttention.relative_attention_bias", f"{D}.EncDecAttention.k"
PATCHES, ACTIVATION = "vit.embeddings.patch_embeddings.projection", "vit.layers.1.mlp.activation_fn"
BUGS = [
    Bug("llama: heads of the queries exchanged", "llama", f"{ATTENTION}.q_proj",
        changed(f"{ATTENTION}.q_proj.weight", lambda data: data.roll(8, 0))),
    Bug("llama: another base of the rotary embedding", "llama", "model.rotary_emb",
        lambda model: model.model.rotary_emb.inv_freq.mul_(0.9)),
    Bug("llama: another epsilon of one norm", "llama", f"{L}.2.input_layernorm",
        with_value(f"{L}.2.input_layernorm", "variance_epsilon", 1e-3)),
    Bug("llama: gate and up exchanged", "llama", f"{L}.0.mlp.gate_proj", swap_gate_and_up),
    Bug("llama: another scale of attention", "llama", ATTENTION, with_value(ATTENTION, "scaling", 0.5)),
    Bug("llama: a residual is dropped", "llama", f"{L}.2", with_forward(f"{L}.2", without_residual)),
    Bug("llama: an untied head", "llama", "lm_head", changed("lm_head.weight", lambda data: data * 1.01)),
    Bug("llama: a row of the head negated, bfloat16", "llama", "lm_head",
        lambda model: model.lm_head.weight.data[17].neg_(), dtype=torch.bfloat16),
    Bug("decode: attention forgets the cache", "llama", ATTENTION, with_forward(ATTENTION, without_cache), run=decode),
    Bug("decode: positions are off by one", "llama", "the inputs", run=decode,
        wrong_run=lambda model: decode(model, shift=1)),
    Bug("mixtral: another router", "mixtral", f"{M}.gate", changed(f"{M}.gate.weight", lambda data: data * 1.5)),
    Bug("mixtral: one expert less", "mixtral", f"{M}.gate", with_value(f"{M}.gate", "top_k", 1)),
    Bug("mixtral: one expert is wrong", "mixtral", f"{M}.experts",
        lambda model: model.get_parameter(f"{M}.experts.down_proj").data[3].mul_(1.1)),
    Bug("mixtral: routing weights are not normalized", "mixtral", f"{M}.gate", with_forward(f"{M}.gate", unnormalized)),
    Bug("t5: another relative bias", "t5", BIAS, changed(f"{BIAS}.weight", lambda data: data * 1.3)),
    Bug("t5: keys of cross attention transposed", "t5", KEYS, changed(f"{KEYS}.weight", lambda data: data.T)),
    Bug("t5: labels shifted with another start", "t5", "the model",
        lambda model: setattr(model.config, "decoder_start_token_id", 5)),
    Bug("t5: output scaled otherwise", "t5", "the model", lambda model: setattr(
        model.config, "scale_decoder_outputs", not model.config.scale_decoder_outputs)),
    Bug("vit: positions rolled", "vit", "vit.embeddings",
        changed("vit.embeddings.position_embeddings", lambda data: data.roll(1, 1))),
    Bug("vit: patches flipped", "vit", PATCHES, changed(f"{PATCHES}.weight", lambda data: data.flip(-1))),
    Bug("vit: another activation", "vit", ACTIVATION, with_forward(ACTIVATION, lambda *_: nn.functional.relu)),
]  # fmt: skip
TRAINING: dict[str, tuple[dict[str, Any], str]] = {
    "training: another learning rate": ({"lr": 1.1e-2}, "the optimizer"),
    "training: another scale of the loss": ({"scale": 2.0}, "the loss"),
    "training: gradients are clipped": ({"clip": 1e-3}, "the code between backward and step"),
}


def blamed_for(bug: Bug) -> Comparison:
    """Return what comes of the right model beside the wrong one."""
    right = made(bug.family).to(bug.dtype)
    wrong = copy.deepcopy(right)
    bug.edit(wrong)
    return hl.compare(traced(right, bug.run, "a"), traced(wrong, bug.wrong_run or bug.run, "b"))


def blamed_in_training(change: dict[str, Any]) -> Comparison:
    """Return what comes of two steps of training beside two others."""
    folders = []
    for name, options in (("a", {}), ("b", change)):
        model = made("llama")
        run, optimizer = train(model, **options)
        folders.append(traced(model, run, name, kinds=BOTH, step=optimizer))
    return hl.compare(*folders)


# -- ranks -------------------------------------------------------------------------------------------------------------

PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


class Net(nn.Module):
    """What tensor parallelism splits, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.down(self.up(x).relu()))


def on_rank(rank: int, folder: str) -> None:
    """Trace the parameters of FSDP2 over tensor parallelism on one of four ranks: right, and with each bug."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    for name in ("right", "up", "down"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model: Any = parallelize_module(Net(), mesh["tp"], {key: style() for key, style in PLAN.items()})
        fully_shard(model, mesh=mesh["dp"])
        if name != "right" and rank == 3:
            with torch.no_grad():  # a stale shard
                model.get_parameter(f"{name}.weight").to_local()[0].neg_()
        hl.trace(model, to=f"{folder}/{name}", kinds="parameter", tensors=True).remove()
    dist.destroy_process_group()


def ranks() -> dict[str, tuple[Comparison, str]]:
    """Return what comes of one process beside four ranks, and who is to be blamed."""
    folder = FOLDER / "ranks"
    folder.mkdir()
    mp.spawn(on_rank, (str(folder),), nprocs=4)  # type: ignore[no-untyped-call]
    hl.trace(Net(), to=folder / "one", kinds="parameter", tensors=True).remove()
    wanted = {"right": "", "up": "up", "down": "down"}
    return {
        f"ranks: FSDP2 over tensor parallelism, {name}": (hl.compare(folder / "one", folder / name), module)
        for name, module in wanted.items()
    }


# -- innocent pairs ----------------------------------------------------------------------------------------------------


def padded(tokens: Tensor, columns: int, *, left: bool) -> tuple[Callable[[Any], Any], Tensor]:
    """Return a run of tokens with so many columns of padding, and its mask."""
    shape = tokens.shape[0], columns
    empty, ones = torch.zeros(shape, dtype=torch.long), torch.ones_like(tokens)
    parts, masks = ([empty, tokens], [empty, ones]) if left else ([tokens, empty], [ones, empty])
    given, mask = torch.cat(parts, 1), torch.cat(masks, 1)
    at = (mask.cumsum(1) - 1).clamp(min=0)
    return lambda model: model(given, attention_mask=mask, position_ids=at, use_cache=False), mask


def innocent(kind: str, family: str, seed: int) -> Comparison:
    """Return what comes of two runs that differ by rounding, or by where rows lie, alone."""
    model = made(family, seed)
    run: Callable[[Any], Any] = lambda model: forward(model, seed)  # noqa: E731
    if kind in ("bfloat16", "float16", "float64"):
        other = copy.deepcopy(model).to(getattr(torch, kind))
        return hl.compare(traced(model, run, "a"), traced(other, run, "b"))
    if kind == "sdpa":
        return hl.compare(traced(model, run, "a"), traced(made(family, seed, "sdpa"), run, "b"))
    if kind == "compile":
        compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
        return hl.compare(traced(model, run, "a"), traced(compiled, run, "b"))
    if kind == "decode":
        other = copy.deepcopy(model).bfloat16()
        return hl.compare(traced(model, decode, "a"), traced(other, decode, "b"))
    tokens, names = ids(seed, batch=3), ["x", "y", "z"]
    run_a, mask_a = padded(tokens, 2, left=False)
    order = [0, 1, 2] if kind == "padding" else [2, 0, 1]
    run_b, mask_b = padded(tokens[order], 5 if kind == "padding" else 2, left=kind == "padding")
    rows = padded_rows(mask_a, names), padded_rows(mask_b, [names[place] for place in order])
    return hl.compare(traced(model, run_a, "a"), traced(model, run_b, "b"), rows=rows)


TEXT, ALL = ("llama", "mixtral"), ("llama", "mixtral", "t5", "vit")
INNOCENT = [
    *itertools.product(("bfloat16", "float16", "float64"), ALL, range(4)),  # 48
    *itertools.product(("sdpa",), ("llama", "mixtral", "vit"), range(4)),  # 12
    *itertools.product(("padding", "batch order", "decode"), TEXT, range(5)),  # 30
    *itertools.product(("compile",), ALL, range(3)),  # 12
]


def main(words: list[str]) -> int:
    """Run all, print each, and return 1 if one is wrong."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    wrong = unsure = 0

    def is_asked(name: str) -> bool:
        return not words or any(word in name for word in words)

    def tell(name: str, found: Comparison, wanted: str) -> None:
        nonlocal wrong, unsure
        blamed = found.blamed[0].name if found.blamed else ""
        wrong += blamed != wanted
        unsure += not blamed and not found.ok
        state = "right" if blamed == wanted else f"WRONG, wanted {wanted or 'nothing'}"
        print(f"{state}: {name}: {blamed or ('nothing' if found.ok else 'unsure')}", flush=True)
        if blamed != wanted:
            print("   ", *found.headline, sep="\n    ")

    for bug in BUGS:
        if is_asked(bug.name):
            tell(bug.name, blamed_for(bug), bug.blamed)
    for name, (change, wanted) in TRAINING.items():
        if is_asked(name):
            tell(name, blamed_in_training(change), wanted)
    if is_asked("ranks"):
        for name, (found, wanted) in ranks().items():
            tell(name, found, wanted)
    for kind, family, seed in INNOCENT:
        name = f"innocent: {kind}, {family} {seed}"
        if is_asked(name):
            torch.compiler.reset()
            tell(name, innocent(kind, family, seed), "")
    print(f"{wrong} wrong; {unsure} innocent pairs unsure")
    return int(wrong > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
