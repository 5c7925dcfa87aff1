"""The gated delta rule and the causal convolution before it, over sequences that are packed into a row.

Both keep something of earlier tokens, which must be of the same sequence: the convolution its last inputs, the rule a
matrix per head that starts at zero. Plain PyTorch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 64
EPS = 1e-6
"""Of the norms of queries and keys."""


class SequenceSlots:
    """Where the tokens of packed sequences stand in a longer row, with room between the sequences.

    Args:
        lengths: tokens of each sequence, in row order.
        starts: slot of each sequence's first token.
        size: slots.
    """

    def __init__(self, lengths: list[int], starts: list[int], size: int, device: torch.device):
        slots = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        self.slots = torch.cat(slots).to(device)
        self.size = size

    def spread(self, x_TX: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [slots, ...], zeros where no token stands."""
        return x_TX.new_zeros(self.size, *x_TX.shape[1:]).index_copy(0, self.slots, x_TX)

    def collect(self, x_SX: torch.Tensor) -> torch.Tensor:
        """[slots, ...] -> [T, ...]."""
        return x_SX.index_select(0, self.slots)


def causal_conv(x_TC: torch.Tensor, weight_CK: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Each channel's own causal convolution: y_t = sum_k w_k x_{t - K + 1 + k} within the sequence; [T, C]."""
    width = weight_CK.shape[1]
    starts, size = [], 0
    for length in lengths:
        size += width - 1  # zeros before the sequence
        starts.append(size)
        size += length
    spread = SequenceSlots(lengths, starts, size, x_TC.device)
    y_CS = F.conv1d(spread.spread(x_TC).t()[None], weight_CK[:, None], padding=width - 1, groups=len(weight_CK))[0]
    return spread.collect(y_CS.t())


def gated_delta_rule(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THV: torch.Tensor,
    log_decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    """Gated DeltaNet (arXiv 2412.06464, eq. 10), for each head from a state S [K, V] of zeros per sequence:

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t / sqrt(K)

    with queries and keys of length 1. Computed in fp32 (float64 for float64) by
    chunks of tokens (section 3.3): within a chunk by matrix products, for all chunks of the row at once; from chunk to
    chunk by the state, for all sequences at once.

    Args:
        log_decay_TH: g, <= 0.
        beta_TH: between 0 and 1.
        lengths: tokens of each sequence; their sum is T.

    Returns:
        o [T, H, V] in the dtype of the values.
    """
    dtype = torch.promote_types(value_THV.dtype, torch.float32)
    size = min(CHUNK, max(lengths))
    counts = [-(-length // size) for length in lengths]
    first = [sum(counts[:i]) for i in range(len(counts))]
    spread = SequenceSlots(lengths, [size * chunk for chunk in first], size * sum(counts), value_THV.device)

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """[T, H, ...] -> [N, H, C, ...]; what pads a chunk decays nothing and writes nothing."""
        return spread.spread(x.to(dtype)).unflatten(0, (-1, size)).transpose(1, 2)

    tensors = (query_THK, key_THK, value_THV, beta_TH, log_decay_TH)
    query, key, value, beta, log_decay = (chunks(x) for x in tensors)
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    decay_NHC = log_decay.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=value.device).triu(1)
    between_NHCC = (decay_NHC[..., :, None] - decay_NHC[..., None, :]).masked_fill(later, float("-inf")).exp()
    from_start, to_end = decay_NHC.exp()[..., None], (decay_NHC[..., -1:] - decay_NHC).exp()[..., None]
    # A token's value and the state that it reads, without what the chunk's tokens before it have written at its key.
    system = (key @ key.mT) * between_NHCC * beta[..., None]
    right = torch.cat([value, key * from_start], -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[-1], key.shape[-1]], -1)
    within, query, key = (query @ key.mT) * between_NHCC, query * from_start, key * to_end
    whole_N = decay_NHC[..., -1].exp()[..., None, None]

    # Sequences with more chunks first: those that still have one are always the first ones.
    order = sorted(range(len(counts)), key=lambda i: -counts[i])
    steps = [[first[i] + step for i in order if counts[i] > step] for step in range(max(counts))]
    rows = torch.tensor([row for now in steps for row in now])
    state = value.new_zeros(len(counts), *value.shape[1:2], key.shape[-1], value.shape[-1])
    out = []
    for index in rows.to(value.device).split([len(now) for now in steps]):
        state = state[: len(index)]
        new = written[index] - read[index] @ state
        out.append(query[index] @ state + within[index] @ new)
        state = state * whole_N[index] + key[index].mT @ new
    out_NHCV = torch.cat(out).index_select(0, rows.argsort().to(value.device))
    return spread.collect(out_NHCV.transpose(1, 2).flatten(0, 1)).to(value_THV.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
