"""Micro-batches through the pipeline: packed rows in, what a role wants of response tokens and losses out at the last
stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from slime.backends.megatron_utils import heads
from slime.backends.megatron_utils.attention import packed_row
from slime.backends.megatron_utils.drafts import Drafting, draft_row
from slime.backends.megatron_utils.rotary import Rotary, RotaryTables
from slime.modeling.attention import PackedSequences
from slime.modeling.cudnn_attention import LongSequences
from slime.modeling.kept_attention import KeptAttention
from slime.training.batch import MicroBatch
from slime.training.context_parallel import ContextParallel, LocalRow, local_row

Result = Callable[..., tuple[torch.Tensor, Any]]
"""(index of the micro-batch, the micro-batch, what the head gives of all response tokens ...) -> (loss, what to keep).
"""
Around = Callable[[nn.Module, int, LocalRow, MicroBatch], AbstractContextManager]
"""(model chunk, index of the micro-batch, this rank's row, the padded micro-batch) -> context of the chunk's pass."""


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


class RowForward:
    """Runs a model's chunks over micro-batches.

    Args:
        chunks: this rank's model chunks, wrapped for data parallelism or not.
        rotary: None if the attention layers rotate by themselves.
        pad_multiple: rows are padded to a multiple of it.
        cudnn_attention: cuDNN attends to long sequences; see `LongSequences`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config,
        cp: ContextParallel,
        rotary: Rotary | None,
        pad_multiple: int = 1,
        cudnn_attention: bool = False,
    ):
        self.chunks = list(chunks)
        self.config = config
        self.cp = cp
        self.rotary = rotary
        self.pad_multiple = pad_multiple * config.tensor_model_parallel_size
        self.cudnn_attention = cudnn_attention
        self._run = get_forward_backward_func()

    def run(
        self,
        batches: Sequence[MicroBatch],
        head: Callable[[LocalRow, torch.Tensor, torch.Tensor], tuple],
        result: Result,
        *,
        backward: bool,
        drafts: heads.LogProbs | None = None,
        arounds: Sequence[Around] = (),
    ) -> list[Any]:
        """What `result` keeps of each micro-batch, in order; empty except on the last pipeline stage.

        With `backward`, gradients of the sum of the losses are added up over micro-batches and, when all are done,
        over data- and context-parallel ranks.

        Args:
            head: (row, hidden states [T, D], output matrix) -> tensors [K] of the row's response tokens, which become
                those [R] of the micro-batch; None, and tensors of another form, pass as they are.
            drafts: for what the draft layers predict [layers, R], which comes last.
        """

        sequences = self._sequences(recomputed=backward and self.config.recompute_granularity == "full")

        def step(iterator, chunk):
            index, batch = next(iterator)
            whole = padded(batch, self.pad_multiple, self.cp.size)
            row = local_row(whole, self.cp)
            wanted = partial(head, row)
            if drafts is not None:
                depths = range(1, self.config.mtp_num_layers + 1)
                wanted = Drafting(wanted, drafts, [draft_row(whole, row, depth) for depth in depths])
            packed = packed_row(row, self._tables(row), sequences)
            with ExitStack() as stack:
                for around in arounds:
                    stack.enter_context(around(chunk, index, row, whole))
                output = chunk(row.tokens, row.position_ids, packed, wanted)
            return output, partial(finish, index, batch, row)

        def finish(index, batch, row, output):
            gathered = (row.gather(x) if x is not None and x.ndim == 1 else x for x in output)
            loss, kept = result(index, batch, *gathered)
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

    def _tables(self, row: LocalRow) -> RotaryTables | None:
        return None if self.rotary is None else self.rotary.tables(row.position_ids, self.config.params_dtype)

    def _sequences(self, recomputed: bool) -> Callable[..., PackedSequences]:
        if self.cudnn_attention:
            return partial(LongSequences, keep=recomputed, reentrant=True)
        return partial(KeptAttention, reentrant=True) if recomputed else PackedSequences


class Forward(RowForward):
    """The policy's: log-probs of response tokens.

    Args:
        chunk_size: rows whose logits exist at a time; None picks it by the vocabulary.
    """

    def __init__(self, *args, temperature: float = 1.0, chunk_size: int | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = temperature
        self.chunk_size = chunk_size

    def __call__(
        self,
        batches: Sequence[MicroBatch],
        result: Result,
        *,
        backward: bool,
        with_entropy: bool = False,
        entropy_grad: bool = False,
        with_logits: bool = False,
        with_drafts: bool = False,
        arounds: Sequence[Around] = (),
    ) -> list[Any]:
        """As `run`; `result` gets log_probs [R], entropy [R] or None; with `with_logits` logits [1, T, V] of the
        rank's row; with `with_drafts` log-probs [layers, R] of the draft layers at temperature 1."""
        last = _unwrapped(self.chunks[-1])
        head = heads.LogProbs(
            rows_per_rank=last.vocab_size // self.config.tensor_model_parallel_size,
            vocab_size=last.real_vocab_size,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            with_logits=with_logits,
        )
        drafts = None
        if with_drafts:
            drafts = replace(head, temperature=1.0, with_entropy=False, entropy_grad=False, with_logits=False)
        return self.run(batches, head, result, backward=backward, drafts=drafts, arounds=arounds)


class ValueForward(RowForward):
    """The critic's: values of response tokens."""

    def __call__(self, batches: Sequence[MicroBatch], result: Result, *, backward: bool) -> list[Any]:
        """As `run`; `result` gets values [R]."""
        return self.run(batches, heads.values, result, backward=backward)


def _unwrapped(chunk: nn.Module) -> nn.Module:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
