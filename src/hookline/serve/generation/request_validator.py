"""Check a request against the model before the engine accepts it.

`Engine.submit_all` calls `RequestValidator`, which returns the hidden states to gather, or raises with what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hookline.errors import OptionError
from hookline.serve.generation.hidden_states import RowStates, StateShape, StateSource, wanted_sources, wanted_states
from hookline.sites.targets import check_model

if TYPE_CHECKING:
    from torch import nn

    from hookline.serve.generation_request import GenerationRequest

__all__ = ["RequestValidator", "check_settings"]


class RequestValidator:
    """Check requests against the model, from any thread, before any of them touches it."""

    def __init__(
        self,
        model: nn.Module,
        shapes: dict[StateSource, StateShape],
        *,
        max_sequence: int | None,
        vocabulary: int,
        captured_bytes: int,
        has_text: bool,
    ) -> None:
        self._model = model
        self._shapes = shapes
        self._max_sequence = max_sequence
        self._vocabulary = vocabulary
        self._captured_bytes = captured_bytes
        self._has_text = has_text

    def check(self, requests: Sequence[GenerationRequest]) -> list[RowStates | None]:
        """Return the hidden states that each of `requests` wants, None for none; raise for what cannot be had."""
        for request in requests:
            self._check_tokens(request)
            if request.stop and not self._has_text:
                raise OptionError("stop needs text, and this engine has no tokenizer; leave stop out.")
        wanted = {request.states for request in requests} - {None}  # matched once, however many answers there are
        sources = {each: wanted_sources(self._model, each, self._shapes) for each in wanted if each is not None}
        found = [
            None
            if request.states is None
            else wanted_states(request.states, len(request.prompt_ids), request.max_tokens, sources[request.states])
            for request in requests
        ]
        nbytes = sum(states.nbytes for states in found if states is not None)
        if nbytes > self._captured_bytes:
            raise OptionError(
                f"Its hidden states can come to {nbytes:,} bytes, and all requests together may have "
                f"{self._captured_bytes:,}; ask for fewer layers, positions, tokens or answers."
            )
        return found

    def _check_tokens(self, request: GenerationRequest) -> None:
        prompt, answer, most = len(request.prompt_ids), request.max_tokens, self._max_sequence
        if most is not None and prompt + answer > most:
            raise OptionError(
                f"The prompt has {prompt} tokens and the answer may have {answer}, together {prompt + answer}; this "
                f"model takes {most}."
            )
        size = self._vocabulary
        strange = next((token for token in request.prompt_ids if not 0 <= token < size), None)
        if strange is not None:  # on a GPU, an index that is out of bounds ends the process
            raise OptionError(f"Token {strange} is not in the model's vocabulary, which goes from 0 to {size - 1}.")


def check_settings(model: nn.Module, on_error: str, **limits: int) -> None:
    """Raise for a model that cannot be served as it is, and for settings of an engine that mean nothing."""
    check_model(model)
    if model.training:
        raise OptionError("The model is in training mode, where dropout changes its answers; call model.eval().")
    if on_error not in ("disable", "warn", "raise"):
        raise OptionError(f"on_error is 'disable', 'warn' or 'raise', got {on_error!r}.")
    for name, value in limits.items():
        least = 1 if name == "max_batch" else 0
        if type(value) is not int or value < least:
            raise OptionError(f"{name} is a whole number from {least} on, got {value!r}.")
