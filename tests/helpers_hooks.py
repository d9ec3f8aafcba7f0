"""Hooks and contexts that tests of firing use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import InterventionHook, TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.when import HookPoint

__all__ = ["PathLength", "context", "fire", "intervention", "observer"]


class PathLength(TrainingHook):
    """Keeps state: how far it has come, and where it was."""

    name = "path"
    hook_points = {HookPoint.POST_STEP}

    def __init__(self, scale=1.0):
        self.scale = scale
        self.reset()

    def reset(self):
        self.length = torch.zeros(())
        self.window = deque(maxlen=3)

    def compute(self, ctx):
        self.length = self.length + self.scale
        self.window.append(self.length)
        return {"length": self.length, "mean": sum(self.window) / len(self.window)}

    def get_state_tensors(self):
        return {"length": self.length, "window": self.window}

    def set_state_tensors(self, tensors):
        self.length, self.window = tensors["length"], tensors["window"]


def observer(name: str, *points: HookPoint, returns: Any = None, do: Callable[[Any], Any] | None = None, **attributes):
    """A hook that observes at these points; what it was shown is in ``seen``."""

    class Observer(TrainingHook):
        hook_points = set(points) or {HookPoint.POST_EPOCH}

        def __init__(self):
            self.seen = []

        def compute(self, ctx):
            self.seen.append(ctx)
            return do(ctx) if do is not None else returns

    hook = Observer()
    hook.name = name
    for key, value in attributes.items():
        setattr(hook, key, value)
    return hook


def intervention(name: str, *points: HookPoint, do: Callable[[Any, Any], Any] = lambda run, model: None, **attributes):
    """A hook that intervenes at these points."""

    class Intervention(InterventionHook):
        hook_points = set(points) or {HookPoint.POST_EPOCH}

        def intervene(self, run_ctx, model_ctx):
            return do(run_ctx, model_ctx)

    hook = Intervention()
    hook.name = name
    for key, value in attributes.items():
        setattr(hook, key, value)
    return hook


def context(point: HookPoint = HookPoint.POST_EPOCH, epoch: int = 0, **fields: Any) -> RunDataContext:
    """A context with little in it."""
    return RunDataContext(point, epoch, **fields)


def fire(manager: HookManager, point: HookPoint, epoch: int = 0, model_ctx: Any = None, **fields: Any):
    """Fire a point with a context for it."""
    return manager.fire(point, context(point, epoch, **fields), model_ctx)
