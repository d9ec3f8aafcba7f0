"""A process that ends with hooks on ends in silence."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import json.decoder

import torch
from torch import nn

import hookline as hl

model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
optimizer = torch.optim.AdamW(model.parameters())
capture = hl.capture(model, "*")
capture.__enter__()
kept = [
    *(hl.attach(model, "*", print, on=kind) for kind in ("forward_pre", "forward", "backward", "param_grad")),
    hl.attach_everywhere(print),
    hl.attach_function("aten.addmm", print),
    hl.attach_function("torch.nn.functional.relu", print, within=model, on="backward"),
    hl.attach_optimizer(optimizer, print),
    hl.attach_tensor(model[2].weight, print),
    hl.watch(model, optimizer=optimizer),
    hl.HookManager(hooks=[], sinks=[hl.sinks.MemorySink()]),
]
json.decoder.kept = [model, optimizer, capture, kept]  # goes when the modules of hookline are bare
model(torch.ones(3, 2)).sum().backward()
optimizer.step()
"""


def test_a_process_that_ends_with_hooks_on_says_nothing() -> None:
    """Whatever is on."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=True)
    assert done.stderr == ""


def test_of_an_error_in_a_hook_that_ends_the_process_the_error_is_all_that_is_said() -> None:
    failing = 'hl.attach(model, "2", lambda *args: 1 / 0, on="backward")\nmodel(torch.ones(3, 2)).sum().backward()\n'
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + failing], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert done.stderr.count("Traceback") == 1
