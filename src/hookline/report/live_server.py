"""Serve the page of runs that are still going, to this machine alone: ``hookline report --live``.

The command line calls `LiveServer`. It has two addresses: ``/``, the page without any run in it, and ``/data``, the
runs, for which the browser sends the token. No path leads to a file. The server is Python's own, so no extra is needed.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from hookline.errors import OptionError
from hookline.local_access import bearer_token, is_local_name, is_same_token
from hookline.report.live_runs import LiveRuns
from hookline.report.report_page import POLICY, page_text

__all__ = ["LiveServer"]

_HOST: Final = "127.0.0.1"
_PATIENCE_S: Final = 10.0
"""How long a client may take to send its request."""
_HEADERS: Final = {
    "Content-Security-Policy": f"{POLICY}; connect-src 'self'; frame-ancestors 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class LiveServer:
    """Serve runs that are followed.

    Recipe::

        server = LiveServer(LiveRuns(["runs/mod_arithmetic"]))
        print(server.url)  # http://127.0.0.1:40123/#token=…
        server.serve()  # until Ctrl-C; server.stop() from another thread
        server.close()

    Args:
        runs: What is served.
        port: 0 takes one that is free.
    """

    def __init__(self, runs: LiveRuns, *, port: int = 0) -> None:
        self.runs = runs
        self.token = secrets.token_urlsafe(24)
        """What a client has to send; another one for each server."""
        self.page = page_text("live", b"", is_live=True).encode()
        try:
            self._server = _Server((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise OptionError(
                f"Cannot listen at {_HOST}:{port} ({error}). Give another --port, or none: then a free one is taken."
            ) from None
        self._server.live = self

    @property
    def address(self) -> str:
        """The address without the token."""
        return f"http://{_HOST}:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        """The address to open; what is behind ``#`` stays in the browser, so no log and no other page has the token."""
        return f"{self.address}/#token={self.token}"

    def serve(self) -> None:
        """Answer until `stop`, or an exception such as that of Ctrl-C."""
        self._server.serve_forever(poll_interval=0.1)

    def stop(self) -> None:
        """End `serve`, which another thread runs."""
        self._server.shutdown()

    def close(self) -> None:
        """Hang up on all clients, and close the logs. May be called more than once."""
        self._server.server_close()
        self.runs.close()


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own: browsers open some to which they send nothing."""

    live: LiveServer

    def __init__(self, *arguments: Any) -> None:
        self._answering: list[threading.Thread] = []
        self._requests: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; keep it and the connection, to end both when the server ends."""
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self._answering = [one for one in self._answering if one.is_alive()] + [thread]
        self._requests.add(request)
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        self._requests.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for request in list(self._requests):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # its thread wakes up, and ends
        for thread in self._answering:
            thread.join(_PATIENCE_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has hung up, which is its right."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request, and hangs up."""

    server: _Server
    server_version, sys_version = "hookline", ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        refused = self._refusal()
        if refused is not None:
            self._answer(*refused)
            return
        path = urlsplit(self.path).path
        if path == "/":
            self._answer(HTTPStatus.OK, self.server.live.page, "text/html; charset=utf-8")
        elif path == "/data":
            self._send_data()
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"There is nothing at this address; the page is at /.\n")

    def _refusal(self) -> tuple[HTTPStatus, bytes] | None:
        """Return why this request is not answered; None if it is.

        Another site may lead its own name to this machine, or ask from its own pages: the browser says so in ``Host``,
        ``Origin`` and ``Sec-Fetch-Site``.
        """
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not is_local_name(hosts[0]):
            return HTTPStatus.FORBIDDEN, b"This page is for 127.0.0.1 or localhost alone; open it under that name.\n"
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        # A page may be led to by a link from elsewhere; it holds no run before it has sent the token.
        is_link = self.headers.get("Sec-Fetch-Mode") == "navigate"
        if origin not in (None, f"http://{hosts[0]}") or (site not in ("none", "same-origin") and not is_link):
            return (
                HTTPStatus.FORBIDDEN,
                b"Another page has asked for this; open the address that was printed.\n",
            )
        return None

    def _send_data(self) -> None:
        live = self.server.live
        given = bearer_token((self.headers.get("Authorization") or "").encode("latin-1", "replace"))
        if not is_same_token(given, live.token):
            self._answer(HTTPStatus.UNAUTHORIZED, b"The token is missing, or is that of another server.\n")
            return
        since = parse_qs(urlsplit(self.path).query).get("since", [""])[0]
        known = int(since) if since.isascii() and since.isdecimal() and len(since) < 16 else None
        try:
            _, packed = live.runs.newest(known)
        except Exception as error:  # the page says so, and asks again
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n".encode())
            return
        if packed is None:
            self._answer(HTTPStatus.NO_CONTENT, b"")
        else:
            self._answer(HTTPStatus.OK, packed, "application/octet-stream")

    def _answer(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a line for each second would hide all others."""
