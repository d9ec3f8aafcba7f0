"""Analyses of weights: spectra, attention, frequencies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_analyses import P, context, cos, made, random_grads, singular_values, token_experiment
from torch import nn

import hookline as hl
from hookline.errors import OptionError

# -- singular values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (1, 4), (80, 200), (6, 3, 2, 2)])
def test_all_singular_values_up_to_512(shape):
    """Against numpy in float64; a convolution is a matrix of outputs by the rest."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = np.linalg.svd(weight.double().numpy().reshape(shape[0], -1), compute_uv=False)
    assert singular_values(weight) == pytest.approx(expected, rel=1e-5)


def test_weight_tracking_of_every_matrix_and_over_all(model):
    """Sizes, spectra and alignment; biases and vectors are left out."""
    grads = random_grads(model, 1)
    found = made("weight_tracking").compute(context(model, accumulated_grads=grads))
    names = [name for name, p in model.named_parameters() if p.dim() >= 2]
    arrays = {name: dict(model.named_parameters())[name].detach().double().numpy() for name in names}
    values = {name: np.linalg.svd(array, compute_uv=False) for name, array in arrays.items()}
    ranks = {name: value.sum() ** 2 / (value**2).sum() for name, value in values.items()}
    aligned = {name: cos(grads[name].double().numpy(), arrays[name]) for name in names}
    for name in names:
        assert float(found[f"weight_norm/{name}"]) == pytest.approx(np.linalg.norm(arrays[name]), rel=1e-5)
        assert found[f"top_sv/{name}"] == pytest.approx(values[name][0], rel=1e-5)
        assert found[f"effective_rank/{name}"] == pytest.approx(ranks[name], rel=1e-5)
        assert float(found[f"grad_weight_align/{name}"]) == pytest.approx(aligned[name], rel=1e-3, abs=1e-6)
    norms = [np.linalg.norm(array) for array in arrays.values()]
    assert float(found["total_weight_norm"]) == pytest.approx(np.sqrt(np.square(norms).sum()), rel=1e-5)
    assert found["mean_weight_norm"] == pytest.approx(np.mean(norms), rel=1e-5)
    assert found["mean_top_sv"] == pytest.approx(np.mean([value[0] for value in values.values()]), rel=1e-5)
    assert found["max_top_sv"] == pytest.approx(max(value[0] for value in values.values()), rel=1e-5)
    assert found["mean_effective_rank"] == pytest.approx(np.mean(list(ranks.values())), rel=1e-5)
    assert found["mean_grad_weight_align"] == pytest.approx(np.mean(list(aligned.values())), rel=1e-3, abs=1e-6)
    assert not any("bias" in name or "norm.weight" in name for name in found)


# -- attention -----------------------------------------------------------------------------------------------


def test_attention_spectra_are_of_query_key_and_value(model):
    """Thirds of the joint matrix, each for itself."""
    found = made("attention").compute(context(model))
    thirds = np.split(model.attention.in_proj_weight.detach().double().numpy(), 3)
    values = [np.linalg.svd(third, compute_uv=False) for third in thirds]
    assert found["sv_concentration"] == pytest.approx(np.mean([v[0] / v.sum() for v in values]), rel=1e-5)
    expected = np.mean([v.sum() ** 2 / (v**2).sum() for v in values])
    assert found["effective_rank"] == pytest.approx(expected, rel=1e-5)
    expected = np.mean([(v[:5] ** 2).sum() / (v**2).sum() for v in values])
    assert found["top5_explained_var"] == pytest.approx(expected, rel=1e-5)


def masked_calls():
    """Ways to call an attention: arguments of the module, of the call, and the shape of what goes in."""
    torch.manual_seed(1)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return {
        "plain": ({"batch_first": True}, {}, (3, 5, 8)),
        "time first": ({}, {}, (5, 3, 8)),
        "no bias, causal": ({"batch_first": True, "bias": False}, {"attn_mask": causal}, (3, 5, 8)),
        "causal bool": ({"batch_first": True}, {"attn_mask": causal.isinf()}, (3, 5, 8)),
        "padding": ({"batch_first": True}, {"key_padding_mask": padding}, (3, 5, 8)),
        "by head": ({"batch_first": True}, {"attn_mask": torch.randn(6, 5, 5)}, (3, 5, 8)),
        "other keys": ({"batch_first": True, "kdim": 8, "vdim": 6}, {}, (3, 5, 8)),
    }


@pytest.mark.parametrize("label", masked_calls())
def test_attention_patterns_are_those_that_torch_uses(label):
    """Against the weights that the module itself returns."""
    options, given, shape = masked_calls()[label]
    model = nn.Sequential(nn.MultiheadAttention(8, 2, **options))
    if model[0].in_proj_bias is not None:
        nn.init.normal_(model[0].in_proj_bias)
    x = torch.randn(shape)
    inputs = (x, x, x[..., :6]) if "vdim" in options else (x, x, x)
    hook = made("attention")
    hook.start(model)
    _, weights = model[0](*inputs, average_attn_weights=False, **given)
    found = hook.compute(context(model))
    hook.finish()
    a = weights.detach().double().numpy()  # (B, H, T, T)
    entropy = -(a * np.log(np.where(a > 0, a, 1))).sum(-1).mean() / np.log(5)
    assert float(found["attn_entropy/0"]) == pytest.approx(entropy, rel=1e-4)
    assert float(found["attn_variance/0"]) == pytest.approx(a.var(0, ddof=1).mean(), rel=1e-4)
    assert float(found["attn_entropy"]) == float(found["attn_entropy/0"])


def test_attention_sees_training_and_nothing_else_and_leaves_no_hook():
    """Not the evaluation; after the run the model is as it was."""
    experiment, sink = token_experiment(), hl.sinks.MemorySink()
    hl.epoch_loop(experiment, epochs=2, manager=hl.HookManager(hooks=[made("attention")], sinks=[sink]))
    assert 0 < sink.latest["attention/attn_entropy/0"] <= 1
    assert not experiment.model.attention._forward_pre_hooks
    hook = made("attention")
    hook.start(experiment.model)
    from hookline.phases import in_phase

    with in_phase("eval"):
        experiment.model(torch.zeros(3, 2, dtype=torch.long))
    assert not any("attn_entropy" in name for name in hook.compute(context(experiment.model)))
    hook.finish()


# -- fourier -------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """An embedding of p tokens whose columns are given."""

    def __init__(self, columns: np.ndarray) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*columns.shape)
        self.embedding.weight.data = torch.tensor(columns, dtype=torch.float32)


def waves(p: int, *frequencies: int) -> np.ndarray:
    """A cosine and a sine of every frequency."""
    angle = 2 * np.pi * np.arange(p)[:, None] * np.array(frequencies)[None] / p
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


def test_fourier_counts_what_came_and_when():
    """A frequency that came stays known, with the power that it has by now."""
    hook = made("fourier")
    first = hook.compute(context(Table(waves(61, 5))))
    assert (first["peak_frequency"], first["n_significant_freqs"], first["newly_acquired_freqs"]) == (5, 2, [5])
    second = hook.compute(context(Table(waves(61, 5, 7, 14))))
    assert second["newly_acquired_freqs"] == [7, 14]
    assert second["n_tracked_freqs"] == 3
    third = hook.compute(context(Table(waves(61, 7))))
    assert "newly_acquired_freqs" not in third
    assert list(third["freq_powers"]) == [5, 7, 14]
    assert third["freq_powers"][5] == pytest.approx(0, abs=1e-6)
    assert second["stride_harmonic_power"] == pytest.approx(3 / 6, abs=1e-3)  # 7, 14, and the image of 5
    assert second["low_freq_power"] == pytest.approx(2 / 6, abs=1e-3)  # 5 and 7 are below 10


def test_fourier_against_numpy_on_random_weights(model):
    """Every figure of embedding, decoder and neurons."""
    found = made("fourier", significance_multiplier=1.2).compute(context(model))

    def spectrum(rows):
        power = (np.abs(np.fft.fft(rows, axis=0)) ** 2).mean(1)
        return power / power.sum()

    table = model.embedding.weight.detach().double().numpy()
    power, decoder = spectrum(table), spectrum(model.decoder.weight.detach().double().numpy())
    assert found["low_freq_power"] == pytest.approx(power[:10].sum(), rel=1e-5)
    assert found["spectral_entropy"] == pytest.approx(-(power * np.log(power)).sum() / np.log(P), rel=1e-5)
    assert found["peak_frequency"] == 1 + power[1 : P // 2 + 1].argmax()  # P is odd
    assert found["n_significant_freqs"] == (power > 1.2 / P).sum()
    assert found["stride_harmonic_power"] == pytest.approx(power[[3, 6, 9]].sum(), rel=1e-5)
    entropy = -(decoder * np.log(decoder)).sum() / np.log(P)
    assert found["decoder_spectral_entropy"] == pytest.approx(entropy, rel=1e-5)
    assert found["decoder_peak_frequency"] == 1 + decoder[1 : P // 2 + 1].argmax()
    assert found["decoder_n_significant_freqs"] == (decoder > 1.2 / P).sum()
    responses = model.hidden.weight.detach().double().numpy() @ table.T
    tuned = np.abs(np.fft.fft(responses, axis=1)[:, 1 : P // 2 + 1]) ** 2
    tuned /= tuned.sum(1, keepdims=True)
    assert float(found["neuron_fourier_top1"]) == pytest.approx(tuned.max(1).mean(), rel=1e-4)
    entropy = (-(tuned * np.log(tuned)).sum(1) / np.log(P // 2)).mean()
    assert float(found["neuron_fourier_entropy"]) == pytest.approx(entropy, rel=1e-4)


def test_fourier_leaves_signs_out_where_it_is_told_how_many_numbers_there_are():
    """A table with a row for "=": by num_tokens, or by p of the configuration; else all rows count."""

    class Config:
        p = 97

    table = Table(np.concatenate([waves(97, 13), np.full((1, 2), 50.0)]))
    assert made("fourier", num_tokens=97).compute(context(table))["peak_power"] == pytest.approx(0.5, abs=1e-4)
    assert made("fourier").compute(context(table, config=Config()))["peak_power"] == pytest.approx(0.5, abs=1e-4)
    assert made("fourier").compute(context(table))["peak_power"] < 0.1
    with pytest.raises(OptionError, match="significance_multiplier="):
        made("fourier", significance_multiplier=0)
