"""What several tests of PyTorch's contract share: a hook that keeps gradients, and a function of one's own."""

from __future__ import annotations

import pytest
import torch

__all__ = ["EDITING", "Cube", "gradient_spy"]

EDITING = pytest.mark.parametrize("editing", [False, True], ids=["observing", "editing"])


def gradient_spy(seen, *, editing=False):
    """A backward hook that keeps what it is shown; as an editor it returns its gradients unchanged."""
    if editing:

        def hook(module, grad_input, grad_output):
            seen.append((grad_input, grad_output))
            return grad_input
    else:

        def hook(module, grad_input, grad_output):
            seen.append((grad_input, grad_output))

    return hook


class Cube(torch.autograd.Function):
    """A function of one's own, which keeps its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad
