"""Hold the settings of the server, and decide by them which requests need the bearer token.

``hookline serve`` makes `Settings` from the command line; the app, the request gate and the hook routes read them.
Imports no package that HTTP needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hookline.errors import OptionError
from hookline.local_access import bearer_token, is_local_name, is_same_token
from hookline.serve.http.error_answers import Refused

__all__ = ["Settings", "check_access", "check_local", "needs_token"]

Protect = Literal["hooks", "everything"]


@dataclass(frozen=True)
class Settings:
    """Settings of the server.

    Recipe::

        settings = hookline.serve.Settings(model_name="tiny", token="secret", protect="everything")
        app = hookline.serve.make_app(engine, settings)
    """

    model_name: str = "model"
    """What ``/v1/models`` calls the model; a request that names another is refused."""
    token: str | None = None
    """The value of ``Authorization: Bearer``; without one, hooks cannot be changed over HTTP."""
    protect: Protect = "hooks"
    """What needs the token: changing hooks, or everything but ``/health``."""
    allow: tuple[str, ...] = ("hookline.factories",)
    """What paths of factories that come with ``POST /hooks``, which needs the token, may begin with."""
    allow_requests: tuple[str, ...] = ()
    """What paths of factories of hooks of single requests may begin with, beside those of ``hookline.factories`` that
    need no files: of whoever may generate, with any configuration."""
    export_dir: Path | None = None
    """Where files of hooks that come over HTTP have to lie; without it such hooks get no files."""
    local_only: bool = True
    """Whether a request without the token has to name this machine in its ``Host`` and ``Origin``, or any page in a
    browser of this machine could use the server (DNS rebinding). `Server` sets it False at an address of a network."""
    max_body: int = 4 << 20
    """The largest body of a request in bytes: a prompt of a million tokens fits."""
    body_s: float = 30.0
    """How long the next piece of a body may take to come, and that of an answer to be taken."""
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


_OPEN: Final = ("/health",)
"""What a load balancer asks, which has no token."""
_HOOKS: Final = "/hooks"


def check_access(settings: Settings, method: str, path: str, authorization: bytes | None) -> None:
    """Raise unless this request may go on; called before the body is read.

    Recipe: ``check_access(Settings(token="secret"), "POST", "/hooks", b"Bearer secret")``.
    """
    if not needs_token(settings, method, path):
        return
    if settings.token is None:
        raise Refused(
            403,
            "Hooks cannot be changed over HTTP: the server was started without a token. "
            "Start it with HOOKLINE_SERVE_TOKEN=TOKEN in its environment (or hookline serve with --token-file FILE), "
            "and send 'Authorization: Bearer TOKEN'.",
        )
    if authorization is None:
        raise _unknown("The request has no token; send the header 'Authorization: Bearer TOKEN'.")
    if not is_same_token(bearer_token(authorization), settings.token):
        raise _unknown("The token is not the server's; send the header 'Authorization: Bearer TOKEN'.")


def check_local(settings: Settings, method: str, path: str, names: Mapping[str, bytes | None]) -> None:
    """Raise for a request that needs no token and was sent by a page of another site; called before the body is read.

    Recipe: ``check_local(Settings(), "GET", "/hooks", {"Host": b"localhost", "Origin": None})``.
    """
    if not settings.local_only or path in _OPEN or needs_token(settings, method, path):
        return
    for header, value in names.items():
        if value is not None and not is_local_name(value.decode("latin-1")):
            raise Refused(
                403,
                f"The header {header} names another machine, and this server answers only its own without a token. "
                "Ask for localhost; behind a proxy, start it with a token and --protect everything (of an app of your "
                "own: Settings(local_only=False)).",
            )


def needs_token(settings: Settings, method: str, path: str) -> bool:
    """Return whether the request needs the token."""
    if path in _OPEN:
        return False
    if settings.protect == "everything":
        return True
    is_hooks = path == _HOOKS or path.startswith(f"{_HOOKS}/")
    return is_hooks and method not in ("GET", "HEAD", "OPTIONS")


def _unknown(message: str) -> Refused:
    return Refused(401, message, headers={"WWW-Authenticate": "Bearer"})
