"""``fourier``, ``token_gradient`` and ``phases``: measure what becomes of the embedding of the tokens.

A model that learns arithmetic modulo p ends with an embedding whose rows are waves over the tokens; ``fourier`` tells
which, and when each appeared. Types of modules decide what is embedding, decoder and hidden layer; names only where
types do not. ``attention`` asks for the matrices of linear layers here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.analyses._base import Analysis
from hookline.analyses._values import dense_float, flat_vector_or_none, norm, ratio, values_of
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import MetricInfo
from hookline.when import HookPoint

Modules: TypeAlias = Sequence[tuple[str, nn.Module]]
_ATTENTION: Final = ("attn", "attention", "qkv")


def _embedding_of(modules: Modules, name: str | None = None) -> tuple[str, nn.Parameter] | None:
    """Return the name and table of token embeddings: the one asked for, or the first `nn.Embedding`.

    Without one: the first matrix with "embed" in its name that is not of positions.
    """
    tables: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for path, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is None or _is_lazy(parameter) or parameter.dim() != 2:
                continue
            full = f"{path}.{key}" if path else key
            if name is not None and name in (full, path):
                return full, parameter
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                tables.append((full, parameter))
            elif "embed" in full.lower() and "pos" not in full.lower() and "unembed" not in full.lower():
                others.append((full, parameter))
    tables.sort(key=lambda found: "pos" in found[0].lower())  # stable: those of positions go last
    return None if name is not None else next(iter([*tables, *others]), None)


def _find_embedding(hook: Analysis, ctx: RunDataContext, name: str | None) -> tuple[str, nn.Parameter] | None:
    """Return the embedding of the model; turn ``hook`` off if there is none."""
    if hook.off or ctx.model is None:
        return None
    found = _embedding_of(values_of(ctx).modules, name)
    if found is None:
        wanted = "an nn.Embedding" if name is None else f"an embedding {name!r}"
        hook.turn_off(f"looked for {wanted} (say which table it is by embedding='name') and found none")
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
        embedding: The name of the table; if left out, the first ``nn.Embedding`` (not of positions).
        num_tokens: How many of its rows, p, are tokens of numbers. If left out: the field ``p`` of the experiment's
            configuration if the table has that many rows, or up to 8 more (for signs such as "="), else all rows.
    """

    name = "fourier"
    description = "frequencies over the tokens in embedding, decoder and hidden neurons"
    kept = ("tracked",)
    tracked: Sequence[int] = ()
    """Every frequency that was significant at some report, sorted."""

    def __init__(
        self, significance_multiplier: float = 10.0, embedding: str | None = None, num_tokens: int | None = None
    ) -> None:
        self.significance_multiplier = self.number("significance_multiplier", significance_multiplier)
        self.embedding = embedding
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
        found = _find_embedding(self, ctx, self.embedding)
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

    Args:
        embedding: The name of the table; if left out, the first ``nn.Embedding`` (not of positions).
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

    def __init__(self, embedding: str | None = None) -> None:
        self.embedding = embedding

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare the rows of the mean gradient."""
        found = _find_embedding(self, ctx, self.embedding)
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

    ``val_acc`` is taken for a fraction of 1, until there is one over 1: then for percent.

    Args:
        embedding: The name of the table; if left out, the first ``nn.Embedding``. Without one, its metrics are absent.
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

    def __init__(self, embedding: str | None = None) -> None:
        self.embedding = embedding

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
        found = _embedding_of(values_of(ctx).modules, self.embedding)
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
