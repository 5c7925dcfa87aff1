# Architecture of qwen2.5-7B under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon 1e-06
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --vocab-size 152064
    --untie-embeddings-and-output-weights
)
