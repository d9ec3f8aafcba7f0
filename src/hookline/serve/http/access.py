"""Who may do what: the bearer token, looked at before a byte of the body is read.

Takes method, path and headers of a request from `gate`, hands back nothing, or the error to answer with. Reading
is free on the server's own machine; changing hooks never is.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Final

from hookline.serve.http.error_answers import Refused
from hookline.serve.http.http_settings import Settings

__all__ = ["check_access", "is_loopback", "needs_token"]

_OPEN: Final = ("/health",)
"""What a load balancer asks, which has no token."""
_HOOKS: Final = "/hooks"


def check_access(settings: Settings, method: str, path: str, authorization: bytes | None) -> None:
    """Raise unless this request may go on.

    Recipe: ``check_access(Settings(token="secret"), "POST", "/hooks", b"Bearer secret")``.
    """
    if not needs_token(settings, method, path):
        return
    if settings.token is None:
        raise Refused(
            403,
            "Hooks cannot be changed over HTTP: the server was started without a token. "
            "Start it with --token-file FILE (or HOOKLINE_SERVE_TOKEN), and send 'Authorization: Bearer TOKEN'.",
        )
    if authorization is None:
        raise _unknown("There is no token; send the header 'Authorization: Bearer TOKEN'.")
    scheme, _, given = authorization.strip().partition(b" ")
    if scheme.lower() != b"bearer" or not _is_same(given.strip(), settings.token):
        raise _unknown("The token is not the server's; send the header 'Authorization: Bearer TOKEN'.")


def needs_token(settings: Settings, method: str, path: str) -> bool:
    """Whether the token has to be there."""
    if path in _OPEN:
        return False
    if settings.protect == "everything":
        return True
    is_hooks = path == _HOOKS or path.startswith(f"{_HOOKS}/")
    return is_hooks and method not in ("GET", "HEAD", "OPTIONS")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, which may mean anything tomorrow
        return False


def _is_same(given: bytes, token: str) -> bool:
    # In constant time: how long a comparison takes must not tell how many characters were right.
    return hmac.compare_digest(given, token.encode())


def _unknown(message: str) -> Refused:
    return Refused(401, message, headers={"WWW-Authenticate": "Bearer"})
