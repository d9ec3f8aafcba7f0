"""One policy for errors of hooks and sinks: count, go on or not, log the first, warn when it is safe."""

from __future__ import annotations

import logging
import warnings

import pytest

from hookline.error_policy import ErrorPolicy
from hookline.errors import GuardError, HooklineWarning, OptionError


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
