"""What a reader of the pages of a run and of a comparison sees and does, in a real browser."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_page import CARD, cards, drawn, slide, until
from helpers_report import STATISTICS, large_run, loss_at, small_run, stat_at

import hookline as hl
from hookline.debug.compare.compare import compare
from hookline.records.log import RecordLog
from hookline.records.sink import Record, StepSeries
from hookline.report.report_page import write_report

Visit = Callable[..., Any]


def test_the_page_is_whole_and_says_what_the_run_was(visit: Visit, made: Path) -> None:
    """It opens from disk, asks for nothing, complains of nothing, and shows figures, hooks and facts."""
    page = visit(made / "small.html").load()
    text = page.inner_text("main")
    for part in (
        "digits / default",
        "finished",
        "0.0312",
        "226,442",
        "Nothing unusual",
        "counterfactual",
        "learning_rate",
        "4f1c2d9a7b",
    ):
        assert part in text
    assert "--seed 7" in text
    cost = page.locator(".hooks tr", has_text="counterfactual").inner_text()
    assert "5,230 ms" in cost
    assert "10 %" in cost  # 5.23 of 50 seconds
    assert "without its work inside steps" not in cost
    assert "without its work inside steps" in page.locator(".hooks tr", has_text="Streaming statistics").inner_text()
    assert "HOOKS TOOK AT LEAST 15 %" in " ".join(page.inner_text(".tiles").split()).upper()


def test_the_browser_holds_the_page_to_asking_for_nothing(visit: Visit, made: Path) -> None:
    """Control of the check above: a request from inside is refused, and would have been seen as a complaint."""
    opened = visit(made / "small.html")
    page = opened.load()
    assert page.evaluate("fetch('https://example.invalid/').then(() => 'answered', () => 'refused')") == "refused"
    assert any("Content Security Policy" in complaint for complaint in opened.complaints)
    opened.complaints.clear()


def test_a_run_that_cannot_be_judged_is_not_said_to_be_well(visit: Visit, tmp_path: Path) -> None:
    """One record of a loss; the words say why."""
    log = RecordLog(tmp_path / "records.jsonl")
    log.append(Record({"train/loss": 1.0}, 0, "POST_STEP", 0))
    log.close()
    text = visit(write_report([tmp_path])).load().inner_text("#findings")
    assert "Could not judge" in text
    assert "1 point" in text
    assert "Nothing unusual" not in text


@pytest.mark.slow
def test_the_map_opens_at_the_layer_of_the_first_anomaly_and_the_last_steps_are_folded(
    visit: Visit, tmp_path: Path
) -> None:
    """A layer that explodes, and a flight recorder: six steps are seen, below the curves, the rest at a press."""
    log = RecordLog(tmp_path / "records.jsonl")
    metrics = {f"stats/layers.{n}/forward/norm": StepSeries([1.0] * 20, range(20)) for n in range(4)}
    metrics["stats/layers.2/forward/norm"] = StepSeries([1.0] * 19 + [500.0], range(20))
    log.append(Record(metrics, 0, "POST_STEP", 19))
    log.close()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = hl.debug.FlightRecorder(to=tmp_path / "flight_recorder.json")
    with hl.follow(model, optimizer, [recorder]):
        for _ in range(20):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        recorder.write("a test")
    page = visit(write_report([tmp_path])).load()
    assert page.input_value("#row-layer") == "layers.2"
    order = page.eval_on_selector_all("main > section", "all => all.map(one => one.id)")
    assert order.index("curves") < order.index("minutes-1") < order.index("layers")
    rows = page.locator("#minutes-1 tbody tr:visible")
    assert rows.count() == 6
    page.locator("#minutes-1 summary").first.click()
    assert rows.count() == 26


def test_a_search_narrows_the_metrics_and_finds_those_of_layers(visit: Visit, made: Path) -> None:
    """All words have to match; metrics of single layers come up only when they are looked for."""
    page = visit(made / "small.html").load()
    assert cards(page) == ["train/loss", "eval/loss", "eval/accuracy", "norms/total"]
    page.fill("#search", "loss")
    until(page, "document.querySelectorAll('article').length === 2")
    assert cards(page) == ["train/loss", "eval/loss"]
    page.fill("#search", "NORM layers.3.")
    until(page, "document.querySelectorAll('article').length === 1")
    assert cards(page) == ["stats/layers.3.mlp/forward/norm"]
    page.fill("#search", "nothing like it")
    page.wait_for_selector("#cards .empty")
    assert page.inner_text("#search-result") == "0 of 40 metrics"


@pytest.mark.slow
def test_smoothing_draws_a_moving_average_beside_the_curve(visit: Visit, made: Path) -> None:
    """Unsmoothed, the curve is what was recorded; smoothed, the average is drawn, the curve stays behind it."""
    page = visit(made / "small.html").load()
    card = CARD.format("train/loss")
    recorded = [loss_at(step) for step in range(200)]
    (plain,) = drawn(page, card)
    assert plain["x"] == list(range(200))
    assert plain["y"] == pytest.approx(recorded, rel=1e-6)
    slide(page, "#smoothing", 0.9)
    until(page, "s => document.querySelector(s).data.length === 2", card)
    raw, smooth = drawn(page, card)
    total = weight = 0.0
    expected = []
    for value in recorded:
        total, weight = 0.9 * total + 0.1 * value, 0.9 * weight + 0.1
        expected.append(total / weight)
    assert raw["y"] == pytest.approx(recorded, rel=1e-6)
    assert smooth["y"] == pytest.approx(expected, rel=1e-5)
    assert smooth["y"] != pytest.approx(recorded, rel=1e-3)


def test_the_map_has_the_value_of_each_layer_at_each_step(visit: Visit, made: Path) -> None:
    """Rows in the order of the model, columns by step; the first statistic is drawn as it is."""
    page = visit(made / "small.html").load()
    (trace,) = drawn(page, "#map")
    assert trace["x"] == list(range(200))
    for layer, row in enumerate(trace["z"]):
        assert row == pytest.approx([stat_at(layer, step, "mean") for step in range(200)], rel=2e-5, abs=1e-6)
    assert page.evaluate("document.querySelector('#map').layout.yaxis.ticktext[11]") == "layers.11.mlp"


@pytest.mark.slow
def test_the_slider_goes_through_the_statistics_by_keyboard(visit: Visit, made: Path) -> None:
    """An arrow key shows the next one; norms over several decades are coloured by their logarithm, told as they are."""
    page = visit(made / "small.html").load()
    page.focus("#map-statistic")
    for statistic in STATISTICS[1:]:
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#map-statistic-name") == statistic
        (trace,) = drawn(page, "#map")
        values = [stat_at(5, step, statistic) for step in range(200)]
        assert trace["told"][5] == pytest.approx(values, rel=2e-5)
    page.keyboard.press("ArrowLeft")
    page.select_option("#map-colour", "log")
    (trace,) = drawn(page, "#map")
    assert trace["z"][5][7] == pytest.approx(math.log10(stat_at(5, 7, "norm")), abs=1e-4)


@pytest.mark.slow
def test_a_click_on_the_map_shows_the_curve_of_that_layer(visit: Visit, made: Path) -> None:
    """The row under the mouse is the row of the curve; the list beside it does the same by keyboard."""
    page = visit(made / "small.html").load()
    drawn(page, "#map")
    box = page.locator("#map .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 7.5 / 12)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] * 7.5 / 12)
    until(page, "document.querySelector('#row-title').textContent.startsWith('layers.7.mlp')")
    (curve,) = drawn(page, "#row-plot")
    assert curve["y"] == pytest.approx([stat_at(7, step, "mean") for step in range(200)], rel=2e-5, abs=1e-6)
    page.select_option("#row-layer", label="layers.2.mlp")
    assert page.inner_text("#row-title") == "layers.2.mlp – stats/forward/mean"


class Square(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


@pytest.mark.slow
def test_the_first_bad_operation_stands_above_all_anomalies(visit: Visit, tmp_path: Path) -> None:
    """Step, operator, module and line of what the hook found, of a real run; without the hook, how to find them."""
    data = [(torch.full((2, 4), 1e30 if step == 3 else 1.0), torch.zeros(2, 1)) for step in range(6)]
    for name in ("with", "without"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Square(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        hooks = [hl.watch(model, optimizer=optimizer), *([hl.debug.FirstBadOperation()] if name == "with" else [])]
        with hl.HookManager(hooks=hooks, log=tmp_path / name / "records.jsonl") as manager:
            context = {"run_dir": str(tmp_path / name)}
            hl.epoch_loop(hl.Experiment(model, optimizer, data), epochs=2, manager=manager, run_context=context)
        hooks[0].remove()
    page = visit(write_report([tmp_path / "with"])).load()
    titles = page.eval_on_selector_all(".finding", "all => all.map(one => one.dataset.title)")
    assert titles[:2] == ["First bad operation", "NaN or Inf"]
    first, second = page.locator(".finding").all_inner_texts()[:2]
    assert "Step 3: overflow of float32 made by aten.mul.Tensor" in first
    assert "in the forward of '1', at test_page_in_chromium.py:" in first
    assert "return x * x" in first
    assert "not known" not in second
    page = visit(write_report([tmp_path / "without"])).load()
    (only,) = page.locator(".finding", has_text="NaN or Inf").all_inner_texts()
    assert "too far apart to say which layer was first" in only
    assert "The hook first_bad_operation finds the operator" in only


def test_anomalies_come_first_and_open_their_plot(visit: Visit, made: Path) -> None:
    """The worst first, each with its step; a link opens the plot with a line there, then layer and step on the map."""
    opened = visit(made / "ill.html")
    page = opened.load()
    titles = page.eval_on_selector_all(".finding", "all => all.map(one => one.dataset.title)")
    assert titles == ["NaN or Inf", "Loss spikes", "Exploding norms", "Dead units", "Vanishing gradients"]
    page.click("a.sight >> text=stats/layers.3/forward/norm")
    page.wait_for_selector("#focus[open]")
    assert page.inner_text("#focus-title") == "stats/layers.3/forward/norm"
    drawn(page, "#focus-plot")
    assert page.evaluate("document.querySelector('#focus-plot').layout.shapes[0].x0") == 70
    page.focus("#focus-map")
    page.keyboard.press("Enter")
    page.wait_for_selector("#focus:not([open])", state="attached")
    until(page, "location.hash === '#layer=layers.3&mark=70' && document.activeElement.id === 'row-layer'")
    link = "#" + page.url.split("#")[1]
    page.goto("about:blank")
    page = opened.load(link)  # as a colleague would
    assert page.inner_text("#row-title") == "layers.3 – stats/forward/norm"
    drawn(page, "#map")
    frame, line = page.evaluate("document.querySelector('#map').layout.shapes")
    assert (frame["y0"], frame["y1"], line["x0"]) == (2.5, 3.5, 70)
    drawn(page, "#row-plot")
    assert page.evaluate("document.querySelector('#row-plot').layout.shapes[0].x0") == 70


@pytest.mark.slow
def test_what_is_not_finite_is_marked_on_the_map_and_on_the_curve(visit: Visit, made: Path) -> None:
    """In a colour of its own on the map; as crosses where the curve has a gap."""
    page = visit(made / "ill.html").load()
    _, bad = drawn(page, "#map")
    assert bad["meta"] == "bad"
    assert [row.count(1) for row in bad["z"]] == [0, 0, 0, 0, 20, 0]
    page.select_option("#row-layer", label="layers.4")
    until(page, "document.querySelector('#row-plot').data?.length === 2")
    _, crosses = drawn(page, "#row-plot")
    assert crosses["x"] == list(range(80, 100))


@pytest.mark.slow
def test_light_and_dark_follow_the_system_and_the_switch(visit: Visit, made: Path) -> None:
    """The system's choice at first, the reader's afterwards, in plots as well as in text."""
    page = visit(made / "small.html", color_scheme="dark").load()
    ink = "document.querySelector('#map').layout.font.color"
    ground = "getComputedStyle(document.body).backgroundColor"
    drawn(page, "#map")
    dark = page.evaluate(f"[{ink}, {ground}]")
    page.click("#theme")
    light = page.evaluate(f"[{ink}, {ground}]")
    assert dark == ["#e7e8ea", "rgb(19, 21, 24)"]
    assert light == ["#1b1d21", "rgb(255, 255, 255)"]
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"


def test_two_runs_lie_over_each_other(visit: Visit, made: Path) -> None:
    """A curve for each in its own colour, the map by choice, facts that differ first; or one minus the other."""
    page = visit(made / "two.html").load()
    legend = page.eval_on_selector_all("#legend > button", "all => all.map(one => one.textContent)")
    assert legend == ["digits / default", "digits / stride"]
    first, second = drawn(page, CARD.format("train/loss"))
    assert first["y"] == pytest.approx([loss_at(step, 0) for step in range(200)], rel=1e-6)
    assert second["y"] == pytest.approx([loss_at(step, 2) for step in range(200)], rel=1e-6)
    colours = page.evaluate("s => document.querySelector(s).data.map(t => t.line.color)", CARD.format("train/loss"))
    assert len(set(colours)) == 2
    page.select_option("#map-run", label="digits / stride")
    assert len(drawn(page, "#row-plot")) == 2
    differing = page.eval_on_selector_all(".facts .differs th", "all => all.map(one => one.textContent)")
    assert set(differing) == {"folder", "strategy", "seed"}
    heads = page.eval_on_selector_all("#fact-table > h3", "all => all.map(one => one.textContent)")
    assert heads == ["What differs", "The same in all runs"]
    page.select_option("#base", label="digits / default")
    page.locator(CARD.format("train/loss")).scroll_into_view_if_needed()
    until(page, "s => document.querySelector(s).data.length === 1", CARD.format("train/loss"))
    (trace,) = drawn(page, CARD.format("train/loss"))
    assert trace["y"] == pytest.approx([loss_at(step, 2) - loss_at(step, 0) for step in range(200)], abs=1e-6)
    (trace, *_) = drawn(page, "#map")  # that of the second run; both have the same statistics
    assert {value for row in trace["z"] for value in row} == {0}
    assert page.is_disabled("input[name=y][value=log]")
    until(page, "location.hash.includes('base=0')")


@pytest.mark.slow
def test_distributions_are_shown_over_time_and_at_one_moment(visit: Visit, made: Path) -> None:
    """Counts by bin as shares on the map, as counts at the moment of the slider."""
    page = visit(made / "small.html").load()
    (bars,) = drawn(page, "#grid-bars")
    assert bars["x"] == ["zero", *map(str, range(-12, 3))]
    assert bars["y"] == pytest.approx(
        [40] + [int(1000 * math.exp(-((e + 7) ** 2) / 8)) for e in range(-12, 3)], rel=1e-4
    )
    slide(page, "#grid-step", 0)
    assert page.inner_text("#grid-step-name") == "step 49"
    (bars,) = drawn(page, "#grid-bars")
    assert bars["y"][1:] == pytest.approx([int(1000 * math.exp(-((e + 4) ** 2) / 8)) for e in range(-12, 3)], rel=1e-4)
    (shares,) = drawn(page, "#grid-map")
    assert [sum(column) for column in zip(*shares["z"], strict=True)] == pytest.approx([1.0] * 4, rel=1e-4)
    page.select_option("#grid-metric", label="spectrum/top")
    (bars,) = drawn(page, "#grid-bars")
    assert bars["y"] == pytest.approx([8.25 - k for k in range(8)], rel=1e-4)


def test_a_frequency_that_was_not_yet_told_is_a_gap_and_a_nan_is_not(visit: Visit, tmp_path: Path) -> None:
    """Of two frequencies the second comes with the third report, and is NaN in the last."""
    log = RecordLog(tmp_path / "records.jsonl")
    for step in range(5):
        late = {} if step < 2 else {"26": math.nan if step == 4 else 0.25}
        log.append(Record({"fourier/freq_powers": {"2": 0.5, **late}}, 0, "POST_STEP", step))
    log.close()
    page = visit(write_report([tmp_path])).load()
    powers, bad = drawn(page, "#grid-map")
    assert powers["z"][0] == [0.5] * 5
    assert powers["z"][1][:4] == ["gap", "gap", 0.25, 0.25]
    assert bad["z"] == [["gap"] * 5, ["gap"] * 4 + [1]]


@pytest.mark.slow
def test_everything_that_can_be_chosen_is_reached_by_the_tab_key(visit: Visit, made: Path) -> None:
    """And has a name that a screen reader can say."""
    page = visit(made / "small.html").load()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.className"
            )
        )
    assert reached >= {
        "theme",
        "search",
        "smoothing",
        "x",
        "y",
        "quiet open",
        "map-group",
        "map-statistic",
        "map-colour",
        "row-layer",
    }
    named = "e => e.ariaLabel || e.labels?.length || e.textContent.trim()"
    nameless = f"[...document.querySelectorAll('button,input,select')].filter(e => !({named})(e)).length"
    assert page.evaluate(nameless) == 0


def test_names_are_shown_as_they_are_and_run_nothing(visit: Visit, tmp_path: Path) -> None:
    """A metric or layer may be called anything; it stays text."""
    nasty = [
        "a/</script><script>window.hurt=1</script>",
        "b/<img src=x onerror=window.hurt=1>",
        "ζ/λ – 層 😀",
        "c/{{data}}",
        "d/a&b=c#d",
    ]
    log = RecordLog(tmp_path / "records.jsonl")
    rows = {f"w/<b>{i}</b>.x/forward/norm": float(i) for i in range(3)}
    for step in range(3):
        log.append(Record({name: float(step) for name in nasty} | rows, step, "POST_EPOCH", step))
    log.close()
    (tmp_path / "run.json").write_text(
        '{"experiment": "<script>window.hurt=1</script>", "config": {"</style>": "<b>"}}'
    )
    page = visit(write_report([tmp_path])).load()
    assert set(cards(page)) == set(nasty)
    assert page.locator("h1").inner_text() == "<script>window.hurt=1</script>"
    page.click("button[aria-label='Open d/a&b=c#d']")
    assert page.inner_text("#focus-title") == "d/a&b=c#d"
    page.keyboard.press("Escape")
    drawn(page, "#map")
    ticks = page.eval_on_selector_all("#map .ytick", "all => all.map(one => one.textContent)")
    assert ticks == [f"<b>{i}</b>.x" for i in range(3)]
    assert page.evaluate("window.hurt") is None


def test_a_run_without_records_or_in_the_middle_of_one_has_a_page(visit: Visit, tmp_path: Path) -> None:
    """Empty, going on, half a line at the end: a sentence says so."""
    empty = tmp_path / "empty"
    empty.mkdir()
    page = visit(write_report([empty])).load()
    assert "nothing was recorded, or the run has not begun" in page.inner_text("#head")
    going = small_run(tmp_path / "going", facts_of={"experiment": "digits", "status": "running", "hooks": {}})
    with (going / "records.jsonl").open("a") as file:
        file.write('{"n":12,"time":17900')
    page = visit(write_report([going])).load()
    assert "This run was going when the page was made" in page.inner_text("#head")
    assert len(drawn(page, CARD.format("train/loss"))[0]["y"]) == 200


@pytest.mark.slow
def test_a_long_curve_is_thinned_until_it_is_looked_at_closely(visit: Visit, tmp_path: Path) -> None:
    """A peak of one step is drawn whatever the width; between the ends of a zoom there is every point."""
    log = RecordLog(tmp_path / "records.jsonl")
    values = [math.sin(step / 1000) for step in range(30_000)]
    values[12_345] = 7.0
    log.append(Record({"train/loss": StepSeries(values, range(30_000))}, 0, "POST_STEP", 29_999))
    log.close()
    page = visit(write_report([tmp_path])).load()
    card = CARD.format("train/loss")
    (trace,) = drawn(page, card)
    assert len(trace["x"]) < 3000
    assert max(trace["y"]) == 7.0
    page.evaluate(
        "s => Plotly.relayout(document.querySelector(s), {'xaxis.range[0]': 12300, 'xaxis.range[1]': 12400})", card
    )
    (trace,) = drawn(page, card)
    assert [x for x in trace["x"] if 12_300 <= x <= 12_400] == list(range(12_300, 12_401))


@pytest.mark.slow
def test_200_layers_over_2000_steps_are_drawn_whole(visit: Visit, tmp_path: Path) -> None:
    """Every layer has its row, and the file stays below 7 MB, 2 of which are plotly."""
    path = write_report([large_run(tmp_path / "large")])
    assert path.stat().st_size < 7_000_000
    page = visit(path).load()
    assert page.evaluate("document.querySelector('#map').data[0].z.length") == 200


def _run(seed: int = 0) -> dict[str, Any]:
    source = torch.Generator().manual_seed(0)
    sites = ["embed", *(f"h.{layer}.{part}" for layer in range(4) for part in ("ln", "mlp")), "</script>head"]
    tensors = {site: torch.randn(3, 4, generator=source) for site in sites}
    if seed:
        for site in sites[4:]:
            tensors[site] = tensors[site] + 1
        tensors["h.3.mlp"][0, 0] = torch.nan
    return tensors


def test_the_page_of_a_comparison_shows_the_map_and_the_table(visit: Callable[..., Any], tmp_path: Path) -> None:
    """Whole from disk, also on a phone: the verdict, a row for each layer, shaded by its error, the worst first."""
    path = compare(_run(), _run(1)).write_html(tmp_path / "compared.html")
    page = visit(path).load()
    assert "Blamed: h.1.mlp." in page.inner_text("#verdict")
    rows = page.eval_on_selector_all(
        "table:first-of-type tbody tr", "all => all.map(row => [...row.children].map(one => one.textContent))"
    )
    layers = {row[0]: row[1:] for row in rows[:6]}
    assert [*layers] == ["embed", "h.0", "h.1", "h.2", "h.3", "</script>head"]
    assert layers["h.0"] == ["", "=", "="]
    assert layers["h.1"] == ["", "=", "6.0"]
    assert layers["h.3"][2] == "nan"
    assert "background-color" in page.locator("table tbody tr").nth(2).locator("td").nth(3).get_attribute("style")
    worst = page.locator("section").last.locator("tbody tr").first.locator("td").first
    assert worst.inner_text() == "h.3.mlp"
    assert visit(path, width=390).load().evaluate("document.documentElement.scrollWidth") <= 390
