"""Which token comes next, and what it says: against references in double precision, and texts of all kinds."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from helpers_serve import Answer, alone, save_seeded, tiny_tokenizer

from hookline.serve.generation.answer_text import TextStream
from hookline.serve.generation.sampling import choose
from hookline.serve.generation_request import Request, StatesWanted
from hookline.serve.serving_engine import Engine


class Fixed:
    """A random stream that gives one number."""

    def __init__(self, value: float) -> None:
        self.random = lambda: value


def chances(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Tokens, the likeliest first, and where each ends on the line from 0 to 1; in double precision."""
    scaled = logits.double().numpy() / temperature
    scaled = numpy.exp(scaled - scaled.max())
    order = numpy.argsort(-scaled, kind="stable")
    found = (scaled / scaled.sum())[order]
    before = numpy.cumsum(found) - found
    kept = (numpy.arange(len(found)) < (top_k or len(found))) & (before < top_p)
    kept[0] = True
    found = found * kept
    return order, numpy.cumsum(found) / found.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.5, 50, 1.0), (2.0, 1000, 0.5), (0.01, 0, 1.0)]
)
def test_every_draw_is_where_double_precision_has_it(temperature, top_k, top_p) -> None:
    """60,000 tokens that are nearly alike: single precision adds up to another place, and drops the end of the line."""
    made = torch.Generator().manual_seed(1)
    logits = torch.randn(60_000, generator=made) * 2
    order, line = chances(logits, temperature, top_k, top_p)
    points = [0.0, *((numpy.arange(60) + 0.5) / 60).tolist(), 0.9999999, 1 - 2**-53]
    request = Request("r", (1,), temperature=temperature, top_k=top_k, top_p=top_p)
    found = choose(logits.repeat(len(points), 1), [request] * len(points), [Fixed(point) for point in points])
    places = numpy.argsort(order)[[each.id for each in found]]
    # A number on the edge between two tokens may fall to either; these are never further off than rounding.
    ends, begins = line[places], numpy.where(places > 0, line[places - 1], 0.0)
    assert (begins - 1e-7 <= points).all()
    assert (points <= ends + 1e-7).all()
    assert set(order[places].tolist()) <= set(order[: (line < 1).sum() + 1].tolist())


def test_a_draw_can_be_any_token() -> None:
    """2^-25 of the line is out of reach for a number in single precision."""
    logits = torch.tensor([0.0, -25 * numpy.log(2)]).unsqueeze(0)
    request = Request("r", (1,), temperature=1.0)
    assert choose(logits, [request], [Fixed(1 - 2**-27)])[0].id == 1
    assert choose(logits, [request], [Fixed(0.9)])[0].id == 0


def test_log_probabilities_of_drawn_tokens_are_the_models_own() -> None:
    """Before temperature and cuts, as of those that are the likeliest."""
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(2))
    requests = [Request("r", (1,), temperature=2.0 * (row % 2), top_k=9, logprobs=2) for row in range(40)]
    found = choose(logits.bfloat16(), requests, [random.Random(row) for row in range(40)])
    expected = logits.bfloat16().double().log_softmax(-1)
    assert [each.logprob for each in found] == pytest.approx(
        [expected[row, each.id].item() for row, each in enumerate(found)], abs=1e-5
    )
    assert {each.id == int(expected[row].argmax()) for row, each in enumerate(found)} == {True, False}


# -- text ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def bytes_of(tokenizer, data: bytes) -> list[int]:
    """One token for each byte, as a byte-level tokenizer writes it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = bytes_to_unicode()
    return [tokenizer.convert_tokens_to_ids(names[byte]) for byte in data]


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        ("x🎣".encode()[:3], "🎣".encode()[2:] + b"ok", "🎣ok"),  # half a character before, half after
        (b"x\xff\xff\xff\xff\xff", b"ok", "ok"),  # what was no text in the prompt is not the answer's
        (b"x\xff\xff\xff\xff\xff", b"\xffok", "\ufffdok"),
        ("x🎣".encode()[:3], b"ok", "ok"),
        ("x🎣".encode()[:2], "🎣".encode()[1:3], ""),  # it ends before the character does, which is half as before
        (b"x", "🎣".encode()[:3], "\ufffd"),
    ],
)
def test_an_answer_to_half_a_character(tokenizer, prompt, answer, text) -> None:
    """The prompt ends anywhere: what the answer completes is the answer's, what it does not is not."""
    stream = TextStream(tokenizer, bytes_of(tokenizer, prompt))
    parts = [stream.add(token) for token in bytes_of(tokenizer, answer)]
    assert "".join(parts) + stream.rest() == text


def test_stop_texts_do_not_begin_in_the_prompt_and_special_tokens_have_no_text(tokenizer) -> None:
    """The prompt ends in "EN", and the answer begins with "D": that is no "END"; a special token is no letter of it."""
    stream = TextStream(tokenizer, tokenizer("the EN").input_ids, ("END",))
    special = tokenizer.bos_token_id
    ids = [special, *bytes_of(tokenizer, b"D E"), special, *bytes_of(tokenizer, b"ND!")]
    assert "".join(stream.add(token) for token in ids) == "D "
    assert stream.met == "END"


# -- models --------------------------------------------------------------------------------------------------


def test_short_numbers_tied_weights_and_several_end_tokens(tokenizer) -> None:
    """bfloat16, an output layer that is the embedding, ids that no tokenizer has, and two tokens that end an answer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.4,
        dtype="bfloat16",
    )
    model = save_seeded(LlamaForCausalLM, config, None).bfloat16()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # Its own embedding is what such a model says next: turned round, there is something to tell apart.
    model.model.norm.weight.data = torch.randn(32, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = alone(model, (5, 6, 7), 30)
    ends = sorted({whole[20], whole[25]})
    model.generation_config.eos_token_id = ends
    first = min(whole.index(each) for each in ends)
    engine = Engine(model, tokenizer)
    engine.start()
    answer, other = Answer(), Answer()
    states = StatesWanted(("model.layers.1",))
    engine.submit(Request("a", (5, 6, 7), max_tokens=30, states=states), answer)
    answer.wait()
    engine.submit(Request("b", tuple(range(300, 340)), max_tokens=30, ignore_eos=True), other)
    other.wait()
    engine.close()
    assert answer.ids == whole[: first + 1]
    assert answer.finished.reason == "stop"
    assert answer.finished.states["model.layers.1"].values.dtype == torch.bfloat16
    assert other.ids == alone(model, tuple(range(300, 340)), 30)
