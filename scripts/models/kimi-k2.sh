# Architecture of kimi-k2 under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 64
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --normalization RMSNorm
    --norm-epsilon 1e-06
    --use-rotary-position-embeddings
    --rotary-base 50000
    --vocab-size 163840
    --untie-embeddings-and-output-weights
    --num-experts 384
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.827
    --moe-router-enable-expert-bias
)
