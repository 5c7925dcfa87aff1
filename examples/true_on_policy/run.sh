#!/usr/bin/env bash
# GRPO on GSM8K where trainer and engine compute the same bits: examples/true_on_policy/run.sh /path/to/model [more flags]
# Later flags win, e.g. --device cpu --num-rollout 2.
set -euo pipefail
model=${1:?usage: examples/true_on_policy/run.sh /path/to/hf-model [more flags]}
shift
cd "$(dirname "$0")/../.."

flags=(
  --hf-checkpoint "$model"
  --train-backend fsdp --rollout-engine embedded --colocate --actor-num-gpus-per-node 1
  # Ends the run at the first log-prob that differs in a single bit.
  --true-on-policy-mode

  --prompt-data data/gsm8k/train.jsonl --input-key question --label-key answer --apply-chat-template --rollout-shuffle
  --rm-type math

  --num-rollout 100 --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128
  --rollout-max-response-len 512 --rollout-temperature 1.0

  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
  --lr 1e-6 --lr-warmup-iters 5
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --gradient-checkpointing

  --run-dir runs/true-on-policy
)
python=python
[ -x .venv/bin/python ] && python=.venv/bin/python
exec "$python" train.py "${flags[@]}" "$@"
