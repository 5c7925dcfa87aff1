"""Rotary embedding of packed rows: cosines and sines of every token's position, computed once per row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slime.backends.megatron_utils.architecture import Rope


def inverse_frequencies(rope: Rope) -> tuple[torch.Tensor, float]:
    """theta^(-2i/dim) [dim / 2], after the checkpoint's scaling, and what cosines and sines are multiplied with."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain = 1.0 / rope.theta**exponents
    kind = rope.scaling.get("rope_type", "default")
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / rope.scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, rope.scaling), 1.0
    return _yarn(plain, rope)


def _llama3(plain: torch.Tensor, scaling: dict) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, those between the two limits are interpolated."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rounds = original * plain / (2 * math.pi)
    smooth = ((rounds - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / scaling["factor"] + smooth * plain


def _yarn(plain: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3.2 and eq. 22)."""
    scaling, factor = rope.scaling, rope.scaling["factor"]
    original = scaling["original_max_position_embeddings"]

    def index_of(rounds: float) -> float:
        return rope.dim * math.log(original / (rounds * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2).float() - first) / max(last - first, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return plain / factor * (1 - keep) + plain * keep, attention


@dataclass
class RotaryTables:
    """cos and sin [T, 1, dim] of a row's positions."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def rotate(self, query_THD: torch.Tensor, key_TGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the first `dim` entries of every head; the rest passes."""
        whole = self.cos.shape[-1] == query_THD.shape[-1] == key_TGD.shape[-1]
        if query_THD.is_cuda and query_THD.dtype != torch.float32 and whole and not self.interleaved:
            from slime.modeling.triton_ops import Rotary as FusedRotary

            heads_first = (x.transpose(0, 1)[None] for x in (query_THD, key_TGD))
            tables = (x.transpose(0, 1) for x in (self.cos, self.sin))
            query, key = FusedRotary.apply(*heads_first, *tables)
            return query[0].transpose(0, 1), key[0].transpose(0, 1)
        return self._rotated(query_THD), self._rotated(key_TGD)

    def _rotated(self, x_THD: torch.Tensor) -> torch.Tensor:
        dim = self.cos.shape[-1]
        x, rest = x_THD[..., :dim], x_THD[..., dim:]
        if self.interleaved:
            turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
        else:
            first, second = x.chunk(2, -1)
            turned = torch.cat((-second, first), -1)
        return torch.cat((x * self.cos + turned * self.sin, rest), -1)


class Rotary:
    """Tables for rows of one model."""

    def __init__(self, rope: Rope, device: torch.device):
        frequencies, self.factor = inverse_frequencies(rope)
        self.frequencies = frequencies.to(device)
        self.interleaved = rope.interleaved

    def tables(self, position_ids_T: torch.Tensor, dtype: torch.dtype) -> RotaryTables:
        angles = position_ids_T[:, None].float() * self.frequencies
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        angles = angles[:, None]
        return RotaryTables(
            (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype), self.interleaved
        )
