"""Continuous batching: who computes what in the next step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from slime.engine.kv_cache import BlockManager
from slime.engine.rows import RowTable
from slime.engine.sequence import Sequence

# Newcomers are few when this many decode for each of them.
MANY = 16


@dataclass
class Chunk:
    """Tokens [start, end) of a sequence whose KV is computed in this step."""

    seq: Sequence
    start: int
    end: int

    samples: bool
    """The chunk reaches the newest token, so its last position gives the next one."""


@dataclass
class Batch:
    """One step: a token for each sequence in `decode`, and pieces of prompts."""

    decode: list[Sequence]
    decode_rows: np.ndarray
    """Row of each sequence in `decode`."""
    chunks: list[Chunk]


class Scheduler:
    """Holds all unfinished sequences.

    Args:
        chunk_size: most prompt tokens per step.
        patience: most steps that newcomers wait for company while many others decode. For devices where a step with
            prompts takes much longer than one without.
    """

    def __init__(self, blocks: BlockManager, rows: RowTable, chunk_size: int, patience: int = 0):
        self.blocks = blocks
        self.rows = rows
        self.chunk_size = chunk_size
        self.patience = patience
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        """Longest first, so that sequences of similar length are neighbours."""
        self.decoding_rows = np.zeros(0, dtype=np.int64)
        self.num_admitted = 0
        self._held = 0
        self._admitted_at: dict[Sequence, int] = {}

    @property
    def running(self) -> list[Sequence]:
        return self.prefilling + self.decoding

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    def all_sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> Batch:
        """Choose the next step: all decoding sequences, then prompt pieces within the chunk size."""
        self._grow_decoding()
        chunks, budget = [], self.chunk_size
        for seq in self.prefilling:
            if budget == 0:
                break
            chunks.append(self._chunk(seq, budget))
            budget -= chunks[-1].end - chunks[-1].start
        if not self._hold():
            self._admit(chunks, budget)
        return Batch(list(self.decoding), self.decoding_rows, chunks)

    def computed(self, batch: Batch) -> None:
        """Account for the KV that a step wrote. Call it before the new tokens are appended."""
        for chunk in batch.chunks:
            chunk.seq.num_computed = chunk.end
            self.blocks.register(chunk.seq)
        page = self.blocks.page_size
        full = (self.rows.length[batch.decode_rows] % page == 0).nonzero()[0]
        for i in full.tolist():
            seq = batch.decode[i]
            seq.num_computed = len(seq.token_ids)
            self.blocks.register(seq)

    def start_decoding(self, seqs: list[Sequence]) -> None:
        """The prompts of these sequences are computed and their first new token is appended."""
        started = set(seqs)
        self.prefilling = [seq for seq in self.prefilling if seq not in started]
        self._set_decoding(self.decoding + seqs)

    def finish(self, seqs: list[Sequence]) -> None:
        """Drop sequences and give back what they hold."""
        gone = set(seqs)
        if any(seq.row < 0 for seq in seqs):
            self.waiting = deque(seq for seq in self.waiting if seq not in gone)
        self._leave(seqs)

    def retract(self, seqs: list[Sequence]) -> None:
        """Send running sequences back to the head of the queue; their KV will be computed again."""
        order = sorted(seqs, key=self._admitted_at.__getitem__)
        self._leave(seqs)
        for seq in reversed(order):
            seq.num_retractions += 1
            seq.cacheable = True
            self.waiting.appendleft(seq)

    def weights_changed(self, version: str) -> None:
        """New weights: nothing cached matches any more, and running sequences hold KV of mixed versions."""
        self.blocks.set_version(version)
        for seq in self.running:
            seq.cacheable = False

    def _leave(self, seqs: list[Sequence]) -> None:
        gone = {seq for seq in seqs if seq.row >= 0}
        if not gone:
            return
        self.prefilling = [seq for seq in self.prefilling if seq not in gone]
        self._set_decoding([seq for seq in self.decoding if seq not in gone])
        for seq in gone:
            self.blocks.release(seq)
            self.rows.release(seq)
            del self._admitted_at[seq]

    def _set_decoding(self, seqs: list[Sequence]) -> None:
        self.decoding = sorted(seqs, key=lambda seq: -len(seq.token_ids))
        self.decoding_rows = np.fromiter((seq.row for seq in self.decoding), dtype=np.int64, count=len(self.decoding))

    def _grow_decoding(self) -> None:
        """Give each decoding sequence room for its newest token; out of blocks, the latest arrival retracts."""
        rows, page = self.rows, self.blocks.page_size
        needy = (rows.length[self.decoding_rows] > rows.num_blocks[self.decoding_rows] * page).nonzero()[0]
        for seq in [self.decoding[i] for i in needy.tolist()]:
            while seq.row >= 0 and self.blocks.num_free == 0:
                self.retract([max(self.running, key=self._admitted_at.__getitem__)])
            if seq.row >= 0:
                block = self.blocks.allocate(1)
                seq.blocks += block
                rows.add_blocks(seq, block)

    def _hold(self) -> bool:
        """Whether newcomers, few beside those that decode, wait another step."""
        ready = min(len(self.waiting), len(self.rows.free))
        hold = not self.prefilling and 0 < ready * MANY < len(self.decoding) and self._held < self.patience
        self._held = self._held + 1 if hold else 0
        return hold

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Move waiting sequences into the batch while tokens, rows and blocks last."""
        # A prompt that another sequence is computing right now is worth waiting for: it will be in the cache.
        pending = {self._next_hash(seq) for seq in self.prefilling}
        skipped = []
        while self.waiting and budget > 0 and self.rows.free:
            seq = self.waiting.popleft()
            blocks = self._match(seq)
            key = self._next_hash(seq)
            if key is not None and key in pending:
                skipped.append(seq)
                continue
            fresh = self.blocks.blocks_for(len(seq.token_ids)) - len(blocks)
            idle = sum(self.blocks.refs[block] == 0 for block in blocks)
            if self.blocks.num_free - idle - fresh < len(self.decoding):
                self.waiting.appendleft(seq)
                break
            pending.add(key)
            for block in blocks:
                self.blocks.acquire(block)
            seq.blocks = blocks + self.blocks.allocate(fresh)
            seq.num_computed = len(blocks) * self.blocks.page_size
            if seq.num_retractions == 0:
                seq.cached_tokens = seq.num_computed
            self.rows.assign(seq)
            self.num_admitted += 1
            self._admitted_at[seq] = self.num_admitted
            self.prefilling.append(seq)
            chunks.append(self._chunk(seq, budget))
            budget -= chunks[-1].end - chunks[-1].start
        self.waiting.extendleft(reversed(skipped))
        if skipped:
            self._held = self.patience  # they have a prompt in the cache after this step

    @staticmethod
    def _chunk(seq: Sequence, budget: int) -> Chunk:
        """The sequence's next tokens without KV, at most `budget`."""
        end = min(len(seq.token_ids), seq.num_computed + budget)
        return Chunk(seq, seq.num_computed, end, samples=end == len(seq.token_ids))

    def _match(self, seq: Sequence) -> list[int]:
        limit = len(seq.token_ids) - 1
        if seq.wants_input_logprobs:
            limit = min(limit, seq.logprob_start + len(seq.input_logprobs) - 1)
        return self.blocks.match(seq, limit)

    def _next_hash(self, seq: Sequence) -> bytes | None:
        """Hash of the first full block of the sequence that is not in the cache; None when there is none."""
        index = len(seq.block_hashes)
        if not seq.cacheable or (index + 1) * self.blocks.page_size > len(seq.token_ids):
            return None
        return self.blocks.next_hash(seq, index)
