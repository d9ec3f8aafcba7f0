"""Run ``hookline serve`` from start to end: a socket, the model, the app, signals.

The command line calls `Server` with settings and a function that makes the engine. uvicorn runs in a thread of its own,
and the main thread handles signals: the first SIGTERM or Ctrl-C finishes what runs, the second exits at once.

    bind ──► listen (/health: loading) ──► load, attach ──► ready … SIGTERM ──► draining ──► engine.close ──► exit 0
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from hookline.errors import OptionError
from hookline.serve.http.app import make_app
from hookline.serve.http.local_access import is_loopback
from hookline.serve.http.request_gate import Settings

if TYPE_CHECKING:
    from hookline.serve.http.app import Serving
    from hookline.serve.serving_engine import Engine

logger = logging.getLogger("hookline.serve")

_LAST_WORDS_S: Final = 5.0
"""How long answers that are complete may take to reach their clients, after the engine has closed."""
_LOOK_S: Final = 1.0
"""How often the main thread, which waits for signals, looks whether the engine is still there."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Server:
    """Serve a model over HTTP.

    Recipe::

        serve = hookline.serve
        settings = serve.Settings(model_name="tiny", token="secret")
        server = serve.Server(lambda: serve.Engine(*serve.load("models/tiny", device="cpu")), settings)
        server.start()  # returns when it answers
        print(server.url)
        server.stop()  # what runs is finished, hooks are flushed

    Args:
        make_engine: Loads the model and makes the engine, not started; called while the server listens already.
        settings: How it behaves.
        host: The address to listen at. At one of this machine alone, requests without the token have to name it
            (`Settings.local_only`).
        port: 0 takes one that is free.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], settings: Settings, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._make_engine = make_engine
        self._settings = replace(settings, local_only=settings.local_only and is_loopback(host))
        self._socket = _bound(host, port)
        self._is_stopping = False
        app = make_app(None, self._settings)
        self.serving: Serving = app.state.serving
        """The engine, once it is there, and whether it takes requests."""
        config = uvicorn.Config(
            app,
            log_config=None,  # handlers are the command line's business
            access_log=False,  # /metrics has counts and times; a line per request costs more than a short answer
            lifespan="off",
            ws="none",  # there are none here, and uvicorn would advise to install what serves them
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
        self._uvicorn: Any = uvicorn.Server(config)
        # Outside of the main thread uvicorn leaves signals alone.
        self._thread = threading.Thread(
            target=self._uvicorn.run, kwargs={"sockets": [self._socket]}, name="hookline-http", daemon=True
        )

    @property
    def url(self) -> str:
        """Return the address of the server."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        """Listen, load, and take requests; an error while loading closes everything again, and is raised."""
        self._thread.start()
        engine = None
        try:
            engine = self._make_engine()
            engine.start()
            self.serving.engine = engine
            # What is loaded stays. A collection that goes through it all holds up every client: 0.7 s beside a model.
            gc.collect()
            gc.freeze()
        except BaseException:
            if engine is not None:
                engine.close(0.0)
            self._hang_up()
            raise

    def stop(self) -> None:
        """Take no more, finish what runs within the bound, flush, hang up; may be called again."""
        if not self.serving.is_draining:
            self.serving.is_draining = True
            if self.serving.engine is not None:
                self.serving.engine.close(self._settings.drain_s)
            gc.unfreeze()
        self._hang_up()

    def serve(self) -> bool:
        """Start, stay until SIGTERM or Ctrl-C, stop; a second signal leaves the process at once.

        Returns:
            Whether it was a signal; False if the engine failed.
        """
        before = {each: signal.signal(each, self._on_signal) for each in _SIGNALS}
        has_failed = False
        try:
            with suppress(_Stopped):
                self.start()
                logger.info("ready at %s", self.url)
                # Looked at here too: an exception that is raised in some object's ``__del__`` is lost.
                while not self._is_stopping and not has_failed:
                    time.sleep(_LOOK_S)
                    has_failed = self.serving.status == "failed"
            if has_failed:
                logger.error("the engine has failed, and only a new process helps")
            self._is_stopping = True  # from here on, a signal is the second one
            logger.info("stopping: what runs has %g s to finish; a signal ends it now", self._settings.drain_s)
            self.stop()
            logger.info("stopped")
            return not has_failed
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_stopping:
            os._exit(128 + number)  # threads may be in the middle of a forward, and are not waited for
        self._is_stopping = True
        # Out of whatever the main thread does: it sleeps, or loads a model, which may take minutes.
        raise _Stopped

    def _hang_up(self) -> None:
        self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=_LAST_WORDS_S * 2)
        self._socket.close()


class _Stopped(BaseException):
    """A signal came."""


def _bound(host: str, port: int) -> socket.socket:
    """Return a bound socket; called before minutes go into loading a model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # at "::", IPv4 is answered too
    try:
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=is_both)
    except (OSError, OverflowError) as error:
        raise OptionError(
            f"Cannot listen at {host}:{port} ({error}). Give another --port; --port 0 takes one that is free."
        ) from None
