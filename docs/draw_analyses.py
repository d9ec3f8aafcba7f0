"""Draw the pictures of the pages in docs/analyses again, from runs that it makes first, and write their tables.

Takes figures from docs/drawing, and the tables too; hands SVGs to docs/pictures/analyses and the tables to the pages.
Needs matplotlib and scikit-learn; for the tables alone, neither.

    python docs/draw_analyses.py                        # everything, three minutes on one core
    python docs/draw_analyses.py norms hessian          # some
    python docs/draw_analyses.py --tables               # the tables alone, at once
    python docs/draw_analyses.py --png /tmp/pictures    # to look at, elsewhere
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).parent))

from drawing import gradients, interventions, layers, tables, weights
from drawing.canvas import STYLE

PICTURES: Final = Path(__file__).parent / "pictures" / "analyses"
PLOTS: Final[dict[str, Callable[[], Any]]] = {
    name.removeprefix("draw_"): found
    for module in (gradients, weights, layers, interventions)
    for name, found in vars(module).items()
    if name.startswith("draw_")
}
"""What draws the picture of each hook, and returns the figure: ``draw_norms`` draws ``norms``."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("hooks", nargs="*", metavar="HOOK", help="of which to draw the picture; all, if left out")
    parser.add_argument("--tables", action="store_true", help="write the tables of the pages alone")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="draw PNGs into this folder")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.hooks if name not in PLOTS]
    if unknown:
        parser.error(f"there is no picture of {', '.join(unknown)}; there are {', '.join(PLOTS)}")
    tables.write()
    if not options.tables:
        draw(options.hooks or list(PLOTS), options.png or PICTURES, "png" if options.png else "svg")


def draw(names: Iterable[str], folder: Path, kind: str) -> None:
    """Each into a file of its name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    torch.set_num_threads(1)  # more are no faster with models this small, and round otherwise
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name in names:
            begun = time.perf_counter()
            figure = PLOTS[name]()
            file = folder / f"{name}.{kind}"
            figure.savefig(file, **({"metadata": {"Date": None}} if kind == "svg" else {}))
            plt.close(figure)
            if kind == "svg":
                file.write_text(rounded(file.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"{file.name:32s} {file.stat().st_size / 1024:5.1f} KB {time.perf_counter() - begun:6.1f} s")


def rounded(svg: str) -> str:
    """Places to a hundredth of a point, where matplotlib gives millionths; lines without spaces at their ends."""
    places = re.compile(r'(?<=\s)(?:d|x|y)="[^"]*"')
    short = places.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    return re.sub(r" +$", "", short, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
