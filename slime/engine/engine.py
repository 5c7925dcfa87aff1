"""The engine: a thread that repeats schedule -> run -> postprocess, and does control calls between two steps.

All state belongs to that thread. Others hand it functions (`call`) and get results through futures and callbacks, so
nothing here needs a lock, and a weight update can never meet a running step.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slime.engine.detokenize import find_stop_string
from slime.engine.kv_cache import BlockManager, IntegrityError, KVMemory
from slime.engine.model_runner import ModelRunner, StepResult
from slime.engine.protocol import Request, RequestError, sampling_key
from slime.engine.rows import RowTable
from slime.engine.scheduler import Scheduler
from slime.engine.sequence import Sequence

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "in_place", "retract")
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
# Host memory for KV when no size is given.
CPU_KV_BYTES = 256 << 20
MAX_FAILED_STEPS = 3
# Steps that newcomers may wait where decode steps are captured and steps with prompts are not.
GRAPH_PATIENCE = 16


@dataclass
class EngineConfig:
    """Sizes of the engine; None is chosen from the model and the machine."""

    max_running_requests: int = 256
    max_total_tokens: int | None = None
    context_length: int | None = None
    page_size: int = 16
    chunked_prefill_size: int | None = None
    mem_fraction_static: float = 0.85
    random_seed: int = 0
    weights_cpu_backup: bool = False
    """Keep weights in host memory while they are released, so that they come back without a push."""
    disable_cuda_graph: bool = False
    batch_invariant: bool = False
    """Every token by the same operations in the same order as in a trainer's packed row; slower, no CUDA graphs."""


class Engine:
    """Continuous batching over one model.

    Args:
        model: from `load_causal_lm`.
        tokenizer: for stop strings, or None.
        eos_ids: tokens that end a sequence unless `ignore_eos`.
    """

    def __init__(self, model: torch.nn.Module, tokenizer, eos_ids: set[int], config: EngineConfig):
        from slime.engine.weights import WeightStore

        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.config = config
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        text_config = model.config.get_text_config()
        self.vocab_size = text_config.vocab_size
        self.weight_version = "default"
        self.weights = WeightStore(model, config.weights_cpu_backup)
        self.paused = False
        self.num_steps = 0
        self.num_generated = 0
        self.fatal: Exception | None = None
        self.on_exit: Callable[[], None] = lambda: None
        self._num_arrivals = 0
        self._failed_steps = 0
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._build(model, text_config)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def _build(self, model: torch.nn.Module, text_config) -> None:
        """KV memory, row table, scheduler and runner of the sizes the machine allows."""
        config, page = self.config, self.config.page_size
        runner = ModelRunner(model, self.device)
        shapes = runner.probe_layers()
        context = config.context_length or text_config.max_position_embeddings
        total = config.max_total_tokens or self._affordable_tokens(KVMemory.bytes_per_token(shapes, self.dtype))
        total = min(total, config.max_running_requests * (context + page))
        num_blocks = max(1, total // page)
        self.max_context = min(context, num_blocks * page)
        """Most tokens of one sequence, prompt and output."""
        self.memory = KVMemory(shapes, num_blocks, page, self.dtype, self.device)
        self.blocks = BlockManager(num_blocks, page)
        self.rows = RowTable(config.max_running_requests, -(-self.max_context // page))
        chunk_size = config.chunked_prefill_size or (8192 if self.device.type == "cuda" else 2048)
        cuda_graph = not (config.disable_cuda_graph or config.batch_invariant)
        graphs = self.device.type == "cuda" and cuda_graph
        self.scheduler = Scheduler(self.blocks, self.rows, chunk_size, GRAPH_PATIENCE if graphs else 0)
        self.blocks.set_version(self.weight_version)
        runner.attach(self.rows, self.memory, cuda_graph, config.batch_invariant)
        self.runner = runner

    def _affordable_tokens(self, bytes_per_token: int) -> int:
        if self.device.type != "cuda":
            return CPU_KV_BYTES // bytes_per_token
        free, total = torch.cuda.mem_get_info(self.device)
        room = free - int(total * (1 - self.config.mem_fraction_static))
        if room < bytes_per_token * self.config.page_size:
            raise ValueError(
                f"no GPU memory is left for the KV cache: {free / 2**30:.1f} GiB free of {total / 2**30:.1f} with "
                f"mem_fraction_static {self.config.mem_fraction_static}; raise it or free memory"
            )
        return room // bytes_per_token

    # Called from other threads.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step in progress."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, function: Callable[..., Any], *args: Any) -> Future:
        """Run `function(*args)` in the engine thread between two steps."""
        future: Future = Future()
        self._inbox.put((lambda: function(*args), future))
        return future

    # Called in the engine thread, through `call`.

    def submit(self, requests: list[Request], stream: bool, on_output: Callable[[Sequence], None]) -> list[Sequence]:
        """Queue requests.

        Raises:
            RequestError: memory is released, weights are stale, or a rid is in flight already.
        """
        self._check_serving()
        busy = {seq.rid for seq in self.scheduler.all_sequences()}
        seqs = []
        for request in requests:
            if request.rid in busy:
                raise RequestError(f"a request with rid {request.rid!r} is in flight already")
            busy.add(request.rid)
            self._num_arrivals += 1
            params = request.params
            seed = sampling_key(params, request.sample_index, self.config.random_seed, self._num_arrivals)
            eos = frozenset() if params.ignore_eos else self.eos_ids
            stop_ids = eos | frozenset(params.stop_token_ids)
            seqs.append(Sequence(request, seed, stop_ids, on_output, stream))
        for seq in seqs:
            self.scheduler.add(seq)
        return seqs

    def abort(self, rid: str | None, message: str = "Aborted") -> int:
        """End the requests that have this rid (or group rid), or all for None; what they have is returned to them."""
        victims = [
            seq for seq in self.scheduler.all_sequences() if rid is None or rid in (seq.rid, seq.request.group_rid)
        ]
        for seq in victims:
            seq.finish({"type": "abort", "message": message, "status_code": None, "err_type": None})
        self._drop(victims)
        return len(victims)

    def pause(self, mode: str) -> None:
        """Stop stepping. abort: end all requests; retract: give up their KV; in_place: keep everything as it is."""
        if mode not in PAUSE_MODES:
            raise RequestError(f"pause mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self.scheduler.retract(self.scheduler.running)
        self.paused = True

    def resume(self) -> None:
        if self.scheduler.has_work:
            self._check_serving()
        self.paused = False

    def flush_cache(self) -> None:
        """Forget cached prefixes. Running requests keep their own blocks."""
        self.blocks.flush()

    def set_version(self, version: str) -> None:
        """Name the weights as they are."""
        self.weight_version = version

    def weights_changed(self, version: str | None, flush_cache: bool) -> None:
        """Every weight update ends here: from now on no old KV can serve a new request."""
        if version is not None:
            self.weight_version = version
        self.scheduler.weights_changed(self.weight_version)
        self.runner.weights_changed()
        if flush_cache:
            self.flush_cache()

    def release_memory(self, tags: list[str]) -> None:
        """Give memory back to the machine.

        Raises:
            RequestError: an unknown tag, or requests hold KV.
        """
        self._check_tags(tags)
        if self.scheduler.num_running or (self.scheduler.has_work and not self.paused):
            count = len(self.scheduler.all_sequences())
            raise RequestError(f"{count} requests are running: abort them, wait, or pause with mode retract")
        if "kv_cache" in tags and self.memory.allocated:
            self.blocks.flush()
            self.memory.free()
        if "weights" in tags:
            self.weights.release()
        self.runner.memory_moved()
        self._empty_device_cache()

    def resume_memory(self, tags: list[str]) -> None:
        self._check_tags(tags)
        if "weights" in tags:
            self.weights.resume()
        if "kv_cache" in tags and not self.memory.allocated:
            self.memory.allocate()
        self.runner.memory_moved()

    def check_idle_integrity(self) -> None:
        """Raise IntegrityError when an idle engine holds blocks or rows, or its tables disagree."""
        if self.scheduler.has_work:
            return
        self.blocks.check_integrity()
        if len(self.rows.free) != self.rows.capacity:
            raise IntegrityError(f"{self.rows.capacity - len(self.rows.free)} rows are held while idle")

    def integrity(self) -> str:
        """`ok`, or what is wrong with the block tables."""
        try:
            self.check_idle_integrity()
            self.blocks.check_integrity(idle=False)
        except IntegrityError as error:
            return str(error)
        return "ok"

    def load(self) -> dict[str, Any]:
        """Numbers of the moment."""
        used = self.blocks.num_blocks - self.blocks.num_free
        return {
            "num_running_reqs": self.scheduler.num_running,
            "num_waiting_reqs": len(self.scheduler.waiting),
            "num_used_tokens": used * self.blocks.page_size,
            "max_total_num_tokens": self.blocks.num_blocks * self.blocks.page_size,
            "max_running_requests": self.rows.capacity,
            "num_steps": self.num_steps,
            "num_generated_tokens": self.num_generated,
            "paused": self.paused,
        }

    @property
    def not_serving(self) -> str | None:
        """Why no token can be computed now."""
        if not self.memory.allocated:
            return "the KV cache is released: POST /resume_memory_occupation first"
        return self.weights.unusable

    def _check_serving(self) -> None:
        reason = self.not_serving
        if reason:
            raise RequestError(reason, status=503)

    def _check_tags(self, tags: list[str]) -> None:
        unknown = set(tags) - set(MEMORY_TAGS)
        if unknown:
            raise RequestError(f"unknown memory tags {sorted(unknown)}; known: {', '.join(MEMORY_TAGS)}")

    def _empty_device_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # The loop.

    def _loop(self) -> None:
        while True:
            stepping = self.scheduler.has_work and not self.paused
            if not self._do_calls(wait=not stepping):
                return
            if self.scheduler.has_work and not self.paused:
                try:
                    self._step()
                    self._failed_steps = 0
                except Exception as error:
                    self._fail(error)
                    if self.fatal is not None:
                        self.on_exit()
                        return

    def _do_calls(self, wait: bool) -> bool:
        """Run what others asked for; False when asked to stop."""
        while wait or not self._inbox.empty():
            wait = False
            item = self._inbox.get()
            if item is None:
                return False
            function, future = item
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
        return True

    def _step(self) -> None:
        batch = self.scheduler.schedule()
        result = self.runner.run(batch)
        self.scheduler.computed(batch)
        self._postprocess(result)
        finished = [c.seq for c in batch.chunks if c.samples and c.seq.row >= 0 and c.seq.finish_reason is None]
        if finished:
            self.scheduler.start_decoding(finished)
        self.num_steps += 1

    def _postprocess(self, result: StepResult) -> None:
        """Append tokens, end what is finished, tell who listens."""
        seqs, rows, table = result.seqs, result.rows, self.rows
        if not seqs:
            return
        full = table.length[rows] >= table.max_length[rows]  # max_new_tokens 0: the prompt was all
        version = self.weight_version
        for seq, token, logprob, skip in zip(
            seqs, result.tokens.tolist(), result.logprobs, full.tolist(), strict=True
        ):
            if skip:
                continue
            if not seq.versions or seq.versions[-1][0] != version:
                seq.mark_version(version)
            seq.token_ids.append(token)
            seq.output_logprobs.append(logprob)
        for seq, top in result.top_logprobs.items():
            if len(seq.output_top_logprobs) < len(seq.output_logprobs):
                seq.output_top_logprobs.append(top)
        for seq, kept in result.kept.items():
            if len(seq.output_kept) < len(seq.output_logprobs):
                seq.output_kept.append(kept)
        self.num_generated += len(seqs) - int(full.sum())
        table.length[rows] += ~full
        table.last_token[rows] = result.tokens
        ended = full | (table.length[rows] >= table.max_length[rows])
        ended |= (table.stop_ids[rows] == result.tokens[:, None]).any(1)
        finished = []
        for i in np.flatnonzero(ended | table.watched[rows]).tolist():
            seq = seqs[i]
            reason = self._finish_reason(seq)
            if reason is not None:
                seq.finish(reason)
                finished.append(seq)
            elif seq.stream:
                seq.on_output(seq)
        if finished:
            self._drop(finished)

    def _finish_reason(self, seq: Sequence) -> dict[str, Any] | None:
        if seq.num_output:
            if seq.token_ids[-1] in seq.stop_ids:
                return {"type": "stop", "matched": seq.token_ids[-1]}
            if seq.params.stop and seq.num_output >= seq.params.min_new_tokens:
                matched = find_stop_string(self.tokenizer, seq)
                if matched is not None:
                    return {"type": "stop", "matched": matched}
        if len(seq.token_ids) >= seq.max_len:
            return {"type": "length", "length": seq.num_output}
        return None

    def _drop(self, seqs: list[Sequence]) -> None:
        """Give back what finished sequences hold and hand them to their owners."""
        self.scheduler.finish(seqs)
        for seq in seqs:
            seq.on_output(seq)
        if not self.scheduler.has_work:
            self.check_idle_integrity()

    def _fail(self, error: Exception) -> None:
        """A step broke: end all requests with the error and start clean; give up when it happens again and again."""
        logger.exception("engine step failed")
        self._failed_steps += 1
        victims = self.scheduler.all_sequences()
        message = f"{type(error).__name__}: {error}"
        for seq in victims:
            seq.finish({"type": "abort", "message": message, "status_code": 500, "err_type": type(error).__name__})
        self.scheduler.finish(victims)
        self.blocks.flush()
        for seq in victims:
            seq.on_output(seq)
        if self._failed_steps >= MAX_FAILED_STEPS or isinstance(error, (torch.AcceleratorError, IntegrityError)):
            self.fatal = error
