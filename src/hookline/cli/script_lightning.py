"""Hooks in scripts that use Lightning, by its entry points: nothing unless ``HOOKLINE_RUN`` names a run file.

Lightning loads `lightning_callbacks` and `fabric_callbacks` when a ``Trainer`` or a ``Fabric`` is made, in every script
of an environment in which hookline is installed. ``hookline run -- python train.py`` sets the variable; so may a user.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["fabric_callbacks", "lightning_callbacks"]


def lightning_callbacks() -> list[Any]:
    """Return the callback for Lightning's ``Trainer``; none if no run file asks for hooks."""
    run_file = Path(os.environ.get("HOOKLINE_RUN", ""))
    if not run_file.name:
        return []
    from hookline.cli.script_session import ScriptSession
    from hookline.integrations.host_run import HostRun
    from hookline.integrations.lightning import HooklineCallback

    class SessionCallback(HooklineCallback):
        """Write into a folder as ``hookline run`` does; it is made when training begins."""

        def _make_host(self) -> HostRun:
            self._session = ScriptSession.of_lightning = ScriptSession(run_file)
            session = self._session
            host = HostRun(manager=session.manager, loop=session.loop, snapshot_every=session.snapshots)
            host.specs = self._session.specs
            return host

        def _run_context(self, trainer: Any) -> dict[str, Any]:
            return self._session.context

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_start(trainer, pl_module)
            self._session.begin(pl_module, trainer.optimizers[0])
            self._session.tell_not_started()

    return [SessionCallback(run_file=run_file)]


def fabric_callbacks() -> list[Any]:
    """Follow a loop with Fabric from its first step on, if a run file asks for it; return no callback in any case."""
    if os.environ.get("HOOKLINE_RUN") and not os.environ.get("HOOKLINE_RUN_NOTES"):  # else it is followed already
        from hookline.cli.script_session import wait_for_script

        wait_for_script()
    return []
