"""The Triton kernels against the SDPA context, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1)."""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.engine import paged_kernels
from slime.engine.attention_state import ChunkPlan, PagedAttention, StepPlan
from slime.engine.kv_cache import KVMemory

pytestmark = pytest.mark.integration

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


def make_step(lengths, chunks, heads, groups, dim, value_dim, dtype, page=16, blocks=128):
    """A random step: KV memory with content, plan, and the row's q, k, v."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    memory = KVMemory([(groups, dim, value_dim)], blocks, page, dtype, DEVICE)
    for x in memory.layers[0]:
        x.normal_()
    free = list(rng.permutation(blocks))
    spans = [(n - 1, n) for n in lengths] + chunks
    tables = [np.array([free.pop() for _ in range(-(-end // page))], dtype=np.int32) for _, end in spans]
    where = [np.arange(start, end) for start, end in spans]
    slots = [t[at // page].astype(np.int64) * page + at % page for t, at in zip(tables, where, strict=True)]
    decode_blocks = np.zeros((len(lengths), max((len(t) for t in tables[: len(lengths)]), default=0)), np.int32)
    for row, table in zip(decode_blocks, tables, strict=False):
        row[: len(table)] = table
    plans, offset = [], len(lengths)
    for (start, end), table in zip(chunks, tables[len(lengths) :], strict=True):
        plans.append(ChunkPlan(offset, end - start, end, np.pad(table, (0, 4))))
        offset += end - start
    empty = np.zeros(0, np.int64)
    plan = StepPlan(
        np.zeros(offset), empty, np.concatenate(slots), np.array(lengths, np.int64), decode_blocks, plans, empty
    )
    row = [
        torch.randn(n, offset, d, device=DEVICE).to(dtype).transpose(0, 1)
        for n, d in ((heads, dim), (groups, dim), (groups, value_dim))
    ]
    return memory, plan, row


def table_of(plan):
    return [
        torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(DEVICE)
        for x in (plan.slots, plan.decode_lengths, plan.decode_blocks)
    ]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("heads, groups, dim, value_dim", [(4, 2, 32, 32), (3, 1, 16, 16), (4, 4, 24, 20)])
@pytest.mark.parametrize("split", [64, 512])
def test_decode_and_store(monkeypatch, window, heads, groups, dim, value_dim, split):
    monkeypatch.setattr(paged_kernels, "SPLIT", split)
    lengths = [200, 130, 64, 17, 1]
    memory, plan, (q, k, v) = make_step(lengths, [], heads, groups, dim, value_dim, torch.float32)
    expected = PagedAttention(plan, memory).attend(0, q, k, v, 0.2, window)
    content = [x.clone() for x in memory.layers[0]]
    slots, lens, table = table_of(plan)
    for x in memory.layers[0]:
        x.view(-1, *x.shape[2:])[slots.long()] = 0
    paged_kernels.store_kv(k, v, slots, *memory.layers[0])
    assert all(torch.equal(a, b) for a, b in zip(memory.layers[0], content, strict=True))
    splits = -(-200 // split)
    out = paged_kernels.paged_decode(q, *memory.layers[0], table, lens, splits, 0.2, window)
    assert (out - expected).abs().max() < (5e-3 if DEVICE.type == "cuda" else 1e-5)  # tf32 products on a GPU
    more = paged_kernels.paged_decode(q[1:2], *memory.layers[0], table[1:2], lens[1:2], splits * 2, 0.2, window)
    assert torch.equal(more[0], out[1]), "a result must depend on neither the batch nor the number of pieces"


@cuda
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("chunks", [[(0, 50), (0, 7)], [(32, 90), (0, 20), (16, 17)], []])
def test_a_mixed_step_equals_sdpa(window, dim, chunks):
    from slime.engine.attention_cuda import CudaPagedAttention

    memory, plan, row = make_step([200, 65, 3], chunks, 8, 2, dim, dim, torch.bfloat16)
    expected = PagedAttention(plan, memory).attend(0, *row, 0.1, window)
    out = CudaPagedAttention(plan, memory).attend(0, *row, 0.1, window)
    assert (out - expected).abs().max() < 0.03
