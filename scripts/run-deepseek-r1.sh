#!/usr/bin/env bash
# GRPO of DeepSeek-R1 (671B) on 16 nodes of 8 GPUs, trainer and engines on the same GPUs.
# usage: NODE_RANK=n HEAD=address scripts/run-deepseek-r1.sh MODEL [more flags]; scripts/grpo.sh says more
NODES=16
SHAPE=deepseek-v3
flags=(
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 16
    --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
    --optimizer-cpu-offload --rollout-num-gpus-per-engine 32
    --rollout-batch-size 128 --n-samples-per-prompt 8 --global-batch-size 1024
    --rollout-max-response-len 16384 --max-tokens-per-gpu 16384
)
. "$(dirname "$0")/grpo.sh"
