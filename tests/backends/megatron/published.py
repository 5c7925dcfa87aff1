"""The architecture fields of published models' config.json, typed in. One entry per file in scripts/models.

Compared with copies of the published files: Qwen2.5-3B, -7B; Qwen3-4B, -8B, -14B, -32B, -30B-A3B; Llama-3.1-8B and
-3.2-3B (collections of config.json in public repositories), GLM-4.5-Air (a training log that prints it),
Moonlight-16B-A3B and MiMo-7B (fixtures of other projects' converters), DeepSeek-V3 (defaults of transformers'
DeepseekV3Config), Qwen2.5-1.5B (several projects' tables). Kimi-K2 is the first Instruct release; later ones have
rms_norm_eps 1e-5.
"""

QWEN2 = dict(model_type="qwen2", rope_theta=1e6, rms_norm_eps=1e-6, vocab_size=151936, tie_word_embeddings=True)
QWEN3 = dict(QWEN2, model_type="qwen3", head_dim=128, num_key_value_heads=8, max_position_embeddings=40960)
QWEN3_MOE = dict(
    QWEN3,
    model_type="qwen3_moe",
    num_key_value_heads=4,
    tie_word_embeddings=False,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
LLAMA = dict(
    model_type="llama",
    num_key_value_heads=8,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    vocab_size=128256,
    rope_scaling=dict(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
)
GLM4_MOE = dict(
    model_type="glm4_moe",
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=1e6,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-5,
    vocab_size=151552,
    attention_bias=True,
    tie_word_embeddings=False,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
)
DEEPSEEK = dict(
    model_type="deepseek_v3",
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    num_experts_per_tok=8,
    n_shared_experts=1,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)


def sizes(base: dict, hidden: int, ffn: int, layers: int, heads: int, **more) -> dict:
    return dict(
        base,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **more,
    )


CONFIGS: dict[str, dict] = {
    "qwen2.5-0.5B": sizes(QWEN2, 896, 4864, 24, 14, num_key_value_heads=2),
    "qwen2.5-1.5B": sizes(QWEN2, 1536, 8960, 28, 12, num_key_value_heads=2),
    "qwen2.5-3B": sizes(QWEN2, 2048, 11008, 36, 16, num_key_value_heads=2),
    "qwen2.5-7B": sizes(
        dict(QWEN2, vocab_size=152064, tie_word_embeddings=False), 3584, 18944, 28, 28, num_key_value_heads=4
    ),
    "qwen3-0.6B": sizes(QWEN3, 1024, 3072, 28, 16),
    "qwen3-1.7B": sizes(QWEN3, 2048, 6144, 28, 16),
    "qwen3-4B": sizes(QWEN3, 2560, 9728, 36, 32),
    "qwen3-8B": sizes(dict(QWEN3, tie_word_embeddings=False), 4096, 12288, 36, 32),
    "qwen3-14B": sizes(dict(QWEN3, tie_word_embeddings=False), 5120, 17408, 40, 40),
    "qwen3-32B": sizes(dict(QWEN3, tie_word_embeddings=False), 5120, 25600, 64, 64),
    "qwen3-30B-A3B": sizes(QWEN3_MOE, 2048, 6144, 48, 32, moe_intermediate_size=768),
    "qwen3-235B-A22B": sizes(QWEN3_MOE, 4096, 12288, 94, 64, moe_intermediate_size=1536),
    "llama3.2-1B": sizes(dict(LLAMA, tie_word_embeddings=True), 2048, 8192, 16, 32, head_dim=64),
    "llama3.2-3B": sizes(dict(LLAMA, tie_word_embeddings=True), 3072, 8192, 28, 24, head_dim=128),
    "llama3.1-8B": sizes(
        dict(LLAMA, tie_word_embeddings=False, rope_scaling=dict(LLAMA["rope_scaling"], factor=8.0)),
        4096,
        14336,
        32,
        32,
    ),
    "glm4.5-106B-A12B": dict(
        GLM4_MOE,
        hidden_size=4096,
        intermediate_size=10944,
        num_hidden_layers=46,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "glm4.5-355B-A32B": dict(
        GLM4_MOE,
        hidden_size=5120,
        intermediate_size=12288,
        num_hidden_layers=92,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "deepseek-v3": dict(
        DEEPSEEK,
        num_attention_heads=128,
        vocab_size=129280,
        n_routed_experts=256,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        rope_theta=10000,
        rope_scaling=dict(
            type="yarn",
            factor=40,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32,
            beta_slow=1,
            original_max_position_embeddings=4096,
        ),
    ),
    "kimi-k2": dict(
        DEEPSEEK,
        model_type="kimi_k2",
        num_attention_heads=64,
        vocab_size=163840,
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        rope_theta=50000.0,
    ),
    "moonlight-16B-A3B": dict(
        DEEPSEEK,
        hidden_size=2048,
        intermediate_size=11264,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        q_lora_rank=None,
        num_attention_heads=16,
        vocab_size=163840,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.446,
        rope_theta=50000.0,
        rms_norm_eps=1e-5,
    ),
    "mimo-7B": sizes(
        dict(
            QWEN2,
            model_type="mimo",
            rope_theta=640000.0,
            rms_norm_eps=1e-5,
            vocab_size=151680,
            tie_word_embeddings=False,
        ),
        4096,
        11008,
        36,
        32,
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=True,
        num_nextn_predict_layers=1,
    ),
}
