"""A model that several files of this folder measure."""

from __future__ import annotations

import pytest
import torch
from helpers_analyses import TokenModel


@pytest.fixture
def model() -> TokenModel:
    """Always with the same weights."""
    torch.manual_seed(0)
    return TokenModel()
