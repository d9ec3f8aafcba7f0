"""Hold what a comparison of two runs has found: values, the module to blame, what has no partner; as text and as data.

`compare` makes a `Comparison`; ``hookline compare`` prints it. Its page is tables, shaded as those of notebooks are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final

from hookline.debug.compare.blame import Blame
from hookline.debug.compare.judge import unseen_below
from hookline.debug.compare.key import UNSURE, WITHIN, WRONG, Pair
from hookline.debug.compare.rules import only_in
from hookline.files import replace_file
from hookline.plain import to_plain
from hookline.tables import THE_MODEL, ColourScale, ShownAsTable, Table, line

_MAX_ROWS: Final = 40
_MAX_LISTED: Final = 8
_MAX_MISSING: Final = 3
"""Lines of the headline on what only one run has."""


@dataclass(slots=True, repr=False)
class Comparison(ShownAsTable):
    """What two runs have in common, and where they part; prints as a table, the largest error first.

    Recipe::

        found = hookline.compare("trace_a", "trace_b")
        print(found)
        assert found.ok, found.summary
        found.write_html("compared.html")
    """

    pairs: list[Pair]
    """Every place of both runs, in the order of A; some are only in one run, or cannot be compared."""
    blamed: list[Blame] = field(default_factory=list)
    """The modules in which the runs part: none, one, or each that holds other parameters from the beginning."""
    notes: list[str] = field(default_factory=list)
    """How values were paired, where that is not plain."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the files of the traces."""
    names: tuple[str, str] = ("A", "B")
    """What the two runs are called."""
    left_out: list[str] = field(default_factory=list)
    """What a trace says is missing in it, so that nobody knows whether it is the same."""
    missing: list[str] = field(default_factory=list)
    """Sites, steps and calls that only one of the runs has: it ended early, or called a module more or less often."""
    limit: dict[str, Any] = field(default_factory=dict)
    """What counts as the same: ``atol``, ``rtol`` and ``thresholds`` as given; for sites that none of them is about, so
    many times the error of ``rounding``, which is ``"modelled"`` or ``"measured"`` (``noise``)."""

    @property
    def values(self) -> list[Pair]:
        """Every value that was compared, in the order of the calls."""
        return [pair for pair in self.pairs if pair.is_measured]

    @property
    def unpaired(self) -> list[Pair]:
        """Values of both that cannot be compared; ``why`` says the reason."""
        return [pair for pair in self.pairs if pair.why]

    @property
    def only_a(self) -> list[str]:
        """Sites that only A has; those of a kind that B was not asked for make no difference."""
        return [*only_in(self.pairs, "A")]

    @property
    def only_b(self) -> list[str]:
        """Sites that only B has."""
        return [*only_in(self.pairs, "B")]

    @property
    def ok(self) -> bool:
        """Whether both have the same sites, steps, calls, shapes and values, and no trace left something out."""
        return all(pair.is_same for pair in self.pairs) and not self.missing and not self.left_out

    @property
    def first(self) -> Pair | None:
        """The first value in the order of the calls that differs; None if all are the same."""
        return self.blamed[0].value if self.blamed else None

    @property
    def blame(self) -> str | None:
        """The name of the module in which the runs part; None if they do not, or nobody knows where.

        Empty for the model itself and for what is outside of it: ``blamed[0].name`` says which.
        """
        return self.blamed[0].module if self.blamed else None

    @property
    def worst(self) -> list[Pair]:
        """All values, the largest relative error first."""
        return sorted(self.values, key=lambda value: (value.is_same, -_sortable(value.error), value.order))

    @property
    def is_estimate(self) -> bool:
        """Whether some errors come from fingerprints alone."""
        return any(value.errors.is_estimate for value in self.values)

    @property
    def summary(self) -> str:
        """What was found, in a few lines."""
        return "\n".join([*self.headline, *self.remarks])

    @property
    def headline(self) -> list[str]:
        """How many values are the same, where the runs part, and which module is to blame."""
        return [self._counted(), *self._first_lines()]

    def _counted(self) -> str:
        counts = Counter(_class_of(value.verdict) for value in self.values)
        parts = [f"{counts[key]} {key}" for key in (WITHIN, "worse than rounding", WRONG, UNSURE) if counts[key]]
        equal = sum(value.errors.is_equal for value in self.values)
        bits = f", {equal} of them equal to the bit" if equal else ""
        return f"{len(self.values)} values compared: {', '.join(parts)}{bits}."

    def _first_lines(self) -> list[str]:
        first = self.first
        if first is None:
            return [self._same_line()] if self.ok else self._doubts()
        place = f", first at {first.where}" if first.where else ""
        lines = [f"First divergence: {first.label}: {first.verdict}, {_error_text(first)}{place}."]
        lines += [f"Blamed: {blame.name}. {blame.why}" for blame in self.blamed[:_MAX_LISTED]]
        follow = sum(bool(value.follows) for value in self.values)
        lines += [f"{follow} later values follow from it."] if follow else []
        return [*lines, *self._doubts()]

    def _doubts(self) -> list[str]:
        """Return why the runs are not the same, or why that is not known, though no module is to blame."""
        count = sum(not pair.is_same for pair in self.unpaired)
        lines = [f"The runs differ: {count} values could not be compared."] if count else []
        lines += [f"The runs differ: {line}" for line in self.missing[:_MAX_MISSING]]
        unsure = [value for value in self.values if value.is_unsure]
        if unsure:
            first = unsure[0]
            more = f" {len(unsure) - 1} more are unsure." if len(unsure) > 1 else ""
            lines.append(f"Unsure: {first.label}: {_error_text(first)}: {first.doubt}.{more}")
        if self.left_out:
            lines.append("Unsure: a trace does not hold all that was to be traced; what it left out is not compared.")
        return lines

    def _same_line(self) -> str:
        if all(value.errors.is_equal for value in self.values):
            return "Nothing differs."
        if any(value.verdict != WITHIN for value in self.values):
            return "Nothing differs by more than is allowed."
        floors = [unseen_below(value.floor, is_estimate=value.errors.is_estimate) for value in self.values]
        return f"Nothing differs by more than rounding; an error of less than {max(floors):.2g} would not be seen."

    @property
    def remarks(self) -> list[str]:
        """What was not compared, what is an estimate, how values were paired, and what is wrong with the traces."""
        sides = (("A", self.only_a), ("B", self.only_b))
        lines = [f"Only in {name}: {_listed(sites)}." for name, sites in sides if sites]
        lines += [f"Not compared: {_listed([f'{one.label}: {one.why}' for one in self.unpaired])}."] * bool(
            self.unpaired
        )
        lines += self.missing[_MAX_MISSING:_MAX_LISTED]
        if self.is_estimate:
            lines.append(
                "Errors marked ~ are estimates from fingerprints, right to about a factor of 1.6: trace with tensors= "
                "for exact ones."
            )
        return [*lines, *self.notes, *self.left_out, *self.problems]

    def _table(self) -> Table:
        rows = [_cells(value) for value in self.worst]
        header = ("site", "kind", "call", "max abs", "rel L2", "rounding", "verdict")
        return Table(header, rows, numbers=(3, 4, 5), title=self.summary, most=_MAX_ROWS, foot=self._legend())

    def _legend(self) -> list[str]:
        """Return what the columns mean, and which limit was used."""
        given = {name: limit for name, limit in self.limit.items() if limit}
        rounding = f"{given.pop('rounding', 0):g} times rounding ({given.pop('noise', 'not known')})"
        limits = [f"{name} {limit}" for name, limit in given.items()] or [rounding]
        return [
            "call: step.call; max abs: largest difference; rel L2: norm of the difference / norm of A; rounding: the "
            "rel L2 of it.",
            f"Limit: {', '.join(limits)}. To change it: --threshold, --atol, --rtol, --noise.",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data; what is not finite is text."""
        found = {
            "format": "hookline.compare", "version": 1, "a": self.names[0], "b": self.names[1], "ok": self.ok,
            "estimate": self.is_estimate, "limit": self.limit,
            "first": None if self.first is None else self.first.to_json(),
            "blamed": [
                {"module": one.module, "outside": one.outside, "why": one.why, "inputs": one.is_input}
                for one in self.blamed
            ],
            "only_a": self.only_a, "only_b": self.only_b,
            "not_compared": [{**pair.key._asdict(), "order": pair.order, "why": pair.why} for pair in self.unpaired],
            "notes": self.notes, "left_out": self.left_out, "missing": self.missing, "problems": self.problems,
            "values": [value.to_json() for value in self.worst],
        }  # fmt: skip
        plain: dict[str, Any] = to_plain(found)
        return plain

    def write_html(self, path: str | Path) -> Path:
        """Write a page with a map of layers and calls, which opens from disk; return its path."""
        first = self.first
        values = sorted(self.values, key=lambda value: first is not None and value.kind != first.kind)
        return write_page(path, self.names, self.headline, values, self._repr_html_())


def _class_of(verdict: str) -> str:
    return verdict if verdict in (WITHIN, WRONG, UNSURE) else "worse than rounding"


def _sortable(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _listed(sites: Sequence[str]) -> str:
    more = f" and {len(sites) - _MAX_LISTED} more" if len(sites) > _MAX_LISTED else ""
    return f"{', '.join(sites[:_MAX_LISTED])}{more}"


def _error_text(value: Pair) -> str:
    errors = value.errors
    if value.other_shape:
        return value.other_shape
    if errors.mismatched:
        return f"{errors.bad_b} of {errors.count} numbers are NaN or Inf, in A {errors.bad_a}"
    if value.is_in_part:
        return f"relative error {errors.part_rel:.3g} of one row or channel, {value.error:.3g} of all"
    about = "about " if errors.is_estimate else ""
    return f"relative error {about}{value.error:.3g}, where rounding makes {value.floor:.2g}"


def _cells(value: Pair) -> tuple[str, ...]:
    mark = "~" if value.errors.is_estimate and not value.errors.is_equal else ""
    verdict = value.verdict + (f", follows from {value.follows}" if value.follows else "")
    call = f"{value.step}.{value.call}" + (f" rank {value.rank}" if value.rank else "")
    return (
        value.site or THE_MODEL,
        value.kind + (f" {value.leaf}" if value.leaf else ""),
        call,
        f"{mark}{value.errors.max_abs:.3g}",
        f"{mark}{value.error:.3g}",
        f"{value.floor:.2g}",
        verdict + (f" [{value.how}]" if value.how else ""),
    )


# -- the page ---------------------------------------------------------------------------------------------------------

_SCALE: Final = ColourScale(-3.0, 6.0)
"""Powers of ten of error / rounding: blue is less than rounding, red is more, yellow is NaN or Inf in one alone."""
_STYLE: Final = """
:root { color-scheme: light dark; }
body { margin: 24px; font: 14px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
section { margin-top: 24px; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 8px; white-space: nowrap; }
"""


def write_page(
    path: str | Path, names: tuple[str, str], headline: Sequence[str], values: Sequence[Pair], table: str
) -> Path:
    """Write the page of a comparison; return its path.

    Args:
        path: The file.
        names: What the runs are called.
        headline: What was found.
        values: What was compared; there is a map for each kind, in this order.
        table: The HTML of the values.
    """
    from hookline.report.report_page import whole_page

    path, title = Path(path), " and ".join(_short_names(names))
    kinds = dict.fromkeys(value.kind for value in values)
    maps = [_map(kind, [value for value in values if value.kind == kind]).html() for kind in kinds]
    verdict = line("\n".join(headline))
    sections = [f'<div id="verdict">{verdict}</div>', *maps, table]
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    # There is no script that would draw anything: the page is ready as it is.
    page = whole_page(f"<h1>{escape(title)}</h1>{body}", title=title, style=_STYLE, attributes=" data-ready")
    replace_file(path, page)
    return path


def _short_names(names: tuple[str, str]) -> Sequence[str]:
    """Return the last parts of two paths, unless they are the same."""
    short = [Path(name).name for name in names]
    return short if len(set(short)) == 2 else names


def _map(kind: str, values: Sequence[Pair]) -> Table:
    """Return one map: rows are layers, columns the parts of a layer at each call; of several leaves the worst shows."""
    cells: dict[str, dict[str, Pair]] = {}
    for value in sorted(values, key=lambda value: value.ratio):
        layer, part = _layer_and_part(value.site)
        rank = f" rank {value.rank}" if value.rank else ""
        cells.setdefault(layer, {})[f"{part} {value.step}.{value.call}{rank}".strip()] = value
    layers = list(dict.fromkeys(_layer_and_part(value.site)[0] for value in values))
    columns = sorted(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [(layer, *(_power(cells[layer].get(column)) for column in columns)) for layer in layers]
    title = f"{kind}: the power of ten of error / rounding, for each layer, and its parts at each step.call"
    return Table(("layer", *columns), rows, numbers=range(1, len(columns) + 1), title=title, heat=_SCALE)


def _power(value: Pair | None) -> str:
    if value is None:
        return ""
    if value.errors.is_equal:
        return "="
    return "nan" if value.errors.mismatched else f"{min(math.log10(max(value.ratio, 1e-3)), 6.0):.1f}"


def _layer_and_part(site: str) -> tuple[str, str]:
    """Return the layer of a value, up to the first number in its name, and what comes behind it."""
    parts = site.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if number is None:
        return site or THE_MODEL, ""
    return ".".join(parts[: number + 1]), ".".join(parts[number + 1 :])
