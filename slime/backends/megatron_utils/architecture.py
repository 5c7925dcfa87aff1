"""From a Hugging Face `config.json` to Megatron's description of the same model.

Needs neither torch nor megatron, so that architecture flags are checked before anything is launched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


class UnsupportedModelError(ValueError):
    """A model that the Megatron trainer cannot build as its checkpoint means it."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864)."""

    dim: int
    """Rotated part of a head."""
    theta: float
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i + 1) instead of (i, i + dim / 2)."""
    scaling: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's `rope_type` and its parameters; empty for the plain one."""


@dataclass(frozen=True)
class Architecture:
    """What must agree between checkpoint, model and flags."""

    family: str
    """Name of the weight map."""
    transformer: dict[str, Any]
    """Fields of Megatron's TransformerConfig (MLATransformerConfig with `multi_latent_attention`)."""
    vocab_size: int
    tied: bool
    """Output layer and embedding are one matrix."""
    rope: Rope
    max_position_embeddings: int
    post_norms: bool = False
    """The outputs of attention and feed-forward are normalised, too."""
    mtp_layers: int = 0
    """Layers for multi-token prediction, after the others."""

    def __getitem__(self, name: str) -> Any:
        return self.transformer[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.transformer.get(name, default)

    @property
    def moe_layers(self) -> list[bool]:
        """Per layer: does it have experts?"""
        pattern = self.get("moe_layer_freq")
        return [bool(x) for x in pattern] if pattern else [False] * self["num_layers"]

    @property
    def delta_net_layers(self) -> list[bool]:
        """Per layer: is there a gated delta net in the place of attention?"""
        pattern = self.get("linear_attention_freq")
        return [bool(x) for x in pattern] if pattern else [False] * self["num_layers"]


def read_architecture(path: str) -> Architecture:
    """The architecture of a Hugging Face directory.

    Raises:
        FileNotFoundError: `path` has no config.json.
        UnsupportedModelError: unknown family, or a feature that Megatron's modules do not have; names both.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path!r} has no config.json: give a Hugging Face checkpoint directory")
    return architecture_of(json.loads(file.read_text()))


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Megatron's rule: the next multiple of `divisible_by` x ranks."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The architecture that a parsed `config.json` describes. Raises as `read_architecture`."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"--train-backend megatron does not know model_type {model_type!r}; it has {', '.join(sorted(FAMILIES))}. "
            "Use --train-backend fsdp for other models"
        )
    return FAMILIES[model_type](config)


# -- parts that families share ----------------------------------------------------------------------------------------


def _common(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {config['hidden_act']!r}: only silu (SwiGLU) is built")
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        **more,
    }


def _rope(config: dict[str, Any], dim: int, interleaved: bool = False) -> Rope:
    """Both spellings: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of older checkpoints."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    factor = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedModelError(f"rope_type {kind!r}: only default, linear, llama3 and yarn are built")
    scaling = {} if kind == "default" else {**parameters, "rope_type": kind}
    return Rope(int(dim * factor), float(theta), interleaved, scaling)


def _no_window(config: dict[str, Any]) -> None:
    kinds = config.get("layer_types") or []
    windowed = "sliding_attention" in kinds or (config.get("use_sliding_window") and config.get("sliding_window"))
    if windowed:
        raise UnsupportedModelError("sliding-window attention is not built in the Megatron trainer")


def _build(family: str, config: dict[str, Any], transformer: dict[str, Any], rope: Rope) -> Architecture:
    return Architecture(
        family=family,
        transformer=transformer,
        vocab_size=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        rope=rope,
        max_position_embeddings=config.get("max_position_embeddings", 4096),
        mtp_layers=config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0,
    )


def _experts(number: int, top_k: int, width: int, pattern: list[int], **more: Any) -> dict[str, Any]:
    return {
        "num_moe_experts": number,
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": pattern,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        **more,
    }


def _sigmoid_experts(config: dict[str, Any], pattern: list[int]) -> dict[str, Any]:
    """DeepSeek-V3's router: sigmoid scores, a bias that only selects, groups, a scaling factor."""
    top_k, groups = config["num_experts_per_tok"], config.get("n_group") or 1
    number = config.get("n_routed_experts") or config["num_local_experts"]
    if not config.get("norm_topk_prob", True):
        raise UnsupportedModelError("norm_topk_prob false with a sigmoid router is not built in Megatron")
    group_top_k = config.get("topk_group") or 1
    if groups > 1 and top_k != 2 * group_top_k:
        raise UnsupportedModelError(
            f"num_experts_per_tok {top_k} with topk_group {group_top_k}: Megatron ranks groups by their best "
            "num_experts_per_tok / topk_group experts, the model by their best 2"
        )
    shared = config.get("n_shared_experts") or 0
    return _experts(
        number,
        top_k,
        config["moe_intermediate_size"],
        pattern,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_topk_scaling_factor=config.get("routed_scaling_factor", 1.0),
        moe_router_num_groups=groups if groups > 1 else None,
        moe_router_group_topk=group_top_k if groups > 1 else None,
        moe_shared_expert_intermediate_size=shared * config["moe_intermediate_size"] if shared else None,
        moe_router_dtype="fp32",
    )


# -- families ---------------------------------------------------------------------------------------------------------


def _qwen2(config: dict[str, Any]) -> Architecture:
    _no_window(config)
    transformer = _common(config, add_qkv_bias=True)
    return _build("qwen2", config, transformer, _rope(config, transformer["kv_channels"]))


def _qwen3(config: dict[str, Any]) -> Architecture:
    _no_window(config)
    transformer = _common(config, qk_layernorm=True, add_qkv_bias=bool(config.get("attention_bias")))
    return _build("qwen3", config, transformer, _rope(config, transformer["kv_channels"]))


def _softmax_experts(config: dict[str, Any]) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return _experts(
        config.get("num_experts") or config["num_local_experts"],
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        [int(i not in dense and (i + 1) % step == 0) for i in range(config["num_hidden_layers"])],
        moe_router_score_function="softmax",
        # Softmax over the chosen experts alone is the normalised softmax over all.
        moe_router_pre_softmax=not config.get("norm_topk_prob", False),
        moe_router_dtype="fp32",
    )


def _qwen3_moe(config: dict[str, Any]) -> Architecture:
    _no_window(config)
    transformer = _common(config, qk_layernorm=True, add_qkv_bias=bool(config.get("attention_bias")))
    transformer |= _softmax_experts(config)
    return _build("qwen3_moe", config, transformer, _rope(config, transformer["kv_channels"]))


def _qwen3_next(config: dict[str, Any]) -> Architecture:
    """Three layers with a gated delta net, one with attention, and so on; experts and a gated shared one."""
    if config.get("attention_bias"):
        raise UnsupportedModelError("Qwen3-Next with attention_bias is not built in the Megatron trainer")
    # What the family has unless its file says otherwise.
    config = {"norm_topk_prob": True, "partial_rotary_factor": 0.25, **config}
    layers, interval = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
    ]
    if not set(kinds) <= {"linear_attention", "full_attention"}:
        raise UnsupportedModelError(f"layer_types {sorted(set(kinds))}: only linear_attention and full_attention")
    transformer = _common(
        config,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(kind == "linear_attention") for kind in kinds],
        linear_conv_kernel_dim=config["linear_conv_kernel_dim"],
        linear_key_head_dim=config["linear_key_head_dim"],
        linear_value_head_dim=config["linear_value_head_dim"],
        linear_num_key_heads=config["linear_num_key_heads"],
        linear_num_value_heads=config["linear_num_value_heads"],
    )
    transformer |= _softmax_experts(config)
    transformer |= {
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }
    return _build("qwen3_next", config, transformer, _rope(config, transformer["kv_channels"]))


def _llama(config: dict[str, Any]) -> Architecture:
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UnsupportedModelError("Llama with biases is not built in the Megatron trainer")
    transformer = _common(config)
    return _build("llama", config, transformer, _rope(config, transformer["kv_channels"]))


def _glm4(config: dict[str, Any]) -> Architecture:
    transformer = _common(config, add_qkv_bias=config.get("attention_bias", True))
    # GLM-4 rotates half of each head unless told otherwise.
    config = {"partial_rotary_factor": 0.5, **config}
    rope = _rope(config, transformer["kv_channels"], interleaved=True)
    return replace(_build("glm4", config, transformer, rope), post_norms=True)


def _glm4_moe(config: dict[str, Any]) -> Architecture:
    pattern = [int(i >= config["first_k_dense_replace"]) for i in range(config["num_hidden_layers"])]
    transformer = _common(
        config, qk_layernorm=bool(config.get("use_qk_norm")), add_qkv_bias=bool(config.get("attention_bias"))
    )
    transformer |= _sigmoid_experts(config, pattern)
    return _build("glm4_moe", config, transformer, _rope(config, transformer["kv_channels"]))


def _deepseek_v3(config: dict[str, Any]) -> Architecture:
    pattern = [int(i >= config["first_k_dense_replace"]) for i in range(config["num_hidden_layers"])]
    rope = _rope(config, config["qk_rope_head_dim"], interleaved=True)
    transformer = _common(
        config,
        qk_layernorm=True,
        multi_latent_attention=True,
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        qk_head_dim=config["qk_nope_head_dim"],
        qk_pos_emb_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        rope_type="rope",
        rotary_base=rope.theta,
        rotary_percent=1.0,
    )
    transformer["kv_channels"] = config["v_head_dim"]
    transformer["num_query_groups"] = config["num_attention_heads"]
    if rope.scaling:
        if rope.scaling["rope_type"] != "yarn":
            raise UnsupportedModelError(f"rope_type {rope.scaling['rope_type']!r} with latent attention is not built")
        transformer |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope.scaling["factor"],
            "original_max_position_embeddings": rope.scaling["original_max_position_embeddings"],
            "beta_fast": rope.scaling.get("beta_fast", 32),
            "beta_slow": rope.scaling.get("beta_slow", 1),
            "mscale": rope.scaling.get("mscale", 1.0),
            "mscale_all_dim": rope.scaling.get("mscale_all_dim", 0.0),
        }
    if any(pattern):
        transformer |= _sigmoid_experts(config, pattern)
    return _build("deepseek_v3", config, transformer, rope)


FAMILIES: dict[str, Callable[[dict[str, Any]], Architecture]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "llama": _llama,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
    # Kimi-K2 and Moonlight are DeepSeek-V3 with other sizes.
    "kimi_k2": _deepseek_v3,
    # MiMo 7B is Qwen2 with one MTP layer.
    "mimo": _qwen2,
}
