"""Megatron's TransformerConfig of a model: what the checkpoint says, how it is cut, how it is computed."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.megatron_utils.architecture import Architecture
from slime.backends.megatron_utils.parallel import ParallelSizes


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def transformer_config(
    architecture: Architecture, sizes: ParallelSizes, dtype: torch.dtype, device: torch.device, **overrides: Any
):
    """TransformerConfig, or MLATransformerConfig for latent attention.

    Args:
        dtype: of parameters and computation.
        overrides: fields that win over everything else (recomputation and the like).
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    latent = architecture.get("multi_latent_attention", False)
    fields = {
        **architecture.transformer,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "sequence_parallel": sizes.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Weights come from a checkpoint. Initialisation still marks which parameters are cut over ranks.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "deallocate_pipeline_outputs": True,
        "transformer_impl": "local",
        # Kernels of Transformer Engine and apex.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        # Fused by torch's JIT, which pays on a GPU alone.
        "bias_activation_fusion": device.type == "cuda",
        "bias_dropout_fusion": False,
    }
    if sizes.virtual_pipeline is not None:
        # Two stages are each other's next and previous: sends in batches are then received as the wrong ones.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if architecture.get("num_moe_experts"):
        fields["moe_grouped_gemm"] = True
        if dtype == torch.float64:
            fields["moe_router_dtype"] = "fp64"
    kind = MLATransformerConfig if latent else TransformerConfig
    return kind(**{**fields, **overrides})
