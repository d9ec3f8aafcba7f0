"""Serve a model with hooks: attach statistics to the running model, ask for hidden states, and remove the hooks.

A random Llama is written to a folder, in the same form as any model of yours, and served on this machine. Everything
else goes over HTTP; `hookline serve --model FOLDER` does the same as a process. Needs hookline[serve].

python examples/serving.py                writes, serves, asks, attaches, removes, stops
python examples/serving.py models/tiny    writes the model there, for `hookline serve --model models/tiny`
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hookline.serve import Engine, Server, Settings, load

TOKEN = "only-for-this-example"
CHAT_TEMPLATE = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"


def random_llama(folder: Path) -> Path:
    """Three layers of width 48 with random weights, and a tokenizer of single bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: place for place, letter in enumerate(letters, 2)}}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(vocabulary), **sizes, max_position_embeddings=128, initializer_range=0.2)
    config.bos_token_id, config.eos_token_id = 0, 1
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def call(url: str, body: Any = None, method: str | None = None) -> Any:
    """JSON to the server and back; with the token, which changing hooks needs."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    content = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, content, headers, method=method)) as answer:
        return json.load(answer)


def show_states(url: str) -> None:
    """Hidden states of one request: the last token of the prompt, in every layer."""
    body = {
        "prompt": "A hook sits at a site",
        "max_tokens": 4,
        "temperature": 0,
        "hooks": {"hidden_states": {"layers": ["model.layers.#"], "positions": "last", "phase": "prefill"}},
    }
    choice = call(f"{url}/v1/completions", body)["choices"][0]
    for layer, found in choice["hooks"]["hidden_states"].items():
        raw = bytearray(base64.b64decode(found["data"]))
        states = torch.frombuffer(raw, dtype=getattr(torch, found["dtype"])).reshape(found["shape"])
        print(f"  {layer}: {tuple(states.shape)} at position {found['positions']}, norm {states.norm():.2f}")


def show_chat(url: str) -> None:
    """A conversation, as OpenAI's clients send it."""
    body = {"messages": [{"role": "user", "content": "Where do you sit?"}], "max_tokens": 8, "temperature": 0}
    answer = call(f"{url}/v1/chat/completions", body)
    print(f"  {answer['choices'][0]['message']['role']} answers {answer['usage']['completion_tokens']} tokens")


def show_hook(url: str) -> None:
    """Statistics of every layer, put on and taken off while the server runs."""
    spec = {
        "name": "stats",
        "target_modules": ["model.layers.#"],
        "hook_factory": "hookline.factories:activation_stats",
    }
    hook = call(f"{url}/hooks", spec)
    print(f"  attached {hook['id']} to {', '.join(hook['matched'])}")
    call(f"{url}/v1/completions", {"prompt": "and yields metrics", "max_tokens": 10, "ignore_eos": True})
    with urlopen(f"{url}/metrics") as page:
        means = [line for line in page.read().decode().splitlines() if '/mean"' in line]
    print(f"  /metrics has {len(means)} means")
    gone = call(f"{url}/hooks/{hook['id']}", method="DELETE")
    print(f"  took {gone['id']} off: it fired {gone['fired']} times; left: {call(f'{url}/hooks')['hooks']}")


def main() -> None:
    """Serve, ask, attach, remove, stop; or write the model alone."""
    if len(sys.argv) > 1:
        print(f"wrote {random_llama(Path(sys.argv[1]))}")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = random_llama(Path(folder) / "llama")
        server = Server(lambda: Engine(*load(path, device="cpu")), Settings(model_name="llama", token=TOKEN))
        server.start()
        try:
            print(f"serving {call(f'{server.url}/v1/models')['data'][0]['id']!r}: {call(f'{server.url}/health')}")
            print("hidden states with an answer:")
            show_states(server.url)
            print("a conversation:")
            show_chat(server.url)
            print("a hook on the running model:")
            show_hook(server.url)
        finally:
            server.stop()
        print("stopped; what ran was finished, what hooks had was flushed")


if __name__ == "__main__":
    main()
