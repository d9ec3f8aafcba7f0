"""End the answers of single requests: the next token of each is its end token, whatever was sampled.

`WorkerHooks` has one `AnswerEnds`, and tells it whose answers a ``probe`` with ``"action": "stop"`` ends. vLLM's
scheduler then stops the request as it does at every end token; workers have no other way to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["AnswerEnds"]

logger = logging.getLogger("hookline.engines.vllm")


class AnswerEnds:
    """The requests of one worker whose answers are to end.

    Recipe: ``ends = AnswerEnds(runner); ends.end(["cmpl-7-0-1a2b3c4d"])`` after the forward of a step.

    Each worker samples by itself, with the same logits, and so each does this. A request with ``ignore_eos`` and
    without stop tokens goes on to its ``max_tokens``, and every further token of it is the end token: it says no more.
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
            token = end_token(self._runner.requests[id].sampling_params)
            output.sampled_token_ids[row] = token
            if told is not None and told.logprob_token_ids.dim() == 2:  # the first column is that of the sampled token
                told.logprob_token_ids[row, 0] = token
                told.logprobs[row, 0] = 0.0  # its probability is 1


def end_token(params: Any) -> int:
    """Return the token that ends an answer: the model's, or one of the request; with ``ignore_eos`` it ends nothing."""
    if params.eos_token_id is not None:
        return int(params.eos_token_id)
    ends = [*(params.stop_token_ids or ()), *sorted(params.all_stop_token_ids)]
    return int(ends[0]) if ends else 0
