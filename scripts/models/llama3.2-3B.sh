# Architecture of llama3.2-3B under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3072
    --ffn-hidden-size 8192
    --num-attention-heads 24
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --use-rotary-position-embeddings
    --rotary-base 500000
    --vocab-size 128256
)
