"""Write the last steps of a run to a file, and read them back.

`FlightRecorder` writes by `write_flight`; users read by `read_flight`. The file is JSON and is replaced as a whole, so
whatever kills the process, the one written last is complete. Random streams that several steps share are in it once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from hookline.errors import OptionError
from hookline.files import replace_file
from hookline.guard.rng import cuda_states, numpy_state, set_cuda_states, set_numpy_state, set_state
from hookline.plain import to_plain
from hookline.report.minutes_before import FLIGHT_FORMAT, FLIGHT_VERSION
from hookline.tables import ShownAsTable, Table

__all__ = ["Flight", "Streams", "read_flight", "write_flight"]


class Streams:
    """The random streams of torch, Python and NumPy at one moment; taken without waiting for a device."""

    __slots__ = ("cuda", "numpy", "python", "torch")

    def __init__(self) -> None:
        self.torch = torch.default_generator.get_state()
        self.cuda = cuda_states()
        self.python = random.getstate()
        self.numpy = numpy_state()

    def to_bytes(self) -> dict[str, bytes]:
        """Return the states as bytes, by name."""
        found = {"torch": self.torch.numpy().tobytes()}
        found |= {f"cuda:{index}": state.numpy().tobytes() for index, state in enumerate(self.cuda or ())}
        version, keys, gauss = self.python
        found["python"] = json.dumps([version, list(keys), gauss]).encode()
        if self.numpy["bit_generator"] == "MT19937":
            state = {
                **self.numpy,
                "state": {"key": self.numpy["state"]["key"].tolist(), "pos": self.numpy["state"]["pos"]},
            }
            found["numpy"] = json.dumps(state, default=int).encode()
        return found


def set_streams(states: Mapping[str, bytes]) -> None:
    """Set the random streams to what `Streams.to_bytes` returned."""
    for name, state in states.items():
        if name == "python":
            version, keys, gauss = json.loads(state)
            random.setstate((version, tuple(keys), gauss))
        elif name == "numpy":
            found = json.loads(state)
            found["state"]["key"] = np.array(found["state"]["key"], dtype=np.uint32)
            set_numpy_state(found)
        elif name == "torch":
            set_state(torch.default_generator, torch.frombuffer(bytearray(state), dtype=torch.uint8))
    if torch.cuda.is_available():
        of_devices = [state for name, state in sorted(states.items()) if name.startswith("cuda:")]
        set_cuda_states(torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in of_devices)


def write_flight(path: Path, reason: str, steps: list[tuple[dict[str, Any], Streams | None]]) -> None:
    """Write steps, each with its random streams, and why they are written."""
    streams: dict[str, str] = {}
    rows = []
    for facts, taken in steps:
        keys = {}
        for name, state in {} if taken is None else taken.to_bytes().items():
            key = hashlib.blake2b(state, digest_size=8).hexdigest()
            streams.setdefault(key, base64.b64encode(state).decode())
            keys[name] = key
        rows.append({**facts, "random": keys})
    found = {"format": FLIGHT_FORMAT, "version": FLIGHT_VERSION, "reason": reason, "steps": rows, "streams": streams}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(to_plain(found), allow_nan=False))


@dataclass(frozen=True)
class Flight(ShownAsTable):
    """The last steps of a run, as a recorder wrote them; prints as a table.

    Recipe: ``flight = hookline.debug.read_flight("runs/x/flight_recorder.json")``; then ``print(flight)``,
    ``flight.steps[-1]["statistics"]``, ``flight.set_random(-1)``.
    """

    reason: str
    """Why it was written."""
    steps: list[dict[str, Any]]
    """Each step: its number, epoch, time, loss, learning rate, batch, statistics by place."""
    streams: dict[str, str]

    def set_random(self, index: int) -> None:
        """Set the random streams to the beginning of the step at ``index`` of ``steps``."""
        keys = self.steps[index].get("random", {})
        set_streams({name: base64.b64decode(self.streams[key]) for name, key in keys.items()})

    def _table(self) -> Table:
        rows = [[str(step.get(name, "")) for name in _COLUMNS] for step in self.steps]
        return Table(_COLUMNS, rows, numbers=(0, 1, 2, 3), title=f"written because of {self.reason}", rule=False)


_COLUMNS: Final = ("step", "epoch", "loss", "lr", "batch", "bad")


def read_flight(path: str | Path) -> Flight:
    """Read what a `FlightRecorder` wrote.

    Recipe: ``print(hookline.debug.read_flight("runs/mod_arithmetic/random/flight_recorder.json"))``
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"{str(path)!r} is no file of a flight recorder: {error}.") from None
    if not isinstance(found, dict) or found.get("format") != FLIGHT_FORMAT:
        raise OptionError(f"{str(path)!r} is no file of a flight recorder; FlightRecorder writes one.")
    version = found.get("version")
    if version != FLIGHT_VERSION:
        raise OptionError(f"{str(path)!r} has version {version!r}, and this hookline reads {FLIGHT_VERSION}.")
    return Flight(found["reason"], found["steps"], found["streams"])
