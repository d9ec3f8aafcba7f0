"""Put a `Session` on the model of one worker of vLLM: make hooks fire, and tell them whose tokens they see.

`HookExtension` has one `WorkerHooks` for each worker. It puts two torch hooks on the root of the model, which vLLM does
not compile, and reads each step's requests there. Requests ask in ``extra_args["hookline"]`` (`RequestResults`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookline.engines.engine_modules import check_called, never_called, output_widths
from hookline.engines.live_hooks import LiveHook, Origin
from hookline.engines.request_options import ClientHook, RequestOptions
from hookline.engines.request_results import RequestResults
from hookline.engines.session import Session
from hookline.engines.vllm.engine_facts import EngineFacts, Way, check_stop, check_taps, choose_way, hidden_size_of
from hookline.engines.vllm.start_options import StartOptions, wrap
from hookline.engines.vllm.step_tokens import RequestBook, tokens_after_model, tokens_of_step
from hookline.engines.vllm.taps import Taps
from hookline.errors import OptionError
from hookline.factories.replacing import stream_of
from hookline.observe.tokens import Tokens, set_tokens

if TYPE_CHECKING:
    from torch import nn

__all__ = ["AnswerEnds", "WorkerHooks"]

logger = logging.getLogger("hookline.engines.vllm")

_Shown = list[dict[str, Any]]  # `WorkerHooks` has a method of that name


class WorkerHooks:
    """The hooks of one worker, and what is known of its steps."""

    def __init__(self, worker: Any, options: StartOptions) -> None:
        self.facts = EngineFacts.of(worker)
        self.options = options
        check_taps(self.facts, options.taps)
        self.model: nn.Module = worker.get_model()
        self.taps = Taps(self.model, options.taps if self.facts.is_compiled else ())
        self.book = RequestBook(has_random_ids=self.facts.has_random_ids)
        self.steps = 0
        """Real steps while there was a hook."""
        self.eager_steps = 0
        """How many of them a compiled engine ran eagerly, for the hooks."""
        widths = output_widths(self.model, hidden_size_of(worker))
        self.session = Session(self.model, widths=widths, stream=stream_of)
        can_stop = self.facts.why_no_stop is None
        self.results = RequestResults(
            self.session,
            most_bytes=options.captured_bytes,
            allow=options.allow_requests,
            check=self._check_request,
            tp_size=self.facts.tp_size,
            can_stop=can_stop,
        )
        self.ends = AnswerEnds(worker.model_runner) if can_stop else None
        self._runner = worker.model_runner
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
    ) -> _Shown:
        """Attach hooks to the running engine, all or none; each spec uses up a number in every worker."""
        choose_way(self.facts)  # raises where there is none
        given = specs if allow is None else [ClientHook.from_dict(each) for each in specs]
        for spec in specs:
            check_stop(self.facts, spec)
        added = self.session.live.add_all(given, allow=allow, strict=strict, origin=origin)
        try:
            for each in added:
                check_called(self.model, each.matched)
        except BaseException:
            self.session.live.detach(added)
            raise
        for each in added:
            logger.info("hook %s attached, which fires %s", each.id, self._way_of(each))
        return [self._shown(each) for each in added]

    def remove(self, id: str) -> dict[str, Any] | None:
        """Remove a hook; return its last figures."""
        shown = next((each for each in self.list() if each["id"] == id), None)
        self.session.live.remove(id)
        return shown

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
        # Another pipeline stage has the others: vLLM puts an empty module in their place.
        here = {name: module for name, module in modules.items() if type(module).__name__ != "PPMissingLayer"}
        return {
            **live.to_plain(),
            "rank": self.facts.rank,
            "way": self._way_of(live),
            "sites": {site.name: site.fired for site in live.handle.report().sites if site.name in here},
            "silent": {
                name: never_called(here[name]) or cause for name, cause in live.silent_sites().items() if name in here
            },
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

    def _check_request(self, asked: RequestOptions) -> None:
        """Raise for what this engine cannot do for a request."""
        choose_way(self.facts)
        for spec in asked.hooks:
            check_stop(self.facts, spec)

    def _note_step(self, scheduled: Any, *args: Any, **kwargs: Any) -> None:
        """Begin with the requests that the step brings, and end with those that are over."""
        if kwargs.get("dummy_run"):
            return
        try:
            begun, ended = self.book.note(scheduled)
            for id in ended:
                self.results.close(id)
                if self.ends is not None:
                    self.ends.forget(id)
            for each in begun:
                self.results.open(**each._asdict())
        except Exception as error:
            self._give_up("which requests a step begins could not be read", error)

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
            self._give_up("the rows of a step could not be read", error)

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
        try:
            ending = self.results.collect(dict(zip(table.requests, table.keys, strict=True)))
            if self.ends is not None:
                self.ends.end(ending)
        except Exception as error:  # out of a hook of the root, it would end the engine
            self._give_up("what hooks found in a step could not be read", error)

    def _give_up(self, what: str, error: Exception) -> None:
        """Fail the states of running requests after an error of ours, and say so once."""
        self._table = None
        self.results.fail_running(OptionError(f"For a request's own results, {what} ({error!r})."))
        if not self._has_logged:
            self._has_logged = True
            logger.exception("%s; hooks do not know whose tokens they see", what)


class AnswerEnds:
    """End the answers of single requests: the next token of each is its end token, whatever was sampled.

    Recipe: ``ends = AnswerEnds(runner); ends.end(["cmpl-7-0-1a2b3c4d"])`` after the forward of a step.

    vLLM's scheduler then stops the request as it does at every end token; workers have no other way to it. Each worker
    samples by itself, with the same logits, and so each does this. A request with ``ignore_eos`` and without stop
    tokens goes on to its ``max_tokens``, and every further token of it is the end token: it says no more.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._ids: set[str] = set()
        runner.sampler.register_forward_hook(self._after_sampling)

    def end(self, ids: Iterable[str]) -> None:
        """Let the next token of each of these requests be its last one."""
        self._ids.update(ids)

    def forget(self, id: str) -> None:
        """Forget a request that has ended."""
        self._ids.discard(id)

    def _after_sampling(self, sampler: nn.Module, args: Any, output: Any) -> None:
        if not self._ids:
            return
        try:
            self._replace(output)
        except Exception:  # out of a hook of the sampler, it would end the engine
            logger.exception("answers could not be ended: %s", ", ".join(sorted(self._ids)))
            self._ids.clear()

    def _replace(self, output: Any) -> None:
        """Put end tokens into the rows of these requests; rows have the order of the batch."""
        kept = self._runner.input_batch
        told = output.logprobs_tensors
        for row, id in enumerate(kept.req_ids[: kept.num_reqs]):
            if id not in self._ids:
                continue
            token = _end_token(self._runner.requests[id].sampling_params)
            output.sampled_token_ids[row] = token
            if told is not None and told.logprob_token_ids.dim() == 2:  # the first column is that of the sampled token
                told.logprob_token_ids[row, 0] = token
                told.logprobs[row, 0] = 0.0  # its probability is 1


def _end_token(params: Any) -> int:
    """Return the token that ends an answer: the model's, or one of the request; with ``ignore_eos`` it ends nothing."""
    if params.eos_token_id is not None:
        return int(params.eos_token_id)
    ends = [*(params.stop_token_ids or ()), *sorted(params.all_stop_token_ids)]
    return int(ends[0]) if ends else 0
