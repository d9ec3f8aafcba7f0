"""Set what vLLM reads from the environment before it is imported, and make the tiny model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_vllm import ENVIRONMENT, TOKEN, VllmServer, running_server, tiny_llama

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


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for files of hooks that come over HTTP."""
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="session")
def server(tiny: Path, exports: Path) -> Iterator[VllmServer]:
    """One eager server for all tests over HTTP, with the hook paths, a prefix cache, an allow-list, behind a proxy."""
    options = {"allow": ["hookline.factories", "helpers_vllm"], "export_dir": str(exports)}
    with running_server(
        tiny, "--enforce-eager", "--block-size", "32", "--enable-prefix-caching", "--root-path", "/proxy",
        "--additional-config", json.dumps({"hookline": options}),
        HOOKLINE_VLLM="1", VLLM_PLUGINS="hookline", HOOKLINE_SERVE_TOKEN=TOKEN,
    ) as found:  # fmt: skip
        yield found
