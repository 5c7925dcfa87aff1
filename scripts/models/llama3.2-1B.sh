# Architecture of llama3.2-1B under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 16
    --hidden-size 2048
    --ffn-hidden-size 8192
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 64
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --use-rotary-position-embeddings
    --rotary-base 500000
    --vocab-size 128256
)
