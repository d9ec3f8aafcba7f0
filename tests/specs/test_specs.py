"""Specs: what they may say, what becomes of it on real models, and that configurations are copied."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.plain import own_copy
from hookline.specs.apply_specs import close_hooks, find_sites, hooks_of, register_hooks
from hookline.specs.hook_spec import HookSpec


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))


def collecting(seen):
    """A factory of hooks that note where they were called, in which forward."""

    def factory(config):
        def hook(*args, site):
            seen.append((site.name, site.step))

        return hook

    return factory


X = torch.linspace(-1, 1, 12).reshape(3, 4)


# -- what a spec may say ---------------------------------------------------------------------------------------


def test_a_dictionary_becomes_a_spec_and_null_is_left_out():
    made = HookSpec.from_dict(
        {"name": None, "target_modules": ["a", "b"], "hook_factory": "m:f", "config": None, "every": None}
    )
    assert made == HookSpec(target_modules=["a", "b"], hook_factory="m:f")
    assert (made.name, made.target_modules, dict(made.config)) == ("", ("a", "b"), {})
    assert (made.on, made.observe, made.enabled, made.on_error) == ("forward", False, True, "raise")
    assert HookSpec(target_modules="layers.*").target_modules == ("layers.*",)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"target_module": ["a"]}, "no 'target_module'. Did you mean 'target_modules'"),
        ({"target_modules": [1]}, "target_modules.0: expected a valid string, got 1."),
        ({"target_modules": {"a": 1}}, "patterns come in a list"),
        ({"hook_factory": 3}, "hook_factory is a path"),
        ({"on": "forwards"}, "No kind 'forwards'. Nearest: 'forward'"),
        ({"observe": "yes"}, "observe: expected a valid boolean"),
        ({"every": 0}, "every: expected greater than or equal to 1, got 0."),
        ({"every": 2, "on": "state_dict_pre"}, "every counts forwards"),
        ({"on_error": "ignore"}, "on_error: expected 'raise', 'warn' or 'disable'"),
        ({"observe": True, "on": "param_grad"}, "observe= does not go with"),
        ("layers.*", "A hook spec is an object"),
    ],
)
def test_what_it_may_not_say_is_an_error_that_says_so(data, words):
    with pytest.raises(hl.HooklineError) as caught:
        HookSpec.from_dict(data)
    assert words in str(caught.value)
    assert str(caught.value).endswith(".")
    assert isinstance(caught.value, ValueError)
    if isinstance(data, dict):  # also where it is made in Python
        with pytest.raises(type(caught.value)):
            HookSpec(**data)


async def _later(*args):
    return None


def _one_by_one(module, inputs, output):
    yield output


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda config: 3, "has to be callable, got 3"),
        (lambda config: lambda module, output: None, "cannot be a forward hook"),
        ("os:sep", "Hook factory 'os:sep' is called with a config, and is a str."),
        (_later, "is async: it gives no hook, but a promise of one"),
        (lambda config: _later, "_later is async or a generator"),
        (lambda config: _one_by_one, "_one_by_one is async or a generator"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_before_any_is_on(factory, words):
    model, seen = small(), []
    specs = [
        HookSpec(target_modules=["0"], hook_factory=collecting(seen)),
        HookSpec(target_modules=["1"], hook_factory=factory),
    ]
    with pytest.raises(hl.errors.HookSignatureError) as caught:
        register_hooks(model, specs)
    assert words in str(caught.value)
    hl.assert_no_hooks(model, foreign=True)


def test_a_module_that_refuses_takes_the_others_off_again():
    """Found out only when the hook is being put on: a parameter that is not there yet."""
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2)), []
    specs = [
        HookSpec(target_modules=["0"], hook_factory=collecting(seen)),
        HookSpec(target_modules=["1"], on="param_grad", hook_factory=collecting(seen)),
    ]
    with pytest.raises(hl.errors.UnhookableError, match="lazy") as caught:
        register_hooks(model, specs)
    assert "This is about hook spec 1." in caught.value.__notes__
    hl.assert_no_hooks(model)


def test_only_allowed_paths_are_followed_and_a_given_function_is_no_path():
    model = small()
    by_path = HookSpec(target_modules=["0"], hook_factory="os:getenv")
    with pytest.raises(hl.HooklineError, match="'os:getenv' is not allowed") as caught:
        register_hooks(model, [by_path], allow=["my_project"])
    assert isinstance(caught.value, PermissionError)
    given = HookSpec(target_modules=["0"], hook_factory=lambda config: lambda m, i, o: None)
    register_hooks(model, [given], allow=[]).remove(quiet=True)


# -- where it goes ---------------------------------------------------------------------------------------------


def test_exclude_and_enabled():
    model, seen = small(), []
    factory = collecting(seen)
    specs = [
        HookSpec(target_modules=["*"], exclude=["2*", ""], hook_factory=factory),
        HookSpec(target_modules=["3"], hook_factory="no_such_package:f", enabled=False),
    ]
    with register_hooks(model, specs) as handles:
        model(X)
    assert len(handles) == 1
    assert [name for name, _ in seen] == ["0", "1", "3"]


def test_all_of_it_excluded_is_no_match(caplog):
    model = small()
    spec = HookSpec("all", ["0"], lambda config: lambda m, i, o: None, exclude=["0"])
    assert len(register_hooks(model, [spec])) == 0
    assert caplog.messages == ["No modules matched hook spec 'all' patterns=['0']"]
    with pytest.raises(hl.errors.NoMatchError, match="exclude"):
        register_hooks(model, [spec], strict=True)


def test_strict_wants_every_pattern_to_match():
    model = small()
    spec = HookSpec("some", ["0", "00"], lambda config: lambda m, i, o: None)
    register_hooks(model, [spec]).remove(quiet=True)
    with pytest.raises(hl.errors.NoMatchError, match="'00'"):
        register_hooks(model, [spec], strict=True)


def test_other_kinds():
    model, calls = small(), []
    specs = [
        HookSpec("pre", ["0"], lambda c: lambda m, inputs: calls.append("pre"), on="forward_pre"),
        HookSpec("back", ["0"], lambda c: lambda m, gi, go: calls.append("back"), on="backward"),
        HookSpec("grads", ["*.bias", "nope"], lambda c: lambda p: calls.append("grad"), on="param_grad", exclude=["3"]),
        HookSpec("relu", ["*.relu"], lambda c: lambda fn, i, o: calls.append(fn.name), on="function_forward"),
        HookSpec("none", ["*.relux"], lambda c: lambda fn, i, o: None, on="function_forward"),
    ]
    with register_hooks(model, specs) as handles:
        model(X).sum().backward()
    assert [handle.name for handle in handles] == ["pre", "back", "grads", "relu"]
    assert sorted(calls) == ["back", "grad", "grad", "pre"] + ["torch.nn.functional.relu"] * 2
    hl.assert_no_hooks(model, foreign=True)


def test_where_it_would_go_can_be_asked():
    model = small()
    for spec, names in [
        (HookSpec(target_modules=["2.*", "0"]), ["0", "2.0", "2.1"]),
        (HookSpec(target_modules=["2"], on="param_grad"), ["2.0.weight", "2.0.bias"]),
        (HookSpec(target_modules=["torch.nn.functional.gelu"], on="function_forward"), ["torch.nn.functional.gelu"]),
    ]:
        assert find_sites(model, spec).names == names
    assert find_sites(model, HookSpec(target_modules=["layers.*"])) is None
    hl.assert_no_hooks(model, foreign=True)


# -- in which forwards, and what if it raises -------------------------------------------------------------------


@pytest.mark.parametrize("on", ["forward_pre", "forward", "backward_pre", "backward", "param_grad", "function_forward"])
def test_every_counts_forwards_of_the_model(on):
    model, seen = small(), []

    def factory(config):
        return lambda *args: seen.append(steps)

    where = "*.relu" if on.startswith("function") else "3.bias" if on == "param_grad" else "3"
    with register_hooks(model, [HookSpec(target_modules=[where], hook_factory=factory, on=on, every=3)]):
        for steps in range(7):  # noqa: B007  (the hook reads it)
            model(X).sum().backward()
    assert sorted(set(seen)) == [0, 3, 6]
    assert len(seen) == (6 if on.startswith("function") else 3)


@pytest.mark.parametrize("on", ["forward_pre", "forward", "backward_pre", "backward", "param_grad", "function_forward"])
def test_a_receipt_counts_the_turns_and_not_the_forwards(on):
    """Neither those that every leaves out, nor those after it was switched off; and it does not say it never fired."""
    model = small()
    where = ["*.relu"] if on.startswith("function") else ["0", "3"]

    def raising_at_three(config):
        def hook(*args):
            if steps == 3:
                raise ZeroDivisionError

        return hook

    specs = [HookSpec("third", where, lambda c: lambda *args: None, on=on, every=3)]
    specs += [HookSpec("off", where, raising_at_three, on=on, on_error="disable")]
    handles = register_hooks(model, specs)
    assert [(receipt.fired, receipt.last_step) for receipt in handles.report()] == [(0, None)] * 2
    for steps in range(6):  # noqa: B007  (the hook reads it)
        model(X).sum().backward()
    third, off = handles.report()
    each = 4 if on == "param_grad" else 2
    assert (third.fired, third.last_step) == (2 * each, 3)
    assert (off.fired, off.last_step) == (3 * each + 1, 3)
    assert sum(site.fired for site in third.sites) == third.fired
    handles.remove()


def test_every_lets_an_edit_through_in_those_forwards_alone():
    model = small()
    plain = model(X)
    with register_hooks(model, [HookSpec("twice", ["3"], lambda c: lambda m, i, o: o * 2, every=2)]):
        outputs = [model(X) for _ in range(4)]
    assert [torch.equal(output, plain * 2) for output in outputs] == [True, False, True, False]
    assert torch.equal(outputs[1], plain)


@pytest.mark.parametrize("on", ["forward", "backward"])
def test_every_goes_by_the_calls_of_a_part_that_is_called_without_its_model(on):
    """Of eleven calls the first and the eleventh are due, the tenth is not; a forward of the model is the next step."""
    model, seen, due_at = small(), [], []
    with register_hooks(model, [HookSpec("part", ["2.0"], collecting(seen), on=on, every=10)]):
        for call in range(1, 12):
            before = len(seen)
            model[2](X).sum().backward()
            due_at += [call] * (len(seen) - before)
        for _ in range(10):
            model(X).sum().backward()
    assert due_at == [1, 11]
    assert seen == [("2.0", 0), ("2.0", 10), ("2.0", 20)]


@pytest.mark.parametrize(("policy", "fired"), [("warn", 3), ("disable", 1)])
def test_an_error_is_logged_once_and_the_forward_goes_on(caplog, policy, fired):
    model, calls = small(), []

    def factory(config):
        def hook(module, inputs, output):
            calls.append(1)
            raise ZeroDivisionError("by hand")

        return hook

    plain = model(X)
    with register_hooks(model, [HookSpec("bad", ["3"], factory, on_error=policy)]):
        for _ in range(3):
            assert torch.equal(model(X), plain)
    assert len(calls) == fired
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "Hook 'bad' raised on 3" in caplog.text
    assert "ZeroDivisionError: by hand" in caplog.text


# -- closed when they are done with ----------------------------------------------------------------------------


class Closing:
    """A hook that has something to write at its end."""

    def __init__(self, config):
        self.closed = 0
        config["made"](self)  # a function: a list in a configuration is a copy

    def __call__(self, module, inputs, output):
        pass

    def close(self):
        self.closed += 1
        if self.closed > 1:
            raise OSError("closed twice")


def test_what_was_made_and_is_not_attached_is_closed(caplog):
    """By a spec that matches nothing, and by a list of which a later one fails; what is attached is left alone."""
    model, made = small(), []
    there = HookSpec("there", ["0"], Closing, {"made": made.append})
    nowhere = HookSpec("nowhere", ["00"], Closing, {"made": made.append}, on_error="warn")
    with register_hooks(model, [there, nowhere]):
        assert [hook.closed for hook in made] == [0, 1]
    made.clear()
    with pytest.raises(ModuleNotFoundError):
        register_hooks(model, [there, HookSpec("bad", ["0"], "no_such_package:f")])
    assert [hook.closed for hook in made] == [1]
    hl.assert_no_hooks(model, foreign=True)


def test_a_hook_of_two_specs_is_closed_with_the_last(caplog):
    """One that cannot be closed is logged, and the others go on."""
    model, made = small(), []
    shared, other = Closing({"made": made.append}), Closing({"made": made.append})
    specs = [HookSpec(str(place), [place], lambda config: shared) for place in ("0", "00")]
    handles = register_hooks(model, [*specs, HookSpec("other", ["1"], lambda config: other, every=2)])
    assert shared.closed == 0  # it is on "0", though nowhere is "00"
    assert hooks_of(handles) == [shared, other]
    shared.closed = 1
    close_hooks([*hooks_of(handles), shared])
    assert (shared.closed, other.closed) == (2, 1)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "Closing hook 'Closing' raised; what it had not written may be lost"
    ]
    handles.remove(quiet=True)


# -- compiled, and inert ---------------------------------------------------------------------------------------


def test_compiled_observers_keep_their_turns():
    seen = []
    model = torch.compile(small(), backend="aot_eager", fullgraph=True)
    model(X)
    with register_hooks(model, [HookSpec("look", ["2.0"], collecting(seen), observe=True, every=2)]):
        for _ in range(4):
            model(X)
    assert seen == [("2.0", 0), ("2.0", 2)]


def test_a_compiled_edit_with_turns_is_refused_and_says_what_to_do():
    model = torch.compile(small(), backend="aot_eager", fullgraph=True)
    specs = [HookSpec("twice", ["3"], lambda c: lambda m, i, o: o * 2, every=2)]
    with register_hooks(model, specs) as handles:
        with pytest.raises(Exception, match="'twice' edits, and has every=2"):
            model(X)
        handles.remove(quiet=True)
    torch._dynamo.reset()


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
    assert [type(each) for each in made.values()] == [OrderedDict, defaultdict, point, tuple, set, dict, nn.ModuleDict]
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
