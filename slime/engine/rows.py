"""Per-request numbers of the running batch as arrays, so that a step needs no Python loop over requests."""

from __future__ import annotations

import numpy as np

from slime.engine.protocol import GREEDY_EPS, TOP_K_ALL
from slime.engine.sequence import Sequence


class RowTable:
    """One row for each running sequence; rows are reused.

    Args:
        capacity: most sequences that run at once.
        max_blocks: most KV blocks of one sequence.
    """

    def __init__(self, capacity: int, max_blocks: int):
        self.capacity = capacity
        self.free = list(range(capacity - 1, -1, -1))
        self.ids = np.zeros(capacity, dtype=np.int64)
        """A number that no other sequence has."""
        self.num_assigned = 0
        self.blocks = np.zeros((capacity, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(capacity, dtype=np.int64)
        self.length = np.zeros(capacity, dtype=np.int64)
        """Tokens of the sequence, the newest (not yet in the cache) included."""
        self.last_token = np.zeros(capacity, dtype=np.int64)
        self.max_length = np.zeros(capacity, dtype=np.int64)
        self.min_length = np.zeros(capacity, dtype=np.int64)
        """End tokens are masked while the sequence is shorter than this."""
        self.stop_ids = np.full((capacity, 4), -1, dtype=np.int64)
        self.watched = np.zeros(capacity, dtype=bool)
        """Needs a look after every token: stop strings or streaming."""
        self.temperature = np.ones(capacity, dtype=np.float32)
        self.greedy = np.zeros(capacity, dtype=bool)
        self.top_k = np.full(capacity, TOP_K_ALL, dtype=np.int64)
        self.top_p = np.ones(capacity, dtype=np.float32)
        self.min_p = np.zeros(capacity, dtype=np.float32)
        self.seed = np.zeros(capacity, dtype=np.uint64)
        self.top_logprobs = np.zeros(capacity, dtype=np.int64)
        self.return_kept = np.zeros(capacity, dtype=bool)

    def assign(self, seq: Sequence) -> None:
        row = seq.row = self.free.pop()
        params = seq.params
        self.num_assigned += 1
        self.ids[row] = self.num_assigned
        self.num_blocks[row] = 0
        self.add_blocks(seq, seq.blocks)
        self.length[row] = len(seq.token_ids)
        self.last_token[row] = seq.token_ids[-1]
        self.max_length[row] = seq.max_len
        self.min_length[row] = seq.prompt_len + params.min_new_tokens
        if len(seq.stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((self.capacity, len(seq.stop_ids)), -1, dtype=np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(seq.stop_ids)] = list(seq.stop_ids)
        self.watched[row] = bool(params.stop) or seq.stream
        self.greedy[row] = params.greedy
        # Greedy log-probs are those of temperature 1, as in SGLang.
        self.temperature[row] = 1.0 if params.temperature < GREEDY_EPS else params.temperature
        self.top_k[row] = TOP_K_ALL if params.top_k == -1 else params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seq.seed
        self.top_logprobs[row] = seq.request.top_logprobs_num if seq.request.return_logprob else 0
        self.return_kept[row] = seq.request.return_kept_tokens

    def release(self, seq: Sequence) -> None:
        self.free.append(seq.row)
        seq.row = -1

    def add_blocks(self, seq: Sequence, blocks: list[int]) -> None:
        """Append to the row's block table."""
        row, have = seq.row, self.num_blocks[seq.row]
        self.blocks[row, have : have + len(blocks)] = blocks
        self.num_blocks[row] = have + len(blocks)
