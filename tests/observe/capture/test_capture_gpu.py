"""Captures on a GPU: offload that does not wait, values that are never read too early; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()


def test_offloaded_values_are_what_flowed() -> None:
    """Outputs and gradients, in pinned memory, equal to those kept on the device; through memory that is used again."""
    net = model()
    for step in range(10):
        x = torch.randn(512, 1024, device="cuda") * (step + 1)
        with hl.capture(net, "#", grads=True, clone=True) as there:
            net(x).square().mean().backward()
        with hl.capture(net, "#", grads=True, device="cpu", detach=True) as here:
            net(x).square().mean().backward()
        for name in there:
            assert here[name].output.is_pinned()
            assert torch.equal(here[name].output, there[name].output.cpu())
            assert torch.equal(here[name].grad, there[name].grad.cpu())


def test_offload_does_not_wait_and_reading_does() -> None:
    """Capturing starts copies and goes on; the first read waits for all of them."""
    net, x = model(), torch.randn(512, 1024, device="cuda")
    with torch.no_grad(), hl.capture(net, "#", device="cpu") as cache:
        net(x)  # allocators
        cache.clear()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        net(x)
        assert not torch.cuda.current_stream().query()
        assert cache._recorder.store._streams
        expected = cache["3"].output.clone()
        assert torch.cuda.current_stream().query()
        assert torch.equal(expected, net(x).cpu())
