"""Carry what probes find out about requests to the engine that answers them: flags, and the wish to stop.

``probe`` adds to the notes of the table of tokens; an engine runs its forwards with ``table.noted()``, and calls
`read_flags` with it when the tokens of the forward have been chosen. Scores stay on their device until then.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hookline.observe.host_values import on_host

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.observe.tokens import ChosenTokens, Tokens


@dataclass(frozen=True, slots=True)
class RequestFlag:
    """What one probe found at one module, in one request."""

    probe: str
    module: str
    tokens: int = 1
    """How many tokens scored over the threshold."""
    position: int | None = None
    """Which was the first of them in the sequence of prompt and answer, from 0."""
    score: float = 1.0
    """The highest score."""
    stops: bool = False
    """Whether the answer is to end."""

    def to_plain(self, *, stopped: bool) -> dict[str, Any]:
        """Return the flag as answers have it; ``stopped`` says whether the engine did end the answer."""
        found = asdict(self) | {"stopped": stopped}
        del found["stops"]
        return found


def note_scores(flag: RequestFlag, chosen: ChosenTokens, scores: Tensor, threshold: float) -> None:
    """Note the scores of tokens, if an engine reads them; one over ``threshold`` is a ``flag`` with its numbers."""
    if chosen.tokens.notes is not None:
        chosen.tokens.notes.append((flag, chosen, scores, threshold))


def read_flags(tokens: Tokens) -> dict[str, list[RequestFlag]]:
    """Return by request what was flagged in the forward of ``tokens``, and drop it; one transfer for each device."""
    noted = list(tokens.notes or ())
    if tokens.notes:
        tokens.notes.clear()
    found: dict[str, list[RequestFlag]] = {}
    all_scores = on_host(scores.flatten() for _, _, scores, _ in noted)
    for (flag, chosen, _, threshold), scores in zip(noted, all_scores, strict=True):
        for (request, position), score in zip(chosen.owners(), scores.tolist(), strict=True):
            if score > threshold:
                found.setdefault(request, []).append(replace(flag, position=position, score=score))
    return {request: merge_flags(flags) for request, flags in found.items()}


def merge_flags(flags: list[RequestFlag]) -> list[RequestFlag]:
    """Return one flag for each probe and module, in the order in which they came."""
    found: dict[tuple[str, str], RequestFlag] = {}
    for flag in flags:
        place = flag.probe, flag.module
        known = found.get(place)
        if known is not None:
            tokens, score = known.tokens + flag.tokens, max(known.score, flag.score)
            flag = replace(known, tokens=tokens, score=score, stops=known.stops or flag.stops)
        found[place] = flag
    return list(found.values())
