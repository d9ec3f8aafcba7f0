"""Run a function in several real processes that talk over gloo, and collect what each returns.

Tests of ranks call `run_ranks`, or are cases of `RankTests`. Ranks are forked where torch is imported already, but
meeting takes them half a second, so one launch should make many checks.
"""

from __future__ import annotations

import ast
import functools
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_waiting import PATIENCE
from helpers_warm import WarmPopen

_TESTS = Path(__file__).resolve().parent


class RanksFailed(AssertionError):
    """A rank did not return; the message has the end of each rank's output."""


def run_ranks(
    function: Callable[..., Any] | str,
    *args: Any,
    ranks: int = 2,
    timeout: float = PATIENCE,
    environment: Mapping[str, str] | None = None,
    initialize: bool = True,
    may_fail: Iterable[int] = (),
    imports: Iterable[str] = (),
) -> list[Any]:
    """Call ``function(*args)`` on each of ``ranks`` processes, and return what each returned, by rank.

    Recipe: ``first, second = run_ranks(check_something, 7, ranks=2)``.

    The processes are forked from one that has imported torch and hookline. Each has the variables of torchrun, one
    torch thread, and a process group over gloo.

    Args:
        function: A function at the top of a file, or ``"path/to/file.py:name"``. Its file is imported by path, with
            ``tests/`` importable.
        args: Arguments that can be pickled.
        ranks: How many processes.
        timeout: Seconds before all are ended.
        environment: More variables.
        initialize: Whether ``init_process_group`` is called before the function.
        may_fail: Ranks that may end without a result (killed, for instance); theirs is None.
        imports: Modules that all ranks need and that take seconds: imported once, before the processes are forked.
    """
    where = function if isinstance(function, str) else f"{function.__code__.co_filename}:{function.__name__}"
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder, "request")
        request.write_bytes(pickle.dumps((where, args, ranks, initialize, tuple(imports))))
        done = WarmPopen(
            [sys.executable, str(Path(__file__).resolve()), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = done.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, 9)
            output, _ = done.communicate()
            output += f"\nall ranks were ended after {timeout:.0f} s"
        except BaseException:  # Ctrl-C, or the time-out of the test: ranks are in a session of their own
            os.killpg(done.pid, 9)
            raise
        return [_result(Path(folder, f"result.{rank}"), rank, output, set(may_fail)) for rank in range(ranks)]


def _result(path: Path, rank: int, output: str, may_fail: set[int]) -> Any:
    if not path.exists():
        if rank in may_fail:
            return None
        raise RanksFailed(f"rank {rank} did not return.\n{output[-6000:]}")
    found, error = pickle.loads(path.read_bytes())
    if error:
        raise RanksFailed(f"rank {rank} raised.\n{error}\n{output[-3000:]}")
    return found


def run_cases(cases: Sequence[Callable[[], Any]]) -> dict[str, Any]:
    """Call every case, and return by its name what it returned, or the text of what it raised as ``"raised: ..."``.

    To be called on a rank; the test then looks at each case by itself. A case that raises on one rank alone leaves the
    others waiting, so cases catch what they expect.
    """
    return _run_named({case.__name__: case for case in cases})


def _run_named(cases: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = case()
        except Exception:
            found[name] = f"raised: {traceback.format_exc()}"
    return found


class RankTests:
    """Tests whose bodies run on every rank, all of a file in one launch, which the first test makes.

    Recipe: ``on_ranks = RankTests(__file__)`` at the top of a file, under that name, and ``@on_ranks.case`` above a
    test, or ``@on_ranks.case(how=["ddp", "fsdp2"])`` above one that takes ``how``. A test fails with the traceback of
    the first rank on which it did. A case ends on every rank, or on none: it asserts when all have met for the last
    time.

    Args:
        file: The file of the tests.
        options: Those of `run_ranks`.
    """

    def __init__(self, file: str, **options: Any) -> None:
        self._file, self._options = file, options
        self._cases: dict[str, Callable[[], Any]] = {}

    def case(self, function: Callable[..., None] | None = None, **axis: Sequence[Any]) -> Any:
        """Return the test of a case, with values for its argument if it has one."""
        if function is None:
            return functools.partial(self.case, **axis)
        name = function.__name__
        if not axis:
            self._cases[name] = function
            return functools.wraps(function)(lambda: self._check(name))
        ((argument, values),) = axis.items()
        for place, value in enumerate(values):
            self._cases[f"{name} {place}"] = functools.partial(function, value)

        @functools.wraps(function)
        def test(**given: Any) -> None:
            self._check(f"{name} {values.index(given[argument])}")

        return pytest.mark.parametrize(argument, values)(test)

    def __call__(self) -> dict[str, Any]:
        """Run every case; called on a rank."""
        warnings.simplefilter("ignore")
        return _run_named(self._cases)

    @functools.cached_property
    def _found(self) -> list[dict[str, Any]]:
        return run_ranks(f"{self._file}:on_ranks", **self._options)

    def _check(self, name: str) -> None:
        for rank, found in enumerate(self._found):
            if found[name] is not None:
                raise RanksFailed(f"On rank {rank}: {found[name]}")


# -- in the processes ----------------------------------------------------------------------------------------


def _load(where: str) -> Callable[..., Any]:
    """Import a file by its path, with asserts that show their values, and return what has that name in it."""
    import importlib.util

    from _pytest.assertion.rewrite import rewrite_asserts

    path, _, name = where.rpartition(":")
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    source = Path(path).read_bytes()
    tree = ast.parse(source)
    rewrite_asserts(tree, source, path)
    exec(compile(tree, path, "exec"), vars(module))
    loaded: Callable[..., Any] = getattr(module, name)
    return loaded


def _work(rank: int, folder: str, call: tuple[Any, ...], ranks: int, initialize: bool, port: Any) -> None:
    import torch
    import torch.distributed as dist

    function, args = call
    torch.set_num_threads(1)
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port.recv()),
        TORCHELASTIC_USE_AGENT_STORE="True",  # as torchrun does: the store outlives every rank
    )
    if initialize:
        dist.init_process_group("gloo")
    result: tuple[Any, str] = (None, "")
    try:
        result = function(*args), ""
    except BaseException:
        result = None, traceback.format_exc()
    part = Path(folder, f"part.{rank}")
    part.write_bytes(pickle.dumps(result))
    part.rename(Path(folder, f"result.{rank}"))
    sys.stdout.flush()
    # Not by the interpreter's own end: once in some fifty runs torch aborts while its threads are taken down.
    os._exit(0)


def _main(folder: str) -> None:
    import importlib
    import multiprocessing

    import torch

    where, args, ranks, initialize, imports = pickle.loads(Path(folder, "request").read_bytes())
    sys.path.insert(0, str(_TESTS))
    for name in imports:
        importlib.import_module(name)
    call = _load(where), args
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    workers = [
        context.Process(target=_work, args=(rank, folder, call, ranks, initialize, pipes[rank][0]))
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    # Not before: its thread would not be in the forked processes.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, send in pipes:
        send.send(store.port)
    for worker in workers:
        worker.join()
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1])
