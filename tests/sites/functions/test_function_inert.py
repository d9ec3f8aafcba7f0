"""Training with function hooks: a run that is watched ends with the same bits as the run that is not.

Each test trains twice from the same seed and compares losses, weights, buffers, gradients, optimizer state and the
random stream with ``torch.equal``. The negative controls show that the comparison can fail.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_functions import KINDS, Pair, Scale, noting, sin_product
from helpers_training import differences
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

STEPS = 4


class House(nn.Module):
    """Embeddings, post-norm attention, BatchNorm, in-place ReLU, dropout, a custom Function, a custom operator."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.batch_norm, self.relu = nn.BatchNorm1d(16), nn.ReLU(inplace=True)
        self.lstm, self.conv = nn.LSTM(8, 8, batch_first=True), nn.Conv1d(8, 8, 3, padding=1)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        h = self.norm(h + self.attention(h, h, h)[0])
        up = self.relu(self.batch_norm(self.up(h).transpose(1, 2)).transpose(1, 2))
        h = self.norm2(h + self.drop(self.down(up)))
        h = h + self.lstm(h)[0] + self.conv(h.transpose(1, 2)).transpose(1, 2)
        product, total = Pair.apply(h, h * 0.5)
        h = Scale.apply(product, 0.5) + total + sin_product(h, total)
        h = torch.cat(h.split(1, dim=1), 1) * 0.9 + F.softmax(h, -1)
        mixed = torch.einsum("bij,bkj->bik", h, h).mean() * 0.1
        h = h * 2
        h += mixed
        h[:, 0] = mixed * 0.5
        return self.head(h)


class Checkpointed(House):
    def forward(self, ids: Tensor) -> Tensor:
        return checkpoint(super().forward, ids, use_reentrant=False)


Hooking = Callable[[nn.Module], list[Any]]


def reading(fn: Any, *tensors: Any) -> None:
    """Reads all that it is shown, with operators of its own, and returns nothing."""
    for group in tensors:
        for tensor in group:
            if tensor is not None and tensor.is_floating_point() and tensor.numel():
                tensor.detach().double().square().mean()


def train(
    make: type[nn.Module] = House, hooking: Hooking | None = None, steps: int = STEPS, autocast: bool = False
) -> dict[str, Tensor]:
    """All that a training run leaves behind."""
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    losses = []
    with hl.HandleSet(hooking(model) if hooking else []):
        for _ in range(steps):
            ids = torch.randint(11, (4, 6), generator=data)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                logits = model(ids)
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
    left = {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    left |= {f"grad {name}": parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        left |= {f"{key} {name}": torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}
    return {**left, "losses": torch.stack(losses), "random": torch.get_rng_state()}


def hooks(target: Any, hook: Callable[..., Any] = reading, *, bare: bool = False, **options: Any) -> Hooking:
    """One hook of each kind on a target; operators have the forward kinds."""
    kinds = KINDS[:2] if isinstance(target, list | str) and "aten.*" in target else KINDS
    return lambda model: [
        hl.attach_function(target, hook, on=kind, within=None if bare else model, **options) for kind in kinds
    ]


def everything(model: nn.Module) -> list[Any]:
    """Functions, operators and classes, watched by hooks that return nothing and by observers that do."""
    returning: Callable[..., Any] = lambda fn, *tensors: "junk"  # noqa: E731
    targets = ["*", "torch.Tensor.*", Pair, Scale]
    return [
        *hooks(["aten.*", "hookline_test.*"])(model),
        *hooks(targets)(model),
        *hooks(targets, returning, observe=True)(model),
        *hooks(targets, returning, observe=True, bare=True)(model),
        *(hl.attach(model, "*", noting([], kind), on=kind) for kind in KINDS),
    ]


HOOKINGS: dict[str, Hooking] = {
    "functions bare": hooks("*", bare=True),
    "private functions and attributes": hooks(["torch._*", "torch.Tensor.*.__get__", "*"]),
    "operators": hooks(["aten.*", "hookline_test.*"]),
    "everything together": everything,
}


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return train()


@pytest.mark.parametrize("hooking", HOOKINGS)
def test_training_with_function_hooks_ends_with_the_same_bits(hooking: str, plain: dict[str, Tensor]) -> None:
    """Four AdamW steps, all kinds."""
    assert differences(train(hooking=HOOKINGS[hooking]), plain) == []


def test_under_activation_checkpointing_the_bits_are_the_same() -> None:
    """Recomputed calls pass the hooks a second time, or do not, and change nothing."""
    plain = train(Checkpointed)
    for hooking in (hooks("*"), hooks("*", bare=True), hooks("aten.*", bare=True)):
        assert differences(train(Checkpointed, hooking), plain) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_edits_is_noticed(kind: str, plain: dict[str, Tensor]) -> None:
    """A return value of the last bit's size changes the weights, in every kind."""

    def edit(fn: Any, *tensors: Any) -> Any:
        return tuple(
            tensor * (1 + 2**-20) if tensor is not None and tensor.is_floating_point() else tensor
            for tensor in (tensors[0] if kind.startswith("backward") else tensors[-1])
        )

    hooking: Hooking = lambda model: [hl.attach_function(F.linear, edit, on=kind, within=model)]  # noqa: E731
    assert "state up.weight" in differences(train(hooking=hooking), plain)


@pytest.mark.parametrize(("kind", "target"), [("backward_pre", "*"), ("backward", F.linear)])
def test_gradient_editors_that_return_what_they_got_change_nothing_beyond_rounding(kind: str, target: Any) -> None:
    """An editor may regroup sums, as it does on modules; the gradients of a step agree to the last few bits."""
    hooking: Hooking = lambda model: [  # noqa: E731
        hl.attach_function(target, lambda fn, grads, *_: grads, on=kind, within=model)
    ]
    hooked, reference = train(hooking=hooking, steps=1), train(steps=1)
    for name in hooked:
        if name.startswith("grad "):
            torch.testing.assert_close(hooked[name], reference[name], rtol=1e-5, atol=1e-6)


# -- what is the caller's stays the caller's -----------------------------------------------------------------


MAKERS: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(3, requires_grad=True),
    "randn": lambda: torch.randn(3, requires_grad=True),
    "tensor": lambda: torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
    "requires_grad_": lambda: torch.ones(3).requires_grad_(),
    "empty_like": lambda: torch.zeros_like(torch.ones(3), requires_grad=True),
    "init": lambda: nn.init.ones_(nn.Parameter(torch.zeros(3))),
}


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("how", MAKERS)
def test_a_leaf_that_is_made_under_a_watching_hook_is_a_leaf(how: str, kind: str) -> None:
    """It gets its gradient, and an optimizer takes it."""
    with hl.attach_function("*", reading, on=kind):
        leaf = MAKERS[how]()
        assert leaf.is_leaf
        (leaf * 2).sum().backward()
        torch.optim.SGD([leaf], lr=0.1)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]


HANDED_BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to("cpu"),
    "float": lambda x: x.float(),
    "requires_grad_": lambda x: x.requires_grad_(),
    "dropout": lambda x: F.dropout(x, training=False),
}


@pytest.mark.product(how=list(HANDED_BACK), given=["leaf", "computed"], kind=["forward", "backward"])
def test_what_a_function_hands_back_as_it_is_stays_the_same_object(how: str, given: str, kind: str) -> None:
    """A watching hook does not put another tensor in its place."""
    x = torch.ones(3, requires_grad=True)
    if given == "computed":
        if how == "requires_grad_":
            pytest.skip("torch itself does not allow it")
        x = x * 1
    assert HANDED_BACK[how](x) is x
    with hl.attach_function("*", reading, on=kind):
        assert HANDED_BACK[how](x) is x


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_model_built_moved_copied_and_saved_under_watching_hooks_is_as_without(kind: str) -> None:
    """Construction, dtype, deepcopy, state dict, tied and normalised weights: parameters stay parameters and leaves."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
        model = copy.deepcopy(model).double().float()
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        model.load_state_dict(torch.load(buffer))
        model(torch.ones(2, 3)).sum().backward()
        return model

    expected = build()
    with hl.attach_function("*", reading, on=kind):
        model = build()
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(one, nn.Parameter), name
        assert one.is_leaf, name
        assert torch.equal(one, other), name
        assert torch.equal(one.grad, other.grad), name
