"""Hidden states of single requests in a flat batch, on a small model with the habits of vLLM, and no engine."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from torch import nn

from hookline.engines import request_results
from hookline.engines.request_results import BegunRequest, RequestOptions, RequestResults, find_sources
from hookline.engines.session import Session
from hookline.errors import HookNameError, OptionError
from hookline.factories import stream_of
from hookline.observe.tokens import Tokens

D = 4


class QKVParallelLinear(nn.Linear):
    """A stand-in for the class of that name in vLLM."""

    output_partition_sizes = (4, 2, 2)

    def forward(self, x: Any) -> Any:
        return super().forward(x), None


class Norm(nn.Module):
    def forward(self, x: Any, residual: Any) -> Any:
        residual.add_(x)  # in place, as vLLM's kernels do
        return residual * 2, residual


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(D, 8)
        self.norm = Norm()

    def forward(self, x: Any, residual: Any) -> Any:
        x, residual = self.norm(x, residual)
        return self.qkv_proj(x)[0][:, :D], residual


class Model(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Any) -> Any:
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual


class Worker:
    """Runs steps of (request, first position, tokens); the numbers of a token come from both alone."""

    def __init__(self, **options: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = Model().eval()
            self.tokens = {name: torch.randn(12, D) for name in "abc"}
        self.session = Session(self.model, stream=stream_of)
        self.results = RequestResults(self.session, **options)

    def open(
        self, id: str, key: str | None = None, place: tuple[int, ...] = (), prompt: int = 6, **wanted: Any
    ) -> None:
        states = {"layers": ["layers.#"], **wanted}
        self.results.open(BegunRequest(id, id, {"key": key, "hidden_states": states}, prompt, place=place))

    def step(self, *rows: tuple[str, int, int]) -> torch.Tensor:
        names, firsts, counts = zip(*rows, strict=True)
        table = Tokens(names, counts, firsts, ("decode",) * len(rows), keys=names)
        with torch.inference_mode(), self.session.step(table):
            output = self.model(torch.cat([self.tokens[name][first : first + count] for name, first, count in rows]))
        self.results.collect({name: name for name in names})
        return output

    def taken(self, key: str) -> dict[str, torch.Tensor]:
        (entry,) = self.results.take(key)
        assert entry["error"] is None, entry
        return {
            name: torch.frombuffer(bytearray(each["data"]), dtype=torch.float32).reshape(each["shape"])
            for name, each in entry["states"].items()
        }

    def alone(self, name: str, layer: int) -> torch.Tensor:
        """Return the residual stream behind a layer for one request, without hooks."""
        x, residual = self.tokens[name].clone(), torch.zeros(12, D)
        with torch.no_grad():
            for number in range(layer + 1):
                x, residual = self.model.layers[number](x, residual.clone())
        return x + residual


STEPS = [
    [("a", 0, 4)],  # the first chunk of a prompt
    [("a", 4, 2), ("b", 0, 6), ("c", 0, 3)],
    [("c", 3, 1), ("a", 6, 1), ("b", 6, 1)],
    [("b", 7, 1), ("a", 7, 1)],
]


def test_each_request_gets_its_own_rows_and_no_number_changes() -> None:
    """Chunks, other orders, neighbours that want other layers or nothing; observers leave the same bits."""
    plain, worker = Worker(), Worker()
    worker.open("a")
    worker.open("b", layers=["layers.1"])
    for rows in STEPS:
        assert torch.equal(worker.step(*rows), plain.step(*rows))
    for name, layers in (("a", (0, 1)), ("b", (1,))):
        found = worker.taken(name)
        assert list(found) == [f"layers.{layer}" for layer in layers]
        for layer in layers:
            torch.testing.assert_close(found[f"layers.{layer}"], worker.alone(name, layer)[:8])
    assert not worker.session.is_active
    assert not worker.model.layers[0]._forward_hooks


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, list(range(8))),
        ({"positions": "last"}, [5, 6, 7]),
        ({"phase": "prefill"}, list(range(6))),
        ({"phase": "decode"}, [6, 7]),
        ({"window": [-2, None]}, [4, 5, 6, 7]),
        ({"window": [1, 3]}, [1, 2]),
        ({"window": [0, -1], "phase": "decode"}, []),
    ],
)
def test_windows_of_tokens(options: Any, expected: list[int]) -> None:
    worker = Worker()
    worker.open("a", **options)
    for rows in STEPS:
        worker.step(*rows)
    (entry,) = worker.results.take("a")
    assert entry["states"]["layers.1"]["positions"] == expected


def test_a_request_that_is_put_off_and_run_again_has_each_position_once() -> None:
    worker = Worker()
    worker.open("a")
    for rows in ([("a", 0, 4)], [("a", 0, 6)], [("a", 6, 1)]):
        worker.step(*rows)
    torch.testing.assert_close(worker.taken("a")["layers.0"], worker.alone("a", 0)[:7])


def test_inputs_and_parts_of_fused_projections() -> None:
    worker = Worker()
    worker.open("a", layers=["layers.1.k_proj", "layers.0.qkv_proj"])
    worker.open("b", layers=["layers.1"], of="input")
    worker.step(("a", 0, 6), ("b", 0, 6))
    found = worker.taken("a")
    assert {name: tuple(one.shape) for name, one in found.items()} == {
        "layers.1.k_proj": (6, 2),
        "layers.0.qkv_proj": (6, 8),
    }
    torch.testing.assert_close(worker.taken("b")["layers.1"], worker.alone("b", 0)[:6])
    fused = worker.model.layers[1].qkv_proj
    with torch.no_grad():
        expected = nn.functional.linear(2 * worker.alone("a", 0)[:6], fused.weight, fused.bias)
    torch.testing.assert_close(found["layers.1.k_proj"], expected[:, 4:6])


def test_what_each_worker_has_a_part_of_is_refused() -> None:
    model = Worker().model
    assert find_sources(model, 2, ["layers.#"], "output")
    for layer in ("layers.0.qkv_proj", "layers.0.k_proj"):
        with pytest.raises(OptionError, match="each worker has a part"):
            find_sources(model, 2, [layer], "output")


def test_what_is_held_stays_within_its_bound() -> None:
    """States that ended and nobody took go first, then the request with the most of them; others keep theirs."""
    one_request = 2 * 6 * D * 4
    worker = Worker(most_bytes=one_request + 2 * D * 4)
    worker.open("a")
    worker.step(("a", 0, 6))
    worker.results.close("a")
    worker.open("b")
    worker.open("c", prompt=1)
    worker.step(("b", 0, 6), ("c", 0, 1))
    with pytest.raises(HookNameError):
        worker.results.take("a")
    worker.step(("b", 6, 1))
    assert worker.results.nbytes == 2 * D * 4
    (entry,) = worker.results.take("b")
    assert "captured_bytes" in entry["error"]["message"]
    torch.testing.assert_close(worker.taken("c")["layers.0"], worker.alone("c", 0)[:1])
    assert worker.results.nbytes == 0


def test_a_piece_holds_no_memory_of_its_neighbours() -> None:
    worker = Worker()
    worker.open("a")
    worker.open("b")
    worker.step(("a", 0, 1), ("b", 0, 6))
    states = worker.results._running["a"].states
    pieces = [piece for each in states.pieces.values() for _, piece in each]
    assert [piece.untyped_storage().nbytes() for piece in pieces] == [D * 4] * 2
    worker.results.clear()


def test_the_answers_under_one_key_come_in_their_order() -> None:
    key, worker = str(uuid.uuid4()), Worker()
    worker.open("b", key, (1, 0))
    worker.open("a", key.upper(), (0, 1))
    worker.open("c", key, (0, 0), layers=["nope"])
    worker.step(("a", 0, 6), ("b", 0, 6))
    found = worker.results.take(key)
    assert [(each["request"], each["error"] and each["error"]["type"]) for each in found] == [
        ("c", "NoMatchError"),
        ("a", None),
        ("b", None),
    ]
    assert not worker.session.is_active


def test_what_nobody_takes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_results, "_MOST_KEPT", 2)
    worker = Worker()
    for name in "abc":
        worker.open(name)
        worker.step((name, 0, 3))
        worker.results.close(name)
    with pytest.raises(HookNameError):
        worker.results.take("a")
    assert worker.taken("c")["layers.0"].shape == (3, D)


def test_flags_that_nobody_asked_for_push_out_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe of the engine may flag every request of a busy server, whose clients never ask."""
    monkeypatch.setattr(request_results, "_MOST_KEPT", 2)
    worker = Worker()
    head = {"layers": [{"weight": [[0.0] * D], "bias": [9.0]}]}
    config = {"head": head, "action": "flag", "add_residual": True}
    spec = {"target_modules": ["layers.0"], "hook_factory": "hookline.factories:probe", "config": config}
    worker.session.live.add(spec)
    worker.open("a")
    worker.step(("a", 0, 3))
    worker.results.close("a")
    for name in "bcbc":
        worker.results.open(BegunRequest(name, name, None, 6))
        worker.step((name, 0, 3))
        worker.results.close(name)
    assert worker.taken("a")["layers.0"].shape == (3, D)
    with pytest.raises(HookNameError):
        worker.results.take("c")


@pytest.mark.parametrize(
    "wrong",
    [
        "{",
        "[" * 100_000,
        3,
        {"hiden_states": {}},
        {"key": ""},
        {"key": "victim"},
        {"key": 7},
        {"hooks": 3},
        {"hidden_states": []},
        {"hidden_states": {}},
        {"hidden_states": {"layers": None}},
        {"hidden_states": {"layers": ["a"] * 257}},
        {
            "hidden_states": {"layers": ["a"]},
            "hooks": [
                {
                    "hook_factory": "hookline.factories:steer",
                    "config": {"vector": [1.0]},
                    "target_modules": ["a"] * 200,
                    "exclude": ["b"] * 56,
                }
            ],
        },
        {"hidden_states": {"layers": ["a"], "windw": 1}},
        {"hidden_states": {"layers": ["a"], "positions": [0]}},
        {"hidden_states": {"layers": ["a"], "window": [1]}},
        {"hidden_states": {"layers": ["a"], "window": [0, 1], "positions": "last"}},
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_a_request_cannot_ask(wrong: Any) -> None:
    with pytest.raises(OptionError):
        RequestOptions.read(wrong)
    worker = Worker()
    worker.results.open(BegunRequest("a", "a", wrong, 3))
    worker.step(("a", 0, 3))  # nobody else is harmed
    assert worker.results.take("a")[0]["error"]["type"] == "OptionError"


def test_what_is_wrong_with_options_is_told_under_their_key() -> None:
    """The client knows no other; also where the mistake is in the options themselves."""
    key, worker = str(uuid.uuid4()), Worker()
    for wrong in ({"hiden_states": {}}, {"hidden_states": {"layers": ["a"], "window": [5, 2]}}):
        worker.results.open(BegunRequest("a", "a", {"key": key, **wrong}, 3))
        assert worker.results.take(key)[0]["error"]["type"] == "OptionError"
