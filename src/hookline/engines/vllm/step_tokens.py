"""Say whose tokens are in one step of vLLM, and keep what is known of each running request.

`WorkerHooks` tells `RequestBook` of every step and asks `tokens_of_step` for the table that hooks see. The objects of
vLLM are read by their attributes; nothing here imports vllm or waits for a device.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Final

from torch import Tensor

from hookline.engines.request_results import BegunRequest
from hookline.observe.tokens import Tokens

_RANDOM_END: Final = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM adds to the id that a client gave, so that no two requests have the same."""
_PLACE: Final = re.compile(r"(?:(\d+)_)?.*?(?:-(\d+))?")


def tokens_of_step(runner: Any, batch: Any, book: RequestBook, inputs: dict[str, Any]) -> Tokens:
    """Return the table of the step that a model runner is about to run, in the order of its flat batch.

    Args:
        runner: The V1 runner, whose ``input_batch`` persists.
        batch: What ``prepare_inputs`` of the V2 runner returned for this step; None for V1.
        book: Knows what users call each request.
        inputs: The keyword arguments of the model's forward.
    """
    if batch is not None:
        starts, computed, prompts = batch.query_start_loc_np, batch.num_computed_tokens_np, batch.prefill_len_np
        ids = list(batch.req_ids)
    else:
        kept = runner.input_batch
        ids = list(kept.req_ids[: kept.num_reqs])
        starts, computed, prompts = runner.query_start_loc.np, kept.num_computed_tokens_cpu, kept.num_prompt_tokens
    bounds, firsts = starts[: len(ids) + 1].tolist(), computed[: len(ids)].tolist()
    lengths = tuple(end - begin for begin, end in pairwise(bounds))
    among_prompt = (first < prompt for first, prompt in zip(firsts, prompts[: len(ids)].tolist(), strict=True))
    given = [each for name in ("input_ids", "inputs_embeds") if isinstance(each := inputs.get(name), Tensor)]
    tokens = inputs.get("input_ids")
    return Tokens(
        book.names(ids),
        lengths,
        tuple(firsts),
        tuple("prefill" if is_prompt else "decode" for is_prompt in among_prompt),
        ids=tokens[: sum(lengths)] if isinstance(tokens, Tensor) and tokens.dim() == 1 else None,
        keys=tuple(ids),
        room=int(given[0].shape[0]) if given else 0,
    )


def tokens_after_model(table: Tokens) -> Tokens:
    """Return the table for what runs behind the model, on the last token of each request: the logits."""
    lasts = zip(table.firsts, table.lengths, strict=True)
    firsts = tuple(None if first is None else first + length - 1 for first, length in lasts)
    return Tokens(table.requests, (1,) * len(table.requests), firsts, table.phases, keys=table.keys)


class RequestBook:
    """The requests that are running."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Of all requests so far."""
        self.not_computed = 0
        """How many of those came from the prefix cache."""
        self._names: dict[str, str] = {}
        """What users call each running request, by the engine's own id."""

    def note(self, scheduled: Any) -> tuple[list[BegunRequest], list[str]]:
        """Return the requests that begin with the step ``scheduled``, and the ids of those that have ended."""
        finished = getattr(scheduled, "finished_req_ids", ())
        ended = [each for each in finished if self._names.pop(each, None) is not None]
        listed = getattr(scheduled, "scheduled_new_reqs", ())
        # The V2 runner lists a request again after it was put off.
        return [self._booked(new) for new in listed if new.req_id not in self._names], ended

    def names(self, ids: list[str]) -> tuple[str, ...]:
        """Return what users call the requests with these ids of the engine, also those that nobody told of."""
        return tuple(self._names.get(id) or self._new_name(id) for id in ids)

    def _new_name(self, id: str) -> str:
        wanted = client_id(id)
        self._names[id] = id if wanted in self._names.values() else wanted
        return self._names[id]

    def _booked(self, new: Any) -> BegunRequest:
        tokens = new.prompt_token_ids
        prompt = len(tokens) if tokens is not None else int(getattr(new, "prompt_len", 0))
        cached = min(int(new.num_computed_tokens), prompt)
        extra = getattr(new.sampling_params, "extra_args", None) or {}
        self.prompt_tokens += prompt
        self.not_computed += cached
        name = self._new_name(new.req_id)
        return BegunRequest(new.req_id, name, extra.get("hookline"), prompt, cached, place_among_answers(name))


def client_id(request_id: str) -> str:
    """Return the id that a client gave: the engine's own without the random end.

    >>> client_id("cmpl-7-0-1a2b3c4d")
    'cmpl-7-0'
    """
    return _RANDOM_END.sub("", request_id)


def place_among_answers(name: str) -> tuple[int, int]:
    """Return which prompt of its body a request answers, and which of the answers to that prompt it is.

    >>> place_among_answers("1_cmpl-mine-3")
    (3, 1)
    """
    found = _PLACE.fullmatch(name)
    copy, prompt = (None, None) if found is None else found.groups()
    return int(prompt or 0), int(copy or 0)
