"""What a worker knows of the widths of outputs before anything has run."""

from __future__ import annotations

import torch
from torch import nn

from hookline.engines.engine_modules import output_widths


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Named(nn.Module):
    """A module of the engines, with the attributes that theirs have."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


class RowParallelLinear(Named): ...


class ColumnParallelLinear(Named): ...


class VocabParallelEmbedding(Named): ...


class PPMissingLayer(nn.Identity): ...


class DecoderLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.q_norm_holder = nn.Module()
        self.q_norm_holder.q_norm = RMSNorm(3)
        self.down_proj = RowParallelLinear(output_size=width)
        self.gate_up_proj = ColumnParallelLinear(output_size=4 * width)


def model():
    made = nn.Module()
    made.embed_tokens = VocabParallelEmbedding(embedding_dim=8)
    made.layers = nn.ModuleList([PPMissingLayer(), DecoderLayer(8)])
    made.vision = nn.ModuleList([DecoderLayer(6)])
    made.norm = RMSNorm(8)
    made.odd = nn.GroupNorm(2, 4)  # whose weight is not as long as the last dimension
    return made


def test_parts_that_say_it_and_layers_of_the_residual_stream():
    """Not layers of another width, of another pipeline stage, nor projections that workers share among them."""
    own = {
        "embed_tokens": 8,
        "norm": 8,
        "layers.1.input_layernorm": 8,
        "layers.1.q_norm_holder.q_norm": 3,
        "layers.1.down_proj": 8,
        "vision.0.input_layernorm": 6,
        "vision.0.q_norm_holder.q_norm": 3,
        "vision.0.down_proj": 6,
    }
    assert output_widths(model(), 8) == {**own, "layers.1": 8}
    assert output_widths(model(), None) == own
