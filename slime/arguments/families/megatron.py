"""Flags under Megatron's own names. All wait for the Megatron trainer."""

from typing import Any

from slime.arguments import pending
from slime.arguments.flag import STORE_FALSE, STORE_TRUE, Family, Flag, function_path, integer, number, text


def megatron(name: str, type=text, default: Any = None, help: str = "", **fields) -> Flag:
    return Flag(name, type, default, help, pending=pending.MEGATRON, **fields)


def switch(name: str, help: str) -> Flag:
    return megatron(name, help=help, action=STORE_TRUE)


PREFIX = "--moe-"

FAMILY = Family(
    "Megatron",
    "Parallelism, recomputation and architecture under Megatron's names; `--moe-*` likewise.",
    (
        megatron("--tensor-model-parallel-size", integer, 1, "Tensor-parallel ranks."),
        switch("--sequence-parallel", "Shard activations along the sequence inside tensor-parallel groups."),
        megatron("--pipeline-model-parallel-size", integer, 1, "Pipeline stages."),
        megatron("--virtual-pipeline-model-parallel-size", integer, help="Model chunks per pipeline stage."),
        megatron("--num-layers-per-virtual-pipeline-stage", integer, help="Layers per model chunk."),
        megatron("--expert-model-parallel-size", integer, 1, "Expert-parallel ranks."),
        megatron("--expert-tensor-parallel-size", integer, help="Tensor-parallel ranks inside one expert."),
        megatron("--recompute-granularity", help="What to recompute.", choices=("full", "selective")),
        megatron("--recompute-method", help="How layers are chosen.", choices=("uniform", "block")),
        megatron("--recompute-num-layers", integer, help="Layers per recomputed block."),
        switch("--optimizer-cpu-offload", "Keep the optimizer's state in host memory."),
        switch("--overlap-cpu-optimizer-d2h-h2d", "Overlap the copies of the offloaded optimizer."),
        switch("--use-precision-aware-optimizer", "Optimizer state in lower precision."),
        megatron("--attention-dropout", number, 0.0, "Dropout of attention weights."),
        megatron("--hidden-dropout", number, 0.0, "Dropout of hidden states."),
        switch("--accumulate-allreduce-grads-in-fp32", "Gradients accumulate and reduce in fp32."),
        switch("--attention-softmax-in-fp32", "Attention softmax in fp32."),
        megatron(
            "--attention-backend", help="Attention kernels.", choices=("auto", "flash", "fused", "unfused", "local")
        ),
        switch("--swiglu", "SwiGLU feed-forward layers."),
        megatron("--num-layers", integer, help="Transformer layers."),
        megatron("--hidden-size", integer, help="Width of hidden states."),
        megatron("--ffn-hidden-size", integer, help="Width of the feed-forward layers."),
        megatron("--num-attention-heads", integer, help="Attention heads."),
        switch("--group-query-attention", "Grouped key/value heads."),
        megatron("--num-query-groups", integer, help="Key/value heads."),
        switch("--use-rotary-position-embeddings", "Rotary position embeddings."),
        megatron(
            "--disable-bias-linear",
            help="Linear layers without bias.",
            action=STORE_FALSE,
            dest="add_bias_linear",
        ),
        switch("--add-qkv-bias", "Bias in the query/key/value projection."),
        megatron("--normalization", help="Kind of normalisation.", choices=("LayerNorm", "RMSNorm")),
        megatron("--norm-epsilon", number, help="Epsilon of the normalisation."),
        megatron("--rotary-base", number, help="Base of the rotary embedding."),
        megatron("--rotary-percent", number, 1.0, "Share of each head that is rotated."),
        megatron("--vocab-size", integer, help="Vocabulary without padding."),
        megatron("--padded-vocab-size", integer, help="Vocabulary with padding."),
        megatron("--make-vocab-size-divisible-by", integer, 128, "Vocabulary is padded to a multiple of this."),
        megatron("--kv-channels", integer, help="Width of one head."),
        switch("--qk-layernorm", "Normalise queries and keys."),
        switch("--untie-embeddings-and-output-weights", "Separate output layer."),
        megatron("--model-name", help="Name that picks the weight converter."),
        megatron("--megatron-to-hf-mode", default="raw", help="Weight converter.", choices=("raw", "bridge")),
        Flag(
            "--megatron-config-path",
            text,
            help="YAML of optimizer flags per role, `actor: {...}` and `critic: {...}`; replaces the critic's flags.",
        ),
        megatron("--qkv-format", default="thd", help="Packed or padded layout.", choices=("thd", "bshd")),
        megatron("--data-pad-size-multiplier", integer, 128, "Packed rows are padded to a multiple of this x TP."),
        switch("--allgather-cp", "Contiguous all-gather context parallelism."),
        switch("--recompute-loss-function", "Activation checkpointing of the loss."),
        megatron("--custom-model-provider-path", function_path, help="Builds the model."),
        megatron("--custom-megatron-init-path", function_path, help="Called after Megatron is initialised."),
        megatron("--custom-megatron-before-log-prob-hook-path", function_path, help="Called before log-probs."),
        megatron("--custom-megatron-before-train-step-hook-path", function_path, help="Called before each step."),
        megatron("--mtp-num-layers", integer, help="Layers of multi-token prediction."),
        megatron("--mtp-loss-scaling-factor", number, 0.2, "Weight of the MTP loss."),
        switch("--enable-mtp-training", "Train the MTP layers."),
        switch("--disable-weights-backuper", "Keep trainers awake until weights are synced."),
    ),
)
