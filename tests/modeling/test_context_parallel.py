"""Attention over ranks equals attention on one, values and gradients, for grouped heads and sliding windows."""

import pytest
import torch
import torch.distributed as dist

from slime.modeling.attention import PackedSequences
from slime.modeling.context_parallel import ShardedSequences, kv_repeat
from slime.training.context_parallel import ContextParallel, local_spans
from tests.backends.trainers import run_world

# Even and odd lengths, one shorter than the number of chunks.
LENGTHS = [13, 3, 32, 1]
HEADS = [(8, 8), (8, 2), (4, 1)]


def inputs(heads, groups):
    generator = torch.Generator().manual_seed(heads + groups)

    def make(n, dim):
        return torch.randn(sum(LENGTHS), n, dim, generator=generator, dtype=torch.float64)

    # Values are narrower than keys, as in latent attention.
    return make(heads, 8), make(groups, 8), make(groups, 6), make(heads, 6)


def shard(x, cp):
    """A rank's rows of the padded sequences."""
    parts = []
    for piece in x.split(LENGTHS):
        spans = local_spans(len(piece), cp)
        padded = torch.cat([piece, piece.new_zeros(spans[1][1] * cp.size + len(piece), *piece.shape[1:])])
        parts += [padded[start:end] for start, end in spans]
    return torch.cat(parts)


def attend(context, q, k, v, weights, window):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = context.attend(0, q, k, v, 0.3, window)
    (out * weights).sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


def on_ranks(rank, world_size, port):
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    cp = ContextParallel.of(dist.group.WORLD)
    lengths = [sum(end - start for start, end in local_spans(n, cp)) for n in LENGTHS]
    out = {}
    for heads, groups in HEADS:
        tensors = [shard(x, cp) for x in inputs(heads, groups)]
        for window in (None, 5):
            out[heads, groups, window] = attend(ShardedSequences(lengths, cp.group), *tensors, window)
    dist.destroy_process_group()
    return out


@pytest.mark.integration
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_equal_one(size):
    results = run_world(on_ranks, size)
    for heads, groups in HEADS:
        tensors = inputs(heads, groups)
        for window in (None, 5):
            expected = attend(PackedSequences(LENGTHS), *tensors, window)
            for rank, result in enumerate(results):
                for got, want in zip(result[heads, groups, window], expected, strict=True):
                    torch.testing.assert_close(
                        got * real(size, rank), shard(want, ContextParallel(rank, size)), rtol=1e-12, atol=1e-12
                    )


def real(size, rank):
    """1 for tokens, 0 for padding."""
    return shard(torch.ones(sum(LENGTHS), 1, 1, dtype=torch.float64), ContextParallel(rank, size))


@pytest.mark.unit
def test_heads_that_cannot_be_shared():
    assert kv_repeat(16, 8, 2) == 1 and kv_repeat(16, 8, 16) == 2 and kv_repeat(12, 2, 4) == 2
    with pytest.raises(ValueError, match="3 context-parallel ranks cannot share 16 attention heads"):
        kv_repeat(16, 8, 3)
