"""Which functions a target means, and what is said of one that means none."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_functions import Pair, Scale, label, modes, patched_classes, sin_product
from torch import nn
from torch.overrides import get_overridable_functions

import hookline as hl

HERE = "helpers_functions"


def chosen(target: Any, **options: Any) -> list[str]:
    """The names of the functions that a hook would be put on."""
    handle = hl.attach_function(target, lambda fn, inputs, outputs: None, **options)
    handle.remove(quiet=True)
    return list(handle.names)


# -- functions of torch ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.mm, "torch.mm"),
        (torch.Tensor.matmul, "torch.Tensor.matmul"),
        (torch.relu, "torch.relu"),
        (F.relu, "torch.nn.functional.relu"),
        (F.softmax, "torch.nn.functional.softmax"),
        (torch.linalg.inv, "torch.linalg.inv"),
        (torch.fft.fft, "torch.fft.fft"),
        (torch.nn.init.normal_, "torch.nn.init.normal_"),
        (torch.randn, "torch.randn"),
        (F.scaled_dot_product_attention, "torch.nn.functional.scaled_dot_product_attention"),
        (torch.Tensor.__getitem__, "torch.Tensor.__getitem__"),
    ],
)
def test_a_function_and_its_name_mean_the_same(function: Any, name: str) -> None:
    """By object and by name the same one function is chosen, under the name a user would write."""
    assert chosen(function) == chosen(name) == [name]


RELUS = {"torch.nn.functional.relu", "torch.relu", "torch.Tensor.relu"}
MM = {f"aten.mm.{overload}" for overload in torch.ops.aten.mm.overloads()}
SIN_PRODUCT = "hookline_test.sin_product.default"
CLASSES = {f"{HERE}.Pair", f"{HERE}.Scale"}


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("*.relu", RELUS),
        ("*.mm", {"torch.mm", "torch.Tensor.mm"}),
        ("torch.m[mv]", {"torch.mm", "torch.mv"}),
        ("torch.nn.functional.*_softmax", {"torch.nn.functional.log_softmax", "torch.nn.functional.gumbel_softmax"}),
        (re.compile(r"torch\.(mm|bmm)"), {"torch.mm", "torch.bmm"}),
        ([torch.mm, "torch.bmm"], {"torch.mm", "torch.bmm"}),
        ([torch.mm, "torch.mm", re.compile("torch.mm")], {"torch.mm"}),
        # one overload of an operator, all of them, and an operator of one's own
        (torch.ops.aten.mm.default, {"aten.mm.default"}),
        ("aten.mm.default", {"aten.mm.default"}),
        ("aten::mm.default", {"aten.mm.default"}),
        (torch.ops.aten.mm, MM),
        ("aten.mm", MM),
        (sin_product, {SIN_PRODUCT}),
        ("hookline_test.sin_product", {SIN_PRODUCT}),
        ("hookline_test::sin_product", {SIN_PRODUCT}),
        ("hookline_test.*", {SIN_PRODUCT}),
        # classes, and all levels in one list
        (Pair, {f"{HERE}.Pair"}),
        (f"{HERE}.Pair", {f"{HERE}.Pair"}),
        ("*.Pair", {f"{HERE}.Pair"}),
        (f"{HERE}.P*", {f"{HERE}.Pair"}),
        (re.compile(rf"{HERE}\.Pair"), {f"{HERE}.Pair"}),
        ([Pair], {f"{HERE}.Pair"}),
        ([Pair, Scale], CLASSES),
        ((Pair, Scale), CLASSES),
        (f"{HERE}.*", CLASSES),
        (
            [torch.mm, "aten.mm.default", sin_product, Pair],
            {"torch.mm", "aten.mm.default", SIN_PRODUCT, f"{HERE}.Pair"},
        ),
    ],
    ids=label,
)
def test_an_object_a_name_a_glob_a_regular_expression_or_a_list_chooses(target: Any, names: set[str]) -> None:
    """Each function once; a glob and a regular expression have to match a name whole."""
    found = chosen(target)
    assert set(found) == names
    assert len(found) == len(names)


def test_the_glob_over_functional_takes_every_public_function_of_it() -> None:
    """Every name in torch.nn.functional that torch lists as overridable, and nothing from elsewhere."""
    listed = {
        f"torch.nn.functional.{function.__name__}"
        for function in get_overridable_functions()[F]
        if getattr(F, function.__name__, None) is function and function.__name__[0] != "_"
    }
    assert len(listed) > 80
    found = set(chosen("torch.nn.functional.*"))
    assert listed <= found
    assert {name for name in found if not name.startswith("torch.nn.functional.")} == set()
    assert {"torch.nn.functional.linear", "torch.nn.functional.conv2d", "torch.nn.functional.embedding"} <= found


def test_private_functions_and_attributes_come_only_when_asked_for() -> None:
    """A star means functions; torch._foo and the reads of attributes have to be named."""
    everything = chosen("*")
    assert not [name for name in everything if name.rpartition(".")[2] in ("__get__", "__set__", "__delete__")]
    assert not [name for name in everything if re.match(r"_[^_]", name.rpartition(".")[2])]
    assert chosen("torch.Tensor.shape.__get__") == ["torch.Tensor.shape.__get__"]
    assert len(chosen("torch._softmax*")) >= 1


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (F.relu, {"torch.relu", "torch.Tensor.relu"}),
        ("torch.nn.*", {"torch.relu", "torch.Tensor.relu"}),
        (["torch.relu", torch.Tensor.relu], {"torch.nn.functional.relu"}),
        (re.compile(r".*Tensor.*"), {"torch.relu", "torch.nn.functional.relu"}),
        ([], RELUS),
        ((), RELUS),
        (set(), RELUS),
        (None, RELUS),
        ("torch.mm", RELUS),
    ],
    ids=label,
)
def test_exclude_takes_functions_away(exclude: Any, left: set[str]) -> None:
    """In the same grammar as the target."""
    assert set(chosen("*.relu", exclude=exclude)) == left


# -- what is refused ---------------------------------------------------------------------------------------


def user_function(x: torch.Tensor) -> torch.Tensor:
    return x


REFUSED: list[tuple[Any, type, str]] = [
    ("torch.nn.functional.rleu", hl.errors.NoMatchError, "'torch.nn.functional.relu'"),
    ("torch.matmull", hl.errors.NoMatchError, "'torch.matmul'"),
    ("*.sofmax", hl.errors.NoMatchError, "softmax"),
    ("softmax", hl.errors.NoMatchError, "nearest: '*.softmax'"),
    ("aten.mmm", hl.errors.NoMatchError, "'aten.mm'"),
    ("torch.ops.aten.sofmax", hl.errors.NoMatchError, "nearest: 'aten.softmax'"),
    ("aten.no_such_operator*", hl.errors.NoMatchError, "'aten.no_such_operator*'"),
    ("hookline_test.sin_produkt", hl.errors.NoMatchError, "'hookline_test.sin_product'"),
    (f"{HERE}.Pear", hl.errors.NoMatchError, f"'{HERE}.Pair'"),
    ("nothing.at.all.*", hl.errors.NoMatchError, "'nothing.at.all.*'"),
    (re.compile("torch.m"), hl.errors.NoMatchError, "re.compile('torch.m')"),
    (["torch.mm", "torch.nope"], hl.errors.NoMatchError, "'torch.nope'"),
    ([torch.mm, "aten.mm.default", Pair, "aten.nope"], hl.errors.NoMatchError, "'aten.nope'"),
    (math.sin, hl.errors.UnhookableError, "sin is not a function that torch lets be overridden"),
    (user_function, hl.errors.UnhookableError, "user_function is not a function"),
    (functools.partial(user_function), hl.errors.UnhookableError, "functools.partial"),
    (nn.Linear, hl.errors.TargetError, "Linear is no function: for modules, use hookline.attach"),
    ([], hl.errors.TargetError, "give a function, or a name or glob"),
    ([torch.mm, Pair, "aten.mm.default", math.sin], hl.errors.UnhookableError, "sin"),
    (nn.Linear(2, 2), hl.errors.TargetError, "the given Linear is no function"),
    ("", hl.errors.TargetError, "empty"),
    (re.compile(""), hl.errors.TargetError, "empty"),
    (["torch.mm", ""], hl.errors.TargetError, "empty"),
    (None, hl.errors.TargetError, "None is no function"),
    (3, hl.errors.TargetError, "3 is no function"),
    (torch.autograd.Function, hl.errors.TargetError, "the base of all"),
]


@pytest.mark.product(1, case=REFUSED, kind=["forward_pre", "backward"])
def test_a_bad_target_is_refused_and_nothing_is_attached(case: tuple[Any, type, str], kind: str) -> None:
    """Asked, found, next; and no mode or class is touched, also where other targets of the list were good."""
    target, error, says = case
    before = modes()
    with pytest.raises(error) as raised:
        hl.attach_function(target, lambda fn, *tensors: None, on=kind)
    assert says in str(raised.value)
    assert modes() == before
    assert patched_classes() == []
