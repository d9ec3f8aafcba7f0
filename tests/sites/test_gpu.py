"""The same promises on a GPU, where the backward runs in another thread; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class Attention(nn.Module):
    """Post-norm attention: ``x`` is used three times inside ``mix`` and once more in the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = Mix(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.mix(x))


class Mix(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop((self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)) @ self.v(x)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(8), nn.ReLU(inplace=True), Attention(32), Attention(32), nn.Linear(32, 4)
    ).cuda()


def _train(model: nn.Module, steps: int = 20) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        x, y = torch.randn(6, 8, 16, device="cuda"), torch.randn(6, 8, 4, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {**{k: v.clone() for k, v in model.state_dict().items()}, "rng": torch.cuda.get_rng_state()}


def test_watching_every_module_changes_no_bit_of_a_gpu_run() -> None:
    """Weights, buffers and the device's random stream are the same with observers of all kinds on all modules."""
    plain = _train(_model())
    model = _model()
    seen: list[str] = []

    def two(module, grads, *, site):
        seen.append(site.name)

    def three(module, a, b, *, site):
        seen.append(site.name)

    with (
        hl.attach(model, "*", two, on="forward_pre", observe=True),
        hl.attach(model, "*", three, on="forward", observe=True),
        hl.attach(model, "*", two, on="backward_pre"),
        hl.attach(model, "*", three, on="backward") as backward,
    ):
        watched = _train(model)
        assert backward.report().fired == 20 * len(list(model.modules()))
    assert seen
    for key, value in plain.items():
        assert torch.equal(value, watched[key]), key


def test_an_unguarded_draw_on_the_gpu_is_noticed() -> None:
    """Negative control: one random number drawn in a hook makes the comparison fail."""
    plain = _train(_model())
    model = _model()
    with hl.attach(model, lambda module, args, output: torch.rand(1, device="cuda") and None):
        drawn = _train(model)
    assert not torch.equal(plain["rng"], drawn["rng"])


def test_gradients_on_a_gpu_come_with_their_parameters_and_in_order() -> None:
    """backward hooks fire last module first, with this backward's parameter gradients, in autograd's thread."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).cuda()
    order = []

    def note(module, grad_input, grad_output, *, site):
        order.append((site.name, site.step, site.call))
        for parameter in module.parameters(recurse=False):
            assert parameter.grad is not None

    with hl.attach(model, "*", note, on="backward"):
        model(torch.randn(3, 4, device="cuda")).sum().backward()
    assert order == [("2", 0, 0), ("1", 0, 0), ("0", 0, 0), ("", 0, 0)]


def test_a_gradient_edit_on_a_gpu_reaches_the_layers_below() -> None:
    """A backward hook's return value replaces the gradient that goes on."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).cuda()
    with hl.attach(model, "1", lambda module, grad_input, grad_output: (grad_input[0] * 0,), on="backward"):
        model(torch.randn(3, 4, device="cuda")).sum().backward()
    assert model[0].weight.grad.abs().sum() == 0
    assert model[1].weight.grad.abs().sum() > 0
