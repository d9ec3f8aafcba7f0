"""Ask an engine for tokens and their log-probs: our server, vLLM (both in this process or over HTTP), or a function.

`parity` calls `open_engine` and works with an `EngineSide`, whichever it is. Hidden states come from hookline inside of
the engine; without it an engine gives log-probs alone, and layers cannot be compared.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from hookline.debug.parity.scoring import Answer, Scorer, States
from hookline.errors import OptionError
from hookline.messages import short_repr

__all__ = ["EngineSide", "Sampling", "open_engine"]

_AT_ONCE: Final = 32
"""So many requests are sent to an engine together."""
_PATIENCE_S: Final = 600.0


@dataclass(frozen=True)
class Sampling:
    """How an engine continues prompts."""

    new_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0


class EngineSide:
    """What `parity` asks of an engine."""

    name = "engine"
    model: nn.Module | None = None
    """Its model, if that is one of transformers in this process."""
    dtype: torch.dtype | None = None
    vocabulary: int | None = None
    tokenizer: Any = None
    applies_temperature = False
    """Whether its log-probs are those after the temperature."""
    can_sample = True

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        """What the report tells of it."""

    def sample(self, prompts: Sequence[list[int]], how: Sampling, layers: Sequence[str], watched: int) -> list[Answer]:
        """Continue prompts; the first ``watched`` answers have the states of ``layers``."""
        raise NotImplementedError

    def rescore(self, answers: Sequence[Answer], layers: Sequence[str] = ()) -> list[Answer] | None:
        """Compute the log-probs of given sequences, in one forward over all tokens; None if it cannot."""
        return None

    def close(self) -> None:
        """End what was started for this comparison."""


def open_engine(engine: Any) -> EngineSide:
    """Return the side that ``engine`` means; raise if it is nothing that answers."""
    if engine is None:
        return EngineSide()
    if isinstance(engine, str) and engine.startswith(("http://", "https://")):
        return _Http(engine.rstrip("/"))
    if isinstance(engine, str) and engine.startswith("vllm:"):
        from vllm import LLM

        from hookline.engines.vllm import engine_options

        return _Vllm(LLM(engine.removeprefix("vllm:"), enforce_eager=True, **engine_options()))
    if isinstance(engine, str | Path):
        from hookline.serve.load_model import load

        return _Served(load(engine, with_tokenizer=False)[0])
    if hasattr(engine, "llm_engine"):
        return _Vllm(engine)
    if isinstance(engine, nn.Module) or (hasattr(engine, "submit") and hasattr(engine, "between")):
        return _Served(engine)
    if callable(engine):
        return _Function(engine)
    raise OptionError(
        f"An engine is a URL, a folder, 'vllm:FOLDER', a model, an Engine of hookline.serve, an LLM of vLLM, or a "
        f"function; got {short_repr(engine)}."
    )


def _logprobs(values: Sequence[float | None], where: str) -> Tensor:
    if any(value is None for value in values):
        raise OptionError(f"{where} has tokens without a log-prob; have the engine give one for each token.")
    return torch.tensor([*values], dtype=torch.float64)


# -- a function --------------------------------------------------------------------------------------------------


class _Function(EngineSide):
    """Any function of sequences of token ids; it scores them, or continues them."""

    def __init__(self, function: Callable[[list[list[int]]], Any]) -> None:
        super().__init__()
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function = function

    def sample(self, prompts: Sequence[list[int]], how: Sampling, layers: Sequence[str], watched: int) -> list[Answer]:
        return self._called(prompts, [len(prompt) for prompt in prompts])

    def rescore(self, answers: Sequence[Answer], layers: Sequence[str] = ()) -> list[Answer] | None:
        found = self._called([answer.ids for answer in answers], [answer.prompt for answer in answers])
        is_same = all(one.ids == other.ids for one, other in zip(found, answers, strict=True))
        return found if is_same else None

    def _called(self, sequences: Sequence[list[int]], prompts: Sequence[int]) -> list[Answer]:
        given = list(self._function([list(each) for each in sequences]))
        if len(given) != len(sequences):
            raise OptionError(f"{self.name} was asked for {len(sequences)} sequences and gave {len(given)}.")
        found = []
        for number, (pair, prompt) in enumerate(zip(given, prompts, strict=True)):
            try:
                ids, values = pair
                ids = [int(id) for id in ids]
            except (TypeError, ValueError):
                raise OptionError(
                    f"{self.name} returns for each sequence a pair: all token ids, and the log-probs of the last of "
                    f"them; for sequence {number} it gave {short_repr(pair)}."
                ) from None
            values = values.tolist() if isinstance(values, Tensor) else list(values)
            found.append(Answer(ids, prompt, _logprobs(values, f"Sequence {number} of {self.name}")))
        return found


# -- our server, in this process ---------------------------------------------------------------------------------


class _Served(EngineSide):
    """An `Engine` of ours, or a model of transformers that is served by one for this comparison."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._is_own = isinstance(engine, nn.Module)
        if self._is_own:
            from hookline.serve.serving_engine import Engine

            engine = Engine(engine.eval(), captured_bytes=1 << 32)
        self._engine = engine
        engine.start()
        self._scorer = Scorer(engine.model)
        self.name = f"hookline serve: {type(self._scorer.inner).__name__}"
        self.model, self.tokenizer = engine.model, engine.tokenizer
        self.dtype, self.vocabulary = self._scorer.dtype, self._scorer.vocabulary
        self.facts["log-probs"] = "before the temperature"

    def sample(self, prompts: Sequence[list[int]], how: Sampling, layers: Sequence[str], watched: int) -> list[Answer]:
        from hookline.serve.generation_request import GenerationRequest

        found: list[Answer] = []
        for begin in range(0, len(prompts), _AT_ONCE):
            waiting = []
            for number in range(begin, min(begin + _AT_ONCE, len(prompts))):
                states = self._wanted(layers) if number < watched else None
                options: dict[str, Any] = {"temperature": how.temperature, "ignore_eos": True, "logprobs": 1}
                request = GenerationRequest(
                    f"parity-{uuid.uuid4()}",
                    tuple(prompts[number]),
                    max_tokens=how.new_tokens,
                    seed=how.seed + number,
                    states=states,
                    **options,
                )
                waiting.append((prompts[number], self._submit(request)))
            found += [self._answer(prompt, future.result(_PATIENCE_S)) for prompt, future in waiting]
        return found

    def _wanted(self, layers: Sequence[str]) -> Any:
        from hookline.engines.request_options import StatesWanted

        known = [layer for layer in layers if layer in self._engine.widths]
        return StatesWanted(tuple(known)) if known else None

    def _submit(self, request: Any) -> Future[list[Any]]:
        from hookline.serve.generation_request import Finished

        events: list[Any] = []
        done: Future[list[Any]] = Future()

        def listen(event: Any) -> None:
            events.append(event)
            if isinstance(event, Finished):
                done.set_result(events)

        self._engine.submit(request, listen)
        return done

    def _answer(self, prompt: list[int], events: list[Any]) -> Answer:
        *tokens, end = events
        if end.error is not None:
            raise OptionError(f"The engine failed at a request: {end.error}")
        states = {name: layer.values for name, layer in (end.states or {}).items()}
        logprobs = _logprobs([token.logprob for token in tokens], "The engine's answer")
        likeliest = [token.top_logprobs[0][0] for token in tokens]
        return Answer([*prompt, *(token.id for token in tokens)], len(prompt), logprobs, likeliest, states)

    def rescore(self, answers: Sequence[Answer], layers: Sequence[str] = ()) -> list[Answer] | None:
        tops: list[list[int]] = []

        def run() -> tuple[list[Tensor], Sequence[States]]:
            if layers:
                return self._scorer.captured(answers, layers)
            return self._scorer.score(answers, left=True, likeliest=tops), [{} for _ in answers]

        scores, states = self._engine.between(run).result()
        return [
            Answer(answer.ids, answer.prompt, score, tops[number] if tops else None, states[number])
            for number, (answer, score) in enumerate(zip(answers, scores, strict=True))
        ]

    def close(self) -> None:
        if self._is_own:
            self._engine.close()


# -- vLLM, in this process ---------------------------------------------------------------------------------------


class _Vllm(EngineSide):
    """An ``LLM`` of vLLM."""

    def __init__(self, llm: Any) -> None:
        from hookline.engines.vllm import VllmHooks

        super().__init__()
        self._llm, self._hooks = llm, VllmHooks(llm)
        config = llm.llm_engine.model_config
        self.name = f"vLLM: {config.model}"
        self.dtype, self.vocabulary = config.dtype, int(config.get_vocab_size())
        mode = str(config.logprobs_mode)
        self.applies_temperature = mode.startswith("processed")
        hides = (
            ""
            if self.applies_temperature
            else ": temperature and penalties are not in them, and a fault of these hides"
        )
        self.facts["logprobs_mode"] = f"{mode}{hides}"
        try:
            self._hooks.describe()
            self._has_hooks = True
        except Exception as error:
            self._has_hooks = False
            self.facts["layers"] = f"not compared: start it with engine_options() ({type(error).__name__})"

    def sample(self, prompts: Sequence[list[int]], how: Sampling, layers: Sequence[str], watched: int) -> list[Answer]:
        options = {"max_tokens": how.new_tokens, "temperature": how.temperature, "ignore_eos": True, "logprobs": 1}
        each = [{**options, "seed": how.seed + number} for number in range(len(prompts))]
        found = []
        for number, (prompt, done, states) in enumerate(self._generate(prompts, each, layers, watched)):
            (output,) = done.outputs
            if output.logprobs is None:
                raise OptionError(f"vLLM gave no log-probs for sequence {number}.")
            pairs = list(zip(output.token_ids, output.logprobs, strict=True))
            values = [top[id].logprob for id, top in pairs]
            likeliest = [max(top, key=lambda id, top=top: top[id].logprob) for _, top in pairs]  # type: ignore[misc]
            ids = [*(done.prompt_token_ids or prompt), *output.token_ids]
            found.append(Answer(ids, len(ids) - len(pairs), _logprobs(values, f"Sequence {number}"), likeliest, states))
        return found

    def rescore(self, answers: Sequence[Answer], layers: Sequence[str] = ()) -> list[Answer] | None:
        options = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        asked = [options for _ in answers]
        found = []
        every = self._generate([answer.ids for answer in answers], asked, layers, len(answers) if layers else 0)
        for answer, (_, done, states) in zip(answers, every, strict=True):
            values = [top[id].logprob for id, top in zip(answer.ids[1:], done.prompt_logprobs[1:], strict=True)]
            kept = _logprobs(values[len(values) - len(answer.logprobs) :], "A prompt of vLLM")
            cut = {name: rows[: len(answer.ids) - 1] for name, rows in states.items()}
            found.append(Answer(answer.ids, answer.prompt, kept, None, cut))
        return found

    def _generate(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], layers: Sequence[str], watched: int
    ) -> list[tuple[list[int], Any, States]]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        asked = {"hookline": {"hidden_states": {"layers": [*layers]}}}
        watched = watched if self._has_hooks and layers else 0
        more = {"extra_args": asked, "skip_reading_prefix_cache": True}
        params = [SamplingParams(**each, **(more if n < watched else {})) for n, each in enumerate(options)]
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        every = self._llm.generate(given, params, use_tqdm=False)
        found: list[tuple[list[int], Any, States]] = []
        for number, (prompt, done) in enumerate(zip(prompts, every, strict=True)):
            kept = self._hooks.states(done.request_id).states if number < watched else {}
            found.append((prompt, done, {name: layer.values for name, layer in kept.items() if _is_whole(layer)}))
        return found


def _is_whole(layer: Any) -> bool:
    """Return whether states begin at the first token: those from a prefix cache have none."""
    return list(layer.positions) == list(range(len(layer.positions)))


# -- a server ----------------------------------------------------------------------------------------------------


class _Http(EngineSide):
    """``hookline serve`` or ``vllm serve``, over HTTP."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        try:
            self._model = self._get("/v1/models", 20)["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise OptionError(f"{url}/v1/models is no list of models: it is no engine ({error!r}).") from None
        try:
            self._get("/version", 20)
            self._is_vllm = True
        except OptionError:
            self._is_vllm = False
        self.name = f"{'vLLM' if self._is_vllm else 'hookline serve'}: {self._model} at {url}"
        said = "raw_logprobs, without temperature and penalties, unless it was started with another --logprobs-mode"
        self.facts["log-probs"] = said if self._is_vllm else "before the temperature"

    def sample(self, prompts: Sequence[list[int]], how: Sampling, layers: Sequence[str], watched: int) -> list[Answer]:
        body = {"max_tokens": how.new_tokens, "temperature": how.temperature, "ignore_eos": True, "logprobs": 0}

        def ask(number: int) -> Answer:
            asked = {**body, "seed": how.seed + number}
            choice, states = self._complete(prompts[number], asked, layers if number < watched else ())
            ids = choice.get("token_ids")
            values = (choice.get("logprobs") or {}).get("token_logprobs")
            if ids is None or values is None:
                raise OptionError(f"{self._url} gives no token ids or no log-probs; it has to know return_token_ids.")
            prompt = choice.get("prompt_token_ids") or prompts[number]
            logprobs = _logprobs(values, f"Sequence {number} of {self._url}")
            return Answer([*prompt, *ids], len(prompt), logprobs, None, states)

        return self._each(ask, len(prompts))

    def rescore(self, answers: Sequence[Answer], layers: Sequence[str] = ()) -> list[Answer] | None:
        if not self._is_vllm and not layers:
            return None

        def ask(number: int) -> Answer:
            answer = answers[number]
            more: dict[str, Any] = {"prompt_logprobs": 0} if self._is_vllm else {}
            choice, states = self._complete(answer.ids, {"max_tokens": 1, "temperature": 0, **more}, layers)
            kept = answer.logprobs
            if self._is_vllm:
                tops = choice["prompt_logprobs"][len(answer.ids) - len(kept) :]
                ids = answer.ids[len(answer.ids) - len(kept) :]
                kept = _logprobs([top[str(id)]["logprob"] for id, top in zip(ids, tops, strict=True)], "A prompt")
            cut = {name: rows[: len(answer.ids) - 1] for name, rows in states.items()}
            return Answer(answer.ids, answer.prompt, kept, None, cut)

        return self._each(ask, len(answers))

    def _each(self, ask: Callable[[int], Answer], count: int) -> list[Answer]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(ask, range(count)))

    def _complete(self, prompt: list[int], body: Mapping[str, Any], layers: Sequence[str]) -> tuple[Any, States]:
        asked = {"model": self._model, "prompt": prompt, "return_token_ids": True, **body}
        wanted, key = {"layers": [*layers]}, str(uuid.uuid4())
        if layers and "layers" not in self.facts:
            more = {"hidden_states": wanted}
            if self._is_vllm:
                asked |= {"vllm_xargs": {"hookline": json.dumps({"key": key, **more})}, "cache_salt": key}
            else:
                asked["hooks"] = more
        choice = self._get("/v1/completions", _PATIENCE_S, asked)["choices"][0]
        if not layers or "layers" in self.facts:
            return choice, {}
        found = choice.get("hooks") or {}
        if self._is_vllm:
            try:
                found = self._get(f"/hooks/results/{key}", _PATIENCE_S)["answers"][0]
            except OptionError:
                self.facts["layers"] = "not compared: start it with HOOKLINE_VLLM=1 VLLM_PLUGINS=hookline"
        states = found.get("hidden_states") or {}
        return choice, {name: _decoded(layer) for name, layer in states.items() if _is_all(layer)}

    def _get(self, path: str, patience: float, body: Any = None) -> Any:
        """Return the JSON at a path; with a body, what it is answered with."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=patience) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise OptionError(f"{self._url}{path} answers with {error.code}: {said}") from None
        except (OSError, ValueError) as error:
            raise OptionError(f"{self._url}{path} does not answer as an engine does: {error}") from None


def _is_all(layer: Mapping[str, Any]) -> bool:
    return list(layer["positions"]) == list(range(layer["shape"][0]))


def _decoded(layer: Mapping[str, Any]) -> Tensor:
    raw = bytearray(base64.b64decode(layer["data"]))
    return torch.frombuffer(raw, dtype=getattr(torch, layer["dtype"])).reshape(layer["shape"])
