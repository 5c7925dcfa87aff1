"""Layers that also normalise the outputs of attention and feed-forward before these join the residual (GLM-4)."""

from __future__ import annotations

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP

from slime.backends.megatron_utils.norm import RMSNorm


class SandwichAttention(SelfAttention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.post_layernorm = RMSNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)

    def forward(self, *args, **kwargs):
        output, bias = super().forward(*args, **kwargs)
        return self.post_layernorm(output), bias


class SandwichMLP(MLP):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.post_layernorm = RMSNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)

    def forward(self, *args, **kwargs):
        output, bias = super().forward(*args, **kwargs)
        return self.post_layernorm(output), bias
