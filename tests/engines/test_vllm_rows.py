"""Test how a step of vLLM becomes a table of rows, with stand-ins that have the attributes of its objects."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hookline.engines.vllm.step_tokens import (
    RequestBook,
    client_id,
    place_among_answers,
    tokens_after_model,
    tokens_of_step,
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
    inputs = {"input_ids": torch.arange(8), "positions": torch.arange(8)}
    return tokens_of_step(runner(*MIXED), None, RequestBook(), inputs)


def test_a_decode_and_a_prefill_share_a_step():
    table = mixed_table()
    assert table.phase == "mixed"
    assert table.phases == ("decode", "prefill")
    assert (table.lengths, table.firsts, table.room) == ((1, 6), (9, 0), 8)
    assert (table.requests, table.keys) == (("a", "b"), ("a-00000001", "b-00000002"))
    assert len(table.ids) == 7  # the eighth is padding


def test_a_second_chunk_of_a_prompt_is_still_prefill():
    table = tokens_of_step(runner(["a"], [0, 4], [4], [9]), None, RequestBook(), {})
    assert (table.firsts, table.phases) == ((4,), ("prefill",))


def test_the_v2_runner_gives_its_batch():
    batch = SimpleNamespace(
        req_ids=["a"],
        query_start_loc_np=np.array([0, 2, 2]),
        num_computed_tokens_np=np.array([5]),
        prefill_len_np=np.array([5]),
    )
    table = tokens_of_step(None, batch, RequestBook(), {})
    assert (table.firsts, table.lengths, table.phases) == ((5,), (2,), ("decode",))


def test_the_table_behind_the_model_has_one_row_for_each_request():
    table = tokens_after_model(mixed_table())
    assert table.lengths == (1, 1)
    assert table.requests == ("a", "b")


def test_the_book_counts_what_came_from_the_cache():
    book = RequestBook()
    begun, ended = book.note(scheduled([new_request("a-00000001", 70, 64, {"hookline": {"x": 1}})]))
    assert [(each.name, each.prompt, each.not_computed, each.options) for each in begun] == [("a", 70, 64, {"x": 1})]
    assert ended == []
    assert book.note(scheduled([new_request("a-00000001", 70, 64)])) == ([], [])  # listed again: the same request
    assert (book.prompt_tokens, book.not_computed) == (70, 64)
    assert book.note(scheduled(finished=["a-00000001", "unknown"])) == ([], ["a-00000001"])
    assert book.names(["a-00000003"]) == ("a",)  # the name is free again


def test_no_two_running_requests_have_one_name():
    """The later one is called by the engine's own id, also one that nobody told of."""
    book = RequestBook()
    (first,), _ = book.note(scheduled([new_request("a-00000001", 3)]))
    (second,), _ = book.note(scheduled([new_request("a-00000002", 3)]))
    assert (first.name, second.name) == ("a", "a-00000002")
    assert book.names(["a-00000003", "a-00000001"]) == ("a-00000003", "a")


@pytest.mark.parametrize(
    ("name", "place"),
    [("cmpl-x-0", (0, 0)), ("3_cmpl-x-2", (2, 3)), ("1_chatcmpl-abc", (0, 1)), ("7", (0, 0)), ("1_7", (0, 1))],
)
def test_answers_stand_in_the_order_of_the_body(name, place):
    assert place_among_answers(name) == place


@pytest.mark.parametrize(
    ("inside", "outside"),
    [("cmpl-7-0-1a2b3c4d", "cmpl-7-0"), ("3-deadbeef", "3"), ("mine", "mine"), ("mine-xyz", "mine-xyz")],
)
def test_a_request_is_called_as_the_client_called_it(inside, outside):
    assert client_id(inside) == outside
