"""``fourier``: measure which frequencies over the tokens a model has learnt to compute with.

A model that learns arithmetic modulo p ends with an embedding whose rows are waves over the tokens; this tells which,
and when each appeared. It reads weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.analyses._analysis import Analysis
from hookline.analyses._firing_values import values_of
from hookline.analyses._model_parts import Modules, decoder_of, find_embedding, hidden_layers_of
from hookline.analyses._vectors import dense_float
from hookline.errors import OptionError
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import MetricInfo


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
        if not significance_multiplier > 0:
            raise OptionError(f"significance_multiplier= of hook 'fourier' is over 0, got {significance_multiplier!r}.")
        self.significance_multiplier = significance_multiplier
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
            (
                "neuron_fourier_top1",
                tuned,
                "mean max P, P of W·Eᵀ over 1..p//2",
                "1: every neuron is tuned to one frequency",
            ),
            ("neuron_fourier_entropy", "the same as entropy", "mean −Σ P ln P / ln(p//2)", sharp),
        ]
        return [MetricInfo(*row) for row in rows]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return metrics of the spectra as they are now."""
        found = find_embedding(self, ctx, self.embedding)
        if found is None:
            return None
        modules = values_of(ctx).modules
        table = found[1]
        p = self._number_of_tokens(table.shape[0], ctx.config)
        if p < 4:  # no frequency lies between 0 and the highest
            return None
        waves = torch.fft.rfft(dense_float(table)[:p], dim=0)  # (frequencies, width)
        metrics = self._of_embedding(_shares(waves, p), p)
        decoder = decoder_of(modules, table, p)
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
    for weight in hidden_layers_of(modules, table, decoder):
        wider = dense_float(weight).to(waves.device)
        power = (wider @ cosines).square() + (wider @ sines).square()  # (neurons, frequencies)
        total = power.sum(dim=1, keepdim=True)
        power = torch.where(total != 0, power / total, 0.0)
        tops.append(power.amax(dim=1).mean())
        entropies.append(torch.special.entr(power).sum(dim=1).mean() / math.log(p // 2))
    if not tops:
        return {}
    return {"neuron_fourier_top1": torch.stack(tops).mean(), "neuron_fourier_entropy": torch.stack(entropies).mean()}
