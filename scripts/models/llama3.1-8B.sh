# Architecture of llama3.1-8B under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
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
    --untie-embeddings-and-output-weights
)
