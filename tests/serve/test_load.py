"""Loading a model from a folder, and what is said of folders that hold none."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers_serve import tiny_llama
from safetensors.torch import load_file

from hookline.errors import ConfigError
from hookline.serve.load_model import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=1)


def test_a_model_and_its_tokenizer_come_from_a_folder(folder) -> None:
    """In eval mode, in the type that is asked for."""
    model, tokenizer = load(folder, device="cpu")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.decode(tokenizer("Hello, 你好").input_ids) == "Hello, 你好"
    assert load(str(folder), dtype="bfloat16", device="cpu")[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: shutil.rmtree(path), "no config.json.* nothing is downloaded"),
        (lambda path: (path / "config.json").write_text("{"), "cannot be loaded"),
        (lambda path: (path / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda path: _pickled(path), "cannot be loaded"),
        (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer .* --no-tokenizer"),
        (lambda path: _edit(path, model_type="t5"), "cannot be loaded"),
    ],
)
def test_a_folder_that_is_none_is_said_to_lack_what_it_lacks(folder, tmp_path, spoil, says) -> None:
    """One message for each way in which it can be no folder of a model."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    spoil(copy)
    with pytest.raises(ConfigError, match=says) as caught:
        load(copy, device="cpu")
    assert "\n" not in str(caught.value)


def _pickled(path) -> None:
    """Put weights there that would do as well, were they no pickle."""
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def _edit(path, **values) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))
