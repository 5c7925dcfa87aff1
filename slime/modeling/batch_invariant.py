"""A model whose numbers for a token depend on nothing but its sequence: not on batch, packing, chunks or caches.

The usual kernels choose their order of summation by the shape of the whole input, so the engine (a few tokens at a
time, from a cache) and the trainer (whole packed rows) differ in the last bits. Here every sum has an order that is
fixed per row: matrix products of blocks of a fixed number of rows, attention over blocks of keys counted from the
start of the sequence, rotary tables computed once. What remains (norms, activations, residuals, log-softmax) is
computed row by row anyway. Only forward passes are fixed this way; gradients come from the usual kernels.
"""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from slime.modeling.attention import PackedSequences

# Rows of one matrix product.
ROWS = 32
BLOCK_Q, BLOCK_K = 16, 32


def make_batch_invariant(model: nn.Module) -> None:
    """Change the linear layers and rotary embeddings of this model (dense; weights are not touched).

    Raises:
        ValueError: the model has expert layers, whose grouped products are not covered.
    """
    for module in model.modules():
        if hasattr(module, "experts"):
            raise ValueError(f"{type(model).__name__} has expert layers: only dense models can be batch-invariant")
        if isinstance(module, nn.Linear):
            module.forward = MethodType(_linear_forward, module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = _RotaryTable(module.forward, model.config.get_text_config().max_position_embeddings)


def _linear_forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return _Linear.apply(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        out = matmul(x.reshape(-1, x.shape[-1]), weight)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_rows, x_rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = (grad_rows @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = grad_rows.t() @ x_rows if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad_rows.sum(0) if ctx.needs_input_grad[2] else None


def matmul(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """x @ weight^T, each row by the same instructions wherever it stands."""
    if x_TK.is_cuda:
        from slime.modeling.invariant_matmul import invariant_matmul

        return invariant_matmul(x_TK, weight_NK)
    tokens = len(x_TK)
    whole = -(-tokens // ROWS) * ROWS
    x_TK = F.pad(x_TK, (0, 0, 0, whole - tokens)).contiguous()
    out = x_TK.new_empty(whole, len(weight_NK))
    for start in range(0, whole, ROWS):
        rows = slice(start, start + ROWS)
        torch.mm(x_TK[rows], weight_NK.t(), out=out[rows])
    return out[:tokens]


class _RotaryTable:
    """cos and sin of a rotary embedding for all positions, computed in one call."""

    def __init__(self, original, size: int):
        self.original = original
        self.size = size
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, ...]] = {}

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, ...]:
        key = (x.dtype, x.device)
        if key not in self._tables:
            everywhere = torch.arange(self.size, device=x.device)[None]
            self._tables[key] = tuple(table[0] for table in self.original(x, everywhere, *args, **kwargs))
        # Padding may stand behind the last position.
        where = position_ids.clamp(max=self.size - 1)
        return tuple(table[where] for table in self._tables[key])


def invariant_attention(
    q_BQHD: torch.Tensor,
    k_BKGD: torch.Tensor,
    v_BKGD: torch.Tensor,
    positions_BQ: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention [B, Q, H, Dv] of queries at `positions_BQ` to the keys from position 0 on.

    Keys behind a query's position are not seen, however many there are. A query's result depends on itself and the
    keys it sees alone: it is summed up over blocks of `BLOCK_K` keys in order.
    """
    dtype = torch.promote_types(q_BQHD.dtype, torch.float32)
    size, queries, heads, _ = q_BQHD.shape
    keys, repeat = k_BKGD.shape[1], heads // k_BKGD.shape[2]
    num_q, num_k = -(-queries // BLOCK_Q), -(-keys // BLOCK_K)

    q = F.pad(q_BQHD.to(dtype), (0, 0, 0, 0, 0, num_q * BLOCK_Q - queries)).unflatten(1, (num_q, BLOCK_Q))
    q = q.permute(0, 3, 1, 2, 4).reshape(size * heads * num_q, BLOCK_Q, -1)
    positions = F.pad(positions_BQ, (0, num_q * BLOCK_Q - queries)).view(size, 1, num_q, BLOCK_Q, 1)

    def blocks(x_BKGD: torch.Tensor) -> torch.Tensor:
        """[blocks of keys, B, H, BLOCK_K, D]"""
        x = F.pad(x_BKGD.to(dtype), (0, 0, 0, 0, 0, num_k * BLOCK_K - keys)).unflatten(1, (num_k, BLOCK_K))
        return x.permute(1, 0, 3, 2, 4).repeat_interleave(repeat, 2)

    def per_query(x_BHXY: torch.Tensor) -> torch.Tensor:
        x = x_BHXY[:, :, None].expand(-1, -1, num_q, -1, -1)
        return x.reshape(size * heads * num_q, *x_BHXY.shape[2:])

    scores = []
    for index, block in enumerate(blocks(k_BKGD)):
        score = torch.bmm(q, per_query(block.transpose(-1, -2)))
        score = score.view(size, heads, num_q, BLOCK_Q, BLOCK_K) * scale
        age = positions - (index * BLOCK_K + torch.arange(BLOCK_K, device=q.device))
        hidden = age < 0 if window is None else (age < 0) | (age >= window)
        scores.append(score.masked_fill(hidden, -torch.inf))
    highest = torch.stack([score.amax(-1, keepdim=True) for score in scores]).amax(0)
    total = torch.zeros_like(highest)
    out = q.new_zeros(len(q), BLOCK_Q, v_BKGD.shape[-1])
    for score, block in zip(scores, blocks(v_BKGD), strict=True):
        weight = (score - highest).exp()
        total = total + weight.sum(-1, keepdim=True)
        out = out + torch.bmm(weight.view(-1, BLOCK_Q, BLOCK_K), per_query(block))
    out = out.view(size, heads, num_q, BLOCK_Q, -1) / total
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :queries].to(q_BQHD.dtype)


class InvariantSequences(PackedSequences):
    """`PackedSequences` with the invariant forward. On a GPU the variable-length kernel is invariant as it is."""

    def _padded(self, query_THD, key_TGD, value_TGD, scale, window):
        return _PackedAttention.apply(query_THD, key_TGD, value_TGD, self, scale, window)

    def forward_rows(self, query_THD, key_TGD, value_TGD, scale, window) -> torch.Tensor:
        shapes, rows, sources = self._blocks
        outputs = []
        for shape, block in zip(shapes, rows.split([size * length for size, length in shapes]), strict=True):
            rows_BL = block.view(shape)
            q, k, v = (x[rows_BL] for x in (query_THD, key_TGD, value_TGD))
            positions = torch.arange(rows_BL.shape[1], device=q.device).expand(rows_BL.shape)
            outputs.append(invariant_attention(q, k, v, positions, scale, window).flatten(0, 1))
        return torch.cat(outputs).index_select(0, sources)

    def usual(self, query_THD, key_TGD, value_TGD, scale, window) -> torch.Tensor:
        return super()._padded(query_THD, key_TGD, value_TGD, scale, window)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sequences, scale, window):
        ctx.save_for_backward(query, key, value)
        ctx.call = (sequences, scale, window)
        return sequences.forward_rows(query, key, value, scale, window)

    @staticmethod
    def backward(ctx, grad):
        sequences, scale, window = ctx.call
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = sequences.usual(*inputs, scale, window)
        return *torch.autograd.grad(out, inputs, grad), None, None, None


def invariant_log_probs(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, temperature: float, with_entropy: bool, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of the labels and entropy, by the operations with which the embedded engine samples."""
    scaled = logits_RV.float()
    if temperature != 1.0:
        scaled = scaled / torch.tensor(temperature, dtype=scaled.dtype, device=scaled.device)
    log_probs_RV = torch.log_softmax(scaled, -1)
    entropy = None
    if with_entropy:
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = torch.special.entr(log_probs_RV.exp()).sum(-1)
    return log_probs_RV.gather(-1, labels_R[:, None]).squeeze(-1), entropy
