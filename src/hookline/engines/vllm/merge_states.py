"""Put the hidden states of a request together from all workers, where tensor parallelism has cut them into columns.

`VllmHooks` and the endpoint plugin call `merge_states` with the answers of all workers to ``hookline_take_states``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hookline.engines.vllm.merge_answers import error_of
from hookline.serve.generation_request import StatesOfLayer

__all__ = ["RequestAnswer", "merge_states", "merge_worker_flags", "request_answer"]

_Answer = Mapping[str, Any]
_ELSEWHERE: Final = "NoMatchError"
"""What a worker answers that does not have the layer: it is of another pipeline stage."""


@dataclass(frozen=True)
class RequestAnswer:
    """The hidden states of one request, and how many of its tokens no hook has seen."""

    states: dict[str, StatesOfLayer]
    """By the name of the layer."""
    prompt_tokens: int
    not_computed: int
    """How many tokens of the prompt were taken from the prefix cache."""
    hooks: list[dict[str, Any]]
    """What the hooks of this request did: name, modules, rows, errors, metrics."""
    flags: list[dict[str, Any]]
    """What probes flagged in this request: probe, module, tokens, position, score, stopped."""
    silent: dict[str, str]
    """Layers that were asked for and did not fire, with the cause."""

    def save(self, path: str | Path) -> None:
        """Write the states as a safetensors file: a tensor for each layer, and ``positions/LAYER``."""
        from safetensors.torch import save_file

        tensors = {name: layer.values.contiguous() for name, layer in self.states.items()}
        positions = {f"positions/{name}": torch.tensor(layer.positions) for name, layer in self.states.items()}
        counts = {"prompt_tokens": str(self.prompt_tokens), "not_computed": str(self.not_computed)}
        save_file({**tensors, **positions}, str(path), metadata=counts)


def request_answer(merged: Mapping[str, Any]) -> RequestAnswer:
    """Return what `merge_states` gives, with tensors in place of bytes."""
    states = {
        name: StatesOfLayer(list(layer["positions"]), _tensor(layer)) for name, layer in merged["hidden_states"].items()
    }
    return RequestAnswer(
        states,
        merged["prompt_tokens"],
        merged["not_computed"],
        list(merged["hooks"]),
        list(merged["flags"]),
        dict(merged["silent"]),
    )


def merge_states(answers: Sequence[_Answer]) -> dict[str, Any]:
    """Return the hidden states of a request as plain data.

    ``hidden_states`` has ``{"dtype", "shape", "positions", "data"}`` for each layer, with bytes as data; ``silent`` has
    the layers that did not fire. ``prompt_tokens`` and ``not_computed`` are counts.

    Raises:
        HookNameError: No worker keeps any for that key.
        OptionError: What the request asked for cannot be had.
    """
    failed = [answer for answer in answers if answer.get("error") is not None]
    serious = [answer for answer in failed if answer["error"]["type"] != _ELSEWHERE]
    if serious or len(failed) == len(answers):
        error = error_of(serious or failed)
        assert error is not None
        raise error
    good = sorted((answer for answer in answers if answer.get("error") is None), key=lambda each: int(each["rank"]))
    names = list(dict.fromkeys(name for answer in good for name in answer["states"]))
    silent = {name: cause for answer in good for name, cause in answer["silent"].items()}
    return {
        "hidden_states": {
            name: _layer([each["states"][name] for each in good if name in each["states"]]) for name in names
        },
        "silent": {name: cause for name, cause in silent.items() if name not in names},
        "hooks": _hooks([answer["hooks"] for answer in good]),
        "flags": merge_worker_flags(answers),
        "prompt_tokens": good[0]["prompt_tokens"],
        "not_computed": good[0]["not_computed"],
    }


def _layer(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one layer of all workers that have rows of it."""
    with_rows = [each for each in workers if each["positions"]] or list(workers[:1])
    first = with_rows[0]
    whole = {key: first[key] for key in ("dtype", "shape", "positions", "data")}
    shard = first["shard"]
    if shard is None:
        return whole
    merged = join_columns([_tensor(each) for each in with_rows], shard["sizes"], shard["replicas"], first["part"])
    data = merged.contiguous().view(torch.uint8).numpy().tobytes()
    return {**whole, "shape": list(merged.shape), "data": data}


def _hooks(workers: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the hooks of a request as all workers saw them: figures of the first, errors of all."""
    found = []
    for same in zip(*(hooks for hooks in workers if hooks), strict=False):
        errors = [each["last_error"] for each in same if each["last_error"]]
        total = sum(each["errors"] for each in same)
        found.append({**same[0], "errors": total, "last_error": errors[0] if errors else None})
    return found


def merge_worker_flags(answers: Sequence[_Answer]) -> list[dict[str, Any]]:
    """Return the flags of a request, one for each probe and module; a module may be in several workers or in one.

    Of two probes of one name, the first is the first in every worker.

    Workers of one pipeline stage see the same tokens, so that nothing is added up.
    """
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for answer in sorted(answers, key=lambda each: int(each["rank"])):
        seen: Counter[tuple[str, str]] = Counter()
        for flag in answer.get("flags", ()):
            named = flag["probe"], flag["module"]
            place = *named, seen[named]
            seen[named] += 1
            known = found.setdefault(place, flag)
            positions = [each["position"] for each in (known, flag) if each["position"] is not None]
            found[place] = {
                **known,
                "tokens": max(known["tokens"], flag["tokens"]),
                "position": min(positions, default=None),
                "score": max(known["score"], flag["score"]),
                "stopped": known["stopped"] or flag["stopped"],
            }
    return list(found.values())


def join_columns(
    tensors: Sequence[Tensor], sizes: Sequence[int], replicas: Sequence[int], part: int | None = None
) -> Tensor:
    """Return the columns of all workers in the order that one worker alone would have.

    Args:
        tensors: One for each worker, by rank.
        sizes: How many columns each part has in a worker: queries, keys and values, for example.
        replicas: How many workers in a row have the same columns of a part; empty if every worker has all columns.
        part: Which part to return; None for all of them.
    """
    cut: Any = torch.split  # which has no types
    pieces = [cut(tensor, list(sizes), dim=1) for tensor in tensors]
    if not replicas:
        pieces, replicas = pieces[:1], [1] * len(sizes)
    joined = [torch.cat([each[number] for each in pieces[::step]], dim=1) for number, step in enumerate(replicas)]
    return joined[part] if part is not None else torch.cat(joined, dim=1)


def _tensor(layer: Mapping[str, Any]) -> Tensor:
    if layer["dtype"] is None:
        return torch.empty(0, 0)
    return torch.frombuffer(bytearray(layer["data"]), dtype=getattr(torch, layer["dtype"])).reshape(layer["shape"])
