# Architecture of mimo-7B under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --use-rotary-position-embeddings
    --rotary-base 640000
    --vocab-size 151680
    --untie-embeddings-and-output-weights
)
