"""What the server is told once, at its start: its names, its doors, its bounds.

Made by `hookline serve` from the command line, read by `app`, `access` and `hook_bodies`. Imports nothing that HTTP
needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hookline.errors import OptionError

__all__ = ["Settings"]

Protect = Literal["hooks", "everything"]


@dataclass(frozen=True)
class Settings:
    """How the server behaves towards whoever talks to it.

    Recipe: ``make_app(engine, Settings(model_name="tiny", token="secret", export_dir=Path("exports")))``.
    """

    model_name: str = "model"
    """What ``/v1/models`` calls the model; a request that names another is refused."""
    token: str | None = None
    """What ``Authorization: Bearer`` has to say; without one nobody changes hooks over HTTP."""
    protect: Protect = "hooks"
    """What needs the token: changing hooks, or everything but ``/health``."""
    allow: tuple[str, ...] = ("hookline.factories",)
    """What paths of factories that come over HTTP may begin with."""
    export_dir: Path | None = None
    """Where files of hooks that come over HTTP have to lie; without it such hooks get no files."""
    max_body: int = 4 << 20
    """The largest body of a request in bytes: a prompt of a million tokens fits."""
    body_s: float = 30.0
    """How long the next piece of a body may take to come."""
    max_sequences: int = 64
    """The most answers (prompts times ``n``) that one request may ask for."""
    drain_s: float = 30.0
    """How long running requests may take after SIGTERM."""

    def __post_init__(self) -> None:
        if self.token is not None and not self.token.strip():
            raise OptionError("The token is empty. Leave it out, or give one that nobody guesses.")
        if self.token is not None and any(each.isspace() for each in self.token):
            raise OptionError("The token has spaces or line breaks in it, and no header can say those; take them out.")
        if self.protect == "everything" and self.token is None:
            raise OptionError("Everything is to be protected, and there is no token; give one with --token-file FILE.")
        if self.max_body < 1024:
            raise OptionError(f"max_body is at least 1024 bytes, got {self.max_body}.")
        if not self.drain_s >= 0:
            raise OptionError(f"drain is a number of seconds, 0 or more, got {self.drain_s}.")
