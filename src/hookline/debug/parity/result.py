"""Show what `parity` found: one sentence, a text, JSON, a page of one file, and healthy numbers for later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hookline.debug.parity.causes import Cause
from hookline.debug.parity.gap import Gap
from hookline.debug.parity.layers import HEAD, LayerErrors
from hookline.errors import OptionError
from hookline.files import replace_file

__all__ = ["Histogram", "Parity", "read_healthy"]

_HARMLESS: Final = ("router ties",)
_STYLE: Final = """
:root { color-scheme: light dark; }
body { margin: 24px; font: 14px/1.5 system-ui, sans-serif; max-width: 900px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 8px; text-align: left; }
mark { padding: 0 2px; }
"""


@dataclass(frozen=True)
class Histogram:
    """How many tokens have which ratio of probabilities, trainer over engine."""

    edges: list[float]
    gap: list[int]
    expected: list[int]
    """The same of the trainer and its copy of higher precision."""

    @classmethod
    def of(cls, gap: Tensor, expected: Tensor, bins: int = 40) -> Histogram:
        """Return the histogram of two sets of differences."""
        most = max(float(gap.abs().quantile(0.995)), float(expected.abs().max()), 1e-9)
        counts = [
            torch.histc((-each).clamp(-most, most).float(), bins, -most, most).int().tolist()
            for each in (gap, expected)
        ]
        return cls(torch.linspace(-most, most, bins + 1).exp().tolist(), *counts)


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
    noise: dict[str, Gap]
    """Each side against itself: in other batches, padded on the other side, decoded or in one piece."""
    layers: LayerErrors | None
    inside: LayerErrors | None
    """The modules inside of the worst layer."""
    worst: list[dict[str, Any]]
    histogram: Histogram
    facts: dict[str, str]
    """What is known of the sides."""
    seconds: float = 0.0
    names: tuple[str, str] = field(default=("trainer", "engine"))

    @property
    def ok(self) -> bool:
        """Return whether nothing is beyond what rounding explains."""
        is_harmless = self.cause is None or self.cause.name in _HARMLESS
        return is_harmless and not (self.is_beyond and self.cause is None)

    @property
    def sentence(self) -> str:
        """Return what was found, in one sentence."""
        times = self.gap.rms / self.yardstick
        cause = self.cause
        if cause is None:
            what = "unsure where from" if self.is_beyond else f"nothing beyond what {self.precision} explains"
        elif cause.name == "unsure":
            what = f"unsure ({cause.text})"
        else:
            what = f"{cause.where} ({cause.text})"
        said = f"gap {self.gap.rms:.2g} nats rms, {times:.2g} x what {self.precision} explains: {what}"
        return f"{said}; {100 * self.gap.outside:.1f} % of ratios leave [0.9, 1.1]"

    def __str__(self) -> str:
        gap = self.gap
        lines = [self.sentence, ""]
        lines += [
            f"{name:<10} {text}"
            for name, text in {"trainer": self.names[0], "engine": self.names[1], **self.facts}.items()
        ]
        other = "" if gap.other_likeliest is None else f"   other arg-max {gap.other_likeliest:.2%}"
        lines += [
            "",
            f"{gap.tokens} tokens   mean {gap.mean:+.2g}   |mean| {gap.mean_abs:.2g}   p50 {gap.p50:.2g}   "
            f"p99 {gap.p99:.2g}   max {gap.max:.2g}{other}",
            "",
            _table(("tokens of the gap", "count", "rms", "outside"), self._groups()),
            "",
            _table(("yardstick, nats rms", "rms", "outside"), self._yardsticks()),
        ]
        for title, errors in (("local error of a layer", self.layers), ("inside of the worst", self.inside)):
            if errors is not None:
                rows = [
                    (name, f"{errors.found[name]:.2g}", f"{errors.expected[name]:.2g}", f"{times:.1f} x")
                    for name, times in errors.scale.items()
                ]
                lines += ["", _table((title, "found", "expected", ""), rows)]
        return "\n".join(lines)

    def _groups(self) -> list[tuple[str, ...]]:
        groups = {**self.gap.by_position, **self.gap.by_class}
        return [(name, str(each.tokens), f"{each.rms:.2g}", f"{each.outside:.1%}") for name, each in groups.items()]

    def _yardsticks(self) -> list[tuple[str, ...]]:
        rows = [(f"{side} from higher precision", f"{value:.2g}", "") for side, value in self.distances.items()]
        rows += [(name, f"{each.rms:.2g}", f"{each.outside:.1%}") for name, each in self.noise.items()]
        return [*rows, ("what rounding explains", f"{self.yardstick:.2g}", "")]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "sentence": self.sentence,
            "ok": self.ok,
            "gap": self.gap.to_json(),
            "yardstick": self.yardstick,
            "times": self.gap.rms / self.yardstick,
            "precision": self.precision,
            "is_beyond": self.is_beyond,
            "cause": None if self.cause is None else self.cause.to_json(),
            "distances": self.distances,
            "noise": {
                name: {"rms": each.rms, "outside": each.outside, "max": each.max} for name, each in self.noise.items()
            },
            "layers": [] if self.layers is None else self.layers.to_json(),
            "inside": [] if self.inside is None else self.inside.to_json(),
            "worst_tokens": self.worst,
            "facts": {"trainer": self.names[0], "engine": self.names[1], **self.facts},
            "seconds": self.seconds,
        }

    def save_healthy(self, path: str | Path) -> Path:
        """Write the errors of this pair, which is taken for healthy, to compare later ones with."""
        if self.layers is None:
            raise OptionError("The engine gives no hidden states, so that there are no errors of layers to save.")
        found = {"format": "hookline.parity.healthy", "gap": self.gap.rms, "layers": self.layers.found}
        replace_file(Path(path), json.dumps(found, indent=1))
        return Path(path)

    def write_html(self, path: str | Path) -> Path:
        """Write a page of one file; return its path."""
        from hookline.report.report_page import whole_page

        tables = [_html_table(("tokens", "count", "rms", "outside"), self._groups())]
        tables.append(_html_table(("yardstick, nats rms", "rms", "outside"), self._yardsticks()))
        for title, errors in (("Local error by layer", self.layers), ("Inside of the worst layer", self.inside)):
            if errors is not None:
                tables.append(f"<h2>{title}</h2>{_bars(errors)}")
        rows = [
            (
                str(one["sequence"]),
                str(one["position"]),
                f"{one['before']}⟦{one['token']}⟧",
                f"{one['trainer']:.3f}",
                f"{one['engine']:.3f}",
            )
            for one in self.worst
        ]
        tables.append(
            f"<h2>Worst tokens</h2>{_html_table(('sequence', 'position', 'text', 'trainer', 'engine'), rows)}"
        )
        facts = _html_table(("", ""), [("trainer", self.names[0]), ("engine", self.names[1]), *self.facts.items()])
        picture = f"<h2>Ratios, trainer over engine, and what rounding gives</h2>{_drawn(self.histogram)}"
        body = f"<h1>Trainer and engine</h1><p><b>{escape(self.sentence)}</b></p>{facts}{picture}{''.join(tables)}"
        page = whole_page(body, title="Trainer and engine", style=_STYLE, attributes=" data-ready")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), page)
        return Path(path)


def read_healthy(path: str | Path, names: Sequence[str]) -> dict[str, float]:
    """Return the errors of a healthy pair that `Parity.save_healthy` wrote; raise if they are of another model."""
    try:
        layers = {str(name): float(error) for name, error in json.loads(Path(path).read_text())["layers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{path} has no healthy numbers ({error!r}); write them with --save-healthy.") from None
    missing = [name for name in names if name not in layers]
    if missing:
        raise OptionError(f"{path} is of another model: it has no {missing[0]!r}.")
    return layers


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not n else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _bars(errors: LayerErrors) -> str:
    """Return a bar for each module: its error as a multiple of what is expected."""
    scale = errors.scale
    most = max([*scale.values(), errors.limit])
    lines = []
    for number, (name, times) in enumerate(scale.items()):
        colour = "#c0392b" if name in errors.bad else "#4a7fb5"
        said = "log-probs" if name == HEAD else "outputs"
        lines.append(
            f'<text x="0" y="{20 * number + 14}">{escape(name)}</text><rect x="240" y="{20 * number + 3}" height="14" '
            f'width="{400 * times / most:.1f}" fill="{colour}"><title>{said} apart by {errors.found[name]:.2g}</title>'
            "</rect>"
            f'<text x="{250 + 400 * times / most:.1f}" y="{20 * number + 14}">{times:.2g} x</text>'
        )
    return _svg(720, 20 * len(scale), "".join(lines))


def _drawn(histogram: Histogram) -> str:
    """Return bars of the ratios found, and a line of those that rounding gives."""
    most = max([*histogram.gap, *histogram.expected, 1])
    width = 640 / len(histogram.gap)
    bars = "".join(
        f'<rect x="{n * width:.1f}" y="{180 - 170 * count / most:.1f}" width="{width - 1:.1f}" '
        f'height="{170 * count / most:.1f}" fill="#4a7fb5"/>'
        for n, count in enumerate(histogram.gap)
    )
    points = " ".join(
        f"{(n + 0.5) * width:.1f},{180 - 170 * count / most:.1f}" for n, count in enumerate(histogram.expected)
    )
    line = f'<polyline points="{points}" fill="none" stroke="#c0392b" stroke-width="2"/>'
    marks = "".join(
        f'<text x="{x}" y="196" text-anchor="{anchor}">{value:.3g}</text>'
        for x, anchor, value in (
            (0, "start", histogram.edges[0]),
            (320, "middle", 1.0),
            (640, "end", histogram.edges[-1]),
        )
    )
    return _svg(660, 200, bars + line + marks)


def _svg(width: int, height: int, inner: str) -> str:
    return f'<svg width="{width}" height="{height}" font-size="12" fill="currentColor">{inner}</svg>'
