"""Hold and show what `parity` found: the gap in numbers, one sentence, a text, JSON, a page, and healthy numbers.

`parity` makes a `Gap` of trainer and engine, a `Group` of each side against itself, and a `Parity` of everything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hookline.debug.parity.causes import Cause
from hookline.debug.parity.scoring import Answer, LayerError, Scored, apart, rms
from hookline.errors import OptionError
from hookline.files import replace_file
from hookline.tables import Table

__all__ = ["Gap", "Group", "Parity", "measure_gap", "ratio_histogram", "read_healthy", "worst_tokens"]

_RARE: Final = math.log(0.01)
_STYLE: Final = ":root { color-scheme: light dark } body { margin: 24px; font: 14px/1.5 system-ui, sans-serif }"


# -- numbers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Differences of two log-probs of some tokens, in nats: engine minus trainer, or a side minus itself run anew."""

    tokens: int
    mean: float
    """With its sign."""
    rms: float
    p99: float
    """Of the sizes, as the next."""
    max: float
    outside: float
    """The share of tokens whose ratio of probabilities is outside [0.9, 1.1]."""

    @classmethod
    def of(cls, differences: Tensor) -> Group:
        """Return the numbers of differences."""
        size, ratio = differences.abs(), (-differences).exp()
        outside = float(((ratio < 0.9) | (ratio > 1.1)).double().mean())
        p99 = float(size.quantile(0.99))
        return cls(len(ratio), float(differences.mean()), rms([differences]), p99, float(size.max()), outside)

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        sizes = (f"{self.mean:+.2g}", f"{self.rms:.2g}", f"{self.p99:.2g}", f"{self.max:.2g}")
        return (str(self.tokens), *sizes, f"{self.outside:.1%}")


@dataclass(frozen=True)
class Gap(Group):
    """The differences of all tokens, and of groups of them."""

    p50: float
    other_likeliest: float | None
    """The share of tokens that are the likeliest for one side and not for the other; None if that is not known."""
    by_position: dict[str, Group]
    """Tokens that follow a prefill (the prompt's and the first of an answer), and those that follow a decoded token."""
    by_class: dict[str, Group]
    by_sequence: list[Group]


def measure_gap(answers: Sequence[Answer], trainer: Scored, special: Collection[int]) -> Gap:
    """Return how far the engine's log-probs are from the trainer's.

    Args:
        answers: The sequences with the engine's log-probs.
        trainer: What the trainer gave for them.
        special: The tokens that the tokenizer calls special.
    """
    parts = apart([answer.logprobs for answer in answers], trainer.logprobs)
    every = torch.cat(parts)
    likeliest = [
        (answer.logprobs >= answer.top) != ours
        for answer, ours in zip(answers, trainer.is_likeliest, strict=True)
        if len(answer.top)
    ]
    ids = torch.cat([answer.scored for answer in answers])
    is_special = torch.isin(ids, torch.tensor(sorted(special), dtype=torch.long))
    is_rare = (torch.cat(trainer.logprobs) < _RARE) & ~is_special
    is_prefill = torch.cat(
        [torch.arange(len(each.ids) - len(each.logprobs), len(each.ids)) <= each.prompt for each in answers]
    )
    classes = {"special": is_special, "rare (p < 1 %)": is_rare, "other": ~is_special & ~is_rare}
    return Gap(
        **asdict(Group.of(every)),
        p50=float(every.abs().quantile(0.5)),
        other_likeliest=float(torch.cat(likeliest).double().mean()) if likeliest else None,
        by_position=_groups(every, {"prefill": is_prefill, "decode": ~is_prefill}),
        by_class=_groups(every, classes),
        by_sequence=[Group.of(part) for part in parts],
    )


def _groups(every: Tensor, masks: dict[str, Tensor]) -> dict[str, Group]:
    return {name: Group.of(every[mask]) for name, mask in masks.items() if bool(mask.any())}


@dataclass(frozen=True)
class WorstToken:
    """A token with one of the largest gaps."""

    sequence: int
    position: int
    before: str
    """The text of the six tokens before it."""
    token: str
    trainer: float
    engine: float


def worst_tokens(
    answers: Sequence[Answer], trainer: Scored, text: Callable[[Sequence[int]], str], most: int = 12
) -> list[WorstToken]:
    """Return the tokens with the largest gaps; ``text`` decodes token ids."""
    found = [
        (number, place, ours, theirs)
        for number, (answer, scores) in enumerate(zip(answers, trainer.logprobs, strict=True))
        for place, (ours, theirs) in enumerate(
            zip(scores.tolist(), answer.logprobs.tolist(), strict=True), len(answer.ids) - len(scores)
        )
    ]
    return [
        WorstToken(n, at, text(answers[n].ids[max(0, at - 6) : at]), text(answers[n].ids[at : at + 1]), ours, theirs)
        for n, at, ours, theirs in sorted(found, key=lambda each: -abs(each[2] - each[3]))[:most]
    ]


def ratio_histogram(found: Tensor, expected: Tensor, bins: int = 25) -> dict[str, list[float]]:
    """Return how many tokens have which ratio, trainer over engine, and how many would if rounding were all."""
    most = max(float(found.abs().max()), float(expected.abs().max()), 1e-9)
    counts = [torch.histc((-each).float(), bins, -most, most).tolist() for each in (found, expected)]
    centres = (torch.arange(bins) + 0.5) / bins * 2 * most - most
    return {"ratio": centres.exp().tolist(), "found": counts[0], "expected": counts[1]}


# -- the result --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parity:
    """How far trainer and engine are apart, what of that is rounding, and where the rest comes from."""

    gap: Gap
    yardstick: float
    """The gap that rounding explains, in nats rms."""
    precision: str
    """Whose rounding: ``"bf16"``, ``"float32"``."""
    is_beyond: bool
    """Whether the gap is more than rounding explains."""
    cause: Cause | None
    distances: dict[str, float]
    """How far each side is from the trainer's weights in higher precision, in nats rms."""
    noise: dict[str, Group]
    """Each side against itself: in other batches, padded on the other side, decoded or in one piece."""
    layers: Mapping[str, LayerError]
    """The error of each layer by itself; empty if the engine gives no hidden states."""
    inside: Mapping[str, LayerError]
    """The same of the modules inside of the worst layer."""
    worst: list[WorstToken]
    ratios: dict[str, list[float]]
    """How many tokens have which ratio of probabilities, and how many if rounding is all."""
    facts: dict[str, str]
    """What is known of the sides."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Return whether nothing is beyond what rounding explains."""
        return not self.is_beyond if self.cause is None else self.cause.name == "router ties"

    @property
    def times(self) -> float:
        """Return how many times the gap is what rounding explains."""
        return self.gap.rms / self.yardstick

    @property
    def sentence(self) -> str:
        """Return what was found, in one sentence."""
        if self.cause is not None:
            where = "unsure" if self.cause.name == "unsure" else self.cause.where
            what = f"{where} ({self.cause.text})"
        else:
            what = "unsure where from" if self.is_beyond else f"nothing beyond what {self.precision} explains"
        said = f"gap {self.gap.rms:.2g} nats rms, {self.times:.2g} x what {self.precision} explains: {what}"
        return f"{said}; {self.gap.outside:.1%} of ratios leave [0.9, 1.1]"

    def __str__(self) -> str:
        gap = self.gap
        groups: dict[str, Group] = {"engine against trainer": gap, **gap.by_position, **gap.by_class, **self.noise}
        rows = [(name, *each.row()) for name, each in groups.items()]
        rows += [(f"{side} from higher precision", "", "", f"{off:.2g}") for side, off in self.distances.items()]
        rows.append(("what rounding explains", "", "", f"{self.yardstick:.2g}"))
        rows = [(*row, *[""] * (7 - len(row))) for row in rows]
        other = "" if gap.other_likeliest is None else f", likeliest for one side alone {gap.other_likeliest:.2%}"
        header = ("tokens", "count", "mean", "rms", "p99", "max", "outside")
        tables = [Table(header, rows, numbers=range(1, 7), foot=(f"p50 {gap.p50:.2g}{other}",))]
        for title, errors in (("local error of a layer", self.layers), ("inside of the worst", self.inside)):
            cells = [(n, f"{e.found:.2g}", f"{e.expected:.2g}", f"{e.times:.1f} x") for n, e in errors.items()]
            tables += [Table((title, "found", "expected", ""), cells, numbers=(1, 2, 3))] if cells else []
        worst = [
            (f"{one.sequence}:{one.position}", f"{one.trainer:.3f}", f"{one.engine:.3f}", f"{one.before}⟦{one.token}⟧")
            for one in self.worst
        ]
        tables.append(Table(("worst tokens", "trainer", "engine", "text"), worst, numbers=(1, 2)))
        facts = "\n".join(f"{name:<14} {text}" for name, text in self.facts.items())
        return "\n\n".join([self.sentence, facts, *map(str, tables)])

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"sentence": self.sentence, "ok": self.ok, "times": self.times, **asdict(self)}

    def save_healthy(self, path: str | Path) -> Path:
        """Write the errors of this pair, which is taken for healthy, to compare later ones with."""
        if not self.layers:
            raise OptionError("The engine gives no hidden states, so that there are no errors of layers to save.")
        replace_file(Path(path), json.dumps({name: error.found for name, error in self.layers.items()}, indent=1))
        return Path(path)

    def write_html(self, path: str | Path) -> Path:
        """Write a page of one file; return its path."""
        from hookline.report.report_page import whole_page

        ratios = [(f"{ratio:.3f}", *counts) for ratio, *counts in zip(*self.ratios.values(), strict=True)]
        layers = [(name, error.times, 1.0) for name, error in {**self.layers, **self.inside}.items()]
        body = f"<h1>Trainer and engine</h1><p><b>{escape(self.sentence)}</b></p>"
        body += f"<h2>Ratios, trainer over engine; the mark is what rounding gives</h2>{_bars(ratios)}"
        body += f"<h2>Error by layer; the mark is what rounding gives</h2>{_bars(layers)}"
        body += f"<pre>{escape(str(self))}</pre>"
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        page = whole_page(body, title="Trainer and engine", style=_STYLE, attributes=" data-ready")
        replace_file(Path(path), page)
        return Path(path)


def _bars(rows: Sequence[tuple[str, float, float]]) -> str:
    """Draw a bar for each row: its name, its value, and a mark where another value lies."""
    most = max((max(value, mark) for _, value, mark in rows), default=1.0)
    parts = [f'<svg width="800" height="{16 * len(rows)}" font-size="12" fill="currentColor">']
    for number, (name, value, mark) in enumerate(rows):
        top, width, at = 16 * number, 400 * value / most, 260 + 400 * mark / most
        parts.append(f'<text x="0" y="{top + 12}">{escape(name)}</text>')
        parts.append(f'<rect x="260" y="{top + 2}" width="{width:.1f}" height="12" fill="#4a7fb5"/>')
        parts.append(f'<rect x="{at:.1f}" y="{top}" width="3" height="16" fill="#c0392b"/>')
        parts.append(f'<text x="{270 + max(width, at - 260):.1f}" y="{top + 12}">{value:.3g}</text>')
    return "".join([*parts, "</svg>"])


def read_healthy(path: str | Path, names: Sequence[str]) -> dict[str, float]:
    """Return the errors of a healthy pair that `Parity.save_healthy` wrote; raise if they are of another model."""
    try:
        layers = {str(name): float(error) for name, error in json.loads(Path(path).read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise OptionError(f"{path} has no healthy numbers ({error!r}); write them with --save-healthy.") from None
    missing = [name for name in names if name not in layers]
    if missing:
        raise OptionError(f"{path} is of another model: it has no {missing[0]!r}.")
    return layers
