# Architecture of glm4.5-355B-A32B under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 92
    --hidden-size 5120
    --ffn-hidden-size 12288
    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --qk-layernorm
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --rotary-percent 0.5
    --vocab-size 151552
    --untie-embeddings-and-output-weights
    --num-experts 160
    --moe-ffn-hidden-size 1536
    --moe-shared-expert-intermediate-size 1536
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias
)
