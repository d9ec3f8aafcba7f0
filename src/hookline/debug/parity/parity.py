"""`parity`: say how far the log-probs of trainer and engine are apart, and why.

Users call it, the command ``hookline parity`` and `ParityCallback` too. It asks the engine (`open_engine`), scores the
same tokens with the trainer and with its weights in higher precision (`Scorer`), and hands both to `find_cause`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.debug.parity.causes import find_cause
from hookline.debug.parity.result import Group, Parity, measure_gap, ratio_histogram, read_healthy, worst_tokens
from hookline.debug.parity.scoring import Answer, LayerError, Pair, Scorer, apart, rms
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
            folder (run here, in the batches of our engine), or a function. The function gets lists of token ids and
            returns for each a pair: all ids (those it was given, perhaps continued), and the log-probs of the last of
            them. None if the sequences have the log-probs of the engine.
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
    is_address = isinstance(engine, str) and "://" in engine
    side = open_engine(engine) if is_address else None  # before the trainer is loaded, as it is quick
    if isinstance(trainer, str | Path):
        trainer, own = load(trainer, with_tokenizer=tokenizer is None)
        tokenizer = tokenizer or own
    scorer = Scorer(trainer, batch)
    known = None if healthy is None else read_healthy(healthy, scorer.sites)
    given = [_read(f"Sequence {number}", each, tokenizer, scorer) for number, each in enumerate(sequences)]
    are_recorded = {len(each.logprobs) > 0 for each in given}
    if len(are_recorded) != 1:
        raise OptionError("There are no sequences, or some have a completion and some have none; give all of one kind.")
    if engine is None and are_recorded != {True}:
        raise OptionError("Without an engine every sequence needs a completion and its log-probs.")
    progress(f"engine: {counted(len(given), 'sequence')}")
    side = side or open_engine(engine)
    try:
        side.meet(scorer.vocabulary)
        scorer.temperature = (temperature or 1.0) if side.applies_temperature or are_recorded == {True} else 1.0
        answers = _answers(side, given, Request(new_tokens, temperature, scorer.sites, watched), scorer.vocabulary)
        progress("trainer: the same tokens")
        looked_at = answers[:watched]
        sites = scorer.sites if all(answer.states for answer in looked_at) else []
        ours = scorer.run(answers, names=sites, kept=len(looked_at))
        progress("yardstick: the trainer's weights in higher precision")
        higher = torch.float64 if scorer.dtype.itemsize >= 4 else torch.float32
        exact = scorer.of(reference) if reference is not None else _in_precision(scorer, higher)
        true = exact.run(answers).logprobs
        twin = _in_precision(scorer, side.dtype or scorer.dtype)
        theirs = ours if twin is scorer else twin.run(answers, names=sites, kept=len(looked_at))
        rounding = [torch.cat(apart(each.logprobs, true)) for each in (ours, theirs)]
        engines = [answer.logprobs for answer in answers]
        gap = measure_gap(answers, ours, getattr(tokenizer, "all_special_ids", ()))
        pair = Pair(scorer, twin, exact, looked_at, *_yardstick(rounding), known)
        progress("noise: each side against itself")
        noise = _noise(pair, side, ours.logprobs[:watched])
        before = rms(apart(engines[:watched], ours.logprobs[:watched]))
        layers: dict[str, LayerError] = {}
        if sites:
            progress("layers: the engine's hidden states in the trainer")
            layers = pair.errors(looked_at, theirs, known)
        cause, inside = find_cause(pair, side, layers, before, progress)
    finally:
        side.close()
    return Parity(
        gap=gap,
        yardstick=pair.yardstick,
        precision=pair.precision,
        is_beyond=gap.rms > pair.most,
        cause=cause,
        distances={"trainer": rms(rounding[:1]), "engine": rms(apart(engines, true))},
        noise=noise,
        layers=layers,
        inside=inside,
        worst=worst_tokens(answers, ours, tokenizer.decode if tokenizer else lambda ids: " ".join(map(str, ids))),
        ratios=ratio_histogram(torch.cat(apart(engines, ours.logprobs)), 2**0.5 * rounding[0]),
        facts={"trainer": f"{type(scorer.inner).__name__}, {scorer.dtype}", "engine": side.name, **side.facts},
        seconds=time.monotonic() - began,
    )


def _yardstick(rounding: Sequence[Tensor]) -> tuple[float, float]:
    """Return the gap that the rounding of both sides explains, and the standard error of its square, against that."""
    squares = rounding[0].square() + rounding[1].square()
    return max(float(squares.mean().sqrt()), 1e-9), float(squares.norm() / squares.sum().clamp(min=1e-300))


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
    are_texts = isinstance(prompt, str) and isinstance(completion, str)
    if are_texts and _ids(where, prompt + completion, tokenizer, scorer) != ids + more:
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


def _answers(side: EngineSide, given: Sequence[Answer], how: Request, vocabulary: int) -> list[Answer]:
    """Return what the engine answers; raise if it lacks log-probs, or has run other tokens than it was asked."""
    answers = list(given)
    if not len(given[0].logprobs):
        answers = side.ask([each.ids for each in given], how)
    elif side.gives_states:
        again = side.rescore(given[: how.watched], how.layers)
        answers[: len(again)] = [replace(old, states=new.states) for old, new in zip(given, again, strict=False)]
    for number, (answer, asked) in enumerate(zip(answers, given, strict=True)):
        if not 0 < len(answer.logprobs) < len(answer.ids) or not bool(answer.logprobs.isfinite().all()):
            raise OptionError(f"The engine's log-probs of sequence {number} are missing or not finite.")
        if max(answer.ids) >= vocabulary:
            raise OptionError(f"The engine gives token {max(answer.ids)}; the trainer knows {vocabulary} tokens.")
        if answer.ids[: asked.prompt] != asked.ids[: asked.prompt]:
            raise OptionError(
                f"The engine was asked {asked.ids[:6]} in sequence {number} and ran {answer.ids[:6]}: BOS, or another "
                "chat template. Give it token ids."
            )
    return answers


# -- the sides in other ways -------------------------------------------------------------------------------------


def _noise(pair: Pair, side: EngineSide, ours: list[Tensor]) -> dict[str, Group]:
    """Return how far each side is from itself, in other batches and pieces."""
    trainer, answers = pair.trainer, pair.answers
    engine = [answer.logprobs for answer in answers]
    found = {
        f"trainer, batch of 1 against {trainer.batch}": apart(trainer.of(batch=1).run(answers).logprobs, ours),
        "trainer, padded left against right": apart(trainer.run(answers, left=True).logprobs, ours),
    }
    if side.scores_prompts:
        found["engine, again in one piece"] = apart([each.logprobs for each in side.rescore(answers)], engine)
    return {name: Group.of(torch.cat(parts)) for name, parts in found.items()}


def _in_precision(scorer: Scorer, dtype: torch.dtype) -> Scorer:
    """Return the trainer's weights in another precision; the trainer itself if it has that."""
    if dtype == scorer.dtype:
        return scorer
    made = copy.deepcopy(scorer.inner).to(dtype)
    made.__dict__.pop("forward", None)  # accelerate's stays that of the trainer's model, and its autocast
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")  # the fast one knows no float64
    return scorer.of(made)
