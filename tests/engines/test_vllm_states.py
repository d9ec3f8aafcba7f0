"""Test hidden states of single requests in a flat batch, with a small model that has vLLM's habits and no engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookline.engines.vllm.merge_states import join_columns, merge_states, request_answer
from hookline.engines.vllm.request_options import StatesPlan, request_options
from hookline.engines.vllm.request_states import RequestStates
from hookline.engines.vllm.step_rows import BookedRequest, StepRow
from hookline.errors import HookNameError, OptionError

D = 4


class QKVParallelLinear(nn.Linear):
    """A stand-in for the class of that name in vLLM."""

    output_partition_sizes = (4, 2, 2)
    num_kv_head_replicas = 1

    def forward(self, x):
        return super().forward(x), None


class Norm(nn.Module):
    def forward(self, x, residual):
        residual.add_(x)  # in place, as vLLM's kernels do
        return residual * 2, residual


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = QKVParallelLinear(D, 8)
        self.norm = Norm()

    def forward(self, x, residual):
        x, residual = self.norm(x, residual)
        return self.qkv_proj(x)[0][:, :D], residual


class Model(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual


def plan(**options):
    return StatesPlan.read({"layers": ["layers.#"], **options})


def run(states, model, rows, tokens):
    """Run one step; the numbers of a token come from its request and position alone."""
    states.begin_step(rows)
    with torch.no_grad():
        model(torch.cat([tokens[row.request_id][row.first : row.first + row.count] for row in rows]))
    states.end_step()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def tokens():
    torch.manual_seed(1)
    return {name: torch.randn(12, D) for name in "abc"}


def alone(model, tokens, name, layer):
    """Return the residual stream behind a layer for one request, without hooks."""
    x, residual = tokens[name].clone(), torch.zeros_like(tokens[name])
    with torch.no_grad():
        for number in range(layer + 1):
            x, residual = model.layers[number](x, residual.clone())
    return x + residual


def answer(states, key):
    """Return what a worker answers."""
    return {"rank": 0, "hooks": [], "flags": [], **states.take(key)}


def booked(name, prompt=6, cached=0):
    return BookedRequest(name, name, prompt, cached)


def opened(model, *requests, most_bytes=1 << 20, **options):
    states = RequestStates(model, tp_size=1, most_bytes=most_bytes)
    for name in requests:
        states.open(name, booked(name), plan(**options))
    return states


STEPS = [
    [StepRow("a", 0, 4, 6)],  # the first chunk of a prompt
    [StepRow("a", 4, 2, 6), StepRow("b", 0, 6, 6), StepRow("c", 0, 3, 3)],
    [StepRow("b", 6, 1, 6), StepRow("a", 6, 1, 6), StepRow("c", 3, 1, 3)],
    [StepRow("a", 7, 1, 6), StepRow("b", 7, 1, 6)],
]


def test_each_request_gets_its_own_rows_and_no_other(model, tokens):
    states = opened(model, "a", "b")
    for rows in STEPS:
        run(states, model, rows, tokens)
    for name in "ab":
        merged = request_answer(merge_states([answer(states, name)]))
        for layer in range(2):
            found = merged.states[f"layers.{layer}"]
            assert found.positions == list(range(8))
            torch.testing.assert_close(found.values, alone(model, tokens, name, layer)[:8])
    with pytest.raises(AssertionError):  # negative control: the rows of b are not those of a
        torch.testing.assert_close(found.values, alone(model, tokens, "a", 1)[:8])
    with pytest.raises(HookNameError, match="'c'"):
        states.take("c")
    assert not states.is_active
    assert not any(module._forward_hooks for module in model.modules())


def test_observers_change_no_bit(model, tokens):
    def outputs(states):
        found = []
        for rows in STEPS:
            states.begin_step(rows)
            x = torch.cat([tokens[row.request_id][row.first : row.first + row.count] for row in rows])
            with torch.no_grad():
                found.append(model(x))
            states.end_step()
        return found

    without = outputs(opened(model))
    with_states = opened(model, "a", "b")
    assert all(torch.equal(one, other) for one, other in zip(without, outputs(with_states), strict=True))
    model.layers[0].qkv_proj.bias.data[0] += 1e-6  # negative control
    assert not all(torch.equal(one, other) for one, other in zip(without, outputs(with_states), strict=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, list(range(8))),
        ({"positions": "last"}, [5, 6, 7]),
        ({"phase": "prefill"}, list(range(6))),
        ({"phase": "decode"}, [6, 7]),
        ({"positions": [0, -1, 7]}, [0, 5, 7]),
        ({"window": [-2, None]}, [4, 5, 6, 7]),
        ({"window": [1, 3]}, [1, 2]),
        ({"window": [0, -1], "phase": "decode"}, []),
    ],
)
def test_windows_of_tokens(model, tokens, options, expected):
    states = opened(model, "a", **options)
    for rows in STEPS:
        run(states, model, rows, tokens)
    found = states.take("a")["states"]["layers.1"]
    assert found["positions"] == expected
    if expected:
        merged = request_answer(
            merge_states(
                [
                    {
                        "rank": 0,
                        "states": {"x": found},
                        "silent": {},
                        "hooks": [],
                        "flags": [],
                        "prompt_tokens": 6,
                        "not_computed": 0,
                    }
                ]
            )
        )
        torch.testing.assert_close(merged.states["x"].values, alone(model, tokens, "a", 1)[expected])


def test_a_request_that_is_put_off_and_run_again_has_each_position_once(model, tokens):
    states = opened(model, "a")
    for rows in (STEPS[0], [StepRow("a", 0, 6, 6)], [StepRow("a", 6, 1, 6)]):
        run(states, model, rows, tokens)
    assert states.take("a")["states"]["layers.0"]["positions"] == list(range(7))


def test_inputs_and_parts_of_fused_projections(model, tokens):
    states = RequestStates(model, tp_size=1, most_bytes=1 << 20)
    asked = StatesPlan.read({"layers": ["layers.1.k_proj", "layers.0.qkv_proj"]})
    states.open("a", booked("a"), asked)
    states.open("b", booked("b"), plan(layers=["layers.1"], of="input"))
    run(states, model, [StepRow("a", 0, 6, 6), StepRow("b", 0, 6, 6)], tokens)
    found = request_answer(merge_states([answer(states, "a")])).states
    assert {name: tuple(one.values.shape) for name, one in found.items()} == {
        "layers.1.k_proj": (6, 2),
        "layers.0.qkv_proj": (6, 8),
    }
    entered = request_answer(merge_states([answer(states, "b")])).states["layers.1"]
    torch.testing.assert_close(entered.values, alone(model, tokens, "b", 0)[:6])
    normed = 2 * alone(model, tokens, "a", 0)[:6]
    expected = torch.nn.functional.linear(normed, model.layers[1].qkv_proj.weight, model.layers[1].qkv_proj.bias)
    torch.testing.assert_close(found["layers.1.k_proj"].values, expected[:, 4:6].detach())


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_columns_of_several_workers_are_put_together(ranks, replicas):
    """Cut queries, keys and values as vLLM does; keys and values are the same in ``replicas`` workers in a row."""
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 8), torch.randn(3, 4), torch.randn(3, 4)
    cut = []
    for rank in range(ranks):
        own = rank // replicas
        kv = 4 * replicas // ranks
        cut.append(
            torch.cat(
                [
                    q[:, rank * 8 // ranks : (rank + 1) * 8 // ranks],
                    k[:, own * kv : (own + 1) * kv],
                    v[:, own * kv : (own + 1) * kv],
                ],
                1,
            )
        )
    sizes = (8 // ranks, 4 * replicas // ranks, 4 * replicas // ranks)
    assert torch.equal(join_columns(cut, sizes, (1, replicas, replicas)), torch.cat([q, k, v], 1))
    assert torch.equal(join_columns(cut, sizes, (1, replicas, replicas), 1), k)
    assert torch.equal(join_columns([q, q], (8,), ()), q)


def test_a_budget_fails_the_request_that_exceeds_it(model, tokens):
    one_request = 2 * 6 * D * 4
    states = opened(model, "a", most_bytes=one_request)
    run(states, model, [StepRow("a", 0, 6, 6)], tokens)
    states.close("a")
    states.open("b", booked("b"), plan())
    run(states, model, [StepRow("b", 0, 6, 6)], tokens)  # those of a are dropped: they ended, and nobody took them
    with pytest.raises(HookNameError):
        states.take("a")
    run(states, model, [StepRow("b", 6, 1, 6)], tokens)
    with pytest.raises(OptionError, match="captured_bytes"):
        states.take("b")


def test_two_requests_with_one_key_get_nothing_of_each_other(model, tokens):
    states = RequestStates(model, tp_size=1, most_bytes=1 << 20)
    states.open("same", booked("a"), plan())
    states.open("same", booked("b"), plan())
    run(states, model, [StepRow("a", 0, 6, 6), StepRow("b", 0, 6, 6)], tokens)
    torch.testing.assert_close(
        request_answer(merge_states([answer(states, "same")])).states["layers.0"].values,
        alone(model, tokens, "a", 0)[:6],
    )  # the first keeps its own
    with pytest.raises(OptionError, match="Another request"):
        states.take("b")
    states.open("n", booked("0_p"), plan())
    states.open("n", booked("1_p"), plan())  # the second answer to one prompt
    assert states.take("1_n")
    assert states.take("n")
    assert states.drop("n") is False
    assert not states.is_active


def test_what_a_request_may_say():
    found = request_options('{"key": "k", "hidden_states": {"layers": "model.norm", "window": [0, 4]}}')
    assert found.states is not None
    assert (found.key, found.states.wanted.layers, found.states.window) == ("k", ("model.norm",), (0, 4))
    for wrong in (
        "{",
        3,
        {"hiden_states": {}},
        {"key": ""},
        {"hidden_states": []},
        {"hidden_states": {}},
        {"hidden_states": {"layers": None}},
        {"hidden_states": {"layers": ["a"], "windw": 1}},
        {"hidden_states": {"layers": ["a"], "window": [1]}},
        {"hidden_states": {"layers": ["a"], "window": [3, 1]}},
        {"hidden_states": {"layers": ["a"], "window": [-1, -4]}},
        {"hidden_states": {"layers": ["a"], "window": [2, 2]}},
        {"hidden_states": {"layers": ["a"], "window": [0, 1], "positions": "last"}},
    ):
        with pytest.raises(OptionError):
            request_options(wrong)
