"""For those who write hooks: whether a hook does what hooks promise.

Asked by tests of theirs: ``hookline.testing.check_hook(MyHook)``.
"""

from __future__ import annotations

from hookline.testing.check_report import Finding, HookCheck
from hookline.testing.checking import check_hook
from hookline.testing.small_run import small_experiment

__all__ = ["Finding", "HookCheck", "check_hook", "small_experiment"]
