"""Packed attention that hands long sequences to cuDNN, which is faster on Hopper and newer GPUs than flash kernels.

cuDNN builds a plan for every length, so lengths are rounded up; what is added stands behind the sequence, where
causality hides it. Short sequences, for which that would be much, stay packed. `--attn-implementation slime_cudnn`,
or `auto` where `prefers_cudnn` says so.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from slime.modeling.attention import PackedSequences
from slime.modeling.kept_attention import KeptAttention

logger = logging.getLogger(__name__)

MIN_LENGTH = 4096
STEP = 512
TOLERANCE = 2**-5
"""Largest error of the trial run, relative to the largest value: a few roundings of bf16."""


def prefers_cudnn(implementation: str, device: torch.device, dtype: torch.dtype, deterministic: bool) -> bool:
    """Whether `--attn-implementation` (auto, slime_varlen, slime_cudnn) means cuDNN for long sequences.

    auto takes it on Hopper and newer, in 16 bit, where equal runs need not be equal bit for bit: its backward adds in
    any order. Head sizes that cuDNN cannot do are found by a trial at the first long sequence.
    """
    if implementation != "auto":
        return implementation == "slime_cudnn"
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or deterministic:
        return False
    if torch.cuda.get_device_capability(device)[0] < 9 or not torch.backends.cudnn.is_available():
        return False
    logger.info("attention of sequences of %d tokens and more: cuDNN", MIN_LENGTH)
    return True


class LongSequences(PackedSequences):
    """`PackedSequences` whose sequences of at least `min_length` tokens are attended one by one.

    On CPU those go through the usual SDPA kernel.

    Args:
        keep, reentrant: layers are recomputed in backward, but their attention is not; see `KeptAttention`.
    """

    def __init__(
        self,
        lengths: list[int],
        device: torch.device | str = "cpu",
        min_length: int = MIN_LENGTH,
        step: int = STEP,
        keep: bool = False,
        reentrant: bool = False,
    ):
        super().__init__(lengths, device)
        self.step = step
        self.keep = keep
        self.reentrant = reentrant
        self._packed = partial(KeptAttention, reentrant=reentrant) if keep else PackedSequences
        self._kept: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._instead: dict[int, PackedSequences] = {}
        """For runs of a long sequence: what attends where cuDNN does not (sliding windows)."""
        self._runs: list[tuple[int, int, PackedSequences | None]] = []
        """(start, end, the short sequences there; None for a long one), in row order."""
        start, short = 0, []
        for length in [*lengths, None]:
            if length is not None and length < min_length:
                short.append(length)
                continue
            if short:
                self._runs.append((start, start + sum(short), self._packed(short, device)))
                start, short = start + sum(short), []
            if length is not None:
                self._runs.append((start, start + length, None))
                start += length

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        outputs = []
        for index, (start, end, packed) in enumerate(self._runs):
            q, k, v = (x[start:end] for x in (query_THD, key_TGD, value_TGD))
            if packed is None and (window is None or window >= end - start) and _usable(q, k, v):
                outputs.append(self._long((layer_idx, index), q, k, v, scale))
            else:
                if packed is None:
                    packed = self._instead.setdefault(index, self._packed([end - start], self.device))
                outputs.append(packed.attend(layer_idx, q, k, v, scale, window))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _long(self, key: tuple[int, int], q_LHD, k_LGD, v_LGD, scale: float) -> torch.Tensor:
        length = len(q_LHD)
        padding = -length % self.step
        q, k, v = (
            (F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x).transpose(0, 1)[None] for x in (q_LHD, k_LGD, v_LGD)
        )
        if not q.is_cuda:
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        else:
            result = self._kept.pop(key, None)
            if result is None:
                result = forward(q, k, v, scale)
                if self.keep and torch.is_grad_enabled() is not self.reentrant:
                    self._kept[key] = (result[0].detach(), *result[1:])
            out = _Cudnn.apply(q, k, v, scale, result)
        return out[0].transpose(0, 1)[:length]


@torch.no_grad()
def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[Any, ...]:
    """cuDNN's causal attention; what `backward` needs. Shapes: q [1, H, L, D], k [1, G, L, D], v [1, G, L, Dv].

    aten's operators themselves, with the log-sum-exp even where no gradient is wanted: the same plan gives the same
    bits in log-prob passes and in training, and the result can be kept when the layer is recomputed.
    """
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)


def backward(grad: torch.Tensor, q, k, v, scale: float, result: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v."""
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = result
    spans = (cum_q, cum_k, max_q, max_k)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, offset, None, *spans, 0.0, True, scale=scale
    )


class _Cudnn(torch.autograd.Function):
    """Attention whose forward was computed already."""

    @staticmethod
    def forward(ctx, q, k, v, scale, result):
        tensors = [item for item in result if isinstance(item, torch.Tensor)]
        ctx.scale, ctx.places = scale, [isinstance(item, torch.Tensor) for item in result]
        ctx.others = [item for item in result if not isinstance(item, torch.Tensor)]
        ctx.save_for_backward(q, k, v, *tensors)
        return result[0]

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *tensors = ctx.saved_tensors
        tensors, others = iter(tensors), iter(ctx.others)
        result = tuple(next(tensors) if tensor else next(others) for tensor in ctx.places)
        return *backward(grad, q, k, v, ctx.scale, result), None, None


def _usable(q_LHD: torch.Tensor, k_LGD: torch.Tensor, v_LGD: torch.Tensor) -> bool:
    if not q_LHD.is_cuda:
        return True
    if q_LHD.dtype not in (torch.bfloat16, torch.float16):
        return False
    shape = (q_LHD.shape[1], k_LGD.shape[1], q_LHD.shape[2], v_LGD.shape[2])
    return works(*shape, q_LHD.dtype, q_LHD.device)


@cache
@torch.no_grad()
def works(heads: int, groups: int, dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN does heads of this shape, forward and backward, and as float32 does; a log line if not."""
    random = torch.Generator(device).manual_seed(0)
    shapes = ((heads, dim), (groups, dim), (groups, value_dim), (heads, value_dim))
    q, k, v, grad = (
        torch.randn(1, STEP, n, d, device=device, generator=random).to(dtype).transpose(1, 2) for n, d in shapes
    )
    scale = dim**-0.5
    try:
        result = forward(q, k, v, scale)
        got = (result[0], *backward(grad, q, k, v, scale, result))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    else:
        pairs = zip(got, reference(q, k, v, grad, scale), strict=True)
        worst = max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)
        if worst <= TOLERANCE:
            return True
        reason = f"its results are off by {worst:.2g}"
    logger.warning(
        "cuDNN attention is not usable for %d heads of %d (%d key/value heads): %s; long sequences stay packed",
        heads,
        dim,
        groups,
        reason,
    )
    return False


def reference(q, k, v, grad, scale: float) -> tuple[torch.Tensor, ...]:
    """Causal attention and its gradients, written out in float32: (out, dq, dk, dv)."""
    repeat = q.shape[1] // k.shape[1]
    q, grad = q.float(), grad.float()
    k, v = (x.float().repeat_interleave(repeat, 1) for x in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    p = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    out = p @ v
    dp = grad @ v.transpose(-1, -2)
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(1, (-1, repeat)).sum(2) for x in (ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad))
    return out, ds @ k, dk, dv
