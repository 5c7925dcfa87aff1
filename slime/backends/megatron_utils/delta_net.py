"""The two kinds of attention of Qwen3-Next over packed rows: gated delta nets, and attention with gated outputs.

Megatron has a gated delta net of its own, which needs flash-linear-attention and takes no packed rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import nn

from slime.backends.megatron_utils.attention import PackedRow
from slime.backends.megatron_utils.delta_rule import causal_conv, gated_delta_rule


class GatedAttention(SelfAttention):
    """Stock attention whose gate is as exact as what it gates: Megatron's is rounded to fp32."""

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x * gate.reshape(x.shape).to(wide).sigmoid()).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    """Takes the place of self-attention in a layer (Gated DeltaNet, arXiv 2412.06464, in the form of Qwen3-Next).

    Each key head serves as many value heads as all share. Everything stays in the order of key heads, so that each
    tensor-parallel rank has consecutive ones, of every parameter. Per key head `in_proj` gives query, key, values,
    output gates, write strengths and time steps; the convolution has the channels of query, key and values.
    """

    cut = ("conv_weight", "dt_bias", "A_log")
    """Parameters of which each tensor-parallel rank has its heads."""

    def __init__(self, config, layer_number: int, pg_collection, **unused):
        super().__init__(config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        ranks = self.tp_group.size()
        self.heads = config.linear_num_key_heads // ranks
        self.per_key = config.linear_num_value_heads // config.linear_num_key_heads
        self.value_dim = config.linear_value_head_dim
        keys, values = config.linear_key_head_dim, self.per_key * self.value_dim
        self.qkv_sizes = [keys, keys, values]
        self.sizes = [sum(self.qkv_sizes), values, self.per_key, self.per_key]
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            config.linear_num_key_heads * sum(self.sizes),
            init_method=config.init_method,
            gather_output=False,
            **shared,
        )
        self.out_proj = RowParallelLinear(
            config.linear_num_value_heads * self.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **shared,
        )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=config.params_dtype))

        self.conv_weight = parameter(self.heads * self.sizes[0], 1, config.linear_conv_kernel_dim)
        self.dt_bias = parameter(self.heads * self.per_key)
        self.A_log = parameter(self.heads * self.per_key)
        self.norm_weight = parameter(self.value_dim)
        for name in self.cut:
            set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)
        # Each rank has the gradient of its own heads: Megatron sums those of parameters with this mark.
        self.norm_weight.sequence_parallel = config.sequence_parallel

    def forward(
        self, hidden_states: torch.Tensor, *unused_args, packed_seq_params: PackedRow | None = None, **unused
    ) -> tuple[torch.Tensor, None]:
        """[T, 1, D] -> [T, 1, D]; with sequence parallelism the rank's part of the tokens.

        Raises:
            ValueError: the row is not packed.
        """
        if packed_seq_params is None or packed_seq_params.lengths is None:
            raise ValueError("GatedDeltaNet computes on packed rows of whole sequences alone: give the model those")
        lengths = packed_seq_params.lengths
        projected_THX = self.in_proj(hidden_states)[0][:, 0].unflatten(-1, (self.heads, -1))
        qkv, gate, strength, step = projected_THX.split(self.sizes, -1)
        qkv = F.silu(causal_conv(qkv.flatten(1), self.conv_weight[:, 0], lengths))
        query, key, value = qkv.unflatten(-1, (self.heads, -1)).split(self.qkv_sizes, -1)
        query, key = (x.repeat_interleave(self.per_key, 1) for x in (query, key))
        value, gate = (x.reshape(len(x), -1, self.value_dim) for x in (value, gate))
        wide = torch.promote_types(step.dtype, torch.float32)
        log_decay_TH = -self.A_log.to(wide).exp() * F.softplus(step.flatten(1).to(wide) + self.dt_bias)
        mixed = gated_delta_rule(query, key, value, log_decay_TH, strength.flatten(1).sigmoid(), lengths)
        return self.out_proj(self._gated_norm(mixed, gate).flatten(1)[:, None])[0], None

    def _gated_norm(self, x_THV: torch.Tensor, gate_THV: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x_THV.dtype, torch.float32)
        normed = F.rms_norm(x_THV.to(wide), x_THV.shape[-1:], eps=self.config.layernorm_epsilon).to(x_THV.dtype)
        return (self.norm_weight * normed * F.silu(gate_THV.to(wide))).to(x_THV.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For torch_dist checkpoints."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(self.cut, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return sharded
