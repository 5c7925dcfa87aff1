#!/usr/bin/env bash
# GRPO of GLM-4.5-Air on 8 nodes of 8 GPUs, trainer and engines on the same GPUs.
# usage: NODE_RANK=n HEAD=address scripts/run-glm4.5-106B-A12B.sh MODEL [more flags]; MODEL is the Hugging Face directory. Later flags win. DRY_RUN=1 shows
# the resolved configuration.
set -euo pipefail
model=${1:?usage: scripts/run-glm4.5-106B-A12B.sh MODEL [more flags]}
shift
cd "$(dirname "$0")/.."
NODES=8
. scripts/cluster.sh
. scripts/models/glm4.5-106B-A12B.sh

flags=(
    --hf-checkpoint "$model" --ref-load "$model" "${MODEL_ARGS[@]}"
    --train-backend megatron --colocate --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE"
    --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --optimizer-cpu-offload
    --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7

    --num-rollout 3000 --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512
    --rollout-max-response-len 8192 --rollout-temperature 1.0 --max-tokens-per-gpu 16384

    # Data: a plain string column becomes one user turn. The label ends in "#### 18", which the math reward reads.
    --prompt-data "${DATA:-data/gsm8k/train.jsonl}" --input-key "${INPUT_KEY:-question}"
    --label-key "${LABEL_KEY:-answer}" --apply-chat-template --rollout-shuffle --rm-type math

    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
    --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0
    --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --use-dynamic-batch-size --balance-data
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-backend flash

    --run-dir "${RUN:-runs/glm4.5-106B-A12B}" --save "${RUN:-runs/glm4.5-106B-A12B}/checkpoints" --load "${RUN:-runs/glm4.5-106B-A12B}/checkpoints"
    --save-interval 20 --async-save
)
launch train.py "${flags[@]}" "$@"
