"""``counterfactual``: measure how much of an epoch's gradient is due to the order of its data.

It trains the epoch again from its beginning, a few times, with the data shuffled; what the run's own gradient shares
with those is content, the rest is ordering. ``counterfactual_validator`` measures whether k such epochs are enough: it
trains one more, and compares every choice of k among them with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.analyses._base import ReferenceIntervention, by_parameter
from hookline.analyses._values import cosine, flat_vector, is_bias, norm, parameters_of, ratio, weight_names
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import DebugInterventionHook, LoopPoints
from hookline.when import HookPoint


class _ShuffledEpochs(ReferenceIntervention):
    """Train the last epoch again with its data in other orders.

    Every epoch at first, when the order matters most; from the fiftieth on, at snapshots. The step loop has no epochs
    to train again.
    """

    requires = frozenset({"loader", "loss_fn"})
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points: LoopPoints = MappingProxyType(
        {"epoch": {HookPoint.POST_EPOCH: (None, 49), HookPoint.SNAPSHOT: (50, None)}}
    )
    needs_grads = True
    needs_pre_epoch_state = True

    def train_again(self, model_ctx: ModelDataContext, count: int) -> Iterator[dict[str, Tensor]]:
        """Train the last epoch again ``count`` times, each in another order; yield the mean gradients of each."""
        for _ in range(count):
            model_ctx.restore_pre_epoch()
            yield model_ctx.run_training_epoch(model_ctx.get_shuffled_loader(), step=True)


class CounterfactualHook(_ShuffledEpochs):
    """Train the epoch again with shuffled data, and split the run's gradient into content and ordering.

    Recipe: ``hookline.HookManager(["counterfactual"], hook_config={"counterfactual": {"k": 5}}, sinks=[...])``.

    A firing costs ``k`` epochs, and everything is put back. With reference weights it also measures which of the two
    parts leads to them, for which it keeps ``2 · window_size`` vectors of all parameters on the CPU.

    Args:
        k: How many shuffled epochs; each has its own order.
        window_size: How many past firings count in the energy fractions.
        per_parameter: Report each parameter that is no bias as well.
    """

    name = "counterfactual"
    description = "how much of an epoch's gradient is due to the order of its data"

    # With g the epoch's mean gradient, g_cf that of the shuffled epochs.
    metrics = (
        ("counterfactual_mean_norm", "mean gradient of shuffled epochs", "‖g_cf‖"),
        ("content_component_norm", "what any order gives", "‖c‖, c = (g·g_cf/‖g_cf‖²)·g_cf"),
        ("ordering_component_norm", "what this order adds", "‖o‖, o = g − c"),
        ("ordering_fraction", "share of the order", "‖o‖²/‖g‖²",
         "by chance 1 − c for large k, more for small (c: mean cosine of two random epochs); 1: all"),
        ("ordering_alignment", "gradient and shuffled one", "cos(g, g_cf)",
         "by chance √c for large k, less for small; 1: the order does nothing; below 0: turned round"),
        *((f"{part}_grad_cossim_to_solution", f"{part} and the way to the reference",
           f"cos(−{symbol}, θ_ref − θ_before)", "above 0: leads there")
          for part, symbol in (("content", "c"), ("ordering", "o"), ("cf", "g_cf"))),
        *((f"{part}_energy_fraction_toward_solution", f"past {part}s along the way to the reference",
           "Σ(xᵢ·s)²/Σ‖xᵢ‖², s of length 1", "1: all of it leads to or from there")
          for part in ("content", "ordering")),
    )  # fmt: skip
    single = tuple(name for name, *_ in metrics[1:8])

    def __init__(self, k: int = 3, window_size: int = 20, per_parameter: bool = True) -> None:
        self.k = self.whole_number("k", k, 1)
        self.window_size = self.whole_number("window_size", window_size, 1)
        self.per_parameter = per_parameter
        self._windows: dict[str, list[Tensor]] = {"content": [], "ordering": []}

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Train the epoch again, and compare."""
        actual = run_ctx.accumulated_grads
        if not actual:
            return None
        model_ctx.restore_pre_epoch()
        way = self.way_to_solution(model_ctx.model)
        shuffled = self._mean_of_shuffled(model_ctx, actual)
        if shuffled is None:
            return None
        names = sorted(actual)
        split = _Split.of(flat_vector(actual[name] for name in names), flat_vector(shuffled[name] for name in names))
        metrics = {"counterfactual_mean_norm": norm(split.shuffled), **split.metrics()}
        if self.per_parameter:
            metrics |= by_parameter(
                [name for name in names if not is_bias(name)],
                lambda name: _Split.of(flat_vector([actual[name]]), flat_vector([shuffled[name]])).metrics(),
            )
        return metrics | self._compare(actual, shuffled, split.share, way)

    def _mean_of_shuffled(self, model_ctx: ModelDataContext, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the mean gradient of k shuffled epochs, 0 where there was none; None if there was none at all."""
        total = {name: torch.zeros_like(gradient) for name, gradient in like.items()}
        found = False
        for gradients in self.train_again(model_ctx, self.k):
            for name in like.keys() & gradients.keys():
                found = True
                total[name] += gradients[name].to(total[name].dtype) / self.k
        return total if found else None

    def _compare(
        self, actual: Mapping[str, Tensor], shuffled: Mapping[str, Tensor], share: Tensor, way: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return where content and ordering lead, as seen from before the epoch."""
        names = sorted(name for name in actual if name in way)
        if not names:
            return {}

        def aims(names: list[str]) -> tuple[dict[str, Tensor], Tensor]:
            g, cf, to = (flat_vector(tensors[name] for name in names) for tensors in (actual, shuffled, way))
            return {"content": -share * cf, "ordering": share * cf - g, "cf": -cf}, to

        def cosines(names: list[str]) -> dict[str, Tensor]:
            vectors, to = aims(names)
            return {f"{part}_grad_cossim_to_solution": cosine(vector, to) for part, vector in vectors.items()}

        metrics = cosines(names) | self._energies(*aims(names))
        if self.per_parameter:
            metrics |= by_parameter([name for name in names if not is_bias(name)], lambda name: cosines([name]))
        return metrics

    def _energies(self, vectors: Mapping[str, Tensor], to: Tensor) -> dict[str, Any]:
        """Return how much of all firings in the window lies along the way; of one alone it is the squared cosine."""
        unit = ratio(to, norm(to)).cpu()
        found: dict[str, Any] = {}
        for part, window in self._windows.items():
            if window and window[-1].shape != unit.shape:
                window.clear()  # other parameters have a reference now
            window.append(vectors[part].cpu())
            del window[: -self.window_size]
            if len(window) > 1:
                # Σσᵢ²(vᵢ·s)²/Σσᵢ² over all singular values of the stacked vectors is this, without computing them.
                along, lengths = torch.stack([row @ unit for row in window]), torch.stack([norm(row) for row in window])
                found[f"{part}_energy_fraction_toward_solution"] = ratio(along.square().sum(), lengths.square().sum())
        return found

    def reset(self) -> None:
        """Begin another run."""
        super().reset()
        self._windows = {part: [] for part in self._windows}

    def get_state_tensors(self) -> dict[str, Any]:
        """Return the window."""
        return {part: list(window) for part, window in self._windows.items()}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        """Take back what ``get_state_tensors`` gave."""
        self._windows = {part: [row.cpu() for row in tensors.get(part, ())] for part in self._windows}


class _Split(NamedTuple):
    """Split a gradient in two: along the one of shuffled epochs, and across."""

    actual: Tensor
    shuffled: Tensor
    share: Tensor
    """The content is this many times the shuffled gradient."""

    @classmethod
    def of(cls, actual: Tensor, shuffled: Tensor) -> _Split:
        return cls(actual, shuffled, ratio(torch.dot(actual, shuffled), torch.dot(shuffled, shuffled)))

    def metrics(self) -> dict[str, Tensor]:
        content = self.share * self.shuffled
        ordering = norm(self.actual - content)
        return {
            "content_component_norm": norm(content),
            "ordering_component_norm": ordering,
            "ordering_fraction": ratio(ordering, norm(self.actual)).square(),
            "ordering_alignment": cosine(self.actual, self.shuffled),
        }


class CounterfactualValidatorHook(_ShuffledEpochs, DebugInterventionHook):
    """Train k + 1 shuffled epochs, and measure how far the mean of k of them is from that of all.

    Recipe: ``hookline.HookManager(["counterfactual_validator"], sinks=[...])``; groups leave it out, as it is for
    finding out whether ``counterfactual`` is right.

    A firing costs ``k + 1`` epochs. Biases are left out.

    Args:
        k: How many shuffled epochs are to be enough.
    """

    name = "counterfactual_validator"
    description = "whether k shuffled epochs are enough for counterfactual"
    reduce = MappingProxyType({"*_max": "max", "*_min": "min", "kp1_norm_strictly_lower": "min"})
    # With c the mean gradient of all k + 1 epochs, cᵢ that of all but the i-th.
    metrics = (
        ("kp1_content_norm", "mean of all k + 1", "‖c‖"),
        ("k_content_norm_max", "longest mean of k", "max ‖cᵢ‖"),
        ("k_content_norm_min", "shortest mean of k", "min ‖cᵢ‖"),
        ("k_content_norm_mean", "mean length of a mean of k", "mean ‖cᵢ‖"),
        ("kp1_norm_strictly_lower", "shorter than any of k", "1 if ‖c‖ < min ‖cᵢ‖, else 0", "1: settles"),
        ("norm_convergence_gap", "what one more changes", "(mean ‖cᵢ‖ − ‖c‖)/‖c‖", "small: k is enough"),
        ("k_to_kp1_cossim_mean", "direction of k and of all", "mean cos(cᵢ, c)", "1: k is enough"),
        ("k_to_kp1_cossim_min", "the worst of these", "min cos(cᵢ, c)", "1: k is enough"),
        ("kp1_cossim_to_solution", "all and the way to the reference", "cos(−c, θ_ref − θ_before)"),
        ("k_cossim_to_solution_mean", "any k and that way", "mean cos(−cᵢ, θ_ref − θ_before)"),
        ("k_cossim_to_solution_std", "how far these are apart", "std over i, by n", "small: k is enough"),
        ("k_cossim_to_solution_spread", "the largest less the smallest", "max − min over i", "small: k is enough"),
    )

    def __init__(self, k: int = 3) -> None:
        self.k = self.whole_number("k", k, 1)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Train k + 1 epochs, and compare each mean of k with the mean of all."""
        names = weight_names(run_ctx.accumulated_grads or {})
        if not names:
            return None
        model_ctx.restore_pre_epoch()
        way = self.way_to_solution(model_ctx.model)
        shapes = parameters_of(model_ctx.model)
        # On the CPU: there are k + 1 of them, each as large as the model.
        rows = [_row(gradients, names, shapes) for gradients in self.train_again(model_ctx, self.k + 1)]
        means = [torch.stack(chosen).mean(0) for chosen in combinations(rows, self.k)]
        everything = torch.stack(rows).mean(0)
        return _agreement(means, everything) | _aim(means, everything, _flat_way(way, names, shapes))


def _row(gradients: Mapping[str, Tensor], names: list[str], shapes: Mapping[str, Tensor]) -> Tensor:
    return flat_vector(gradients.get(name, torch.zeros_like(shapes[name])) for name in names).cpu()


def _flat_way(
    way: Mapping[str, Tensor], names: list[str], shapes: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the way in one vector, and where it has a reference; None if nowhere."""
    known = [name in way for name in names]
    if not any(known):
        return None
    sizes = torch.tensor([shapes[name].numel() for name in names])
    return _row(way, names, shapes), torch.tensor(known).repeat_interleave(sizes)


def _agreement(means: list[Tensor], everything: Tensor) -> dict[str, Any]:
    lengths, length = torch.stack([norm(mean) for mean in means]), norm(everything)
    angles = torch.stack([cosine(mean, everything) for mean in means])
    return {
        "kp1_content_norm": length,
        "k_content_norm_max": lengths.max(),
        "k_content_norm_min": lengths.min(),
        "k_content_norm_mean": lengths.mean(),
        "kp1_norm_strictly_lower": (length < lengths.min()).to(length.dtype),
        "norm_convergence_gap": ratio(lengths.mean() - length, length),
        "k_to_kp1_cossim_mean": angles.mean(),
        "k_to_kp1_cossim_min": angles.min(),
    }


def _aim(means: list[Tensor], everything: Tensor, way: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    if way is None:
        return {}
    to, known = way
    angles = torch.stack([cosine(-mean[known], to[known]) for mean in means])
    return {
        "kp1_cossim_to_solution": cosine(-everything[known], to[known]),
        "k_cossim_to_solution_mean": angles.mean(),
        "k_cossim_to_solution_std": angles.std(correction=0),
        "k_cossim_to_solution_spread": angles.max() - angles.min(),
    }
