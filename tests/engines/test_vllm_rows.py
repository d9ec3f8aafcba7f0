"""Test how a step of vLLM becomes a table of rows, with stand-ins that have the attributes of its objects."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hookline.engines.vllm.step_rows import (
    RequestBook,
    client_id,
    rows_of_runner,
    table_after_model,
    table_of_step,
)


def runner(names, starts, computed, prompts):
    """Return a stand-in for the V1 runner; its arrays are longer than the batch, as vLLM's are."""
    pad = [77] * 3
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=names,
            num_reqs=len(names),
            num_computed_tokens_cpu=np.array(computed + pad),
            num_prompt_tokens=np.array(prompts + pad),
        ),
        query_start_loc=SimpleNamespace(np=np.array(starts + pad)),
    )


def scheduled(new=(), finished=()):
    return SimpleNamespace(scheduled_new_reqs=list(new), finished_req_ids=set(finished))


def new_request(name, prompt, cached=0, extra=None):
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=list(range(prompt)),
        num_computed_tokens=cached,
        sampling_params=SimpleNamespace(extra_args=extra),
    )


MIXED = (["a-00000001", "b-00000002"], [0, 1, 7], [9, 0], [9, 6])


def mixed_table():
    rows = rows_of_runner(runner(*MIXED))
    return table_of_step(rows, ("a", "b"), {"input_ids": torch.arange(8), "positions": torch.arange(8)})


def test_a_decode_and_a_prefill_share_a_step():
    rows = rows_of_runner(runner(*MIXED))
    assert [(row.first, row.count, row.prompt, row.phase) for row in rows] == [
        (9, 1, 9, "decode"),
        (0, 6, 6, "prefill"),
    ]
    table = mixed_table()
    assert table.phase == "mixed"
    assert table.phases == ("decode", "prefill")
    assert table.lengths == (1, 6)
    assert table.request_ids == ("a", "b")
    assert len(table.input_ids) == 7  # the eighth is padding


def test_a_second_chunk_of_a_prompt_is_still_prefill():
    rows = rows_of_runner(runner(["a"], [0, 4], [4], [9]))
    assert (rows[0].first, rows[0].phase) == (4, "prefill")


def test_the_v2_runner_gives_its_batch():
    batch = SimpleNamespace(
        req_ids=["a"],
        query_start_loc_np=np.array([0, 2, 2]),
        num_computed_tokens_np=np.array([5]),
        prefill_len_np=np.array([5]),
    )
    rows = rows_of_runner(None, batch)
    assert (rows[0].first, rows[0].count, rows[0].phase) == (5, 2, "decode")


def test_the_table_behind_the_model_has_one_row_for_each_request():
    table = table_after_model(mixed_table())
    assert table.lengths is None
    assert table.request_ids == ("a", "b")


def test_the_book_counts_what_came_from_the_cache():
    book = RequestBook()
    begun, ended = book.note(scheduled([new_request("a-00000001", 70, 64, {"hookline": {"x": 1}})]))
    assert [(each.name, each.prompt, each.not_computed, each.options) for each in begun] == [("a", 70, 64, {"x": 1})]
    assert ended == []
    assert book.note(scheduled([new_request("a-00000001", 70, 64)])) == ([], [])  # listed again: the same request
    assert (book.prompt_tokens, book.not_computed) == (70, 64)
    assert book.note(scheduled(finished=["a-00000001", "unknown"])) == ([], ["a-00000001"])
    assert not book.running


@pytest.mark.parametrize(
    ("inside", "outside"),
    [("cmpl-7-0-1a2b3c4d", "cmpl-7-0"), ("3-deadbeef", "3"), ("mine", "mine"), ("mine-xyz", "mine-xyz")],
)
def test_a_request_is_called_as_the_client_called_it(inside, outside):
    assert client_id(inside) == outside
