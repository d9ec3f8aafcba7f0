"""`FabricCallback`: hooks in a loop that is written with Lightning Fabric.

Users hand it to ``Fabric(callbacks=[...])``. Fabric announces what was set up, and no more; steps, epochs and losses
are told as `follow` learns them, so the loop needs no ``fabric.call(...)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hookline.errors import LifecycleError, NoMatchError
from hookline.integrations.follow import Follow, follow
from hookline.integrations.host_run import HostLogSink, check_report_to
from hookline.integrations.loop_events import FirstStep, find_model, find_optimizers
from hookline.training.ranks import averaging_model

if TYPE_CHECKING:
    from hookline.lifecycle.manager import HookManager


class FabricCallback:
    """Fire hooks in a loop that uses Lightning Fabric.

    Recipe::

        callback = FabricCallback(["norms"], sinks=[hookline.sinks.CSVSink("run.csv")])
        fabric = lightning.Fabric(callbacks=[callback])
        model, optimizer = fabric.setup(model, optimizer)
        ...  # your loop
        fabric.save("checkpoint", {"model": model, "optimizer": optimizer, "hooks": callback})
        callback.close()

    Hooks begin with the first batch of a ``DataLoader`` while a model that Fabric has set up is in training mode, and
    see that model as it was before; where several optimizers train it, with the first step of one of them. Points,
    epochs and losses are those of `hookline.follow`; the ``DataLoader`` of the loop is found.

    Args:
        hooks: Hooks as objects, classes or names (``"norms"``, ``"observers"``); trackers and watches as well.
        sinks: Where metrics go.
        report_to: ``"fabric"`` hands metrics to ``fabric.log_dict`` as well, and so to its loggers.
        options: As for `hookline.follow`: ``loss_fn``, ``scheduler``, ``run_file``, ``hook_config``, ``on_error``, …
    """

    def __init__(
        self,
        hooks: Iterable[Any] | str | None = None,
        *,
        sinks: Iterable[Any] | None = None,
        report_to: str = "sinks",
        **options: Any,
    ) -> None:
        check_report_to(report_to, "fabric")
        self._given = hooks, sinks, options
        self._reports = report_to == "fabric"
        self._fabric: Any = None
        self._modules: list[Any] = []
        self._has_looked = False
        self._first: FirstStep | None = None
        self._run: Follow | None = None
        self._loaded: Mapping[str, Any] = {}

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Remember a model that Fabric has set up, and wait for the first step."""
        self._fabric = fabric
        # Inside of Fabric's own wrapper, but with what averages gradients over ranks: interventions train by it.
        inside = averaging_model(getattr(module, "_forward_module", module))
        self._modules.append(
            inside if isinstance(inside, DistributedDataParallel) else getattr(module, "module", module)
        )
        self._has_looked = False
        if self._first is None and self._run is None:
            self._first = FirstStep(self._begin, self._begin_at_batch)

    def _begin_at_batch(self, first: FirstStep) -> bool:
        is_training = torch.is_grad_enabled() and any(module.training for module in self._modules)
        if self._has_looked or not is_training:
            return False
        self._has_looked = True  # once: it takes as long as a garbage collection
        found = find_optimizers(self._modules)
        return len(found) == 1 and self._begin(found[0], first)

    def _begin(self, optimizer: Any, first: FirstStep) -> bool:
        try:
            model = find_model(optimizer, self._modules).model
        except NoMatchError:
            return False  # of something else
        hooks, sinks, options = self._given
        log = HostLogSink(lambda metrics, step: self._fabric.log_dict(metrics, step=step))
        own = [*(sinks or ()), *([log] if self._reports else [])]
        loader = options.get("loader", first.loader)
        scaler = getattr(getattr(self._fabric.strategy, "precision", None), "scaler", None)
        given = {"scaler": scaler, **options, "loader": loader}
        self._run = follow(model, optimizer, hooks, sinks=own or None, **given)
        if self._loaded:
            self._run.load_state_dict(self._loaded)
        first.hand_over(self._run)
        return True

    @property
    def run(self) -> Follow:
        """What follows the loop, once the first step has come."""
        if self._run is None:
            raise LifecycleError(
                "No model that Fabric has set up has been trained yet. Next: call fabric.setup(model, optimizer) with "
                "this callback among Fabric(callbacks=[...])."
            )
        return self._run

    @property
    def manager(self) -> HookManager:
        """The manager of the hooks: their metrics, errors and costs."""
        return self.run.manager

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hooks on all ranks, for ``fabric.save``; nothing before the first step."""
        return {} if self._run is None else self._run.state_dict(all_ranks=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have hooks go on where they were, from the first step on."""
        self._loaded = dict(state)
        if self._run is not None and state:
            self._run.load_state_dict(state)

    def close(self) -> None:
        """End the last epoch, write all metrics and close the sinks; may be called again."""
        if self._first is not None:
            self._first.remove()
        if self._run is not None:
            self._run.close()
