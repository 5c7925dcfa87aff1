"""Micro-batches through the pipeline: packed rows in, log-probs of response tokens and losses out at the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from slime.backends.megatron_utils.attention import packed_row
from slime.backends.megatron_utils.rotary import Rotary
from slime.training.batch import MicroBatch
from slime.training.context_parallel import ContextParallel, LocalRow, local_row
from slime.training.logprobs import token_log_probs
from slime.training.vocab_parallel import vocab_parallel_log_probs

Result = Callable[[int, MicroBatch, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, Any]]
"""(index of the micro-batch, the micro-batch, log_probs [R], entropy [R] or None) -> (loss, what to keep)."""


def padded(batch: MicroBatch, multiple: int, cp_size: int) -> MicroBatch:
    """`batch` with a trailing dummy sequence that makes each context-parallel rank's row a multiple of `multiple`."""
    if cp_size == 1:
        missing = -len(batch.tokens) % multiple
    else:
        if multiple % 2:
            multiple *= 2
        row = sum(2 * -(-length // (2 * cp_size)) for length in batch.sequence_lengths)
        missing = -row % multiple * cp_size
    if missing == 0:
        return batch
    positions = torch.arange(missing, device=batch.position_ids.device)
    end = (batch.cu_seqlens[-1:] + missing).to(batch.cu_seqlens.dtype)
    return replace(
        batch,
        tokens=torch.cat([batch.tokens, batch.tokens.new_zeros(missing)]),
        position_ids=torch.cat([batch.position_ids, positions]),
        cu_seqlens=torch.cat([batch.cu_seqlens, end]),
        max_seqlen=max(batch.max_seqlen, missing),
    )


class Forward:
    """Runs a model's chunks over micro-batches.

    Args:
        chunks: this rank's model chunks, wrapped for data parallelism or not.
        rotary: None if the attention layers rotate by themselves.
        pad_multiple: rows are padded to a multiple of it.
        chunk_size: rows whose logits exist at a time; None picks it by the vocabulary.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config,
        cp: ContextParallel,
        rotary: Rotary | None,
        temperature: float = 1.0,
        pad_multiple: int = 1,
        chunk_size: int | None = None,
    ):
        self.chunks = list(chunks)
        self.config = config
        self.cp = cp
        self.rotary = rotary
        self.temperature = temperature
        self.pad_multiple = pad_multiple * config.tensor_model_parallel_size
        self.chunk_size = chunk_size
        self._run = get_forward_backward_func()

    def __call__(
        self,
        batches: Sequence[MicroBatch],
        result: Result,
        *,
        backward: bool,
        with_entropy: bool = False,
        entropy_grad: bool = False,
    ) -> list[Any]:
        """What `result` keeps of each micro-batch, in order; empty except on the last pipeline stage.

        With `backward`, gradients of the sum of the losses are added up over micro-batches and, when all are done,
        over data- and context-parallel ranks.
        """

        def step(iterator, chunk):
            index, batch = next(iterator)
            row = local_row(padded(batch, self.pad_multiple, self.cp.size), self.cp)
            head = partial(self._head, row, with_entropy, entropy_grad)
            output = chunk(row.tokens, row.position_ids, self._packed(row), head)
            return output, partial(finish, index, batch, row)

        def finish(index, batch, row, output):
            log_probs_K, entropy_K = output
            entropy_R = None if entropy_K is None else row.gather(entropy_K)
            loss, kept = result(index, batch, row.gather(log_probs_K), entropy_R)
            # No token count: every loss is already its share of the whole step.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), kept

        return self._run(
            forward_step_func=step,
            data_iterator=[iter(enumerate(batches)) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=1,  # rows tell their lengths
            micro_batch_size=1,
            forward_only=not backward,
        )

    def _packed(self, row: LocalRow):
        tables = None if self.rotary is None else self.rotary.tables(row.position_ids, self.config.params_dtype)
        return packed_row(row, tables)

    def _head(self, row: LocalRow, with_entropy: bool, entropy_grad: bool, hidden_TD, weight_VD):
        hidden_KD = hidden_TD[row.rows]
        options = {
            "temperature": self.temperature,
            "with_entropy": with_entropy,
            "entropy_grad": entropy_grad,
            "chunk_size": self.chunk_size,
            "kept": row.kept,
        }
        if self.config.tensor_model_parallel_size == 1:
            return token_log_probs(hidden_KD, weight_VD, row.labels, **options)
        first = parallel_state.get_tensor_model_parallel_rank() * self._rows_per_rank()
        group = parallel_state.get_tensor_model_parallel_group()
        return vocab_parallel_log_probs(hidden_KD, weight_VD, row.labels, first, group, **options)

    def _rows_per_rank(self) -> int:
        last = self.chunks[-1]
        while hasattr(last, "module"):
            last = last.module
        return last.vocab_size // self.config.tensor_model_parallel_size
