"""Use hookline as somebody's own program does; `matrix.py` lets mypy check it against the installed package."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import hookline as hl
from hookline.errors import HooklineError
from hookline.records import MetricSink
from hookline.sinks import CSVSink


def watch_and_capture(model: nn.Module, x: torch.Tensor) -> list[MetricSink]:
    """Call the verbs whose types users lean on."""

    def look(module: nn.Module, args: tuple[object, ...], output: torch.Tensor) -> None:
        print(type(module).__name__, output.shape)

    handle = hl.attach(model, "0", look)
    assert_type(handle, hl.HookHandle)
    handle.remove()
    try:
        with hl.capture(model, ["0"]) as cache:
            model(x)
        print(len(cache))
    except HooklineError as error:
        print(error)
    manager = hl.HookManager(["norms"], sinks=[CSVSink("metrics.csv")])
    print(manager.hooks)
    return [CSVSink("more.csv")]
