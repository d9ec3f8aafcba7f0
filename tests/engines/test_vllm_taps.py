"""Taps in compiled code that never looks at its guards again, as vLLM's: hooks fire, edit and go all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.engines.vllm.extension import EngineFacts, check_taps
from hookline.engines.vllm.start_options import StartOptions
from hookline.engines.vllm.taps import Taps
from hookline.errors import NoMatchError, OptionError

FACTS: dict[str, Any] = {"rank": 0, "tp_size": 1}


class Block(nn.Module):
    """Return what is to be added, and the stream, as vLLM's decoder layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        stream = delta + residual
        return self.linear(stream).tanh(), stream


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        delta, residual = x, torch.zeros_like(x)
        for block in self.blocks:
            delta, residual = block(delta, residual)
        return self.norm(delta + residual)


@pytest.fixture(params=["aot_eager", "inductor"])
def tapped(request: pytest.FixtureRequest) -> Any:
    """A model with taps, its compiled forward, and an input; warmed up."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().eval()
    taps = Taps(model, ["blocks.#", "norm"])
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled = torch.compile(model.forward, fullgraph=True, backend=request.param, options=options)

    def run(x: Tensor) -> Tensor:
        taps.begin()
        try:
            with torch.inference_mode():
                return compiled(x)  # type: ignore[no-any-return]
        finally:
            taps.end()

    x = torch.randn(3, 4)
    run(x)
    return model, taps, run, x


def test_hooks_see_and_change_what_taps_carry(tapped: Any) -> None:
    """The second row alone is changed, the numbers are those of the eager model, and all is as before afterwards."""
    model, taps, run, x = tapped
    assert taps.reached == {"blocks.0", "blocks.1", "norm"}
    plain = run(x)
    seen: list[Any] = []

    def steer(module: nn.Module, args: Any, output: Any) -> Any:
        delta = output[0].clone()
        delta[1] += 5
        return delta, output[1]

    with hl.attach(model, "blocks.#", lambda module, args, output: seen.append(output), observe=True):
        with hl.attach(model, "blocks.0", steer) as handle:
            steered = run(x)
        with hl.attach(model, "blocks.0", steer), torch.inference_mode():
            eager = model(x)
    assert handle.report().fired == 1
    assert [tuple(each.shape) for pair in seen[:2] for each in pair] == [(3, 4)] * 4
    assert torch.allclose(steered, eager, atol=1e-6)
    assert torch.equal(steered[[0, 2]], plain[[0, 2]])
    assert not torch.allclose(steered[1], plain[1])
    assert torch.equal(run(x), plain)


def test_an_error_of_a_hook_ends_no_engine(tapped: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Neither one that raises, nor one whose result does not fit; both are logged, once."""
    model, _, run, x = tapped
    plain = run(x)
    with hl.attach(model, "norm", lambda module, args, output: output[:1]):
        assert torch.equal(run(x), plain)
        assert torch.equal(run(x), plain)
    assert len([each for each in caplog.records if "raised in compiled code" in each.message]) == 1


def test_only_outputs_of_modules_with_taps_are_reached(tapped: Any) -> None:
    taps = tapped[1]
    assert taps.reach([("blocks.0", "forward"), ("norm", "forward")])
    assert not taps.reach([("blocks.0", "forward_pre")])
    assert not taps.reach([("blocks.0", "forward"), ("blocks.0.linear", "forward")])
    other = Taps(Model(), ["blocks.#"])
    assert not other.reach([("blocks.0", "forward")])  # no code with its taps has run
    with pytest.raises(NoMatchError):
        Taps(Model(), ["layers.#"])


def test_taps_that_would_be_silent_are_refused() -> None:
    """CUDA graphs of pieces replay an operator that the graph is not split at."""
    facts: dict[str, Any] = {**FACTS, "version": "0.32.0", "is_compiled": True, "runner": "V1"}
    check_taps(EngineFacts(**facts, graphs="none"), ["norm"])
    check_taps(EngineFacts(**facts, graphs="piecewise", is_split_at_taps=True), ["norm"])
    check_taps(EngineFacts(**facts, graphs="piecewise"), [])
    with pytest.raises(OptionError, match="splitting_ops"):
        check_taps(EngineFacts(**facts, graphs="piecewise"), ["norm"])
    with pytest.raises(OptionError, match="taps"):
        StartOptions.read({"hookline": {"taps": "norm"}})
    assert StartOptions.read({"hookline": {"taps": ["norm"]}}).taps == ("norm",)
