"""Say who may talk to a server of hookline: addresses of this machine alone, and a token compared in constant time.

`hookline.serve` and ``hookline serve`` call these. Imports the standard library alone.
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
    except ValueError:  # a name, which may mean anything tomorrow
        return False


def is_local_name(value: str) -> bool:
    """Return whether a value of ``Host`` or ``Origin`` means this machine; a name under ``.localhost`` always does."""
    try:
        host = urlsplit(value if "://" in value else f"//{value}").hostname or ""
    except ValueError:  # half a bracket
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
