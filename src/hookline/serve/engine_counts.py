"""Name the counts of a serving engine, each with what it means.

`Engine.counts` and the workers of other engines return them; ``GET /metrics`` writes them with these words.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["EngineCount"]


class EngineCount(StrEnum):
    """A count of an engine; no member can be made without its help text.

    Recipe: ``engine.counts()[EngineCount.ANSWER_TOKENS]``, or by its name, ``engine.counts()["answer_tokens"]``.
    """

    help: str
    """What it counts, in a sentence for ``# HELP``."""
    grows: bool
    """Whether it only grows."""

    def __new__(cls, name: str, help: str, grows: bool) -> EngineCount:
        """Return the member of that name."""
        made = str.__new__(cls, name)
        made._value_ = name
        made.help = help
        made.grows = grows
        return made

    REQUESTS_ACCEPTED = "requests_accepted", "Sequences that were taken into the queue", True
    REQUESTS_REFUSED = "requests_refused", "Sequences that were refused with 429 because too many waited", True
    REQUESTS_STOP = "requests_stop", "Sequences that ended at an end-of-text token or a stop text", True
    REQUESTS_LENGTH = "requests_length", "Sequences that ended because they had max_tokens tokens", True
    REQUESTS_CANCELLED = "requests_cancelled", "Sequences that were cancelled, as by a client that went away", True
    REQUESTS_ERROR = "requests_error", "Sequences that ended with an error", True
    REQUESTS_WAITING = "requests_waiting", "Sequences that wait for their turn now", False
    REQUESTS_RUNNING = "requests_running", "Sequences in the running batch now", False
    PROMPT_TOKENS = "prompt_tokens", "Tokens of the prompts of requests that were run", True
    NOT_COMPUTED = (
        "not_computed",
        "Tokens of prompts that the engine took from its prefix cache, so that no hook saw them",
        True,
    )
    ANSWER_TOKENS = "answer_tokens", "Tokens that were sampled", True
    PREFILL_FORWARDS = "prefill_forwards", "Forwards of the model over prompts", True
    DECODE_FORWARDS = "decode_forwards", "Forwards of the model over one token of each answer", True
    FORWARD_SECONDS = "forward_seconds", "Seconds that the engine spent in forwards of the model", True
    CAPTURED_BYTES = "captured_bytes", "Bytes of hidden states that were gathered for requests", True
    CAPTURED_BYTES_RESERVED = (
        "captured_bytes_reserved",
        "Bytes of hidden states that running requests may still want",
        False,
    )
    CAPTURED_BYTES_LIMIT = "captured_bytes_limit", "The most bytes of hidden states that may be reserved", False
    HOOKS = "hooks", "Hooks that are attached now", False
    STEPS = "steps", "Steps of the engine, each a forward over one batch", True
    EAGER_STEPS = "eager_steps", "Steps that ran eagerly, so that hooks fired", True
