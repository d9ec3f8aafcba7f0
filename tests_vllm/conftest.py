"""Set what vLLM reads from the environment before it is imported, and make the tiny model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers_vllm import ENVIRONMENT, tiny_llama

os.environ.update(ENVIRONMENT)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers, with a tokenizer whose words are w3 to w255."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Any:
    """The same weights in transformers, to compare with."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
