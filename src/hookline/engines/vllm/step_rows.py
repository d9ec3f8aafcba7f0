"""Map the rows of one step of vLLM to requests, and keep what is known of each running request.

`WorkerHooks` tells `RequestBook` of every step and asks `rows_of_step` for the table that hooks see. The objects of
vLLM are read by their attributes; nothing here imports vllm or waits for a device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from hookline.observe.tokens import Tokens

__all__ = [
    "BookedRequest",
    "RequestBook",
    "StepRow",
    "key_of_answer",
    "rows_of_runner",
    "table_after_model",
    "table_of_step",
]

_RANDOM_END: Final = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM adds to the id that a client gave, so that no two requests have the same."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """The tokens of one request in one step."""

    request_id: str
    """The engine's own id."""
    first: int
    """Position of its first token in this step, from 0 over prompt and answer."""
    count: int
    """How many tokens of it are in this step."""
    prompt: int
    """How many tokens its prompt has."""

    @property
    def phase(self) -> str:
        """Return ``"prefill"`` while tokens of the prompt are run, else ``"decode"``."""
        return "prefill" if self.first < self.prompt else "decode"


def rows_of_runner(runner: Any, batch: Any = None) -> list[StepRow]:
    """Return the rows of the step that a model runner is about to run, in the order of its flat batch.

    Args:
        runner: The V1 runner, whose ``input_batch`` persists.
        batch: What ``prepare_inputs`` of the V2 runner returned for this step.
    """
    if batch is not None:
        starts, computed, prompts = batch.query_start_loc_np, batch.num_computed_tokens_np, batch.prefill_len_np
        names = list(batch.req_ids)
    else:
        kept = runner.input_batch
        names = list(kept.req_ids[: kept.num_reqs])
        starts, computed, prompts = runner.query_start_loc.np, kept.num_computed_tokens_cpu, kept.num_prompt_tokens
    bounds = starts[: len(names) + 1].tolist()
    firsts, lengths = computed[: len(names)].tolist(), prompts[: len(names)].tolist()
    return [StepRow(name, firsts[row], bounds[row + 1] - bounds[row], lengths[row]) for row, name in enumerate(names)]


def table_of_step(rows: Sequence[StepRow], names: Sequence[str], inputs: dict[str, Any]) -> Tokens:
    """Return the table of a step: whose tokens are in its flat batch.

    Args:
        rows: The requests, in the order of the batch.
        names: What users call each of them.
        inputs: The keyword arguments of the model's forward.
    """
    return Tokens(
        tuple(names),
        tuple(row.count for row in rows),
        tuple(row.first for row in rows),
        tuple(row.phase for row in rows),
        ids=_first(inputs.get("input_ids"), sum(row.count for row in rows)),
        keys=tuple(row.request_id for row in rows),
        room=_length(inputs),
    )


def table_after_model(table: Tokens) -> Tokens:
    """Return the table for what runs behind the model, on the last token of each request: the logits."""
    lasts = zip(table.firsts, table.lengths, strict=True)
    firsts = tuple(None if first is None else first + length - 1 for first, length in lasts)
    return Tokens(table.requests, (1,) * len(table.requests), firsts, table.phases, keys=table.keys)


def _length(inputs: dict[str, Any]) -> int:
    """Return how many tokens the model is called with; 0 where it is called with something else."""
    given = [each for name in ("input_ids", "inputs_embeds") if isinstance(each := inputs.get(name), Tensor)]
    return int(given[0].shape[0]) if given else 0


def _first(value: Any, count: int) -> Tensor | None:
    """Return the first ``count`` numbers; None if there are no numbers by token, as for positions in three rows."""
    return value[:count] if isinstance(value, Tensor) and value.dim() == 1 else None


@dataclass(slots=True)
class BookedRequest:
    """What is known of one request, from its first step on."""

    id: str
    """The engine's own id."""
    name: str
    """What users call it: the id that the client gave, or the ``key`` in the options of the request; the engine's own
    id if another running request has that name."""
    prompt: int
    """How many tokens its prompt has."""
    not_computed: int
    """How many of them were taken from the prefix cache, where no hook sees them."""
    options: Any = None
    """``extra_args["hookline"]`` of its sampling parameters, as it came."""


@dataclass(slots=True)
class RequestBook:
    """The requests that are running, by the engine's own id."""

    running: dict[str, BookedRequest] = field(default_factory=dict)
    has_random_ids: bool = True
    """Whether the engine adds a random end to the ids that clients give."""
    prompt_tokens: int = 0
    """Of all requests so far."""
    not_computed: int = 0
    """How many of those came from the prefix cache."""
    _holders: dict[str, str] = field(default_factory=dict)
    """The engine's own id of the running request that has each name."""

    def note(self, scheduled: Any) -> tuple[list[BookedRequest], list[str]]:
        """Return the requests that begin with the step ``scheduled``, and the ids of those that have ended."""
        finished = getattr(scheduled, "finished_req_ids", ())
        ended = [each for each in finished if self._ended(each)]
        listed = getattr(scheduled, "scheduled_new_reqs", ())
        # The V2 runner lists a request again after it was put off.
        return [self._booked(new) for new in listed if new.req_id not in self.running], ended

    def names(self, rows: Sequence[StepRow]) -> tuple[str, ...]:
        """Return what users call the requests of these rows."""
        found: list[str] = []
        for row in rows:
            booked = self.running.get(row.request_id)
            name = self.client_name(row.request_id) if booked is None else booked.name
            is_other = booked is None and (name in self._holders or name in found)
            found.append(row.request_id if is_other else name)
        return tuple(found)

    def client_name(self, id: str) -> str:
        """Return the id that the client gave to a request."""
        return client_id(id) if self.has_random_ids else id

    def holder(self, name: str) -> str | None:
        """Return the engine's own id of the running request that has a name; None if none has."""
        return self._holders.get(name)

    def rename(self, booked: BookedRequest, name: str) -> bool:
        """Give a request another name; return False, and change nothing, if another running request has it."""
        if self._holders.get(name, booked.id) != booked.id:
            return False
        if self._holders.get(booked.name) == booked.id:
            del self._holders[booked.name]
        self._holders[name] = booked.id
        booked.name = name
        return True

    def _ended(self, id: str) -> bool:
        booked = self.running.pop(id, None)
        if booked is not None and self._holders.get(booked.name) == id:
            del self._holders[booked.name]
        return booked is not None

    def _booked(self, new: Any) -> BookedRequest:
        tokens = new.prompt_token_ids
        prompt = len(tokens) if tokens is not None else int(getattr(new, "prompt_len", 0))
        cached = min(int(new.num_computed_tokens), prompt)
        extra = getattr(new.sampling_params, "extra_args", None) or {}
        booked = BookedRequest(new.req_id, new.req_id, prompt, cached, extra.get("hookline"))
        self.running[new.req_id] = booked
        self.rename(booked, self.client_name(new.req_id))
        self.prompt_tokens += prompt
        self.not_computed += cached
        return booked


def key_of_answer(key: str, id: str, other: str | None) -> str:
    """Return the key of one answer: of several to one prompt, those behind the first have a number in front.

    Args:
        key: What the request asks for.
        id: The engine's own id.
        other: That of the request which has ``key``, if there is one.

    >>> key_of_answer("mine", "1_cmpl-7", "0_cmpl-7")
    '1_mine'
    >>> key_of_answer("mine", "1_cmpl-8", "0_cmpl-7")
    'mine'
    """
    number, line, prompt = id.partition("_")
    is_next = line and number.isdecimal() and other not in (None, id) and other.partition("_")[2] == prompt
    return f"{number}_{key}" if is_next else key


def client_id(request_id: str) -> str:
    """Return the id that a client gave: the engine's own without the random end.

    >>> client_id("cmpl-7-0-1a2b3c4d")
    'cmpl-7-0'
    """
    return _RANDOM_END.sub("", request_id)
