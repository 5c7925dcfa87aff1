"""Runs the model on one batch: host arrays -> forward -> tokens and log-probs, one synchronisation per step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from slime.engine.attention_state import ChunkPlan, InvariantPagedAttention, PagedAttention, ShapeProbe, StepPlan
from slime.engine.decode_cache import DecodeCache
from slime.engine.forward import model_logits
from slime.engine.kv_cache import KVMemory
from slime.engine.lean_forward import LeanForward, lean_forward
from slime.engine.rows import RowTable
from slime.engine.sampler import SamplingBatch, kept_tokens, sample
from slime.engine.scheduler import Batch, Chunk
from slime.engine.sequence import Sequence
from slime.modeling.batch_invariant import make_batch_invariant

INPUT_LOGPROB_ROWS = 256


@dataclass
class StepResult:
    """What a step produced."""

    seqs: list[Sequence]
    """Sequences that got a token, with their rows, tokens and log-probs."""
    rows: np.ndarray
    tokens: np.ndarray
    logprobs: list[float]
    top_logprobs: dict[Sequence, list[tuple[float, int]]] = field(default_factory=dict)
    kept: dict[Sequence, tuple[list[int], float]] = field(default_factory=dict)
    """The tokens that were left to sample from, for the requests that ask."""


class ModelRunner:
    """A model, and what it needs to compute a `Batch`.

    Args:
        model: a Hugging Face causal LM loaded with slime's attention.
        device: where it lives.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device):
        self.model = model
        self.device = device
        self.rows: RowTable | None = None
        self.memory: KVMemory | None = None
        self.attention = PagedAttention
        self.graphs = None
        self.lean: LeanForward | None = None
        self.decode_cache: DecodeCache | None = None
        self._arranged: tuple[np.ndarray, Batch] | None = None
        """The scheduler's decoding rows of the last step, and that step's batch in the decode cache's order."""
        self._sampled: tuple[np.ndarray, SamplingBatch] | None = None
        """The rows that were sampled last, and how."""

    def attach(self, rows: RowTable, memory: KVMemory, cuda_graph: bool, batch_invariant: bool = False) -> None:
        """Set the running sequences' numbers and the KV memory, and choose how to attend to it."""
        self.rows = rows
        self.memory = memory
        if batch_invariant:
            make_batch_invariant(self.model)
            self.attention = InvariantPagedAttention
        elif self.device.type == "cpu" and memory.dtype == torch.float32:
            self.lean = lean_forward(self.model)
            self.decode_cache = DecodeCache(memory)
        if self.device.type == "cuda" and memory.dtype in (torch.bfloat16, torch.float16):
            from slime.engine.attention_cuda import CudaInvariantAttention, CudaPagedAttention
            from slime.engine.cuda_graphs import DecodeGraphs
            from slime.modeling.fuse import fuse
            from slime.modeling.triton_ops import rms_norm, rotary

            fuse(self.model, rms_norm, rotary)
            self.attention = CudaInvariantAttention if batch_invariant else CudaPagedAttention
            self.graphs = DecodeGraphs(self.model, memory) if cuda_graph else None

    def memory_moved(self) -> None:
        """Weights or KV are about to go, or are elsewhere now."""
        if self.graphs is not None:
            self.graphs.clear()
        if self.decode_cache is not None:
            self.decode_cache.clear()
        if self.lean is not None:
            self.lean.refresh()

    def weights_changed(self) -> None:
        """They have new values where they are."""
        if self.lean is not None:
            self.lean.refresh()

    @torch.inference_mode()
    def probe_layers(self) -> list[tuple[int, int, int]]:
        """(kv heads, key dim, value dim) of each attention layer."""
        probe = ShapeProbe()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        model_logits(self.model, token, token, probe, 0)
        missing = set(range(len(probe.shapes))) ^ set(probe.shapes)
        if not probe.shapes or missing:
            raise ValueError(f"{type(self.model).__name__} does not use the shared attention in every layer")
        return [probe.shapes[i] for i in range(len(probe.shapes))]

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        batch, cached = self._arrange(batch)
        plan, done = self._plan(batch)
        logits_NV = self._forward(plan, cached)
        seqs = batch.decode + [chunk.seq for chunk in done]
        rows = batch.decode_rows
        if done:
            rows = np.concatenate([rows, np.array([chunk.seq.row for chunk in done], np.int64)])
        result = StepResult(seqs, rows, np.zeros(0, np.int64), [])
        if seqs:
            sampling = self._sampling(rows)
            tokens, logprobs, all_logprobs = sample(logits_NV[: len(seqs)], sampling)
            result.top_logprobs = self._top_logprobs(seqs, rows, all_logprobs)
            result.tokens = tokens.cpu().numpy()
            result.logprobs = logprobs.tolist()
            for i in np.flatnonzero(self.rows.return_kept[rows]).tolist():
                kept = kept_tokens(all_logprobs[i], sampling, i)
                among = result.logprobs[i] - all_logprobs[i, kept].logsumexp(0).item()
                result.kept[seqs[i]] = kept.tolist(), among
        self._input_logprobs(batch.chunks, logits_NV[len(seqs) :])
        return result

    def _arrange(self, batch: Batch) -> tuple[Batch, bool]:
        """The batch with its decoding sequences in the decode cache's order, and whether they stand there."""
        rows, table = batch.decode_rows, self.rows
        if self.decode_cache is None or not len(rows):
            return batch, False
        # The scheduler makes new arrays when others decode.
        if self._arranged is not None and rows is self._arranged[0] and self.decode_cache.advance():
            return replace(self._arranged[1], chunks=batch.chunks), True
        order = self.decode_cache.arrange(table.ids[rows], table.length[rows], table.blocks[rows])
        if order is None:
            self._arranged = None
            return batch, False
        arranged = replace(batch, decode=[batch.decode[i] for i in order.tolist()], decode_rows=rows[order])
        self._arranged = (rows, arranged)
        return arranged, True

    def _plan(self, batch: Batch) -> tuple[StepPlan, list[Chunk]]:
        """The step as arrays, and the chunks that give a token."""
        rows, page = self.rows, self.memory.page_size
        lengths = rows.length[batch.decode_rows]
        last = lengths - 1
        ids, positions = [rows.last_token[batch.decode_rows]], [last]
        slots = [rows.blocks[batch.decode_rows, last // page] * page + last % page]
        chunks, sampled, wanted, offset = [], [], [], len(lengths)
        for chunk in batch.chunks:
            seq, count = chunk.seq, chunk.end - chunk.start
            where = np.arange(chunk.start, chunk.end)
            blocks = rows.blocks[seq.row]
            ids.append(np.array(seq.token_ids[chunk.start : chunk.end]))
            positions.append(where)
            slots.append(blocks[where // page].astype(np.int64) * page + where % page)
            chunks.append(ChunkPlan(offset, count, chunk.end, blocks))
            if chunk.samples:
                sampled.append((chunk, offset + count - 1))
            first, end = _input_logprob_span(chunk)
            wanted.append(np.arange(offset + first - chunk.start, offset + end - chunk.start))
            offset += count
        decode = np.arange(len(lengths))
        tails = np.array([row for _, row in sampled], dtype=np.int64)
        widest = -(-int(lengths.max()) // page) if len(lengths) else 0
        plan = StepPlan(
            input_ids=np.concatenate(ids),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots),
            decode_lengths=lengths,
            decode_blocks=rows.blocks[batch.decode_rows, :widest],
            chunks=chunks,
            logit_rows=np.concatenate([decode, tails, *wanted]),
        )
        return plan, [chunk for chunk, _ in sampled]

    def _forward(self, plan: StepPlan, cached: bool) -> torch.Tensor:
        """Logits [len(plan.logit_rows), V]; `cached`: the decode cache is ready for the step."""
        if self.graphs is not None and self.graphs.fits(plan):
            logits = self.graphs.run(plan)
            if logits is not None:
                return logits
        if cached:
            context = PagedAttention(plan, self.memory, self.decode_cache)
        else:
            context = self.attention(plan, self.memory)
        ids, positions, keep = (self._to_device(x) for x in (plan.input_ids, plan.positions, plan.logit_rows))
        if not len(keep):
            keep = keep.new_zeros(1)  # nothing is wanted, but the model must run
        if self.lean is not None:
            return self.lean(ids, positions, context, keep, int(plan.positions.max()) + 1)
        return model_logits(self.model, ids[None], positions[None], context, keep)

    def _to_device(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(self.device, non_blocking=True)

    def _sampling(self, rows: np.ndarray) -> SamplingBatch:
        """The rows' parameters; those that stay are looked up once for the same array of rows."""
        table = self.rows
        length = table.length[rows]
        early = np.flatnonzero(length < table.min_length[rows])
        stops = [(int(i), table.stop_ids[rows[i]]) for i in early]
        banned = [(i, ids[ids >= 0]) for i, ids in stops if (ids >= 0).any()]
        if self._sampled is not None and rows is self._sampled[0]:
            batch = self._sampled[1]
            batch.position, batch.banned = length, banned
            return batch
        batch = SamplingBatch(
            temperature=table.temperature[rows],
            greedy=table.greedy[rows],
            top_k=table.top_k[rows],
            top_p=table.top_p[rows],
            min_p=table.min_p[rows],
            seed=table.seed[rows],
            position=length,
            banned=banned,
        )
        self._sampled = (rows, batch)
        return batch

    def _top_logprobs(self, seqs, rows, logprobs_NV) -> dict[Sequence, list[tuple[float, int]]]:
        wanted = self.rows.top_logprobs[rows]
        most = int(wanted.max())
        if not most:
            return {}
        values, ids = logprobs_NV.topk(most, dim=-1)
        values, ids = values.tolist(), ids.tolist()
        return {
            seqs[i]: list(zip(values[i], ids[i], strict=True))[: wanted[i]] for i in np.flatnonzero(wanted).tolist()
        }

    def _input_logprobs(self, chunks: list[Chunk], logits_NV: torch.Tensor) -> None:
        """Append the log-probs of prompt tokens (temperature 1) to the sequences that asked for them."""
        offset = 0
        for chunk in chunks:
            first, end = _input_logprob_span(chunk)
            targets = torch.tensor(chunk.seq.token_ids[first + 1 : end + 1], device=self.device)
            for part in range(0, end - first, INPUT_LOGPROB_ROWS):
                some = targets[part : part + INPUT_LOGPROB_ROWS]
                logits = logits_NV[offset + part : offset + part + len(some)].float()
                chosen = torch.log_softmax(logits, -1).gather(1, some[:, None])
                chunk.seq.input_logprobs += chosen.squeeze(1).tolist()
            offset += end - first


def _input_logprob_span(chunk: Chunk) -> tuple[int, int]:
    """Positions [first, end) of the chunk whose logits give log-probs of prompt tokens still missing."""
    seq = chunk.seq
    if not seq.wants_input_logprobs:
        return chunk.start, chunk.start
    first = max(chunk.start, seq.logprob_start + len(seq.input_logprobs) - 1)
    return first, max(first, min(chunk.end, seq.prompt_len - 1))
