"""Paged attention on random steps against plain causal attention, per sequence."""

import random

import numpy as np
import pytest
import torch

from slime.engine.attention_state import ChunkPlan, PagedAttention, StepPlan, split_by_length
from slime.engine.kv_cache import KVMemory

pytestmark = pytest.mark.unit

PAGE, HEADS, GROUPS, DIM, VALUE_DIM = 4, 4, 2, 8, 6


def reference(q, k, v, scale, window):
    """[T, H, Dv]: the last T of the keys' positions query all keys before them."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    age = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (age < 0) | (age >= window if window is not None else age < 0)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed, window):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    memory = KVMemory([(GROUPS, DIM, VALUE_DIM)], 128, PAGE, torch.float64, torch.device("cpu"))
    free = rng.sample(range(128), 128)
    lengths = sorted((rng.randint(1, 40) for _ in range(seed)), reverse=True)
    spans = [(length - 1, length) for length in lengths]
    for _ in range(rng.randint(0 if lengths else 1, 5)):
        end = rng.randint(1, 40)
        spans.append((rng.choice([0, rng.randrange(end)]), end))
    keys, values, queries, tables, slots = [], [], [], [], []
    for start, end in spans:
        k, v = torch.randn(end, GROUPS, DIM).double(), torch.randn(end, GROUPS, VALUE_DIM).double()
        table = np.array([free.pop() for _ in range(-(-end // PAGE))])
        where = table[np.arange(end) // PAGE] * PAGE + np.arange(end) % PAGE
        memory.layers[0][0].view(-1, GROUPS, DIM)[where[:start]] = k[:start]
        memory.layers[0][1].view(-1, GROUPS, VALUE_DIM)[where[:start]] = v[:start]
        keys.append(k), values.append(v), tables.append(table), slots.append(where[start:])
        queries.append(torch.randn(end - start, HEADS, DIM).double())
    count = len(lengths)
    widest = max((len(t) for t in tables[:count]), default=0)
    decode_blocks = np.zeros((count, widest), dtype=np.int32)
    for row, table in zip(decode_blocks, tables, strict=False):
        row[: len(table)] = table
    chunks, offset = [], count
    for (start, end), table in list(zip(spans, tables, strict=True))[count:]:
        chunks.append(ChunkPlan(offset, end - start, end, np.pad(table, (0, 16))))
        offset += end - start
    plan = StepPlan(
        input_ids=np.zeros(offset, np.int64),
        positions=np.zeros(offset, np.int64),
        slots=np.concatenate(slots),
        decode_lengths=np.array(lengths, dtype=np.int64),
        decode_blocks=decode_blocks,
        chunks=chunks,
        logit_rows=np.zeros(0, np.int64),
    )
    new = [torch.cat([x[start:] for x, (start, _) in zip(xs, spans, strict=True)]) for xs in (keys, values)]
    out = PagedAttention(plan, memory).attend(0, torch.cat(queries), *new, 0.3, window)
    expected = torch.cat([reference(q, k, v, 0.3, window) for q, k, v in zip(queries, keys, values, strict=True)])
    assert (out - expected).abs().max() < 1e-12


def test_split_by_length():
    assert split_by_length([10, 10, 10], 0) == [(0, 3)]
    assert split_by_length([100, 99, 2, 1], 5) == [(0, 2), (2, 4)]
    assert split_by_length([100, 99, 2, 1], 1e9) == [(0, 4)]
