#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B on one node of 8 GPUs, trainer and engines on the same GPUs.
# usage: scripts/run-qwen3-30B-A3B.sh MODEL [more flags]; scripts/grpo.sh says more
NODES=1
SHAPE=qwen3-30B-A3B
flags=(
    --tensor-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --optimizer-cpu-offload --rollout-num-gpus-per-engine 8
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 8192 --max-tokens-per-gpu 16384
)
. "$(dirname "$0")/grpo.sh"
