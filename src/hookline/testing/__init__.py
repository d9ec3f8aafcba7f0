"""Check a hook of your own: ``hookline.testing.check_hook(MyHook)``, in a test."""

from __future__ import annotations

from hookline.testing.check_report import Finding, HookCheck
from hookline.testing.checking import check_hook
from hookline.testing.small_run import small_experiment

__all__ = ["Finding", "HookCheck", "check_hook", "small_experiment"]
