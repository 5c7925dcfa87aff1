"""Flags under Megatron's own names."""

import functools
from typing import Any

from slime.arguments import pending
from slime.arguments.flag import (
    OPTIONAL_BOOL,
    STORE_FALSE,
    STORE_TRUE,
    Family,
    Flag,
    function_path,
    integer,
    number,
    text,
)
from slime.backends.megatron_utils.fields import OWNED, is_field, owned

__all__ = ("FAMILY", "INSTALL_MEGATRON", "PREFIX", "installed_families", "is_field", "owned")


def flag(name: str, type=text, default: Any = None, help: str = "", **fields) -> Flag:
    return Flag(name, type, default, help, **fields)


def flag_switch(name: str, help: str) -> Flag:
    return flag(name, help=help, action=STORE_TRUE)


def moment(name: str, help: str) -> Flag:
    unscaled = dict.fromkeys(("fp16", "fp8"), "they need scales; use bf16")
    return flag(name, default="fp32", help=help, choices=("fp32", "bf16", "fp16", "fp8"), pending_choices=unscaled)


PREFIX = "--moe-"
INSTALL_MEGATRON = 'pip install "slime[megatron]"'

FAMILY = Family(
    "Megatron",
    "Parallelism, recomputation and architecture under Megatron's names; `--moe-*` likewise.",
    (
        flag("--tensor-model-parallel-size", integer, 1, "Tensor-parallel ranks."),
        flag_switch("--sequence-parallel", "Shard activations along the sequence inside tensor-parallel groups."),
        flag("--pipeline-model-parallel-size", integer, 1, "Pipeline stages."),
        flag("--virtual-pipeline-model-parallel-size", integer, help="Model chunks per pipeline stage."),
        flag("--num-layers-per-virtual-pipeline-stage", integer, help="Layers per model chunk."),
        flag("--expert-model-parallel-size", integer, 1, "Expert-parallel ranks."),
        flag("--expert-tensor-parallel-size", integer, help="Tensor-parallel ranks inside one expert."),
        flag("--recompute-granularity", help="What to recompute.", choices=("full", "selective")),
        flag("--recompute-method", help="How layers are chosen.", choices=("uniform", "block")),
        flag("--recompute-num-layers", integer, help="Layers per recomputed block."),
        flag_switch(
            "--optimizer-cpu-offload", "Keep the moments in host memory and step there (--optimizer cpu_adam)."
        ),
        flag_switch("--overlap-cpu-optimizer-d2h-h2d", "Overlap the copies of the offloaded optimizer: always."),
        flag_switch("--use-precision-aware-optimizer", "Moments in the dtypes of the next two flags."),
        moment("--exp-avg-dtype", "Dtype of the first moment."),
        moment("--exp-avg-sq-dtype", "Dtype of the second moment."),
        flag("--attention-dropout", number, 0.0, "Dropout of attention weights: 0."),
        flag("--hidden-dropout", number, 0.0, "Dropout of hidden states: 0."),
        flag_switch("--accumulate-allreduce-grads-in-fp32", "Gradients accumulate and reduce in fp32: always."),
        flag_switch("--attention-softmax-in-fp32", "Attention softmax in fp32: always."),
        flag(
            "--attention-backend",
            help="Attention kernels: flash kernels over packed rows.",
            choices=("auto", "flash", "fused", "unfused", "local"),
            pending_choices=dict.fromkeys(("fused", "unfused", "local"), pending.OTHER_ATTENTION),
        ),
        flag_switch("--swiglu", "SwiGLU feed-forward layers."),
        flag("--num-layers", integer, help="Transformer layers."),
        flag("--hidden-size", integer, help="Width of hidden states."),
        flag("--ffn-hidden-size", integer, help="Width of the feed-forward layers."),
        flag("--num-attention-heads", integer, help="Attention heads."),
        flag_switch("--group-query-attention", "Grouped key/value heads."),
        flag("--num-query-groups", integer, help="Key/value heads."),
        flag_switch("--use-rotary-position-embeddings", "Rotary position embeddings."),
        flag(
            "--disable-bias-linear",
            help="Linear layers without bias.",
            action=STORE_FALSE,
            dest="add_bias_linear",
        ),
        flag_switch("--add-qkv-bias", "Bias in the query/key/value projection."),
        flag("--normalization", help="Kind of normalisation.", choices=("LayerNorm", "RMSNorm")),
        flag("--norm-epsilon", number, help="Epsilon of the normalisation."),
        flag("--rotary-base", number, help="Base of the rotary embedding."),
        flag("--rotary-percent", number, None, "Share of each head that is rotated."),
        flag("--vocab-size", integer, help="Vocabulary without padding."),
        flag("--padded-vocab-size", integer, help="Vocabulary with padding."),
        flag("--make-vocab-size-divisible-by", integer, 128, "Vocabulary is padded to a multiple of this."),
        flag("--kv-channels", integer, help="Width of one head."),
        flag_switch("--qk-layernorm", "Normalise queries and keys."),
        flag_switch("--untie-embeddings-and-output-weights", "Separate output layer."),
        flag_switch("--multi-latent-attention", "Latent attention (DeepSeek)."),
        flag("--q-lora-rank", integer, help="Latent attention: rank of the queries."),
        flag("--kv-lora-rank", integer, help="Latent attention: rank of keys and values."),
        flag("--qk-head-dim", integer, help="Latent attention: width of a head that is not rotated."),
        flag("--qk-pos-emb-head-dim", integer, help="Latent attention: width of a head that is rotated."),
        flag("--v-head-dim", integer, help="Latent attention: width of a value head."),
        flag("--num-experts", integer, help="Experts per layer."),
        flag("--moe-ffn-hidden-size", integer, help="Width of an expert."),
        flag("--moe-shared-expert-intermediate-size", integer, help="Width of all shared experts together."),
        flag("--moe-router-topk", integer, help="Experts per token."),
        flag("--moe-router-num-groups", integer, help="Groups that experts are chosen from."),
        flag("--moe-router-group-topk", integer, help="Groups per token."),
        flag("--moe-router-topk-scaling-factor", number, help="Factor of the experts' weights."),
        flag("--moe-router-score-function", help="Router scores.", choices=("softmax", "sigmoid")),
        flag_switch("--moe-router-enable-expert-bias", "A bias per expert that only selects."),
        flag_switch("--moe-router-pre-softmax", "Softmax before the choice of experts."),
        flag(
            "--model-name",
            help="Name that picks the weight converter.",
            pending="the name map follows from model_type in config.json",
        ),
        flag(
            "--megatron-to-hf-mode",
            default="raw",
            help="Weight converter.",
            choices=("raw", "bridge"),
            pending_choices={"bridge": "slime's own name maps convert all weights"},
        ),
        flag(
            "--qkv-format",
            default="thd",
            help="Layout of rows; all are packed.",
            choices=("thd", "bshd"),
            pending_choices={"bshd": "rows are packed, never padded to equal lengths"},
        ),
        flag("--data-pad-size-multiplier", integer, 128, "Packed rows are padded to a multiple of this x TP."),
        flag(
            "--allgather-cp",
            help="Contiguous all-gather context parallelism.",
            action=STORE_TRUE,
            pending="keys and values are gathered anyway; contiguous parts are for sparse attention, not built",
        ),
        flag_switch("--recompute-loss-function", "Logits are computed again in backward: always."),
        flag("--custom-model-provider-path", function_path, help="Builds the model."),
        flag("--custom-megatron-init-path", function_path, help="Called after Megatron is initialised."),
        flag("--custom-megatron-before-log-prob-hook-path", function_path, help="Called before log-probs."),
        flag("--custom-megatron-before-train-step-hook-path", function_path, help="Called before each step."),
        flag("--mtp-num-layers", integer, help="Layers for multi-token prediction; as many as the checkpoint has."),
        flag("--mtp-loss-scaling-factor", number, 0.2, "Weight of their loss."),
        flag_switch("--enable-mtp-training", "Train them."),
        flag_switch("--disable-weights-backuper", "Weights are sent from the trainers' own, not from a copy: always."),
    ),
)


@functools.cache
def installed_families() -> tuple[Family, ...]:
    """All other flags of the installed Megatron; empty when it is not installed."""
    from slime.arguments.families import FLAGS
    from slime.backends.megatron_utils.arguments import config_family, training_family

    own = {name for row in FLAGS for name in (*row.names, row.dest)}
    fields = config_family(without=own | set(OWNED))
    if fields is None:
        return ()
    own |= {name for row in fields.flags for name in (*row.names, row.dest)}
    own |= {f"--no-{name[2:]}" for row in fields.flags if row.action == OPTIONAL_BOOL for name in row.names}
    training = training_family(without=own)
    return (fields, training) if training else (fields,)
