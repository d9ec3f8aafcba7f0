"""Run a function in several real processes that talk over gloo, and collect what each returns.

Tests of ranks call `run_ranks`. Ranks are forked where torch is imported already, but meeting takes them half a second,
so one launch should make many checks: a function that returns a dictionary with one entry per check, or `run_cases`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    found: dict[str, Any] = {}
    for case in cases:
        try:
            found[case.__name__] = case()
        except Exception:
            found[case.__name__] = f"raised: {traceback.format_exc()}"
    return found


# -- in the processes ----------------------------------------------------------------------------------------


def _load(where: str) -> Callable[..., Any]:
    import importlib.util

    path, _, name = where.rpartition(":")
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
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
