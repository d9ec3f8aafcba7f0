"""A served model for tests: in a thread, or in a process of its own; and factories that misbehave."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from helpers_waiting import PATIENCE, until
from helpers_warm import WarmPopen

TOKEN = "a-token-for-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@contextmanager
def served(folder: Path, *, settings: dict[str, Any] | None = None, **engine_options: Any) -> Iterator[Any]:
    """A server in a thread, with sockets; it has ``.client`` (httpx), ``.engine`` and the `Server`'s own methods."""
    from hookline.serve.http.request_gate import Settings
    from hookline.serve.http.server import Server
    from hookline.serve.load_model import load
    from hookline.serve.serving_engine import Engine

    def make() -> Engine:
        return Engine(*load(folder, device="cpu"), **engine_options)

    server = Server(make, Settings(**{"model_name": "tiny", "token": TOKEN, **(settings or {})}))
    server.start()
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        server.client = client
        server.engine = server.serving.engine
        try:
            yield server
        finally:
            server.stop()


class ServerProcess:
    """``hookline serve`` in a process of its own."""

    def __init__(self, *arguments: str, command: Sequence[str] | None = None, **environment: str) -> None:
        known = {name: value for name, value in os.environ.items() if name != "HOOKLINE_SERVE_TOKEN"}
        path = os.pathsep.join(
            [str(Path(__file__).parent), str(Path(__file__).parents[1]), known.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep)
        self.process = WarmPopen(
            [sys.executable, *(command or ("-m", "hookline", "serve", "--port", "0")), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**known, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    @property
    def said(self) -> str:
        """All that it has logged."""
        return "\n".join(self.lines)

    def url(self) -> str:
        """Where it is, once it is ready."""

        def ready() -> str | None:
            assert self.process.poll() is None, self.said
            found = re.search(r"ready at (http://\S+)", self.said)
            return found and found[1]

        return str(until(ready, "the server is ready"))

    def ended(self) -> int:
        """Its exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()


# -- factories -------------------------------------------------------------------------------------------------


def raises(config: dict[str, Any]) -> Any:
    """A factory that fails."""
    raise RuntimeError("no such thing in stock")


def breaks_later(config: dict[str, Any]) -> Any:
    """A hook that works so many times, then raises."""
    left = [config.get("after", 0)]

    def hook(module: Any, inputs: Any, output: Any) -> None:
        if left[0] <= 0:
            raise ValueError("a hook of a stranger broke")
        left[0] -= 1

    return hook


def slow(config: dict[str, Any]) -> Any:
    """A hook that takes its time, so that a tiny model generates as slowly as a large one."""

    def hook(module: Any, inputs: Any, output: Any) -> None:
        time.sleep(config.get("seconds", 0.02))

    return hook


SLOW = {"name": "slow", "target_modules": ["model.norm"], "hook_factory": "helpers_http:slow"}
