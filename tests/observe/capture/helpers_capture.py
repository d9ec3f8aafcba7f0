"""A small model and an input, for the tests of captures."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(a=nn.Linear(3, 4), b=nn.Tanh(), c=nn.Linear(4, 2)))


X = torch.linspace(-1, 1, 6).reshape(2, 3)
