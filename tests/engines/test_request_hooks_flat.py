"""Test hooks that belong to one request of a flat batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookline.engines.request_options import ClientHook
from hookline.engines.session import Session
from hookline.errors import NoMatchError, NotAllowedError, OptionError
from hookline.observe.tokens import Tokens, serving

KEYS, LENGTHS = ("a", "b", "c"), (1, 3, 1)
STEER = {"target_modules": ["0"], "hook_factory": "hookline.factories:steer", "config": {"vector": [10.0, 10.0]}}
STATS = {"target_modules": ["0"], "hook_factory": "hookline.factories:activation_stats", "name": "s"}


class Pair(nn.Module):
    def forward(self, x, extra=None, other=None):
        return x + 1, x * 0


@pytest.fixture
def model():
    return nn.Sequential(Pair())


class Hooks:
    """Does what a worker does when a request begins that brings hooks, and when it ends."""

    def __init__(self, model):
        self.session = Session(model)
        self.opened = {}

    def begin(self, id, specs, allow=None):
        given = [ClientHook.from_dict(each) for each in specs]
        self.opened[id] = self.session.of_requests.prepare(id, given, allow)
        self.opened[id].open()

    def close(self, id):
        return self.opened[id].close()

    @property
    def is_active(self):
        return self.session.is_active


def step_table(names=KEYS, room=0):
    return Tokens(names, LENGTHS, (9, 0, 4), ("decode", "prefill", "decode"), keys=KEYS, room=room)


def run(model, names=KEYS):
    x = torch.arange(10.0).reshape(5, 2)
    with torch.inference_mode(), serving(step_table(names)):
        return model(x)


def test_an_edit_changes_the_rows_of_its_request_alone(model):
    plain, zeros = run(model)
    hooks = Hooks(model)
    hooks.begin("b", [STEER])
    assert hooks.is_active
    steered, second = run(model)
    assert torch.equal(second, zeros)
    changed = (steered != plain).any(1).tolist()
    assert changed == [False, True, True, True, False]
    assert torch.equal(steered[1:4], plain[1:4] + 10)
    found = hooks.close("b")
    assert (found[0]["rows"], found[0]["errors"], found[0]["name"]) == (3, 0, "steer")
    assert not hooks.is_active
    assert all(torch.equal(one, other) for one, other in zip(run(model), (plain, zeros), strict=True))
    assert not model[0]._forward_hooks


def test_two_requests_have_hooks_of_their_own(model):
    hooks = Hooks(model)
    hooks.begin("a", [STEER, STATS])
    hooks.begin("c", [STATS])
    run(model)
    first = hooks.close("a")[1]
    run(model)  # a has ended, and is not in its metrics
    second = hooks.close("c")[0]
    assert first["metrics"]["0/mean"] == pytest.approx(0.5 + 1 + 10)  # row 0, behind its own edit
    assert second["metrics"]["0/mean"] == pytest.approx(8.5 + 1)  # row 4, untouched by the other's edit
    assert (first["rows"], second["rows"]) == (1, 2)
    assert hooks.close("a") == []


def test_a_request_that_is_not_in_the_step_is_left_alone(model):
    hooks = Hooks(model)
    hooks.begin("x", [STEER])
    plain = torch.arange(10.0).reshape(5, 2) + 1
    assert torch.equal(run(model)[0], plain)
    assert torch.equal(model(plain - 1)[0], plain)  # nobody says whose rows these are
    hooks.close("x")
    assert not model[0]._forward_hooks


def test_a_hook_that_raises_is_switched_off_and_told(model):
    hooks = Hooks(model)
    hooks.begin("b", [{**STEER, "config": {"vector": [1.0, 2.0, 3.0]}}], None)
    plain = torch.arange(10.0).reshape(5, 2) + 1
    assert torch.equal(run(model)[0], plain)
    found = hooks.close("b")[0]
    assert found["errors"] == 1
    assert "3" in found["last_error"]


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"hook_factory": "os:system"}, NotAllowedError),
        ({"hook_factory": "hookline.factories.exporting:export"}, NotAllowedError),
        ({"hook_factory": "hookline.factories:export", "config": {"folder": "x"}}, NotAllowedError),
        ({"hook_factory": "hookline.factories:steer", "config": {"file": "/etc/passwd"}}, NotAllowedError),
        ({"hook_factory": "hookline.factories:steer", "on": "forward_pre"}, OptionError),
        ({}, OptionError),
        ({**STEER, "on_error": "raise"}, OptionError),
        ({**STEER, "on_error": 3}, OptionError),
    ],
)
def test_what_a_request_may_not_ask_for(spec, error):
    with pytest.raises(error):
        Hooks(nn.Sequential(Pair())).begin("b", [{"target_modules": ["0"], **spec}], None)


def test_names_that_clients_choose_do_not_decide_whose_rows_a_hook_gets(model):
    plain = run(model)[0]
    hooks = Hooks(model)
    hooks.begin("b", [STEER])
    changed = run(model, names=("b", "x", "b"))[0] != plain
    assert changed.any(1).tolist() == [False, True, True, True, False]
    hooks.close("b")


def test_a_prefix_does_not_let_in_what_its_module_has_imported(model):
    """`ClientHook` is imported here, and may not be named through this module; a factory of its own may."""
    hooks = Hooks(model)
    with pytest.raises(NotAllowedError, match="comes from"):
        hooks.begin("b", [{"target_modules": ["0"], "hook_factory": f"{__name__}:ClientHook"}], (__name__,))
    hooks.begin("b", [{"target_modules": ["0"], "hook_factory": f"{__name__}:own_factory"}], (__name__,))
    hooks.close("b")


def own_factory(config):
    return lambda module, args, output: None


def test_a_module_that_is_not_there_attaches_nothing(model):
    hooks = Hooks(model)
    with pytest.raises(NoMatchError):
        hooks.begin("a", [STEER, {**STEER, "target_modules": ["7"]}], None)
    assert not hooks.is_active
    assert not model[0]._forward_hooks


def test_a_hook_of_a_request_is_shown_its_own_rows_alone(model):
    """Inputs too; what has no row for each token, a table of all requests for example, is not shown at all."""
    hooks, seen = Hooks(model), SEEN
    seen.clear()
    hooks.begin("b", [{"target_modules": ["0"], "hook_factory": f"{__name__}:sees_all"}], (__name__,))
    x = torch.arange(10.0).reshape(5, 2)
    padded = torch.cat([x, torch.zeros(3, 2)])
    for given, third in ((x, object()), (x, torch.ones(9, 2)), (padded, object())):  # 9: of a cache with many blocks
        with torch.inference_mode(), serving(step_table(room=8)):
            model[0](given, torch.ones(3), third)
        inputs, output = seen.pop()
        assert torch.equal(inputs[0], x[1:4])
        assert inputs[1:] == (None, None)
        assert torch.equal(output[0], x[1:4] + 1)
        assert inputs[0].untyped_storage().nbytes() == inputs[0].nbytes
    hooks.close("b")


SEEN = []


def sees_all(config):
    def hook(module, args, output):
        SEEN.append((args, output))

    return hook


def test_an_edit_of_another_shape_is_refused_and_changes_nothing(model):
    """It would be spread over the rows by broadcasting, or be passed over without a word."""
    plain = run(model)[0]
    for factory in ("returns_one_number", "returns_one_of_two"):
        hooks = Hooks(model)
        hooks.begin("b", [{"target_modules": ["0"], "hook_factory": f"{__name__}:{factory}"}], (__name__,))
        assert torch.equal(run(model)[0], plain)
        found = hooks.close("b")[0]
        assert found["errors"] == 1
        assert "in place of" in found["last_error"]


def returns_one_number(config):
    return lambda module, args, output: (torch.zeros(1), output[1])


def returns_one_of_two(config):
    return lambda module, args, output: output[0] * 2
