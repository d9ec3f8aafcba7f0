"""Hooks through a model whose own forward is never called: steps, calls, and a hook on the model itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import hookline as hl


class Module(nn.Module):
    """As a LightningModule: `training_step` calls parts, each several times; `forward` is for other uses."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]

    def training_step(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) + self.body(x)).sum()  # type: ignore[no-any-return]


class Seen:
    """A hook that notes where and when it fires."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, int, int]] = []

    def __call__(self, module: nn.Module, args: Any, output: Any, *, site: hl.Site) -> None:
        self.moments.append((site.name, site.step, site.call))


def test_steps_and_calls_are_counted_by_the_part_that_is_called_first() -> None:
    """Each call of it begins a step, so that a part that is called twice in a step begins two; none is -1."""
    model, seen = Module(), Seen()
    with hl.attach(model, ["body.0", "head"], seen) as handle:
        for _ in range(2):
            model.training_step(torch.randn(3, 4))
        assert handle.report().last_step == 3
    assert seen.moments == [
        ("body.0", 0, 0),
        ("body.0", 1, 0),
        ("head", 1, 0),
        ("body.0", 2, 0),
        ("body.0", 3, 0),
        ("head", 3, 0),
    ]
    hl.assert_no_hooks(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_calls_inside_of_the_first_part_belong_to_one_step() -> None:
    """It is the outermost part that begins steps, not the first module that a hook is on."""

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.cell(x)
            return x

    model, seen = nn.ModuleDict({"rnn": Unrolled()}), Seen()
    with hl.attach(model, "rnn.cell", seen):
        for _ in range(2):
            model["rnn"](torch.randn(3, 4))
    assert seen.moments == [("rnn.cell", step, call) for step in (0, 1) for call in (0, 1, 2)]


def test_a_model_that_is_called_now_and_then_has_one_count() -> None:
    """A forward of the model is one step, also though the part that stands in for it is called inside."""
    model, seen = Module(), Seen()
    with hl.attach(model, "head", seen):
        model.head(torch.randn(3, 4))
        model(torch.randn(3, 4))
        model.head(torch.randn(3, 4))
    assert [moment[1:] for moment in seen.moments] == [(0, 0), (1, 0), (2, 0)]


def test_site_tells_the_mode_that_the_forward_began_in() -> None:
    """Of the model, whatever the module's own mode and the gradients around it."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return self.inner(x)  # type: ignore[no-any-return]

    model, told = Part(), []
    model.inner.eval()

    def hook(module: nn.Module, args: Any, output: Any, *, site: hl.Site) -> None:
        told.append((site.training, site.gradients))

    with hl.attach(model, "inner", hook):
        model(torch.randn(3, 4))
        with torch.no_grad():
            model(torch.randn(3, 4))
        model.eval()(torch.randn(3, 4))
    assert told == [(True, True), (True, False), (False, True)]


def test_a_module_that_joins_later_is_put_in_order_too():
    """Its edit runs before a hook that somebody has put first; and one that is registered while a forward begins."""
    model, seen, x = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)), [], torch.ones(1, 2)
    layer = model[0][0]

    def zero(module, args, output):
        return output * 0

    handles = hl.HandleSet([hl.attach(model[0], "0", zero)])
    layer.register_forward_hook(lambda module, args, output: seen.append(output.abs().sum().item()), prepend=True)
    handles.add(hl.attach(model, "1", lambda *args: None, observe=True))
    handles.add(hl.attach(model, "0.0", zero))
    model(x)
    assert seen == [0.0]
    late = RemovableHandle(layer._forward_hooks)  # as torch does: it counts the hook, and puts it in its place then
    model(x)
    layer._forward_hooks[late.id] = lambda module, args, output: seen.append(output.abs().sum().item())
    layer._forward_hooks.move_to_end(late.id, last=False)
    model(x), model(x)
    assert seen == [0.0] * 6
    handles.remove()
