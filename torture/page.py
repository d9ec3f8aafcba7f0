"""Write benchmarks/RELIABILITY.md from what came of each part; `run.py` calls it."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

import torch
from helpers_cases import Outcome

import hookline
from hookline.files import replace_file

__all__ = ["write_page"]

HEAD = """# Reliability

Written by `make torture` (`python torture/run.py`). Every case is a number that decides all that is random in it:
`python torture/run.py --parts PART --only NUMBER` runs one again. A case that ends or hangs its process counts as dead.
"Refused" are cases in which hookline said by an error that something cannot be done or put back, which is no loss.
A part ends when its number of acts is reached or the time of all parts is over: both are on this page.
"""

LIMITS = """## What is left out

- Acts that kill the process by themselves, with hookline or without: computing on memory that a storage has given up,
  recurrent kernels whose weights have other shapes, a step of the optimizer after `set_` has torn its state, one of a
  fused optimizer after `swap_tensors` of two parameters (it writes by their sizes into states of other sizes).
- `nn.TransformerEncoderLayer` without gradients takes another kernel of torch as long as no hook is on it, whoever's
  hook that is, which rounds otherwise. The programs switch that kernel off (`torch.backends.mha.set_fastpath_enabled`).
- Hidden states of a request in a batch are compared to 1e-3 with those of the request alone: a larger batch is
  multiplied in another order. Tokens are compared exactly.
"""


def write_page(path: Path, outcomes: list[Outcome]) -> None:
    """Write the page."""
    lines = [HEAD, *_machine(), "", "## Parts", "", *_table(outcomes)]
    lines += ["", *_lost(outcomes), "", LIMITS.rstrip()]
    replace_file(path, "\n".join(lines) + "\n")


def _machine() -> list[str]:
    return [
        f"- machine: {platform.machine()}, {platform.system()} {platform.release()}, CPU",
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}, hookline {hookline.__version__}",
        f"- date: {datetime.datetime.now(datetime.UTC).date()}",
    ]


def _table(outcomes: list[Outcome]) -> list[str]:
    lines = [
        "| part | what is done | what must hold | cases | acts (goal) | lost | dead | refused | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for found in outcomes:
        part = found.part
        lines.append(
            f"| {part.name} | {part.does} | {part.holds} | {found.cases:,} | {found.acts:,} ({part.goal:,}) "
            f"| {len(found.wrong)} | {len(found.died)} | {sum(found.refused.values()):,} | {found.seconds:.0f} |"
        )
    return lines


def _lost(outcomes: list[Outcome]) -> list[str]:
    """Return the cases that lost something, at most twenty of each part."""
    if all(found.is_clean for found in outcomes):
        return ["Nothing was lost."]
    lines = ["## What was lost", ""]
    for found in outcomes:
        lines += [f"- {found.part.name} {case.number}: {'; '.join(case.wrong)[:400]}" for case in found.wrong[:20]]
        lines += [f"- {found.part.name} {number}: {how}" for number, how in found.died[:20]]
    return lines
