# The GRPO recipe of scripts/run-*.sh. They set NODES, SHAPE (a file of scripts/models) and `flags`: their layout of
# ranks and batch. The command line is theirs:
#   scripts/run-NAME.sh MODEL [more flags]
# MODEL is the Hugging Face directory; later flags win. On several nodes NODE_RANK and HEAD come first (cluster.sh).
# DATA, INPUT_KEY and LABEL_KEY choose the prompts, RUN the run's directory; DRY_RUN=1 shows the resolved configuration.
set -euo pipefail
name=$(basename "$0" .sh)
model=${1:?usage: scripts/$name.sh MODEL [more flags]}
shift
cd "$(dirname "$0")/.."
. scripts/cluster.sh
. "scripts/models/$SHAPE.sh"
run=${RUN:-runs/${name#run-}}

recipe=(
    --hf-checkpoint "$model" --ref-load "$model" "${MODEL_ARGS[@]}"
    --train-backend megatron --colocate --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE"
    --sequence-parallel --sglang-mem-fraction-static 0.7

    # A plain string column becomes one user turn. The label ends in "#### 18", which the math reward reads.
    --prompt-data "${DATA:-data/gsm8k/train.jsonl}" --input-key "${INPUT_KEY:-question}"
    --label-key "${LABEL_KEY:-answer}" --apply-chat-template --rollout-shuffle --rm-type math

    --num-rollout 3000 --rollout-temperature 1.0
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
    --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0
    --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --use-dynamic-batch-size --balance-data
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-backend flash

    --run-dir "$run" --save "$run/checkpoints" --load "$run/checkpoints" --save-interval 20 --async-save
)
launch train.py "${recipe[@]}" "${flags[@]}" "$@"
