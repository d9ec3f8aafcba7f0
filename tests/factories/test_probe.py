"""Probes: trained on captured activations, saved, and scoring every token of a served or plain forward."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_factories import PADDED, Batch, Decoder
from helpers_training import differences, plain_step, train
from torch import Tensor, nn

import hookline as hl
from hookline.errors import OptionError
from hookline.factories import ProbeHead, Tokens, probe, serving, train_probe
from hookline.factories.request_notes import read_flags
from hookline.factories.served_batch import tokens_of_batch

torch.manual_seed(0)
POINTS = torch.randn(400, 6, generator=torch.Generator().manual_seed(1))
HALVES = (POINTS @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 1.0]) > 0.3).long()
CORNERS = ((POINTS[:, 0] > 0) ^ (POINTS[:, 1] > 0)).long()


def head_for(unit: int, width: int = 8, threshold: float = 0.5) -> ProbeHead:
    """Return a head whose logit is one unit of the activations."""
    weight = torch.zeros(1, width)
    weight[0, unit] = 1.0
    return ProbeHead([(weight, torch.zeros(1))], threshold=threshold)


def test_a_linear_probe_learns_a_plane_and_a_hidden_layer_what_is_none() -> None:
    """Accuracy on rows that training has not seen; opposite corners are the control, which no plane separates."""
    assert train_probe(POINTS * 7 + 3, HALVES).facts["held_out_accuracy"] > 0.95
    assert train_probe(POINTS, CORNERS).facts["held_out_accuracy"] < 0.75
    assert train_probe(POINTS, CORNERS, hidden=16).facts["held_out_accuracy"] > 0.85


def test_training_leaves_random_streams_alone_and_repeats_itself(tmp_path: Path) -> None:
    """The same rows give the same head; saved and loaded it gives the same scores, to the last bit."""
    state = torch.get_rng_state()
    with torch.inference_mode():  # as captured activations may be
        head = train_probe(POINTS.clone(), HALVES.tolist(), hidden=4)
    assert torch.equal(torch.get_rng_state(), state)
    again = train_probe(POINTS, HALVES, hidden=4)
    head.save(tmp_path / "head.safetensors")
    loaded = ProbeHead.load(tmp_path / "head.safetensors")
    assert torch.equal(head.scores(POINTS), loaded.scores(POINTS))
    assert torch.equal(head.scores(POINTS), again.scores(POINTS))
    assert (loaded.threshold, loaded.facts, loaded.width) == (0.5, head.facts, 6)


@pytest.mark.parametrize(
    ("activations", "labels", "says"),
    [
        (POINTS, HALVES + 1, "labels are 0 and 1"),
        (POINTS, HALVES * 0, "both classes"),
        (POINTS * float("nan"), HALVES, "NaN"),
    ],
)
def test_what_cannot_be_learnt_from_is_told(activations: Any, labels: Any, says: str) -> None:
    """Each mistake names what was found."""
    with pytest.raises(OptionError, match=says):
        train_probe(activations, labels)


def scored(config: dict[str, Any], output: Tensor, rows: Tokens | None, inputs: tuple[Any, ...] = ()) -> Any:
    """Return the metrics of a probe after one output of a module, without the module's name."""
    hook = probe({"head": head_for(0), **config})
    with serving(rows):
        hook(nn.Identity(), inputs, output)
    return {key.partition("/")[2]: value for key, value in hook.to_metrics().items()}


HIDDEN = torch.full((2, 3, 8), 9.0)
HIDDEN[0, :, 0], HIDDEN[1, :, 0] = torch.tensor([-2.0, 1.0, -1.0]), torch.tensor([7.0, 7.0, 2.0])
"""The logits of three tokens of request a, and of one of b with two columns of padding before it."""


@pytest.mark.parametrize("shape", [(2, 3, 8), (6, 8)])
@pytest.mark.parametrize(
    ("config", "logits"),
    [
        ({}, [-2.0, 1.0, -1.0, 2.0]),
        ({"requests": ["a"]}, [-2.0, 1.0, -1.0]),
        ({"requests": ["b*"], "phase": "prefill"}, [2.0]),
        ({"positions": "last"}, [-1.0, 2.0]),
        ({"threshold": 0.8}, [-2.0, 1.0, -1.0, 2.0]),
        ({"requests": ["nobody"]}, []),
        ({"phase": "decode"}, []),
    ],
)
def test_tokens_are_scored_by_request_and_padding_is_not(
    config: dict[str, Any], logits: list[float], shape: tuple[int, ...]
) -> None:
    """Mean and highest score, tokens and flagged tokens are those of the tokens that were asked for."""
    found = scored(config, HIDDEN.reshape(shape), PADDED)
    scores = torch.tensor(logits).double().sigmoid()
    if not logits:
        assert found == {}
        return
    flagged = int((scores > config.get("threshold", 0.5)).sum())
    expected = {"score": scores.mean(), "highest": scores.max(), "flagged": flagged, "tokens": len(logits)}
    assert found == pytest.approx({key: float(value) for key, value in expected.items()}, rel=1e-6)


def test_without_an_engine_all_tokens_are_scored(caplog: pytest.LogCaptureFixture) -> None:
    """Or the last of each sequence; a probe for some requests does nothing, and says so once."""
    assert scored({}, HIDDEN, None)["tokens"] == 6
    assert scored({"positions": "last"}, HIDDEN, None)["tokens"] == 2
    with caplog.at_level(logging.WARNING, "hookline.factories"):
        assert scored({"requests": ["a"]}, HIDDEN, None) == {}
    assert ["probe is for some requests" in message for message in caplog.messages] == [True]


def test_flags_go_to_the_request_they_belong_to() -> None:
    """One flag for each probe and module: how many tokens, the first position, the highest score."""
    layer, table = nn.Identity(), PADDED.noted()
    hook = probe({"head": head_for(0), "action": "flag", "name": "seven"})
    silent = probe({"head": head_for(0)})
    with serving(table):
        hook(layer, (), HIDDEN)
        silent(layer, (), HIDDEN)
    found = read_flags(table)
    assert {request: [(f.probe, f.tokens, f.position, f.stops) for f in flags] for request, flags in found.items()} == {
        "a": [("seven", 1, 1, False)],
        "b": [("seven", 1, 0, False)],
    }
    assert found["b"][0].score == pytest.approx(float(torch.tensor(2.0).sigmoid()))
    assert read_flags(table) == {}


def test_a_flat_batch_of_a_serving_system_is_scored_by_request() -> None:
    """As SGLang passes one among the inputs: pairs of tensors are added up, names choose among requests."""
    ids = torch.arange(5)
    batch = Batch(ids, ids, torch.tensor([3, 2]), torch.tensor([4, 9]), torch.tensor([3, 2]), ["a", "b"])
    torch.manual_seed(0)
    model, table = Decoder(), tokens_of_batch(batch).noted()
    hook = probe({"head": head_for(0), "add_residual": True, "requests": ["b"], "action": "stop"})
    with torch.no_grad(), hl.capture(model, "layers.1") as cache, hl.attach(model, "layers.1", hook), serving(table):
        model(batch)
    hidden, residual = cache["layers.1"].output
    logits = (hidden + residual)[3:, 0]
    assert hook.to_metrics()["layers.1/score"] == pytest.approx(float(logits.sigmoid().mean()), rel=1e-5)
    flagged = [position for position, logit in zip((3, 4), logits.tolist(), strict=True) if logit > 0]
    found = read_flags(table)
    assert [flag.position for flag in found.get("b", [])] == flagged[:1]
    assert set(found) <= {"b"}


def test_training_under_a_probe_ends_bit_for_bit_the_same() -> None:
    """Weights, optimizer and random streams."""
    hook = probe({"head": head_for(1, width=3), "action": "stop"})

    def step(model: nn.Sequential, x: Tensor, target: Tensor) -> None:
        with hl.attach(model, "4", hook):
            F.cross_entropy(model(x), target).backward()

    assert differences(train(plain_step), train(step)) == []
    assert hook.to_metrics()["4/tokens"] > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_token_without_a_score_is_flagged(value: float) -> None:
    """NaN or infinity in an activation does not let a token pass; its neighbours keep their scores."""
    hidden, table = HIDDEN.clone(), PADDED.noted()
    hidden[1, 2, 3] = value
    hidden[..., 0] = -2.0
    hook = probe({"head": head_for(0), "action": "stop"})
    with serving(table):
        hook(nn.Identity(), (), hidden)
    assert {request: [flag.score for flag in flags] for request, flags in read_flags(table).items()} == {"b": [1.0]}
    assert hook.to_metrics()["Identity.0/flagged"] == 1
    with pytest.raises(OptionError, match="have NaN"):
        ProbeHead([(torch.full((1, 8), value), torch.zeros(1))])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "got neither"),
        ({"file": "a", "head": head_for(0)}, "got both"),
        ({"file": "nowhere.safetensors"}, "holds no probe"),
        ({"head": [1.0]}, "head is what train_probe"),
        ({"head": head_for(0), "threshold": 1.5}, "between 0 and 1"),
        ({"head": head_for(0), "action": "warn"}, "action is one of"),
        ({"head": head_for(0), "requests": "a"}, "requests is a list"),
    ],
)
def test_options_of_a_probe_are_checked_when_it_is_made(config: dict[str, Any], says: str) -> None:
    """Each mistake is an OptionError that says what to write."""
    with pytest.raises(OptionError, match=says):
        probe(config)
    with pytest.raises(OptionError, match="lead from features to one number"):
        ProbeHead([(torch.ones(2, 3), torch.ones(2))])


def test_groups_are_held_out_whole() -> None:
    """A label that belongs to the token is learned by heart; on tokens that were held out, nothing of it is left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(40, (64, 12), generator=generator)
    hidden = torch.randn(40, 64, generator=generator)[ids]
    by_heart = torch.randperm(40, generator=generator)[ids] < 20
    assert train_probe(hidden, by_heart).facts["held_out_accuracy"] == 1.0
    head = train_probe(hidden, by_heart, groups=ids)
    assert head.facts["held_out_accuracy"] < 0.8
    assert head.facts["train_accuracy"] == 1.0
    assert "64 features" in repr(head)
    assert "held_out_accuracy" in repr(head)
