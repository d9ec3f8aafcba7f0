"""Chat completions as the real ``openai`` client sees them: answers, streams, hidden states, refusals.

One server for the file, in a thread, with real sockets.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from helpers_http import TOKEN, served
from helpers_serve import alone as greedy
from helpers_serve import states_alone
from helpers_waiting import PATIENCE

from hookline.serve.http.app import Serving
from hookline.serve.load_model import load

if TYPE_CHECKING:  # a second of import, which every process that collects tests would pay
    from openai import OpenAI

TALK: list[Any] = [{"role": "system", "content": "You are a hook."}, {"role": "user", "content": "Where do you sit?"}]
GREEDY: dict[str, Any] = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 8}
GO_ON = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Any]:
    with served(folder, settings={"max_body": 200_000}) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0, timeout=PATIENCE) as found:
        yield found


@pytest.fixture(scope="module")
def direct(folder: Path) -> tuple[Any, Any]:
    """The same model and tokenizer, not served."""
    return load(folder, device="cpu")


def _prompt(tokenizer: Any, messages: list[Any], **more: Any) -> tuple[int, ...]:
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **more)
    return tuple(made)


def _tensor(found: dict[str, Any]) -> torch.Tensor:
    raw = bytearray(base64.b64decode(found["data"]))
    return torch.frombuffer(raw, dtype=getattr(torch, found["dtype"])).reshape(found["shape"])


def test_a_conversation_is_answered_as_generate_answers_the_templated_prompt(client: OpenAI, direct: Any) -> None:
    """The prompt is exactly what the model's template makes, the answer is the model's own, usage counts both."""
    model, tokenizer = direct
    prompt = _prompt(tokenizer, TALK)
    answer = client.chat.completions.create(**GREEDY, extra_body=GO_ON)
    expected = tokenizer.decode(greedy(model, prompt, 8), skip_special_tokens=True)
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected, "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 8)


def test_a_stream_of_deltas_adds_up_to_the_whole_answers(client: OpenAI) -> None:
    """Each choice begins with its role and ends with its reason; seeded answers are those of the whole; then usage."""
    options = {**GREEDY, "temperature": 1.0, "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options, extra_body=GO_ON)
    stream = client.chat.completions.create(
        **options, extra_body=GO_ON, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert whole.choices[0].message.content != whole.choices[1].message.content
    for index, choice in enumerate(whole.choices):
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == index]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        told = [word for piece in pieces if piece.logprobs for word in piece.logprobs.content or []]
        assert choice.logprobs is not None
        assert told == choice.logprobs.content
        assert len(told) == 8


def test_hidden_states_of_a_chat_come_with_the_answer_and_with_a_stream(client: OpenAI, direct: Any) -> None:
    """Through ``extra_body``; they are those of a forward over the templated prompt and the answer."""
    asked = {**GO_ON, "hooks": {"hidden_states": {"layers": ["model.layers.1"]}}}
    choice = client.chat.completions.create(**GREEDY, extra_body=asked).choices[0]
    found = choice.hooks["hidden_states"]["model.layers.1"]  # type: ignore[attr-defined]
    model, tokenizer = direct
    prompt = _prompt(tokenizer, TALK)
    expected = states_alone(model, [*prompt, *greedy(model, prompt, 8)[:-1]], "model.layers.1")
    torch.testing.assert_close(_tensor(found), expected, rtol=1e-4, atol=1e-4)
    last = [each for chunk in client.chat.completions.create(**GREEDY, extra_body=asked, stream=True)
            for each in chunk.choices][-1]  # fmt: skip
    assert last.hooks["hidden_states"]["model.layers.1"] == found  # type: ignore[attr-defined]


async def _ask_async(url: str) -> str | None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as own:
        return (await own.chat.completions.create(**GREEDY, extra_body=GO_ON)).choices[0].message.content


def test_other_parts_of_the_client_work_too(server: Any, client: OpenAI) -> None:
    """Its asynchronous half, plain completions, the list of models; without a length, all the room there is."""
    whole = client.chat.completions.create(**GREEDY, extra_body=GO_ON)
    assert asyncio.run(_ask_async(server.url)) == whole.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.completions.create(model="tiny", prompt="A hook", max_tokens=2).usage is not None
    long = client.chat.completions.create(model="tiny", messages=TALK, temperature=0, extra_body=GO_ON)
    assert long.usage is not None
    assert long.usage.total_tokens == server.engine.max_sequence


REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "takes no pictures": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "$.messages",
    ),
    "has a bad role": ({"messages": [{"role": "king", "content": "x"}]}, "$.messages"),
    "has no message": ({"messages": []}, "$.messages"),
    "has no content": ({"messages": [{"role": "user"}]}, "$.messages"),
    "has tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "$"),
    "wants JSON": ({"response_format": {"type": "json_object"}}, "$"),
    "wants top_logprobs alone": ({"top_logprobs": 2}, "$.top_logprobs"),
    "says its length twice": ({"max_completion_tokens": 4}, "$.max_tokens"),
    "is refused by the template": ({"messages": [{"role": "user", "content": ""}]}, "$.messages"),
    "is too long": ({"messages": [{"role": "user", "content": "hook " * 15_000}]}, None),
    "wants too many answers": ({"n": 100}, None),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_conversation_is_refused_with_the_reason(client: OpenAI, what: str) -> None:
    """The client raises its ``BadRequestError`` with our message and the place in the body."""
    from openai import BadRequestError

    change, param = REFUSED[what]
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**{**GREEDY, **change})
    assert caught.value.param == param
    message = caught.value.body["message"]  # type: ignore[index]
    assert ("not done here; leave it out" in message) is (what in ("has tools", "wants JSON"))
    assert message.rstrip()


def test_a_short_text_waits_for_no_long_ones() -> None:
    """Texts of megabytes take seconds, and two at a time become tokens; who sends a word is not behind them."""
    held = threading.Event()

    def encode(text: str, **options: Any) -> list[int]:
        if len(text) > 5:
            held.wait(PATIENCE)
        return [1]

    engine: Any = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode))

    async def ask() -> tuple[int, ...]:
        serving = Serving(engine)
        long = [asyncio.create_task(serving.tokens_of("x" * 20_000)) for _ in range(3)]
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(serving.tokens_of("hello"), 2)
        finally:
            held.set()
            await asyncio.gather(*long)

    assert asyncio.run(ask()) == (1,)
