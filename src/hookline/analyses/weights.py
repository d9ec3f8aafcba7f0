"""Measure the weights: how far they move, what they become, and what becomes of attention and of the embedding.

``parameter_delta``, ``path_length`` and ``weight_tracking`` look at all of them. ``attention`` measures the spectra of
query, key and value matrices, and how attention is spread over positions: hooks on every `nn.MultiheadAttention` keep
the inputs of the last training forward, and a report computes the pattern from them, so the model is not run again.
``fourier``, ``token_gradient`` and ``phases`` look at the embedding of the tokens: a model that learns arithmetic
modulo p ends with one whose rows are waves over the tokens. Types of modules decide what is embedding, decoder and
hidden layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.analyses._base import Analysis, StepAnalysis
from hookline.analyses._values import (
    FiringValues,
    cosines_in_float64,
    dense_float,
    effective_rank,
    flat_vector_or_none,
    is_bias,
    norm,
    ratio,
    values_of,
    widest_float,
)
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import MetricInfo
from hookline.observe.host_values import fetch
from hookline.phases import During
from hookline.sites.attach import attach
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import Site
from hookline.sites.wrappers import clean_modules
from hookline.when import HookPoint


class ParameterDeltaHook(Analysis):
    """Measure the length of the change of all parameters, biases included; nothing the first time.

    Recipe: ``hookline.HookManager(["parameter_delta"], sinks=[...])``. Keeps one copy of the parameters.
    """

    name = "parameter_delta"
    description = "how far the parameters have moved since the last epoch"
    metrics = (
        ("relative_delta", "the move as a share of where they were", "‖θ − θ_prev‖ / ‖θ_prev‖; 0 if θ_prev is 0",
         "falls as training settles", "relative move"),
        ("absolute_delta", "length of the move", "‖θ − θ_prev‖", "", "move"),
        ("param_norm", "length of the parameters", "‖θ‖", "grows without weight decay", "‖θ‖"),
    )  # fmt: skip

    kept = ("previous",)
    previous: Tensor | None = None

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare with the parameters of the last report, and keep these for the next."""
        now = values_of(ctx).flat_parameters
        before, self.previous = self.previous, now
        if now is None or before is None or before.shape != now.shape:
            return None
        before = before.to(now.device)
        move = norm(now - before)
        return {"relative_delta": ratio(move, norm(before)), "absolute_delta": move, "param_norm": norm(now)}


class PathLengthHook(StepAnalysis):
    """Add up the steps of the parameters, biases included, and compare the sum with the distance covered.

    Recipe: ``hookline.HookManager(["path_length"], sinks=[...])``.

    The way begins where the loop starts the hook; in a loop of your own that does not, at the first step it sees.
    Keeps two copies of the parameters.
    """

    name = "path_length"
    description = "length of the way of the parameters, and how straight it is"
    kept = ("beginning", "previous", "length")
    beginning: Tensor | None = None
    previous: Tensor | None = None
    length: Tensor | None = None
    metrics = (
        ("path_length", "sum of all steps so far", "Σ ‖θₜ₊₁ − θₜ‖", "never falls", "way"),
        ("net_displacement", "distance from the beginning", "‖θₜ − θ₀‖", "", "distance"),
        ("path_efficiency", "distance over way", "‖θₜ − θ₀‖ / Σ ‖θₜ₊₁ − θₜ‖; 1 before the first move",
         "1: straight; near 0: going round in circles", "straightness"),
    )  # fmt: skip

    def start(self, model: nn.Module) -> None:
        """Begin the way here, unless it goes on from a checkpoint."""
        if self.beginning is None:
            self._begin(FiringValues(model).flat_parameters)

    def _begin(self, flat: Tensor | None) -> None:
        if flat is not None:
            self.beginning = self.previous = flat
            self.length = flat.new_zeros((), dtype=widest_float(flat.device))

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Add a step; report at the other points."""
        flat = values_of(ctx).flat_parameters
        if flat is None:
            return None
        if self.previous is None or self.length is None or self.previous.shape != flat.shape:
            self._begin(flat)
        else:
            self.length = self.length + norm(flat - self.previous)
            self.previous = flat
        if ctx.hook_point is HookPoint.POST_STEP or self.beginning is None or self.length is None:
            return None
        distance = norm(flat - self.beginning)
        # A straight way may come out longer than it is by rounding.
        efficiency = torch.where(self.length > 0, (distance / self.length).clamp(max=1.0), 1.0)
        return {"path_length": self.length, "net_displacement": distance, "path_efficiency": efficiency}


_ALIGN: Final = "above 0: descent shrinks the weights; below 0: it grows them; near 0 it turns them"


class WeightTrackingHook(Analysis):
    """Measure every parameter of two dimensions or more that is no bias, and the means over all of them.

    Recipe: ``hookline.HookManager(["weight_tracking"], sinks=[...])``.

    All singular values are computed up to 512 × 512 (on the smaller side); above, the 20 largest, and the effective
    rank is that of these alone. A convolution counts as outputs by inputs and positions.
    """

    name = "weight_tracking"
    description = "size, spectrum and alignment with the gradient of every weight matrix"
    reduce = MappingProxyType({"max_top_sv": "max"})
    needs_grads = True

    metrics = (
        ("weight_norm/{param}", "length of a weight", "‖W‖"),
        ("top_sv/{param}", "largest singular value", "σ₁", "how much it can stretch an input"),
        ("effective_rank/{param}", "directions used about equally", "(Σσ)²/Σσ²", "low: a few directions matter"),
        ("grad_weight_align/{param}", "cosine of gradient and weight", "cos(g, W)", _ALIGN),
        ("total_weight_norm", "length of all weights together", "√Σ‖W‖²"),
        ("mean_weight_norm", "mean over weights", "mean ‖W‖"),
        ("mean_top_sv", "mean over weights", "mean σ₁"),
        ("max_top_sv", "largest over weights", "max σ₁"),
        ("mean_effective_rank", "mean over weights", "mean (Σσ)²/Σσ²"),
        ("mean_grad_weight_align", "mean over weights", "mean cos(g, W)", _ALIGN),
    )

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return the metrics of every matrix, then those over all."""
        values = values_of(ctx)
        weights = {name: p for name, p in values.parameters.items() if p.dim() >= 2 and not is_bias(name)}
        if not weights:
            return None
        sigmas = values.singular_values(weights)
        columns = {
            "weight_norm": _lengths(weights),
            "top_sv": {name: float(found[0]) for name, found in sigmas.items() if found.size},
            "effective_rank": {name: effective_rank(found) for name, found in sigmas.items() if found.any()},
            "grad_weight_align": _alignments(weights, values.mean_gradients),
        }
        metrics = {f"{column}/{name}": value for column, found in columns.items() for name, value in found.items()}
        return metrics | _over_all(columns)


def _lengths(weights: Mapping[str, Tensor]) -> dict[str, float]:
    lengths = fetch(norm(dense_float(weight)) for weight in weights.values())
    return {name: length for name, (length,) in zip(weights, lengths, strict=True)}


def _alignments(weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, float]:
    pairs = {}
    for name, weight in weights.items():
        grad, weight = gradients.get(name), dense_float(weight)
        if grad is not None and grad.shape == weight.shape:
            pairs[name] = grad.flatten(), weight.flatten()
    return dict(zip(pairs, cosines_in_float64(pairs.values()).tolist(), strict=True)) if pairs else {}


def _over_all(columns: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    found = {"total_weight_norm": sum(norm * norm for norm in columns["weight_norm"].values()) ** 0.5}
    if columns["top_sv"]:
        found["max_top_sv"] = max(columns["top_sv"].values())
    for column, values in columns.items():
        if values:
            found[f"mean_{column}"] = sum(values.values()) / len(values)
    return found


# -- the embedding ----------------------------------------------------------------------------------------------------


Modules: TypeAlias = Sequence[tuple[str, nn.Module]]
_ATTENTION: Final = ("attn", "attention", "qkv")


def _embedding_of(modules: Modules) -> tuple[str, nn.Parameter] | None:
    """Return the name and table of token embeddings: the first `nn.Embedding` that is not of positions.

    Without one: the first matrix with "embed" in its name that is not of positions.
    """
    tables: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for path, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is None or _is_lazy(parameter) or parameter.dim() != 2:
                continue
            full = f"{path}.{key}" if path else key
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                tables.append((full, parameter))
            elif "embed" in full.lower() and "pos" not in full.lower() and "unembed" not in full.lower():
                others.append((full, parameter))
    tables.sort(key=lambda found: "pos" in found[0].lower())  # stable: those of positions go last
    return next(iter([*tables, *others]), None)


def _find_embedding(hook: Analysis, ctx: RunDataContext) -> tuple[str, nn.Parameter] | None:
    """Return the embedding of the model; turn ``hook`` off if there is none."""
    if hook.off or ctx.model is None:
        return None
    found = _embedding_of(values_of(ctx).modules)
    if found is None:
        hook.turn_off("looked for an nn.Embedding, or a matrix with 'embed' in its name, and found none")
    return found


def _decoder_of(modules: Modules, embedding: nn.Parameter, num_tokens: int) -> tuple[str, Tensor] | None:
    """Return the last linear layer with an output for every token; None if it is the embedding itself."""
    found = None
    for path, linear in modules:
        weight = matrix_of(linear)
        if weight is not None and weight.shape[0] in (num_tokens, embedding.shape[0]) and weight is not embedding:
            found = f"{path}.weight", weight
    return found


def _hidden_layers_of(modules: Modules, embedding: nn.Parameter, decoder: Tensor | None) -> Iterator[Tensor]:
    """Yield the first layers of MLPs: linear, from the width of the embedding to something wider, and no attention.

    A decoder that is tied to the embedding is left out.
    """
    width = embedding.shape[1]
    for path, linear in modules:
        weight = matrix_of(linear)
        if weight is None or weight is decoder or weight is embedding:
            continue
        if weight.shape[1] == width < weight.shape[0] and not any(part in path.lower() for part in _ATTENTION):
            yield weight


def matrix_of(module: nn.Module | None) -> Tensor | None:
    """Return the weight of a linear layer, (outputs, inputs); None of any other module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or _is_lazy(weight):
        return None
    if isinstance(module, nn.Linear):
        return weight
    # The linear layer of Hugging Face's GPT-2, by its name: its weight is transposed.
    return weight.T if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def _is_lazy(parameter: Tensor) -> bool:
    """Return whether its shape is not known before the first forward."""
    return isinstance(parameter, nn.parameter.UninitializedParameter)


class FourierHook(Analysis):
    """Measure the power spectrum of embedding, decoder and hidden neurons over the tokens.

    Recipe: ``hookline.HookManager(["fourier"], hook_config={"fourier": {"num_tokens": 97}}, sinks=[...])``.

    Args:
        significance_multiplier: A frequency is significant if its share of the power is over this many times 1/p.
        num_tokens: How many rows of the table, p, are tokens of numbers. If left out: the field ``p`` of the
            experiment's configuration if the table has that many rows, or up to 8 more (for signs such as "="), else
            all rows.
    """

    name = "fourier"
    description = "frequencies over the tokens in embedding, decoder and hidden neurons"
    kept = ("tracked",)
    tracked: Sequence[int] = ()
    """Every frequency that was significant at some report, sorted."""

    def __init__(self, significance_multiplier: float = 10.0, num_tokens: int | None = None) -> None:
        self.significance_multiplier = self.number("significance_multiplier", significance_multiplier)
        self.num_tokens = num_tokens

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric; P is the share of power by frequency, summing to 1 over all p of them."""
        sharp = "0: one frequency; 1: all alike"
        over = f"P > {self.significance_multiplier:g}/p"
        tuned = "how much of a hidden neuron's response to tokens is one frequency, on average"
        seen = "share of every frequency that ever counted, once there is one"
        rows = [
            ("low_freq_power", "share of the lowest frequencies", "Σ P[k], k < max(p//20, 10)"),
            ("spectral_entropy", "how spread the power is", "−Σ P ln P / ln p", sharp),
            ("peak_frequency", "the strongest frequency", "argmax P[k], 1 ≤ k < p/2"),
            ("peak_power", "its share", "P[peak]", "near 1/2: a pure wave (the other half is at p − k)"),
            ("n_significant_freqs", "frequencies far over the even share, mirror images too", over),
            ("stride_harmonic_power", "share of multiples of the stride ⌊√p⌋", "Σ P[k⌊√p⌋], k ≤ 9"),
            ("freq_powers", seen, f"P[k] where once {over}", "", "", "frequency"),
            ("n_tracked_freqs", "how many there have been, up to p//2", over, "a staircase"),
            ("newly_acquired_freqs", "those that came since the last report, if any", over),
            ("decoder_spectral_entropy", "the same of the decoder's rows", "−Σ P ln P / ln p", sharp),
            ("decoder_peak_frequency", "strongest frequency of the decoder", "argmax P[k]"),
            ("decoder_n_significant_freqs", "frequencies of the decoder over the threshold", over),
            ("neuron_fourier_top1", tuned, "mean max P, P of W·Eᵀ over 1..p//2",
             "1: every neuron is tuned to one frequency"),
            ("neuron_fourier_entropy", "the same as entropy", "mean −Σ P ln P / ln(p//2)", sharp),
        ]  # fmt: skip
        return [MetricInfo(*row) for row in rows]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return metrics of the spectra as they are now."""
        found = _find_embedding(self, ctx)
        if found is None:
            return None
        modules = values_of(ctx).modules
        table = found[1]
        p = self._number_of_tokens(table.shape[0], ctx.config)
        if p < 4:  # no frequency lies between 0 and the highest
            return None
        waves = torch.fft.rfft(dense_float(table)[:p], dim=0)  # (frequencies, width)
        metrics = self._of_embedding(_shares(waves, p), p)
        decoder = _decoder_of(modules, table, p)
        if decoder is not None:
            metrics |= self._of_decoder(_shares(torch.fft.rfft(dense_float(decoder[1])[:p], dim=0), p), p)
        return metrics | _of_neurons(modules, waves, table, None if decoder is None else decoder[1], p)

    def _number_of_tokens(self, rows: int, config: Any) -> int:
        wanted = self.num_tokens if self.num_tokens is not None else getattr(config, "p", None)
        if isinstance(wanted, int) and 0 < wanted <= rows and (self.num_tokens is not None or rows - wanted <= 8):
            return wanted
        return rows

    def _of_embedding(self, power: NDArray[Any], p: int) -> dict[str, Any]:
        stride = math.isqrt(p)
        threshold = self.significance_multiplier / p
        now = [k for k in range(1, p // 2 + 1) if power[k] > threshold]
        new = sorted(set(now) - set(self.tracked))
        self.tracked = sorted({*self.tracked, *now})
        peak = _peak(power, p)
        metrics: dict[str, Any] = {
            "low_freq_power": float(power[: max(p // 20, 10)].sum()),
            "spectral_entropy": _entropy(power) / math.log(p),
            "peak_frequency": peak,
            "peak_power": float(power[peak]),
            "n_significant_freqs": int((power > threshold).sum()),
            "stride_harmonic_power": float(sum(power[k * stride] for k in range(1, 10) if k * stride < p)),
            "n_tracked_freqs": len(self.tracked),
        }
        if self.tracked:
            metrics["freq_powers"] = {k: float(power[k]) for k in self.tracked}
        return metrics | ({"newly_acquired_freqs": new} if new else {})

    def _of_decoder(self, power: NDArray[Any], p: int) -> dict[str, Any]:
        return {
            "decoder_spectral_entropy": _entropy(power) / math.log(p),
            "decoder_peak_frequency": _peak(power, p),
            "decoder_n_significant_freqs": int((power > self.significance_multiplier / p).sum()),
        }


def _shares(waves: Tensor, p: int) -> NDArray[Any]:
    """Return the share of each of p frequencies in the power of all columns; zeros for a table of zeros."""
    half = (waves.real.square() + waves.imag.square()).mean(dim=1).double().cpu().numpy()
    power: NDArray[Any] = np.concatenate((half, half[1 : (p + 1) // 2][::-1]))  # of real rows, p − k is as strong as k
    total = power.sum()
    return power / total if total != 0 else power


def _peak(power: NDArray[Any], p: int) -> int:
    """Return the strongest frequency k that has a mirror image p − k; for even p, k = p/2 has none."""
    return int(power[1 : (p + 1) // 2].argmax()) + 1


def _entropy(power: NDArray[Any]) -> float:
    there = power[power != 0]
    return float(-(there * np.log(there)).sum())


def _of_neurons(modules: Modules, waves: Tensor, table: nn.Parameter, decoder: Tensor | None, p: int) -> dict[str, Any]:
    # The spectrum of a neuron's responses to all tokens is its response to the waves in the table: no further FFT.
    cosines, sines = waves.real[1:].T, waves.imag[1:].T
    tops, entropies = [], []
    for weight in _hidden_layers_of(modules, table, decoder):
        wider = dense_float(weight).to(waves.device)
        power = (wider @ cosines).square() + (wider @ sines).square()  # (neurons, frequencies)
        total = power.sum(dim=1, keepdim=True)
        power = torch.where(total != 0, power / total, 0.0)
        tops.append(power.amax(dim=1).mean())
        entropies.append(torch.special.entr(power).sum(dim=1).mean() / math.log(p // 2))
    if not tops:
        return {}
    return {"neuron_fourier_top1": torch.stack(tops).mean(), "neuron_fourier_entropy": torch.stack(entropies).mean()}


class TokenGradientHook(Analysis):
    """Measure the inequality of the lengths of the embedding's gradient, row by row.

    Recipe: ``hookline.HookManager(["token_gradient"], sinks=[...])``. Silent while the gradient is zero.
    """

    name = "token_gradient"
    description = "how the gradient of the embedding is spread over the tokens"
    needs_grads = True
    # With r the lengths of rows; a group is every ⌊√p⌋-th token.
    metrics = (
        ("gradient_sparsity", "share of tokens with next to no gradient", "mean [r < 0.1 r̄]"),
        ("gradient_gini", "inequality over tokens", "Gini coefficient of r", "0: equal; 1: one has all"),
        ("stride_group_variance", "variance of the groups' means", "var (mean r by i mod ⌊√p⌋)"),
        ("stride_group_max_ratio", "strongest group over the mean of groups", "max / mean", "1: all alike"),
        ("tokens_for_50pct", "tokens that have half of all gradient", "min k: Σ₁ᵏ r ≥ ½ Σ r"),
        ("tokens_for_90pct", "tokens that have nine tenths of it", "min k: Σ₁ᵏ r ≥ 0.9 Σ r"),
        ("concentration_ratio", "share of tokens that have half of it", "tokens_for_50pct / p", "½: even"),
    )

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare the rows of the mean gradient."""
        found = _find_embedding(self, ctx)
        if found is None:
            return None
        grad = (ctx.accumulated_grads or {}).get(found[0])
        if grad is None:  # it was not trained
            return None
        rows: NDArray[Any] = torch.linalg.vector_norm(dense_float(grad), dim=1).double().cpu().numpy()
        if not np.isfinite(rows).all():
            return dict.fromkeys((name for name, *_ in self.metrics), math.nan)
        return _spread(rows) if rows.any() else None


def _spread(rows: NDArray[Any]) -> dict[str, Any]:
    count, total = rows.size, float(rows.sum())
    rising = np.sort(rows)
    shares = np.cumsum(rising[::-1]) / total
    stride = math.isqrt(count)
    groups = np.array([rows[group::stride].mean() for group in range(stride)])
    half, most = (min(int((shares < part).sum()) + 1, count) for part in (0.5, 0.9))
    return {
        "gradient_sparsity": float((rows < 0.1 * rows.mean()).mean()),
        "gradient_gini": float((2 * np.arange(1, count + 1) - count - 1) @ rising) / (count * total),
        "stride_group_variance": float(groups.var()),
        "stride_group_max_ratio": float(groups.max() / groups.mean()),
        "tokens_for_50pct": half,
        "tokens_for_90pct": most,
        "concentration_ratio": half / count,
    }


_BOUNDS: Final = (5.0, 20.0, 80.0, 99.0)
"""Validation accuracies, in percent, at which the next phase of learning begins."""


class PhasesHook(Analysis):
    """Measure the change of gradient and embedding from snapshot to snapshot, and a code for the accuracy reached.

    Recipe: ``hookline.HookManager(["phases"], sinks=[...])``.

    ``val_acc`` is taken for a fraction of 1, until there is one over 1: then for percent. Without an ``nn.Embedding``
    its metrics are absent.
    """

    name = "phases"
    description = "speed of change of gradient and embedding, and the phase of learning"
    reduce = MappingProxyType({"phase_code": "none"})  # a code, of which there is no mean
    hook_points = frozenset({HookPoint.SNAPSHOT})
    loop_points = {"epoch": {HookPoint.SNAPSHOT}, "step": {HookPoint.SNAPSHOT}}  # noqa: RUF012
    needs_grads = True
    kept = ("norm", "velocity", "table", "in_percent")
    in_percent = False
    norm: Tensor | None = None
    velocity: Tensor | None = None
    table: Tensor | None = None
    # All are 0 at the first snapshot, when there is nothing to compare with.
    metrics = (
        ("grad_velocity", "change of the gradient's length", "‖g‖ − ‖g_prev‖", "above 0: it grows"),
        ("grad_acceleration", "change of that change", "v − v_prev", "above 0: it grows faster"),
        ("embedding_change", "how far the embedding has moved", "‖E − E_prev‖"),
        ("embedding_change_normalized", "the same as a share", "‖E − E_prev‖ / ‖E_prev‖; 0 if that is 0"),
        ("phase_code", "0 not learning yet, 1 early, 2 rapid, 3 refining, 4 done; absent without a val_acc",
         "val_acc below 5, 20, 80, 99 %, or not"),
    )  # fmt: skip

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare with the last snapshot."""
        flat = values_of(ctx).flat_mean_gradient
        return {
            **({} if flat is None else self._of_gradient(norm(flat))),
            **self._of_embedding(ctx),
            **self._of_accuracy(ctx.val_acc),
        }

    def _of_gradient(self, norm: Tensor) -> dict[str, Any]:
        velocity = torch.zeros_like(norm) if self.norm is None else norm - self.norm.to(norm.device)
        change = torch.zeros_like(norm) if self.velocity is None else velocity - self.velocity.to(norm.device)
        self.norm, self.velocity = norm, velocity
        return {"grad_velocity": velocity, "grad_acceleration": change}

    def _of_embedding(self, ctx: RunDataContext) -> dict[str, Any]:
        found = _embedding_of(values_of(ctx).modules)
        table = None if found is None else flat_vector_or_none([found[1]])
        before, self.table = self.table, table
        if table is None:
            return {}
        if before is None or before.shape != table.shape:
            return {"embedding_change": 0.0, "embedding_change_normalized": 0.0}
        before = before.to(table.device)
        change = norm(table - before)
        share = ratio(change, norm(before))
        return {"embedding_change": change, "embedding_change_normalized": share}

    def _of_accuracy(self, accuracy: float | None) -> dict[str, Any]:
        if accuracy is None or accuracy != accuracy:
            return {}
        self.in_percent = self.in_percent or accuracy > 1
        percent = accuracy if self.in_percent else 100 * accuracy
        return {"phase_code": sum(percent >= bound for bound in _BOUNDS)}


# -- attention --------------------------------------------------------------------------------------------------------


_PEAKED: Final = "0: all on one position; 1: spread evenly"
_VARIANCE: Final = "mean of var(a) over the batch"
_TOP: Final = 5
_MOST: Final = 1 << 24
"""Probabilities that are computed at most, 64 MiB of them; of a larger batch, the first samples."""
_SEPARATE: Final = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("q", "k", "v"))
"""Names of the three projections of an attention, where they are modules of their own."""
_TOGETHER: Final = ("in_proj", "qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv")
"""Names of a module that makes all three."""


class AttentionHook(Analysis):
    """Measure the rank of attention's projections, and entropy and variance of its patterns on the last training batch.

    Recipe: ``hookline.HookManager(["attention"], sinks=[...])``.

    Projections are found in `nn.MultiheadAttention`, and in modules with ``q_proj``, ``k_proj`` and ``v_proj`` or the
    like. Patterns need the former. They are those of the weights after the step, on the inputs of the layers before
    it, without dropout of the pattern. These inputs stay in memory until the next step.
    """

    name = "attention"
    description = "rank of attention's projections, entropy and variance of its patterns"

    # With σ the singular values; means are over all query, key and value matrices.
    metrics = (
        ("sv_concentration", "weight of the strongest direction", "mean σ₁ / Σσ", "1: rank one"),
        ("effective_rank", "directions used about equally", "mean (Σσ)² / Σσ²"),
        ("top5_explained_var", "share of the strongest five", "mean Σ₁..₅σ² / Σσ²"),
        ("attn_entropy", "spread of attention over positions", "mean H(a) / ln T", _PEAKED),
        ("attn_entropy/{layer}", "the same of one layer", "mean H(a) / ln T", _PEAKED),
        ("attn_variance", "how much the pattern depends on the input", _VARIANCE, "0: the same for every input"),
        ("attn_variance/{layer}", "the same of one layer", _VARIANCE),
    )

    def __init__(self) -> None:
        self._layers: dict[nn.Module, int] = {}
        self._calls: dict[int, _Call] = {}
        self._handle: HookHandle | None = None

    def start(self, model: nn.Module) -> None:
        """Attach a hook to every attention."""
        self.finish()
        found = [module for _, module in clean_modules(model) if isinstance(module, nn.MultiheadAttention)]
        self._layers = {module: number for number, module in enumerate(found)}
        if found:
            self._during = During(frozenset({"train"}), self._calls.clear)
            self._handle = attach(
                model, found, self._remember, on="forward_pre", with_kwargs=True, observe=True, name=self.name
            )

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, site: Site) -> None:
        """Keep the inputs of an attention in a forward that counts as training."""
        if self._during.count_forward(site.training, site.gradients, site.step) and module in self._layers:
            self._calls[self._layers[module]] = _Call.of(module, args, kwargs)

    def finish(self) -> None:
        """Remove the hooks."""
        if self._handle is not None:
            self._handle.remove(quiet=True)
        self._handle = None
        self._calls.clear()

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return the spectra, and metrics of the patterns if a batch was seen."""
        if self.off or ctx.model is None:
            return None
        if self._handle is None and not self._layers:  # in a loop that does not start hooks: from now on
            self.start(ctx.model)
        metrics = {**_spectra(values_of(ctx)), **self._patterns()}
        if not metrics and not self._layers:
            self.turn_off(
                "looked for nn.MultiheadAttention, or modules with q_proj, k_proj and v_proj (or query, key and "
                "value; or qkv) in them, and found none"
            )
        return metrics

    @torch.no_grad()
    def _patterns(self) -> dict[str, Any]:
        entropies, variances = {}, {}
        for layer, call in sorted(self._calls.items()):
            pattern = _pattern(call)  # (B, H, T, S)
            if pattern is None:
                continue
            spread = torch.special.entr(pattern).sum(dim=-1).mean()
            entropies[f"attn_entropy/{layer}"] = (
                spread / math.log(pattern.shape[-1]) if pattern.shape[-1] > 1 else spread
            )
            if pattern.shape[0] > 1:
                variances[f"attn_variance/{layer}"] = pattern.var(dim=0).mean()
        self._calls.clear()
        means = {"attn_entropy": _mean(entropies.values()), "attn_variance": _mean(variances.values())}
        return {**{name: mean for name, mean in means.items() if mean is not None}, **entropies, **variances}


def _mean(values: Any) -> Tensor | None:
    found = [value.cpu() for value in values]
    return torch.stack(found).mean() if found else None


def _spectra(values: FiringValues) -> dict[str, float]:
    found = values.singular_values(dict(_projections(values.modules)))
    spectra = [sigmas for sigmas in found.values() if sigmas.any()]  # a matrix of zeros has no direction
    if not spectra:
        return {}
    squares = [np.square(sigmas) for sigmas in spectra]
    return {
        "sv_concentration": float(np.mean([sigmas[0] / sigmas.sum() for sigmas in spectra])),
        "effective_rank": float(np.mean([effective_rank(sigmas) for sigmas in spectra])),
        "top5_explained_var": float(np.mean([square[:_TOP].sum() / square.sum() for square in squares])),
    }


# -- projections -----------------------------------------------------------------------------------------------------

_Projection: TypeAlias = tuple[str, Tensor]
"""The name of a query, key or value matrix, with the third that it is if it is one; and the matrix, (out, in)."""


def _projections(modules: Modules) -> Iterator[_Projection]:
    """Yield every query, key and value matrix of a model, by the name of its parameter."""
    for path, module in modules:
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.MultiheadAttention):
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            if module.in_proj_weight is not None:
                yield from _thirds(f"{prefix}in_proj_weight", module.in_proj_weight)
            else:
                yield from ((f"{prefix}{name}", getattr(module, name)) for name in names)
        else:
            yield from _of_children(prefix, module._modules)


def _of_children(prefix: str, children: Mapping[str, nn.Module | None]) -> Iterator[_Projection]:
    for names in _SEPARATE:
        weights = [(f"{prefix}{name}.weight", w) for name in names if (w := matrix_of(children.get(name))) is not None]
        if len(weights) == len(names):
            yield from weights
            return
    for name in _TOGETHER:
        weight = matrix_of(children.get(name))
        if weight is not None and weight.shape[0] == 3 * weight.shape[1]:
            yield from _thirds(f"{prefix}{name}.weight", weight)


def _thirds(name: str, weight: Tensor) -> Iterator[_Projection]:
    for part, third in zip("qkv", weight.chunk(3), strict=True):
        yield (f"{name}[{part}]", third)


# -- patterns --------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """Hold the inputs of one attention, without their graph."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    """Where positions may not attend: true there, or added to the scores."""
    padding: Tensor | None
    """Which keys are padding: true there, or added to the scores."""

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Return the inputs from the arguments of a forward."""
        names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (given[name].detach() for name in names[:3])
        return cls(module, query, key, value, given.get("attn_mask"), given.get("key_padding_mask"))


def _pattern(call: _Call) -> Tensor | None:
    """Return the probabilities (batch, heads, queries, keys); None with added keys, or for nested tensors."""
    module, query = call.module, call.query
    if module.bias_k is not None or module.add_zero_attn or query.is_nested or query.numel() == 0:
        return None
    inputs = (call.query, call.key, call.value)
    rows = [x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1) if module.batch_first else x for x in inputs]
    samples = max(2, _MOST // (module.num_heads * len(rows[0]) * len(rows[1])))
    q, k, v = (x[:, :samples].to(module.out_proj.weight.dtype) for x in rows)  # (T, B, D)
    mask, padding = call.mask, call.padding
    if mask is not None and mask.dim() == 3:  # one for each sample and head
        mask = mask[: samples * module.num_heads]
    if padding is not None:
        padding = padding.reshape(-1, padding.shape[-1])[:samples]
    _, pattern = F.multi_head_attention_forward(
        q, k, v, module.embed_dim, module.num_heads, module.in_proj_weight, module.in_proj_bias, None, None, False,
        0.0, module.out_proj.weight, module.out_proj.bias, training=False, attn_mask=mask, key_padding_mask=padding,
        use_separate_proj_weight=module.in_proj_weight is None, q_proj_weight=module.q_proj_weight,
        k_proj_weight=module.k_proj_weight, v_proj_weight=module.v_proj_weight, average_attn_weights=False,
    )  # fmt: skip
    # A position that may attend to nothing has no pattern: torch gives NaN, here it is 0.
    return None if pattern is None else pattern.float().nan_to_num(0.0)
