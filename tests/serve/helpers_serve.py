"""Tiny causal language models on disk, and what tests of serving ask of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers_waiting import PATIENCE

from hookline.engines.request_options import StatesWanted
from hookline.serve.generation_request import GenerationRequest
from hookline.serve.serving_engine import Engine

SENTENCES = [
    "A hook sits at a site and yields metrics, which flow to sinks.",
    "The quick brown fox jumps over the lazy dog, twice a day.",
    "Größe, naïve café, привет мир, 你好世界, こんにちは, 🎣🪝.",
    "def hook(module, inputs, output): return None",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
]


SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 96, "initializer_range": 0.3, "eos_token_id": None,
}  # fmt: skip

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' and loop.last and not message['content'] %}"
    "{{ raise_exception('the last message says nothing') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if shout %}!{% endif %}{% endif %}"
)
"""As models have them: special tokens of its own, a place for the answer, a complaint, a variable."""


def tiny_tokenizer(folder: Path) -> Any:
    """A byte-level BPE tokenizer trained on a few sentences, written to the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def tiny_llama(folder: Path, *, layers: int = 2, hidden: int = 32, length: int = 256, seed: int = 0) -> Path:
    """Write a random Llama and its tokenizer to ``folder``, for `load_model.load`; return ``folder``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Logits of a random model lie so near to each other that rounding decides; this spreads them.
        initializer_range=0.4,
    )
    save_seeded(LlamaForCausalLM, config, folder, seed)
    return folder


def save_seeded(kind: type, config: Any, folder: Path | None, seed: int = 0) -> Any:
    """A model with random weights that depend on the seed alone; the random streams of the test are left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).eval()
    if folder is not None:
        model.save_pretrained(folder)
    return model


class Answer:
    """Gathers the events of one request; pass it to ``submit`` as ``on_event``."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.finished: Any = None
        self.threads: set[int] = set()
        self.id, self.prompt, self.ticket = "", [], None
        self._over = threading.Event()

    def __call__(self, event: Any) -> None:
        assert self.finished is None, f"{event} after {self.finished}"
        self.threads.add(threading.get_ident())
        if hasattr(event, "reason"):
            self.finished = event
            self._over.set()
        else:
            self.tokens.append(event)

    def wait(self, seconds: float = 60.0) -> Answer:
        assert self._over.wait(seconds), f"no end after {seconds} s, {len(self.tokens)} tokens"
        return self

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


def ask(
    engine: Any, prompt: Any = (5, 6, 7), states: StatesWanted | None = None, listen: Any = None, **options: Any
) -> Answer:
    """Submit a request of a random id, which goes on after the end token unless told otherwise."""
    answer = Answer()
    answer.id, answer.prompt = f"r{random.getrandbits(60)}", list(prompt)
    request = GenerationRequest(answer.id, tuple(prompt), states=states, **({"ignore_eos": True} | options))
    answer.ticket = engine.submit(request, listen or answer)
    return answer


def started(*args: Any, **options: Any) -> Engine:
    """Make an engine, and start it."""
    engine = Engine(*args, **options)
    engine.start()
    return engine


def held_back(engine: Any) -> Callable[[], None]:
    """Start the engine, busy until the returned function is called: whoever asks meanwhile is taken in together."""
    gate = threading.Event()
    engine.start()
    engine.between(lambda: gate.wait(PATIENCE))
    return gate.set


def prompts(count: int, seed: int = 0, vocabulary: int = 384, longest: int = 24) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, longest))) for _ in range(count)]


def small_model(kind: str, base: type | None = None, **options: Any) -> Any:
    """A causal model of ``transformers`` with random weights, of this architecture, or of the class ``base``."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
    return save_seeded(base or getattr(transformers, f"{kind}ForCausalLM"), config, None)


def alone(model: Any, prompt: tuple[int, ...], count: int, *, ignore_eos: bool = True) -> list[int]:
    """What the model's own ``generate`` says, greedily, to this prompt by itself."""
    ids = torch.tensor([prompt], device=model.device)
    options = {"eos_token_id": 1 << 20} if ignore_eos else {}  # None would stand for the model's own
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0, **options
        )
    return made[0, len(prompt) :].tolist()


def states_alone(model: Any, ids: list[int], name: str, of: str = "output") -> torch.Tensor:
    """The output, or input, of a module, in a forward over this sequence by itself; (tokens, features)."""
    kept: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        value = output if of == "output" else args[0]
        kept.append(value if isinstance(value, torch.Tensor) else value[0])

    handle = model.get_submodule(name).register_forward_hook(keep)
    with handle, torch.no_grad():
        model(torch.tensor([ids], device=model.device))
    return kept[0][0].cpu()
