"""Packed attention for training with recomputation: layers are computed again in backward, their attention is not.

Attention is the one part of a layer whose cost grows with the square of the length, and its output is as small as a
hidden state. So the output (and the log-sum-exp that the kernel's backward needs) is kept from the first forward and
handed out when the layer is recomputed.
"""

from __future__ import annotations

import torch

from slime.modeling.attention import PackedSequences, padded_heads


class KeptAttention(PackedSequences):
    """AttentionContext of one forward and backward pass in which layers run twice, first in order.

    Where the fused kernel does not run (CPU, fp32) it is `PackedSequences`.

    Args:
        reentrant: the first run of a layer is without gradients (torch's and Megatron's reentrant checkpoints), and a
            layer that runs with gradients at once is not recomputed. Otherwise both runs are with gradients, and
            passes without are not for training.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu", reentrant: bool = False):
        super().__init__(lengths, device)
        self.reentrant = reentrant
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        fused = query_THD.is_cuda and query_THD.dtype in (torch.bfloat16, torch.float16)
        if not fused or not (torch.is_grad_enabled() or self.reentrant):
            return super().attend(layer_idx, query_THD, key_TGD, value_TGD, scale, window)
        value_dim = value_TGD.shape[-1]
        heads = padded_heads(query_THD, key_TGD, value_TGD)
        kept = self._kept.pop(layer_idx, None)
        out, lse = _FlashVarlen.apply(*heads, self.cu_seqlens, self.max_seqlen, scale, window, kept)
        if kept is None and torch.is_grad_enabled() is not self.reentrant:
            self._kept[layer_idx] = (out.detach(), lse)
        return out[..., :value_dim]


class _FlashVarlen(torch.autograd.Function):
    """Causal flash attention whose forward takes a result that is there already.

    aten's operators themselves: `torch.nn.attention.varlen` does not let forward and backward be called apart.
    """

    @staticmethod
    def forward(ctx, query, key, value, cu_seqlens, max_seqlen, scale, window, kept):
        causal = window is None
        spans = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        ctx.options = {
            "scale": scale,
            "window_size_left": -1 if causal else window - 1,
            "window_size_right": 0,
        }
        ctx.max_seqlen, ctx.causal = max_seqlen, causal
        if kept is None:
            kept = torch.ops.aten._flash_attention_forward(
                query, key, value, *spans, 0.0, causal, False, **ctx.options
            )[:2]
        out, lse = kept
        ctx.save_for_backward(query, key, value, out, lse, cu_seqlens)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad, _):
        query, key, value, out, lse, cu_seqlens = ctx.saved_tensors
        spans = (cu_seqlens, cu_seqlens, ctx.max_seqlen, ctx.max_seqlen)
        # Without dropout the random state is not looked at.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            query,
            key,
            value,
            out,
            lse,
            *spans,
            0.0,
            ctx.causal,
            state,
            torch.empty(0, device=query.device),
            **ctx.options,
        )
        return *grads, None, None, None, None, None
