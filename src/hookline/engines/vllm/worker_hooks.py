"""Keep the hooks of one worker of vLLM: attach and remove them, make them fire, and tell them whose rows they see.

`HookExtension` has one `WorkerHooks` for each worker. It puts two torch hooks on the root of the model, which vLLM
does not compile, and reads each step's requests there; hooks of users go on by the `LiveHooks` of the server.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookline.engines.hooks_in_worker import silent_sites
from hookline.engines.output_widths import output_widths
from hookline.engines.vllm.answer_ends import AnswerEnds
from hookline.engines.vllm.engine_facts import EngineFacts, Way, check_stop, choose_way, hidden_size_of, way_words
from hookline.engines.vllm.engine_live_hooks import EngineLiveHooks
from hookline.engines.vllm.layer_sources import never_called
from hookline.engines.vllm.request_flags import RequestFlags
from hookline.engines.vllm.request_options import request_options
from hookline.engines.vllm.request_states import RequestStates
from hookline.engines.vllm.start_options import StartOptions
from hookline.engines.vllm.step_rows import (
    BookedRequest,
    RequestBook,
    key_of_answer,
    rows_of_runner,
    table_after_model,
    table_of_step,
)
from hookline.errors import OptionError
from hookline.observe.tokens import Tokens, set_tokens
from hookline.serve.live_hooks import LiveHook, Origin
from hookline.serve.request_hooks import RequestHooks, harmless_spec
from hookline.sites.wrappers import submodule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["WorkerHooks", "keep_compiled_code_fresh"]

_Shown = list[dict[str, Any]]  # `WorkerHooks` has a method of that name
_Live = list[LiveHook]

logger = logging.getLogger("hookline.engines.vllm")


class WorkerHooks:
    """The hooks of one worker, and what is known of its steps."""

    def __init__(self, worker: Any, options: StartOptions) -> None:
        self.facts = EngineFacts.of(worker)
        self.options = options
        self.model: nn.Module = worker.get_model()
        self.book = RequestBook(has_random_ids=self.facts.has_random_ids)
        self.steps = 0
        """Real steps while there was a hook."""
        self.eager_steps = 0
        """How many of them a compiled engine ran eagerly, for the hooks."""
        self.states = RequestStates(self.model, tp_size=self.facts.tp_size, most_bytes=options.captured_bytes)
        widths = output_widths(self.model, hidden_size_of(worker))
        self.request_hooks = RequestHooks(self.model, EngineLiveHooks(self.model, widths))
        self.flags = RequestFlags(can_stop=self.facts.why_no_stop is None)
        self.ends = None if self.facts.why_no_stop else AnswerEnds(worker.model_runner)
        self._runner = worker.model_runner
        self._live = EngineLiveHooks(self.model, widths)
        self._ways: dict[str, Way] = {}
        self._deferred: Any = []
        self._before_start: dict[str, dict[str, int]] = {}
        """How often hooks in the compiled code were met while the engine warmed up, by id and module."""
        self._table: Tokens | None = None
        self._batch: Any = None
        self._has_logged = False
        self._install()
        for note in self.facts.notes:
            logger.warning("%s", note)

    # -- hooks ------------------------------------------------------------------------------------------------

    def add(
        self,
        specs: Sequence[Mapping[str, Any]],
        *,
        allow: Sequence[str] | None = None,
        strict: bool = True,
        origin: Origin = "http",
    ) -> _Live:
        """Attach hooks to the running engine, all or none; number them by their place in ``specs``.

        Each spec uses up a number, attached or not: workers have the same numbers for the same hooks then.
        """
        way = choose_way(self.facts, before_compiling=False)
        added: _Live = []
        start = self._live.made
        try:
            for place, spec in enumerate(specs if allow is None else [harmless_spec(each) for each in specs]):
                self._live.made = start + place
                check_stop(self.facts, spec)
                new = self._live.add_all([spec], allow=allow, strict=strict, origin=origin)
                added += new
                for live in new:
                    self._check_called(live.matched)
                self._ways.update({live.id: way for live in new})
        except BaseException:
            for live in added:
                self.remove(live.id)
            raise
        finally:
            self._live.made = start + len(specs)
        if added:
            logger.info("%d hooks attached: %s", len(added), way_words([way]))
        return added

    def add_in_graph(self, specs: Sequence[Mapping[str, Any]]) -> None:
        """Attach hooks before the engine compiles; keep edits for `add_deferred`, as none can be switched off there."""
        for spec in specs:
            check_stop(self.facts, spec)
            for live in self._live.add_for_graph(spec):
                live.counted.off = True  # until the engine has warmed up: those numbers are no one's
                if live.counted.in_graph:  # it edits
                    self._live.remove(live.id)
                    self._deferred.append(spec)
                    logger.info("hook %r edits, and will fire on demand instead of in the compiled code", live.name)
                else:
                    self._ways[live.id] = "in_graph"
        if "in_graph" in self._ways.values():
            logger.info("hooks attached before compiling: %s", way_words(["in_graph"]))

    def add_deferred(self, specs: Sequence[Mapping[str, Any]] = ()) -> None:
        """Attach what has to wait until the engine has compiled the model."""
        for live in self._live.list():
            live.counted.off = False
            self._before_start[live.id] = {site.name: site.fired for site in live.handle.report().sites}
        waiting, self._deferred = [*self._deferred, *specs], []
        if waiting:
            self.add(waiting, strict=False, origin="start")

    def remove(self, id: str) -> LiveHook:
        """Remove a hook; one in the compiled code is switched off, as that code still calls it."""
        live = self._live.remove(id)
        self._ways.pop(id, None)
        return live

    def close(self) -> None:
        """Remove all hooks, and write what they still have."""
        self._ways.clear()
        self._live.close()
        self.request_hooks.clear()
        self.states.clear()
        self.flags.clear()
        set_tokens(None)

    def list(self) -> _Shown:
        """Return the hooks with their figures."""
        return [self.shown(live) for live in self._live.list()]

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each hook by its id."""
        return self._live.metrics()

    def shown(self, live: LiveHook) -> dict[str, Any]:
        """Return a hook as plain data: as ``GET /hooks`` of the server has it, with its way and its sites."""
        from hookline.serve.http.hook_routes import hook_to_json

        earlier = self._before_start.get(live.id, {})
        sites = {site.name: site.fired - earlier.get(site.name, 0) for site in live.handle.report().sites}
        absent = _absent(live)
        return {
            **hook_to_json(live),
            "rank": self.facts.rank,
            "way": self._ways.get(live.id, "eager"),
            "sites": {name: fired for name, fired in sites.items() if name not in absent},
            "silent": self._silent(live),
        }

    def describe(self) -> dict[str, Any]:
        """Return what is known of the engine and of its steps, as plain data."""
        facts = self.facts
        return {
            "rank": facts.rank,
            "tp_rank": facts.tp_rank,
            "tp_size": facts.tp_size,
            "pp_rank": facts.pp_rank,
            "pp_size": facts.pp_size,
            "version": facts.version,
            "runner": facts.runner,
            "compiled": facts.is_compiled,
            "graphs": facts.graphs,
            "notes": facts.notes,
            "steps": self.steps,
            "eager_steps": self.eager_steps,
            "prompt_tokens": self.book.prompt_tokens,
            "not_computed": self.book.not_computed,
            "captured_bytes": self.states.nbytes,
        }

    def _check_called(self, names: Sequence[str]) -> None:
        """Raise for a hook on modules that vLLM calls none of; beside others, they are told as silent."""
        causes = [never_called(submodule(self.model, name) if name else self.model) for name in names]
        if causes and all(causes):
            raise OptionError(f"A hook on {', '.join(map(repr, names))} would never fire: {causes[0]}.")

    def _silent(self, live: LiveHook) -> dict[str, str]:
        """Return the modules where a hook has not fired although the model ran, with the cause."""
        absent = _absent(live)
        return {
            name: never_called(submodule(self.model, name) if name else self.model) or cause
            for name, cause in silent_sites(live).items()
            if name not in absent
        }

    # -- steps ------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        """Put the hooks of this object on the root of the model, and around the runner's steps, for good."""
        self.model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self.model.register_forward_hook(self._after, always_call=True)
        runner = self._runner
        runner.execute_model = _before_call(runner.execute_model, self._note_step)
        if self.facts.runner == "V2":  # untested: read from the sources
            runner.prepare_inputs = _after_call(runner.prepare_inputs, self._note_batch)

    def _note_step(self, scheduled: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("dummy_run"):
            return
        begun, ended = self.book.note(scheduled)
        for id in ended:
            self._close(id)
            if self.ends is not None:
                self.ends.forget(id)
        for booked in begun:
            if booked.options is not None:
                self._open(booked)
            self.flags.begin(booked.name)

    @property
    def _has_requests(self) -> bool:
        """Return whether a running request has asked for something."""
        return self.states.is_active or self.request_hooks.is_active

    def take(self, key: str) -> dict[str, Any]:
        """Return what a request asked for as plain data, and forget it."""
        id = self.states.id_of(key)
        if id is not None:
            self._close(id)
        return self.states.take(key)

    def take_flags(self, key: str) -> _Shown:
        """Return what probes flagged in a request, and forget it."""
        booked = self.states.booked_of(key)
        return self.flags.take(key) if booked is None else self.flags.take(booked.name, booked.id)

    def drop(self, key: str) -> bool:
        """Forget what a request asked for, which may be running; return whether it is known."""
        id = self.states.id_of(key)
        if id is not None:
            self._close(id)
        return self.states.drop(key)

    def _close(self, id: str) -> None:
        """Stop with what a request has asked for; what was found stays in one store until it is taken."""
        self.states.close(id, self.request_hooks.close(id))

    def _open(self, booked: BookedRequest) -> None:
        """Begin with what a request asks for; what is wrong with it, its answer tells."""
        try:
            asked = request_options(booked.options)
            if asked.key is not None:
                self._name(booked, asked.key)
            if asked.states is None and not asked.hooks:
                return
            choose_way(self.facts, before_compiling=False)
            for given in asked.hooks:
                check_stop(self.facts, given)
            if booked.name == booked.id != self.book.client_name(booked.id):
                raise OptionError(f"Another request is called {self.book.client_name(booked.id)!r}; give each an id.")
        except Exception as error:
            logger.warning("request %r: %s", booked.name, error)
            self.states.open(booked.name, booked, None, error)
            return
        opened = self.states.open(booked.name, booked, asked.states)
        if asked.hooks and opened.error is None:
            try:
                allow = self.options.allow_requests
                confined = self.request_hooks.confine(booked.id, asked.hooks, allow, answers=asked.answers)
                for spec in confined:
                    self._check_called(spec.target_modules)
                self.request_hooks.open(booked.id, confined)
            except Exception as error:
                opened.fail(error)

    def _name(self, booked: BookedRequest, key: str) -> None:
        """Let users call a request by its key; raise if that is the name of another one."""
        key = key_of_answer(key, booked.id, self.book.holder(key) or self.states.id_of(key))
        if not self.book.rename(booked, key):
            raise OptionError(f"key={key!r} is the name of another request; give each a key of its own.")

    def _note_batch(self, batch: Any) -> None:
        self._batch = batch

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Tell hooks whose rows the step has, and run it eagerly if a hook needs that."""
        self._table = None
        if not self._ways and not self._has_requests:
            return
        try:
            self._begin(kwargs)
        except Exception as error:  # the engine lives on; hooks for single requests do nothing in this step
            self._table = None
            self.states.fail_running(OptionError(f"The rows of a step could not be read ({error!r})."))
            self._log_once("the rows of a step could not be read; hooks do not know whose tokens they see")
        set_tokens(self._table)

    def _begin(self, kwargs: dict[str, Any]) -> None:
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context.attn_metadata is None:  # a run that warms up
            return
        self.steps += 1
        if self._needs_eager():
            context.skip_compiled = True
            self.eager_steps += 1
        batch, self._batch = self._batch, None
        rows = rows_of_runner(self._runner, batch)
        self._table = table_of_step(rows, self.book.names(rows), kwargs)
        self.states.begin_step(rows)
        self.flags.begin_step()

    def _needs_eager(self) -> bool:
        """Return whether a hook that is on, or a request, needs this step of a compiled engine run eagerly."""
        if self.facts.is_compiled and self._has_requests:
            return True
        return any(self._ways.get(live.id) == "on_demand" and not live.off for live in self._live.list())

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        table, self._table = self._table, None
        if table is None:
            return
        set_tokens(table_after_model(table))
        try:
            ending = self.flags.end_step(table)
            if self.ends is not None:
                self.ends.end(ending)
            self.states.end_step()
        except Exception as error:  # out of a hook of the root, it would end the engine
            self.states.fail_running(OptionError(f"What hooks found in a step could not be read ({error!r})."))
            self._log_once("what hooks found in a step could not be read")

    def _log_once(self, text: str) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.exception("%s", text)


def keep_compiled_code_fresh() -> None:
    """Have the engine compile the model anew: code from vLLM's cache was made without the hooks of this process."""
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"


def _before_call(function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    logged: list[bool] = []  # once: such an error comes with every step

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            note(*args, **kwargs)
        except Exception:
            if not logged:
                logged.append(True)
                logger.exception("a step of the engine could not be read")
        return function(*args, **kwargs)

    return call


def _after_call(function: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note(result)
        return result

    return call


def _absent(live: LiveHook) -> set[str]:
    """Return the modules that another pipeline stage has: vLLM puts an empty one in their place."""
    members = live.handle._attachment.members()
    return {each.name for each in members if type(each.container.module()).__name__ == "PPMissingLayer"}
