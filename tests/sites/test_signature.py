"""What a hook can take and give back, told before it runs."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.sites.kinds import Kind
from hookline.sites.signature import check_hook, hook_name, may_return_value, what_it_reads

# -- what it can take ----------------------------------------------------------------------------------------


def exact(module, args, output): ...
def with_default(module, args, output, tag="x"): ...
def positional(*args): ...
def anything(*args, **kwargs): ...
def with_site(module, args, output, *, site): ...
def with_optional_site(module, args, output, *, site=None): ...
def positional_only(a, b, c, /): ...


class Method:
    """Callable in several ways."""

    def __call__(self, module, args, output): ...
    def bound(self, module, args, output): ...
    @staticmethod
    def static(module, args, output): ...
    @classmethod
    def of_class(cls, module, args, output): ...


FITTING = [
    exact,
    with_default,
    positional,
    anything,
    positional_only,
    Method(),
    Method().bound,
    Method.static,
    Method.of_class,
    lambda m, a, o: None,
    functools.partial(anything, tag=1),
    functools.partial(lambda first, m, a, o: None, 0),
    mock.Mock(),
    print,
]


@pytest.mark.parametrize("hook", FITTING)
def test_a_hook_that_fits_is_taken_and_gets_no_site(hook):
    """Whatever can be called with the three arguments passes, and only a declared site is given."""
    assert check_hook(hook, Kind.FORWARD, with_kwargs=False) is False


@pytest.mark.parametrize("hook", [with_site, with_optional_site, functools.partial(with_site)])
def test_a_keyword_only_site_is_noticed(hook):
    """The declaration decides, default or not, partial or not."""
    assert check_hook(hook, Kind.FORWARD, with_kwargs=False) is True


@pytest.mark.parametrize(
    "hook",
    [
        lambda m, a: None,
        lambda m, a, o, more: None,
        lambda m, a, o, *, tag: None,
        lambda: None,
        functools.partial(exact, 1),
        functools.partial(exact, output=1),
        Method.bound,
    ],
)
def test_a_hook_that_does_not_fit_is_refused_with_its_signature(hook):
    """The message holds the hook's own signature, the kind, and how it would be called."""
    with pytest.raises(hl.errors.HookSignatureError) as caught:
        check_hook(hook, Kind.FORWARD, with_kwargs=False)
    text = str(caught.value)
    assert re.search(r"\(.*\) cannot be a forward hook: it is called as hook\(module, args, output\)", text)
    assert hook_name(hook) in text


@pytest.mark.parametrize(
    ("kind", "names"), [(Kind.FORWARD_PRE, "module, args, kwargs"), (Kind.FORWARD, "module, args, kwargs, output")]
)
def test_with_kwargs_adds_one_argument_before_the_output(kind, names):
    """The place of kwargs is torch's."""
    with pytest.raises(hl.errors.HookSignatureError, match=re.escape(f"hook({names})")):
        check_hook(lambda: None, kind, with_kwargs=True)
    check_hook(eval(f"lambda {names}: None"), kind, with_kwargs=True)


# -- what it can give back -----------------------------------------------------------------------------------


def made(body: str, head: str = "def hook(m, gi, go)") -> Any:
    """Return a hook with that body."""
    space: dict[str, Any] = {"torch": torch}
    exec(f"{head}:\n" + "\n".join(f"  {line}" for line in body.split("\n")), space)
    return space["hook"]


class Methods:
    """Callable in several ways, and gives what it is told to."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def quiet(self, m, gi, go):
        print(gi)

    def giving(self, m, gi, go):
        return gi


class Silent:
    """Callable, gives nothing."""

    def __call__(self, m, gi, go):
        print(gi)


says_nothing = made("gi[0].sum()")
_SEEN: list[object] = []
# a lambda has no other way to say that it gives None than to end with a call that is known to
SILENT = [
    says_nothing,
    lambda m, gi, go: _SEEN.append(go),
    lambda m, gi, go: _SEEN.append(go.norm()),
    lambda m, gi, go, *, site: {}[site.name].append((go, gi[0])),
    lambda m, gi, go: print(go.shape, len(gi)),
    lambda m, gi, go: setattr(m, "seen", go),
    lambda m, gi, go: logging.getLogger("x").info("%s", go),
    *map(made, ["if gi: return\ngi[0].sum()", "if gi: return None\nreturn None", "raise ValueError"]),
    made("def inner(): return 3\ninner()"),
    made("for g in gi:\n  try:\n    g.sum()\n  except RuntimeError: return\n  finally: print()"),
    made("match gi:\n  case (a,): print(a)\n  case _: return"),
    lambda m, gi, go: None,
    Silent(),
    functools.partial(functools.partial(Methods(1).quiet)),
    torch.inference_mode()(torch.enable_grad()(says_nothing)),
]
GIVING = [
    *map(made, ["return gi", "if gi: return gi", "return gi or None", "return gi and None", "return 3", "yield None"]),
    *map(made, ["return None if gi else gi", "return gi if gi else None", "r = None\nfor r in gi: pass\nreturn r"]),
    made("try: return None\nfinally: return gi"),
    made("try: print()\nexcept ValueError: return gi"),
    made("match gi:\n  case (a,): return (a,)\n  case _: return None"),
    made("return None", "async def hook(m, gi, go)"),
    functools.wraps(says_nothing)(lambda *args: says_nothing(*args)),
    lambda m, gi, go: gi,
    lambda m, gi, go: repr(gi),
    lambda m, gi, go: go.add(1),
    lambda m, gi, go: _SEEN.append(go) or go,
    lambda m, gi, go: go if _SEEN else None,
    lambda m, gi, go: id(_SEEN.append(go)),
    functools.partial(Methods(1).giving),
    functools.lru_cache(says_nothing),
    Silent,
    print,
    [].append,
    nn.ReLU(),
    mock.Mock(return_value=None),
]


@pytest.mark.parametrize(("hook", "may"), [*((each, False) for each in SILENT), *((each, True) for each in GIVING)])
def test_whether_a_hook_may_give_something_is_read_off_its_code(hook, may):
    """In doubt it may: missing an edit would be worse than an extra node in the graph."""
    assert may_return_value(hook) is may


def test_what_a_hook_looks_at_is_read_off_its_code():
    """The compiler need not keep the rest; where the code does not tell, everything."""

    def output_only(module, args, output):
        return output

    def nothing(module, args, output): ...
    def inside(module, args, output):
        return lambda: args

    def by_name(module, args, output):
        return locals()

    def everything(module, *rest): ...
    def with_kwargs(module, args, kwargs, output):
        return kwargs

    class Callable:
        def __call__(self, module, args, output):
            return args

    found = [what_it_reads(hook, with_kwargs=False) for hook in (output_only, nothing, inside, by_name, everything)]
    assert found == ["o", "", "a", "ao", "ao"]
    assert what_it_reads(with_kwargs, with_kwargs=True) == "k"
    assert what_it_reads(Callable(), with_kwargs=False) == "a"
    assert what_it_reads(print, with_kwargs=False) == "ao"
