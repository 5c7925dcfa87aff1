"""Sampling and log-probs of a whole batch at once.

The random number of a token depends on (seed of the request, position) alone, and each row is computed from its own
logits alone, so a request gives the same tokens in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from slime.engine.protocol import TOP_K_ALL

CHUNK = 128
# Rows up to this width are summed in one level.
SHORT = 4096
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass
class SamplingBatch:
    """Sampling parameters of N rows."""

    temperature: np.ndarray
    greedy: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    """uint64."""
    position: np.ndarray
    """Position in the sequence of the token to sample."""
    banned: list[tuple[int, np.ndarray]]
    """(row, token ids) that may not be sampled yet."""

    @cached_property
    def scaled(self) -> bool:
        """Some temperature is not 1."""
        return bool((self.temperature != 1.0).any())

    @cached_property
    def num_greedy(self) -> int:
        return int(self.greedy.sum())

    @cached_property
    def filtered(self) -> np.ndarray:
        """[N]: rows that sample among some of the tokens."""
        return ((self.top_p < 1) | (self.top_k < TOP_K_ALL) | (self.min_p > 0)) & ~self.greedy


def keyed_uniform(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) from 64-bit seed and position: two rounds of SplitMix64 (Steele et al. 2014)."""
    x = seed.astype(np.uint64)
    with np.errstate(over="ignore"):
        for salt in (position.astype(np.uint64) * _GOLDEN, _GOLDEN):
            x = x + salt
            x = (x ^ (x >> np.uint64(30))) * _MIX[0]
            x = (x ^ (x >> np.uint64(27))) * _MIX[1]
            x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def pick(weights_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """Inverse CDF: index n of each row with probability proportional to weights[n]; [N] int64.

    Two levels, so that long rows cost one pass and sums stay exact enough in float64.
    """
    n, width = weights_NV.shape
    if width <= SHORT:
        return _pick_short(weights_NV, uniform_N[:, None])
    if width % CHUNK:
        weights_NV = torch.nn.functional.pad(weights_NV, (0, CHUNK - width % CHUNK))
    pieces = weights_NV.view(n, -1, CHUNK)
    sums = pieces.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform_N[:, None] * sums[:, -1:]
    piece = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(piece > 0, sums.gather(1, (piece - 1).clamp(min=0)), 0.0)
    inside = pieces.gather(1, piece[:, :, None].expand(-1, -1, CHUNK)).squeeze(1).to(torch.float64).cumsum(-1)
    # Rounding may put the target past the piece's own sum: stay on its last token with weight.
    rest = torch.minimum(target - before, torch.nextafter(inside[:, -1:], inside.new_zeros(())))
    return (piece * CHUNK + torch.searchsorted(inside, rest, right=True)).squeeze(1)


def _pick_short(weights_NV: torch.Tensor, uniform_N1: torch.Tensor) -> torch.Tensor:
    sums = weights_NV.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(sums, uniform_N1 * sums[:, -1:], right=True).squeeze(1)


def _pick_filtered(probs_NV, uniform_N, top_k_N, top_p_N, min_p_N) -> torch.Tensor:
    """Sample among the `top_k` most likely tokens, within the smallest set of mass `top_p`, above `min_p` x max."""
    ordered, ids, keep = _filter(probs_NV, top_k_N, top_p_N, min_p_N)
    return ids.gather(1, pick(ordered * keep, uniform_N)[:, None]).squeeze(1)


def _filter(probs_NV, top_k_N, top_p_N, min_p_N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Falling probabilities, their tokens, and which of them may be sampled; [N, V] each."""
    ordered, ids = probs_NV.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    keep = before < top_p_N[:, None]
    keep &= torch.arange(ordered.shape[1], device=probs_NV.device) < top_k_N[:, None]
    keep &= ordered >= min_p_N[:, None] * ordered[:, :1]
    keep[:, 0] = True
    return ordered, ids, keep


def kept_tokens(logprobs_V: torch.Tensor, batch: SamplingBatch, row: int) -> torch.Tensor:
    """The tokens that row `row` was sampled among, the most likely first; all of them without a filter. int64 [K]."""
    allowed = logprobs_V.clone()
    for banned_row, ids in batch.banned:
        if banned_row == row:
            allowed[torch.from_numpy(ids).to(allowed.device)] = -torch.inf
    if batch.greedy[row]:
        return allowed.argmax()[None]
    limits = (torch.from_numpy(x[row : row + 1]).to(allowed.device) for x in (batch.top_k, batch.top_p, batch.min_p))
    ordered, ids, keep = _filter(allowed.exp()[None], *limits)
    return ids[keep & (ordered > 0)]


def sample(logits_NV: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample a token per row.

    Args:
        logits_NV: as the model gives them.
    Returns:
        tokens int64 [N], their log-probs float32 [N], and all log-probs float32 [N, V]: the log-softmax of
        logits / temperature, whatever top-k, top-p, min-p or banned tokens leave to sample from.
    """
    device = logits_NV.device

    def tensor(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(device, non_blocking=True)

    scaled = logits_NV.float()
    if batch.scaled:
        scaled = scaled / tensor(batch.temperature)[:, None]
    logprobs = torch.log_softmax(scaled, -1)
    allowed = logprobs
    if batch.banned:
        allowed = logprobs.clone()
        for row, ids in batch.banned:
            allowed[row, tensor(ids)] = -torch.inf
    if batch.num_greedy == len(batch.greedy):
        tokens = allowed.argmax(-1)
    else:
        tokens = _sample_random(allowed, batch, tensor)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1), logprobs


def _sample_random(allowed: torch.Tensor, batch: SamplingBatch, tensor) -> torch.Tensor:
    uniform = tensor(keyed_uniform(batch.seed, batch.position))
    probs = allowed.exp()
    filtered = batch.filtered
    num_filtered = int(filtered.sum())
    if num_filtered == len(filtered):
        return _pick_filtered(probs, uniform, tensor(batch.top_k), tensor(batch.top_p), tensor(batch.min_p))
    tokens = pick(probs, uniform)
    if num_filtered:
        rows = np.flatnonzero(filtered)
        index = tensor(rows)
        limits = (tensor(x[rows]) for x in (batch.top_k, batch.top_p, batch.min_p))
        tokens[index] = _pick_filtered(probs[index], uniform[index], *limits)
    if batch.num_greedy:
        tokens = torch.where(tensor(batch.greedy), allowed.argmax(-1), tokens)
    return tokens
