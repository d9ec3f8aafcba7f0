"""``relu_activations``: measure how often each unit behind a ReLU is on, and which never are."""

from __future__ import annotations

from types import MappingProxyType

from hookline.analyses._tracked import TRAINING, ReLUAnalysis
from hookline.metta.feeders import ActivationFeeder
from hookline.metta.trackers import ReLUActivationState


class ReLUActivationsHook(ReLUAnalysis):
    """Measure the share of samples in which each unit is above zero, since the last report.

    Recipe: ``hookline.HookManager(["relu_activations"], sinks=[...])``.

    A unit is an entry of the last dimension; of images, a channel. Only training forwards count. ReLUs that are called
    as functions are no modules: name the layer before them by ``targets``, its outputs have the same signs.

    Args:
        targets: Which layers, by name or glob, with commas; if left out, every ``nn.ReLU``, ``nn.ReLU6`` and
            ``nn.LeakyReLU``.
        exclude: Layers to leave out.
        per_unit: Report a metric for each unit, which may be many; if False, those over all units alone.
    """

    name = "relu_activations"
    description = "how often units behind ReLUs are on, and which never are"
    reduce = MappingProxyType({"dead_*": "min"})  # a unit that is dead is so on every rank
    roots = ("activations/relu/",)
    event = "active"
    no_event = "dead"
    metrics = (
        ("active_fraction", "how often a unit is on, over all units", "mean of x > 0"),
        ("dead_units", "units that were never on", "count of 0", "0 is healthy"),
        ("dead_fraction", "their share of all units", "dead / units", "0 is healthy"),
        ("activations/relu/{layer}/{unit}", "how often this unit is on", "share of x > 0", "0: dead"),
    )

    def new_tracker(self) -> ReLUActivationState:
        """Return a tracker that counts activations above zero."""
        return ReLUActivationState()

    def new_feeder(self, component: str) -> ActivationFeeder:
        """Return a hook on the output of a layer."""
        return ActivationFeeder(self.tracker, component, TRAINING)
