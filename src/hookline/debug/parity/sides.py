"""Run the same token sequences on both sides: through a transformers model, and through any engine.

`parity` calls `Scorer` for the trainer and for its copies in other precisions, and `open_engine` for the engine: ours,
vLLM (in this process or over HTTP), or a function. Hidden states come from hookline inside of the engine; without it an
engine gives log-probs alone, and layers cannot be compared.
"""

from __future__ import annotations

import base64
import json
import math
import os
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from multiprocessing.pool import ThreadPool
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hookline.errors import OptionError
from hookline.factories.replacing import stream_of, with_stream
from hookline.messages import short_repr
from hookline.phases import in_eval_mode
from hookline.serve.load_model import load
from hookline.serve.row_batch import BatchForward, ChosenToken, RowBatch, choose
from hookline.sites.attach import attach
from hookline.sites.roles import find_roles
from hookline.sites.wrappers import unwrap

_AT_ONCE: Final = 64
"""So many requests are sent to a server, or run, together."""
_PREFILL_TOKENS: Final = 16_384
"""Prompts that are run together have at most so many tokens, as in our server."""
_PATIENCE_S: Final = (20.0, 600.0)
"""So long a server is waited for that says what it is, or that answers a request."""


@dataclass
class Answer:
    """One sequence of prompt and answer, as one side scored it."""

    ids: list[int]
    """Prompt and answer."""
    prompt: int
    """How many of them are the prompt."""
    logprobs: Tensor
    """Of the last tokens, as many as it has: float64, on the host."""
    top: Tensor = field(default_factory=lambda: torch.empty(0))
    """The log-probs of the likeliest tokens in their places; empty if an engine does not give these."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of modules at all tokens but the last: (tokens, features)."""
    errors: dict[str, Tensor] = field(default_factory=dict)
    """For each token, how far the output of a module was from what was put there, against the norm of that."""

    @property
    def scored(self) -> Tensor:
        """Return the tokens that have a log-prob."""
        return torch.tensor(self.ids[len(self.ids) - len(self.logprobs) :], dtype=torch.long)


def apart(one: Sequence[Answer], other: Sequence[Answer]) -> Tensor:
    """Return the difference of the log-probs of all tokens."""
    return torch.cat([first.logprobs - second.logprobs for first, second in zip(one, other, strict=True)])


def rms(values: Tensor) -> float:
    """Return the root of the mean square."""
    return float(values.double().square().mean().sqrt())


@dataclass
class Scorer:
    """Run token sequences through a causal language model of transformers."""

    model: nn.Module
    """It is run in eval mode, and put back into the mode it was in."""
    batch: int = 8
    """So many sequences are run together."""
    temperature: float = 1.0
    """What logits are divided by."""
    padding: str = "right"
    """On which side shorter sequences are padded."""
    shift: int = 0
    """By so many the positions of answers are moved."""

    def __post_init__(self) -> None:
        inner: Any = unwrap(self.model)
        if not hasattr(inner, "get_input_embeddings"):
            raise OptionError(f"parity takes a causal language model of transformers, got {type(inner).__name__}.")
        self.inner, embedding = inner, inner.get_input_embeddings().weight
        self.device, self.dtype, self.vocabulary = embedding.device, embedding.dtype, len(embedding)
        self.roles = find_roles(self.model)
        self.blocks = self.roles.get("resid", [])
        self.head = self.roles.get("unembed", ["lm_head"])[0]
        self.sites = [*self.roles.get("embed", [])[:1], *self.blocks, *self.roles.get("final_norm", [])[:1]]
        """The modules whose outputs are compared: the embedding, the blocks and the last norm."""

    @torch.no_grad()
    def run(self, answers: Sequence[Answer], names: Sequence[str] = (), *, put: bool = False) -> list[Answer]:
        """Return sequences with the log-probs of this model, and with the outputs of the modules that are named.

        With `put` the states that the answers have are put in place of the outputs, and errors are kept.
        """
        found = [replace(answer, states={}, errors={}) for answer in answers]
        order = sorted(range(len(answers)), key=lambda number: -len(answers[number].ids))
        rows: list[tuple[int, int, slice]] = []  # which sequence stands in which row and columns of the forward

        def hook(module: nn.Module, args: Any, output: Any, *, site: Any) -> Any:
            stream = stream_of(module, output)
            if stream is None or stream.dim() != 3:
                return None
            new = stream.clone()
            for number, row, columns in rows:
                place = new[row, columns][:-1]
                if put:
                    found[number].errors[site.name] = _put(place, answers[number].states[site.name], site.name)
                else:
                    found[number].states[site.name] = place
            return with_stream(module, output, new) if put else None

        tapped = attach(self.model, [*names], hook, name="parity") if names else nullcontext()
        with in_eval_mode(self.model), tapped:
            for begin in range(0, len(order), self.batch):
                numbers = order[begin : begin + self.batch]
                ids = [torch.tensor(answers[number].ids) for number in numbers]
                ends = [len(ids[0]) if self.padding == "left" else len(own) for own in ids]
                both = enumerate(zip(numbers, ids, ends, strict=True))
                rows[:] = [(number, row, slice(end - len(own), end)) for row, (number, own, end) in both]
                places = [torch.arange(len(own)) for own in ids]
                for number, place in zip(numbers, places, strict=True):
                    place[answers[number].prompt :] += self.shift
                parts = {"input_ids": ids, "attention_mask": map(torch.ones_like, ids), "position_ids": places}
                inputs = {name: pad_sequence([*each], True, 0, self.padding) for name, each in parts.items()}
                every = self.model(**{n: each.to(self.device) for n, each in inputs.items()}, use_cache=False).logits
                for number, row, columns in rows:
                    self._score(found[number], every[row, columns])
        return found

    def _score(self, answer: Answer, logits: Tensor) -> None:
        """Write log-probs into an answer, given the logits of all its tokens."""
        wanted = answer.scored.to(logits.device)
        logits = logits[len(logits) - len(wanted) - 1 : -1]
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        whole = logits.logsumexp(-1)
        answer.logprobs = (logits.gather(-1, wanted[:, None])[:, 0] - whole).double().cpu()
        answer.top = (logits.amax(-1) - whole).double().cpu()


def _put(place: Tensor, states: Tensor, name: str) -> Tensor:
    """Put states in a place; return how far what was there is from them, against their norm."""
    states = states.to(place.device)
    if place.shape != states.shape:
        raise OptionError(
            f"{name} gives {[*place.shape]} numbers, the engine {[*states.shape]}: other model, or cache."
        )
    off: Tensor = (place.double() - states.double()).norm(dim=-1) / states.double().norm(dim=-1).clamp(min=1e-300)
    place.copy_(states)
    return off.cpu()


# -- engines -----------------------------------------------------------------------------------------------------


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
        options = {"max_tokens": max(self.new_tokens, 1), "temperature": self.temperature, "seed": number}
        return {**options, "ignore_eos": True, "logprobs": 1}


class EngineSide:
    """An engine, or the log-probs that one gave earlier."""

    model: nn.Module | None = None
    """Its model, if that is one of transformers in this process."""
    dtype: torch.dtype | None = None
    vocabulary: int | None = None
    gives_states = False
    scores_prompts = False
    """Whether it gives log-probs of tokens that were not sampled."""
    applies_temperature = True
    """Whether its log-probs are those after the temperature."""

    def __init__(self, name: str = "asked earlier") -> None:
        self.facts = {"engine": name}
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
            found[number] = replace(answer, logprobs=logprobs, states=again.states)
        return found


def open_engine(engine: Any) -> EngineSide:
    """Return the side that ``engine`` means; raise if it is nothing that answers."""
    if engine is None:
        return EngineSide()
    if isinstance(engine, str | Path):
        kind, _, folder = str(engine).partition(":")
        if kind in ("http", "https"):
            return _Http(str(engine).rstrip("/"))
        if kind == "vllm":
            from vllm import LLM

            from hookline.engines.vllm import engine_options

            return _Vllm(LLM(folder, enforce_eager=True, **engine_options()))
        engine = load(engine, with_tokenizer=False)[0]
    if isinstance(engine, nn.Module):
        return _Here(engine)
    if hasattr(engine, "llm_engine"):
        return _Vllm(engine)
    if callable(engine):
        return _Function(engine)
    known = "a URL, a folder, 'vllm:FOLDER', a model, an LLM of vLLM, or a function"
    raise OptionError(f"An engine is {known}; got {short_repr(engine)}.")


def _answer(ids: Sequence[int], values: Sequence[Any], tops: Any = (), states: Any = None) -> Answer:
    """Return an answer with log-probs of its last tokens; ``tops`` are those of the likeliest, if they are known."""
    known = [math.nan if each is None else each for each in values]
    logprobs, top = (torch.tensor(each, dtype=torch.float64) for each in (known, tops))
    found = {name: _tensor(rows)[: len(ids) - 1] for name, rows in (states or {}).items()}
    return Answer([*map(int, ids)], len(ids) - len(values), logprobs, top, found)


def _tensor(rows: Any) -> Tensor:
    """Return hidden states as a tensor, also where they are plain data: of a `Session` in another process, or JSON."""
    if isinstance(rows, Tensor):
        return rows
    data = base64.b64decode(rows["data"]) if isinstance(rows["data"], str) else rows["data"]
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, rows["dtype"])).reshape(rows["shape"])


def _mode_text(mode: str) -> str:
    return mode if mode.startswith("processed") else f"{mode}: without temperature and penalties, whose faults hide"


class _Function(EngineSide):
    """Any function of sequences of token ids; it scores them, or continues them."""

    def __init__(self, function: Callable[[list[list[int]]], Any]) -> None:
        super().__init__(getattr(function, "__name__", type(function).__name__))
        self._function = function

    def ask(self, prompts: Sequence[list[int]], how: Request) -> list[Answer]:
        given = list(self._function([list(each) for each in prompts]))
        if len(given) != len(prompts) or not all(isinstance(each, Sequence) and len(each) in (2, 3) for each in given):
            what = f"all ids, log-probs of the last of them, and states if it has some, for {len(prompts)} sequences"
            raise OptionError(f"{self.facts['engine']} returns {what}; it gave {short_repr(given)}.")
        found = [_answer(ids, [*values], (), *states) for ids, values, *states in given]
        return [replace(answer, prompt=len(prompt)) for answer, prompt in zip(found, prompts, strict=True)]

    def rescore(self, answers: Sequence[Answer], layers: Sequence[str] = ()) -> list[Answer]:
        return [*answers]  # it has given all the states that it can


class _Vllm(EngineSide):
    """An ``LLM`` of vLLM in this process."""

    def __init__(self, llm: Any) -> None:
        from hookline.engines.vllm import VllmHooks

        config = llm.llm_engine.model_config
        super().__init__(f"vLLM: {config.model}")
        self._llm, self._hooks = llm, VllmHooks(llm)
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
        plain: dict[str, Any] = {} if how.new_tokens else {"prompt_logprobs": 1}
        asked = {"extra_args": {"hookline": {"hidden_states": {"layers": [*how.layers]}}}}
        seen = {**plain, **asked, "skip_reading_prefix_cache": True}
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        params = [SamplingParams(**how.options(n), **(seen if n < watched else plain)) for n in range(len(given))]
        found = []
        for number, done in enumerate(self._llm.generate(given, params, use_tqdm=False)):
            (output,) = done.outputs
            ids = [*done.prompt_token_ids, *(output.token_ids if how.new_tokens else ())]
            tops = output.logprobs if how.new_tokens else done.prompt_logprobs[1:]
            values = [top[id].logprob for id, top in zip(ids[len(ids) - len(tops) :], tops, strict=True)]
            likeliest = [max(each.logprob for each in top.values()) for top in tops]
            layers = self._hooks.states(done.request_id).states if number < watched else {}
            found.append(_answer(ids, values, likeliest, {name: each.values for name, each in layers.items()}))
        return found


class _Http(EngineSide):
    """``hookline serve`` or ``vllm serve``."""

    applies_temperature = False

    def __init__(self, url: str) -> None:
        self._url, self._token = url, os.environ.get("HOOKLINE_SERVE_TOKEN", "")
        try:
            model = self._get("/v1/models")["data"][0]
            self._model, owner = model["id"], model.get("owned_by")
        except (LookupError, TypeError, AttributeError) as error:
            raise OptionError(f"{url}/v1/models is no list of models: it is no engine ({error!r}).") from None
        if owner == "sglang":
            raise OptionError(f"{url} is SGLang, which is asked by a function: see docs/parity.md.")
        super().__init__(f"{owner}: {self._model} at {url}")
        self._is_ours = self.gives_states = owner == "hookline"
        if self._is_ours:
            return
        try:
            self._get("/hooks")
            self.gives_states = True
        except OptionError as error:
            self.facts["layers"] = f"not compared: start it with HOOKLINE_VLLM=1 VLLM_PLUGINS=hookline ({error})"
        # It does not tell its --logprobs-mode: with the default the likeliest token has the same log-prob at any heat.
        cold, hot = (float(self.ask([[1, 2, 3]], Request(1, heat))[0].top[0]) for heat in (0.5, 1.0))
        self.applies_temperature = abs(cold - hot) > 1e-3  # nats
        self.facts["logprobs_mode"] = _mode_text("processed" if self.applies_temperature else "raw")

    def meet(self, vocabulary: int) -> None:
        self.ask([[vocabulary - 1]], Request(1))
        try:
            self.ask([[vocabulary]], Request(1))
        except OptionError:
            return
        raise OptionError(f"The trainer has a vocabulary of {vocabulary} tokens, and {self._url} one with more.")

    def ask(self, prompts: Sequence[list[int]], how: Request) -> list[Answer]:
        with ThreadPool(min(_AT_ONCE, len(prompts))) as pool:  # not waited for after an error or Ctrl-C
            return list(pool.imap(lambda number: self._complete(number, prompts[number], how), range(len(prompts))))

    def _complete(self, number: int, prompt: list[int], how: Request) -> Answer:
        body = {"model": self._model, "prompt": prompt, "return_token_ids": True, **how.options(number)}
        key, wanted = str(uuid.uuid4()), {"hidden_states": {"layers": [*how.layers]}}
        has_states = bool(how.layers) and self.gives_states and number < how.watched
        if has_states and self._is_ours:
            body["hooks"] = wanted
        elif has_states:
            body |= {"vllm_xargs": {"hookline": json.dumps({"key": key, **wanted})}, "cache_salt": key}
        choice = self._get("/v1/completions", body)["choices"][0]
        is_apart = has_states and not self._is_ours
        found = self._get(f"/hooks/results/{key}")["answers"][0] if is_apart else choice.get("hooks")
        states = found["hidden_states"] if has_states else {}
        if not how.new_tokens:
            return _answer(prompt, [], states=states)
        try:
            ids = [*(choice.get("prompt_token_ids") or prompt), *choice["token_ids"]]
            tops = [max(each.values()) for each in choice["logprobs"]["top_logprobs"]]
            return _answer(ids, choice["logprobs"]["token_logprobs"], tops, states)
        except (KeyError, TypeError) as error:
            raise OptionError(f"{self._url} gives no token ids or no log-probs ({error!r}).") from None

    def _get(self, path: str, body: Any = None) -> Any:
        """Return the JSON at a path; with a body, what it is answered with."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=_PATIENCE_S[data is not None]) as given:
                return json.loads(given.read())
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise OptionError(f"{self._url}{path} answers with {error.code}: {said}") from None
        except (OSError, ValueError, HTTPException) as error:
            raise OptionError(f"{self._url}{path} does not answer as an engine does: {error!r}") from None


class _Here(EngineSide):
    """A model of transformers in this process, in the batches of our engine: a prefill, then a decode a token.

    Neither threads nor HTTP are between, so that hidden states stay on the device.
    """

    gives_states = scores_prompts = True
    applies_temperature = False

    def __init__(self, model: nn.Module) -> None:
        self._scorer, self.model = Scorer(model), model
        session: Any = SimpleNamespace(step=lambda table: nullcontext())  # no hooks of requests
        self._forward = BatchForward(model, session)
        super().__init__(f"hookline, in this process: {type(self._scorer.inner).__name__}")
        self.dtype, self.vocabulary = self._scorer.dtype, self._scorer.vocabulary

    def ask(self, prompts: Sequence[list[int]], how: Request) -> list[Answer]:
        at_once = max(1, min(_AT_ONCE, _PREFILL_TOKENS // max(map(len, prompts))))
        begins = range(0, len(prompts), at_once)
        return [each for begin in begins for each in self._generate(prompts[begin : begin + at_once], how, begin)]

    def rescore(self, answers: Sequence[Answer], layers: Sequence[str] = ()) -> list[Answer]:
        return self._scorer.run(answers, layers)

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[list[int]], how: Request, first: int) -> list[Answer]:
        """Continue prompts, which run together; ``first`` is the number of the first."""
        parts: dict[str, list[Tensor]] = {}
        watched = min(how.watched - first, len(prompts)) if how.layers else 0

        def keep(module: nn.Module, args: Any, output: Any, *, site: Any) -> None:
            stream = stream_of(module, output)
            if stream is not None and stream.dim() == 3:
                parts.setdefault(site.name, []).append(stream[:watched].clone())

        sampling = {"temperature": how.temperature, "top_k": 0, "top_p": 1.0, "logprobs": 1}
        asked: list[Any] = [SimpleNamespace(id=str(n), prompt_ids=ids, **sampling) for n, ids in enumerate(prompts)]
        rows: list[Any] = [SimpleNamespace(request=one, answer=[], position=len(one.prompt_ids) - 1) for one in asked]
        draws, steps = [Random(first + number) for number in range(len(rows))], list[list[ChosenToken]]()
        batch = RowBatch(self._forward, rows)
        tapped = attach(self._scorer.model, how.layers, keep, name="parity") if watched > 0 else nullcontext()
        with in_eval_mode(self._scorer.model), tapped:
            for place in range(how.new_tokens):
                steps.append(choose(batch.decode() if place else batch.prefill(), asked, draws))
                for row, token in zip(rows, steps[-1], strict=True):
                    row.answer.append(max(token.id, 0))  # without numbers there is none
                    row.position += 1
        whole = {name: torch.cat(each, 1) for name, each in parts.items()}
        found = []
        for number, (prompt, tokens) in enumerate(zip(prompts, zip(*steps, strict=True), strict=True)):
            ids = [*prompt, *(token.id for token in tokens)]
            tops = [max(token.top_logprobs, default=(0, math.nan))[1] for token in tokens]
            own = {name: each[number, batch.pads[number] :] for name, each in whole.items() if number < watched}
            found.append(_answer(ids, [token.logprob for token in tokens], tops, own))
        return found
