"""``counterfactual``: measure how much of an epoch's gradient is due to the order of its data.

The epoch is trained again from its beginning, a few times, with the data shuffled; what the run's own gradient shares
with those is content, the rest is ordering.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hookline.analyses._analysis import ReferenceIntervention, by_parameter, shuffled_epochs
from hookline.analyses._vectors import cosine, flat_vector, is_bias, norm, ratio
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import LoopPoints, MetricInfo
from hookline.when import HookPoint

COUNTERFACTUAL_POINTS: Final[LoopPoints] = {"epoch": {HookPoint.POST_EPOCH: (None, 49), HookPoint.SNAPSHOT: (50, None)}}
"""Every epoch at first, when the order matters most; from the fiftieth on, at snapshots. The step loop has no epochs
to train again."""


class CounterfactualHook(ReferenceIntervention):
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
    requires = frozenset({"loader", "loss_fn"})
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = COUNTERFACTUAL_POINTS
    needs_grads = True
    needs_pre_epoch_state = True
    scope = "trains"

    def __init__(self, k: int = 3, window_size: int = 20, per_parameter: bool = True) -> None:
        self.k = self.whole_number("k", k, 1)
        self.window_size = self.whole_number("window_size", window_size, 1)
        self.per_parameter = per_parameter
        self._windows: dict[str, list[Tensor]] = {"content": [], "ordering": []}

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric; g is the epoch's mean gradient, g_cf that of the shuffled epochs."""
        own = [
            MetricInfo("counterfactual_mean_norm", "mean gradient of shuffled epochs", "‖g_cf‖"),
            MetricInfo("content_component_norm", "what any order gives", "‖c‖, c = (g·g_cf/‖g_cf‖²)·g_cf"),
            MetricInfo("ordering_component_norm", "what this order adds", "‖o‖, o = g − c"),
            MetricInfo("ordering_fraction", "share of the order", "‖o‖²/‖g‖²",
                       "by chance 1 − c for large k, more for small (c: mean cosine of two random epochs); 1: all"),
            MetricInfo("ordering_alignment", "gradient and shuffled one", "cos(g, g_cf)",
                       "by chance √c for large k, less for small; 1: the order does nothing; below 0: turned round"),
        ]  # fmt: skip
        aims = [
            MetricInfo(f"{part}_grad_cossim_to_solution", f"{part} and the way to the reference",
                       f"cos(−{symbol}, θ_ref − θ_before)", "above 0: leads there")
            for part, symbol in (("content", "c"), ("ordering", "o"), ("cf", "g_cf"))
        ]  # fmt: skip
        energies = [
            MetricInfo(f"{part}_energy_fraction_toward_solution", f"past {part}s along the way to the reference",
                       "Σ(xᵢ·s)²/Σ‖xᵢ‖², s of length 1", "1: all of it leads to or from there")
            for part in ("content", "ordering")
        ]  # fmt: skip
        single = [MetricInfo(f"{info.name}/{{param}}", f"{info.description}, of one parameter") for info in own[1:]]
        single += [MetricInfo(f"{info.name}/{{param}}", f"{info.description}, of one parameter") for info in aims]
        return own + aims + energies + (single if self.per_parameter else [])

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Train the epoch again, and compare."""
        actual = run_ctx.accumulated_grads
        if not actual:
            return None
        model_ctx.restore_pre_epoch()
        way = self.way_to_solution(model_ctx.model)
        shuffled = _mean_of_shuffled(model_ctx, self.k, actual)
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

        metrics = cosines(names)
        if self.per_parameter:
            metrics |= by_parameter([n for n in names if not is_bias(n)], lambda name: cosines([name]))
        vectors, to = aims(names)
        return metrics | self._energies(vectors, to)

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


def _mean_of_shuffled(model_ctx: ModelDataContext, k: int, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the mean gradient of k shuffled epochs, 0 where there was none; None if there was none at all."""
    total = {name: torch.zeros_like(gradient) for name, gradient in like.items()}
    found = False
    for gradients in shuffled_epochs(model_ctx, k):
        for name in like.keys() & gradients.keys():
            found = True
            total[name] += gradients[name].to(total[name].dtype) / k
    return total if found else None
