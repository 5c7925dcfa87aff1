"""Paged KV memory: which block belongs to whom, and which blocks can be shared.

A full block is known by a hash of all tokens up to its end. The chain starts from the weight version and a count
of weight changes, so KV of older weights can never match.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

import torch
import xxhash

from slime.engine.sequence import Sequence


class IntegrityError(RuntimeError):
    """The block tables contradict each other."""


class BlockManager:
    """Reference-counted blocks of `page_size` tokens with prefix sharing.

    A block without references keeps its content, and can be matched, until it is needed again (least recently
    released first).
    """

    def __init__(self, num_blocks: int, page_size: int):
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self.refs = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self.epoch = 0
        self.set_version("")

    @property
    def num_free(self) -> int:
        return len(self.free)

    def set_version(self, version: str) -> None:
        """Start a new hash chain: nothing cached so far matches any more."""
        self.epoch += 1
        self.root = xxhash.xxh3_128_digest(f"{self.epoch}:{version}".encode())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def flush(self) -> None:
        """Forget all cached content. Blocks in use stay with their sequences."""
        self.block_of.clear()
        self.hash_of = [None] * self.num_blocks

    def next_hash(self, seq: Sequence, index: int) -> bytes:
        """Chain hash of the sequence's block `index`, whose predecessors are in `block_hashes`."""
        parent = seq.block_hashes[index - 1] if index else self.root
        tokens = seq.token_ids[index * self.page_size : (index + 1) * self.page_size]
        return xxhash.xxh3_128_digest(parent + array("q", tokens).tobytes())

    def match(self, seq: Sequence, limit: int) -> list[int]:
        """Blocks that already hold the sequence's first tokens, at most `limit` tokens; fills `block_hashes`."""
        seq.block_hashes = []
        blocks = []
        for index in range(limit // self.page_size):
            key = self.next_hash(seq, index)
            block = self.block_of.get(key)
            if block is None:
                break
            seq.block_hashes.append(key)
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """Take a reference to a cached block."""
        if self.refs[block] == 0:
            del self.free[block]
        self.refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with new content. The caller has checked `num_free`."""
        out = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            key = self.hash_of[block]
            if key is not None:
                del self.block_of[key]
                self.hash_of[block] = None
            self.refs[block] = 1
            out.append(block)
        return out

    def register(self, seq: Sequence) -> None:
        """Make the sequence's newly computed full blocks available to others."""
        if not seq.cacheable:
            return
        for index in range(len(seq.block_hashes), seq.num_computed // self.page_size):
            key = self.next_hash(seq, index)
            seq.block_hashes.append(key)
            if key not in self.block_of:
                block = seq.blocks[index]
                self.block_of[key] = block
                self.hash_of[block] = key

    def release(self, seq: Sequence) -> None:
        """Give back all blocks of a sequence; the last ones are reused first."""
        for block in reversed(seq.blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None
                if self.hash_of[block] is None:
                    self.free.move_to_end(block, last=False)
        seq.blocks = []
        seq.block_hashes = []
        seq.num_computed = 0

    def check_integrity(self, idle: bool = True) -> None:
        """Raise IntegrityError when the tables contradict each other (`idle`: no sequence holds a block)."""
        if idle and (len(self.free) != self.num_blocks or any(self.refs)):
            held = [i for i, count in enumerate(self.refs) if count]
            raise IntegrityError(f"{len(held)} blocks are held while idle: {held[:8]}")
        if any((self.refs[i] == 0) != (i in self.free) for i in range(self.num_blocks)):
            raise IntegrityError("free list and reference counts disagree")
        hashed = {i: key for i, key in enumerate(self.hash_of) if key is not None}
        if {key: i for i, key in hashed.items()} != self.block_of:
            raise IntegrityError("hash table and block hashes disagree")


class KVMemory:
    """The tensors behind the blocks: per layer keys [blocks + 1, page, G, Dk] and values.

    Args:
        layer_shapes: (G, Dk, Dv) of each layer.
    """

    def __init__(
        self,
        layer_shapes: list[tuple[int, int, int]],
        num_blocks: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.layer_shapes = layer_shapes
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.allocate()

    @staticmethod
    def bytes_per_token(layer_shapes: list[tuple[int, int, int]], dtype: torch.dtype) -> int:
        return sum(heads * (key + value) for heads, key, value in layer_shapes) * dtype.itemsize

    @property
    def allocated(self) -> bool:
        return bool(self.layers)

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.layers)

    def allocate(self) -> None:
        def zeros(heads: int, dim: int) -> torch.Tensor:
            # One spare block takes what the padding of a captured step writes.
            shape = (self.num_blocks + 1, self.page_size, heads, dim)
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

        self.layers = [(zeros(heads, key), zeros(heads, value)) for heads, key, value in self.layer_shapes]

    def free(self) -> None:
        self.layers = []
