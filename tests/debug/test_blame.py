"""What `compare` blames when no module is at fault, when shapes differ, and when whole numbers flip by rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.debug import packed_rows, padded_rows

KINDS = ("input", "output", "output_grad", "param_grad")


class Router(nn.Module):
    """Chooses places by a score, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 4, bias=False)
        self.top = 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(x)
        return scores, scores.topk(self.top, dim=-1).indices


class Mixture(nn.Module):
    """Adds up rows of a table that the router has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.table = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(self.gate(x)[1]).sum(-2)


class Stack(nn.Module):
    """Embeds tokens, mixes, projects."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.place = nn.Embedding(6, 8)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.mix = Mixture()
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        x = x + self.mlp(self.norm(x))
        return self.head(self.mix(x))


def stack() -> Stack:
    """The model, the same each time."""
    torch.manual_seed(0)
    return Stack()


TOKENS = torch.arange(18).reshape(3, 6) * 5 % 16


def traced(model: nn.Module, folder: Path) -> Path:
    """One forward."""
    with hl.trace(model, to=folder, kinds=("input", "output"), tensors=True), torch.no_grad():
        model(TOKENS)
    return folder


def test_a_module_that_returns_another_shape_is_the_first_difference(tmp_path: Path) -> None:
    """The router is blamed, not the module that is given its choice; and nothing where batches differ."""
    wrong = stack()
    wrong.mix.gate.top = 1
    found = hl.compare(traced(stack(), tmp_path / "a"), traced(wrong, tmp_path / "b"))
    assert (found.ok, found.blame, len(found.blamed)) == (False, "mix.gate", 1)
    assert found.first is not None
    assert found.first.other_shape.startswith("its shape is (3, 6, 2) in A and (3, 6, 1) in B")
    assert "is the same; its own code differs" in found.blamed[0].why
    found.write_html(tmp_path / "page.html")
    few = hl.compare({"x": torch.ones(3, 2), "y": torch.ones(2)}, {"x": torch.ones(1, 2), "y": torch.ones(2)})
    assert (few.ok, few.blamed) == (False, [])


def test_a_choice_that_flips_by_rounding_is_unsure_and_one_by_a_bug_is_wrong(tmp_path: Path) -> None:
    """Two scores that are near each other change places in bfloat16; with equal inputs the router is wrong."""
    right = stack()
    right.mix.gate.score.weight.data[1] = right.mix.gate.score.weight.data[0] * (1 + 1e-5)  # near ties everywhere
    a = traced(right, tmp_path / "a")
    coarse = hl.compare(a, traced(copy.deepcopy(right).bfloat16(), tmp_path / "half"))
    unsure = [value for value in coarse.values if value.is_unsure]
    assert unsure
    assert (unsure[0].site, unsure[0].dtypes[0]) == ("mix.gate", "int64")
    assert "a near tie" in unsure[0].doubt
    assert (coarse.ok, coarse.blamed) == (False, [])
    wrong = copy.deepcopy(right)
    forward = wrong.mix.gate.forward

    def off_in_one_place(x: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = forward(x)
        chosen[0, 0, 0] = 3 - chosen[0, 0, 0]
        return scores, chosen

    wrong.mix.gate.forward = off_in_one_place  # type: ignore[method-assign]
    found = hl.compare(a, traced(wrong, tmp_path / "wrong"))
    assert (found.blame, found.first.verdict if found.first else "") == ("mix.gate", "wrong")


def trained(
    folder: Path,
    *,
    edit: Callable[[Stack], Any] = lambda model: None,
    loss_scale: float = 1.0,
    clip: float | None = None,
    zero: bool = True,
    lr: float = 1e-2,
) -> Path:
    """Two steps of training, traced in both directions."""
    model = stack()
    edit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with hl.trace(model, to=folder, kinds=KINDS, tensors=True, step=optimizer):
        for step in range(2):
            if zero:
                optimizer.zero_grad()
            logits = model((TOKENS + step) % 16)
            (nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()) * loss_scale).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return folder


class Detached(nn.Sequential):
    """Lets no gradient through to what it is given."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.detach())


def detach(model: Stack) -> None:
    """Cut the graph before the feed-forward part."""
    model.mlp = Detached(*model.mlp)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The right training run."""
    return trained(tmp_path_factory.mktemp("blame") / "a")


@pytest.mark.parametrize(("change", "outside", "module"), [
    ({"loss_scale": 2.0}, "the loss", ""),
    ({"clip": 1e-3}, "the code between backward and step", ""),
    ({"zero": False}, "the code between backward and step", ""),
    ({"lr": 1.1e-2}, "the optimizer", ""),
    ({"edit": detach}, "", "mlp"),
])  # fmt: skip
def test_what_is_outside_of_the_model_is_blamed_as_that(
    reference: Path, tmp_path: Path, change: dict[str, Any], outside: str, module: str
) -> None:
    """Loss, clipping, gradients that were not zeroed, the learning rate; and a cut graph at the module that cuts it."""
    found = hl.compare(reference, trained(tmp_path / "b", **change))
    assert not found.ok
    assert [(each.outside, each.module) for each in found.blamed] == [(outside, module)]
    assert f"Blamed: {outside or module}." in found.headline[2]
    follow = {value.follows for value in found.values if value.follows}
    assert follow == {outside or module}


class LateLinear(nn.Linear):
    """Is off from its second call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.05 if self.calls > 1 else 1.0)


def test_a_trained_module_that_goes_wrong_later_is_not_taken_for_the_optimizer(tmp_path: Path, reference: Path) -> None:
    """Trained modules that ran before it return the same in that step: they were updated alike."""

    def edit(model: Stack) -> None:
        model.mlp[2].__class__ = LateLinear

    found = hl.compare(reference, trained(tmp_path / "b", edit=edit))
    assert [(each.outside, each.module) for each in found.blamed] == [("", "mlp.2")]
    assert "is given the same to the bit and returns something else" in found.blamed[0].why


def test_a_gradient_of_an_output_is_not_blamed_on_the_module_that_returns_it(tmp_path: Path, reference: Path) -> None:
    """The last layer of the feed-forward part returns what that part returns: its gradient comes from further out."""

    class Doubled(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 2)
            return x

    def edit(model: Stack) -> None:
        forward = model.mix.forward
        double = Doubled().forward
        model.mix.forward = lambda x: forward(double(x))  # type: ignore[method-assign]

    found = hl.compare(reference, trained(tmp_path / "b", edit=edit))
    assert found.first is not None
    assert found.first.site in ("mlp", "mlp.2")
    assert (found.blame, len(found.blamed)) == ("", 1)
    assert "gives another gradient to mlp;" in found.blamed[0].why


LENGTHS = [2, 4, 3]


def layouts() -> dict[str, Any]:
    """The same rows and attention weights, padded right, padded left and packed; with their masks."""
    torch.manual_seed(0)
    rows = [torch.randn(length, 5) for length in LENGTHS]
    weights = [torch.randn(2, length, length) for length in LENGTHS]
    found: dict[str, Any] = {}
    for side in ("right", "left"):
        x, w, mask = torch.zeros(3, 4, 5), torch.zeros(3, 2, 4, 4), torch.zeros(3, 4)
        for number, length in enumerate(LENGTHS):
            at = slice(0, length) if side == "right" else slice(4 - length, 4)
            x[number, at], w[number, :, at, at], mask[number, at] = rows[number], weights[number], 1
        found[side] = {"x": x, "weights": w}, padded_rows(mask)
    found["packed"] = {"x": torch.cat(rows)[None]}, packed_rows(LENGTHS)
    return found


def test_rows_are_found_in_left_right_and_packed_batches_of_one() -> None:
    """Columns that are padded in another way are not compared; a wrong row still shows; rows that fit none are told."""
    given = layouts()
    for one, other in (("right", "left"), ("right", "packed"), ("packed", "left")):
        (a, rows_a), (b, rows_b) = given[one], given[other]
        a, b = ({name: run[name] for name in run if name in a and name in b} for run in (a, b))
        found = hl.compare(a, b, rows=(rows_a, rows_b))
        assert (found.ok, found.headline[1]) == (True, "Nothing differs.")
    found = hl.compare(given["right"][0], given["left"][0], rows=(given["right"][1], given["left"][1]))
    assert [(each.site, each.why) for each in found.unpaired] == [
        ("weights", "it has a column for each token, and those are padded in another way")
    ]
    assert "Not compared: weights" in found.summary
    wrong = {"x": given["packed"][0]["x"].clone()}
    wrong["x"][0, 3] += 1
    found = hl.compare(given["right"][0], wrong, rows=(given["right"][1], given["packed"][1]))
    assert found.first is not None
    assert (found.blame, found.first.where) == ("x", "request 1, position 1")
    with pytest.raises(hl.errors.CompareError, match=r"The rows= of B \(10 tokens of 3 requests\) fit no tensor of it"):
        hl.compare(given["right"][0], wrong, rows=(given["right"][1], packed_rows([3, 4, 3])))


def test_a_second_bug_with_equal_inputs_does_not_follow_from_the_first() -> None:
    """Two branches that are given the same tensor, each with a wrong weight; what adds them up follows."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.end(self.one(x) + self.two(x))

    torch.manual_seed(0)
    right = Branches()
    wrong = copy.deepcopy(right)
    wrong.one.weight.data *= 2
    wrong.two.weight.data *= 3
    runs = []
    for model in (right, wrong):
        with hl.capture(model, "*", inputs=True, clone=True) as cache, torch.no_grad():
            model(torch.ones(2, 4))
        runs.append(cache)
    found = hl.compare(*runs)
    assert [blame.module for blame in found.blamed] == ["one", "two"]
