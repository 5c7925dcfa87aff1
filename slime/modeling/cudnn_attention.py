"""Packed attention that hands long sequences to cuDNN, which is faster on Hopper and newer GPUs than flash kernels.

cuDNN builds a plan for every length, so lengths are rounded up; what is added stands behind the sequence, where
causality hides it. Short sequences, for which that would be much, stay packed. `--attn-implementation slime_cudnn`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from slime.modeling.attention import PackedSequences

MIN_LENGTH = 4096
STEP = 512


class LongSequences(PackedSequences):
    """`PackedSequences` whose sequences of at least `min_length` tokens are attended one by one.

    On CPU those go through the usual SDPA kernel.
    """

    def __init__(
        self,
        lengths: list[int],
        device: torch.device | str = "cpu",
        min_length: int = MIN_LENGTH,
        step: int = STEP,
    ):
        super().__init__(lengths, device)
        self.step = step
        self._runs: list[tuple[int, int, PackedSequences | None]] = []
        """(start, end, the short sequences there; None for a long one), in row order."""
        start, short = 0, []
        for length in [*lengths, None]:
            if length is not None and length < min_length:
                short.append(length)
                continue
            if short:
                self._runs.append((start, start + sum(short), PackedSequences(short, device)))
                start, short = start + sum(short), []
            if length is not None:
                self._runs.append((start, start + length, None))
                start += length

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        outputs = []
        for start, end, packed in self._runs:
            q, k, v = (x[start:end] for x in (query_THD, key_TGD, value_TGD))
            if packed is None and (window is None or window >= end - start):
                outputs.append(self._long(q, k, v, scale))
            else:
                packed = packed or PackedSequences([end - start], self.device)
                outputs.append(packed.attend(layer_idx, q, k, v, scale, window))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _long(self, q_LHD: torch.Tensor, k_LGD: torch.Tensor, v_LGD: torch.Tensor, scale: float) -> torch.Tensor:
        length = len(q_LHD)
        padding = -length % self.step
        q, k, v = (
            (F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x).transpose(0, 1)[None] for x in (q_LHD, k_LGD, v_LGD)
        )
        with _kernel(q):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out[0].transpose(0, 1)[:length]


def _kernel(query: torch.Tensor) -> AbstractContextManager:
    usable = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if usable else nullcontext()
