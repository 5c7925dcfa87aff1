"""Decode steps as CUDA graphs: without them a step is bound by launching thousands of small kernels.

A graph is captured when its shape first occurs: batch size rounded up to a bucket, and pieces of the longest sequence.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from slime.engine.attention_cuda import DecodeInputs, splits_for
from slime.engine.attention_state import StepPlan
from slime.engine.forward import model_logits
from slime.engine.kv_cache import KVMemory
from slime.engine.paged_kernels import SPLIT

logger = logging.getLogger(__name__)

SMALL_BATCHES = (1, 2, 4, 8, 16, 32, 48, 64)
BATCH_STEP = 32
MAX_BATCH = 512


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    """int32 [B, 4 + N] on the device: id, position, slot, length, blocks."""
    staging: torch.Tensor
    """The same in pinned memory."""
    logits: torch.Tensor


class DecodeGraphs:
    """Captured decode steps by (batch bucket, splits).

    Args:
        model: called inside the capture.
        memory: its addresses are part of the graphs: `clear` when it or the weights move.
    """

    def __init__(self, model: torch.nn.Module, memory: KVMemory):
        self.model = model
        self.memory = memory
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.pool = None
        self.usable = True
        # One stream for all captures: cuBLAS keeps a workspace for each stream it has met.
        self.stream = torch.cuda.Stream()

    def clear(self) -> None:
        self.graphs = {}
        self.pool = None
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()

    def fits(self, plan: StepPlan) -> bool:
        """A step of decode tokens alone."""
        count = len(plan.decode_lengths)
        return self.usable and self.memory.allocated and not plan.chunks and 0 < count <= MAX_BATCH

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """Logits [B, V] of the step (overwritten by the next one), or None where the model cannot be captured."""
        count = len(plan.decode_lengths)
        key = (_bucket(count), splits_for(int(plan.decode_lengths[0])))
        if key not in self.graphs:
            try:
                self.graphs[key] = self._capture(*key)
            except torch.AcceleratorError as error:
                if "captur" not in str(error):
                    raise
                logger.warning("this model cannot be captured, decoding runs without CUDA graphs: %s", error)
                self.usable = False
                return None
        entry = self.graphs[key]
        rows = entry.staging.numpy()
        self._fill_padding(rows[count:])
        rows[:count, 0] = plan.input_ids
        rows[:count, 1] = plan.positions
        rows[:count, 2] = plan.slots
        rows[:count, 3] = plan.decode_lengths
        rows[:count, 4 : 4 + plan.decode_blocks.shape[1]] = plan.decode_blocks
        entry.inputs.copy_(entry.staging, non_blocking=True)
        entry.graph.replay()
        return entry.logits[:count]

    def _fill_padding(self, rows: np.ndarray) -> None:
        """Rows that compute something harmless into the spare block."""
        rows[:] = 0
        rows[:, 2] = self.memory.num_blocks * self.memory.page_size
        rows[:, 3] = 1
        rows[:, 4:] = self.memory.num_blocks

    def _capture(self, batch: int, splits: int) -> _Graph:
        width = 4 + -(-splits * SPLIT // self.memory.page_size)
        staging = torch.zeros(batch, width, dtype=torch.int32, pin_memory=True)
        self._fill_padding(staging.numpy())
        inputs = staging.to(self.memory.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._forward(inputs, splits)  # compiles kernels, sets up libraries
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            logits = self._forward(inputs, splits)
        self.pool = self.pool or graph.pool()
        return _Graph(graph, inputs, staging, logits)

    def _forward(self, inputs: torch.Tensor, splits: int) -> torch.Tensor:
        ids, positions, slots, lengths = (inputs[:, i] for i in range(4))
        context = DecodeInputs(self.memory, slots.contiguous(), lengths.contiguous(), inputs[:, 4:], splits)
        return model_logits(self.model, ids.long()[None], positions.long()[None], context, 0)


def _bucket(count: int) -> int:
    for size in SMALL_BATCHES:
        if count <= size:
            return size
    return -(-count // BATCH_STEP) * BATCH_STEP
