"""A tiny Qwen3 with random weights, saved as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path

HIDDEN_SIZE = 128
LAYERS = 2
HEADS = 4
INITIALIZER_RANGE = 0.05
"""Larger than the usual 0.02: a model this narrow starts to learn sooner."""


def save_model(tokenizer, path: Path, seed: int, context_length: int = 128) -> int:
    """Write model and tokenizer to the directory `path`; returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=HIDDEN_SIZE // HEADS,
        max_position_embeddings=context_length,
        initializer_range=INITIALIZER_RANGE,
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
