"""Offer hooks as methods of vLLM's workers: ``--worker-extension-cls hookline.engines.vllm.extension.HookExtension``.

vLLM imports this module in each worker when it is named so, and calls the methods by ``collective_rpc``. `VllmHooks`
and the HTTP routes call them for users; each asks the `WorkerHooks` of its worker. All of them take and return plain
data, and return errors instead of raising them: of an exception in a worker only its text arrives.

An engine takes one extension class: to have the methods of another as well, derive a class from both.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, ParamSpec

from hookline.engines.live_hooks import LiveHook
from hookline.engines.request_options import ClientHook
from hookline.engines.request_results import RequestResults, check_called, check_no_stop, error_to_plain, never_called
from hookline.engines.session import Session
from hookline.engines.vllm.start_options import TAP, StartOptions, wrap
from hookline.engines.vllm.step_tokens import RequestBook, tokens_after_model, tokens_of_step
from hookline.engines.vllm.taps import Taps
from hookline.errors import OptionError
from hookline.factories.replacing import stream_of
from hookline.observe.tokens import Tokens, set_tokens

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("hookline.engines.vllm")

_P = ParamSpec("_P")
_Method = Callable[Concatenate[Any, _P], dict[str, Any]]
_Shown = list[dict[str, Any]]  # `WorkerHooks` has a method called list


def _answering(method: _Method[_P]) -> _Method[_P]:
    """Have a method return the rank of its worker too, and an error as plain data."""

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> dict[str, Any]:
        rank = int(getattr(self, "rank", 0))
        try:
            return {"rank": rank, **method(self, *args, **kwargs)}
        except Exception as error:
            logger.info("a call of hookline failed", exc_info=error)
            return {"rank": rank, "error": error_to_plain(error)}

    return call


class HookExtension:
    """Methods that every worker of an engine gets.

    Recipe::

        llm = LLM("models/tiny", worker_extension_cls="hookline.engines.vllm.extension.HookExtension")
        llm.collective_rpc("hookline_list")
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a worker that begins with hooks when its model is loaded; vLLM makes this a last base of its class."""
        worker = super().__new__(cls)
        wrap(worker, "load_model", after=lambda *_, **__: _start(worker))
        return worker

    @_answering
    def hookline_describe(self) -> dict[str, Any]:
        """Return what kind of engine it is, and how many steps and tokens hooks could see."""
        return {"engine": _hooks_of(self).describe()}

    @_answering
    def hookline_add(
        self, specs: Sequence[Mapping[str, Any]], allow: Sequence[str] | None = None, strict: bool = True
    ) -> dict[str, Any]:
        """Attach hooks, all or none, and return them."""
        return {"hooks": _hooks_of(self).add(specs, allow=allow, strict=strict)}

    @_answering
    def hookline_list(self) -> dict[str, Any]:
        """Return the hooks with what they have done."""
        return {"hooks": _hooks_of(self).list()}

    @_answering
    def hookline_remove(self, id: str) -> dict[str, Any]:
        """Remove a hook and return it."""
        return {"hooks": [_hooks_of(self).remove(id)]}

    @_answering
    def hookline_metrics(self) -> dict[str, Any]:
        """Return the metrics of each hook by its id."""
        return {"metrics": _hooks_of(self).session.live.metrics()}

    @_answering
    def hookline_take(self, key: str) -> dict[str, Any]:
        """Return what was found for the requests under a key, or for the one that has that id; forget it."""
        return {"answers": _hooks_of(self).results.take(key)}


def _hooks_of(worker: Any) -> WorkerHooks:
    """Return the hooks of a worker, made at the first call if the start of the engine has not made them."""
    found: WorkerHooks | None = worker.__dict__.get("_hookline_hooks")
    if found is None:
        try:
            found = WorkerHooks(worker, StartOptions.read(worker.vllm_config.additional_config))
        except AttributeError as error:
            version = getattr(sys.modules.get("vllm"), "__version__", "unknown")
            raise OptionError(
                f"This engine (vLLM {version}) is built otherwise than those that hookline knows ({error}); no hook "
                "can be attached. docs/engines.md has the versions that were tested."
            ) from error
        worker.__dict__["_hookline_hooks"] = found
    return found


# -- what kind of engine it is, and in which way hooks fire in it: read from attributes of vLLM's configuration ----

Way = Literal["eager", "on_demand", "tapped"]
"""How a hook fires: the model runs eagerly anyway; each step with hooks is run eagerly; in compiled code."""

TESTED_VERSIONS: Final = ("0.32.0",)
"""Versions of vLLM that `make test-vllm` has run."""


@dataclass(frozen=True)
class EngineFacts:
    """What a worker knows of its engine."""

    version: str
    is_compiled: bool
    graphs: str
    """``"none"``, ``"piecewise"`` or ``"full"``: which forwards are replayed as CUDA graphs."""
    runner: str
    """``"V1"`` or ``"V2"``: which of vLLM's two model runners."""
    rank: int
    tp_size: int
    """Into how many parts tensor parallelism cuts outputs."""
    is_staged: bool = False
    """Whether pipeline stages have a part of the layers each."""
    is_split_at_taps: bool = False
    """Whether the compiled graph is split at taps, so that CUDA graphs of its pieces leave them out."""

    @classmethod
    def of(cls, worker: Any) -> EngineFacts:
        """Return the facts of a worker of vLLM."""
        config = worker.vllm_config
        compilation = config.compilation_config
        return cls(
            version=str(getattr(sys.modules.get("vllm"), "__version__", "unknown")),
            is_compiled=bool(int(compilation.mode or 0)),
            graphs=_graphs(getattr(compilation, "cudagraph_mode", None)),
            runner="V2" if getattr(worker, "use_v2_model_runner", False) else "V1",
            rank=int(worker.rank),
            tp_size=int(getattr(config.parallel_config, "tensor_parallel_size", 1)),
            is_staged=int(getattr(config.parallel_config, "pipeline_parallel_size", 1)) > 1,
            is_split_at_taps=TAP in (getattr(compilation, "splitting_ops", None) or ()),
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the facts as ``hookline_describe`` shows them."""
        names = ("rank", "tp_size", "version", "runner", "graphs", "notes")
        return {**{name: getattr(self, name) for name in names}, "compiled": self.is_compiled}

    @property
    def notes(self) -> list[str]:
        """Return what a user should know before trusting hooks in this engine."""
        found = []
        if self.version.split("+")[0] not in TESTED_VERSIONS:
            found.append(
                f"hookline was tested with vLLM {', '.join(TESTED_VERSIONS)}, and this is {self.version}: compare the "
                "hidden states of one prompt with transformers before you trust them"
            )
        if self.runner == "V2":
            found.append("the V2 model runner is supported from its sources and untested")
        if self.graphs != "none":
            found.append("CUDA graphs are supported from the sources and untested")
        return found


def choose_way(facts: EngineFacts) -> Way:
    """Return how hooks fire; raise where no way is left."""
    if facts.graphs == "full":  # a replayed CUDA graph calls no Python: a hook would be silent, and nobody be told
        raise OptionError(
            "This engine replays whole forwards as CUDA graphs, where no module is called and no hook can fire. Start "
            """it with --enforce-eager, or with --compilation-config '{"cudagraph_mode": "PIECEWISE"}'."""
        )
    if facts.is_staged:
        raise OptionError("This engine has pipeline stages, of which none has all layers; hooks need one stage.")
    return "on_demand" if facts.is_compiled else "eager"


def check_taps(facts: EngineFacts, taps: Sequence[str]) -> None:
    """Raise if taps were asked for, and would be silent in this engine."""
    if taps and facts.graphs == "piecewise" and not facts.is_split_at_taps:
        raise OptionError(
            f"CUDA graphs replay no tap unless the graph is split there. Start the engine with engine_options(taps=…), "
            f"or add {TAP!r} to splitting_ops of --compilation-config, after vLLM's own."
        )


def _graphs(mode: Any) -> str:
    """Return which CUDA graphs an engine replays, by the value of its ``cudagraph_mode``."""
    if mode is None or getattr(mode, "name", str(mode)) == "NONE":
        return "none"
    has_full = getattr(mode, "has_full_cudagraphs", None)
    is_full = has_full() if callable(has_full) else "FULL" in str(getattr(mode, "name", mode))
    return "full" if is_full else "piecewise"


# -- the hooks of one worker ------------------------------------------------------------------------------------


class WorkerHooks:
    """The hooks of one worker: a `Session` on its model, and what is known of its steps.

    It puts two torch hooks on the root of the model, which vLLM does not compile, and reads each step's requests there.
    Requests ask in ``extra_args["hookline"]`` (`RequestResults`).
    """

    def __init__(self, worker: Any, options: StartOptions) -> None:
        self.facts = EngineFacts.of(worker)
        self.options = options
        check_taps(self.facts, options.taps)
        self.model: nn.Module = worker.get_model()
        self.taps = Taps(self.model, options.taps if self.facts.is_compiled else ())
        self.book = RequestBook()
        self.steps = 0
        """Real steps while there was a hook."""
        self.eager_steps = 0
        """How many of them a compiled engine ran eagerly, for the hooks."""
        self.session = Session(self.model, stream=stream_of)
        self.results = RequestResults(
            self.session,
            most_bytes=options.captured_bytes,
            allow=options.allow_requests,
            check=partial(choose_way, self.facts),
            tp_size=self.facts.tp_size,
        )
        self._runner = worker.model_runner
        self._table: Tokens | None = None
        self._batch: Any = None
        self._install()
        for note in self.facts.notes:
            logger.warning("%s", note)

    # -- hooks ------------------------------------------------------------------------------------------------

    def add(
        self, specs: Sequence[Mapping[str, Any]], *, allow: Sequence[str] | None = None, strict: bool = True
    ) -> _Shown:
        """Attach hooks to the running engine, all or none; each spec uses up a number in every worker."""
        choose_way(self.facts)  # raises where there is none
        given = specs if allow is None else [ClientHook.from_dict(each) for each in specs]
        check_no_stop(specs)
        added = self.session.live.add_all(given, allow=allow, strict=strict)
        try:
            for each in added:
                check_called(self.model, each.matched)
        except BaseException:
            self.session.live.detach(added)
            raise
        for each in added:
            logger.info("hook %s attached, which fires %s", each.id, self._way_of(each))
        return [self._shown(each) for each in added]

    def remove(self, id: str) -> dict[str, Any]:
        """Remove a hook; return its last figures."""
        return self._shown(self.session.live.remove(id))

    def list(self) -> _Shown:
        """Return the hooks with their figures."""
        return [self._shown(live) for live in self.session.live.list()]

    def close(self) -> None:
        """Remove all hooks, and write what they still have; does not raise."""
        try:
            self.results.clear()
            self.session.close()
        except Exception:
            logger.exception("hooks could not be closed")
        set_tokens(None)

    def _way_of(self, live: LiveHook) -> Way:
        """Return how a hook fires."""
        is_tapped = self.facts.is_compiled and self.taps.reach(live.places)
        return "tapped" if is_tapped else choose_way(self.facts)

    def _shown(self, live: LiveHook) -> dict[str, Any]:
        """Return a hook as plain data: as ``GET /hooks`` of the server has it, with its way and its sites."""
        modules = {each.name: each.container.module() for each in live.handle._attachment.members()}
        return {
            **live.to_plain(),
            "rank": self.facts.rank,
            "way": self._way_of(live),
            "sites": {site.name: site.fired for site in live.handle.report().sites},
            "silent": {name: never_called(modules[name]) or cause for name, cause in live.silent_sites().items()},
        }

    def describe(self) -> dict[str, Any]:
        """Return what is known of the engine and of its steps, as plain data."""
        return {
            **self.facts.to_plain(),
            "steps": self.steps,
            "eager_steps": self.eager_steps,
            "prompt_tokens": self.book.prompt_tokens,
            "not_computed": self.book.not_computed,
            "captured_bytes": self.results.nbytes,
        }

    # -- steps ------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        """Put the hooks of this object on the root of the model, and around the runner's steps, for good."""
        self.model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self.model.register_forward_hook(self._after, always_call=True)
        wrap(self._runner, "execute_model", before=self._note_step)
        if self.facts.runner == "V2":  # untested: read from the sources
            wrap(self._runner, "prepare_inputs", after=self._note_batch)

    def _note_step(self, scheduled: Any, *args: Any, **kwargs: Any) -> None:
        """Begin with the requests that the step brings, and end with those that are over."""
        if kwargs.get("dummy_run"):
            return
        try:
            begun, ended = self.book.note(scheduled)
            for id in ended:
                self.results.close(id)
            for each in begun:
                self.results.open(each)
        except Exception as error:
            self.results.give_up("which requests a step begins could not be read", error)

    def _note_batch(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        self._batch = batch

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Tell hooks whose rows the step has, and run it eagerly if a hook needs that."""
        self._table = None
        set_tokens(None)
        self.taps.begin()
        if not self.session.is_active:
            return
        try:
            self._begin(kwargs)
        except Exception as error:  # the engine lives on; hooks for single requests do nothing in this step
            self._table = None
            self.results.give_up("the rows of a step could not be read", error)

    def _begin(self, kwargs: dict[str, Any]) -> None:
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context.attn_metadata is None:  # a run that warms up
            return
        self.steps += 1
        if self.facts.is_compiled and not self.taps.reach(self.session.places):
            context.skip_compiled = True
            self.eager_steps += 1
        batch, self._batch = self._batch, None
        self._table = tokens_of_step(self._runner, batch, self.book, kwargs)
        self.session.begin_step(self._table)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.taps.end()
        self.session.end_forward()
        table, self._table = self._table, None
        if table is None:
            return
        set_tokens(tokens_after_model(table))
        self.results.collect(dict(zip(table.requests, table.keys, strict=True)))


# -- the start of an engine --------------------------------------------------------------------------------------


def _start(worker: HookExtension) -> None:
    """Attach the hooks that the engine was started with when it has warmed up: those numbers are no one's."""
    from hookline.runs.documents import specs_of_file

    try:
        hooks = _hooks_of(worker)
    except OptionError as error:
        if not isinstance(error.__cause__, AttributeError):
            raise
        logger.error("%s", error)  # the engine lives on, and every call of hookline is answered with this
        return
    file = hooks.options.hooks
    specs = [] if file is None else specs_of_file(file)
    if specs:
        wrap(worker, "compile_or_warm_up_model", after=lambda *_: hooks.add(specs, strict=False))
    wrap(worker, "shutdown", before=lambda *_, **__: hooks.close())  # exports are written to the end
