"""Routing statistics of mixtures of experts, as a factory and as an analysis, against numbers in float64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers_factories import PADDED
from torch import Tensor, nn

import hookline as hl
from hookline.factories import moe_routing, serving


def expected(logits: Tensor, chosen: Any) -> dict[str, float]:
    """Return the metrics of a router in float64, from its logits and the experts of each token."""
    numbers = logits.double().numpy()
    experts = numbers.shape[-1]
    likely = np.exp(numbers - numbers.max(-1, keepdims=True))
    likely /= likely.sum(-1, keepdims=True)
    counts = Counter(expert for token in chosen for expert in token)
    load = np.array([counts[expert] for expert in range(experts)]) / sum(counts.values())
    return {
        "tokens": len(numbers),
        "load_max": load.max() * experts,
        "load_entropy": -sum(p * np.log(p) for p in load if p) / np.log(experts),
        "router_entropy": -(likely * np.log(likely)).sum(-1).mean() / np.log(experts),
        "dead_experts": int((load == 0).sum()),
        **{f"load/{expert}": load[expert] for expert in range(experts)},
    }


LOGITS = torch.tensor([[3.0, 1.0, 0.0, -9.0], [0.5, 0.1, 0.2, -9.0], [1.0, 2.0, 0.3, -9.0]])


@pytest.mark.parametrize("top_k", [1, 2])
def test_logits_are_counted_by_the_likeliest_experts(top_k: int) -> None:
    """Of several calls together; the expert that nobody chooses is dead."""
    hook, gate = moe_routing({"top_k": top_k, "per_expert": True}), nn.Identity()
    for part in (LOGITS[:1], LOGITS[1:]):
        hook(gate, (), part)
    chosen = LOGITS.topk(top_k).indices.tolist()
    found = {key.partition("/")[2]: value for key, value in hook.to_metrics().items()}
    assert found == pytest.approx(expected(LOGITS, chosen), rel=1e-6)
    assert found["dead_experts"] == (2 if top_k == 1 else 1)
    hook.reset()
    assert hook.to_metrics() == {}


def test_the_choice_that_a_router_returns_is_the_one_that_counts() -> None:
    """A router may choose others than the likeliest, by groups or a bias; control: its logits alone say otherwise."""
    chosen = torch.tensor([[3, 2], [3, 1], [0, 3]])
    hook, plain = moe_routing({"per_expert": True}), moe_routing({"per_expert": True, "top_k": 2})
    hook(nn.Identity(), (), (LOGITS, LOGITS.softmax(-1)[:, :2], chosen))
    plain(nn.Identity(), (), LOGITS)
    found = {key.partition("/")[2]: value for key, value in hook.to_metrics().items()}
    assert found == pytest.approx(expected(LOGITS, chosen.tolist()), rel=1e-6)
    assert plain.to_metrics() != hook.to_metrics()


class ChosenAlone(nn.Module):
    """Return the chosen experts and their weights, without logits, as the router of DeepSeek's own code does."""

    def __init__(self, **told: Any) -> None:
        super().__init__()
        for name, value in told.items():
            setattr(self, name, value)

    def forward(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return chosen, torch.rand(chosen.shape)


@pytest.mark.parametrize(
    "told", [{"weight": nn.Parameter(torch.zeros(8, 4))}, {"num_experts": 8}, {"n_routed_experts": 8}]
)
@pytest.mark.parametrize("is_turned", [False, True])
def test_the_weights_of_chosen_experts_are_no_logits(told: dict[str, Any], is_turned: bool) -> None:
    """Experts 5 and 7 of 8 get all tokens; nobody knows how undecided the router was."""
    router, hook = ChosenAlone(**told), moe_routing({"per_expert": True})
    output = router(torch.tensor([[5, 7]] * 6))
    hook(router, (), tuple(reversed(output)) if is_turned else output)
    found = {key.partition("/")[2]: value for key, value in hook.to_metrics().items()}
    load = {f"load/{expert}": 0.5 * (expert in (5, 7)) for expert in range(8)}
    wanted = {"tokens": 6, "load_max": 4.0, "load_entropy": 1 / 3, "dead_experts": 6.0, **load}
    assert found == pytest.approx(wanted)


def test_tokens_without_finite_logits_are_no_choices() -> None:
    """NaN and infinity are counted apart, and change no other figure; an expert at -inf is only left out."""
    bad = torch.tensor([[torch.nan, 1, 2, 3], [torch.inf, 1, 2, 3], [-torch.inf] * 4])
    masked = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]])
    hook, clean = (moe_routing({"top_k": 1, "per_expert": True}) for _ in range(2))
    hook(nn.Identity(), (), torch.cat([LOGITS, bad, masked]))
    clean(nn.Identity(), (), torch.cat([LOGITS, masked]))
    assert hook.to_metrics() == {**clean.to_metrics(), "Identity.0/nonfinite": 3.0}
    alone = moe_routing({"top_k": 1})
    alone(nn.Identity(), (), bad)
    assert alone.to_metrics() == {"Identity.0/nonfinite": 3.0}


def test_padding_of_a_served_batch_is_not_counted() -> None:
    """Two requests in one batch, the second padded by two; routers give out all rows in one dimension."""
    hook = moe_routing({"top_k": 1, "phase": "prefill"})
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    with serving(PADDED):
        hook(nn.Identity(), (), rows)
    (name,) = {key.partition("/")[0] for key in hook.to_metrics()}
    real = rows[[0, 1, 2, 5]]
    assert hook.to_metrics()[f"{name}/tokens"] == 4
    spread = expected(real, real.topk(1).indices.tolist())["router_entropy"]
    assert hook.to_metrics()[f"{name}/router_entropy"] == pytest.approx(spread, rel=1e-6)


def mixtral() -> Any:
    """Return a small Mixtral of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=50, **sizes, num_key_value_heads=1, num_local_experts=4)
    )


IDS = torch.arange(3, 23).reshape(2, 10)


def test_the_routers_of_a_mixtral_are_found_and_counted() -> None:
    """The role finds them; reported is what float64 computes from the outputs of the routers."""
    model = mixtral()
    hook = moe_routing({"per_expert": True})
    with hl.capture(model, role="router", detach=True) as cache, hl.attach(model, "role:router", hook):
        model(IDS)
    wanted = {}
    for name in cache:
        logits, _, chosen = cache[name].output
        wanted |= {f"{name}/{key}": value for key, value in expected(logits, chosen.tolist()).items()}
    assert len(cache) == 2
    assert hook.to_metrics() == pytest.approx(wanted, rel=1e-6)
    hl.assert_no_hooks(model, foreign=True)
