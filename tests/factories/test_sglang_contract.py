"""The factories as SGLang would load them: its registration loop over a decoder of its shape, plain torch hooks."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers_factories import Batch, Decoder, Mode
from torch import Tensor

from hookline.factories import export, read_export


def extend() -> Batch:
    """Two prompts, of three tokens and of two."""
    return Batch(
        input_ids=torch.tensor([11, 12, 13, 21, 22]),
        positions=torch.tensor([0, 1, 2, 0, 1]),
        seq_lens=torch.tensor([3, 2]),
        req_pool_indices=torch.tensor([4, 7]),
        extend_seq_lens=torch.tensor([3, 2]),
    )


def decode() -> Batch:
    """The next token of each."""
    return Batch(torch.tensor([14, 23]), torch.tensor([3, 2]), torch.tensor([4, 3]), torch.tensor([4, 7]))


def hidden_states(model: Decoder, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """What each layer gives out, without hooks."""
    hidden, residual, found = model.embed(batch.input_ids), None, []
    for layer in model.layers:
        hidden, residual = layer.forward(batch.positions, hidden, batch, residual)
        found.append((hidden, residual))
    return found


def test_export_finds_requests_and_tokens_in_the_batch(tmp_path: Path) -> None:
    """Prefill and decode, by request: the rows, token ids and positions are each one's own."""
    torch.manual_seed(0)
    model, hook = Decoder(), export({"folder": str(tmp_path)})
    model.layers[1].register_forward_hook(hook)
    with torch.inference_mode():
        model(extend())
        model(decode())
        first, second = (hidden_states(model, batch)[1][0] for batch in (extend(), decode()))
    hook.close()
    records = list(read_export(tmp_path))
    assert [(each.request, each.tokens, each.positions, each.phase) for each in records] == [
        ("pool-4", (11, 12, 13), (0, 1, 2), "prefill"),
        ("pool-7", (21, 22), (0, 1), "prefill"),
        ("pool-4", (14,), (3,), "decode"),
        ("pool-7", (23,), (2,), "decode"),
    ]
    want = [first[:3], first[3:], second[:1], second[1:]]
    assert all(torch.equal(each.tensor, part) for each, part in zip(records, want, strict=True))


def test_export_copies_what_the_engine_overwrites(tmp_path: Path) -> None:
    """The buffers of the batch are filled anew for the next forward; the records are of the forward they are from."""
    model, hook, batch = Decoder(), export({"folder": str(tmp_path), "positions": "last"}), extend()
    batch.rids = ["first", "second"]
    model.layers[0].register_forward_hook(hook)
    with torch.inference_mode():
        model(batch)
        batch.input_ids.zero_()
        batch.positions.zero_()
        batch.extend_seq_lens.zero_()
    hook.close()
    records = list(read_export(tmp_path))
    assert [(each.request, each.tokens, each.positions) for each in records] == [
        ("first", (13,), (2,)),
        ("second", (22,), (1,)),
    ]
    assert all(each.tensor.shape == (1, 8) for each in records)


def test_tokens_of_nobody_knows_whom_are_written_whole(tmp_path: Path) -> None:
    """Four tokens for two requests, as speculative decoding has them, and no lengths: no request is guessed."""
    hook = export({"folder": str(tmp_path)})
    pair = torch.tensor([4, 3]), torch.tensor([4, 7])
    batch = Batch(torch.arange(4), torch.arange(4), *pair, forward_mode=Mode("extend"))
    hook(torch.nn.Identity(), (batch,), torch.ones(4, 8))
    hook.close()
    (record,) = read_export(tmp_path)
    assert (record.request, record.tokens, record.tensor.shape) == (None, (), (4, 8))
