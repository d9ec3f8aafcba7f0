"""A watch in loops that are not ours: what counts as training, what is left out, and what a step is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Net(nn.Module):
    """Two parts with dropout and BatchNorm; `training_step` calls them without the forward, as Lightning's does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]

    def training_step(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def foreign_loop(
    model: Net, optimizer: Any, call: Callable[[Tensor], Tensor], steps: int = 6, evaluations: int = 3
) -> list[Tensor]:
    """As nanoGPT's: an evaluation first and at every other step, then the step; what training has put out."""
    data = torch.Generator().manual_seed(1)
    outputs = []
    for step in range(steps):
        if step % 2 == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(evaluations):
                    call(torch.full((6, 4), 100.0))
            model.train()
        optimizer.zero_grad()
        output = call(torch.randn(6, 4, generator=data))
        outputs.append(output.detach().clone())
        output.square().mean().backward()
        optimizer.step()
    return outputs


@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("call", ["forward", "training_step"])
def test_evaluations_of_a_foreign_loop_are_left_out_and_told(has_optimizer: bool, call: str) -> None:
    """Those before training too; the numbers are those of the training forwards, and the table says what is missing."""
    model, optimizer = make()
    with hl.watch(model, optimizer=optimizer if has_optimizer else None) as watch:
        outputs = foreign_loop(model, optimizer, model if call == "forward" else model.training_step)
    metrics, report = watch.to_metrics(), watch.report()
    assert metrics["head/forward/mean"] == pytest.approx(float(torch.cat(outputs).mean()), rel=1e-4)
    assert report["fired"]["head/forward"] == report["fired"]["head/backward"] == 6
    assert report["fired"]["head.weight/param_grad"] == 6
    assert report["left_out"] == 9
    assert "left out: 9 forwards in evaluation mode or without gradients; during={'train', 'eval'}" in repr(watch)


def test_a_part_that_is_called_by_itself_goes_by_the_mode_of_now() -> None:
    """Not by that of the last forward of the model."""
    model, _ = make()
    with hl.watch(model, "encoder.0") as watch:
        model(torch.ones(6, 4))
        expected = watch.to_metrics()
        model.eval()
        model.encoder(torch.full((6, 4), 100.0))
        assert watch.to_metrics() == expected


def test_evaluations_count_where_they_are_asked_for() -> None:
    """With during={"train", "eval"} everything, with "eval" the others alone; nothing, and a warning, where none is."""
    model, optimizer = make()
    both = hl.watch(model, "head", on="forward", during={"train", "eval"})
    with both, hl.watch(model, "head", on="forward", during="eval") as evaluated:
        foreign_loop(model, optimizer, model)
    assert (both.report()["fired"]["head/forward"], both.report()["left_out"]) == (15, 0)
    assert (evaluated.report()["fired"]["head/forward"], evaluated.report()["left_out"]) == (9, 6)
    watch = hl.watch(model, "head", on="forward", during="eval")
    model(torch.randn(6, 4))
    assert watch.report()["silent"]["head/forward"].startswith("left out: 1 forward in training mode")
    with pytest.warns(hl.HooklineWarning, match="watch of a Net has counted nothing; left out: 1 forward"):
        watch.remove()


@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("mode", ["eval", "no_grad", "both", "inference"])
def test_a_model_that_never_trains_is_watched(mode: str, has_optimizer: bool) -> None:
    """A served model, or one that is calibrated: there is nothing that is more like training."""
    model, optimizer = make()
    model.train(mode == "no_grad")
    off = {"eval": torch.enable_grad, "inference": torch.inference_mode}.get(mode, torch.no_grad)
    with hl.watch(model, "head", on="forward", optimizer=optimizer if has_optimizer else None) as watch, off():
        for _ in range(5):
            model(torch.randn(6, 4))
    assert (watch.report()["fired"]["head/forward"], watch.report()["left_out"]) == (5, 0)


def test_training_in_evaluation_mode_counts_and_its_evaluations_do_not() -> None:
    """Whoever fine-tunes with model.eval() has gradients on where it trains; a step settles that it is training."""
    model, optimizer = make()
    model.eval()
    with hl.watch(model, "head", optimizer=optimizer) as watch:
        for _ in range(3):
            with torch.no_grad():
                model(torch.randn(6, 4))
            optimizer.zero_grad()
            model(torch.randn(6, 4)).sum().backward()
            optimizer.step()
        model.train()
        model(torch.randn(6, 4)).sum().backward()
        optimizer.step()
    report = watch.report()
    assert (report["fired"]["head/forward"], report["fired"]["head/backward"], report["left_out"]) == (4, 4, 3)


@pytest.mark.parametrize("has_other_hooks", [False, True])
@pytest.mark.parametrize("evaluations", [0, 2, 3])
@pytest.mark.parametrize("call", ["forward", "training_step"])
def test_hooks_that_come_on_as_a_step_begins_see_the_backward_pass_of_that_step(
    call: str, evaluations: int, has_other_hooks: bool
) -> None:
    """Also at the module whose call begins it, whether they were off for an evaluation or for a step not due."""
    model, optimizer = make()
    if has_other_hooks:
        hl.attach(model, lambda *args: None, on="backward")
        hl.attach(model, "encoder", lambda *args: None, on="backward")
    whole = "" if call == "forward" else "encoder/"
    with hl.watch(model, every=2) as watch:
        foreign_loop(model, optimizer, model if whole == "" else model.training_step, evaluations=evaluations)
    fired = watch.report()["fired"]
    places = [f"{whole}forward", f"{whole}backward", "head/backward", "head.weight/param_grad"]
    assert [fired[place] for place in places] == [3] * 4
