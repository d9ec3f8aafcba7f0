"""Rows of a file in place of outputs: on our engine, and on blocks that return the residual stream in two parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_serve import Answer, small_model
from safetensors.torch import save_file
from torch import Tensor, nn

import hookline as hl
from hookline.errors import OptionError
from hookline.factories import Tokens, replace_rows, serving, stream_of, with_stream
from hookline.serve import Engine, GenerationRequest, StatesWanted

LAYERS = ("model.layers.0", "model.layers.1")


def _ask(engine: Any, name: str, prompt: tuple[int, ...]) -> Any:
    answer = Answer()
    request = GenerationRequest(name, prompt, max_tokens=4, ignore_eos=True, states=StatesWanted(LAYERS))
    engine.submit(request, answer)
    return answer.wait()


def _spec(file: Path) -> dict[str, Any]:
    factory = "hookline.factories:replace_rows"
    return {"target_modules": list(LAYERS), "hook_factory": factory, "config": {"file": str(file)}}


def test_a_request_continues_from_the_states_of_another(tmp_path: Path) -> None:
    """All of one request's rows put into another make it answer as the first; a third beside them keeps its answer."""
    model = small_model("Llama")
    engine = Engine(model)
    engine.start()
    try:
        one, other, third = (
            _ask(engine, "one", (5, 6, 7)),
            _ask(engine, "other", (40, 9, 30)),
            _ask(engine, "x", (3, 4)),
        )
        assert [each.id for each in one.tokens] != [each.id for each in other.tokens]
        rows = {f"other/{layer}": found.values for layer, found in one.finished.states.items()}
        save_file(rows, tmp_path / "rows.safetensors")
        replaced = engine.hooks.add(_spec(tmp_path / "rows.safetensors"))
        steered, beside = _ask(engine, "other", (40, 9, 30)), _ask(engine, "x", (3, 4))
        assert steered.tokens[0].id == one.tokens[0].id
        assert torch.equal(steered.finished.states[LAYERS[1]].values, one.finished.states[LAYERS[1]].values)
        assert [each.id for each in beside.tokens] == [each.id for each in third.tokens]
        assert replaced.errors == 0
        assert engine.hooks.remove(replaced.id).metrics() == {"rows": 2 * 6}
    finally:
        engine.close()


class Block(nn.Module):
    """Return a delta and the stream so far, as vLLM's decoder layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


def test_a_stream_in_two_parts_is_put_back_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block()), torch.randn(5, 4)
    rows = torch.randn(3, 4)
    save_file({"b/0": rows}, tmp_path / "rows.safetensors")
    table = Tokens(("a", "b"), (2, 3), (7, 1), ("prefill", "prefill"))
    plain = stream_of(model[0], model(x))
    with hl.attach(model, "0", replace_rows({"file": str(tmp_path / "rows.safetensors")})), serving(table):
        found = stream_of(model[0], model(x))
    assert torch.equal(found[:2], plain[:2])  # of another request
    assert torch.equal(found[2:4], rows[1:])  # positions 1 and 2
    assert torch.equal(found[4], plain[4])  # of a position that the file does not have
    new = with_stream(model[0], model(x), rows.repeat(2, 1)[:5])
    assert torch.equal(new[0], rows.repeat(2, 1)[:5])
    assert not new[1].any()


def test_files_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "rows.safetensors"
    with pytest.raises(OptionError, match="cannot be read"):
        replace_rows({"file": str(file)})
    save_file({"no_module": torch.ones(2, 2)}, file)
    with pytest.raises(OptionError, match="called 'request/module'"):
        replace_rows({"file": str(file)})
    with pytest.raises(OptionError, match="needs a file"):
        replace_rows({})
    save_file({"b/0": torch.ones(3, 7)}, file)
    hook = replace_rows({"file": str(file)})
    table = Tokens(("b",), (3,), (0,), ("prefill",))
    model = nn.Sequential(nn.Linear(4, 4))
    with hl.attach(model, "0", hook), serving(table), pytest.raises(OptionError, match=r"rows of \(7,\)"):
        model(torch.ones(3, 4))
