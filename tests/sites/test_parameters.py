"""param_grad: hooks that run when a backward pass has accumulated into a parameter's .grad."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from helpers_sites import ignore
from torch import Tensor, nn

import hookline as hl
from hookline.sites._torch import parameter_hooks_of
from hookline.sites.hook_at_site import HookAtSite


class Twice(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + self.weight**2


class Tied(nn.Module):
    """An encoder and a decoder with one weight, and a layer that needs none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.middle = nn.Linear(2, 2)
        self.decoder = nn.Linear(2, 2)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.middle(self.encoder(x)))


def without_addresses(value: object) -> str:
    """An id that is the same in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


ALL = ["0.weight", "0.bias", "2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"]


def run_backward(model: nn.Module) -> None:
    model(torch.ones(3, 2)).square().sum().backward()


def names_of(model: nn.Module, target: Any, **options: Any) -> list[str]:
    """The names that attach hooks."""
    with hl.attach(model, target, ignore, on="param_grad", **options) as handle:
        return list(handle.names)


def assert_clean(model: nn.Module) -> None:
    hl.assert_no_hooks(model, foreign=True)
    assert [hook for module in model.modules() for hook in parameter_hooks_of(module)] == []
    assert hl.attached(model) == []


# -- when it fires -------------------------------------------------------------------------------------------


def test_an_optimizer_may_step_inside_the_hook_and_drop_the_gradient():
    """The recipe that saves the memory of all gradients ends where a step after the backward ends."""
    model, twin = make_model(), make_model()
    steppers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)

    def step(parameter: Tensor) -> None:
        steppers[parameter].step()
        parameter.grad = None

    with hl.attach(model, step, on="param_grad"):
        for _ in range(5):
            run_backward(model)
            assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(5):
        plain.zero_grad()
        run_backward(twin)
        plain.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True))
    assert not torch.equal(model[0].weight, make_model()[0].weight)


# -- the target ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (None, ALL),
        ("*", ALL),
        ("0.weight", ["0.weight"]),
        ("*.bias", ["0.bias", "2.0.bias", "2.1.bias"]),
        ("#.weight", ["0.weight"]),
        ("2", ["2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"]),
        ("2.#", ["2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"]),
        (re.compile(r"2\..*weight"), ["2.0.weight", "2.1.weight"]),
        (re.compile("0"), ["0.weight", "0.bias"]),
        (nn.Linear, ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]),
        ((nn.Conv2d, nn.LayerNorm), ["2.1.weight", "2.1.bias"]),
        (lambda name, module: name == "2.0", ["2.0.weight", "2.0.bias"]),
        (["2.1.bias", "0"], ["0.weight", "0.bias", "2.1.bias"]),
        (["0.bias", "*.bias"], ["0.bias", "2.0.bias", "2.1.bias"]),
    ],
    ids=without_addresses,
)
def test_a_target_names_parameters_or_modules_that_stand_for_theirs(target, names):
    """Each once, in the model's own order."""
    assert names_of(make_model(), target) == names


@pytest.mark.parametrize(
    ("exclude", "names"),
    [
        ("*.bias", ["0.weight", "2.0.weight", "2.1.weight"]),
        ("2", ["0.weight", "0.bias"]),
        (nn.LayerNorm, ALL[:4]),
        ([nn.Linear, "2.1.bias"], ["2.1.weight"]),
        (nn.Conv2d, ALL),
        ("nothing.*", ALL),
        ([], ALL),
    ],
    ids=without_addresses,
)
def test_exclude_takes_parameters_away_in_the_same_grammar(exclude, names):
    """By parameter, by module, by type; it may match nothing."""
    assert names_of(make_model(), "*", exclude=exclude) == names


def test_tied_parameters_are_hooked_once_and_every_name_resolves():
    """Under the first name that matches, with the module of that name, in the model's own order."""
    model = Tied()
    names = ["encoder.weight", "encoder.bias", "middle.weight", "middle.bias", "decoder.bias"]
    assert names_of(model, "*") == names
    assert names_of(model, "decoder") == ["decoder.weight", "decoder.bias"]
    assert names_of(model, "*coder.weight") == ["encoder.weight"]
    assert names_of(model, "*", exclude="decoder.weight") == names[1:]
    seen = []
    with hl.attach(model, "decoder.weight", lambda p, *, site: seen.append(site), on="param_grad"):
        run_backward(model)
    assert [(site.name, site.module) for site in seen] == [("decoder.weight", model.decoder)]


def test_what_matches_nothing_is_answered_with_the_nearest_names():
    """Parameters and modules alike; nothing is attached, and a KeyError catches it."""
    model = make_model()
    with pytest.raises(KeyError, match=r"No parameter or module matches '0.wieght'.*nearest: '0.weight'"):
        names_of(model, "0.wieght")
    with pytest.raises(hl.errors.NoMatchError, match=r"'0.b1as'"):
        names_of(model, ["0.weight", "0.b1as"])
    with pytest.raises(hl.errors.NoMatchError, match=r"No module .* is a Conv2d; it has .*Linear"):
        names_of(model, nn.Conv2d)
    assert_clean(model)


@pytest.mark.parametrize("options", [{}, {"strict": False}])
@pytest.mark.parametrize("target", ["2", "2.1.bias", ["0", "2.1.bias"], "2*"])
def test_a_target_that_means_only_parameters_without_gradient_is_an_error(target, options):
    """The error names them and says what to do; nothing is attached."""
    model = make_model()
    model[2].requires_grad_(False)
    with pytest.raises(hl.errors.UnhookableError, match=r"'2\..*requires_grad is False; set requires_grad_\(\) first"):
        names_of(model, target, **options)
    assert_clean(model)


# -- site and receipt ----------------------------------------------------------------------------------------


def test_the_site_names_parameter_module_and_step():
    """A hook that declares site gets one, fresh at each firing."""
    model, seen = make_model(), []
    with hl.attach(model, "2.#.bias", lambda p, *, site: seen.append((site, p)), on="param_grad"):
        run_backward(model)
        run_backward(model)
    by_step = {(site.name, site.step): (site, parameter) for site, parameter in seen}
    assert set(by_step) == {("2.0.bias", 0), ("2.1.bias", 0), ("2.0.bias", 1), ("2.1.bias", 1)}
    for site, parameter in by_step.values():
        assert site.kind is hl.Kind.PARAM_GRAD
        assert site.module.bias is parameter
        assert site.call == 0
        assert not site.recompute


def test_a_forward_of_another_thread_may_begin_while_a_hook_is_put_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks where the parameters of all hooks are, those that are half made as well."""
    model, errors = nn.Linear(1, 1), []
    hl.attach(model, "weight", ignore, on="param_grad")
    make = HookAtSite.__init__

    def forward() -> None:
        try:
            model(torch.zeros(1, 1))
        except Exception as error:
            errors.append(error)

    def make_slowly(entry: HookAtSite, *args: Any) -> None:
        make(entry, *args)
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()

    monkeypatch.setattr(HookAtSite, "__init__", make_slowly)
    hl.attach(model, "bias", ignore, on="param_grad")
    assert not errors


def test_the_step_is_known_in_a_thread_that_ran_no_forward():
    """As on an accelerator, where the engine has threads of its own."""
    model, steps = Twice(), []
    with hl.attach(model, lambda p, *, site: steps.append(site.step), on="param_grad"):
        model(torch.tensor(1.0))
        loss = model(torch.tensor(1.0))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert steps == [1]


# -- lifetime ------------------------------------------------------------------------------------------------


def test_a_hooked_parameter_can_be_swapped():
    """torch.utils.swap_tensors, which model.to() may use, takes no tensor that has weak references."""
    model = make_model()
    with hl.attach(model, ignore, on="param_grad"):
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(2, 2)))
    assert torch.count_nonzero(model[0].weight) == 0
    assert_clean(model)


def test_a_hook_follows_to_a_parameter_that_has_the_id_of_the_one_before():
    """An id is used again once its tensor is gone; somebody may hold the dictionary of the old one's hooks."""
    module = nn.Linear(2, 2)
    seen: list[Tensor] = []
    with hl.attach(module, "weight", seen.append, on="param_grad"):
        for _ in range(200):  # as a rule the first new one is where the old one was
            kept, taken = module.weight._post_accumulate_grad_hooks, id(module.weight)
            data = torch.ones(2, 2)
            seen.clear()
            del module.weight
            module.weight = nn.Parameter(data)
            module(torch.ones(1, 2)).sum().backward()
            assert len(seen) == 1
            assert not kept
            if id(module.weight) == taken:
                break
    assert id(module.weight) == taken
