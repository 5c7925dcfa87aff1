"""Builds the policy out of stock megatron-core modules: the one place that knows GPTModel and its layer specs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime.backends.megatron_utils.architecture import Architecture
from slime.backends.megatron_utils.attention import PackedAttention, PackedRow
from slime.backends.megatron_utils.norm import RMSNorm
from slime.backends.megatron_utils.sandwich import SandwichAttention, SandwichMLP

Head = Callable[[torch.Tensor, torch.Tensor], object]
"""(hidden states [T, D], this rank's rows of the output matrix [V / tp, D]) -> what the loss wants."""


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Megatron's rule: the next multiple of `divisible_by` x ranks."""
    multiple = divisible_by * tensor_parallel
    return math.ceil(vocab_size / multiple) * multiple


def layer_spec(config, experts: bool, post_norms: bool = False) -> ModuleSpec:
    """Megatron's local layer with attention over packed rows and norms that know sequence parallelism."""
    latent = config.multi_latent_attention
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization=config.normalization,
    )
    layer = spec.submodules
    layer.input_layernorm = RMSNorm
    layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        if latent:
            attention.kv_layernorm = RMSNorm
        else:
            attention.k_layernorm = RMSNorm
    if post_norms:
        layer.self_attention.module = SandwichAttention
        layer.mlp.module = SandwichMLP
    return spec


def block_spec(config, architecture: Architecture, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    moe_layers = architecture.moe_layers
    specs = {experts: layer_spec(config, experts, architecture.post_norms) for experts in set(moe_layers)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[experts] for experts in moe_layers[first : first + count]], layer_norm=RMSNorm
    )


class PolicyGPT(GPTModel):
    """GPTModel whose last stage hands hidden states and output matrix to a `Head`, so that no full logits exist."""

    def __init__(self, *args, real_vocab_size: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.real_vocab_size = real_vocab_size

    def forward(self, tokens_T: torch.Tensor, position_ids_T: torch.Tensor, row: PackedRow, head: Head | None):
        """Hidden states for the next stage, or what `head` returns on the last one."""
        return super().forward(tokens_T[None], position_ids_T[None], None, labels=head, packed_seq_params=row)

    def _postprocess(self, hidden_states, labels=None, **unused):
        if not self.post_process:
            return hidden_states
        hidden = hidden_states[:, 0]
        # The head's gradient is of this rank's part of the vocabulary; both sum it over the group.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return labels(hidden, self.output_rows())

    def output_rows(self) -> torch.Tensor:
        """This rank's rows of the output matrix, without those that pad the vocabulary (the last rank has fewer)."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        start = parallel_state.get_tensor_model_parallel_rank() * len(weight)
        return weight[: max(0, min(len(weight), self.real_vocab_size - start))]


def build_model(architecture: Architecture, config, divisible_by: int = 1, vp_stage: int | None = None) -> PolicyGPT:
    """This rank's pipeline stage with uninitialised weights."""
    return PolicyGPT(
        config=config,
        transformer_layer_spec=block_spec(config, architecture, vp_stage),
        vocab_size=padded_vocab_size(architecture.vocab_size, divisible_by, config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=architecture.tied,
        # Attention rotates queries and keys itself; latent attention has its own rotary module.
        position_embedding_type="none",
        vp_stage=vp_stage,
        real_vocab_size=architecture.vocab_size,
    )
