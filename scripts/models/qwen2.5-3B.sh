# Architecture of qwen2.5-3B under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2048
    --ffn-hidden-size 11008
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon 1e-06
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --vocab-size 151936
)
