"""`parity`: say how far the log-probs of trainer and engine are apart, and why; `ParityCallback` does it in training.

Users call `parity`, the command ``hookline parity`` and `ParityCallback` too. It asks the engine (`open_engine`),
scores the same tokens with the trainer and with its weights in higher precision (`Scorer`), calls `find_cause`, and
returns a `Parity`: numbers, one sentence, a text, JSON, a page, and healthy numbers to compare later pairs with.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hookline.debug.parity.causes import Cause, LayerError, Pair, find_cause
from hookline.debug.parity.sides import Answer, EngineSide, Request, Scorer, apart, open_engine, rms
from hookline.errors import OptionError
from hookline.files import replace_file
from hookline.messages import counted, short_repr
from hookline.phases import in_phase
from hookline.serve.load_model import load
from hookline.tables import Table

logger = logging.getLogger("hookline.parity")

_STYLE: Final = ":root { color-scheme: light dark } body { margin: 24px; font: 14px/1.5 system-ui, sans-serif }"


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
            returns for each all ids (those it was given, perhaps continued), the log-probs of the last of them, and
            hidden states if it has some: a mapping of modules to tensors (tokens, features), from position 0 on, or
            what a `Session` gives. None if the sequences have the log-probs of the engine.
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
    # before the trainer is loaded, as it is quick
    side = open_engine(engine) if isinstance(engine, str) and "://" in engine else None
    if isinstance(trainer, str | Path):
        trainer, own = load(trainer, with_tokenizer=tokenizer is None)
        tokenizer = tokenizer or own
    scorer = Scorer(trainer, batch)
    known = {} if healthy is None else _read_healthy(healthy, scorer.sites)
    given = [_read(f"Sequence {number}", each, tokenizer, scorer) for number, each in enumerate(sequences)]
    are_recorded = {len(each.logprobs) > 0 for each in given}
    if len(are_recorded) != 1:
        raise OptionError("There are no sequences, or some have a completion and some have none; give all of one kind.")
    if engine is None and are_recorded != {True}:
        raise OptionError("Without an engine every sequence needs a completion and its log-probs.")
    progress(f"engine: {counted(len(given), 'sequence')}")
    side = side or open_engine(engine)
    side.meet(scorer.vocabulary)
    if side.applies_temperature or are_recorded == {True}:
        scorer.temperature = temperature or 1.0
    answers = _answers(side, given, Request(new_tokens, temperature, scorer.sites, watched), scorer.vocabulary)
    progress("trainer: the same tokens")
    ours = scorer.run(answers)
    progress("yardstick: the trainer's weights in higher precision")
    higher = torch.float64 if scorer.dtype.itemsize >= 4 else torch.float32
    exact = replace(scorer, model=reference) if reference is not None else _in_precision(scorer, higher)
    true = exact.run(answers)
    twin = _in_precision(scorer, side.dtype or scorer.dtype)
    rounding = apart(ours, true)
    squares = rounding.square() + apart(ours if twin is scorer else twin.run(answers), true).square()
    explained = max(float(squares.mean().sqrt()), 1e-9)
    doubt = float(squares.norm() / squares.sum().clamp(min=1e-300))
    pair = Pair(scorer, twin, exact, side, answers[:watched], explained, doubt, known, progress)
    lower = str(min(scorer.dtype, twin.dtype, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    # models of float32 may compute in less, as under autocast
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(lower, "16-bit rounding" if pair.is_wide else lower)
    progress("noise: each side against itself")
    noise = _noise(pair, ours[:watched], {"trainer": rounding, "engine": apart(answers, true)})
    layers: dict[str, LayerError] = {}
    if all(answer.states for answer in pair.answers):
        progress("layers: the engine's hidden states in the trainer")
        layers = pair.errors(pair.answers, scorer.sites)
    cause, inside = find_cause(pair, layers)
    gap = apart(answers, ours)
    return Parity(
        gap=Group.of(gap),
        yardstick=explained,
        times=rms(gap) / explained,
        precision=precision,
        is_beyond=rms(gap) > pair.most,
        cause=cause,
        groups=_groups(answers, ours, getattr(tokenizer, "all_special_ids", ())),
        sequences=[Group.of(apart([one], [other])) for one, other in zip(answers, ours, strict=True)],
        other_likeliest=_other_likeliest(answers, ours),
        noise=noise,
        layers=layers,
        inside=inside,
        worst=_worst(answers, ours, tokenizer.decode if tokenizer else lambda ids: " ".join(map(str, ids))),
        ratios=_histogram(gap, 2**0.5 * rounding),
        facts={"trainer": f"{type(scorer.inner).__name__}, {scorer.dtype}", **side.facts},
    )


# -- what is compared --------------------------------------------------------------------------------------------


def _read(where: str, value: Any, tokenizer: Any, scorer: Scorer) -> Answer:
    """Return a sequence in tokens, with log-probs if it has a completion; raise for one that is none."""

    def ids_of(given: Any, *, special: bool = True) -> list[int]:
        if isinstance(given, str) and tokenizer is None:
            raise OptionError(f"{where} is a text, and there is no tokenizer; give tokenizer=, or token ids.")
        ids = tokenizer(given, add_special_tokens=special).input_ids if isinstance(given, str) else given
        are_ids = isinstance(ids, Sequence) and all(type(id) is int and 0 <= id < scorer.vocabulary for id in ids)
        if not are_ids or not ids:
            raise OptionError(f"{where} is a text, or token ids below {scorer.vocabulary}, got {short_repr(ids)}.")
        return list(ids)

    row = value if isinstance(value, Mapping) else {"prompt": value}
    prompt, completion, logprobs = row.get("prompt"), row.get("completion"), row.get("logprobs") or ()
    ids = ids_of(prompt)
    if completion is None:
        return Answer(ids, len(ids), torch.empty(0))
    more = ids_of(completion, special=False)
    if isinstance(prompt, str) and isinstance(completion, str) and ids_of(prompt + completion) != ids + more:
        raise OptionError(f"{where} is cut into other tokens as a whole than as prompt and completion; give token ids.")
    if len(logprobs) != len(more) or None in logprobs:
        raise OptionError(f"{where} has {len(more)} tokens of completion, {len(logprobs)} log-probs; each needs one.")
    return Answer(ids + more, len(ids), torch.tensor([float(each) for each in logprobs], dtype=torch.float64))


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
            what = f"asked {asked.ids[:6]} in sequence {number}, and ran {answer.ids[:6]}"
            raise OptionError(f"The engine was {what}: BOS, or another chat template. Give it token ids.")
    return answers


def _noise(pair: Pair, ours: Sequence[Answer], far: Mapping[str, Tensor]) -> dict[str, Group]:
    """Return how far each side is from higher precision, as given, and from itself in other batches and pieces."""
    alone, left = replace(pair.trainer, batch=1), replace(pair.trainer, padding="left")
    found = {f"{side} against higher precision": each for side, each in far.items()}
    found[f"trainer, batch of 1 against {pair.trainer.batch}"] = apart(alone.run(pair.answers), ours)
    found["trainer, padded left against right"] = apart(left.run(pair.answers), ours)
    if pair.engine.scores_prompts:
        found["engine, again in one piece"] = apart(pair.engine.rescore(pair.answers), pair.answers)
    return {name: Group.of(each) for name, each in found.items()}


def _in_precision(scorer: Scorer, dtype: torch.dtype) -> Scorer:
    """Return the trainer's weights in another precision; the trainer itself if it has that."""
    if dtype == scorer.dtype:
        return scorer
    made = copy.deepcopy(scorer.inner).to(dtype)
    made.__dict__.pop("forward", None)  # accelerate's stays that of the trainer's model, and its autocast
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")  # the fast one knows no float64
    return replace(scorer, model=made)


# -- numbers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Differences of two log-probs of some tokens, in nats: engine minus trainer, or a side minus itself run anew."""

    tokens: int
    mean: float
    """With its sign."""
    rms: float
    p50: float
    """Of the sizes, as the next two."""
    p99: float
    max: float
    outside: float
    """The share of tokens whose ratio of probabilities is outside [0.9, 1.1]."""

    @classmethod
    def of(cls, differences: Tensor) -> Group:
        """Return the numbers of differences."""
        size, ratio = differences.abs(), (-differences).exp()
        outside = float(((ratio < 0.9) | (ratio > 1.1)).double().mean())
        p50, p99 = (float(size.quantile(part)) for part in (0.5, 0.99))
        return cls(len(ratio), float(differences.mean()), rms(differences), p50, p99, float(size.max()), outside)

    def row(self) -> list[str]:
        """Return the cells of a table."""
        sizes = (self.rms, self.p50, self.p99, self.max)
        return [str(self.tokens), f"{self.mean:+.2g}", *(f"{each:.2g}" for each in sizes), f"{self.outside:.1%}"]


def _groups(answers: Sequence[Answer], ours: Sequence[Answer], special: Sequence[int]) -> dict[str, Group]:
    """Return the gap by position and by class of tokens; ``special`` are those that the tokenizer calls so."""
    ids = torch.cat([answer.scored for answer in answers])
    is_special = torch.isin(ids, torch.tensor(sorted(special), dtype=torch.long))
    is_rare = (torch.cat([each.logprobs for each in ours]).exp() < 0.01) & ~is_special
    ends = [(len(each.ids), len(each.logprobs), each.prompt) for each in answers]
    is_prefill = torch.cat([torch.arange(end - count, end) <= prompt for end, count, prompt in ends])
    masks = {"prefill": is_prefill, "decode": ~is_prefill}
    masks |= {"special": is_special, "rare (p < 1 %)": is_rare, "other": ~is_special & ~is_rare}
    return {name: Group.of(apart(answers, ours)[mask]) for name, mask in masks.items() if bool(mask.any())}


def _other_likeliest(answers: Sequence[Answer], ours: Sequence[Answer]) -> float | None:
    """Return the share of tokens that are the likeliest for one side alone; None if an engine does not tell."""
    if not all(len(answer.top) for answer in answers):
        return None
    engine, trainer = (torch.cat([each.logprobs >= each.top for each in side]) for side in (answers, ours))
    return float((engine != trainer).double().mean())


def _worst(answers: Sequence[Answer], ours: Sequence[Answer], text: Callable[[Any], str]) -> list[dict[str, Any]]:
    """Return the tokens with the largest gaps, and the text of six tokens before each; ``text`` decodes token ids."""
    trainer, engine = (torch.cat([each.logprobs for each in side]).tolist() for side in (ours, answers))
    places = [(n, at) for n, each in enumerate(answers) for at in range(len(each.ids))[-len(each.logprobs) :]]
    found = []
    for row in apart(answers, ours).abs().argsort(descending=True)[:12].tolist():
        (number, at), ids = places[row], answers[places[row][0]].ids
        words = {"before": text(ids[max(0, at - 6) : at]), "token": text(ids[at : at + 1])}
        found.append({"sequence": number, "position": at, **words, "trainer": trainer[row], "engine": engine[row]})
    return found


def _histogram(found: Tensor, expected: Tensor, bins: int = 25) -> dict[str, list[float]]:
    """Return how many tokens have which ratio, trainer over engine, and how many would if rounding were all."""
    most = max(float(found.abs().max()), float(expected.abs().max()), 1e-9)
    counts = [torch.histc((-each).float(), bins, -most, most).tolist() for each in (found, expected)]
    centres = (torch.arange(bins) + 0.5) / bins * 2 * most - most
    return {"ratio": centres.exp().tolist(), "found": counts[0], "expected": counts[1]}


# -- the result --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parity:
    """How far trainer and engine are apart, what of that is rounding, and where the rest comes from."""

    gap: Group
    yardstick: float
    """The gap that rounding explains, in nats rms."""
    times: float
    """How many times that the gap is."""
    precision: str
    """Whose rounding: ``"bf16"``, ``"float32"``."""
    is_beyond: bool
    """Whether the gap is more than rounding explains."""
    cause: Cause | None
    groups: dict[str, Group]
    """The gap of tokens that follow a prefill (the prompt's and the first of an answer), of those that follow a decoded
    token, of special and of rare tokens."""
    sequences: list[Group]
    """The gap of each sequence."""
    other_likeliest: float | None
    """The share of tokens that are the likeliest for one side and not for the other; None if that is not known."""
    noise: dict[str, Group]
    """Each side against itself (in other batches, padded on the other side, decoded or in one piece), and against the
    trainer's weights in higher precision."""
    layers: Mapping[str, LayerError]
    """The error of each layer by itself; empty if the engine gives no hidden states."""
    inside: Mapping[str, LayerError]
    """The same of the modules inside of the worst layer."""
    worst: list[dict[str, Any]]
    """The tokens with the largest gaps, with the text before them."""
    ratios: dict[str, list[float]]
    """How many tokens have which ratio of probabilities, and how many if rounding is all."""
    facts: dict[str, str]
    """What is known of the sides."""

    @property
    def ok(self) -> bool:
        """Return whether nothing is beyond what rounding explains."""
        return not self.is_beyond if self.cause is None else self.cause.name == "router ties"

    @property
    def sentence(self) -> str:
        """Return what was found, in one sentence."""
        what = "unsure where from" if self.is_beyond else f"nothing beyond what {self.precision} explains"
        if self.cause is not None:
            what = f"{self.cause.where} ({self.cause.text})"
        said = f"gap {self.gap.rms:.2g} nats rms, {self.times:.2g} x what {self.precision} explains: {what}"
        return f"{said}; {self.gap.outside:.1%} of ratios leave [0.9, 1.1]"

    def _tables(self) -> list[Table]:
        groups = {"engine against trainer": self.gap, **self.groups, **self.noise}
        other = "unknown" if self.other_likeliest is None else f"{self.other_likeliest:.2%}"
        foot = (f"rms that rounding explains: {self.yardstick:.2g}", f"likeliest for only one side: {other}")
        header = ("tokens", "count", "mean", "rms", "p50", "p99", "max", "outside")
        tables = [Table(("side", ""), [*self.facts.items()])]
        tables.append(Table(header, [(name, *each.row()) for name, each in groups.items()], range(1, 8), foot=foot))
        most = max(self.ratios["found"] + self.ratios["expected"])
        ratios = [
            (f"{ratio:.3f}", f"{found:.0f}", f"{expected:.0f}", _bar(found, expected, most))
            for ratio, found, expected in zip(*self.ratios.values(), strict=True)
        ]
        tables.append(Table(("trainer / engine", "found", "rounding", "│ is rounding"), ratios, (0, 1, 2)))
        for title, errors in (("local error of a layer", self.layers), ("inside of the worst", self.inside)):
            most = max([1.0, *(each.times for each in errors.values())])
            cells = [
                (name, f"{each.found:.2g}", f"{each.expected:.2g}", f"{each.times:.1f} x", _bar(each.times, 1.0, most))
                for name, each in errors.items()
            ]
            tables += [Table((title, "found", "expected", "", "│ is expected"), cells, (1, 2, 3))] if cells else []
        form = ("{sequence}:{position}", "{trainer:.3f}", "{engine:.3f}", "{before}⟦{token}⟧")
        worst = [[cell.format(**one) for cell in form] for one in self.worst]
        return [*tables, Table(("worst tokens", "trainer", "engine", "text"), worst, (1, 2))]

    def __str__(self) -> str:
        return "\n\n".join([self.sentence, *map(str, self._tables())])

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"sentence": self.sentence, "ok": self.ok, **asdict(self)}

    def save_healthy(self, path: str | Path) -> Path:
        """Write the errors of this pair, which is taken for healthy, to compare later ones with."""
        if not self.layers:
            raise OptionError("The engine gives no hidden states, so that there are no errors of layers to save.")
        replace_file(Path(path), json.dumps({name: error.found for name, error in self.layers.items()}, indent=1))
        return Path(path)

    def write_html(self, path: str | Path) -> Path:
        """Write a page of one file; return its path."""
        from hookline.report.report_page import whole_page

        title = f"<h1>Trainer and engine</h1><p><b>{escape(self.sentence)}</b></p>"
        body = "".join([title, *(f"<p>{table.html()}</p>" for table in self._tables())])
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), whole_page(body, title="Trainer and engine", style=_STYLE, attributes=" data-ready"))
        return Path(path)


def _bar(value: float, mark: float, most: float) -> str:
    """Draw a bar in blocks, and a line where another value lies."""
    filled = ("█" * round(40 * value / most)).ljust(41, "\N{NO-BREAK SPACE}")
    at = round(40 * mark / most)
    return f"{filled[:at]}│{filled[at + 1 :]}"


def _read_healthy(path: str | Path, names: Sequence[str]) -> dict[str, float]:
    """Return the errors of a healthy pair that `Parity.save_healthy` wrote; raise if they are of another model."""
    try:
        layers = {str(name): float(error) for name, error in json.loads(Path(path).read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise OptionError(f"{path} has no healthy numbers ({error!r}); write them with --save-healthy.") from None
    if not layers.keys() >= {*names}:
        raise OptionError(f"{path} is of another model, whose layers have other names.")
    return layers


# -- in a trainer ------------------------------------------------------------------------------------------------


class ParityCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not look into transformers
    """Log ``parity/gap``, ``parity/times`` and ``parity/outside`` every so many steps of a trainer that samples.

    Recipe::

        callback = ParityCallback(engine="http://localhost:8000", every=50)
        trainer = GRPOTrainer(model, rewards, args=args, train_dataset=data, callbacks=[callback])
        callback.follow(trainer)
        trainer.train()

    It reads the completions and log-probs that the trainer keeps for its next losses (``_buffered_inputs``), before
    the first optimizer step on them: after it the weights are others than those that the engine had. A trainer has
    log-probs of an engine with ``use_vllm`` or a ``rollout_func``. The sentence goes to the log of ``hookline.parity``.

    Args:
        engine: Any engine of `parity`, to find the layer as well; None compares the kept log-probs alone.
        every: At least so many steps lie between two comparisons; the first is at the first step.
        most: At most so many sequences are compared.
        options: Of `parity`.
    """

    def __init__(self, engine: Any = None, every: int = 50, most: int = 16, **options: Any) -> None:
        self._engine, self._every, self._most, self._options = engine, every, most, options
        self._trainer: Any = None
        self._due = 0
        self._seen: Any = None

    def follow(self, trainer: Any) -> None:
        """Say whose samples are compared."""
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Compare new samples, if it is time to; an error is logged, and training goes on."""
        kept = getattr(self._trainer, "_buffered_inputs", None) or []
        is_new, self._seen = kept is not self._seen, kept
        if not state.is_world_process_zero or not is_new or state.global_step < self._due:
            return
        self._due, step = state.global_step + self._every, state.global_step + 1
        try:
            sampled = {"tokenizer": others.get("processing_class"), "temperature": self._trainer.temperature}
            with in_phase("intervention"):  # its forwards are none of the step that is under way
                found = parity(model, self._engine, self._sequences(kept), **sampled | self._options)
            logger.warning("step %d: %s", step, found.sentence)
            numbers = {"gap": found.gap.rms, "times": found.times, "outside": found.gap.outside}
            self._trainer.log({f"parity/{name}": number for name, number in numbers.items()})
        except Exception as error:
            logger.warning("step %d: trainer and engine were not compared: %s", step, error)

    def _sequences(self, kept: list[Any]) -> list[dict[str, Any]]:
        """Return what was sampled last, with the engine's log-probs."""
        if self._trainer is None or any(batch.get("sampling_per_token_logps") is None for batch in kept):
            raise OptionError("It keeps no log-probs of an engine (use_vllm, rollout_func), or nobody called follow().")
        found = []
        for batch in kept:
            for row, logprobs in enumerate(batch["sampling_per_token_logps"]):
                asked, given = batch["prompt_mask"][row].bool(), batch["completion_mask"][row].bool()
                prompt, completion = batch["prompt_ids"][row][asked], batch["completion_ids"][row][given]
                sample = {"prompt": prompt.tolist(), "completion": completion.tolist()}
                found.append({**sample, "logprobs": logprobs[given].tolist()})
        return found[: self._most]
