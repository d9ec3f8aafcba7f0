"""Decide who may talk to a server of hookline: addresses of this machine alone, and the holder of a token.

``hookline serve`` (cli/serve.py) and the server ask `is_loopback` about the address to listen on; `request_gate` checks
``Host``, ``Origin`` and the token of each request by the others. This is a security boundary: a name must never be
looked up (whoever owns it could point it here), and a token is compared in constant time. Imports the standard library
alone.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name: what it means may change at any time
        return False


def is_local_name(value: str) -> bool:
    """Return whether a value of ``Host`` or ``Origin`` means this machine; a name under ``.localhost`` always does."""
    try:
        host = urlsplit(value if "://" in value else f"//{value}").hostname or ""
    except ValueError:  # such as "[::1" without its other bracket
        return False
    return is_loopback(host) or host.endswith(".localhost")


def bearer_token(authorization: bytes) -> bytes | None:
    """Return the token in the value of an ``Authorization`` header; None if it is of another kind."""
    scheme, _, given = authorization.strip().partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else None


def is_same_token(given: bytes | None, token: str) -> bool:
    """Return whether `given` is the server's token."""
    # In constant time: how long a comparison takes must not tell how many characters were right.
    return given is not None and hmac.compare_digest(given, token.encode())
