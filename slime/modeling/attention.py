"""One attention function for every Hugging Face model, in the trainer and in the embedded engine.

transformers' models look their attention up by name. The function registered here asks an *attention context*,
handed to the model call as the keyword `attention_context`, to do the work: `PackedSequences` for packed training
rows, the engine's paged KV state for serving. So both run the same module code on rows without padding.
"""

from __future__ import annotations

import inspect
from functools import cache, cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

ATTENTION_NAME = "slime_varlen"
# Sequences share a padded block on CPU when the shortest is at least this fraction of the longest.
MIN_FILL = 0.7


class AttentionContext(Protocol):
    """Computes attention for one model call."""

    def attend(
        self,
        layer_idx: int,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention. T tokens, H query heads, G key/value heads (H % G == 0); returns [T, H, D] (D of values).

        `window` is the sliding window in tokens (a token sees itself and the `window - 1` before it) or None.
        """
        ...


class PackedSequences:
    """Sequences packed one after the other into a row; each attends causally within itself.

    Args:
        lengths: tokens of each sequence, in row order.
        device: where the row lives.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        self.lengths = lengths
        self.device = torch.device(device)
        self.max_seqlen = max(lengths, default=0)
        self.cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        self.cu_seqlens[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        self.cu_seqlens = self.cu_seqlens.to(self.device)

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        if query_THD.is_cuda and query_THD.dtype in (torch.bfloat16, torch.float16):
            spans = (self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)
            return flash_varlen(query_THD, key_TGD, value_TGD, *spans, scale, window)
        return self._padded(query_THD, key_TGD, value_TGD, scale, window)

    @cached_property
    def _blocks(self) -> tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]:
        """Padded blocks of similar lengths: size B and length L of each, row index of all their tokens, and where each
        row token is in their output."""
        starts = self.cu_seqlens.tolist()
        order = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        shapes, blocks, base = [], [], 0
        sources = torch.empty(starts[-1], dtype=torch.int64)
        while order:
            longest = self.lengths[order[0]]
            members = [i for i in order if self.lengths[i] >= MIN_FILL * longest]
            order = order[len(members) :]
            # Padding repeats the last token. Causality hides it from every real query.
            offsets = torch.arange(longest)
            shapes.append((len(members), longest))
            blocks += [starts[i] + offsets.clamp(max=self.lengths[i] - 1) for i in members]
            for slot, i in enumerate(members):
                first = base + slot * longest
                sources[starts[i] : starts[i + 1]] = torch.arange(first, first + self.lengths[i])
            base += len(members) * longest
        return shapes, torch.cat(blocks).to(self.device), sources.to(self.device)

    def _padded(self, query_THD, key_TGD, value_TGD, scale, window):
        shapes, rows, sources = self._blocks
        repeat = query_THD.shape[1] // key_TGD.shape[1]
        # One gather for all blocks: its gradient is one pass over the row, too.
        sizes = [size * length for size, length in shapes]
        parts = zip(*(x.index_select(0, rows).split(sizes) for x in (query_THD, key_TGD, value_TGD)), strict=True)
        outputs = []
        for (size, length), part in zip(shapes, parts, strict=True):
            q, k, v = (x.view(size, length, *x.shape[1:]).transpose(1, 2) for x in part)
            if repeat > 1:
                k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            mask = None
            if window is not None and window < length:
                age = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
                mask = (age >= 0) & (age < window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
            outputs.append(out.transpose(1, 2).reshape(size * length, query_THD.shape[1], -1))
        return torch.cat(outputs).index_select(0, sources)


@cache
def _varlen_attn():
    """`torch.nn.attention.varlen.varlen_attn` and the keywords that make it causal and grouped in this release."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    return varlen_attn, "window_size" in parameters, "enable_gqa" in parameters


def flash_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of packed sequences on CUDA (bf16, fp16); the last query of each sees all of its keys.

    Shapes: q [Tq, H, D], k [Tk, G, D], v [Tk, G, Dv], cu_q and cu_k int32 [N + 1].
    """
    varlen_attn, has_window, has_gqa = _varlen_attn()
    kwargs = {"scale": scale}
    if has_window:
        kwargs["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        kwargs["is_causal"] = True
    else:
        raise NotImplementedError("sliding-window attention on CUDA needs torch >= 2.11")
    if has_gqa and q.shape[1] != k.shape[1]:
        kwargs["enable_gqa"] = True
    value_dim = v.shape[-1]
    out = varlen_attn(*padded_heads(q, k, v), cu_q, cu_k, max_q, max_k, **kwargs)
    return out[..., :value_dim]


def padded_heads(*heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as flash kernels want them: one head size, which latent attention does not have, and a
    multiple of 8. Zeros change no score and no output."""
    size = -(-max(x.shape[-1] for x in heads) // 8) * 8
    return tuple(F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in heads)


def attention_forward(
    module,
    query,
    key,
    value,
    attention_mask=None,
    scaling=None,
    dropout=0.0,
    sliding_window=None,
    attention_context: AttentionContext | None = None,
    **kwargs,
):
    """transformers' attention interface: query [1, H, T, D], key / value [1, G, T, D] -> ([1, T, H, D], None)."""
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} uses unsupported attention feature {name!r}")
    if attention_context is None:
        raise ValueError(f"attention {ATTENTION_NAME!r} needs the keyword attention_context in the model call")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention_context.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
        sliding_window,
    )
    return out.unsqueeze(0), None


@cache
def register_attention() -> str:
    """Register the function with transformers and return its name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)  # causality is ours
    return ATTENTION_NAME
