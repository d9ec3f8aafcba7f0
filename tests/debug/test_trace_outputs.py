"""``trace_outputs``: the factory that writes traces from specs, with the rows of requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hookline as hl
from hookline.debug import RowKey, read_trace
from hookline.debug.compare.served import trace_outputs
from hookline.debug.compare.trace import trace
from hookline.factories import Tokens, serving

ROWS = Tokens.padded(("req-a", "req-b"), ((7, 8, 9), (3,)), (0, 4), "prefill")
LATER = Tokens.padded(("req-b",), ((4,),), (5,), "decode")


class Prompts:
    """A mode of SGLang."""

    is_decode = is_idle = is_mixed = is_target_verify = staticmethod(lambda: False)


class Packed:
    """A flat batch, as SGLang's layers are called with."""

    input_ids = torch.tensor([1, 2, 3])
    positions = torch.tensor([0, 1, 9])
    seq_lens = torch.tensor([2, 10])
    forward_mode = Prompts()
    extend_seq_lens_cpu = (2, 1)
    rids = ("x", "y")


class Layer(nn.Module):
    """Returns hidden states and a residual."""

    def forward(self, hidden: torch.Tensor, batch: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden * 2, hidden


MADE: list[Any] = []


def kept(config: Any) -> Any:
    """Make the hook by its path, as a spec does, and keep it, to be closed."""
    MADE.append(hl.specs.resolve_callable("hookline.debug:trace_outputs")(config))
    return MADE[-1]


def spec(folder: Any, **config: Any) -> dict[str, Any]:
    """A spec of the factory on all layers."""
    return {
        "target_modules": ["#"],
        "hook_factory": kept,
        "observe": True,
        "config": {"folder": str(folder), **config},
    }


def test_forwards_of_requests_are_steps_with_their_rows(tmp_path):
    """Padded rows have request and position; ``requests`` chooses forwards; numbers are those of ``trace``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 4))
    ids = torch.tensor([[7, 8, 9], [0, 0, 3]])
    specs = [spec(tmp_path / "all", tensors=["1"]), spec(tmp_path / "some", requests=["req-a*"])]
    with hl.register_hooks(model, specs), torch.inference_mode():
        with serving(ROWS):
            model(ids)
        with serving(LATER):
            model(torch.tensor([[4]]))
        model(ids)
    while MADE:
        MADE.pop().close()
    with trace(model, "#", to=tmp_path / "plain", kinds="output"), torch.inference_mode():
        model(ids)
    folder = read_trace(tmp_path / "all")
    assert folder.problems == ()
    assert [(each.site, each.step, each.call) for each in folder.records] == [(s, n, 0) for n in range(3) for s in "01"]
    rows = folder.records[0].rows
    assert rows is not None
    assert rows.dims == 2
    assert rows.keys == (*(RowKey("req-a", n) for n in range(3)), None, None, RowKey("req-b", 4))
    decode = folder.records[2].rows
    assert decode is not None
    assert decode.keys == (RowKey("req-b", 5),)
    assert folder.records[4].rows is None
    assert {each.step for each in read_trace(tmp_path / "some").records} == {0}
    plain = read_trace(tmp_path / "plain").records
    assert [each.fingerprint for each in plain] == [each.fingerprint for each in folder.records[:2]]
    assert torch.equal(folder.records[1].tensor(), model(ids))


def test_plain_torch_calls_it_with_flat_batches_and_pairs(tmp_path):
    """Without sites a forward begins at the first module; rows come from the batch; of pairs both are there."""
    hook = trace_outputs({"folder": str(tmp_path), "every": 2})
    layers = nn.ModuleList(Layer() for _ in range(2))
    for layer in layers:
        layer.register_forward_hook(hook)
    for _ in range(3):
        for layer in layers:
            layer(torch.ones(3, 4), Packed())
    hook.close()
    hook.close()
    folder = read_trace(tmp_path)
    assert [(each.site, each.step, each.leaf) for each in folder.records] == [
        (f"Layer.{n}", step, leaf) for step in (0, 2) for n in (0, 1) for leaf in "01"
    ]
    assert [each.fingerprint.mean for each in folder.records[:2]] == [2.0, 1.0]
    rows = folder.records[0].rows
    assert rows is not None
    assert rows.keys == (RowKey("x", 0), RowKey("x", 1), RowKey("y", 9))
    assert hook.to_metrics()["records"] == 8
