"""The tiny Llama that tests of serving share, and an engine that runs it."""

from __future__ import annotations

import pytest
from helpers_serve import tiny_llama

import hookline as hl
from hookline.serve.load_model import load
from hookline.serve.serving_engine import Engine


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny(folder):
    return load(folder, device="cpu")


@pytest.fixture
def engine(tiny):
    made = Engine(*tiny, allow=None)
    made.start()
    yield made
    made.close(0.0)
    hl.assert_no_hooks(tiny[0], foreign=True)
