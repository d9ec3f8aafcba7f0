"""Which token comes next, and its text: against references in double precision, and texts of all kinds."""

from __future__ import annotations

import random
from collections import Counter

import numpy
import pytest
import torch
from helpers_serve import ask, prompts, started, tiny_tokenizer

from hookline.serve.generation_request import Finished, GenerationRequest
from hookline.serve.request_row import TextStream
from hookline.serve.row_batch import choose
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


def test_top_p_ends_with_the_token_that_reaches_it() -> None:
    """Of four equal tokens two are half: a third, which begins exactly at 0.5, is never drawn."""
    request = GenerationRequest("r", (1,), temperature=1.0, top_p=0.5)
    draws = random.Random(0)
    drawn = {choose(torch.zeros(1, 4), [request], [draws])[0].id for _ in range(100)}
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.5, 50, 1.0), (2.0, 1000, 0.5), (0.01, 0, 1.0)]
)
def test_every_draw_is_where_double_precision_has_it(temperature, top_k, top_p) -> None:
    """60,000 tokens that are nearly alike: single precision adds up to another place, and drops the end of the line."""
    made = torch.Generator().manual_seed(1)
    logits = torch.randn(60_000, generator=made) * 2
    order, line = chances(logits, temperature, top_k, top_p)
    points = [0.0, *((numpy.arange(60) + 0.5) / 60).tolist(), 0.9999999, 1 - 2**-53]
    request = GenerationRequest("r", (1,), temperature=temperature, top_k=top_k, top_p=top_p)
    found = choose(logits.repeat(len(points), 1), [request] * len(points), [Fixed(point) for point in points])
    places = numpy.argsort(order)[[each.id for each in found]]
    # A number on the edge between two tokens may fall to either; these are never further off than rounding.
    ends, begins = line[places], numpy.where(places > 0, line[places - 1], 0.0)
    assert (begins - 1e-7 <= points).all()
    assert (points <= ends + 1e-7).all()
    assert set(order[places].tolist()) <= set(order[: (line < 1).sum() + 1].tolist())


def test_a_seed_decides_the_answer_whatever_shares_the_batch(tiny, engine) -> None:
    """Alone, and among seven others that draw too; torch's own random stream is left alone."""
    before = torch.random.get_rng_state()
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "max_tokens": 24}
    first = ask(engine, (5, 6, 7), seed=7, **options).wait().ids
    others = [ask(engine, each, **options) for each in prompts(7)]
    again = ask(engine, (5, 6, 7), seed=7, **options).wait().ids
    another = ask(engine, (5, 6, 7), seed=8, **options).wait().ids
    for each in others:
        each.wait()
    assert first == again
    assert first != another
    assert torch.equal(before, torch.random.get_rng_state())


def test_draws_follow_the_probabilities_of_the_model(tiny, engine) -> None:
    """Draws of one token, against the probabilities that the model gives; top_k=2 and top_p cut the rest off."""
    model, _ = tiny
    engine = started(model, max_batch=200, max_waiting=300)
    with torch.no_grad():
        chances = model(torch.tensor([[9, 10]])).logits[0, -1].div(3.0).softmax(-1)
    drawn = [ask(engine, (9, 10), max_tokens=1, temperature=3.0) for _ in range(200)]
    two = [ask(engine, (9, 10), max_tokens=1, temperature=3.0, top_k=2) for _ in range(50)]
    few = [ask(engine, (9, 10), max_tokens=1, temperature=3.0, top_p=0.05) for _ in range(50)]
    counted = Counter(each.wait().ids[0] for each in drawn)
    top = chances.topk(20)
    share = sum(counted[token] for token in top.indices.tolist()) / 200
    expected = float(top.values.sum())
    assert abs(share - expected) < 4 * (expected * (1 - expected) / 200) ** 0.5
    best = chances.argsort(descending=True)
    assert {each.wait().ids[0] for each in two} == set(best[:2].tolist())
    inside = int((chances.sort(descending=True).values.cumsum(0) < 0.05).sum()) + 1
    assert {each.wait().ids[0] for each in few} <= set(best[:inside].tolist())
    engine.close()


def test_log_probabilities_are_the_models_own(tiny, engine) -> None:
    """Of the chosen token and of the likeliest three; without asking there are none."""
    model, _ = tiny
    answer = ask(engine, (5, 6), max_tokens=3, logprobs=3).wait()
    with torch.no_grad():
        scores = model(torch.tensor([[5, 6, *answer.ids[:-1]]])).logits[0, 1:].log_softmax(-1)
    for token, row in zip(answer.tokens, scores, strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
        assert [each for each, _ in token.top_logprobs] == row.topk(3).indices.tolist()
        assert token.top_logprobs[0][1] == pytest.approx(row.max().item(), abs=1e-4)
    plain = ask(engine, (5, 6), max_tokens=1).wait()
    assert plain.tokens[0].logprob is None
    assert plain.tokens[0].top_logprobs == ()


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


def test_text_is_that_of_the_whole_answer_and_never_half_a_character(tiny) -> None:
    """Every split of a text with characters of one to four bytes, token by token; and any bytes at all."""
    _, tokenizer = tiny
    prompt = tuple(tokenizer("A hook").input_ids)
    answer = tokenizer(" – Größe 你好世界 🎣🪝, привет").input_ids
    stream = TextStream(tokenizer, prompt)
    parts = [stream.add(token) for token in answer]
    assert "".join(parts) + stream.rest() == " – Größe 你好世界 🎣🪝, привет"
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert "" in parts, "no character had several tokens, so that nothing was tested"
    rng = random.Random(3)
    for _ in range(100):
        ids = [rng.randrange(3, len(tokenizer)) for _ in range(40)]
        stream = TextStream(tokenizer, prompt)
        text = "".join(stream.add(token) for token in ids) + stream.rest()
        assert "A hook" + text == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize(
    ("stop", "shown", "met"),
    [
        (("wor",), "Hello ", "wor"),
        (("lo w", "zzz"), "Hel", "lo w"),
        (("worlds",), "Hello world", None),
        (("H",), "", "H"),
        (("o", "Hello"), "", "Hello"),
    ],
)
def test_nothing_of_a_stop_text_slips_out(stop, shown, met) -> None:
    """One letter a token: what could become a stop text is held back, and let out if it does not."""

    class Letters:
        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    stream = TextStream(Letters(), (), stop)
    parts = []
    for letter in "Hello world":
        parts.append(stream.add(ord(letter)))
        if stream.met is not None:
            break
        assert shown.startswith("".join(parts))
    assert "".join(parts) + stream.rest() == shown
    assert stream.met == met


def test_an_answer_ends_at_a_stop_text_and_at_the_end_token(tiny, engine) -> None:
    """The stop text is no part of it; the model's own end-of-text token ends it unless that is ignored."""
    model, tokenizer = tiny
    whole = ask(engine, (5, 6, 7), max_tokens=40).wait()
    stop = next(text for text in (whole.text[at : at + 2] for at in range(6, 30)) if "\ufffd" not in text)
    answer = ask(engine, (5, 6, 7), max_tokens=40, stop=(stop,)).wait()
    assert answer.finished.reason == "stop"
    assert answer.text == whole.text[: whole.text.index(stop)]
    token = whole.ids[9]
    first = whole.ids.index(token)
    model.generation_config.eos_token_id, kept = token, model.generation_config.eos_token_id
    try:
        ends = Engine(model, tokenizer)
    finally:
        model.generation_config.eos_token_id = kept
    ends.start()
    answer = ask(ends, (5, 6, 7), max_tokens=40, ignore_eos=False).wait()
    ends.close()
    assert answer.ids == whole.ids[: first + 1]
    assert answer.finished == Finished("stop", None, 3, first + 1)
