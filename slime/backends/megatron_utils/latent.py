"""Latent attention whose gradients are right when its heads are cut over tensor-parallel ranks."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class LatentAttention(MLASelfAttention):
    """All heads share the rotated part of the key, but each rank's gradient of it is of its own heads alone.

    Without Transformer Engine, Megatron gathers the down-projection of keys and values by an operation whose backward
    takes each rank's columns of that gradient and leaves out the other ranks' heads. Here the projection itself
    returns all columns, in the form that Megatron has for a projection that is not cut: with sequence parallelism the
    rank's tokens, for which Megatron gathers the rotated part by an operation that sums its gradient.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(self._whole)

    def _whole(self, module, inputs, output):
        columns, bias = output
        whole = gather_from_tensor_model_parallel_region(columns)
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole), bias
        compressed, rotated = whole.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], -1)
        return torch.cat([compressed, copy_to_tensor_model_parallel_region(rotated)], -1), bias
