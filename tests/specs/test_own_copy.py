"""Configurations are copied: a factory or a hook that writes into its own changes nobody else's."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.plain import own_copy
from hookline.specs.apply_specs import register_hooks
from hookline.specs.hook_spec import HookSpec

SEEN: list[object] = []


def greedy(config):
    """A factory that keeps what it is given, and writes into it."""
    SEEN.append(copy.deepcopy(config))
    config["layers"].append("mine")
    config["options"]["deep"]["list"].clear()
    config["new"] = True
    return lambda module, args, output: None


def given() -> dict:
    return {"layers": [1, 2], "options": {"deep": {"list": [3]}}}


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2))


# -- specs -----------------------------------------------------------------------------------------------------


def test_a_factory_that_writes_into_its_configuration_changes_no_spec():
    """Attached twice, it is given the same twice, and the spec says what it said."""
    spec = HookSpec("a", ["0"], greedy, given())
    for _ in range(2):
        register_hooks(model(), [spec]).remove(quiet=True)
    assert [given(), given()] == SEEN
    assert spec.config == given()
    assert spec == HookSpec("a", ["0"], greedy, given())


def test_dictionaries_of_a_caller_are_only_read():
    """Neither they nor what lies in them is written into, whoever writes later."""
    specs = [{"target_modules": ["0"], "hook_factory": greedy, "config": given()}]
    before = copy.deepcopy(specs)
    register_hooks(model(), specs).remove(quiet=True)
    args = hl.sglang.ServerArgs(enable_hooks=True, hooks=specs)
    runner = hl.sglang.ModelRunner(model(), args)
    runner.initialize()
    runner.hook_handles.remove(quiet=True)
    assert specs == before == args.hooks
    args.hook_specs()[0]["config"]["layers"].append(3)
    specs[0]["config"]["layers"].append(4)
    assert args.hooks == before


# -- hooks over time -------------------------------------------------------------------------------------------


class Greedy(hl.TrainingHook):
    """Writes into what it is made with."""

    name = "greedy_test_hook"
    hook_points = frozenset({hl.HookPoint.POST_EPOCH})

    def __init__(self, layers=(), weights=None):
        self.was, self.weights = list(layers), weights
        layers.append("mine")

    def compute(self, ctx):
        return {}


def test_hooks_over_time_are_made_with_copies():
    """By a manager and by the registry; two that share a configuration do not see each other's writes."""
    weights = torch.zeros(2)
    config = {"greedy_test_hook": {"layers": [1], "weights": weights}}
    for _ in range(2):
        (hook,) = hl.HookManager(hooks=[Greedy], hook_config=config).hooks.values()
        assert (hook.was, hook.weights is weights) == ([1], True)
    assert config["greedy_test_hook"]["layers"] == [1]


# -- the copy itself -------------------------------------------------------------------------------------------


def test_containers_are_copied_as_what_they_are():
    """Of the standard library's, each stays one of its class; others are objects."""
    point = namedtuple("point", "x y")
    value = {
        "ordered": OrderedDict(a=[1]),
        "default": defaultdict(list, a=[1]),
        "named": point([1], 2),
        "tuple": ([1],),
        "set": {1},
        "proxy": MappingProxyType({"a": [1]}),
        "object": nn.ModuleDict(),
    }
    made = own_copy(value)
    assert made == value
    assert [type(each) for each in made.values()] == [
        OrderedDict,
        defaultdict,
        point,
        tuple,
        set,
        dict,
        nn.ModuleDict,
    ]
    assert made["default"]["new"] == []
    assert made["object"] is value["object"]
    for key, inner in (("ordered", "a"), ("default", "a"), ("named", 0), ("tuple", 0), ("proxy", "a")):
        assert made[key][inner] is not value[key][inner]
    assert made["set"] is not value["set"]


def test_brackets_without_end_are_an_error_in_words():
    """Not one of Python's stack; a ring has none either."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    ring: list[object] = []
    ring.append(ring)
    for endless in (deep, ring):
        with pytest.raises(hl.errors.OptionError, match="nested too deeply"):
            HookSpec(config={"endless": endless})
