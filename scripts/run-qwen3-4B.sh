#!/usr/bin/env bash
# GRPO of Qwen3-4B on one node of 8 GPUs, trainer and engines on the same GPUs.
# usage: scripts/run-qwen3-4B.sh MODEL [more flags]; scripts/grpo.sh says more
NODES=1
SHAPE=qwen3-4B
flags=(
    --tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 2
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 8192 --max-tokens-per-gpu 9216
)
. "$(dirname "$0")/grpo.sh"
