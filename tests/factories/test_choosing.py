"""Hooks that are for some requests, or one phase: the others of a batch get what they would have got without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_factories import Batch
from torch import Tensor, nn

import hookline as hl
from hookline.factories import Tokens, export, read_export, serving, steer

TWO = Tokens.padded(("exp-1", "other"), ((1, 2, 3), (9,)), (0, 0), "prefill")
NEXT = Tokens.padded(("exp-1", "other"), ((4,), (8,)), (3, 1), "decode")
SOME = {"vector": [1.0] * 4, "requests": ["exp-*"]}


def batch(*, rids: list[str] | None = None, lengths: tuple[int, ...] | None = (3, 2)) -> Batch:
    extend = None if lengths is None else torch.tensor(lengths)
    return Batch(torch.arange(5), torch.arange(5), torch.tensor([3, 2]), torch.tensor([4, 7]), extend, rids)


def steered(config: dict[str, Any], output: Tensor, rows: Tokens | None, inputs: tuple[Any, ...] = ()) -> list[Any]:
    """By how much each token was moved."""
    with serving(rows), torch.inference_mode():
        after = steer(config)(nn.Identity(), inputs, output)
    return [] if after is None else (after - output)[..., 0].tolist()


@pytest.mark.parametrize(
    ("config", "moved"),
    [
        (SOME, [[1, 1, 1], [0, 0, 0]]),
        ({**SOME, "requests": ["other"]}, [[0, 0, 0], [0, 0, 1]]),  # its padding stays as it is
        ({**SOME, "positions": "last"}, [[0, 0, 1], [0, 0, 0]]),
        ({**SOME, "requests": ["exp-1", "other"], "positions": "last"}, [[0, 0, 1], [0, 0, 1]]),
        ({**SOME, "phase": "prefill"}, [[1, 1, 1], [0, 0, 0]]),
        ({**SOME, "phase": "decode"}, []),
        ({**SOME, "requests": ["nobody"]}, []),
    ],
)
def test_only_the_chosen_tokens_are_steered(config: dict[str, Any], moved: list[Any]) -> None:
    """By request, position and phase; in (batch, sequence, units), and with all tokens in a row."""
    output = torch.zeros(2, 3, 4)
    assert steered(config, output, TWO) == moved
    assert steered(config, output.flatten(0, 1), TWO) == [each for row in moved for each in row]


def test_decode_steers_the_rows_of_the_chosen_requests() -> None:
    """One token each: (batch, 1, units), (batch, units); and what each request has one of, as a pooled vector."""
    assert steered(SOME, torch.zeros(2, 1, 4), NEXT) == [[1], [0]]
    assert steered(SOME, torch.zeros(2, 4), NEXT) == [1, 0]
    assert steered(SOME, torch.zeros(2, 4), TWO) == [1, 0]
    assert steered({**SOME, "requests": None, "phase": "decode"}, torch.zeros(2, 4), NEXT) == [1, 1]


def test_last_of_tokens_in_a_row_is_the_last_of_each_request() -> None:
    """positions="last" alone, on a module that is shown the batch flat."""
    assert steered({"vector": [1.0] * 4, "positions": "last"}, torch.zeros(6, 4), TWO) == [0, 0, 1, 0, 0, 1]


def test_an_output_that_is_nobodys_is_an_error_and_not_steered_wholesale() -> None:
    """Neither tokens nor requests are its first dimension."""
    with pytest.raises(
        hl.errors.HookReturnError, match=r"some requests or tokens, but the output of 'Identity' of shape \(5"
    ):
        steered(SOME, torch.zeros(5, 4), TWO)


def test_without_an_engine_nothing_is_steered_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A plain forward has no requests."""
    module = nn.Identity()
    module.register_forward_hook(steer(SOME))
    for _ in range(3):
        assert module(torch.zeros(2, 4)).eq(0).all()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("steer is for some requests, and it is not known which a forward has")


@pytest.mark.parametrize(
    ("config", "given", "moved"),
    [
        ({"requests": ["b"]}, batch(rids=["a", "b"]), [0, 0, 0, 1, 1]),
        ({"requests": ["a"], "positions": "last"}, batch(rids=["a", "b"]), [0, 0, 1, 0, 0]),
        ({"requests": ["pool-7"]}, batch(), [0, 0, 0, 1, 1]),
        ({"requests": ["pool-4", "x"]}, batch(), [1, 1, 1, 0, 0]),
        ({"phase": "prefill"}, batch(), [1, 1, 1, 1, 1]),
        ({"phase": "prefill"}, batch(lengths=(2, 2)), [1, 1, 1, 1, 0]),  # what comes after all of them is padding
        ({"phase": "decode"}, batch(), []),
        ({"positions": "last"}, batch(), [0, 0, 1, 0, 1]),
    ],
)
def test_requests_are_found_in_a_batch_like_sglangs(config: dict[str, Any], given: Batch, moved: list[int]) -> None:
    """All tokens in one row; requests by their names, or by their places in the pool."""
    assert steered({"vector": [1.0] * 4, **config}, torch.zeros(5, 4), None, (given,)) == moved


def test_decode_of_such_a_batch() -> None:
    """One token for each request; rows behind them are padding, and fewer rows nobody's."""
    pair = Batch(torch.arange(2), torch.arange(2), torch.tensor([4, 3]), torch.tensor([4, 7]))
    config = {"vector": [1.0] * 4, "requests": ["pool-7"]}
    assert steered(config, torch.zeros(2, 4), None, (pair,)) == [0, 1]
    with pytest.raises(hl.errors.HookReturnError, match="no place for each"):
        steered(config, torch.zeros(1, 4), None, (pair,))


def test_compiled_code_refuses_to_choose() -> None:
    """The graph would steer in every forward or none."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4))
    with hl.attach(model, "0", steer(SOME)), torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with serving(NEXT), pytest.raises(Exception, match="made in every forward or none"):
            compiled(torch.zeros(2, 4))
    torch._dynamo.reset()


def test_export_of_one_phase(tmp_path: Path) -> None:
    """Through hookline, with every counting the calls of that phase."""
    model, hook = nn.Sequential(nn.Linear(4, 4)), export({"folder": str(tmp_path), "phase": "decode"})
    with hl.attach(model, "0", hook), torch.inference_mode():
        for rows in (TWO, NEXT, NEXT):
            with serving(rows):
                model(torch.ones(2, rows.width, 4))
    hook.close()
    assert [(each.request, each.phase, each.positions) for each in read_export(tmp_path)] == [
        ("exp-1", "decode", (3,)),
        ("other", "decode", (1,)),
    ] * 2
