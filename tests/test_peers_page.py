"""Tables, pictures and words about other libraries are made from saved numbers, family by family."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, which imports its neighbours by their short names; none of them stays imported."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    import peers_page

    yield peers_page
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def made(page: Any, label: str, ratio: float | None, *, work: str = "capture", same: float = 0.02) -> Any:
    """A result whose A/A is 1 ± ``same``; without a ratio, one that was not measured."""
    figures = (page.NOTHING, page.NOTHING)
    if ratio is not None:
        figures = (page.Spread(ratio, ratio * 0.9, ratio * 1.1), page.Spread(1.0, 1.0 - same, 1.0 + same))
    words = "measured" if ratio is not None else "it is not installed"
    row = page.Row(f"{work}, {label}", "ours", "theirs", "m", *figures, words, at_most=None if ratio is None else 1.0)
    return page.Result(work, label, row, "it does less")


def test_a_family_replaces_its_own_numbers_alone(page: Any, tmp_path: Path) -> None:
    """Measured again, a family loses its older results; the others keep theirs, in the order of the page."""
    path = tmp_path / "numbers.json"
    page.keep(path, "guard", [made(page, "copy", 0.5)])
    page.keep(path, "capture", [made(page, "old", 0.5), made(page, "gone", None)])
    again = [made(page, "new", 0.25), made(page, "absent", None)]
    page.keep(path, "capture", again)
    families = page.load(path)
    assert list(families) == ["capture", "guard"]
    assert families["capture"][1] == again
    assert [result.label for result in families["guard"][1]] == ["copy"]
    assert not families["capture"][1][1].has_figure


def test_the_section_of_the_results_leaves_the_others_alone(page: Any, tmp_path: Path) -> None:
    """The table has a row for each result; what another machine measured stays."""
    numbers, results = tmp_path / "numbers.json", tmp_path / "RESULTS.md"
    page.keep(numbers, "guard", [made(page, "copy", 0.5), made(page, "absent", None)])
    results.write_text("# Results\n\n## CPU\n\n- machine: another\n\n| a |\n| --- |\n| 1 |\n", encoding="utf-8")
    for _ in range(2):
        page.put(results, "Peers", page.section(page.load(numbers)), keep=False)
    text = results.read_text(encoding="utf-8")
    assert text.count("## CPU") == text.count("## Peers") == text.count("- machine: another") == 1
    assert text.count("| capture, copy |") == 1
    assert "| capture, absent | ours | theirs | m | – | – | it is not installed | – | – |" in text


def test_what_is_lost_is_said_and_what_is_within_noise_is_not(page: Any) -> None:
    """A ratio above the A/A spread is a loss, with its reason; who is missing is named."""
    results = [made(page, "dear", 0.5), made(page, "cheap", 2.0), made(page, "equal", 1.05, same=0.1),
               made(page, "absent", None)]  # fmt: skip
    words = page.losses(results)
    assert "- capture, against cheap: 2 times as long; it does less." in words
    assert "- absent, capture: it is not installed." in words
    assert "dear" not in words
    assert "equal" not in words
    assert page.sentence(results).startswith("hookline costs less in 1 of 3 contests, and more in 1: beside cheap.")
    assert "nowhere" in page.losses([made(page, "dear", 0.5)])


def test_words_go_between_their_marks(page: Any) -> None:
    """Text around the marks stays; without marks it is an error."""
    text = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n"
    assert page.replaced(text, "x", "new") == "a\n<!-- x -->\n\nnew\n\n<!-- end of x -->\nb\n"
    with pytest.raises(ValueError, match="<!-- y -->"):
        page.replaced(text, "y", "new")


def test_the_pages_say_what_the_numbers_say(page: Any) -> None:
    """The committed pages were made from the committed numbers."""
    families = page.load(page.NUMBERS)
    assert list(families) == list(page.TITLES)
    text = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    for name, (_, results) in families.items():
        assert page.replaced(text, name, page.losses(results)) == text
        assert f"pictures/peers_{name}.png" in text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    every = [result for _, results in families.values() for result in results]
    assert page.replaced(readme, "peers", page.sentence(every)) == readme


def test_a_picture_has_a_bar_for_each_measured_result(page: Any, tmp_path: Path) -> None:
    """Bars begin at ours and end at theirs; one that costs less than ours has another colour; no background."""
    plt, colors = pytest.importorskip("matplotlib.pyplot"), pytest.importorskip("matplotlib.colors")
    results = [made(page, "dear", 0.125), made(page, "cheap", 2.0)]
    _, axis = plt.subplots()
    page._bars(axis, results)
    ends = {
        (bar.get_x(), bar.get_width()): colors.to_hex(bar.get_facecolor())
        for bar in axis.patches
        if bar.get_alpha() is None  # the shade of the A/A has one
    }
    plt.close("all")
    assert ends == {(1.0, 7.0): page.THEIRS, (1.0, -0.5): page.AHEAD}
    page.draw("Title", [*results, made(page, "absent", None)], tmp_path / "a" / "picture.png")
    assert plt.imread(tmp_path / "a" / "picture.png")[0, 0, 3] == 0.0
    assert not plt.get_fignums()


def test_ratios_are_formed_of_the_medians_of_few_rounds(page: Any) -> None:
    """One wild round in five changes nothing."""
    from contests import block_ratios

    samples = {"bare": [1.0] * 10, "ours": [3.0, 3.0, 99.0, 3.0, 3.0, 2.0, 2.0, 2.0, 0.0, 2.0], "theirs": [5.0] * 10}
    assert block_ratios(samples, "ours", "theirs", beyond="bare") == [0.5, 0.25]
    assert block_ratios(samples, "ours", "theirs") == [3.0 / 5.0, 2.0 / 5.0]


def test_a_plot_of_growth_replaces_its_own_numbers_and_table(page: Any, tmp_path: Path) -> None:
    """The page has the newest table of each part between its marks, and a picture of it."""
    import growth_page

    numbers, text = tmp_path / "growth.json", tmp_path / "page.md"
    text.write_text(
        "".join(f"<!-- growth of {part} -->\n<!-- end of growth of {part} -->\n" for part in ("sites", "steps"))
    )
    growth_page.keep(numbers, "sites", growth_page.Plot("t", "sites", "µs", {"old": [(10, 1.0)]}))
    growth_page.keep(numbers, "steps", growth_page.Plot("t", "steps", "MB", {"held": [(1, 7.0)]}, log=False))
    series = {"call": [(10, 1.25), (10_000, 2.0)], "flush": [(10, 3.0), (10_000, 4.0)]}
    growth_page.keep(numbers, "sites", growth_page.Plot("t", "sites", "µs", series))
    growth_page.write_page(numbers, text, tmp_path)
    written = text.read_text(encoding="utf-8")
    assert "| sites | call (µs) | flush (µs) |" in written
    assert "| 10 | 1.25 | 3 |\n| 10,000 | 2 | 4 |" in written
    assert "old" not in written
    assert "| 1 | 7 |" in written
    assert {path.name for path in tmp_path.glob("*.png")} == {"growth_sites.png", "growth_steps.png"}
