# Architecture of moonlight-16B-A3B under Megatron's names. Optional: it follows from --hf-checkpoint and is checked against it.
MODEL_ARGS=(
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 11264
    --num-attention-heads 16
    --multi-latent-attention
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --use-rotary-position-embeddings
    --rotary-base 50000
    --vocab-size 163840
    --untie-embeddings-and-output-weights
    --num-experts 64
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816
    --moe-router-topk 6
    --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.446
    --moe-router-enable-expert-bias
)
