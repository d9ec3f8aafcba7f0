"""Hold all that hooks have on the model of one engine: hooks of the engine, hooks and hidden states of requests, notes.

Our server, the workers of vLLM and the model runners of SGLang are adapters on one `Session` each. They only say which
tokens are in a forward (`Tokens`), and when a request begins and ends. Imports torch alone.

    session.begin_step(table) ──► model(...) ──► session.end_forward() ──► session.collect()
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hookline.engines.hidden_states import HiddenStates
from hookline.engines.live_hooks import Between, LiveHooks, Place, RequestHooks, at_once
from hookline.factories.request_notes import RequestFlag, read_flags
from hookline.observe.tokens import Tokens, set_tokens
from hookline.tree import main_tensor

if TYPE_CHECKING:
    from torch import nn


class Session:
    """The hooks of one model, whichever engine runs it.

    Recipe::

        session = Session(model)
        session.live.add({"target_modules": ["*"], "hook_factory": "hookline.factories:nan_alarm"})
        with session.step(table):
            model(input_ids)
        flags = session.collect()

    Args:
        model: The model.
        between: Runs an act while no forward is running.
        allow: What paths of factories of the engine's hooks may begin with; None allows all.
        widths: How many numbers the output of a module has for a token, where that is known.
        outputs: Modules whose output has a row for each token; None if the engine does not know.
        inputs: Modules that take a row for each token; None if the engine does not know.
        stream: Returns the hidden states in what a module returns or takes; its main tensor by default.
    """

    def __init__(
        self,
        model: nn.Module,
        between: Between = at_once,
        *,
        allow: Iterable[str] | None = None,
        widths: Mapping[str, int] | None = None,
        outputs: Container[str] | None = None,
        inputs: Container[str] | None = None,
        stream: Any = lambda module, value: main_tensor(value),
    ) -> None:
        self.model = model
        self.live = LiveHooks(model, between, allow=allow, widths=widths)
        """All hooks; those of single requests, which nobody else is shown, have an owner."""
        self.of_requests = RequestHooks(model, self.live, outputs=outputs, inputs=inputs)
        self.states = HiddenStates(model, stream)
        self._table: Tokens | None = None
        """Whose tokens the last forward has."""

    @property
    def is_active(self) -> bool:
        """Return whether a hook is on, or a running request wants something: the next forward has to be seen."""
        return self.states.is_active or self.live.is_active

    @property
    def places(self) -> Iterator[Place]:
        """Yield the places of all hooks, and of the observers of hidden states."""
        yield from self.states.places
        for live in self.live.on:
            yield from live.places

    def begin_step(self, table: Tokens | None) -> None:
        """Say whose tokens the next forward has; None if nobody knows."""
        table = self._table = None if table is None else table.noted()
        set_tokens(table)
        if table is not None:
            self.states.begin_step(table)

    def end_forward(self) -> None:
        """Say that the forward is over, or has failed."""
        set_tokens(None)

    @contextmanager
    def step(self, table: Tokens | None) -> Iterator[None]:
        """Let the block run one forward with the tokens of ``table``; `collect` has what it gave."""
        self.begin_step(table)
        try:
            yield
        finally:
            self.end_forward()

    def collect(self) -> dict[str, list[RequestFlag]]:
        """Hand the hidden states of the last forward to their requests; return what probes flagged, by request.

        Waits for the device only if something was noted.
        """
        self.states.end_step()
        return {} if self._table is None else read_flags(self._table)

    def close(self) -> None:
        """Remove all hooks for good, and flush them."""
        self.live.close()
