"""The errors: each is ours and a built-in one, says asked, found, next, has its section; and one policy."""

from __future__ import annotations

import inspect
import logging
import pickle
import re
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from helpers_modules import assert_untouched
from torch import nn

import hookline as hl
from hookline import errors
from hookline.error_policy import ErrorPolicy
from hookline.errors import GuardError, HooklineWarning, OptionError

BUILTINS = {
    "NoMatchError": (KeyError, LookupError),
    "TargetError": (ValueError,),
    "KindError": (ValueError,),
    "OptionError": (ValueError, TypeError),
    "MissingPackageError": (ValueError, TypeError, ImportError),
    "HookSignatureError": (TypeError,),
    "UnhookableError": (TypeError, RuntimeError),
    "HookReturnError": (RuntimeError,),
    "HookCheckError": (AssertionError,),
    "HooksLeftError": (AssertionError,),
    "ScopeError": (RuntimeError,),
    "CaptureError": (RuntimeError,),
    "CompareError": (ValueError,),
    "TraceError": (RuntimeError,),
    "GuardError": (RuntimeError,),
    "HookNameError": (ValueError,),
    "MetricError": (TypeError,),
    "LifecycleError": (RuntimeError,),
    "NotAllowedError": (PermissionError,),
    "ConfigError": (ValueError,),
    "CheckpointError": (RuntimeError,),
    "RankError": (RuntimeError,),
    "ResumeError": (RuntimeError,),
    "NonFiniteError": (FloatingPointError, ArithmeticError),
    "EngineBusy": (RuntimeError,),
    "EngineClosed": (RuntimeError,),
}


def make_model() -> nn.Module:
    model = nn.Sequential()
    model.add_module("inner", nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model.add_module("outer", nn.Linear(2, 2))
    return model


NAMES = [
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, hl.HooklineError | hl.HooklineWarning)
]
"""All errors and warnings."""


@pytest.mark.parametrize(("name", "builtins"), sorted(BUILTINS.items()))
def test_each_error_is_also_the_builtin_one_would_guess(name, builtins):
    """``except KeyError`` around a mistyped name does what it looks like."""
    error = getattr(errors, name)
    assert issubclass(error, hl.HooklineError)
    for builtin in builtins:
        assert issubclass(error, builtin)


def test_every_error_of_the_module_is_public_and_has_a_builtin():
    """No error class is missing from the table above."""
    assert set(NAMES) == set(BUILTINS) | {"HookNeverFired", "HooklineError", "HooklineWarning"}


@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_each_error_prints_its_sentence_unquoted_and_survives_pickling(name):
    """``str`` is the sentence, not its repr, also after a trip through another process."""
    error = getattr(errors, name)("No module matches 'a'.")
    assert str(error) == "No module matches 'a'."
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


@pytest.mark.parametrize("forgotten", ["inner", nn.Linear, (nn.Linear, nn.ReLU), re.compile("inner")])
def test_a_forgotten_hook_is_not_taken_for_one(forgotten):
    """``attach(model, nn.Linear)`` is an attach without a hook, not the class as a hook."""
    model = make_model()
    with pytest.raises(errors.HookSignatureError):
        hl.attach(model, forgotten)
    assert_untouched(model)


ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"


def test_every_error_has_its_section_and_every_section_its_error() -> None:
    sections = [line.removeprefix("## ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "## "]
    assert sections == sorted(NAMES, key=str.lower)


def test_an_error_leads_to_its_page_and_its_text_stays_as_it_is() -> None:
    """The address is a note, also of a class of somebody else's that derives from one of ours."""

    class Theirs(errors.OptionError):
        pass

    for name in NAMES:
        kind = getattr(errors, name)
        address = f"{errors.DOCUMENTATION}/errors.md#{name.lower()}"
        assert errors.help_line(kind) == f"See {address}"
        if issubclass(kind, errors.HooklineError):
            error = kind("what was asked")
            assert str(error) == "what was asked"
            assert traceback.format_exception_only(error)[-1] == f"See {address}\n"
    assert Theirs("x").__notes__ == [errors.help_line(errors.OptionError)]


def test_the_warning_of_a_hook_that_never_fired_leads_to_its_page() -> None:
    """In its text, as warnings have no notes."""
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    handle = hl.attach(model, "1", lambda module, args, output: None)
    model[0](torch.ones(1))
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    model(torch.ones(1))
    with pytest.warns(errors.HookNeverFired, match=errors.help_line(errors.HookNeverFired)):
        handle.remove()


def test_an_unknown_policy_is_refused():
    with pytest.raises(OptionError, match=r"on_error= is one of 'raise', 'warn', 'disable'; got 'ignore'\."):
        ErrorPolicy("ignore")


@pytest.mark.parametrize(("on_error", "goes_on", "disabled"), [("raise", 0, 0), ("warn", 1, 0), ("disable", 1, 1)])
def test_errors_are_counted_and_the_first_is_logged(on_error, goes_on, disabled, caplog):
    """Under "raise" nothing is logged unless a consequence is given; asking changes nothing."""
    policy = ErrorPolicy(on_error, logging.getLogger("policy"))
    assert policy.can_continue(ValueError("no")) is bool(goes_on)
    assert not policy.counts
    assert [policy.handle("a", ValueError("no"), "on 3") for _ in range(2)] == [bool(goes_on)] * 2
    assert policy.counts == {"a": 2}
    assert policy.last == {"a": "ValueError on 3: no"}
    assert policy.disabled == ({"a"} if disabled else set())
    assert caplog.text.count("Hook 'a' raised on 3; it ") == goes_on


def test_interrupts_and_broken_promises_always_raise():
    """An interrupt under every policy, a class of errors where asked for."""
    policy = ErrorPolicy("disable", always_raise=(GuardError,))
    assert not policy.handle("a", KeyboardInterrupt())
    assert not policy.handle("a", GuardError("changed"))
    assert policy.counts["a"] == 2
    assert not policy.disabled


def test_a_warning_waits_and_comes_once():
    """Where warnings are errors, those that are left come at the next call."""
    policy = ErrorPolicy()
    assert policy.warn_later("a", "first")
    assert not policy.warn_later("a", "again")
    policy.warn_later("b", "second")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HooklineWarning, match="first"):
            policy.warn_pending()
    with pytest.warns(HooklineWarning, match="second"):
        policy.warn_pending()
