"""Hovering, saving, sharing and printing a page, in a real browser."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_page import CARD, cards, drawn, page_width, slide, until
from helpers_report import facts, loss_at

from hookline.records.log import RecordLog
from hookline.records.sink import Record, StepSeries
from hookline.report.report_page import write_report

Visit = Callable[..., Any]

LOSS, ACCURACY, NORMS = (CARD.format(name) for name in ("train/loss", "eval/accuracy", "norms/total"))


def _hovered(page: Any, selector: str) -> list[list[float]]:
    """Where the hover of a plot is: [x, y] of each curve that it tells of."""
    points: list[list[float]] = page.evaluate(
        "s => (document.querySelector(s)._hoverdata ?? []).map(p => [p.x, p.y])", selector
    )
    return points


def _move_to(page: Any, selector: str, share: float, height: float = 0.5) -> None:
    box = page.locator(f"{selector} .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + height * box["height"], steps=3)


@pytest.mark.slow
def test_all_curves_show_the_step_under_the_mouse(visit: Visit, made: Path) -> None:
    """The nearest that each of them has; when the mouse leaves, so do they. The address stays as it is."""
    page = visit(made / "small.html").load()
    for selector in (LOSS, ACCURACY, NORMS):
        drawn(page, selector)
    _move_to(page, NORMS, 0.60)
    until(page, "s => document.querySelector(s)._hoverdata?.length === 1", NORMS)
    ((x, _),) = _hovered(page, NORMS)
    assert 100 < x < 140
    until(page, "s => document.querySelector(s)._hoverdata?.length === 1", LOSS)
    assert _hovered(page, LOSS) == [[x, pytest.approx(loss_at(int(x)), rel=1e-5)]]
    assert _hovered(page, ACCURACY) == [[99 if x < 124 else 149, pytest.approx(0.65 if x < 124 else 0.8)]]
    page.mouse.move(5, 5, steps=3)
    for selector in (NORMS, LOSS, ACCURACY):
        until(page, "s => !document.querySelector(s).querySelector('.hoverlayer').textContent", selector)
    assert "#" not in page.url


def _saved(page: Any, selector: str, title: str) -> tuple[str, bytes]:
    page.locator(selector).hover()
    with page.expect_download() as download:
        page.click(f"{selector} .modebar-btn[data-title='{title}']")
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_a_plot_is_saved_under_the_name_of_its_metric(visit: Visit, made: Path) -> None:
    """As a picture or a drawing; that of the map has the name of what it shows now."""
    page = visit(made / "small.html").load()
    drawn(page, LOSS)
    name, data = _saved(page, LOSS, "Download plot as a PNG")
    assert name == "train_loss.png"
    assert data.startswith(b"\x89PNG")
    drawn(page, "#map")
    slide(page, "#map-statistic", 1)
    name, data = _saved(page, "#map", "Download plot as an SVG")
    assert name == "stats_forward_norm.svg"
    assert data.startswith(b"<svg")
    assert b"layers.3.mlp" in data
    ground = data.partition(b"<rect ")[2].partition(b"/>")[0]  # the first thing drawn, which is as large as the plot
    assert b"fill: rgb(255, 255, 255); fill-opacity: 1" in ground


@pytest.mark.slow
def test_the_numbers_of_a_plot_are_saved_as_csv(visit: Visit, made: Path) -> None:
    """Every step with its value, a column for each run or row, whatever the smoothing."""
    page = visit(made / "small.html").load()
    slide(page, "#smoothing", 0.9)
    drawn(page, LOSS)
    name, data = _saved(page, LOSS, "Download numbers as CSV")
    assert name == "train_loss.csv"
    head, *rows = [line.split(",") for line in data.decode().split()]
    assert head == ["step", "train/loss"]
    assert [int(step) for step, _ in rows] == list(range(200))
    assert [float(value) for _, value in rows] == pytest.approx([loss_at(step) for step in range(200)], rel=1e-6)
    drawn(page, "#map")
    _, data = _saved(page, "#map", "Download numbers as CSV")
    head, *rows = [line.split(",") for line in data.decode().split()]
    assert (head[0], len(head), len(rows)) == ("step", 13, 200)
    two = visit(made / "two.html").load()
    two.click("button[aria-label='Open train/loss']")
    with two.expect_download() as download:
        two.click("#focus-numbers")
    assert Path(download.value.path()).read_text().splitlines()[0] == "step,digits / default,digits / stride"


def test_what_was_chosen_is_in_the_address(visit: Visit, made: Path) -> None:
    """A link shows what its sender saw: axes, smoothing, search, map, distribution, hidden runs, open metric."""
    opened = visit(made / "two.html")
    page = opened.load()
    page.check("input[name=x][value=epoch]", force=True)
    page.check("input[name=y][value=log]", force=True)
    slide(page, "#smoothing", 0.5)
    page.fill("#search", "loss")
    page.click("#legend button >> nth=1")
    slide(page, "#map-statistic", 2)
    page.select_option("#row-layer", label="layers.3.mlp")
    page.select_option("#map-colour", "row")
    page.select_option("#grid-metric", label="spectrum/top")
    slide(page, "#grid-step", 1)
    until(page, "document.querySelectorAll('article').length === 2")
    page.click("button[aria-label='Open eval/loss']")
    until(page, "location.hash.includes('open=eval') && location.hash.includes('x=epoch')")
    link = "#" + page.url.split("#")[1]
    page.goto("about:blank")
    page = opened.load(link)
    assert page.inner_text("#focus-title") == "eval/loss"
    page.keyboard.press("Escape")
    assert cards(page) == ["train/loss", "eval/loss"]
    traces = drawn(page, LOSS)
    assert [trace["name"] for trace in traces] == ["raw", "digits / default"]
    assert traces[0]["x"][-1] == 4.0
    assert page.evaluate("s => document.querySelector(s).layout.yaxis.type", LOSS) == "log"
    assert page.inner_text("#map-statistic-name") == "zero_fraction"
    assert page.inner_text("#row-title").startswith("layers.3.mlp")
    assert page.input_value("#map-colour") == "row"
    assert page.locator("#grid-metric option:checked").inner_text() == "spectrum/top"
    assert page.inner_text("#grid-step-name") == "step 99"
    until(page, "!location.hash.includes('open=') && location.hash.includes('smooth=0.5')")


def _paths(pdf: bytes) -> int:
    """How many straight lines there are on all pages of a PDF."""
    total = 0
    for match in re.finditer(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL):
        try:
            total += zlib.decompress(match[1]).count(b" l\n")
        except zlib.error:  # a font, or what is not compressed
            continue
    return total


def test_the_printed_page_has_every_curve(visit: Visit, made: Path) -> None:
    """Also those that were never in view: 200 points of the loss, 200 of the norm, and those of one layer."""
    page = visit(made / "small.html", height=300).load()
    assert page.evaluate("s => !document.querySelector(s).data", NORMS)  # control: not drawn yet
    assert _paths(page.pdf(format="A4")) > 600
    drawn(page, NORMS)  # and on the screen when it comes into view


@pytest.mark.slow
def test_a_dictionary_is_labelled_by_what_its_metric_declares(visit: Visit, tmp_path: Path) -> None:
    """Frequencies, classes; keys of which nothing is known are keys; only a watch's histogram has exponents."""
    log = RecordLog(tmp_path / "records.jsonl")
    powers = {"h/powers": {"2": 0.25, "26": 0.5}, "h/by_class": {"0": 3, "1": 9}, "h/list": [1.0, 2.0]}
    watched = {"stats/fc/forward/histogram": {"zero": 1, "-3": 2}}
    log.append(Record(powers | watched, 0, "POST_EPOCH", 0))
    log.close()
    (tmp_path / "run.json").write_text('{"hooks": {"h": {"metrics": [{"name": "po{x}", "keys": "frequency"}]}}}')
    page = visit(write_report([tmp_path])).load()
    labels = {}
    for name in (*powers, *watched):
        page.select_option("#grid-metric", label=name)
        (trace, *_) = drawn(page, "#grid-map")
        labels[name] = page.evaluate("document.querySelector('#grid-map').layout.yaxis.title.text")
        if name == "h/powers":
            assert trace["z"] == [[0.25], [0.5]]  # no counts: shown as they are
        if name == "h/by_class":
            assert trace["z"] == [[0.25], [0.75]]  # counts: the share of each
    assert labels == {
        "h/powers": "frequency",
        "h/by_class": "key",
        "h/list": "place in the list",
        "stats/fc/forward/histogram": "binary exponent",
    }


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three runs that differ in their learning rate and seed; the second has no accuracy."""
    folder = tmp_path_factory.mktemp("compared")
    runs = (("a", 0.1, 1, (0.5, 0.9, 0.7)), ("b", 0.01, 2, ()), ("c", 0.001, 10, (0.2, 0.4, 0.8)))
    for name, rate, seed, accuracies in runs:
        log = RecordLog(folder / name / "records.jsonl")
        for epoch in range(3):
            found = {"eval/val_acc": accuracies[epoch]} if accuracies else {}
            loss = StepSeries([1.0 / (seed + epoch)], [epoch])
            log.append(Record({"train/loss": loss, **found}, epoch, "POST_EPOCH", epoch))
        log.close()
        config = {"lr": rate, "hidden": [8, 8], "epochs": 3}
        (folder / name / "run.json").write_text(json.dumps(facts(strategy=name, seed=seed, config=config)))
    return write_report(folder)


def _column(page: Any, name: str) -> list[str]:
    names = page.eval_on_selector_all(".runs thead th", "all => all.map(one => one.textContent)")
    rows: list[list[str]] = page.eval_on_selector_all(
        ".runs tbody tr", "all => all.map(row => [...row.children].map(cell => cell.textContent))"
    )
    return [row[names.index(name)] for row in rows]


def _differences(page: Any) -> list[list[str]]:
    rows: list[list[str]] = page.eval_on_selector_all(
        ".differences tr", "all => all.map(row => [...row.children].map(cell => cell.textContent))"
    )
    return rows


def test_the_top_of_a_comparison_is_a_short_table_of_what_differs(visit: Visit, tmp_path: Path) -> None:
    """Arguments of scripts and of hooks, with the names that users gave; two of one name are told apart everywhere."""
    given: list[tuple[str, str | None, dict[str, Any], dict[str, Any]]] = [
        ("script", "slow", {"lr": 0.01, "data": "a"}, {"names": ["norms"], "config": {}}),
        ("script_1", "wide", {"lr": 0.1, "data": "a", "amp": True}, {"names": ["norms"], "config": {}}),
        ("script_2", "wide", {"lr": 0.1, "data": "a"}, {"names": ["norms"], "config": {"stats": {"every": 5}}}),
        ("script_3", None, {"lr": 0.1, "data": "a"}, {"names": ["norms"], "config": {}}),
    ]
    for folder, name, config, hooks in given:
        log = RecordLog(tmp_path / folder / "records.jsonl")
        log.append(Record({"train/loss": StepSeries([1.0, 0.5], [0, 1])}, None, "POST_STEP", 1))
        log.close()
        options = {
            "command": ["python", folder],
            "output_dir": folder,
            "hooks": hooks,
            "sinks": {"csv": name == "slow"},
        }
        about = facts("train", "script", config=config, options=options) | {"name": name}
        (tmp_path / folder / "run.json").write_text(json.dumps(about))
    page = visit(write_report(tmp_path)).load()
    names = ["slow", "wide (script_1)", "wide (script_2)", "train / script"]
    assert _differences(page) == [
        ["", *names],
        ["lr", "0.01", "0.1", "0.1", "0.1"],
        ["amp", "–", "true", "–", "–"],
        ["stats.every", "–", "–", "5", "–"],
    ]
    assert page.inner_text(".differences caption") == "What differs"
    tops = [page.locator(place).bounding_box()["y"] for place in (".differences", ".runs", "#findings")]
    assert tops == sorted(tops)
    assert _column(page, "run") == names
    assert page.eval_on_selector_all("#legend button", "all => all.map(one => one.textContent)") == names
    assert [trace["name"] for trace in drawn(page, LOSS)] == names
    heads = page.eval_on_selector_all(
        "#fact-table .facts >> nth=0 >> thead th", "all => all.map(one => one.textContent)"
    )
    assert heads == ["", *names]
    colours = page.eval_on_selector_all(".differences .swatch", "all => all.map(one => one.style.background)")
    assert len(set(colours)) == 4
    assert page_width(visit(tmp_path / "report.html", width=390).load()) <= 390


def test_a_comparison_is_sorted_by_any_column_both_ways(visit: Visit, compared: Path) -> None:
    """Numbers as numbers; runs without a value come last; the address keeps it."""
    opened = visit(compared)
    page = opened.load()
    page.click(".runs .sort >> text='seed'")
    assert _column(page, "seed") == ["1", "2", "10"]
    page.click(".runs .sort >> text='seed'")
    assert _column(page, "seed") == ["10", "2", "1"]
    assert page.get_attribute(".runs th[aria-sort]", "aria-sort") == "descending"
    for expected in (["0.7", "0.8", "–"], ["0.8", "0.7", "–"]):
        page.click(".runs .sort >> text='val_acc'")
        assert _column(page, "val_acc") == expected
    until(page, "location.hash.includes('sort=-val_acc')")
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert _column(page, "val_acc") == ["0.8", "0.7", "–"]


_LATE_EVENT = """addEventListener("hashchange", (event) => {
    if (event.isTrusted) {
        event.stopImmediatePropagation();
        setTimeout(() => dispatchEvent(new HashChangeEvent("hashchange")), 500);
    }
})"""
"""A browser under load: it tells the page of a pressed link when a choice has been written into the address."""


@pytest.mark.slow
def test_a_link_that_is_pressed_just_after_a_choice_is_followed(visit: Visit, compared: Path) -> None:
    """The choice waits for a moment, and does not write over the address of the link; it is in the address later."""
    opened = visit(compared)
    opened.page.add_init_script(_LATE_EVENT)
    page = opened.load()
    page.click("#legend button >> nth=1")
    page.locator("button[aria-label='Open train/loss']").press("Enter")
    assert len(drawn(page, "#focus-plot")) == 2
    until(page, "location.hash.includes('hide=1') && location.hash.includes('open=')")


@pytest.mark.slow
def test_the_legend_hides_a_run_in_all_curves(visit: Visit, compared: Path) -> None:
    """In cards and in the window of one metric; a second press shows it again. The table does the same."""
    page = visit(compared).load()
    assert len(drawn(page, LOSS)) == 3
    page.click("#legend button >> nth=1")
    assert [trace["name"] for trace in drawn(page, LOSS)] == ["digits / a", "digits / c"]
    assert page.get_attribute("#legend button >> nth=1", "aria-pressed") == "false"
    page.click("button[aria-label='Open train/loss']")
    assert len(drawn(page, "#focus-plot")) == 2
    page.keyboard.press("Escape")
    page.click(".runs button.run-name >> nth=0")
    assert [trace["name"] for trace in drawn(page, LOSS)] == ["digits / c"]
    page.click("#legend button >> nth=0")
    page.click("#legend button >> nth=1")
    assert len(drawn(page, LOSS)) == 3
