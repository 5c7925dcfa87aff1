"""A Qwen3 with random weights, saved as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3's sizes, and the learning rates that suit them."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    initializer_range: float
    sft_lr: float
    grpo_lr: float
    vocab_size: int | None = None
    """None: as many as the tokenizer has."""


SHAPES = {
    # An initializer_range above the usual 0.02: a model this narrow starts to learn sooner.
    "tiny": ModelShape(128, 384, 2, 4, 2, 32, 128, 0.05, sft_lr=4e-3, grpo_lr=4e-4),
    "qwen3-0.6b": ModelShape(1024, 3072, 28, 16, 8, 128, 1024, 0.02, sft_lr=3e-4, grpo_lr=3e-5, vocab_size=151936),
}


def save_model(tokenizer, path: Path, seed: int, shape: ModelShape) -> int:
    """Write model and tokenizer to the directory `path`; returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocab_size or len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_length,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())
