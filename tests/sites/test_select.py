"""Selection: which modules a target means, under which names, in which order."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hookline as hl
from hookline.sites.targets import describe, select


class Block(nn.Module):
    """Two layers, one of them possibly somebody else's."""

    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp = nn.Linear(2, 2)
        self.norm = shared if shared is not None else nn.LayerNorm(2)


class Tower(nn.Module):
    """Twelve blocks that share a norm, a head, and a container within a container."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.LayerNorm(2)
        self.layers = nn.ModuleList(Block(shared) for _ in range(12))
        self.head = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
        self.x1 = nn.Identity()


def names(model: nn.Module, target: object = None, **options: object) -> list[str]:
    return [name for name, _ in select(model, target, **options)]


def test_nothing_selects_the_model_itself():
    """No target is the root, under the empty name."""
    model = Tower()
    assert select(model) == [("", model)]
    assert select(model, [None]) == [("", model)]


def test_a_regular_expression_has_to_match_the_whole_name():
    """A compiled pattern is matched like ``fullmatch``."""
    assert names(Tower(), re.compile(r"layers\.(3|11)")) == ["layers.3", "layers.11"]
    with pytest.raises(hl.errors.NoMatchError, match=r"re\.compile\('layer'\)"):
        select(Tower(), re.compile("layer"))


def test_a_module_of_another_model_is_refused():
    """An equal module elsewhere is not this one."""
    with pytest.raises(hl.errors.TargetError, match="another model"):
        select(Tower(), Tower().head)


def test_a_list_mixes_every_way_to_say_it_and_takes_each_module_once():
    """Overlapping elements do not select twice, and the order is the model's."""
    model = Tower()
    target = [model.head, "head.#", re.compile(r"head\.1"), nn.ReLU, lambda name, module: name == "x1"]
    assert names(model, target) == ["head", "head.0", "head.1", "head.2", "x1"]


@pytest.mark.parametrize("bad", ["nothing.*", nn.Conv2d, re.compile("nothing"), lambda name, module: False])
def test_every_element_of_a_list_has_to_match(bad):
    """One unmatched element makes the whole list fail, and the error is about that element."""
    with pytest.raises(
        hl.errors.NoMatchError, match=re.escape(describe(bad)) if not isinstance(bad, type) else "Conv2d"
    ):
        select(Tower(), ["head", bad])


@pytest.mark.parametrize("empty", [[], (), set()])
def test_an_empty_list_is_refused(empty):
    """Nothing to select by is an error, not everything and not nothing."""
    with pytest.raises(hl.errors.TargetError, match="empty"):
        select(Tower(), empty)


@pytest.mark.parametrize("thing", [3, 2.5, object(), b"head", {"head": 1}])
def test_something_that_is_no_target_is_refused(thing):
    """The error shows the thing and lists what a target can be."""
    with pytest.raises(hl.errors.TargetError, match=r"is no target; give a name"):
        select(Tower(), thing)


@pytest.mark.parametrize("nothing", [None, [], (), set(), frozenset()], ids=repr)
def test_exclude_may_be_empty(nothing):
    """A list that a program has made may have nothing in it."""
    assert names(Tower(), "head.*", exclude=nothing) == names(Tower(), "head.*")


def test_exclude_of_everything_is_an_error_that_says_so():
    """If nothing is left, the error blames exclude and not the target."""
    with pytest.raises(hl.errors.NoMatchError, match=r"exclude=.* takes all"):
        select(Tower(), "head.#", exclude="*")


PARTS = st.sampled_from(["a", "b", "0", "1", "12", "ab", "a[", "weird-name", "é"])
PATTERNS = st.text(alphabet="ab012.*?[]!-é", max_size=8)


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """A small tree whose subtrees may be shared."""
    pool: list[nn.Module] = [nn.Identity()]
    for _ in range(draw(st.integers(1, 5))):
        children = draw(st.dictionaries(PARTS, st.integers(0, len(pool) - 1), max_size=3))
        module = nn.Module()
        for name, index in children.items():
            module.add_module(name, pool[index])
        pool.append(module)
    return pool[-1]


@settings(deadline=None, max_examples=300)
@given(model=models(), pattern=PATTERNS)
def test_a_glob_selects_what_fnmatch_selects_over_all_names(model, pattern):
    """Without ``#`` the grammar is exactly fnmatch over every alias name, each module once."""
    expected = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if fnmatch.fnmatchcase(name, pattern):
            expected.setdefault(id(module), name)
    if not expected:
        with pytest.raises(hl.errors.NoMatchError):
            select(model, pattern)
    else:
        assert {id(module): name for name, module in select(model, pattern)} == expected


@settings(deadline=None, max_examples=200)
@given(model=models(), parts=st.lists(st.sampled_from(["#", "a", "b", "*", "ab"]), min_size=1, max_size=4))
def test_a_hash_selects_what_a_regular_expression_for_digits_selects(model, parts):
    """With ``#`` as whole parts, the result is that of the same pattern with ``[0-9]+`` in their place."""
    regex = re.compile(r"\.".join({"#": "[0-9]+", "*": ".*"}.get(part, part) for part in parts), re.DOTALL)
    expected = {id(module) for name, module in model.named_modules(remove_duplicate=False) if regex.fullmatch(name)}
    try:
        found = {id(module) for _, module in select(model, ".".join(parts))}
    except hl.errors.NoMatchError:
        found = set()
    assert found == expected


@settings(deadline=None, max_examples=100)
@given(model=models(), target=PATTERNS, exclude=PATTERNS)
def test_exclude_is_a_difference_of_modules(model, target, exclude):
    """What stays is what the target selects without any module that exclude reaches by any name."""

    def matched(pattern: str) -> set[int]:
        every = model.named_modules(remove_duplicate=False)
        return {id(module) for name, module in every if fnmatch.fnmatchcase(name, pattern)}

    try:
        found = {id(module) for _, module in select(model, target, exclude=exclude)}
    except hl.errors.NoMatchError:
        found = set()
    assert found == matched(target) - matched(exclude)
