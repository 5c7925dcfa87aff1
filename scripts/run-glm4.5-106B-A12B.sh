#!/usr/bin/env bash
# GRPO of GLM-4.5-Air on 8 nodes of 8 GPUs, trainer and engines on the same GPUs.
# usage: NODE_RANK=n HEAD=address scripts/run-glm4.5-106B-A12B.sh MODEL [more flags]; scripts/grpo.sh says more
NODES=8
SHAPE=glm4.5-106B-A12B
flags=(
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --optimizer-cpu-offload --rollout-num-gpus-per-engine 8
    --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512
    --rollout-max-response-len 8192 --max-tokens-per-gpu 16384
)
. "$(dirname "$0")/grpo.sh"
