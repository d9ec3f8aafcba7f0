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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from hookline.engines.engine_modules import output_widths, probe_action
from hookline.engines.live_hooks import LiveHook, finite_metrics
from hookline.engines.request_options import RequestOptions
from hookline.engines.request_results import RequestResults
from hookline.engines.session import Session
from hookline.errors import OptionError
from hookline.factories.replacing import stream_of
from hookline.factories.served_batch import tokens_of_batch
from hookline.files import replace_file
from hookline.observe.tokens import Tokens
from hookline.specs.hook_spec import HookSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["AROUND_CAPTURE", "CAN_RUN_GRAPH", "RUNNER", "SglangHooks", "hooks_of_runner", "install"]

logger = logging.getLogger("hookline.engines.sglang")

_LOOK_AFTER: Final = 3
"""Forwards after which hooks that have not fired are named: a prompt and two tokens."""
_REPORT_EVERY: Final = 100
"""Forwards between two reports: reading metrics waits for the device."""
_FORGET_AFTER: Final = 1024
"""Forwards without a token of it after which a request counts as ended: a runner is not told."""
_MOST_ASKED: Final = 4096

_Live = list[LiveHook]  # `SglangHooks` has a method of that name


class SglangHooks:
    """The hooks of one model runner.

    Recipe::

        hooks = hooks_of_runner(runner)
        hooks.add([{"target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:nan_alarm"}])
        hooks.ask("r1", {"hidden_states": {"layers": ["model.norm"]}})  # before the request "r1" begins
        print(hooks.list(), hooks.metrics(), hooks.take("r1"))

    Args:
        model: The model of the runner.
        report: A folder for a file with the hooks and their metrics.
        place: What the report of this worker is called.
        hidden_size: How many numbers the model keeps for each token between its layers, if that is known.
        tp_size: Into how many parts tensor parallelism cuts outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        report: Path | None = None,
        *,
        place: str = "0",
        hidden_size: int | None = None,
        tp_size: int = 1,
    ) -> None:
        self.steps = 0
        """Forwards of the runner while there was a hook."""
        self.session = Session(model, widths=output_widths(model, hidden_size), stream=stream_of)
        self._results = RequestResults(self.session, check=_check_request, tp_size=tp_size)
        self._report = report
        self._place = place
        self._asked: dict[str, Any] = {}
        """What requests want that have not begun, by their ``rid``."""
        self._seen: dict[str, int] = {}
        """The last forward with a token of each request that asked for something."""
        self._has_logged = False
        atexit.register(self.close)  # SGLang's processes are mostly killed, which no hook outlives

    def add(self, specs: Sequence[Mapping[str, Any]]) -> _Live:
        """Attach hooks, at the start or between two forwards; log what is wrong with a spec, and go on."""
        added: _Live = []
        for spec in specs:
            try:
                _check_action(spec)
                added += self.session.live.add_all([spec])
            except Exception as error:
                logger.error("hook %r is not attached: %s: %s", spec.get("name"), type(error).__name__, error)
        for live in added:
            logger.info("hook %r is on %s", live.name, ", ".join(live.matched))
        return added

    def remove(self, id: str) -> LiveHook:
        """Remove a hook, and flush what it has."""
        return self.session.live.remove(id)

    def list(self) -> _Live:
        """Return the hooks, the oldest first."""
        return self.session.live.list()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each hook by its id."""
        return self.session.live.metrics()

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

    @contextmanager
    def during_forward(self, batch: Any) -> Iterator[None]:
        """Tell hooks whose tokens are in ``batch`` for the block, which runs it."""
        if not self.is_active:
            yield
            return
        table = self._table(batch)
        with self.session.step(table):
            yield
        self._after(table)

    def _after(self, table: Tokens | None) -> None:
        """Take what a forward gave; does not raise: the answers of this forward are there."""
        try:
            self._results.collect({} if table is None else {name: name for name in table.requests})
        except Exception as error:
            self._results.fail_running(OptionError(f"What hooks found in a forward could not be read ({error!r})."))
            self._log_once(f"what hooks found in a forward could not be read: {type(error).__name__}: {error}")
        self.steps += 1
        if self.steps == _LOOK_AFTER:
            self._name_silent()
        if self.steps % _REPORT_EVERY == 0:
            self.write_report()
        for rid in [rid for rid, step in self._seen.items() if self.steps - step > _FORGET_AFTER]:
            del self._seen[rid]
            self._results.close(rid)

    def _table(self, batch: Any) -> Tokens | None:
        try:
            table = tokens_of_batch(batch)
            if table is None:
                return None
            table = _with_firsts(table, batch)
            for row, rid in enumerate(table.requests):
                self._note(rid, (table.firsts[row] or 0) + table.lengths[row])
            return table
        except Exception as error:  # another version of SGLang: hooks for all requests still work
            self._log_once(f"the requests of a batch cannot be read: {type(error).__name__}: {error}")
            return None

    def _note(self, rid: str, tokens: int) -> None:
        """Begin with a request that asked for something, which has so many tokens now."""
        options = self._asked.pop(rid, None)
        if options is not None:
            self._results.open(rid, rid, options, prompt=tokens)
        if options is not None or rid in self._seen:
            self._seen[rid] = self.steps

    def close(self) -> None:
        """Write the last report, remove all hooks and flush them."""
        atexit.unregister(self.close)
        self.write_report()
        self._results.clear()
        self.session.close()

    def write_report(self) -> None:
        """Write the hooks of this worker and their metrics to its file, if a folder was given."""
        folder = self._report
        if folder is None:
            return
        try:
            metrics = self.metrics()
            hooks = [
                {
                    **live.to_plain(),
                    "silent": live.silent_sites(),
                    "metrics": finite_metrics(metrics.get(live.id, {})),
                }
                for live in self.list()
            ]
            content = json.dumps({"steps": self.steps, "hooks": hooks}, indent=1, allow_nan=False)
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / f"{socket.gethostname()}-{self._place}.json", content)
        except Exception as error:
            self._log_once(f"the report cannot be written: {type(error).__name__}: {error}")

    def _name_silent(self) -> None:
        for live in self.list():
            for name, cause in live.silent_sites().items():
                logger.warning("hook %r has not fired on %s in %d forwards: %s", live.name, name, self.steps, cause)

    def _log_once(self, words: str) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.warning("%s", words)


def _with_firsts(table: Tokens, batch: Any) -> Tokens:
    """Return the table with the positions of first tokens, where the host knows them by the lengths of sequences."""
    if None not in table.firsts:
        return table
    prefixes, lengths = getattr(batch, "extend_prefix_lens_cpu", None), getattr(batch, "seq_lens_cpu", None)
    if table.phase != "decode" and prefixes is not None:
        return replace(table, firsts=tuple(map(int, prefixes)), _choices={})
    if lengths is None:
        return table
    ends = zip(map(int, lengths), table.lengths, strict=False)
    return replace(table, firsts=tuple(end - length for end, length in ends), _choices={})


def _check_request(options: RequestOptions) -> None:
    for spec in options.hooks:
        _check_action(spec)


def _check_action(spec: HookSpec | Mapping[str, Any]) -> None:
    """Refuse a probe that is to end answers."""
    if probe_action(spec) == "stop":
        raise OptionError("action='stop' ends no answer on SGLang; use action='metric' and read the report.")


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

    def attach(result: Any, runner: Any) -> None:
        _attach(runner, specs, folder)

    add(f"{RUNNER}.load_model", attach, kinds.AFTER)
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
        hidden_size = getattr(getattr(runner, "model_config", None), "hidden_size", None)
        place = f"gpu{getattr(runner, 'gpu_id', 0)}"
        tp_size = int(getattr(runner, "tp_size", 1))
        made = SglangHooks(runner.model, report, place=place, hidden_size=hidden_size, tp_size=tp_size)
        made.add(specs)
    except Exception:
        logger.exception("hooks cannot be attached; the engine goes on without them")
        return
    _HOOKS[runner] = made


def _around_forward(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    hooks = hooks_of_runner(runner)
    if hooks is None:
        return original(runner, *args, **kwargs)
    with hooks.during_forward(args[0] if args else kwargs.get("forward_batch")):
        return original(runner, *args, **kwargs)


def _around_capture(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hooks = hooks_of_runner(kwargs.get("model_runner"))
    if hooks is None:
        return original(*args, **kwargs)
    with hooks.session.live.suspended():  # a graph would replay what they do, for whichever request
        return original(*args, **kwargs)


def _unless_hooked(can_run: Any, graph_runner: Any, *args: Any, **kwargs: Any) -> bool | None:
    """Return False, in the place of SGLang's own answer, while a hook is on that a replay would pass over."""
    hooks = hooks_of_runner(getattr(graph_runner, "model_runner", None))
    return False if hooks is not None and hooks.is_active else None
