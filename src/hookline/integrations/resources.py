"""Report how fast a run is and what it takes: steps, samples and tokens a second, memory, use of the GPU.

`make_manager` adds it to every run that a host trains, so that a page tells a slow run from a fast one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import MetricInfo, TrainingHook
from hookline.training.experiment import MicroBatches
from hookline.when import HookPoint, StepSchedule

_GIB: Final = 1 << 30


class ResourcesHook(TrainingHook):
    """Count steps, samples and tokens between reports, by the clock of the host; the device is not waited for.

    Recipe: ``hookline.follow(model, optimizer, loader=loader)``, which has it by itself.

    Batches of every 20th step are looked at, and stand for the others: a look takes 60 µs.
    """

    name = "resources"
    description = "steps, samples and tokens a second, memory, use of the GPU"
    pure = True
    hook_points = frozenset({HookPoint.POST_STEP, HookPoint.POST_EPOCH})
    loop_points = {  # noqa: RUF012
        "epoch": {HookPoint.POST_STEP, HookPoint.POST_EPOCH},
        "step": {HookPoint.POST_STEP, HookPoint.SNAPSHOT},
    }
    step_schedule = StepSchedule("stride", stride=20)
    reduce = {"samples*": "sum", "tokens*": "sum", "*memory_gib": "max"}  # noqa: RUF012

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin another run."""
        self._reported: tuple[float, int] | None = None
        """When the last report was, and after how many steps."""
        self._looks = 0
        self._counts = {"samples": 0, "tokens": 0}
        """Of all steps that were looked at."""

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric."""
        return [
            MetricInfo("steps_per_second", "steps of the optimizer in a second, since the last report"),
            MetricInfo("samples_per_second", "rows of the batches, where the loader is known"),
            MetricInfo("tokens_per_second", "entries of `input_ids`, or of a batch of whole numbers in rows"),
            MetricInfo("memory_gib", "memory that the process holds, in GiB"),
            MetricInfo("gpu_memory_gib", "most that torch has had in use on the GPU, in GiB"),
            MetricInfo("gpu_use", "share of time in which the GPU was busy, in percent; needs nvidia-ml-py"),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, float] | None:
        """Look at the batch of a step; report at the other points."""
        if ctx.hook_point is HookPoint.POST_STEP:
            self._look(ctx.batch_data)
            return None
        before, self._reported = self._reported, (time.perf_counter(), (-1 if ctx.step is None else ctx.step) + 1)
        if before is None:  # the first step has no beginning
            return _memory(ctx)
        now, steps = self._reported
        speed = (steps - before[1]) / max(now - before[0], 1e-9)
        of_batches = {
            f"{name}_per_second": speed * count / self._looks for name, count in self._counts.items() if count
        }
        return {"steps_per_second": speed, **of_batches, **_memory(ctx)}

    def _look(self, batch: Any) -> None:
        self._looks += 1
        for each in batch if isinstance(batch, MicroBatches) else (batch,):
            rows = _rows(each)
            if rows is not None and rows.ndim:
                is_text = rows.ndim == 2 and not rows.is_floating_point() and not rows.is_complex()
                self._counts["samples"] += len(rows)
                self._counts["tokens"] += rows.numel() if is_text else 0


def _rows(batch: Any) -> Tensor | None:
    """Return a tensor with a row for each sample: the tokens of a language model, or the first that there is."""
    if isinstance(batch, Mapping):
        batch = [batch.get("input_ids"), *batch.values()]
    parts = batch if isinstance(batch, list | tuple) else [batch]
    return next((one for one in parts if isinstance(one, Tensor)), None)


def _memory(ctx: RunDataContext) -> dict[str, float]:
    """Return what the process and the GPU hold; without psutil or NVML, what is left."""
    found: dict[str, float] = {}
    with suppress(ImportError):
        import psutil  # type: ignore[import-untyped]

        found["memory_gib"] = psutil.Process().memory_info().rss / _GIB
    device = None if ctx.model is None else next((each.device for each in ctx.model.parameters()), None)
    if device is not None and device.type == "cuda":
        found["gpu_memory_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
        with suppress(ModuleNotFoundError, RuntimeError):
            found["gpu_use"] = float(torch.cuda.utilization(device))
    return found
