#!/usr/bin/env bash
# GRPO on GSM8K with any Hugging Face checkpoint: examples/gsm8k/run.sh /path/to/model [more flags]
# Later flags win, e.g. --actor-num-gpus-per-node 8, --device cpu, --num-rollout 2.
set -euo pipefail
model=${1:?usage: examples/gsm8k/run.sh /path/to/hf-model [more flags]}
shift
cd "$(dirname "$0")/../.."

flags=(
  --hf-checkpoint "$model"
  --train-backend fsdp --colocate --actor-num-gpus-per-node 1

  # Data: a plain string column becomes one user turn. The label ends in "#### 18", which the math reward reads.
  --prompt-data data/gsm8k/train.jsonl --input-key question --label-key answer --apply-chat-template --rollout-shuffle
  --rm-type math

  # 32 prompts x 8 responses a rollout, one optimizer step on all of them.
  --num-rollout 200 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
  --rollout-max-response-len 512 --rollout-temperature 1.0

  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
  --lr 1e-6 --lr-warmup-iters 5 --weight-decay 0.1
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --gradient-checkpointing --balance-data

  --eval-prompt-data gsm8k data/gsm8k/test.jsonl --eval-input-key question --eval-label-key answer
  --eval-interval 20 --eval-max-response-len 512 --eval-temperature 0
  --run-dir runs/gsm8k --save runs/gsm8k/checkpoints --save-interval 20
)
python=python
[ -x .venv/bin/python ] && python=.venv/bin/python
exec "$python" train.py "${flags[@]}" "$@"
