"""Rows of decoding, the guard, compiled training and the eager watch on a GPU, for two versions side by side.

    python benchmarks/before_after.py --before OLD/src --seconds 130 --out rows.json
    python benchmarks/before_after.py --before OLD/src --seconds 200 --only watch --out rows.json
    python benchmarks/run.py --merge page.md

One process for each version, which answer in turn: a round of one, a round of the other. Ratios are formed inside a
round of one process. Each row tells three things: the wall time of a step up to a synchronize, which is mostly the
host's; a step of ten without waiting between them (steady); and what kernels and copies alone take on the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import Row, spread, typical
from results import console_line, keep, measured
from subject import Setting
from watch_growth import CHAPTERS, open_chapter

_LAYERS = ["model.layers.#"]
_SERVED = {"activation_stats": (1.05, 1.08), "nan_alarm": (None, None)}
"""What is on every layer, and the targets, eager and compiled."""
_GUARD = {
    "guarded": ("by hand", "save, restore and check everything", "two multi-tensor copies of the same bytes", 1.1),
    "reads": ("save", 'an intervention that declares `scope="reads"`', "a full save", None),
}
_TRAINED = {"train-8": (8, None), "train-32": (32, None), "train-graphs": (8, "reduce-overhead")}
"""Batch and mode of compiled training steps."""
_GRADIENTS_TOO = "BENCHMARK_GRADIENTS_TOO"
"""Set it to leave out compiled steps whose forward alone is watched: each takes half a minute to compile."""
_PARTS = ("serve", "guard", *_TRAINED, "watch")
_TRAINED_TARGET = 1.08
"""With ``reduce-overhead``."""
_Way = Callable[[], AbstractContextManager[object]]
_Found = dict[str, float]


class Subjects:
    """All that is measured, by name: something to call, and what is on the model meanwhile."""

    def __init__(self, parts: list[str]) -> None:
        self._setting = setting = _setting()
        self.calls: dict[str, tuple[Callable[[], None], _Way]] = {}
        self.models: dict[str, str] = {}
        self.peaks: _Found = {}
        """The most memory that a step takes, in GiB."""
        self._kept: list[object] = []
        for how in ("eager", "compiled") if "serve" in parts else ():
            self._add_served(setting, how)
        if "guard" in parts:
            self._add_guard(setting)
        for part, (batch, mode) in _TRAINED.items():
            if part in parts:
                self._add_trained(setting, batch, mode)

    def _add_served(self, setting: Setting, how: str) -> None:
        from serving import Served

        served = Served(setting)
        served.prefill()
        if how == "compiled":
            served.call = torch.compile(served.runner.model, dynamic=False)
        self.models[how] = str(served.size)
        for name in ("bare", "bare again"):
            self.calls[f"{how} {name}"] = served.decode, nullcontext
        for name in _SERVED:
            self.calls[f"{how} {name}"] = served.decode, lambda name=name: served.hooked(name, _LAYERS, {})

    def _add_trained(self, setting: Setting, batch: int, mode: str | None) -> None:
        from gpu_statistics import HUNDRED, Training, compiled_own

        import hookline as hl

        how = _trained_name(batch, mode)
        ways = {"bare": (), "forward": ("forward",), "forward + gradient": ("forward", "backward")}
        for name, kinds in ways.items():
            if name == "forward" and (mode is not None or os.environ.get(_GRADIENTS_TOO)):
                continue  # what there is to see shows in both
            held = _allocated()  # by the models that stand beside this one
            training = Training(setting, batch)
            if kinds:
                self._kept.append(hl.watch(training.model, HUNDRED, on=kinds, optimizer=training.optimizer))
            training.run = compiled_own(training.model, mode)
            self.peaks[f"{how} {name}"] = training.peak(nullcontext) - held
            self.calls[f"{how} {name}"] = training.step, nullcontext
            self.models[how] = f"{training.shape}, bf16 autocast, fused AdamW"
        self.calls[f"{how} bare again"] = self.calls[f"{how} bare"]

    def _add_guard(self, setting: Setting) -> None:
        from guarding import Saved
        from models import SMALL

        saved = Saved(SMALL, setting)
        self.models["guard"] = f"{SMALL.name}, AdamW: {saved.nbytes / 1e6:,.0f} MB in {len(saved.tensors)} tensors"
        calls = {"guarded": saved.firing("trains"), "reads": saved.firing("reads")}
        calls |= dict.fromkeys(("save", "save again"), saved.save)
        calls |= dict.fromkeys(("by hand", "by hand again"), saved.by_hand)
        self.calls |= {f"guard {name}": (call, nullcontext) for name, call in calls.items()}

    def open(self, chapter: str) -> None:
        """Measure one size of a watched model from now on, and nothing else."""
        self.calls.clear()
        self.calls = open_chapter(chapter, self._setting)

    def round(self, number: int) -> _Found:
        """Wall and steady seconds of everything, in an order of its own."""
        order, found = list(self.calls), {}
        random.Random(number).shuffle(order)
        for name in order:
            call, on = self.calls[name]
            with on():
                trains = name in self.peaks or name.endswith("bare again")  # steps that take long enough as they are
                for _ in range(2 if trains else 3):
                    call()
                found[f"{name}, wall"] = min(_seconds(call, 1) for _ in range(3))
                found[f"{name}, steady"] = _seconds(call, 10)
        gc.collect()
        return found

    def kernels(self) -> _Found:
        """Seconds of kernels and copies in a step, and how many there are."""
        found = {f"{name}, peak": each for name, each in self.peaks.items()}
        for name, (call, on) in self.calls.items():
            with on():
                for _ in range(3):
                    call()
                _reset_peak()
                found[f"{name}, kernels"], found[f"{name}, launches"] = _on_device(call)
                found.setdefault(f"{name}, peak", torch.cuda.max_memory_allocated() / 2**30)
        return found


def _setting() -> Setting:
    """The GPU; without one, a check that everything runs."""
    return Setting(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), quick=True)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _allocated() -> float:
    """GiB that are in use on the device."""
    gc.collect()
    return torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _seconds(call: Callable[[], None], steps: int) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    _wait()
    return (time.perf_counter() - start) / steps


def _on_device(call: Callable[[], None], steps: int = 4) -> tuple[float, float]:
    from torch.profiler import ProfilerActivity, profile

    _wait()
    with profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]) as run:
        for _ in range(steps):
            call()
        _wait()
    kind = "CUDA" if torch.cuda.is_available() else "CPU"
    events = [event for event in run.events() or () if event.device_type.name == kind]
    return sum(event.time_range.elapsed_us() for event in events) * 1e-6 / steps, len(events) / steps


def answer(parts: list[str]) -> None:
    """Measure what is asked for on stdin: a number for a round, a chapter to open it, ``kernels`` for these."""
    torch.set_num_threads(1)
    subjects = Subjects(parts)
    if subjects.calls:
        subjects.round(-1)
    gc.collect()
    gc.freeze()
    gc.disable()
    print(json.dumps(subjects.models), flush=True)
    for line in map(str.strip, sys.stdin):
        if line in CHAPTERS:
            subjects.open(line)
            print("{}", flush=True)
        else:
            print(json.dumps(subjects.round(int(line)) if line.isdigit() else subjects.kernels()), flush=True)


class Version:
    """A process with one version of the package, and what it has found."""

    def __init__(self, source: Path, parts: list[str]) -> None:
        command = [sys.executable, __file__, "--answer", "--only", *parts]
        # Graphs that the compiler keeps on disk are of one version.
        path = {"PYTHONPATH": str(source.resolve()), "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(prefix="graphs-")}
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **path}
        )
        self.samples: dict[str, list[float]] = {}
        self.kernels: _Found = {}

    def read(self) -> dict[str, Any]:
        """The next answer; other lines are shown."""
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
            print(line, end="")
        raise SystemExit("A process has ended before it answered.")

    def ask(self, what: str) -> dict[str, Any]:
        """The answer to a question."""
        print(what, file=self._process.stdin, flush=True)
        return self.read()

    def add_round(self, number: int) -> None:
        """One more sample of everything."""
        for name, seconds in self.ask(str(number)).items():
            self.samples.setdefault(name, []).append(seconds)

    def turn_to(self, chapter: str) -> None:
        """Forget all samples, and open a chapter."""
        self.ask(chapter)
        self.samples = {}

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()

    def ratios(self, name: str, base: str, column: str) -> list[float]:
        """Round by round."""
        pairs = zip(self.samples[f"{name}, {column}"], self.samples[f"{base}, {column}"], strict=True)
        return [a / b for a, b in pairs]

    def columns(self, name: str, base: str) -> str:
        """The three columns in words."""
        wall, steady = (spread(self.ratios(name, base, column)) for column in ("wall", "steady"))
        device = self.kernels[f"{name}, kernels"] / self.kernels[f"{base}, kernels"]
        counts = "{:.0f} / {:.0f}".format(*(self.kernels[f"{each}, launches"] for each in (name, base)))
        peaks = [self.kernels.get(f"{each}, peak") for each in (name, base)]
        memory = "" if None in peaks else "; peak {:.2f} / {:.2f} GiB".format(*peaks)
        return f"wall {wall}, steady {steady}, kernels alone {device:.3f} (launches {counts}){memory}"


def rows(before: Version, after: Version, models: dict[str, str]) -> Iterator[Row]:
    """Of the version after, with what the one before took."""
    for how, model in models.items():
        if how == "guard":
            for name, (base, words, against, target) in _GUARD.items():
                texts = f"guard, {name}", words, against, model
                yield _row(before, after, (f"guard {name}", f"guard {base}"), texts, target)
            yield _milliseconds(before, after, model)
            continue
        if how.startswith("compiled, "):
            yield from _trained_rows(before, after, how, model)
            continue
        for name, targets in _SERVED.items():
            words = f"{name} on every layer"
            texts = f"served, {how} decode, {words}", words, "the same forward without hooks", model
            yield _row(before, after, (f"{how} {name}", f"{how} bare"), texts, targets[how == "compiled"])


def _trained_name(batch: int, mode: str | None) -> str:
    return f"compiled, {mode or 'default'}, batch {batch}:"


def _trained_rows(before: Version, after: Version, how: str, model: str) -> Iterator[Row]:
    from gpu_statistics import COMPILED

    (batch, mode), *_ = (each for each in _TRAINED.values() if _trained_name(*each) == how)
    for name in ("forward", "forward + gradient"):
        if f"{how} {name}, wall" in after.samples:
            words = f"`hl.watch` of {name}{'' if mode is None else f', `mode={mode!r}`'}"
            where = f"batch {batch}" if mode is None else f"batch {batch}, {mode}"
            texts = f"compiled, {name} statistics, GPT-2 small step, {where}", words, "the bare step", model
            target = _TRAINED_TARGET if mode is not None else COMPILED[name, batch]
            yield _row(before, after, (f"{how} {name}", f"{how} bare"), texts, target)


def _row(
    before: Version, after: Version, pair: tuple[str, str], texts: tuple[str, str, str, str], target: float | None
) -> Row:
    name, base = pair
    times = " / ".join(f"{typical(after.samples, f'{each}, wall') * 1e3:.2f}" for each in pair)
    told = f"{times} ms; {after.columns(name, base)}; before: {before.columns(name, base)}"
    same = spread(after.ratios(f"{base} again", base, "wall"))
    return Row(*texts, spread(after.ratios(name, base, "wall")), same, told, at_most=target)


def _milliseconds(before: Version, after: Version, model: str) -> Row:
    """A tenth of a save would be less than the answers of 600 tensors take in Python; a millisecond is not."""
    own, other = ([each * 1e3 for each in version.samples["guard reads, wall"]] for version in (after, before))
    return Row(
        "guard, reads (ms)",
        'an intervention that declares `scope="reads"`',
        "1 ms",
        model,
        spread(own),
        spread(after.ratios("guard save again", "guard save", "wall")),
        f"before: {spread(other)}",
        at_most=1.0,
    )


def main() -> None:
    """Measure both, and keep the rows."""
    parser = argparse.ArgumentParser(description="Measure two versions of hookline side by side on a GPU.")
    parser.add_argument("--before", type=Path, help="the folder src of the other version")
    parser.add_argument("--seconds", type=float, default=130, help="in all, with the start")
    parser.add_argument("--only", nargs="*", choices=_PARTS, default=["serve", "guard"])
    parser.add_argument("--chapters", nargs="*", choices=CHAPTERS, default=list(CHAPTERS), help="of the watch")
    parser.add_argument("--out", type=Path, help="a file of rows to keep them in")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.only)
        return
    began = time.monotonic()
    sources = {"before": options.before, "after": Path(__file__).parent.parent / "src"}
    versions = {name: Version(source, options.only) for name, source in sources.items()}
    models = [version.read() for version in versions.values()][-1]
    print(f"(both began after {time.monotonic() - began:.0f} s)", flush=True)
    found: list[Row] = []
    if models:
        _measure(versions, began + options.seconds)
        found += rows(versions["before"], versions["after"], models)
    for number, chapter in enumerate(options.chapters if "watch" in options.only else ()):
        for version in versions.values():
            version.turn_to(chapter)
        left = began + options.seconds - time.monotonic()
        _measure(versions, time.monotonic() + left / (len(options.chapters) - number))
        new = list(watch_rows(versions["before"], versions["after"], chapter))
        found += new
        for row in new:
            print(console_line(row), flush=True)
        if options.out is not None:
            keep(options.out, measured("GPU", found))
    for version in versions.values():
        version.close()
    if models:
        for row in found:
            print(console_line(row), flush=True)
    if options.out is not None:
        keep(options.out, measured("GPU", found))


def _measure(versions: dict[str, Version], until: float) -> None:
    """Rounds of both in turn, three at least, then the kernels."""
    number = 0
    while number < 3 or time.monotonic() < until:
        for version in list(versions.values())[:: -1 if number % 2 else 1]:
            version.add_round(number)
        number += 1
    for version in versions.values():
        version.kernels = version.ask("kernels")
    print(f"({number} rounds)", flush=True)


def watch_rows(before: Version, after: Version, chapter: str) -> Iterator[Row]:
    """Of a watched step, with what the version before took; and how much memory."""
    size = CHAPTERS[chapter]
    for way, target in size.targets.items():
        texts = size.title(way, chapter), size.words(way), "the bare step", str(size)
        row = _row(before, after, (way, "bare"), texts, target)
        peaks = " / ".join(f"{after.kernels[f'{each}, peak']:.2f}" for each in (way, "bare"))
        yield replace(row, absolute=f"{row.absolute}; peak {peaks} GiB, before {before.kernels[f'{way}, peak']:.2f}")
        if way == "norm":
            texts = "watch, norm, against the default set", size.words(way), size.words("watch"), str(size)
            told = f"{after.columns('norm', 'watch')}; before: {before.columns('norm', 'watch')}"
            against = spread(after.ratios("norm", "watch", "wall"))
            yield Row(*texts, against, spread(after.ratios("bare again", "bare", "wall")), told, at_most=1.0)


if __name__ == "__main__":
    main()
