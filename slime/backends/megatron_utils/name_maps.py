"""Which Hugging Face tensors a Megatron parameter is made of: one table per family, data only.

A rule names one Megatron parameter (layers and experts by their global number), how its parts lie in it
(`slime.backends.megatron_utils.layouts`) and the checkpoint's tensors. Direct load, export, weight sync and tools all
read these tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LAYER, EXPERT = "{layer}", "{expert}"
VALUE_HEAD = "value_head.weight"
"""A critic's alone."""


@dataclass(frozen=True)
class Rule:
    """`megatron` consists of the tensors `hf`, in the way `layout` says."""

    megatron: str
    layout: str
    hf: tuple[str, ...]


def _rules(prefix: tuple[str, str], *rows: tuple) -> tuple[Rule, ...]:
    ours, theirs = prefix
    return tuple(Rule(ours + name, layout, tuple(theirs + hf for hf in names)) for name, layout, *names in rows)


BLOCK = (f"decoder.layers.{LAYER}.", f"model.layers.{LAYER}.")

ENDS = (
    Rule("embedding.word_embeddings.weight", "vocab", ("model.embed_tokens.weight",)),
    Rule("decoder.final_layernorm.weight", "replicated", ("model.norm.weight",)),
    Rule("output_layer.weight", "vocab", ("lm_head.weight",)),
    Rule(VALUE_HEAD, "replicated", (VALUE_HEAD,)),
)
NORMS = _rules(
    BLOCK,
    ("input_layernorm.weight", "replicated", "input_layernorm.weight"),
    ("pre_mlp_layernorm.weight", "replicated", "post_attention_layernorm.weight"),
)
ATTENTION = _rules(
    BLOCK,
    (
        "self_attention.linear_qkv.weight",
        "qkv",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    (
        "self_attention.linear_qkv.bias",
        "qkv",
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
    ),
    ("self_attention.linear_proj.weight", "row", "self_attn.o_proj.weight"),
    ("self_attention.q_layernorm.weight", "replicated", "self_attn.q_norm.weight"),
    ("self_attention.k_layernorm.weight", "replicated", "self_attn.k_norm.weight"),
)
LATENT_ATTENTION = _rules(
    BLOCK,
    ("self_attention.linear_q_proj.weight", "column", "self_attn.q_proj.weight"),
    ("self_attention.linear_q_down_proj.weight", "column", "self_attn.q_a_proj.weight"),
    ("self_attention.linear_q_up_proj.weight", "column", "self_attn.q_b_proj.weight"),
    ("self_attention.q_layernorm.weight", "replicated", "self_attn.q_a_layernorm.weight"),
    ("self_attention.linear_kv_down_proj.weight", "column", "self_attn.kv_a_proj_with_mqa.weight"),
    ("self_attention.linear_kv_up_proj.weight", "column", "self_attn.kv_b_proj.weight"),
    ("self_attention.kv_layernorm.weight", "replicated", "self_attn.kv_a_layernorm.weight"),
    ("self_attention.linear_proj.weight", "row", "self_attn.o_proj.weight"),
)
MLP = _rules(
    BLOCK,
    ("mlp.linear_fc1.weight", "glu", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    ("mlp.linear_fc2.weight", "row", "mlp.down_proj.weight"),
)
EXPERTS = _rules(
    BLOCK,
    ("mlp.router.weight", "replicated", "mlp.gate.weight"),
    (
        f"mlp.experts.local_experts.{EXPERT}.linear_fc1.weight",
        "glu",
        f"mlp.experts.{EXPERT}.gate_proj.weight",
        f"mlp.experts.{EXPERT}.up_proj.weight",
    ),
    (f"mlp.experts.local_experts.{EXPERT}.linear_fc2.weight", "row", f"mlp.experts.{EXPERT}.down_proj.weight"),
)
SHARED_EXPERTS = _rules(
    BLOCK,
    ("mlp.router.expert_bias", "replicated", "mlp.gate.e_score_correction_bias"),
    (
        "mlp.shared_experts.linear_fc1.weight",
        "glu",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    ("mlp.shared_experts.linear_fc2.weight", "row", "mlp.shared_experts.down_proj.weight"),
)

DELTA_NET = _rules(
    BLOCK,
    (
        "self_attention.in_proj.weight",
        "delta_in",
        "linear_attn.in_proj_qkvz.weight",
        "linear_attn.in_proj_ba.weight",
    ),
    ("self_attention.conv_weight", "delta_conv", "linear_attn.conv1d.weight"),
    ("self_attention.dt_bias", "column", "linear_attn.dt_bias"),
    ("self_attention.A_log", "column", "linear_attn.A_log"),
    ("self_attention.norm_weight", "replicated", "linear_attn.norm.weight"),
    ("self_attention.out_proj.weight", "row", "linear_attn.out_proj.weight"),
)
GATED_ATTENTION = tuple(replace(rule, layout="gated_qkv") if rule.layout == "qkv" else rule for rule in ATTENTION)
GATED_SHARED_EXPERT = _rules(
    BLOCK,
    (
        "mlp.shared_experts.linear_fc1.weight",
        "glu",
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
    ),
    ("mlp.shared_experts.linear_fc2.weight", "row", "mlp.shared_expert.down_proj.weight"),
    ("mlp.shared_experts.gate_weight", "replicated", "mlp.shared_expert_gate.weight"),
)

SANDWICH = _rules(
    BLOCK,
    ("self_attention.post_layernorm.weight", "replicated", "post_self_attn_layernorm.weight"),
    ("mlp.linear_fc1.weight", "fused_glu", "mlp.gate_up_proj.weight"),
    ("mlp.linear_fc2.weight", "row", "mlp.down_proj.weight"),
    ("mlp.post_layernorm.weight", "replicated", "post_mlp_layernorm.weight"),
)

DENSE = ENDS + NORMS + ATTENTION + MLP

NAME_MAPS: dict[str, tuple[Rule, ...]] = {
    "qwen2": DENSE,
    "qwen3": DENSE,
    "llama": DENSE,
    "qwen3_moe": DENSE + EXPERTS,
    "qwen3_next": ENDS + NORMS + GATED_ATTENTION + DELTA_NET + MLP + EXPERTS + GATED_SHARED_EXPERT,
    "glm4": ENDS + NORMS + ATTENTION + SANDWICH,
    "glm4_moe": DENSE + EXPERTS + SHARED_EXPERTS,
    "deepseek_v3": ENDS + NORMS + LATENT_ATTENTION + MLP + EXPERTS + SHARED_EXPERTS,
}


@dataclass(frozen=True)
class DraftLayers:
    """Layers for multi-token prediction: where the checkpoint has layer `{draft}` (from 0; `{layer}` counts on after
    the model's own), and what it calls the parts beside those of an ordinary layer."""

    prefix: str
    parts: dict[str, tuple[str, str]]
    """Megatron's name -> (layout, the checkpoint's)."""


_NEXTN = DraftLayers(
    BLOCK[1],
    {
        "enorm.weight": ("replicated", "enorm.weight"),
        "hnorm.weight": ("replicated", "hnorm.weight"),
        "eh_proj.weight": ("column", "eh_proj.weight"),
        "final_layernorm.weight": ("replicated", "shared_head.norm.weight"),
    },
)
_MIMO = DraftLayers(
    "model.mtp_layers.{draft}.",
    {
        "enorm.weight": ("replicated", "token_layernorm.weight"),
        "hnorm.weight": ("replicated", "hidden_layernorm.weight"),
        # Its input is hidden state, then embedding.
        "eh_proj.weight": ("turned_column", "input_proj.weight"),
        "final_layernorm.weight": ("replicated", "final_layernorm.weight"),
    },
)
DRAFT_LAYERS = {"qwen2": _MIMO, "glm4_moe": _NEXTN, "deepseek_v3": _NEXTN}
"""By family. MiMo is Qwen2 with such layers."""
KEPT: dict[str, tuple[str, ...]] = {"qwen3_next": ("mtp.",)}
"""By family: what the names of layers for multi-token prediction begin with that are not built here. Exports take them
from the checkpoint that the run started from."""
