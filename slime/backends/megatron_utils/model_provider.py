"""Builds policy and critic of stock megatron-core modules: the one place that knows GPTModel and its layer specs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from slime.backends.megatron_utils.architecture import Architecture, padded_vocab_size
from slime.backends.megatron_utils.attention import PackedAttention, PackedRow
from slime.backends.megatron_utils.balance import BalancedRouter
from slime.backends.megatron_utils.compat import of_class, set_experts, submodules_of
from slime.backends.megatron_utils.delta_net import GatedAttention, GatedDeltaNet
from slime.backends.megatron_utils.drafts import Drafting, draft_block_spec, keep_activations, unnoticed
from slime.backends.megatron_utils.experts import GroupedExperts
from slime.backends.megatron_utils.latent import LatentAttention
from slime.backends.megatron_utils.norm import RMSNorm
from slime.backends.megatron_utils.sandwich import SandwichAttention, SandwichMLP
from slime.utils.misc import parameters

Head = Callable[[torch.Tensor, torch.Tensor], object]
"""(hidden states [T, D], this rank's rows of the output matrix [V / tp, D]) -> what the loss wants."""


def layer_spec(config, experts: bool, post_norms: bool = False, delta_net: bool = False) -> ModuleSpec:
    """Megatron's local layer with attention over packed rows and norms that know sequence parallelism.

    Args:
        delta_net: with a gated delta net in the place of attention.
    """
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
        without_query_norm = latent and config.q_lora_rank is None
        attention.q_layernorm = IdentityOp if without_query_norm else RMSNorm
        if latent:
            attention.kv_layernorm = RMSNorm
            layer.self_attention.module = LatentAttention
        else:
            attention.k_layernorm = RMSNorm
    if experts:
        submodules_of(layer.mlp).router = BalancedRouter
        set_experts(submodules_of(layer.mlp), GroupedExperts)
    if post_norms:
        layer.self_attention.module = SandwichAttention
        layer.mlp = of_class(layer.mlp, SandwichMLP)
    if delta_net:
        layer.self_attention = ModuleSpec(GatedDeltaNet)
    elif config.attention_output_gate:
        layer.self_attention.module = GatedAttention
    return spec


def block_spec(config, architecture: Architecture, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    kinds = list(zip(architecture.moe_layers, architecture.delta_net_layers, strict=True))
    specs = {
        (experts, delta_net): layer_spec(config, experts, architecture.post_norms, delta_net)
        for experts, delta_net in set(kinds)
    }
    return TransformerBlockSubmodules(
        layer_specs=[specs[kind] for kind in kinds[first : first + count]], layer_norm=RMSNorm
    )


class PolicyGPT(GPTModel):
    """GPTModel whose last stage hands hidden states and output matrix to a `Head`, so that no full logits exist."""

    def __init__(self, *args, real_vocab_size: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.real_vocab_size = real_vocab_size
        if self.mtp_process:
            keep_activations(self.mtp)

    def forward(self, tokens_T: torch.Tensor, position_ids_T: torch.Tensor, row: PackedRow, head: Head | None):
        """Hidden states for the next stage, or what `head` returns on the last one."""
        return super().forward(tokens_T[None], position_ids_T[None], None, labels=head, packed_seq_params=row)

    def _postprocess(
        self, hidden_states, input_ids=None, position_ids=None, labels=None, packed_seq_params=None, **unused
    ):
        if not self.post_process:
            return hidden_states
        out = labels(self.head_input(hidden_states[:, 0]), self.output_rows())
        if not isinstance(labels, Drafting):
            return out
        drafted = self.mtp(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states.detach().requires_grad_(),
            attention_mask=None,
            packed_seq_params=packed_seq_params,
            embedding=lambda **tokens: unnoticed(self.embedding(**tokens)),
        )
        states = drafted.chunk(1 + len(labels.rows))[1:]
        drafts = labels.drafts([self.head_input(state[:, 0]) for state in states], self.output_rows().detach())
        return *out, drafts

    def head_input(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """The hidden states of all tokens of the row."""
        # The head's gradient is of this rank's part of the vocabulary; both sum it over the group.
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_TD, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(hidden_TD)

    def output_rows(self) -> torch.Tensor:
        """This rank's rows of the output matrix, without those that pad the vocabulary (the last rank has fewer)."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        start = parallel_state.get_tensor_model_parallel_rank() * len(weight)
        return weight[: max(0, min(len(weight), self.real_vocab_size - start))]


class ValueGPT(PolicyGPT):
    """The critic: one output per token instead of the vocabulary. The head starts at zero, so that an untrained critic
    predicts 0 everywhere. Every tensor-parallel rank has the whole head."""

    def __init__(self, *args, share_embeddings_and_output_weights: bool = False, **kwargs):
        super().__init__(*args, share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            del self.output_layer
            self.value_head = nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)
            nn.init.zeros_(self.value_head.weight)

    def head_input(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_TD, tensor_parallel_output_grad=False)
        return hidden_TD

    def output_rows(self) -> torch.Tensor:
        return self.value_head.weight

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Without what language models add for their output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


def build_model(
    architecture: Architecture,
    config,
    divisible_by: int = 1,
    vp_stage: int | None = None,
    kind: type[PolicyGPT] = PolicyGPT,
    pre_process: bool | None = None,
    post_process: bool | None = None,
) -> PolicyGPT:
    """One chunk of this rank's pipeline stage with uninitialised weights.

    Args:
        pre_process, post_process: whether it has the embedding and the head; None: by its place in the pipeline.
    """
    if pre_process is None:
        pre_process = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if post_process is None:
        post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return kind(
        config=config,
        transformer_layer_spec=block_spec(config, architecture, vp_stage),
        vocab_size=padded_vocab_size(architecture.vocab_size, divisible_by, config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=architecture.tied,
        # Attention rotates queries and keys itself; latent attention has its own rotary module.
        position_embedding_type="none",
        mtp_block_spec=draft_block_spec(
            config, layer_spec(config, architecture.moe_layers[-1], architecture.post_norms), vp_stage
        ),
        vp_stage=vp_stage,
        real_vocab_size=architecture.vocab_size,
    )


def build_chunks(
    architecture: Architecture,
    config,
    divisible_by: int = 1,
    with_values: bool = False,
    provider: Callable[..., Any] | None = None,
) -> list[PolicyGPT]:
    """All chunks of this rank's pipeline stage: one, or one per virtual stage.

    Args:
        with_values: a critic instead of a policy.
        provider: makes a chunk, as `--custom-model-provider-path` says; None: `build_model`.

    Raises:
        TypeError: the provider returned something else than a `PolicyGPT` (for a critic, a `ValueGPT`).
    """
    kind = ValueGPT if with_values else PolicyGPT
    build = partial(build_model, architecture, config, divisible_by, kind=kind)
    stages = config.virtual_pipeline_model_parallel_size
    return [
        build(vp_stage=stage) if provider is None else _provided(provider, build, stage, kind)
        for stage in ([None] if stages is None else range(stages))
    ]


def _provided(provider, build, vp_stage: int | None, kind: type[PolicyGPT]) -> PolicyGPT:
    def stock(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> PolicyGPT:
        return build(vp_stage=vp_stage, pre_process=pre_process, post_process=post_process)

    wanted = {"build": stock, "config": build.args[1]}
    extra = {name: value for name, value in wanted.items() if name in parameters(provider)}
    chunk = provider(
        parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
        **extra,
    )
    if not isinstance(chunk, kind):
        raise TypeError(
            f"--custom-model-provider-path returned a {type(chunk).__name__}, not a {kind.__name__}; take what its "
            "argument `build(pre_process, post_process, vp_stage)` returns, or make a subclass of that"
        )
    return chunk
