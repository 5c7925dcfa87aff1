"""Tiny random models of each family, built by transformers itself: the reference for conversion and forward."""

from __future__ import annotations

import torch

from tests.tiny_model import build_tokenizer

SIZES = dict(
    vocab_size=131,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
SHARED = dict(EXPERTS, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.7)
# One layer with attention after two with delta nets, and a fourth with one.
DELTA_NET = dict(
    EXPERTS,
    num_experts=4,
    shared_expert_intermediate_size=20,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    rope_parameters=HALF_ROTATED,
)
LATENT = dict(
    num_key_value_heads=4,
    head_dim=4,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=10,
)

CASES: dict[str, tuple[str, dict]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", {}),
    "qwen3 tied yarn": ("Qwen3", dict(tie_word_embeddings=True, rope_parameters=YARN_ROPE)),
    "llama3": ("Llama", dict(rope_parameters=LLAMA3_ROPE)),
    "glm4": ("Glm4", dict(rope_parameters=HALF_ROTATED, pad_token_id=0)),
    "qwen3_moe": ("Qwen3Moe", dict(EXPERTS, num_experts=4, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3_moe unnormalised": ("Qwen3Moe", dict(EXPERTS, num_experts=4, norm_topk_prob=False)),
    "qwen3_next": ("Qwen3Next", DELTA_NET),
    "qwen3_next dense layer": ("Qwen3Next", dict(DELTA_NET, norm_topk_prob=False, mlp_only_layers=[1])),
    "glm4_moe": ("Glm4Moe", dict(SHARED, use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5)),
    "deepseek_v3": ("DeepseekV3", dict(SHARED, **LATENT, n_group=4, topk_group=1)),
    "moonlight": ("DeepseekV3", dict(SHARED, **dict(LATENT, q_lora_rank=None), n_group=1, topk_group=1)),
}
WITH_DELTA_NETS = [name for name in CASES if name.startswith("qwen3_next")]
WITH_EXPERTS = [name for name, (_, changes) in CASES.items() if "num_experts_per_tok" in changes]


def save_family(case: str, path: str, seed: int = 0) -> None:
    """A Hugging Face directory of the case with a tokenizer, every parameter random (norms and biases too)."""
    import transformers

    name, changes = CASES[case]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "e_score_correction_bias" in key:
                tensor.normal_(std=0.1)
            elif tensor.ndim == 1 and key.endswith(("weight", "bias")):
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif tensor.ndim > 1:
                tensor.mul_(5)
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
