"""What is worth knowing of a run afterwards: versions, the state of the code, its hooks and what they cost.

Collected by `run`, written to ``run.json``, read by the page.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

__all__ = ["git_state", "hook_facts", "model_facts", "now", "versions"]

_PACKAGES: Final = ("hookline", "torch", "numpy", "triton", "transformers")


def now() -> str:
    """The time, with its zone."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of Python and the packages that decide what a run computes."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the code in a folder, and whether it was changed since; None where there is no git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def model_facts(model: Any) -> dict[str, Any]:
    """Its class and size."""
    return {"class": type(model).__name__, "parameters": sum(one.numel() for one in model.parameters())}


def hook_facts(manager: Any) -> dict[str, Any]:
    """Every hook of a manager: what it is, what its metrics mean, how often it fired and what that took."""
    from hookline.training.training_hook import InterventionHook

    costs = manager.costs() if hasattr(manager, "costs") else {}
    found = {}
    for name, hook in manager.hooks.items():
        found[name] = {
            "kind": "intervention" if isinstance(hook, InterventionHook) else "observer",
            "description": hook.description or (type(hook).__doc__ or "").strip().partition("\n")[0],
            "metrics": [asdict(metric) for metric in hook.describe_metrics()],
            "fired": manager.fired[name],
            "failed": manager.hook_errors.get(name, 0),
            "cost": costs.get(name, {"count": 0, "total_ms": 0.0, "mean_ms": 0.0}),
        }
    return found
