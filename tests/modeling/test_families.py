"""Model families run packed through the shared attention and give their own stock logits."""

import pytest
import torch
import transformers

from slime.modeling.attention import PackedSequences, register_attention

pytestmark = pytest.mark.unit

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
FAMILIES = {
    "Llama": {},
    "Mistral": dict(sliding_window=6),
    "Qwen2": {},
    "Qwen3": dict(head_dim=8),
    "Qwen3Moe": dict(head_dim=8, **MOE),
    "Phi3": {},
    "Glm4": dict(head_dim=8),
    "Olmo2": {},
    "Gemma3Text": dict(head_dim=8, sliding_window=6),
    "DeepseekV3": dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
}


def build(family, attention):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    # Grouped matrix products of expert layers have no float64 kernel.
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation=attention, experts_implementation="eager"
    )
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_the_stock_model(family):
    torch.manual_seed(0)
    stock, ours = (build(family, attention) for attention in ("sdpa", register_attention()))
    ours.load_state_dict(stock.state_dict())
    lengths = [9, 1, 14]
    rows = [torch.randint(1, 64, (n,)) for n in lengths]
    with torch.no_grad():
        expected = torch.cat([stock(row[None], use_cache=False).logits[0] for row in rows])
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        context = PackedSequences(lengths)
        packed = ours(torch.cat(rows)[None], position_ids=positions, attention_context=context, use_cache=False)
    torch.testing.assert_close(packed.logits[0], expected, rtol=1e-9, atol=1e-9)
