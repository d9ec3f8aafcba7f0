"""Specs and run files that are spoiled at random.

Each is either taken or refused by an error of hookline that says something, and one that is refused leaves no hook.
"""

from __future__ import annotations

import json
import logging
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import yaml
from helpers_cases import Case, Part
from mutated import mutate, mutate_text
from torch import nn

import hookline as hl
from hookline.runs.read import read

__all__ = ["PART"]

ROUNDS = 20
"""Files of one case."""
SPECS: list[dict[str, Any]] = [
    {"name": "a", "target_modules": ["h.#"], "hook_factory": "hookline.factories:activation_stats"},
    {"name": "b", "target_modules": "*", "hook_factory": "hookline.factories:nan_alarm", "config": {"kind": "nan"}},
    {
        "name": "c", "target_modules": ["h.0", "h.1"], "hook_factory": "fuzzed_files:make", "on": "backward",
        "observe": True, "every": 2, "exclude": ["h.1"], "on_error": "warn", "enabled": True,
    },
]  # fmt: skip
RUN: dict[str, Any] = {
    "experiment": "mod_arithmetic",
    "seed": 3,
    "config": {"epochs": 2, "lr": 0.001},
    "hooks": {"with_hooks": "observers", "names": ["norms"]},
    "trackers": [{"tracker": "relu_activations", "options": {}}],
    "specs": SPECS[:1],
    "sinks": {"csv": True, "others": []},
}


def make(config: dict[str, Any]) -> Any:
    """Return a hook that does nothing."""
    return lambda *args: None


def _model() -> nn.Module:
    model = nn.Module()
    model.h = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    return model


def _try_specs(rng: random.Random) -> tuple[str, str]:
    """Attach spoiled specs; return what is wrong, and what was refused."""
    specs, model = mutate(SPECS, rng), _model()
    try:
        handles = hl.register_hooks(model, specs, allow=["hookline.factories.*", "fuzzed_files.*"])
        handles.remove()
    except hl.HooklineError as error:
        hl.assert_no_hooks(model)
        return ("" if str(error) else f"an error without words: {specs!r:.200}"), type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.100} for specs {specs!r:.300}", ""
    hl.assert_no_hooks(model)
    return "", ""


def _try_run_file(rng: random.Random, folder: Path) -> tuple[str, str]:
    """Read a spoiled run file; return what is wrong, and what was refused."""
    values = mutate(RUN, rng)
    kind = rng.choice(["yaml", "json", "text"])
    path = folder / ("run.json" if kind == "json" else "run.yaml")
    text = json.dumps(values) if kind == "json" else yaml.safe_dump(RUN if kind == "text" else _printable(values))
    path.write_text(mutate_text(text, rng) if kind == "text" else text, errors="surrogatepass")
    try:
        read([str(path)])
    except hl.HooklineError as error:
        return ("" if str(error) else f"an error without words: {text:.200}"), type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.100} for the file {path.read_bytes()!r:.300}", ""
    return "", ""


def _printable(values: Any) -> Any:
    return json.loads(json.dumps(values).replace("\\ud800", "").replace("\\u0000", ""))


def run_case(number: int) -> Case:
    """Try some spoiled specs and run files."""
    logging.disable(logging.WARNING)  # each spec that matches nothing says so
    rng, wrong, refused = random.Random(number), [], 0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(ROUNDS):
            found = _try_specs(rng) if rng.random() < 0.5 else _try_run_file(rng, Path(folder))
            wrong += [found[0]] if found[0] else []
            refused += bool(found[1])
    return Case(number, ROUNDS, wrong, counts={"refused": refused, "taken": ROUNDS - refused - len(wrong)})


PART = Part(
    name="files",
    does="specs and run files with other types, lost and foreign keys, odd texts and broken syntax",
    holds="every answer is an error of hookline or a success, and no hook is left",
    goal=5_000,
    quick=100,
    run_case=run_case,
)
