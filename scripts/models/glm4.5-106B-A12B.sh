# Architecture of glm4.5-106B-A12B under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 46
    --hidden-size 4096
    --ffn-hidden-size 10944
    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --rotary-percent 0.5
    --vocab-size 151552
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 1408
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 1
    --moe-router-enable-expert-bias
)
