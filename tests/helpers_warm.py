"""Start Python programs from a process that has imported torch already.

Tests call `WarmPopen` and `run_warm` in place of ``subprocess.Popen`` and ``subprocess.run``. Importing torch takes 2 s
of CPU time, and its compiler, which every process that makes an optimizer imports, another 5. Here one process imports
them for all workers of a session, and forks one for each program. A test about what is imported, or about what happens
during an import, starts a process of its own with ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE = 600.0  # as in `helpers_waiting`, which a program that is forked must be free to import itself
SHARED = "HOOKLINE_TESTS_WARM"
"""The variable with the folder where all workers of a session find the process that forks; `conftest` sets it."""
_NUMBER = struct.Struct("q")
_leases: list[socket.socket] = []


@atexit.register
def _give_back() -> None:
    for lease in _leases:
        lease.close()


def run_warm(
    command: Sequence[str | Path],
    *,
    timeout: float = PATIENCE,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run ``[sys.executable, ...]`` as ``subprocess.run`` does, without its imports."""
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with WarmPopen(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


class WarmPopen(subprocess.Popen[Any]):
    """A process like one of ``subprocess.Popen([sys.executable, ...])``, forked where torch is imported already.

    Recipe: ``WarmPopen([sys.executable, "-c", "import torch"], stdout=subprocess.PIPE)``. The command may have ``-W``,
    then ``-c CODE``, ``-m MODULE`` or a file. It is no child of this process: wait for it with its methods.

    At its end exit functions run and streams are flushed, but modules are not taken down, which takes 1.2 s of CPU:
    a test of what happens then passes ``takes_down=True``.
    """

    def __init__(self, command: Sequence[str | Path], *, takes_down: bool = False, **options: Any) -> None:
        self._takes_down = takes_down
        super().__init__(command, **options)

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        _, _, _, cwd, env, _, _, _, stdin, to_child, from_child, stdout, from_errors, stderr, *others = rest
        request = {
            "arguments": [os.fspath(one) for one in args][1:],
            "folder": os.getcwd() if cwd is None else os.fspath(cwd),
            "environment": dict(os.environ if env is None else env),
            "own_session": bool(others[-2]),
            "takes_down": self._takes_down,
        }
        given = (stdin, stdout, stderr)
        try:
            _hold_lease()
            self._answers = _asked(request, [place if one == -1 else one for place, one in enumerate(given)])
            self.pid = _read_number(self._answers)
            self._child_created = True
        finally:
            for pipe, theirs in zip((to_child, from_child, from_errors), given, strict=True):
                if pipe != -1 and theirs != -1:
                    os.close(theirs)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._ended(0.0)

    def _wait(self, timeout: float | None) -> int:
        found = self._ended(timeout)
        if found is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return found

    def _ended(self, timeout: float | None) -> int | None:
        with self._waitpid_lock:
            if self.returncode is None:
                self._answers.settimeout(timeout)
                with contextlib.suppress(BlockingIOError, TimeoutError):
                    self.returncode = _read_number(self._answers)
                    self._answers.close()
            return self.returncode


def _hold_lease() -> None:
    """Keep the process that forks alive until this one ends; start it if no worker has."""
    if _leases:
        return
    folder = os.environ.get(SHARED)
    if folder is None:
        keep = tempfile.TemporaryDirectory(prefix="hookline-warm-", ignore_cleanup_errors=True)
        atexit.register(keep.cleanup)
        folder = os.environ[SHARED] = keep.name
    with Path(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(ConnectionError, FileNotFoundError, EOFError):
            _leases.append(_lease())
            return
        Path(folder, "socket").unlink(missing_ok=True)
        kept = {name for name in os.environ if not name.startswith(("PYTEST", "PYTHON")) or name == "PYTHONPATH"}
        environment = {name: os.environ[name] for name in kept}
        subprocess.run(  # returns when everything is imported; the process that forks stays behind
            [sys.executable, __file__, folder], env={**environment, "OMP_NUM_THREADS": "1"}, cwd=folder, check=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        _leases.append(_lease())


def _lease() -> socket.socket:
    found = _asked(None, [])
    try:
        _read_number(found)
    except BaseException:
        found.close()
        raise
    return found


def _asked(request: dict[str, Any] | None, streams: list[int]) -> socket.socket:
    """Return a connection on which the answer to ``request`` will come."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(Path(os.environ[SHARED], "socket")))
        text = pickle.dumps(request)
        socket.send_fds(connection, [_NUMBER.pack(len(text))], streams)
        connection.sendall(text)
    except BaseException:
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError("the process that forks has ended")
        found += part
    return found


def _read_number(connection: socket.socket) -> int:
    return int(_NUMBER.unpack(_read(connection, _NUMBER.size))[0])


# -- in the process that forks -------------------------------------------------------------------------------


def _serve(folder: str) -> tuple[dict[str, Any], list[int]] | None:
    """Fork at each request until nobody holds a lease; return the request in the forked process."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(Path(folder, "socket")))
    listener.listen(64)
    if os.fork():
        os._exit(0)  # the one that waits for it knows by this that it may ask
    os.setsid()
    awake, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    leases: list[socket.socket] = []
    running: dict[int, socket.socket] = {}
    was_held = False
    while leases or not was_held:
        for ready in select.select([listener, awake, *leases], [], [])[0]:
            if ready is awake:
                awake.recv(4096)
            elif ready is not listener:
                leases.remove(ready)
                ready.close()
            elif (request := _accept(listener, leases)) is not None:
                child = os.fork()
                if not child:
                    for one in (listener, awake, wake, request[2], *leases, *running.values()):
                        one.close()
                    return request[:2]
                running[child] = request[2]
                _answer(request[2], child)
                for stream in request[1]:
                    os.close(stream)
            was_held = was_held or bool(leases)
        _reap(running)
    for child in running:  # of a worker that was killed
        os.kill(child, signal.SIGKILL)
    return None


def _accept(
    listener: socket.socket, leases: list[socket.socket]
) -> tuple[dict[str, Any], list[int], socket.socket] | None:
    connection, _ = listener.accept()
    head, streams, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
    request = pickle.loads(_read(connection, _NUMBER.unpack(head)[0]))
    if request is not None:
        return request, list(streams), connection
    leases.append(connection)
    _answer(connection, 0)
    return None


def _reap(running: dict[int, socket.socket]) -> None:
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        connection = running.pop(child)
        _answer(connection, os.waitstatus_to_exitcode(status))
        connection.close()


def _answer(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # nobody waits any more
        connection.sendall(_NUMBER.pack(number))


# -- in a process that was forked ----------------------------------------------------------------------------


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Be as a process that has just been started."""
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    sys.stdin = sys.__stdin__ = _stream(0, "r")
    sys.stdout = sys.__stdout__ = _stream(1, "w")
    sys.stderr = sys.__stderr__ = _stream(2, "w", errors="backslashreplace", buffering=1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["own_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    random.seed()
    import numpy

    numpy.random.seed()


def _stream(number: int, mode: str, **options: Any) -> Any:
    return open(number, mode, encoding="utf-8", closefd=False, **options)


def _run_to_the_end(arguments: list[str], takes_down: bool, **_: Any) -> None:
    """Run a program; what it raises, other than SystemExit, goes to the interpreter as always."""
    code: Any = None
    try:
        _run(arguments)
    except SystemExit as left:
        if takes_down:
            raise
        code = left.code
    if takes_down:
        return
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does before all else
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run(arguments: list[str]) -> None:
    """Run what stands behind ``python`` in a command."""
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    found = os.environ.get("PYTHONPATH", "")
    paths = [path for path in found.split(os.pathsep) if path]
    first, *others = arguments
    if first == "-m":
        sys.argv, sys.path[:1] = others, [os.getcwd(), *paths]
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-c":
        text, file, first, others = others[0], "<string>", "-c", others[1:]
        sys.path[:1] = ["", *paths]
    else:
        text, file, main.__file__ = Path(first).read_text(encoding="utf-8"), first, first
        sys.path[:1] = [str(Path(first).resolve().parent), *paths]
    sys.argv = [first, *others]
    exec(compile(text, file, "exec", dont_inherit=True), main.__dict__)


def _main(folder: str) -> None:
    atexit.register(gc.unfreeze)  # so that programs end as they would have
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel"):
        importlib.import_module(name)
    import torch

    import hookline

    for name in hookline.__all__:
        getattr(hookline, name)
    # The first optimizer imports 900 modules more, sympy among them. No thread is started: those would not be forked.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).zero_grad()
    gc.collect()
    gc.freeze()
    found = _serve(folder)
    if found is not None:
        _become(*found)
        _run_to_the_end(**found[0])


if __name__ == "__main__":
    _main(sys.argv[1])
