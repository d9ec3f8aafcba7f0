"""Know what a model can be asked: its length, its vocabulary, which modules have a row of numbers for each token.

The engine makes a `ServedModel`, which runs the model on a few tokens, and asks it about every request before that
waits. A model that gives other answers in a padded batch is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.engines.hidden_states import RequestStates, StateSource
from hookline.engines.request_options import remembered
from hookline.engines.session import Session
from hookline.errors import OptionError
from hookline.messages import nearest_names
from hookline.observe.tokens import current_tokens
from hookline.serve.generation_request import Event, GenerationRequest
from hookline.serve.request_row import RequestRow
from hookline.serve.row_batch import BatchForward, ChosenToken, RowBatch
from hookline.sites import _torch
from hookline.sites.targets import check_model, select
from hookline.sites.wrappers import unwrap
from hookline.tree import main_tensor

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookline.engines.request_options import StatesWanted

_LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What configurations call the number of positions."""
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float64: 1e-6}
_TOLERANCE_SHORT: Final = 0.1
"""Of the largest logit; for numbers of 16 bits, of which every sum has another rounding."""


class ServedModel:
    """A causal language model as requests see it, and its forward.

    Raises:
        OptionError: It cannot be served: it is in training mode, compiled, fails on a few tokens, or (if it is to
            serve `batches`) gives other answers in a padded one.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, *, max_sequence: int | None, batches: bool) -> None:
        check_model(model)
        if model.training:
            raise OptionError("The model is in training mode, where dropout changes its answers; call model.eval().")
        if any(_torch.is_compiled(each) or _torch.is_compiled_function(each.forward) for each in model.modules()):
            raise OptionError("The model is compiled, and hooks come and go while it is served; give the model itself.")
        self.model = model
        self.tokenizer = tokenizer
        self._end_tokens = _end_tokens(model, tokenizer)
        self.max_sequence = _longest_sequence(model, max_sequence)
        self.forward = BatchForward(model, Session(model))
        self.vocabulary = self.forward.vocabulary
        found = _probe(self.forward, batches=batches)
        self._states = {source: torch.empty_like(states[0], device="meta") for source, states in found.items()}
        """What each source of hidden states has for one token, without the numbers."""
        self._sources = remembered(self._find_sources)

    @property
    def widths(self) -> dict[str, int]:
        """Return how many numbers outputs have for a token, by module; without modules that have no row for each."""
        return {source.module: len(token) for source, token in self._states.items() if source.of == "output"}

    @property
    def inputs(self) -> frozenset[str]:
        """Return the modules that take a row for each token."""
        return frozenset(source.module for source in self._states if source.of == "input")

    def _check(self, request: GenerationRequest) -> None:
        """Raise for a prompt or an answer that the model cannot have."""
        prompt, answer, most = len(request.prompt_ids), request.max_tokens, self.max_sequence
        if most is not None and prompt + answer > most:
            raise OptionError(
                f"The prompt has {prompt} tokens and the answer may have {answer}, together {prompt + answer}; this "
                f"model takes {most}."
            )
        strange = next((token for token in request.prompt_ids if not 0 <= token < self.vocabulary), None)
        if strange is not None:  # on a GPU, an index that is out of bounds ends the process
            last = self.vocabulary - 1
            raise OptionError(f"Token {strange} is not in the model's vocabulary, which goes from 0 to {last}.")
        if request.stop and self.tokenizer is None:
            raise OptionError("stop needs text, and this engine has no tokenizer; leave stop out.")

    def row(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> RequestRow:
        """Return a row for a request; raise for a prompt, an answer or hidden states that the model cannot have."""
        self._check(request)
        states = None
        if request.states is not None:
            prompt = len(request.prompt_ids)
            request.states.check(prompt)
            sources = self._sources(request.states)
            end = prompt + max(request.max_tokens, 1) - 1  # of an answer, the last token is never run
            count = len(request.states.places(0, end, prompt))
            most = sum(count * self._states[source].nbytes for source in sources)
            states = RequestStates(request.id, request.states, prompt, sources, most)
        return RequestRow(request, on_event, tokenizer=self.tokenizer, end_tokens=self._end_tokens, states=states)

    def _find_sources(self, wanted: StatesWanted) -> list[StateSource]:
        """Return the sources that a request asks for, each once; raise if there is none for a name."""
        found: dict[StateSource, None] = {}
        for layer in dict.fromkeys(wanted.layers):
            named = [StateSource(name, wanted.of) for name, _ in select(self.model, layer)]
            known = [source for source in named if source in self._states]  # a glob over everything has containers too
            if not known:
                there = [source.module for source in self._states if source.of == wanted.of and source.module]
                raise OptionError(
                    f"{layer!r} has no {wanted.of} with a row for each token in a forward of this model; nearest that "
                    f"has: {', '.join(map(repr, nearest_names(layer, there)))}."
                )
            found |= dict.fromkeys(known)
        return list(found)


def _longest_sequence(model: nn.Module, wanted: int | None) -> int | None:
    """Return how many tokens a sequence may have: `wanted`, or all positions the configuration names."""
    config: Any = getattr(unwrap(model), "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    lengths = (getattr(text, name, None) for name in _LENGTHS)
    there = next((length for length in lengths if isinstance(length, int) and length > 0), None)
    if wanted is not None and there is not None and wanted > there:
        raise OptionError(
            f"max_sequence is {wanted}, and the model's configuration says that it has {there} positions."
        )
    return wanted or there


def _end_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer."""
    inner = unwrap(model)
    for owner in (getattr(inner, "generation_config", None), getattr(inner, "config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


# -- the probe -----------------------------------------------------------------------------------------------------


def _probe(forward: BatchForward, *, batches: bool) -> dict[StateSource, Tensor]:
    """Return what modules give, or take, for the tokens of a prompt, one row for each; raise for what fails.

    As many rows as there are tokens is not enough: they could be in another order, sorted by expert or column after
    column, where one request would get what is another's. So one prompt is run in two places, beside others; if the
    model is to serve `batches`, the second time beside a longer one, so that it is padded.
    """
    kind = type(unwrap(forward.model)).__name__
    a, b, c = (
        [(each + 3 * step) % forward.vocabulary for step in range(tokens)]
        for each, tokens in enumerate((8, 8, 12 if batches else 8))
    )
    try:
        first, logits = _run(forward, [a, b], 0)
        second, others = _run(forward, [c, a], 1)
    except Exception as error:
        raise OptionError(
            f"{kind} cannot be served: it fails on a few tokens with a DynamicCache, which keeps keys and values of "
            f"attention only ({type(error).__name__}: {error})."
        ) from error
    if batches and not _agree(logits, others):
        raise OptionError(
            f"{kind} gives a sequence other logits in a padded batch, so that requests cannot share one; serve it with "
            "max_batch=1 (hookline serve --max-batch 1)."
        )
    return {source: states for source, states in first.items() if source in second and _agree(states, second[source])}


def _run(forward: BatchForward, prompts: list[list[int]], row: int) -> tuple[dict[StateSource, Tensor], Tensor]:
    """Return what every module gives and takes for the prompt in `row`, and its logits after one more token."""
    found: dict[StateSource, Tensor] = {}

    def note(source: StateSource, value: Any) -> None:
        batch, main = current_tokens(), main_tensor(value)
        tokens = None if batch is None or main is None else batch.by_token(main)
        if batch is not None and tokens is not None and source not in found:  # the first call counts
            own = tokens[batch.begins[row] : batch.begins[row] + batch.lengths[row]].clone()
            found[source] = own if own.dim() > 1 else own.unsqueeze(1)

    def observe(name: str, module: nn.Module, handles: ExitStack) -> None:
        taken, given = StateSource(name, "input"), StateSource(name, "output")
        before = module.register_forward_pre_hook(lambda _, *inputs: note(taken, inputs), with_kwargs=True)
        handles.enter_context(before)
        handles.enter_context(module.register_forward_hook(lambda _, args, output: note(given, output)))

    requests = [GenerationRequest(str(place), tuple(ids), max_tokens=2) for place, ids in enumerate(prompts)]
    batch = RowBatch(forward, [RequestRow(request, lambda event: None) for request in requests])
    with ExitStack() as handles:
        for name, module in select(forward.model, "*"):
            observe(name, module, handles)
        batch.prefill()
    for each in batch.rows:
        each.take(ChosenToken(prompts[row][0]))
    return found, batch.decode()[row : row + 1]


def _agree(one: Tensor, other: Tensor) -> bool:
    """Return whether most tokens have the same numbers; in a mixture, rounding may change a token's expert."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    limit = _TOLERANCE.get(one.dtype, _TOLERANCE_SHORT if one.is_floating_point() else 0.0)
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    apart = (one - other).abs().amax(1)
    return bool((apart <= limit * one.abs().amax(1)).double().mean() > 0.5)
