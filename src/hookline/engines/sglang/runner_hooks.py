"""Put a `Session` on the model of one runner of SGLang: attach hooks, tell them whose rows they see, report.

`register` calls `install`; SGLang's ``HookRegistry`` then wraps its own functions with those of this file, which make
one `SglangHooks` for each model runner and call it around its forwards and captures. SGLang's ``--forward-hooks`` are
registered after the capture and are silent in every forward that replays a graph. Here hooks are on before it, stay out
of what it records, and forwards run eagerly while there is a hook. A hook that raises is switched off.
"""

from __future__ import annotations

import atexit
import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from hookline.engines.live_hooks import LiveHook, finite_metrics
from hookline.engines.request_options import RequestOptions
from hookline.engines.request_results import BegunRequest, RequestResults, check_no_stop
from hookline.engines.session import Session
from hookline.error_policy import error_text
from hookline.errors import OptionError
from hookline.factories.replacing import stream_of
from hookline.factories.served_batch import tokens_of_batch
from hookline.files import replace_file
from hookline.observe.tokens import Tokens
from hookline.specs.hook_spec import HookSpec

logger = logging.getLogger("hookline.engines.sglang")

_LOOK_AFTER: Final = 3
"""Forwards after which hooks that have not fired are named: a prompt and two tokens."""
_REPORT_EVERY: Final = 100
"""Forwards between two reports: reading metrics waits for the device."""
_FORGET_AFTER: Final = 1024
"""Forwards without a token of it after which a request counts as ended: a runner is not told."""
_MOST_ASKED: Final = 4096


class SglangHooks:
    """The hooks of one model runner.

    Recipe::

        hooks = hooks_of_runner(runner)
        hooks.add({"target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:nan_alarm"})
        hooks.ask("r1", {"hidden_states": {"layers": ["model.norm"]}})  # before the request "r1" begins
        print(hooks.live.list(), hooks.live.metrics(), hooks.take("r1"))

    Args:
        runner: A model runner whose model is loaded.
        report: A folder for a file with the hooks and their metrics.
    """

    def __init__(self, runner: Any, report: Path | None = None) -> None:
        self.steps = 0
        """Forwards of the runner while there was a hook."""
        self.session = Session(runner.model, stream=stream_of)
        self.live = self.session.live
        """The hooks for all requests, to list and remove between two forwards."""
        self._results = RequestResults(self.session, tp_size=_tensor_parallel_size())
        self._report = report
        self._place = f"gpu{getattr(runner, 'gpu_id', 0)}"
        self._asked: dict[str, Any] = {}
        """What requests want that have not begun, by their ``rid``."""
        self._seen: dict[str, int] = {}
        """The last forward with a token of each request that asked for something."""
        atexit.register(self.close)  # SGLang's processes are mostly killed, which no hook outlives

    def add(self, spec: HookSpec | Mapping[str, Any]) -> Sequence[LiveHook]:
        """Attach a hook, at the start or between two forwards; one that matches nothing is logged and left out."""
        check_no_stop([spec])
        added = self.live.add_all([spec])
        for live in added:
            logger.info("hook %r is on %s", live.name, ", ".join(live.matched))
        return added

    def ask(self, rid: str, options: Mapping[str, Any]) -> None:
        """Let the request ``rid``, which has not begun, have hooks and hidden states; see `RequestOptions`."""
        RequestOptions.read(options)  # raises now what is wrong with them
        if len(self._asked) >= _MOST_ASKED:
            raise OptionError(f"{_MOST_ASKED} requests that asked for something have not begun; wait for them.")
        self._asked[rid] = options

    def take(self, key: str) -> Sequence[dict[str, Any]]:
        """Return what the request with that ``rid``, or under that key, asked for, as plain data; forget it."""
        return self._results.take(key)

    @property
    def is_active(self) -> bool:
        """Return whether a hook is on, or a request asked for something: forwards then run without CUDA graphs."""
        return bool(self._asked) or self.session.is_active

    def run(self, forward: Callable[[], Any], batch: Any) -> Any:
        """Return what ``forward`` gives, and tell hooks whose tokens are in ``batch`` meanwhile."""
        if not self.is_active:
            return forward()
        table = self._begin(batch)
        with self.session.step(table):
            found = forward()
        self._end(() if table is None else table.requests)
        return found

    def _begin(self, batch: Any) -> Tokens | None:
        """Return the table of a batch, and begin with requests that asked for something; None if nobody knows it."""
        try:
            table = _with_firsts(tokens_of_batch(batch), batch)
            if table is not None:
                for rid, first, length in zip(table.requests, table.firsts, table.lengths, strict=False):
                    self._note(rid, (first or 0) + length)
            return table
        except Exception as error:  # another version of SGLang: hooks for all requests still work
            self._results.give_up("the requests of a batch could not be read", error)
            return None

    def _note(self, rid: str, tokens: int) -> None:
        """Note a request of the forward that begins; if it asked for something, it has so many tokens now."""
        options = self._asked.pop(rid, None)
        if options is not None:
            self._results.open(BegunRequest(rid, rid, options, tokens))
        if options is not None or rid in self._seen:
            self._seen[rid] = self.steps

    def _end(self, rids: Sequence[str]) -> None:
        """Take what a forward gave, and report from time to time."""
        self._results.collect({rid: rid for rid in rids})
        self.steps += 1
        if self.steps == _LOOK_AFTER:
            for live in self.live.list():
                for name, cause in live.silent_sites().items():
                    logger.warning("hook %r has not fired on %s in %d forwards: %s", live.name, name, self.steps, cause)
        if self.steps % _REPORT_EVERY == 0:
            self.write_report()
        for rid in [rid for rid, step in self._seen.items() if self.steps - step > _FORGET_AFTER]:
            del self._seen[rid]
            self._results.close(rid)

    def close(self) -> None:
        """Write the last report, remove all hooks and flush them."""
        atexit.unregister(self.close)
        self.write_report()
        self._results.clear()
        self.session.close()

    def write_report(self) -> None:
        """Write the hooks of this worker and their metrics to its file, if a folder was given."""
        if self._report is None:
            return
        try:
            metrics = self.live.metrics()
            hooks = []
            for live in self.live.list():
                own = {"silent": live.silent_sites(), "metrics": finite_metrics(metrics.get(live.id, {}))}
                hooks.append({**live.to_plain(), **own})
            content = json.dumps({"steps": self.steps, "hooks": hooks}, indent=1, allow_nan=False)
            self._report.mkdir(parents=True, exist_ok=True)
            replace_file(self._report / f"{socket.gethostname()}-{self._place}.json", content)
        except Exception as error:
            logger.warning("the report cannot be written, and no more will be: %s", error_text(error))
            self._report = None


def _with_firsts(table: Tokens | None, batch: Any) -> Tokens | None:
    """Return the table with the positions of first tokens, where the host knows them by the lengths of sequences.

    Of the tokens that speculation checks it does not: they are a tree.
    """
    firsts, ends = getattr(batch, "extend_prefix_lens_cpu", None), getattr(batch, "seq_lens_cpu", None)
    if firsts is None and ends is not None and batch.forward_mode.is_decode():
        firsts = [end - 1 for end in ends]
    if table is None or firsts is None or None not in table.firsts:
        return table
    return replace(table, firsts=tuple(map(int, firsts)), _choices={})


def _tensor_parallel_size() -> int:
    """Return into how many parts tensor parallelism cuts outputs."""
    try:
        return int(import_module("sglang.srt.runtime_context").get_parallel().tp_size)
    except Exception as error:  # another version of SGLang
        logger.warning("it is not known whether tensor parallelism cuts outputs: %s", error_text(error))
        return 1


# -- in SGLang's own functions -----------------------------------------------------------------------------------

RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
_SETUP: Final = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
AROUND_CAPTURE: Final = (f"{_SETUP}.capture_decode_graph", f"{_SETUP}.capture_prefill_graph")
"""The functions through which every capture goes, also a later one."""
CAN_RUN_GRAPH: Final = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
    "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
    "sglang.srt.model_executor.cpu_graph_runner.CPUGraphRunner.can_run_graph",
)
"""Who decides whether a forward replays a graph; planners of speculative decoding ask the same."""
_KNOWN_VERSION: Final = "0.5.23"

_HOOKS: WeakKeyDictionary[Any, SglangHooks] = WeakKeyDictionary()


def hooks_of_runner(runner: Any) -> SglangHooks | None:
    """Return the hooks of a model runner of this process; None if it has none."""
    return None if runner is None else _HOOKS.get(runner)


def install(file: str, report: str | None = None) -> None:
    """Register everything with SGLang; its ``load_plugins`` applies it.

    Args:
        file: A file of hooks.
        report: A folder for a file of each worker with its hooks and their metrics.
    """
    from hookline.runs.documents import specs_of_file

    specs = specs_of_file(file)
    folder = Path(report).absolute() if report else None
    registry = import_module("sglang.srt.plugins.hook_registry")
    add, kinds = registry.HookRegistry.register, registry.HookType
    add(f"{RUNNER}.load_model", lambda result, runner: _attach(runner, specs, folder), kinds.AFTER)
    add(f"{RUNNER}.forward", _around_forward, kinds.AROUND)
    for path in AROUND_CAPTURE:
        add(path, _around_capture, kinds.AROUND)
    for path in CAN_RUN_GRAPH:
        add(path, _unless_hooked, kinds.AFTER)
    if version("sglang") != _KNOWN_VERSION:
        logger.warning("SGLang %s is not known here; the plugin was written for %s", version("sglang"), _KNOWN_VERSION)


def _attach(runner: Any, specs: Sequence[Mapping[str, Any]], report: Path | None = None) -> None:
    """Attach the hooks to the model that ``runner`` has loaded; whatever goes wrong, the engine goes on."""
    if getattr(runner, "is_draft_worker", False) or runner in _HOOKS:
        return
    try:
        made = _HOOKS[runner] = SglangHooks(runner, report)
    except Exception:
        logger.exception("hooks cannot be attached; the engine continues without them")
        return
    for spec in specs:
        try:
            made.add(spec)
        except Exception as error:
            logger.error("hook %r is not attached: %s", spec.get("name"), error_text(error))


def _around_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    hooks = hooks_of_runner(runner)
    if hooks is None:
        return original(runner, forward_batch, *args, **kwargs)
    return hooks.run(lambda: original(runner, forward_batch, *args, **kwargs), forward_batch)


def _around_capture(original: Callable[..., Any], *args: Any, model_runner: Any, **kwargs: Any) -> Any:
    hooks = hooks_of_runner(model_runner)
    if hooks is None:
        return original(*args, model_runner=model_runner, **kwargs)
    with hooks.live.suspended():  # a graph would replay what they do, for whichever request
        return original(*args, model_runner=model_runner, **kwargs)


def _unless_hooked(can_run: Any, graph_runner: Any, *args: Any, **kwargs: Any) -> bool | None:
    """Return False, in the place of SGLang's own answer, while a hook is on that a replay would pass over."""
    hooks = hooks_of_runner(getattr(graph_runner, "model_runner", None))
    return False if hooks is not None and hooks.is_active else None
