"""The decode cache while sequences come, go and grow, against plain attention over each sequence."""

import random

import numpy as np
import pytest
import torch

from slime.engine.decode_cache import DecodeCache
from slime.engine.kv_cache import KVMemory
from tests.engine.test_attention_state import reference

pytestmark = pytest.mark.unit

PAGE, HEADS, GROUPS, DIM, VALUE_DIM = 4, 4, 2, 8, 6
SHAPES = [(GROUPS, DIM, VALUE_DIM), (1, DIM, DIM)]


class Paged:
    """Sequences in paged memory, as the engine keeps them: keys and values of layer 0 and 1 by token."""

    def __init__(self, blocks=4096):
        self.memory = KVMemory(SHAPES, blocks, PAGE, torch.float64, torch.device("cpu"))
        self.free = list(range(blocks))
        self.sequences = {}

    def add(self, key, length, most):
        table = [self.free.pop() for _ in range(-(-most // PAGE))]
        self.sequences[key] = (np.array(table, dtype=np.int32), [([], []) for _ in SHAPES])
        for _ in range(length - 1):
            self.append(key)

    def append(self, key):
        """The next token's key and value of each layer, stored."""
        table, layers = self.sequences[key]
        at = len(layers[0][0])
        slot = table[at // PAGE] * PAGE + at % PAGE
        new = []
        for (groups, dim, value_dim), stored, memory in zip(SHAPES, layers, self.memory.layers, strict=True):
            pair = torch.randn(groups, dim).double(), torch.randn(groups, value_dim).double()
            for x, keep, paged in zip(pair, stored, memory, strict=True):
                keep.append(x)
                paged.view(-1, *x.shape)[slot] = x
            new.append(pair)
        return new

    def remove(self, key):
        self.free += self.sequences.pop(key)[0].tolist()

    def length(self, key):
        return len(self.sequences[key][1][0][0])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(3))
def test_sequences_come_and_go(seed, window):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    paged, names = Paged(), iter(range(1, 1000))
    cache, running, steps_cached = DecodeCache(paged.memory), [], 0
    for step in range(100):
        for key in [key for key in running if rng.random() < 0.03 or paged.length(key) > 190]:
            running.remove(key)
            paged.remove(key)
        if step % 7 == 0 or not running:
            for _ in range(rng.randint(1, 4)):
                key = next(names)
                paged.add(key, rng.randint(1, 20), 200)
                running.append(key)
        rng.shuffle(running)
        lengths = np.array([paged.length(key) + 1 for key in running])
        tables = np.stack([paged.sequences[key][0] for key in running])
        order = cache.arrange(np.array(running), lengths, tables)
        if order is None:
            new = [paged.append(key) for key in running]
            continue
        steps_cached += 1
        assert sorted(order.tolist()) == list(range(len(running)))
        ordered = [running[i] for i in order]
        new = [paged.append(key) for key in ordered]
        for layer, (_, dim, _) in enumerate(SHAPES):
            q = torch.randn(HEADS, len(ordered), dim).double().transpose(0, 1)  # as some models lay it out
            k, v = (torch.stack([pairs[layer][i] for pairs in new]) for i in range(2))
            out = cache.attend(layer, q, k, v, 0.3, window)
            for i, key in enumerate(ordered):
                keys, values = (torch.stack(x) for x in paged.sequences[key][1][layer])
                expected = reference(q[i : i + 1], keys, values, 0.3, window)
                torch.testing.assert_close(out[i : i + 1], expected, rtol=1e-12, atol=1e-12)
    assert steps_cached > 30


def test_a_sequence_that_missed_a_step_is_read_again():
    torch.manual_seed(0)
    paged = Paged()
    for key in (1, 2):
        paged.add(key, 5, 40)
    cache = DecodeCache(paged.memory)
    for keys in ([1, 2], [1], [1, 2]):
        lengths = np.array([paged.length(key) + 1 for key in keys])
        order = cache.arrange(np.array(keys), lengths, np.stack([paged.sequences[key][0] for key in keys]))
        ordered = [keys[i] for i in order]
        new = [paged.append(key) for key in ordered]
        q = torch.randn(len(keys), HEADS, DIM).double()
        k, v = (torch.stack([pairs[0][i] for pairs in new]) for i in range(2))
        out = cache.attend(0, q, k, v, 0.3, None)
        for i, key in enumerate(ordered):
            stored = (torch.stack(x) for x in paged.sequences[key][1][0])
            torch.testing.assert_close(out[i : i + 1], reference(q[i : i + 1], *stored, 0.3, None))


def test_mostly_padding_or_too_large_is_refused():
    paged = Paged(blocks=4096)
    paged.add(1, 150, 200)
    for key in range(2, 20):
        paged.add(key, 2, 200)
    cache = DecodeCache(paged.memory)

    def arrange(keys):
        lengths = np.array([paged.length(key) + 1 for key in keys])
        return cache.arrange(np.array(keys), lengths, np.stack([paged.sequences[key][0] for key in keys]))

    assert arrange([1, 2]) is not None
    assert arrange(list(range(1, 20))) is None  # 19 x 151 columns for 204 tokens
    small = Paged(blocks=60)
    small.add(1, 150, 200)
    cache = DecodeCache(small.memory)
    assert cache.arrange(np.array([1]), np.array([151]), small.sequences[1][0][None]) is not None
    small = Paged(blocks=50)
    small.add(1, 150, 200)
    cache = DecodeCache(small.memory)
    assert cache.arrange(np.array([1]), np.array([151]), small.sequences[1][0][None]) is None
