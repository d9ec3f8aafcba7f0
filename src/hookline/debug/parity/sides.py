"""Ask an engine for tokens and their log-probs: our server, vLLM (in this process or over HTTP), or a function.

`parity` calls `open_engine` and works with an `EngineSide`, whichever it is. Hidden states come from hookline inside of
the engine; without it an engine gives log-probs alone, and layers cannot be compared.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from multiprocessing.pool import ThreadPool
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.debug.parity.scoring import Answer, Scorer, States
from hookline.errors import OptionError
from hookline.factories.replacing import stream_of
from hookline.messages import short_repr
from hookline.phases import in_eval_mode
from hookline.serve.load_model import load
from hookline.serve.row_batch import BatchForward, RowBatch
from hookline.serve.sampling import NO_TOKEN, ChosenToken, choose
from hookline.sites.attach import attach

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = ["EngineSide", "Request", "open_engine"]

_AT_ONCE: Final = 64
"""So many requests are sent to a server, or run, together."""
_PREFILL_TOKENS: Final = 16_384
"""Prompts that are run together have at most so many tokens, as in our server."""
_PATIENCE_S: Final = 600.0
_GREETING_S: Final = 20.0
_SAME: Final = 1e-3
"""Log-probs of one token that are nearer than this, in nats, are the same."""


@dataclass(frozen=True)
class Request:
    """How an engine continues prompts; without new tokens it runs the prompts alone."""

    new_tokens: int
    temperature: float = 1.0
    layers: Sequence[str] = ()
    watched: int = 0
    """The answers to so many of the prompts have the states of ``layers``."""

    def options(self, number: int) -> dict[str, Any]:
        """Return the options of the request with this number, as vLLM and our server call them."""
        sampling = {"max_tokens": max(self.new_tokens, 1), "temperature": self.temperature, "seed": number}
        return {**sampling, "ignore_eos": True, "logprobs": 1}


class EngineSide:
    """An engine, or the log-probs that one gave earlier."""

    name = "engine"
    model: nn.Module | None = None
    """Its model, if that is one of transformers in this process."""
    dtype: torch.dtype | None = None
    vocabulary: int | None = None
    gives_states = False
    scores_prompts = False
    """Whether it gives log-probs of tokens that were not sampled."""
    applies_temperature = True
    """Whether its log-probs are those after the temperature."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        """What the report tells of it."""

    def meet(self, vocabulary: int) -> None:
        """Raise if the engine knows other tokens than a trainer that has so many."""
        if self.vocabulary not in (None, vocabulary):
            raise OptionError(f"The trainer has a vocabulary of {vocabulary} tokens, the engine of {self.vocabulary}.")

    def ask(self, prompts: Sequence[list[int]], how: Request) -> list[Answer]:
        """Continue prompts, or run them alone."""
        raise NotImplementedError

    def rescore(self, answers: Sequence[Answer], layers: Sequence[str] = ()) -> list[Answer]:
        """Run given sequences in one piece: states, and log-probs where the engine computes those of prompts."""
        found = self.ask([answer.ids for answer in answers], Request(0, layers=layers, watched=len(answers)))
        for number, (answer, again) in enumerate(zip(answers, found, strict=True)):
            logprobs = again.logprobs[-len(answer.logprobs) :] if len(again.logprobs) else answer.logprobs
            states = {name: rows[: len(answer.ids) - 1] for name, rows in again.states.items()}
            found[number] = replace(answer, logprobs=logprobs, states=states)
        return found

    def close(self) -> None:
        """End what was started for this comparison."""


def open_engine(engine: Any) -> EngineSide:
    """Return the side that ``engine`` means; raise if it is nothing that answers."""
    if engine is None:
        return EngineSide()
    if isinstance(engine, str | Path):
        kind, _, rest = str(engine).partition(":")
        if kind in ("http", "https"):
            return _Http(str(engine).rstrip("/"))
        engine = _vllm(rest) if kind == "vllm" else load(engine, with_tokenizer=False)[0]
    if isinstance(engine, nn.Module):
        return _Here(engine)
    if hasattr(engine, "llm_engine"):
        return _Vllm(engine)
    if callable(engine):
        return _Function(engine)
    known = "a URL, a folder, 'vllm:FOLDER', a model, an LLM of vLLM, or a function"
    raise OptionError(f"An engine is {known}; got {short_repr(engine)}.")


def _vllm(folder: str) -> Any:
    from vllm import LLM

    from hookline.engines.vllm import engine_options

    return LLM(folder, enforce_eager=True, **engine_options())


def _answer(ids: Sequence[int], values: Sequence[float], number: int, tops: Sequence[float] = ()) -> Answer:
    """Return an answer with log-probs of its last tokens; ``tops`` are those of the likeliest, if they are known."""
    if None in values:
        raise OptionError(f"The engine gives tokens of sequence {number} without a log-prob; each needs one.")
    logprobs, top = (torch.tensor(each, dtype=torch.float64) for each in (values, tops))
    return Answer([*map(int, ids)], len(ids) - len(values), logprobs, top)


def _mode_text(mode: str) -> str:
    return mode if mode.startswith("processed") else f"{mode}: without temperature and penalties, whose faults hide"


class _Function(EngineSide):
    """Any function of sequences of token ids; it scores them, or continues them."""

    def __init__(self, function: Callable[[list[list[int]]], Any]) -> None:
        super().__init__()
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function = function

    def ask(self, prompts: Sequence[list[int]], how: Request) -> list[Answer]:
        given = list(self._function([list(each) for each in prompts]))
        if len(given) != len(prompts) or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in given):
            pair = f"for each of {len(prompts)} sequences a pair: all token ids, and the log-probs of the last of them"
            raise OptionError(f"{self.name} returns {pair}; it gave {short_repr(given)}.")
        answers = [_answer(ids, [*values], number) for number, (ids, values) in enumerate(given)]
        return [replace(answer, prompt=len(prompt)) for answer, prompt in zip(answers, prompts, strict=True)]


class _Vllm(EngineSide):
    """An ``LLM`` of vLLM in this process."""

    def __init__(self, llm: Any) -> None:
        from hookline.engines.vllm import VllmHooks

        super().__init__()
        self._llm, self._hooks = llm, VllmHooks(llm)
        config = llm.llm_engine.model_config
        self.name = f"vLLM: {config.model}"
        self.dtype, self.vocabulary = config.dtype, int(config.get_vocab_size())
        self.applies_temperature = str(config.logprobs_mode).startswith("processed")
        self.scores_prompts = not self.applies_temperature
        self.facts["logprobs_mode"] = _mode_text(str(config.logprobs_mode))
        try:
            self._hooks.describe()
            self.gives_states = True
        except Exception as error:  # workers without our extension raise what vLLM makes of that
            self.facts["layers"] = f"not compared: start it with engine_options() ({error!r})"

    def ask(self, prompts: Sequence[list[int]], how: Request) -> list[Answer]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        watched = how.watched if how.layers and self.gives_states else 0
        asked = {"hookline": {"hidden_states": {"layers": [*how.layers]}}}
        params = []
        for number in range(len(prompts)):
            options = how.options(number)
            if not how.new_tokens:
                options["prompt_logprobs"] = 1
            if number < watched:
                options |= {"extra_args": asked, "skip_reading_prefix_cache": True}
            params.append(SamplingParams(**options))
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        found = []
        for number, done in enumerate(self._llm.generate(given, params, use_tqdm=False)):
            (output,) = done.outputs
            ids = [*done.prompt_token_ids, *(output.token_ids if how.new_tokens else ())]
            tops = output.logprobs if how.new_tokens else done.prompt_logprobs[1:]
            pairs = list(zip(ids[len(ids) - len(tops) :], tops, strict=True))
            likeliest = [max(each.logprob for each in top.values()) for top in tops]
            states = self._hooks.states(done.request_id).states if number < watched else {}
            answer = _answer(ids, [top[id].logprob for id, top in pairs], number, likeliest)
            found.append(replace(answer, states={name: layer.values for name, layer in states.items()}))
        return found


class _Http(EngineSide):
    """``hookline serve`` or ``vllm serve``."""

    applies_temperature = False

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._token = url, os.environ.get("HOOKLINE_SERVE_TOKEN", "")
        try:
            model = self._get("/v1/models", _GREETING_S)["data"][0]
            self._model, self._owner = model["id"], model.get("owned_by")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise OptionError(f"{url}/v1/models is no list of models: it is no engine ({error!r}).") from None
        if self._owner == "sglang":
            raise OptionError(f"{url} is SGLang, which is asked by a function: see docs/parity.md.")
        self.name = f"{self._owner}: {self._model} at {url}"
        self.gives_states = self._owner == "hookline"
        if not self.gives_states:
            self._learn_of_vllm()

    def _learn_of_vllm(self) -> None:
        try:
            self._get("/hooks", _GREETING_S)
            self.gives_states = True
        except OptionError as error:
            self.facts["layers"] = f"not compared: start it with HOOKLINE_VLLM=1 VLLM_PLUGINS=hookline ({error})"
        # It does not tell its --logprobs-mode: with the default the likeliest token has the same log-prob at any heat.
        cold, hot = (float(self.ask([[1, 2, 3]], Request(1, heat))[0].top[0]) for heat in (0.5, 1.0))
        self.applies_temperature = abs(cold - hot) > _SAME
        self.facts["logprobs_mode"] = _mode_text("processed" if self.applies_temperature else "raw")

    def meet(self, vocabulary: int) -> None:
        super().meet(vocabulary)
        self.ask([[vocabulary - 1]], Request(1))
        try:
            self.ask([[vocabulary]], Request(1))
        except OptionError:
            return
        raise OptionError(f"The trainer has a vocabulary of {vocabulary} tokens, and {self._url} one with more.")

    def ask(self, prompts: Sequence[list[int]], how: Request) -> list[Answer]:
        def answer(number: int) -> Answer:
            layers = how.layers if self.gives_states and number < how.watched else ()
            choice, states = self._complete({"prompt": prompts[number], **how.options(number)}, layers)
            if not how.new_tokens:
                return Answer(prompts[number], len(prompts[number]), torch.empty(0), states=states)
            try:
                ids = [*(choice.get("prompt_token_ids") or prompts[number]), *choice["token_ids"]]
                tops = [max(each.values()) for each in choice["logprobs"]["top_logprobs"]]
                return replace(_answer(ids, choice["logprobs"]["token_logprobs"], number, tops), states=states)
            except (KeyError, TypeError) as error:
                raise OptionError(f"{self._url} gives no token ids or no log-probs ({error!r}).") from None

        with ThreadPool(min(_AT_ONCE, len(prompts))) as pool:  # not waited for after an error or Ctrl-C
            return list(pool.imap(answer, range(len(prompts))))

    def _complete(self, body: dict[str, Any], layers: Sequence[str]) -> tuple[Any, States]:
        """Return the answer to a request, and the states of layers."""
        key, wanted = str(uuid.uuid4()), {"hidden_states": {"layers": [*layers]}}
        body |= {"model": self._model, "return_token_ids": True}
        is_ours = self._owner == "hookline"
        if layers and is_ours:
            body["hooks"] = wanted
        elif layers:
            body |= {"vllm_xargs": {"hookline": json.dumps({"key": key, **wanted})}, "cache_salt": key}
        choice = self._get("/v1/completions", _PATIENCE_S, body)["choices"][0]
        if not layers:
            return choice, {}
        found = choice["hooks"] if is_ours else self._get(f"/hooks/results/{key}", _PATIENCE_S)["answers"][0]
        return choice, {name: _tensor(layer) for name, layer in found["hidden_states"].items()}

    def _get(self, path: str, patience: float, body: Any = None) -> Any:
        """Return the JSON at a path; with a body, what it is answered with."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=patience) as given:
                return json.loads(given.read())
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise OptionError(f"{self._url}{path} answers with {error.code}: {said}") from None
        except (OSError, ValueError, HTTPException) as error:
            raise OptionError(f"{self._url}{path} does not answer as an engine does: {error!r}") from None


def _tensor(layer: Mapping[str, Any]) -> Tensor:
    raw = bytearray(base64.b64decode(layer["data"]))
    return torch.frombuffer(raw, dtype=getattr(torch, layer["dtype"])).reshape(layer["shape"])


@dataclass
class _Row:
    """A sequence as the batches of our engine know it."""

    request: Any
    draws: Random
    tokens: list[ChosenToken] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Return the token that goes into the next forward."""
        return self.tokens[-1].id

    @property
    def position(self) -> int:
        """Return its position."""
        return len(self.request.prompt_ids) + len(self.tokens) - 1


class _Here(EngineSide):
    """A model of transformers in this process, in the batches of our engine: a prefill, then a decode a token.

    Neither threads nor HTTP are between, so that hidden states stay on the device.
    """

    gives_states = scores_prompts = True
    applies_temperature = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._scorer, self.model = Scorer(model), model
        session: Any = SimpleNamespace(step=lambda table: nullcontext())  # no hooks of requests
        self._forward = BatchForward(model, session)
        self.name = f"hookline, in this process: {type(self._scorer.inner).__name__}"
        self.dtype, self.vocabulary = self._scorer.dtype, self._scorer.vocabulary

    def ask(self, prompts: Sequence[list[int]], how: Request) -> list[Answer]:
        at_once = max(1, min(_AT_ONCE, _PREFILL_TOKENS // max(map(len, prompts))))
        found: list[Answer] = []
        while len(found) < len(prompts):
            found += self._generate(prompts[len(found) : len(found) + at_once], how, len(found))
        return found

    def rescore(self, answers: Sequence[Answer], layers: Sequence[str] = ()) -> list[Answer]:
        again = self._scorer.run(answers, names=layers)
        found = zip(answers, again.logprobs, again.states, strict=True)
        return [replace(answer, logprobs=logprobs, states=states) for answer, logprobs, states in found]

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[list[int]], how: Request, first: int) -> list[Answer]:
        """Continue prompts, which run together; ``first`` is the number of the first."""
        parts: dict[str, list[Tensor]] = {}
        watched = min(max(how.watched - first, 0), len(prompts))

        def keep(module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
            stream = stream_of(module, output)
            if stream is not None and stream.dim() == 3:
                parts.setdefault(site.name, []).append(stream[:watched].clone())

        sampling = {"temperature": how.temperature, "top_k": 0, "top_p": 1.0, "logprobs": 1}
        rows: list[Any] = [
            _Row(SimpleNamespace(id=str(number), prompt_ids=prompt, **sampling), Random(number))
            for number, prompt in enumerate(prompts, first)
        ]
        batch = RowBatch(self._forward, rows)
        tapped = attach(self.model, how.layers, keep, name="parity") if watched and how.layers else nullcontext()
        with in_eval_mode(self.model), tapped:
            for place in range(how.new_tokens):
                logits = batch.decode() if place else batch.prefill()
                tokens = choose(logits, [row.request for row in rows], [row.draws for row in rows])
                for row, token in zip(rows, tokens, strict=True):
                    row.tokens.append(token)
                if any(token.id == NO_TOKEN for token in tokens):
                    raise OptionError("The engine's logits are not numbers (NaN or infinite).")
        states = {name: torch.cat(each, 1) for name, each in parts.items()}
        found = []
        for place, row in enumerate(rows):
            ids = [*row.request.prompt_ids, *(token.id for token in row.tokens)]
            tops = [token.top_logprobs[0][1] for token in row.tokens]
            answer = _answer(ids, [token.logprob for token in row.tokens], first + place, tops)
            own = {name: each[place, batch.pads[place] :] for name, each in states.items()} if place < watched else {}
            found.append(replace(answer, states=own))
        return found
