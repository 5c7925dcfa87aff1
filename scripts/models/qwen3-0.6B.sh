# Architecture of qwen3-0.6B under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 1024
    --ffn-hidden-size 3072
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --normalization RMSNorm
    --norm-epsilon 1e-06
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --vocab-size 151936
)
