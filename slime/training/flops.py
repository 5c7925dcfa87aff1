"""FLOPs of a model's forward pass over a sequence, from its Hugging Face config. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFlops:
    """Matrix products of a causal transformer; a multiplication and an addition are 2 FLOPs."""

    per_token: int
    """Everything that does not depend on the sequence: 2 x the weights that a token is multiplied with."""
    per_token_pair: int
    """Attention scores and their sum of values, for each pair of a token and one that it sees."""

    def forward(self, length: int) -> int:
        """One sequence of `length` tokens, each of which sees itself and all before it. Backward takes twice that."""
        return self.per_token * length + self.per_token_pair * (length * (length + 1) // 2)

    @classmethod
    def of_hf_config(cls, config: Mapping[str, Any]) -> ModelFlops:
        """From config.json. Of a mixture of experts, the experts that one token visits count.

        Raises:
            ValueError: a size is missing.
        """
        config = {**config, **(config.get("text_config") or {})}
        needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [name for name in needed if not config.get(name)]
        if missing:
            raise ValueError(f"config.json has no {missing[0]}, so the FLOPs of a sequence cannot be told")
        hidden, layers, heads = (config[name] for name in needed[:3])
        groups = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * groups)
        dense = 3 * hidden * (config.get("intermediate_size") or 4 * hidden)
        weights = layers * attention + hidden * config["vocab_size"]
        visited = config.get("num_experts_per_tok") or 0
        if visited:
            expert = (
                3 * hidden * (config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden)
            )
            sparse = layers - (config.get("first_k_dense_replace") or 0)
            weights += sparse * expert * (visited + (config.get("n_shared_experts") or 0)) + (layers - sparse) * dense
        else:
            weights += layers * dense
        return cls(2 * weights, 4 * layers * heads * head_dim)
