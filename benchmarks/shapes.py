"""Sizes of the models that benchmarks of training and weight sync make up."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "tiny-moe": {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 16,
        **EXPERTS,
    },
    "qwen3-0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-30b-a3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        **EXPERTS,
    },
}
"""Fields of the Hugging Face config of a Qwen3; with `num_experts`, of a Qwen3-MoE."""


def shape_of(options: Namespace) -> dict[str, Any]:
    """What `--shape` and `--layers` ask for."""
    return SHAPES[options.shape] | ({"num_hidden_layers": options.layers} if options.layers else {})


def classes_of(shape: dict[str, Any]):
    """Config and model class of transformers."""
    import transformers

    family = "Qwen3Moe" if "num_experts" in shape else "Qwen3"
    return getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM")
