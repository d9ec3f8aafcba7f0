"""The command ``hookline parity``: say how far trainer and engine are apart, and why; `main` calls `parity`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hookline.cli.main import DONE, FAILED
from hookline.cli.screen import tell_found
from hookline.errors import OptionError
from hookline.runs.flags import Show, parse


@dataclass
class ParityOptions:
    """Compare the log-probs of a trainer's model and an engine for the same tokens, and say where they part.

    Exit codes: 0 nothing beyond what rounding explains, 1 there is more, 2 they cannot be compared.

    Examples:
      hookline parity --trainer models/llama --engine http://localhost:8000 --prompts prompts.txt
      hookline parity --trainer models/llama --engine vllm:models/llama --prompts rollouts.jsonl --html parity.html
      hookline parity --trainer new --engine http://localhost:8000 --prompts p.txt --healthy first.json
    """

    trainer: Annotated[str, Show("FOLDER")]
    """The trainer's model: a folder of save_pretrained."""
    engine: Annotated[str, Show("URL|vllm:FOLDER|FOLDER")]
    """A server of hookline or vLLM, vLLM started here, or a folder that is served here."""
    prompts: Annotated[str, Show("FILE")]
    """A prompt on each line; in a .jsonl file each line is a text, token ids, or an object with prompt, completion."""
    new_tokens: Annotated[int, Show("NUMBER")] = 64
    """How many tokens the engine adds to each prompt."""
    temperature: Annotated[float, Show("NUMBER")] = 1.0
    """At which the engine samples."""
    max_outside: Annotated[float | None, Show("SHARE")] = None
    """Fail too if more ratios than this leave [0.9, 1.1]."""
    healthy: Annotated[str | None, Show("FILE")] = None
    """Compare errors of layers with those of a healthy pair."""
    save_healthy: Annotated[str | None, Show("FILE")] = None
    """Take this pair for healthy, and save its errors."""
    html: Annotated[str | None, Show("FILE")] = None
    """Write a page, which opens from disk."""
    json: bool = False
    """Print everything as JSON."""


def parity(arguments: Sequence[str]) -> int:
    """Print how far trainer and engine are apart; return 0 if rounding explains it, 1 if not."""
    options = parse(ParityOptions, arguments, "parity")
    prompts = _read_prompts(options.prompts)
    from hookline.debug.parity.parity import parity as compare

    how: Any = {name: getattr(options, name) for name in ("new_tokens", "temperature", "healthy")}
    how["progress"] = lambda text: print(f"hookline: {text}", file=sys.stderr, flush=True)
    found = compare(options.trainer, options.engine, prompts, **how)
    if options.save_healthy is not None:
        found.save_healthy(options.save_healthy)
    tell_found("parity", found.to_json(), found, as_json=options.json)
    if options.html is not None:
        found.write_html(options.html)
    is_inside = options.max_outside is None or found.gap.outside <= options.max_outside
    return DONE if found.ok and is_inside else FAILED


def _read_prompts(path: str) -> list[Any]:
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        return [json.loads(line) for line in lines] if path.endswith(".jsonl") else lines
    except (OSError, ValueError) as error:
        raise OptionError(f"--prompts {path} cannot be read: {error}") from None
