"""`parity`: say how far the log-probs of trainer and engine are apart, and why.

Users call it, the command ``hookline parity`` and `ParityCallback` too. It asks the engine (`open_engine`), scores the
same tokens with the trainer and with its weights in higher precision (`Scorer`), and hands both to `find_cause`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.debug.parity.causes import Case, Cause, find_cause
from hookline.debug.parity.gap import Gap, measure_gap, worst_tokens
from hookline.debug.parity.layers import WIDE, Precision
from hookline.debug.parity.result import Histogram, Parity, read_healthy
from hookline.debug.parity.scoring import Answer, Scorer, rms
from hookline.debug.parity.sides import EngineSide, Sampling, open_engine
from hookline.errors import OptionError
from hookline.messages import counted, short_repr

__all__ = ["parity"]


def parity(
    trainer: nn.Module | str | Path,
    engine: Any,
    sequences: Sequence[Any],
    *,
    tokenizer: Any = None,
    new_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    batch: int = 8,
    watched: int = 16,
    reference: nn.Module | None = None,
    healthy: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Parity:
    """Compare the log-probs that trainer and engine give the same tokens; say what of the gap is not rounding, and why.

    Recipe::

        found = hookline.parity(
            model, "http://localhost:8000", ["Once upon a time", "A hook sits"], tokenizer=tokenizer
        )
        print(found.sentence)
        found.write_html("parity.html")

    Args:
        trainer: A causal language model of transformers, or the folder of one. Nothing of it is changed.
        engine: A URL of ``hookline serve`` or ``vllm serve``, an `Engine` of `hookline.serve`, an ``LLM`` of vLLM, a
            model or a folder (served here), ``"vllm:FOLDER"``, or a function. The function gets lists of token ids and
            returns for each a pair: all token ids (those it was given, perhaps continued), and the log-probs of the
            last of them. None if the sequences have the log-probs of the engine.
        sequences: Prompts, which the engine continues: texts, or lists of token ids. Or what an engine has sampled:
            mappings with ``prompt``, ``completion`` and, where known, ``logprobs``, of the completion.
        tokenizer: Of the trainer; that of its folder by default.
        new_tokens: How many tokens an engine adds to a prompt.
        temperature: At which the engine samples, and what the trainer divides logits by, where the engine's log-probs
            are those after the temperature.
        seed: Of the sampling.
        batch: So many sequences the trainer runs together.
        watched: So many sequences are looked at layer by layer.
        reference: The trainer's weights in higher precision; a copy in float32, or float64 of float32, is made
            if None.
        healthy: A file of `Parity.save_healthy`: errors of layers are compared with those.
        progress: Is told what begins.

    Raises:
        OptionError: A side cannot be asked, or the two cannot be compared: other vocabularies, missing log-probs,
            tokens that are cut differently. All that is found before the engine runs.
    """
    began = time.monotonic()
    tell = progress or (lambda text: None)
    if isinstance(trainer, str | Path):
        from hookline.serve.load_model import load

        trainer, own = load(trainer, with_tokenizer=tokenizer is None)
        tokenizer = tokenizer or own
    scorer = Scorer(trainer, batch)
    if healthy is not None:
        known = read_healthy(healthy, scorer.sites)
    given = [_read(number, each, tokenizer, scorer) for number, each in enumerate(sequences)]
    if not given:
        raise OptionError("There are no sequences to compare.")
    _check_alike(given, engine)
    tell(f"engine: {counted(len(given), 'sequence')}")
    side = open_engine(engine)
    try:
        _check_engine(side, scorer, sequences, tokenizer)
        how = Sampling(new_tokens, temperature, seed)
        answers, mistake = _answers(side, given, how, scorer, watched)
        divided = temperature if side.applies_temperature else 1.0
        return _compare(
            scorer, side, answers, mistake, tokenizer, divided, watched, reference,
            known if healthy is not None else None, tell, began,
        )  # fmt: skip
    finally:
        side.close()


# -- what is compared --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Given:
    """A sequence as it was given: a prompt, or what was sampled too."""

    ids: list[int]
    prompt: int
    logprobs: Tensor | None = None

    @property
    def is_prompt(self) -> bool:
        return self.prompt == len(self.ids)


def _read(number: int, value: Any, tokenizer: Any, scorer: Scorer) -> _Given:
    """Return a sequence in tokens; raise for one that is none."""
    where = f"Sequence {number}"
    if not isinstance(value, Mapping):
        ids = _ids(where, value, tokenizer, scorer)
        return _Given(ids, len(ids))
    if "prompt" not in value:
        raise OptionError(f"{where} has no prompt; it has {', '.join(map(repr, value)) or 'nothing'}.")
    prompt, answer = value["prompt"], value.get("completion")
    ids = _ids(where, prompt, tokenizer, scorer)
    if answer is None:
        return _Given(ids, len(ids))
    more = _ids(where, answer, tokenizer, scorer, special=False)
    if (
        isinstance(prompt, str)
        and isinstance(answer, str)
        and _ids(where, prompt + answer, tokenizer, scorer) != ids + more
    ):
        raise OptionError(
            f"{where} is cut into other tokens as a whole than as prompt and completion; give token ids, as sampled."
        )
    logprobs = value.get("logprobs")
    if logprobs is None:
        return _Given(ids + more, len(ids))
    if len(logprobs) != len(more) or any(each is None or each != each for each in logprobs):
        raise OptionError(
            f"{where} has {len(more)} tokens of completion and {len(logprobs)} log-probs; each needs one."
        )
    return _Given(ids + more, len(ids), torch.tensor([float(each) for each in logprobs], dtype=torch.float64))


def _ids(where: str, value: Any, tokenizer: Any, scorer: Scorer, *, special: bool = True) -> list[int]:
    if isinstance(value, str):
        if tokenizer is None:
            raise OptionError(f"{where} is a text, and there is no tokenizer; give tokenizer=, or token ids.")
        value = tokenizer(value, add_special_tokens=special).input_ids
    ids = value.tolist() if isinstance(value, Tensor) else list(value)
    if not ids or not all(type(id) is int for id in ids):
        raise OptionError(f"{where} is a text or a list of token ids, got {short_repr(value)}.")
    strange = next((id for id in ids if not 0 <= id < scorer.vocabulary), None)
    if strange is not None:
        raise OptionError(f"{where} has token {strange}, and the trainer knows 0 to {scorer.vocabulary - 1}.")
    return ids


def _check_alike(given: Sequence[_Given], engine: Any) -> None:
    if len({each.is_prompt for each in given}) > 1 or len({each.logprobs is None for each in given}) > 1:
        raise OptionError("Some sequences have a completion or log-probs and some have none; give all of one kind.")
    if engine is None and given[0].logprobs is None:
        raise OptionError("Without an engine every sequence needs a completion and its log-probs.")


def _check_engine(side: EngineSide, scorer: Scorer, sequences: Sequence[Any], tokenizer: Any) -> None:
    if side.vocabulary is not None and side.vocabulary != scorer.vocabulary:
        raise OptionError(
            f"The trainer has a vocabulary of {scorer.vocabulary} tokens and the engine one of {side.vocabulary}: they "
            "are not the same model."
        )
    text = next((each for each in sequences if isinstance(each, str)), None)
    if text is not None and side.tokenizer is not None:
        ours, theirs = (list(each(text).input_ids) for each in (tokenizer, side.tokenizer))
        if ours != theirs:
            raise OptionError(
                f"The tokenizers cut {text[:40]!r} differently: the trainer's {ours[:8]}, the engine's {theirs[:8]}."
            )


def _answers(
    side: EngineSide, given: Sequence[_Given], how: Sampling, scorer: Scorer, watched: int
) -> tuple[list[Answer], Cause | None]:
    """Return what the engine answers, and a cause if it saw other tokens than it was asked."""
    layers = scorer.sites
    if given[0].is_prompt:
        prompts = [each.ids for each in given]
        answers = side.sample(prompts, how, layers, watched)
    else:
        asked = [
            Answer(
                each.ids,
                each.prompt,
                torch.zeros(len(each.ids) - each.prompt) if each.logprobs is None else each.logprobs,
            )
            for each in given
        ]
        answers = _rescored(side, asked, layers, watched, is_known=given[0].logprobs is not None)
    mistake = None
    for number, (answer, each) in enumerate(zip(answers, given, strict=True)):
        length = len(answer.logprobs)
        if not length or length >= len(answer.ids) or not bool(answer.logprobs.isfinite().all()):
            raise OptionError(f"The engine's log-probs of sequence {number} are missing or not finite.")
        if max(answer.ids) >= scorer.vocabulary:
            raise OptionError(
                f"The engine gives token {max(answer.ids)}; the trainer knows {scorer.vocabulary} tokens."
            )
        if answer.ids[: answer.prompt] != each.ids[: each.prompt]:
            said = f"it was asked {each.ids[:6]} and ran {answer.ids[:6]} (BOS, or another chat template)"
            mistake = mistake or Cause("tokens", f"prompt of sequence {number}", said)
            tail = answer.ids[answer.prompt :]  # the trainer scores what it would have run
            answers[number] = replace(answer, ids=[*each.ids[: each.prompt], *tail], prompt=each.prompt, states={})
    return answers, mistake


def _rescored(
    side: EngineSide, asked: list[Answer], layers: Sequence[str], watched: int, *, is_known: bool
) -> list[Answer]:
    """Return sequences with the engine's log-probs, where they are not known, and states of the first."""
    first = side.rescore(asked[:watched], layers)
    if is_known:
        return [replace(answer, states=each.states) for answer, each in zip(asked, first or [], strict=False)] + asked[
            len(first or []) :
        ]
    rest = side.rescore(asked[watched:]) if len(asked) > watched else []
    if first is None or rest is None:
        raise OptionError("This engine scores no tokens that it is given; give prompts, which it continues itself.")
    return [*first, *rest]


# -- the comparison ----------------------------------------------------------------------------------------------


def _compare(
    scorer: Scorer,
    side: EngineSide,
    answers: list[Answer],
    mistake: Cause | None,
    tokenizer: Any,
    temperature: float,
    watched: int,
    reference: nn.Module | None,
    healthy: Mapping[str, float] | None,
    tell: Callable[[str], None],
    began: float,
) -> Parity:
    tell("trainer: the same tokens")
    tops: list[list[int]] = []
    engine = [answer.logprobs for answer in answers]
    ours = scorer.score(answers, temperature=temperature, likeliest=tops)
    special = getattr(tokenizer, "all_special_ids", None) or ()
    gap = measure_gap(answers, engine, ours, tops, special)
    looked = answers[:watched]
    tell("noise: each side against itself")
    noise = _noise(scorer, side, looked, ours[:watched], temperature)
    tell("yardstick: the trainer's weights in higher precision")
    with _in_precision(scorer, reference, _higher(scorer.dtype)) as exact:
        true = exact.score(answers, temperature=temperature)
        with _in_precision(scorer, None, side.dtype or scorer.dtype) as twin:
            twin_off = rms(_apart(twin.score(answers, temperature=temperature), true)) if twin is not scorer else None
            distances = {"trainer": rms(_apart(ours, true)), "engine": rms(_apart(engine, true))}
            rounding = (distances["trainer"] ** 2 + (twin_off or distances["trainer"]) ** 2) ** 0.5
            own = [each.rms for name, each in noise.items() if name.startswith("trainer")]
            yardstick = max([rounding, *own, 1e-9])
            bos = getattr(tokenizer, "bos_token_id", None) or getattr(scorer.inner.config, "bos_token_id", None)
            limits = Precision.of(rounding)
            case = Case(scorer, twin, exact, side, looked, yardstick, limits, temperature, bos, healthy, tell)
            cause, layers, inside = find_cause(case)
    lower = min(scorer.dtype, twin.dtype, key=lambda dtype: dtype.itemsize)
    return Parity(
        gap=gap,
        yardstick=yardstick,
        precision=_precision(lower, rounding),
        is_beyond=gap.rms > limits.gap * yardstick,
        cause=mistake or cause,
        distances=distances,
        noise=noise,
        layers=layers,
        inside=inside,
        worst=worst_tokens(answers, ours, lambda ids: tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))),
        histogram=Histogram.of(torch.cat(_apart(engine, ours)), 2**0.5 * torch.cat(_apart(ours, true))),
        facts=side.facts,
        seconds=time.monotonic() - began,
        names=(f"{type(scorer.inner).__name__}, {str(scorer.dtype).removeprefix('torch.')}", side.name),
    )


def _precision(dtype: torch.dtype, rounding: float) -> str:
    """Return what to call the rounding: models of float32 may compute in less, as under autocast."""
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    return short or ("16-bit rounding" if rounding >= WIDE else str(dtype).removeprefix("torch."))


def _noise(
    scorer: Scorer, side: EngineSide, answers: list[Answer], ours: list[Tensor], temperature: float
) -> dict[str, Gap]:
    """Return how far each side is from itself, in other batches and pieces."""
    one = scorer.score(answers, batch=1, temperature=temperature)
    padded = scorer.score(answers, left=True, temperature=temperature)
    found = {
        f"trainer, batch of 1 against {scorer.batch}": measure_gap(answers, one, ours),
        "trainer, padded left against right": measure_gap(answers, padded, ours),
    }
    again = None if side.applies_temperature else side.rescore(answers)
    if again is not None:
        engine = [answer.logprobs for answer in answers]
        found["engine, again in one piece"] = measure_gap(answers, [each.logprobs for each in again], engine)
    return found


def _apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    return [first - second for first, second in zip(one, other, strict=True)]


def _higher(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.itemsize >= 4 else torch.float32


@contextmanager
def _in_precision(scorer: Scorer, given: nn.Module | None, dtype: torch.dtype) -> Iterator[Scorer]:
    """Yield the trainer's weights in another precision, without its hooks; the trainer itself if it has that."""
    if given is not None:
        yield Scorer(given, scorer.batch)
    elif dtype == scorer.dtype:
        yield scorer
    else:
        devices = [scorer.device] if scorer.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # making a model draws numbers
            made = _copy(scorer.inner, scorer.device)
        yield Scorer(made.to(scorer.device, dtype).eval(), scorer.batch)


def _copy(model: Any, device: torch.device) -> Any:
    try:
        with torch.device(device):
            made: Any = type(model)(copy.deepcopy(model.config))
        made.load_state_dict(model.state_dict())
        if hasattr(made, "set_experts_implementation"):
            made.set_experts_implementation("eager")  # the fast one knows no float64
    except (TypeError, AttributeError, RuntimeError):  # a wrapper, as of PEFT
        made = copy.deepcopy(model)
    return made
