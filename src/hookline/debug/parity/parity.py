"""`parity`: say how far the log-probs of trainer and engine are apart, and why.

Users call it, the command ``hookline parity`` and `ParityCallback` too. It asks the engine (`open_engine`), scores the
same tokens with the trainer and with its weights in higher precision (`Scorer`), and hands both to `find_cause`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.debug.parity.causes import Cause, find_cause
from hookline.debug.parity.result import Group, Parity, measure_gap, ratio_histogram, read_healthy, worst_tokens
from hookline.debug.parity.scoring import Answer, Pair, Scorer, apart, rms
from hookline.debug.parity.sides import EngineSide, Request, open_engine
from hookline.errors import OptionError
from hookline.messages import counted, short_repr
from hookline.serve.load_model import load

__all__ = ["parity"]


def parity(
    trainer: nn.Module | str | Path,
    engine: Any,
    sequences: Sequence[Any],
    *,
    tokenizer: Any = None,
    new_tokens: int = 64,
    temperature: float = 1.0,
    batch: int = 8,
    watched: int = 16,
    reference: nn.Module | None = None,
    healthy: str | Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
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
        engine: A URL of ``hookline serve`` or ``vllm serve``, an ``LLM`` of vLLM, ``"vllm:FOLDER"``, a model or a
            folder (served here), or a function. The function gets lists of token ids and returns for each a pair: all
            ids (those it was given, perhaps continued), and the log-probs of the last of them. None if the sequences
            have the log-probs of the engine.
        sequences: Prompts, which the engine continues: texts, or lists of token ids. Or what an engine has sampled:
            mappings with ``prompt``, ``completion`` and ``logprobs``, of the completion.
        tokenizer: Of the trainer; that of its folder by default.
        new_tokens: How many tokens an engine adds to a prompt.
        temperature: At which the engine samples, and what the trainer divides logits by, where the engine's log-probs
            are those after the temperature.
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
    if isinstance(trainer, str | Path):
        trainer, own = load(trainer, with_tokenizer=tokenizer is None)
        tokenizer = tokenizer or own
    scorer = Scorer(trainer, batch)
    known = None if healthy is None else read_healthy(healthy, scorer.sites)
    given = [_read(f"Sequence {number}", each, tokenizer, scorer) for number, each in enumerate(sequences)]
    if len({len(each.logprobs) > 0 for each in given}) != 1:
        raise OptionError("There are no sequences, or some have a completion and some have none; give all of one kind.")
    if engine is None and not len(given[0].logprobs):
        raise OptionError("Without an engine every sequence needs a completion and its log-probs.")
    progress(f"engine: {counted(len(given), 'sequence')}")
    side = open_engine(engine)
    try:
        if side.vocabulary not in (None, scorer.vocabulary):
            raise OptionError(
                f"The trainer has a vocabulary of {scorer.vocabulary} tokens and the engine one of {side.vocabulary}: "
                "they are not the same model."
            )
        scorer.temperature = temperature if side.applies_temperature else 1.0
        how = Request(new_tokens, temperature, scorer.sites, watched)
        answers, mistake = _answers(side, given, how, scorer.vocabulary)
        engines = [answer.logprobs for answer in answers]
        progress("trainer: the same tokens")
        ours = scorer.score(answers)
        progress("yardstick: the trainer's weights in higher precision")
        higher = torch.float64 if scorer.dtype.itemsize >= 4 else torch.float32
        exact = scorer.of(reference) if reference is not None else _in_precision(scorer, higher)
        twin = _in_precision(scorer, side.dtype or scorer.dtype)
        true = exact.score(answers)
        off, twin_off = (rms(apart(each, true)) for each in (ours, ours if twin is scorer else twin.score(answers)))
        pair = Pair(scorer, twin, exact, answers[:watched], max(math.hypot(off, twin_off), 1e-9), known)
        progress("noise: each side against itself")
        noise = _noise(pair, side, ours[:watched])
        cause, layers, inside = find_cause(pair, side, progress)
    finally:
        side.close()
    gap = measure_gap(answers, ours, scorer.is_likeliest(answers), getattr(tokenizer, "all_special_ids", ()))
    return Parity(
        gap=gap,
        yardstick=pair.yardstick,
        precision=pair.precision,
        is_beyond=gap.rms > pair.most,
        cause=mistake or cause,
        distances={"trainer": off, "engine": rms(apart(engines, true))},
        noise=noise,
        layers=layers.each if layers else {},
        inside=inside.each if inside else {},
        worst=worst_tokens(answers, ours, tokenizer.decode if tokenizer else lambda ids: " ".join(map(str, ids))),
        ratios=ratio_histogram(torch.cat(apart(engines, ours)), 2**0.5 * torch.cat(apart(ours, true))),
        facts={"trainer": f"{type(scorer.inner).__name__}, {scorer.dtype}", "engine": side.name, **side.facts},
        seconds=time.monotonic() - began,
    )


# -- what is compared --------------------------------------------------------------------------------------------


def _read(where: str, value: Any, tokenizer: Any, scorer: Scorer) -> Answer:
    """Return a sequence in tokens, with log-probs if it has a completion; raise for one that is none."""
    prompt, completion = value, None
    if isinstance(value, Mapping):
        prompt, completion = value.get("prompt"), value.get("completion")
    ids = _ids(where, prompt, tokenizer, scorer)
    if completion is None:
        return Answer(ids, len(ids), torch.empty(0))
    more = _ids(where, completion, tokenizer, scorer, special=False)
    if (
        isinstance(prompt, str)
        and isinstance(completion, str)
        and _ids(where, prompt + completion, tokenizer, scorer) != ids + more
    ):
        raise OptionError(
            f"{where} is cut into other tokens as a whole than as prompt and completion; give token ids, as sampled."
        )
    logprobs = value.get("logprobs") or ()
    if len(logprobs) != len(more) or None in logprobs:
        raise OptionError(
            f"{where} has {len(more)} tokens of completion and {len(logprobs)} log-probs; each needs one."
        )
    return Answer(ids + more, len(ids), torch.tensor([float(each) for each in logprobs], dtype=torch.float64))


def _ids(where: str, value: Any, tokenizer: Any, scorer: Scorer, *, special: bool = True) -> list[int]:
    if isinstance(value, str):
        if tokenizer is None:
            raise OptionError(f"{where} is a text, and there is no tokenizer; give tokenizer=, or token ids.")
        value = tokenizer(value, add_special_tokens=special).input_ids
    if not isinstance(value, Sequence) or not value or not all(type(id) is int for id in value):
        raise OptionError(f"{where} is a text or a list of token ids, got {short_repr(value)}.")
    if not 0 <= min(value) <= max(value) < scorer.vocabulary:
        raise OptionError(f"{where} has token {max(value)}, and the trainer knows 0 to {scorer.vocabulary - 1}.")
    return list(value)


def _answers(
    side: EngineSide, given: Sequence[Answer], how: Request, vocabulary: int
) -> tuple[list[Answer], Cause | None]:
    """Return what the engine answers, and a cause if it saw other tokens than it was asked."""
    if len(given[0].logprobs):
        states = side.rescore(given[: how.watched], how.layers) if side.gives_states else []
        answers = [
            *(replace(old, states=new.states) for old, new in zip(given, states, strict=False)),
            *given[len(states) :],
        ]
    else:
        answers = side.ask([each.ids for each in given], how)
    mistake = None
    for number, (answer, asked) in enumerate(zip(answers, given, strict=True)):
        if not 0 < len(answer.logprobs) < len(answer.ids) or not bool(answer.logprobs.isfinite().all()):
            raise OptionError(f"The engine's log-probs of sequence {number} are missing or not finite.")
        if max(answer.ids) >= vocabulary:
            raise OptionError(f"The engine gives token {max(answer.ids)}; the trainer knows {vocabulary} tokens.")
        if answer.ids[: answer.prompt] != asked.ids[: asked.prompt]:
            said = f"it was asked {asked.ids[:6]} and ran {answer.ids[:6]} (BOS, or another chat template)"
            mistake = mistake or Cause("tokens", f"prompt of sequence {number}", said)
            ids = [
                *asked.ids[: asked.prompt],
                *answer.ids[answer.prompt :],
            ]  # the trainer scores what it would have run
            answers[number] = replace(answer, ids=ids, prompt=asked.prompt, states={})
    return answers, mistake


# -- the sides in other ways -------------------------------------------------------------------------------------


def _noise(pair: Pair, side: EngineSide, ours: list[Tensor]) -> dict[str, Group]:
    """Return how far each side is from itself, in other batches and pieces."""
    trainer, answers = pair.trainer, pair.answers
    engine = [answer.logprobs for answer in answers]
    found = {
        f"trainer, batch of 1 against {trainer.batch}": apart(trainer.of(batch=1).score(answers), ours),
        "trainer, padded left against right": apart(trainer.score(answers, left=True), ours),
    }
    if side.model is not None:
        found["engine, again in one piece"] = apart(Scorer(side.model).score(answers), engine)
    elif side.scores_prompts:
        found["engine, again in one piece"] = apart([each.logprobs for each in side.rescore(answers)], engine)
    return {name: Group.of(torch.cat(parts)) for name, parts in found.items()}


def _in_precision(scorer: Scorer, dtype: torch.dtype) -> Scorer:
    """Return the trainer's weights in another precision; the trainer itself if it has that."""
    if dtype == scorer.dtype:
        return scorer
    made = copy.deepcopy(scorer.inner).to(dtype)
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")  # the fast one knows no float64
    return scorer.of(made)
